//! A trainer of a program: receives parameters, runs its part, and sends gradients in each step.

use std::collections::BTreeMap;
use std::sync::Arc;

use pserver_core::config::{Mode, OptimizerSettings};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::ProgramEnd;
use pserver_program::executor::{Executor, ExecutorSnapshot, ProgramLink, RunStatus};
use pserver_program::transpile::ProgramPart;
use pserver_program::{Graph, Node, OpKind, ProgramPeer, Tensor, VariableIndex, VariableValue};

use super::arithmetic::executor_parts;
use super::data::TakeBytes;
use super::held_client::HeldClient;
use super::hosted_programs::{HostedEnds, ServerProgram};
use super::initial_values;
use super::queues::{QueueEnds, ServerQueue};
use super::server_contents::ServerContents;
use super::server_parameters::{ServerParameter, nodes};
use super::table_rows::{check_tables, fetch_all, pass_all, pull_asked};
use super::totals::{push_totals, receive_shares, shares};
use pserver_client::{Client, DestinationSlice, GradientRows, GradientSlice};

/// A trainer that runs its part of a program. Each step needs its data ([`feed`](Self::feed)), then
/// [`step`](Self::step).
pub struct Trainer<'c> {
    client: HeldClient<'c>,
    executor: Executor,
    parameters: Vec<ServerParameter>,
    /// By server parameter: the variable that receives it, if the part does.
    received: Vec<Option<VariableIndex>>,
    /// By server parameter: memory for the next value; none while the executor has it. A dense parameter has two
    /// tensors, so that the next value arrives while the current one is read. A table has none.
    values: Vec<Option<Tensor>>,
    graph: Arc<Graph>,
    /// Whether all dense values were received since the last step.
    is_fresh: bool,
    /// The trainer's ends of queues to other trainers.
    queues: QueueEnds,
    /// The programs that servers host.
    programs: Vec<ServerProgram>,
    /// The trainer's ends of them.
    hosted: HostedEnds,
    phase: StepPhase,
}

/// Position in a step.
enum StepPhase {
    /// Between two steps.
    Idle,
    /// The step has begun and is not computed.
    UnderWay(StepUnderWay),
    /// The step is computed, and not all of its gradients are sent.
    Unsent(UnsentGradients),
    /// No step can follow, for this reason.
    Broken(String),
}

/// Collects the values that a step sends, by channel.
#[derive(Default)]
struct Outbox {
    sent: BTreeMap<String, VariableValue>,
}

impl ProgramLink for Outbox {
    fn has_room(&mut self, _: ProgramPeer, channel: &str) -> bool {
        !self.sent.contains_key(channel)
    }

    fn send(&mut self, _: ProgramPeer, channel: &str, value: &VariableValue) {
        self.sent.insert(channel.to_owned(), value.clone());
    }
}

/// A step that has begun.
struct StepUnderWay {
    /// The state before; none where other trainers take part in the step.
    before: Option<ExecutorSnapshot>,
    outbox: Outbox,
}

/// Gradients of a computed step that are not all sent.
struct UnsentGradients {
    /// By channel.
    gradients: BTreeMap<String, VariableValue>,
    /// The kinds of gradients that servers have.
    pushed: PushStage,
}

/// The gradients of a step that servers have: a push that succeeded is not repeated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PushStage {
    Nothing,
    Rows,
    Dense,
    Totals,
}

/// Offers to initialise a job from the parts of servers, and initialises it when this trainer is elected. On return the
/// job is initialised, and its mode and merge are those of the parts.
///
/// # Errors
/// When a part has ops or initial values that servers do not support; when the job has another number of trainers, or
/// was initialised with another mode or merge; when a queue's items have a batch, which only [`initialise_for_batch`]
/// knows; when no trainer initialises before the deadline.
pub fn initialise(client: &Client, parts: &[ProgramPart]) -> Result<(), Failure> {
    initialise_shared(client, parts, None, &[])
}

/// [`initialise`] for programs whose trainers send each other values of a batch in the middle of a step: every step has
/// this batch.
pub fn initialise_for_batch(client: &Client, parts: &[ProgramPart], batch: u64) -> Result<(), Failure> {
    initialise_shared(client, parts, Some(batch), &[])
}

/// [`initialise`], with the batch of queues if it is known, and `more` queues than the parts have.
pub(super) fn initialise_shared(
    client: &Client,
    parts: &[ProgramPart],
    batch: Option<u64>,
    more: &[ServerQueue],
) -> Result<(), Failure> {
    let mut contents = ServerContents::of(parts, batch)?;
    contents.queues.extend_from_slice(more);
    let sharing = contents.sharing(parts)?;
    sharing.check_trainers(client)?;
    initialise_with(client, parts, &contents, &sharing.settings())?;
    sharing.check(client)
}

/// [`initialise`] for a job in mode delta: its trainers run the optimizer, and its servers add differences.
pub fn initialise_for_deltas(client: &Client, parts: &[ProgramPart]) -> Result<(), Failure> {
    let settings = OptimizerSettings { mode: Some(Mode::Delta), ..OptimizerSettings::default() };
    initialise_with(client, parts, &ServerContents::of(parts, None)?, &settings)
}

fn initialise_with(
    client: &Client,
    parts: &[ProgramPart],
    contents: &ServerContents,
    settings: &OptimizerSettings,
) -> Result<(), Failure> {
    if !client.begin_init(settings)? {
        contents.check_names(&client.names()?)?;
        contents.check_servers(client)?;
        return contents.parameters.iter().try_for_each(|one| client.follow_optimizer(&one.name, &one.settings()?));
    }
    declare(client, parts, contents).and_then(|()| client.finish_init()).inspect_err(|_| {
        // Another trainer may have the memory that this one lacks. If the coordinator is unreachable, the lease
        // expires.
        let _ = client.give_up_init();
    })
}

/// Declares the parameters of all servers, with the initial values that their parts compute.
fn declare(client: &Client, parts: &[ProgramPart], contents: &ServerContents) -> Result<(), Failure> {
    let ServerContents { parameters, queues, programs, batch } = contents;
    for part in parts.iter().filter(|part| matches!(part.peers[0], ProgramPeer::Server(_))) {
        let own = || parameters.iter().filter(|one| part.peers.contains(&ProgramPeer::Server(one.server)));
        // One value at a time is in memory.
        for one in own() {
            // Servers initialise rows of tables when they are first used, unless the rows are given.
            let is_sent = one.layout.is_none() || one.initialising_op.initializer().is_none();
            let initial = is_sent.then(|| initial_values::initial_value(&part.graph, &one.name)).transpose()?;
            let content = initial.as_ref().map_or(&[][..], |value| value.tensor().bytes());
            client.init_param(&one.name, one.element_type, &one.shape, content, &one.settings()?)?;
            one.total.as_ref().map_or(Ok(()), |total| total.declare(client))?;
        }
    }
    queues.iter().try_for_each(|queue| queue.declare(client, *batch))?;
    programs.iter().try_for_each(|program| program.declare(client))
}

impl<'c> Trainer<'c> {
    /// Prepares the part of trainers. The job must be initialised.
    ///
    /// # Errors
    /// When the parts are not those of a parameter server, or read a table other than by lookups; when the sharing of
    /// the job differs from that of the parts.
    pub fn new(client: impl Into<HeldClient<'c>>, parts: &[ProgramPart]) -> Result<Self, Failure> {
        let client = client.into();
        let rank = ProgramPeer::Trainer(client.trainer()?);
        let own = parts.iter().find(|part| part.peers.contains(&rank));
        let own = own.ok_or_else(|| Failure::call(format!("found no part of {rank}; expected one")))?;
        let graph = Arc::new(own.graph.clone());
        let contents = ServerContents::of(parts, None)?;
        contents.sharing(parts)?.check(&client)?;
        let ServerContents { parameters, queues, programs, .. } = contents;
        let hosted = HostedEnds::of(&client, &programs)?;
        let queues = QueueEnds::of(&client, &graph, &queues)?;
        let values = parameters.iter().map(|_| None).collect();
        let receivers = receivers(&graph);
        let received: Vec<_> = parameters.iter().map(|one| receivers.get(one.name.as_str()).copied()).collect();
        check_tables(&graph, &parameters)?;
        let executor = Executor::new(Arc::clone(&graph), executor_parts())?;
        let (is_fresh, phase) = (false, StepPhase::Idle);
        resume(&client, &parameters, &hosted)?;
        Ok(Self { client, executor, parameters, received, values, graph, is_fresh, queues, programs, hosted, phase })
    }

    /// Sets data for the next step.
    ///
    /// # Errors
    /// When the variable does not exist or cannot hold the value; when gradients of the last step are not all sent.
    pub fn feed(&mut self, name: &str, tensor: Tensor) -> Result<(), Failure> {
        let refused = |why: &str| Err(Failure::call(format!("variable {name:?}: {why}")));
        match &self.phase {
            StepPhase::Idle => {}
            StepPhase::UnderWay(_) => {
                return refused(
                    "found a step that has not ended; expected another call of step before data of the next step",
                );
            }
            StepPhase::Unsent(_) => {
                return refused(
                    "found a step whose gradients are not all sent; expected another call of step, which sends them, \
                     before data of the next step",
                );
            }
            StepPhase::Broken(reason) => return refused(reason),
        }
        if let Some(index) = self.graph.find(name) {
            let fits = self.queues.check_batch(&self.graph.variable(index).facts, &tensor);
            fits.or_else(|failure| refused(&failure.to_string()))?;
        }
        self.executor.set(name, tensor)
    }

    /// The client of the job.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// A variable's value after the last step.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&VariableValue> {
        self.executor.value(name)
    }

    /// The steps that this trainer has ended, where servers host programs that it takes part in: an earlier process of
    /// its rank may have ended some. Data are fed for the step after them.
    #[must_use]
    pub fn steps_ended(&self) -> Option<u64> {
        self.hosted.ended()
    }

    /// The programs that servers run on the executor: the server, the name and the reason of each.
    pub fn hosted(&self) -> impl Iterator<Item = (u32, &str, &str)> {
        self.programs.iter().map(|one| (one.server, one.name.as_str(), one.reason.as_str()))
    }

    /// The parameter of a program that a server hosts.
    fn hosted_parameter(&self, name: &str) -> Option<&ProgramEnd> {
        self.programs.iter().find_map(|program| program.parameter(name))
    }

    /// The whole value of a parameter on the servers after the last step, with all rows of a table, for which it
    /// allocates memory.
    ///
    /// # Errors
    /// When the servers have no such parameter, when there is no memory for it, with the bytes, or when a server does
    /// not answer before the deadline.
    pub fn fetch(&self, name: &str) -> Result<Tensor, Failure> {
        let (element_type, shape) = self.facts(name)?;
        let whole = Tensor::try_zeros(element_type, &shape);
        let mut whole = whole.map_err(|failure| Failure::call(format!("parameter {name:?}: {failure}")))?;
        let mut rest = whole.bytes_mut();
        if let Some(end) = self.hosted_parameter(name) {
            self.hosted.await_own(&self.client, name)?;
            self.client.pull(&mut [DestinationSlice::new(&end.name, rest)])?;
            return Ok(whole);
        }
        for one in self.pieces(name)? {
            let (piece, after) = rest.split_at_mut(one.byte_count()?);
            if one.layout.is_some() {
                fetch_all(&self.client, one, piece)?;
            } else {
                self.client.pull(&mut [DestinationSlice::new(&one.name, piece)])?;
            }
            rest = after;
        }
        Ok(whole)
    }

    /// Passes on what [`fetch`](Self::fetch) returns, a bounded part of a table at a time.
    pub(super) fn fetch_parts(&self, name: &str, take: &mut TakeBytes<'_>) -> Result<(), Failure> {
        if self.hosted_parameter(name).is_some() {
            return take(self.fetch(name)?.bytes());
        }
        for one in self.pieces(name)? {
            if one.layout.is_some() {
                pass_all(&self.client, one, take)?;
            } else {
                let mut piece = one.zeros()?;
                self.client.pull(&mut [DestinationSlice::new(&one.name, piece.bytes_mut())])?;
                take(piece.bytes())?;
            }
        }
        Ok(())
    }

    /// Element type and dimensions of a whole parameter on the servers.
    pub(super) fn facts(&self, name: &str) -> Result<(ElementType, Vec<u64>), Failure> {
        if let Some(end) = self.hosted_parameter(name) {
            return Ok((end.element_type, end.shape.clone()));
        }
        let pieces = self.pieces(name)?;
        let mut shape = pieces[0].shape.clone();
        let height = pieces.iter().map(|one| one.shape.first().unwrap_or(&1)).sum();
        shape.iter_mut().take(1).for_each(|rows| *rows = height);
        Ok((pieces[0].element_type, shape))
    }

    /// Whether the servers have this parameter.
    pub(super) fn is_on_servers(&self, name: &str) -> bool {
        self.hosted_parameter(name).is_some() || self.pieces(name).is_ok()
    }

    /// The pieces of a parameter on the servers, in the order of its rows.
    fn pieces(&self, name: &str) -> Result<Vec<&ServerParameter>, Failure> {
        let mut nodes = nodes(&self.graph);
        let own = |index: &VariableIndex| {
            let piece = &self.graph.variable(*index).name;
            self.parameters.iter().find(|one| one.name == *piece)
        };
        let whole = self.graph.find(name);
        let writer = nodes.find(|node| whole.is_some_and(|whole| node.outputs.contains(&whole)));
        let found: Option<Vec<&ServerParameter>> = match writer {
            Some(Node { kind: OpKind::Recv { .. } | OpKind::PullRows { .. }, outputs, .. }) => {
                outputs[..1].iter().map(own).collect()
            }
            Some(Node { kind: OpKind::Concat { .. }, inputs, .. }) => inputs.iter().map(own).collect(),
            None => Some(self.unread_pieces(name)).filter(|pieces| !pieces.is_empty()),
            _ => None,
        };
        found.ok_or_else(|| {
            Failure::call(format!(
                "found no parameter {name:?} on the servers; expected one; states of the optimizer are \
                 with the servers alone"
            ))
        })
    }

    /// The pieces of a parameter that the part does not read, such as an average.
    fn unread_pieces(&self, name: &str) -> Vec<&ServerParameter> {
        let number = |one: &ServerParameter| match one.name.strip_prefix(name)? {
            "" => Some(0),
            rest => rest.strip_prefix("@piece")?.trim_end_matches('_').parse::<u64>().ok(),
        };
        let found = self.parameters.iter().filter_map(|one| Some((number(one)?, one)));
        let found: BTreeMap<u64, &ServerParameter> = found.collect();
        found.into_values().collect()
    }

    /// One step: receives parameters, runs the part, sends gradients. After a failure, another call repeats the step:
    ///
    /// - when the step failed before its gradients were computed, it starts again from the previous state, with the
    ///   data fed until then;
    /// - when its gradients were computed, only those that the servers do not have are sent, so that each counts once,
    ///   and so are numbers that trainers make of several parameters.
    ///   [`feed`](Self::feed) fails until they are sent.
    ///
    /// Where the part has queues to other trainers, the step goes on at the item that could not be sent or received;
    /// after the failure of an op no step can follow, because the others have begun this one.
    ///
    /// # Errors
    /// The failure of an op, or the server or trainer that did not answer before the deadline.
    pub fn step(&mut self) -> Result<(), Failure> {
        if let StepPhase::Broken(reason) = &self.phase {
            return Err(Failure::call(reason.as_str()));
        }
        if matches!(self.phase, StepPhase::Idle) {
            self.begin()?;
        }
        if matches!(self.phase, StepPhase::UnderWay(_)) {
            let gradients = self.compute()?;
            self.phase = StepPhase::Unsent(UnsentGradients { gradients, pushed: PushStage::Nothing });
        }
        self.send()?;
        self.phase = StepPhase::Idle;
        Ok(())
    }

    /// Begins a step, and receives parameters.
    fn begin(&mut self) -> Result<(), Failure> {
        // With queues a failed op is final, so that large parameters of this trainer's own are not copied.
        let before = self.queues.is_empty().then(|| self.executor.save());
        self.executor.begin()?;
        self.phase = StepPhase::UnderWay(StepUnderWay { before, outbox: Outbox::default() });
        self.receive().map_err(|failure| self.abandon(&failure))
    }

    /// Computes the gradients, by channel. Items of queues are sent as soon as they are computed.
    fn compute(&mut self) -> Result<BTreeMap<String, VariableValue>, Failure> {
        let units_max = if self.queues.is_empty() { u64::MAX } else { 1 };
        loop {
            self.send_items()?;
            let StepPhase::UnderWay(StepUnderWay { outbox, .. }) = &mut self.phase else {
                unreachable!("the step has begun")
            };
            match self.executor.run(outbox, units_max) {
                Ok(RunStatus::Runs) => {}
                Ok(RunStatus::Ended) => return Ok(std::mem::take(&mut outbox.sent)),
                Ok(RunStatus::Awaits) => self.receive_awaited()?,
                Err(failure) => return Err(self.abandon(&failure)),
            }
        }
    }

    /// Ends a step that has failed, in the state before it where that is possible.
    fn abandon(&mut self, failure: &Failure) -> Failure {
        match std::mem::replace(&mut self.phase, StepPhase::Idle) {
            StepPhase::UnderWay(StepUnderWay { before: Some(before), .. }) => {
                self.executor.restore(before);
                failure.clone()
            }
            _ => {
                let reason = format!("{failure}; found a step that other trainers have begun; expected a new job");
                self.phase = StepPhase::Broken(reason.clone());
                Failure::call(reason)
            }
        }
    }

    /// Sends the computed items of queues.
    fn send_items(&mut self) -> Result<(), Failure> {
        let Self { queues, phase: StepPhase::UnderWay(StepUnderWay { outbox, .. }), client, .. } = self else {
            unreachable!("the step has begun")
        };
        while let Some(channel) = outbox.sent.keys().find(|channel| queues.is_sent(channel)).cloned() {
            let VariableValue::Dense(item) = &outbox.sent[&channel] else {
                unreachable!("the part's queues have dense items")
            };
            queues.send(client, &channel, item)?;
            outbox.sent.remove(&channel);
        }
        Ok(())
    }

    /// Receives the rows that the step has asked for, or else the next item of the first queue that it waits for.
    fn receive_awaited(&mut self) -> Result<(), Failure> {
        let StepPhase::UnderWay(StepUnderWay { outbox, .. }) = &mut self.phase else {
            unreachable!("the step has begun")
        };
        let channels = self.parameters.iter().flat_map(|one| &one.row_channels);
        let asked: BTreeMap<_, _> = channels.filter_map(|channel| outbox.sent.remove_entry(channel)).collect();
        if !asked.is_empty() {
            return self.receive_rows(asked).map_err(|failure| self.abandon(&failure));
        }
        if let Some((channel, variable)) = self.executor.awaited(outbox) {
            if shares(&self.parameters).any(|(_, total)| total.share == channel) {
                return self.receive_shares();
            }
            self.hosted.send(&self.client, &outbox.sent)?;
            let room = taken(&mut self.executor, variable);
            let item = if self.hosted.receives(&channel) {
                self.hosted.receive(&self.client, &channel, room)?
            } else {
                self.queues.receive(&self.client, &channel, room)?
            };
            if let Some((server, item)) = item {
                return self.executor.arrive(&channel, server, item.into()).map(drop);
            }
        }
        let unfinished = "found a part that is not finished after its step; expected it to end";
        Err(self.abandon(&Failure::call(unfinished)))
    }

    fn receive_rows(&mut self, mut asked: BTreeMap<String, VariableValue>) -> Result<(), Failure> {
        let pulled = pull_asked(&self.client, &self.parameters, &mut asked)?;
        if let StepPhase::UnderWay(StepUnderWay { outbox, .. }) = &mut self.phase {
            // A call has one request for each table; the others are for the next one.
            outbox.sent.append(&mut asked);
        }
        for (channel, server, rows) in pulled {
            self.arrive(&channel, server, rows)?;
        }
        Ok(())
    }

    /// Sends the gradients, and receives the numbers that servers compute of them, all before the part makes others of
    /// these. From here on the step is not computed again, because servers have its gradients.
    fn receive_shares(&mut self) -> Result<(), Failure> {
        let Self { client, parameters, phase: StepPhase::UnderWay(step), .. } = self else {
            unreachable!("the step has begun")
        };
        step.before = None;
        let sent = &mut step.outbox.sent;
        push_rows(client, parameters, sent)?;
        sent.retain(|channel, _| !parameters.iter().any(|one| one.layout.is_some() && one.gradient == *channel));
        let dense = parameters.iter().filter_map(|one| match sent.get(&one.gradient) {
            Some(VariableValue::Dense(gradient)) => Some(gradient_slice(&one.name, gradient)),
            _ => None,
        });
        let dense: Vec<GradientSlice<'_>> = dense.collect();
        if !dense.is_empty() {
            client.push(&dense, None)?;
        }
        sent.retain(|channel, _| !parameters.iter().any(|one| one.gradient == *channel));
        let received = receive_shares(client, parameters)?;
        for (channel, server, share) in received {
            self.arrive(&channel, server, share)?;
        }
        Ok(())
    }

    fn arrive(&mut self, channel: &str, server: u32, value: Tensor) -> Result<(), Failure> {
        if self.executor.arrive(channel, ProgramPeer::Server(server), value.into())?.is_none() {
            return Ok(());
        }
        Err(Failure::call(format!(
            "channel {channel:?}: found a value that the previous step did not receive; expected one per step"
        )))
    }

    fn receive(&mut self) -> Result<(), Failure> {
        let dense = self.parameters.iter().zip(&mut self.values).zip(&self.received);
        for ((one, value), variable) in dense.filter(|((one, _), _)| one.layout.is_none()) {
            if value.is_none() {
                *value = variable.and_then(|variable| taken(&mut self.executor, variable));
            }
            if value.is_none() {
                *value = Some(one.zeros()?);
            }
        }
        if !self.is_fresh {
            let all = self.parameters.iter().zip(&mut self.values);
            let wanted = all.filter_map(|(one, value)| Some((one, value.as_mut()?)));
            let mut wanted: Vec<DestinationSlice<'_>> =
                wanted.map(|(one, value)| DestinationSlice::new(&one.name, value.bytes_mut())).collect();
            if !wanted.is_empty() {
                self.client.pull(&mut wanted)?;
            }
        }
        // The executor owns the values from here on, also after a failure.
        self.is_fresh = false;
        for place in 0..self.parameters.len() {
            let Some(variable) = self.received[place] else { continue };
            let arrived = match self.values[place].take() {
                Some(arrived) => {
                    self.values[place] = taken(&mut self.executor, variable);
                    arrived
                }
                // The count of a table's updates: the client itself waits for the rows of this trainer's last push.
                None => Tensor::zeros(ElementType::Int64, &[]),
            };
            let (name, server) = (self.parameters[place].name.clone(), self.parameters[place].server);
            self.arrive(&name, server, arrived)?;
        }
        Ok(())
    }

    /// Sends the gradients that the servers do not have: first all rows, then all dense gradients. Servers recognise
    /// the repetition of a failed push, and a push that succeeded is not repeated.
    fn send(&mut self) -> Result<(), Failure> {
        let Self { client, parameters, values, hosted, phase, .. } = self;
        let StepPhase::Unsent(UnsentGradients { gradients, pushed }) = phase else { return Ok(()) };
        // First, so that a process that goes on with the step computes it of the same values, unless all is sent.
        hosted.send(client, gradients)?;
        if *pushed < PushStage::Rows {
            push_rows(client, parameters, gradients)?;
            *pushed = PushStage::Rows;
        }
        let (mut dense, mut wanted) = (Vec::new(), Vec::new());
        for (one, value) in parameters.iter().zip(values).filter(|(one, _)| one.layout.is_none()) {
            if let Some(VariableValue::Dense(gradient)) = gradients.get(&one.gradient) {
                dense.push(gradient_slice(&one.name, gradient));
                if value.is_none() {
                    *value = Some(one.zeros()?);
                }
                let value = value.as_mut().expect("it was just allocated");
                wanted.push(DestinationSlice::new(&one.name, value.bytes_mut()));
            }
        }
        if *pushed < PushStage::Dense {
            if !dense.is_empty() {
                client.push_pull(&dense, None, &mut wanted)?;
                self.is_fresh = dense.len() == parameters.iter().filter(|one| one.layout.is_none()).count();
            }
            *pushed = PushStage::Dense;
        }
        if *pushed < PushStage::Totals {
            push_totals(client, parameters, gradients)?;
            *pushed = PushStage::Totals;
        }
        hosted.end_step(client)
    }
}

/// Goes on with the gradients of the step after those that an earlier process of this rank has ended. That one may have
/// pushed gradients of one step more, and servers count no repetition; or a table's of the last, whose round is open.
fn resume(client: &Client, parameters: &[ServerParameter], hosted: &HostedEnds) -> Result<(), Failure> {
    let Some(ended) = hosted.ended() else { return Ok(()) };
    if parameters.is_empty() || client.mode()? != Mode::Sync {
        return Ok(());
    }
    // A trainer that has left, and comes again, has no part in the rounds between.
    if client.resume_rounds()? <= ended + 1 {
        let names: Vec<&str> = parameters.iter().map(|one| one.name.as_str()).collect();
        client.resume_at(&names, ended)?;
    }
    Ok(())
}

/// Pushes the gradients of all tables in one call.
fn push_rows(
    client: &Client,
    parameters: &[ServerParameter],
    gradients: &BTreeMap<String, VariableValue>,
) -> Result<(), Failure> {
    let mut ids = Vec::new();
    for one in parameters.iter().filter(|one| one.layout.is_some()) {
        if let Some(VariableValue::SelectedRows(gradient)) = gradients.get(&one.gradient) {
            ids.push((one, gradient.view().ids().iter().collect::<Vec<u64>>(), gradient));
        }
    }
    let mut rows = Vec::new();
    for (one, ids, gradient) in &ids {
        let (element_type, values) = (gradient.view().layout().element_type(), gradient.view().values());
        rows.push(GradientRows { name: &one.name, element_type, ids, values });
    }
    if rows.is_empty() { Ok(()) } else { client.push_rows(&rows, None) }
}

fn gradient_slice<'a>(name: &'a str, gradient: &'a Tensor) -> GradientSlice<'a> {
    GradientSlice { name, element_type: gradient.elements().element_type(), content: gradient.bytes() }
}

/// Takes a dense value out of the executor.
fn taken(executor: &mut Executor, variable: VariableIndex) -> Option<Tensor> {
    match executor.take(variable)? {
        VariableValue::Dense(tensor) => Some(tensor),
        VariableValue::SelectedRows(_) | VariableValue::Strings(_) => None,
    }
}

/// The variable that the `recv` of each channel writes.
fn receivers(graph: &Graph) -> BTreeMap<&str, VariableIndex> {
    let receivers = nodes(graph).filter_map(|node| match &node.kind {
        OpKind::Recv { channel } => Some((channel.as_str(), node.outputs[0])),
        _ => None,
    });
    receivers.collect()
}

//! A trainer of a program: receives parameters, runs its part, and sends gradients in each step.

use std::collections::BTreeMap;
use std::sync::Arc;

use pserver_core::config::{Mode, OptimizerSettings};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::executor::{Executor, ProgramLink, RunStatus};
use pserver_program::transpile::ProgramPart;
use pserver_program::{Graph, Node, OpKind, ProgramPeer, Tensor, VariableIndex, VariableValue};

use super::arithmetic::executor_parts;
use super::held_client::HeldClient;
use super::initial_values;
use super::server_parameters::{ServerParameter, common_sharing, nodes, server_parameters};
use super::table_rows::{check_tables, fetch_all, pull_asked};
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
    /// The gradients of a computed step, until all of them are sent.
    unsent: Option<UnsentGradients>,
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

/// Gradients of a computed step that are not all sent.
struct UnsentGradients {
    /// By channel.
    gradients: BTreeMap<String, VariableValue>,
    has_pushed_rows: bool,
}

/// Offers to initialise a job from the parts of servers, and initialises it when this trainer is elected. On return the
/// job is initialised, and its mode and merge are those of the parts.
///
/// # Errors
/// When a part has ops or initial values that servers do not support; when the job has another number of trainers, or
/// was initialised with another mode or merge; when no trainer initialises before the deadline.
pub fn initialise(client: &Client, parts: &[ProgramPart]) -> Result<(), Failure> {
    let parameters = server_parameters(parts)?;
    let sharing = common_sharing(&parameters)?;
    sharing.check_trainers(client)?;
    initialise_with(client, parts, &parameters, &sharing.settings())?;
    sharing.check(client)
}

/// [`initialise`] for a job in mode delta: its trainers run the optimizer, and its servers add differences.
pub fn initialise_for_deltas(client: &Client, parts: &[ProgramPart]) -> Result<(), Failure> {
    let settings = OptimizerSettings { mode: Some(Mode::Delta), ..OptimizerSettings::default() };
    initialise_with(client, parts, &server_parameters(parts)?, &settings)
}

fn initialise_with(
    client: &Client,
    parts: &[ProgramPart],
    parameters: &[ServerParameter],
    settings: &OptimizerSettings,
) -> Result<(), Failure> {
    if !client.begin_init(settings)? {
        return Ok(());
    }
    declare(client, parts, parameters).and_then(|()| client.finish_init()).inspect_err(|_| {
        // Another trainer may have the memory that this one lacks. If the coordinator is unreachable, the lease
        // expires.
        let _ = client.give_up_init();
    })
}

/// Declares the parameters of all servers, with the initial values that their parts compute.
fn declare(client: &Client, parts: &[ProgramPart], parameters: &[ServerParameter]) -> Result<(), Failure> {
    for part in parts.iter().filter(|part| matches!(part.peers[0], ProgramPeer::Server(_))) {
        let own = || parameters.iter().filter(|one| part.peers.contains(&ProgramPeer::Server(one.server)));
        // One value at a time is in memory.
        for one in own() {
            // Servers initialise rows of tables when they are first used, unless the rows are given.
            let is_sent = one.layout.is_none() || one.initialising_op.initializer().is_none();
            let initial = is_sent.then(|| initial_values::initial_value(&part.graph, &one.name)).transpose()?;
            let content = initial.as_ref().map_or(&[][..], |value| value.tensor().bytes());
            client.init_param(&one.name, one.element_type, &one.shape, content, &one.settings()?)?;
        }
    }
    Ok(())
}

impl<'c> Trainer<'c> {
    /// Prepares the part of trainers. The job must be initialised.
    ///
    /// # Errors
    /// When the parts are not those of a parameter server, or read a table other than by lookups; when the sharing of
    /// the job differs from that of the parts.
    pub fn new(client: impl Into<HeldClient<'c>>, parts: &[ProgramPart]) -> Result<Self, Failure> {
        let client = client.into();
        let own = parts.iter().find(|part| matches!(part.peers[0], ProgramPeer::Trainer(_)));
        let own = own.ok_or_else(|| Failure::call("found no part of trainers; expected one"))?;
        let graph = Arc::new(own.graph.clone());
        let parameters = server_parameters(parts)?;
        common_sharing(&parameters)?.check(&client)?;
        let values = parameters.iter().map(|_| None).collect();
        let receivers = receivers(&graph);
        let received: Vec<_> = parameters.iter().map(|one| receivers.get(one.name.as_str()).copied()).collect();
        check_tables(&graph, &parameters)?;
        let executor = Executor::new(Arc::clone(&graph), executor_parts())?;
        Ok(Self { client, executor, parameters, received, values, graph, is_fresh: false, unsent: None })
    }

    /// Sets data for the next step.
    ///
    /// # Errors
    /// When the variable does not exist or cannot hold the value; when gradients of the last step are not all sent.
    pub fn feed(&mut self, name: &str, tensor: Tensor) -> Result<(), Failure> {
        if self.unsent.is_some() {
            return Err(Failure::call(format!(
                "variable {name:?}: found a step whose gradients are not all sent; expected another call of step, \
                 which sends them, before data of the next step"
            )));
        }
        self.executor.set(name, tensor)
    }

    /// A variable's value after the last step.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&VariableValue> {
        self.executor.value(name)
    }

    /// The whole value of a parameter on the servers after the last step, with all rows of a table, for which it
    /// allocates memory.
    ///
    /// # Errors
    /// When the part receives no such parameter, when there is no memory for it, with the bytes, or when a server does
    /// not answer before the deadline.
    pub fn fetch(&self, name: &str) -> Result<Tensor, Failure> {
        let pieces = self.pieces(name)?;
        let mut shape = pieces[0].shape.clone();
        let height = pieces.iter().map(|one| one.shape.first().unwrap_or(&1)).sum();
        shape.iter_mut().take(1).for_each(|rows| *rows = height);
        let whole = Tensor::try_zeros(pieces[0].element_type, &shape);
        let mut whole = whole.map_err(|failure| Failure::call(format!("parameter {name:?}: {failure}")))?;
        let mut rest = whole.bytes_mut();
        for one in pieces {
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

    /// Whether the part receives this parameter from the servers.
    pub(super) fn receives(&self, name: &str) -> bool {
        self.pieces(name).is_ok()
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
            _ => None,
        };
        found.ok_or_else(|| Failure::call(format!("found no parameter {name:?} among what the part receives")))
    }

    /// One step: receives parameters, runs the part, sends gradients. After a failure, another call repeats the step:
    ///
    /// - when the step failed before its gradients were computed, it starts again from the previous state, with the
    ///   data fed until then;
    /// - when its gradients were computed, only those that the servers do not have are sent, so that each counts once.
    ///   [`feed`](Self::feed) fails until they are sent.
    ///
    /// # Errors
    /// The failure of an op, or the server that did not answer before the deadline.
    pub fn step(&mut self) -> Result<(), Failure> {
        if self.unsent.is_none() {
            let before = self.executor.save();
            match self.compute() {
                Ok(gradients) => self.unsent = Some(UnsentGradients { gradients, has_pushed_rows: false }),
                Err(failure) => {
                    self.executor.restore(before);
                    return Err(failure);
                }
            }
        }
        self.send()?;
        self.unsent = None;
        Ok(())
    }

    /// Receives parameters and computes the gradients, by channel.
    fn compute(&mut self) -> Result<BTreeMap<String, VariableValue>, Failure> {
        self.executor.begin()?;
        self.receive()?;
        let mut outbox = Outbox::default();
        let mut asked = BTreeMap::new();
        loop {
            let status = self.executor.run(&mut outbox, u64::MAX)?;
            let channels = self.parameters.iter().flat_map(|one| &one.row_channels);
            asked.extend(channels.filter_map(|channel| outbox.sent.remove_entry(channel)));
            match status {
                RunStatus::Ended => return Ok(outbox.sent),
                RunStatus::Awaits if !asked.is_empty() => {
                    for (channel, server, rows) in pull_asked(&self.client, &self.parameters, &mut asked)? {
                        self.arrive(&channel, server, rows)?;
                    }
                }
                other => {
                    return Err(Failure::call(format!(
                        "found a part that is not finished after its step ({other:?}); expected it to end"
                    )));
                }
            }
        }
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
        let Self { client, parameters, values, unsent, .. } = self;
        let Some(UnsentGradients { gradients, has_pushed_rows }) = unsent else { return Ok(()) };
        if !*has_pushed_rows {
            push_rows(client, parameters, gradients)?;
            *has_pushed_rows = true;
        }
        let (mut dense, mut wanted) = (Vec::new(), Vec::new());
        for (one, value) in parameters.iter().zip(values).filter(|(one, _)| one.layout.is_none()) {
            if let Some(VariableValue::Dense(gradient)) = gradients.get(&one.gradient) {
                let element_type = gradient.elements().element_type();
                dense.push(GradientSlice { name: &one.name, element_type, content: gradient.bytes() });
                if value.is_none() {
                    *value = Some(one.zeros()?);
                }
                let value = value.as_mut().expect("it was just allocated");
                wanted.push(DestinationSlice::new(&one.name, value.bytes_mut()));
            }
        }
        if !dense.is_empty() {
            client.push_pull(&dense, None, &mut wanted)?;
            self.is_fresh = dense.len() == self.parameters.iter().filter(|one| one.layout.is_none()).count();
        }
        Ok(())
    }
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

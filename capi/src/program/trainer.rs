//! A trainer that runs its part of a program.

use std::collections::BTreeMap;
use std::sync::Arc;

use pserver_core::config::{Mode, OptimizerSettings};
use pserver_core::error::Failure;
use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_core::program::executor::{Executor, Link, Parts, Standing};
use pserver_core::program::transpile::Part;
use pserver_core::program::{Elements, Graph, Node, OpKind, Peer, Tensor, Value, VariableIndex};
use pserver_kernels::cpu::Cpu;
use pserver_kernels::graph::CpuArithmetic;

use super::beginnings;
use super::kept::{Kept, kept, nodes};
use super::lookups::{Table, tables};
use super::terms::Terms;
use crate::client::{Client, Given, GivenRows, Wanted, WantedRows};

/// A trainer that runs its part of a program: [`feed`](Self::feed) what a step needs, then [`step`](Self::step).
pub struct Trainer<'c> {
    client: &'c Client,
    executor: Executor,
    kept: Vec<Kept>,
    /// By what is kept: the variable that it comes into, if the part receives it.
    received: Vec<Option<VariableIndex>>,
    /// By what is kept: memory for the next value; none while the executor has it. A dense value has two, so that the
    /// next one can come while this one is read; of a table there is one, whose rows are brought up to date.
    values: Vec<Option<Tensor>>,
    tables: Vec<Table>,
    graph: Arc<Graph>,
    /// Ids that were fed, by variable.
    ids: BTreeMap<VariableIndex, Vec<i64>>,
    /// Whether what is dense has come since the last step.
    is_fresh: bool,
    /// Of a step that was computed and whose gradients are not all with the servers.
    unsent: Option<Unsent>,
}

/// What a step sends.
#[derive(Default)]
struct Outbox {
    sent: BTreeMap<String, Value>,
}

impl Link for Outbox {
    fn has_room(&mut self, _: Peer, channel: &str) -> bool {
        !self.sent.contains_key(channel)
    }

    fn send(&mut self, _: Peer, channel: &str, value: &Value) {
        self.sent.insert(channel.to_owned(), value.clone());
    }
}

/// What a step computed, on its way to the servers.
struct Unsent {
    /// By channel.
    gradients: BTreeMap<String, Value>,
    has_pushed_rows: bool,
}

/// Offers to initialise a job as the parts of servers say, and does it when this trainer is chosen. When it returns,
/// the job is initialised, and shares its parameters as the parts do: the initialiser tells it their mode and merge.
///
/// # Errors
/// When a part does more than the servers of a job do, or begins what they keep as they cannot; when the job has other
/// trainers, or was initialised with another mode or merge; when nobody initialises before the deadline.
pub fn initialise(client: &Client, parts: &[Part]) -> Result<(), Failure> {
    let kept = kept(parts)?;
    let terms = Terms::common(&kept)?;
    terms.check_trainers(client)?;
    initialise_with(client, parts, &kept, &terms.settings())?;
    terms.check(client)
}

/// The same for a job whose trainers optimize and whose servers add differences.
pub(crate) fn initialise_for_deltas(client: &Client, parts: &[Part]) -> Result<(), Failure> {
    let settings = OptimizerSettings { mode: Some(Mode::Delta), ..OptimizerSettings::default() };
    initialise_with(client, parts, &kept(parts)?, &settings)
}

fn initialise_with(
    client: &Client,
    parts: &[Part],
    kept: &[Kept],
    settings: &OptimizerSettings,
) -> Result<(), Failure> {
    if !client.begin_init(settings)? {
        return Ok(());
    }
    declare(client, parts, kept).and_then(|()| client.finish_init()).inspect_err(|_| {
        // The next trainer may have the memory that this one lacks. If the coordinator does not hear it, the lease
        // lapses.
        let _ = client.give_up_init();
    })
}

/// Declares what servers keep, as the beginnings of their parts make it.
fn declare(client: &Client, parts: &[Part], kept: &[Kept]) -> Result<(), Failure> {
    for part in parts.iter().filter(|part| matches!(part.peers[0], Peer::Server(_))) {
        let own = || kept.iter().filter(|one| part.peers.contains(&Peer::Server(one.server)));
        // Rows begin on the server, when somebody touches them.
        let dense: Vec<&str> = own().filter(|one| one.layout.is_none()).map(|one| one.name.as_str()).collect();
        let mut values = beginnings::values(&part.graph, &dense)?.into_iter();
        for one in own() {
            let begun = if one.layout.is_some() { None } else { values.next() };
            let content = begun.as_ref().map_or(&[][..], |value| value.tensor().bytes());
            client.init_param(&one.name, one.element_type, &one.shape, content, &one.settings()?)?;
        }
    }
    Ok(())
}

impl<'c> Trainer<'c> {
    /// Makes the part of trainers ready to run. The job is initialised.
    ///
    /// # Errors
    /// When the parts are not those of a parameter server, or need more of a table than rows by ids that are fed; when
    /// the job shares parameters otherwise than they do.
    pub fn new(client: &'c Client, parts: &[Part]) -> Result<Self, Failure> {
        let own = parts.iter().find(|part| matches!(part.peers[0], Peer::Trainer(_)));
        let own = own.ok_or_else(|| Failure::call("found no part of trainers; expected one"))?;
        let graph = Arc::new(own.graph.clone());
        let kept = kept(parts)?;
        Terms::common(&kept)?.check(client)?;
        let values = kept.iter().map(|_| None).collect();
        let receivers = receivers(&graph);
        let received: Vec<_> = kept.iter().map(|one| receivers.get(one.name.as_str()).copied()).collect();
        let sparse = (0..).zip(&kept).zip(&received).filter(|((_, one), _)| one.layout.is_some());
        let pieces = sparse.filter_map(|((place, _), variable)| Some((place, (*variable)?)));
        let tables = tables(&graph, &pieces.collect::<Vec<_>>())?;
        let executor = Executor::new(Arc::clone(&graph), machine())?;
        let ids = BTreeMap::new();
        Ok(Self { client, executor, kept, received, values, tables, graph, ids, is_fresh: false, unsent: None })
    }

    /// Sets data for the next step.
    ///
    /// # Errors
    /// When there is no such variable, or it cannot hold the value; when the last step is not over, because it was
    /// computed and its gradients are not all sent.
    pub fn feed(&mut self, name: &str, tensor: Tensor) -> Result<(), Failure> {
        if self.unsent.is_some() {
            return Err(Failure::call(format!(
                "variable {name:?}: found a step whose gradients are not all sent; expected step again, which sends \
                 them, before data of the next one"
            )));
        }
        let ids = match (self.graph.find(name), tensor.elements()) {
            (Some(index), Elements::Int64(ids)) => Some((index, ids.clone())),
            _ => None,
        };
        self.executor.set(name, tensor)?;
        self.ids.extend(ids);
        Ok(())
    }

    /// A variable's value after the last step.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.executor.value(name)
    }

    /// A parameter as the servers have it after the last step, whole; of a table all rows.
    ///
    /// # Errors
    /// When the part receives no such parameter; who did not answer before the deadline.
    pub fn fetch(&self, name: &str) -> Result<Tensor, Failure> {
        let mut all = Vec::new();
        let mut height = 0;
        let pieces = self.pieces(name)?;
        for one in &pieces {
            let mut piece = one.zeros()?;
            if one.layout.is_some() {
                let ids: Vec<u64> = (0..one.shape[0]).collect();
                self.client.pull_rows(&mut [WantedRows { name: &one.name, ids: &ids, values: piece.bytes_mut() }])?;
            } else {
                self.client.pull(&mut [Wanted::new(&one.name, piece.bytes_mut())])?;
            }
            height += one.shape.first().unwrap_or(&1);
            all.extend_from_slice(piece.bytes());
        }
        let mut shape = pieces[0].shape.clone();
        shape.iter_mut().take(1).for_each(|rows| *rows = height);
        let mut whole = Tensor::zeros(pieces[0].element_type, &shape);
        whole.bytes_mut().copy_from_slice(&all);
        Ok(whole)
    }

    /// What servers keep of a parameter, in the order of its rows.
    fn pieces(&self, name: &str) -> Result<Vec<&Kept>, Failure> {
        let mut nodes = nodes(&self.graph);
        let own = |index: &VariableIndex| {
            let piece = &self.graph.variable(*index).name;
            self.kept.iter().find(|one| one.name == *piece)
        };
        let whole = self.graph.find(name);
        let writer = nodes.find(|node| whole.is_some_and(|whole| node.outputs.contains(&whole)));
        let found: Option<Vec<&Kept>> = match writer {
            Some(Node { kind: OpKind::Recv { .. }, outputs, .. }) => outputs[..1].iter().map(own).collect(),
            Some(Node { kind: OpKind::Concat { .. }, inputs, .. }) => inputs.iter().map(own).collect(),
            _ => None,
        };
        found.ok_or_else(|| Failure::call(format!("found no parameter {name:?} among what the part receives")))
    }

    /// One step: receives parameters, runs the part, sends gradients. After a failure the step may be repeated, and is
    /// then the same one:
    ///
    /// - one that failed before its gradients were computed has left nothing, and begins anew with whatever is fed
    ///   until then;
    /// - one whose gradients were computed sends those that the servers do not have yet, and computes nothing, so that
    ///   each counts once. Until it has succeeded nothing can be fed.
    ///
    /// # Errors
    /// What an op refuses; who did not answer before the deadline.
    pub fn step(&mut self) -> Result<(), Failure> {
        if self.unsent.is_none() {
            let before = self.executor.save();
            match self.compute() {
                Ok(gradients) => self.unsent = Some(Unsent { gradients, has_pushed_rows: false }),
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

    /// Receives parameters, and computes what is to be sent, by channel.
    fn compute(&mut self) -> Result<BTreeMap<String, Value>, Failure> {
        self.executor.begin()?;
        self.receive()?;
        let mut outbox = Outbox::default();
        match self.executor.run(&mut outbox, u64::MAX)? {
            Standing::Ended => Ok(outbox.sent),
            other => Err(Failure::call(format!("found a part that is not over after its step ({other:?})"))),
        }
    }

    fn receive(&mut self) -> Result<(), Failure> {
        for ((one, value), variable) in self.kept.iter().zip(&mut self.values).zip(&self.received) {
            if value.is_none() {
                *value = variable.and_then(|variable| taken(&mut self.executor, variable));
            }
            if value.is_none() {
                *value = Some(one.zeros()?);
            }
        }
        if !self.is_fresh {
            let all = self.kept.iter().zip(&mut self.values).filter(|(one, _)| one.layout.is_none());
            let wanted = all.filter_map(|(one, value)| Some((one, value.as_mut()?)));
            let mut wanted: Vec<Wanted<'_>> =
                wanted.map(|(one, value)| Wanted::new(&one.name, value.bytes_mut())).collect();
            if !wanted.is_empty() {
                self.client.pull(&mut wanted)?;
            }
            self.is_fresh = true;
        }
        self.receive_rows()?;
        // What the executor has been given is its own, whatever comes of it.
        self.is_fresh = false;
        for ((one, value), variable) in self.kept.iter().zip(&mut self.values).zip(&self.received) {
            let Some(variable) = *variable else { continue };
            let arrived = value.take().expect("it came above");
            if one.layout.is_none() {
                *value = taken(&mut self.executor, variable);
            }
            if self.executor.arrive(&one.name, Peer::Server(one.server), arrived.into())?.is_some() {
                let name = &one.name;
                return Err(Failure::call(format!(
                    "channel {name:?}: found a value that the step before has not taken; expected it to be received"
                )));
            }
        }
        Ok(())
    }

    /// Fetches the rows that the step will look up.
    fn receive_rows(&mut self) -> Result<(), Failure> {
        let mut fetched = Vec::new();
        for table in &self.tables {
            let layout = self.kept[table.kept].layout.expect("a table has rows");
            let ids = table.ids.iter().filter_map(|index| self.ids.get(index)).flatten();
            let ids = table.wanted(ids);
            let values = vec![0_u8; ids.len() * layout.row_bytes()];
            fetched.push((table.kept, layout.row_bytes(), ids, values));
        }
        let mut wanted: Vec<WantedRows<'_>> = fetched
            .iter_mut()
            .map(|(place, _, ids, values)| WantedRows { name: &self.kept[*place].name, ids, values })
            .collect();
        if !wanted.is_empty() {
            self.client.pull_rows(&mut wanted)?;
        }
        for (place, row_bytes, ids, values) in &fetched {
            let whole = self.values[*place].as_mut().expect("there is memory for what comes").bytes_mut();
            for (id, row) in ids.iter().zip(values.chunks_exact(*row_bytes)) {
                let start = usize::try_from(*id).expect("the table is in memory") * row_bytes;
                whole[start..start + row_bytes].copy_from_slice(row);
            }
        }
        Ok(())
    }

    /// Sends what the step has computed and the servers do not have yet: first all rows, then all that is dense. A
    /// client that repeats a call that failed is not counted twice, and a call that succeeded is not repeated.
    fn send(&mut self) -> Result<(), Failure> {
        let Self { client, kept, values, unsent, .. } = self;
        let Some(Unsent { gradients, has_pushed_rows }) = unsent else { return Ok(()) };
        if !*has_pushed_rows {
            push_rows(client, kept, gradients)?;
            *has_pushed_rows = true;
        }
        let (mut dense, mut wanted) = (Vec::new(), Vec::new());
        for (one, value) in kept.iter().zip(values).filter(|(one, _)| one.layout.is_none()) {
            if let Some(Value::Dense(gradient)) = gradients.get(&one.gradient) {
                let element_type = gradient.elements().element_type();
                dense.push(Given { name: &one.name, element_type, content: gradient.bytes() });
                if value.is_none() {
                    *value = Some(one.zeros()?);
                }
                let value = value.as_mut().expect("it was just made");
                wanted.push(Wanted::new(&one.name, value.bytes_mut()));
            }
        }
        if !dense.is_empty() {
            client.push_pull(&dense, None, &mut wanted)?;
            self.is_fresh = dense.len() == self.kept.iter().filter(|one| one.layout.is_none()).count();
        }
        Ok(())
    }
}

/// Sends the gradients of tables, as one call.
fn push_rows(client: &Client, kept: &[Kept], gradients: &BTreeMap<String, Value>) -> Result<(), Failure> {
    let mut ids = Vec::new();
    for one in kept.iter().filter(|one| one.layout.is_some()) {
        if let Some(Value::SelectedRows(gradient)) = gradients.get(&one.gradient) {
            ids.push((one, gradient.view().ids().iter().collect::<Vec<u64>>(), gradient));
        }
    }
    let mut rows = Vec::new();
    for (one, ids, gradient) in &ids {
        let (element_type, values) = (gradient.view().layout().element_type(), gradient.view().values());
        rows.push(GivenRows { name: &one.name, element_type, ids, values });
    }
    if rows.is_empty() { Ok(()) } else { client.push_rows(&rows, None) }
}

/// A dense value of the executor's, taken away.
fn taken(executor: &mut Executor, variable: VariableIndex) -> Option<Tensor> {
    match executor.take(variable)? {
        Value::Dense(tensor) => Some(tensor),
        Value::SelectedRows(_) | Value::Strings(_) => None,
    }
}

/// By channel, the variable that its `recv` writes.
fn receivers(graph: &Graph) -> BTreeMap<&str, VariableIndex> {
    let receivers = nodes(graph).filter_map(|node| match &node.kind {
        OpKind::Recv { channel } => Some((channel.as_str(), node.outputs[0])),
        _ => None,
    });
    receivers.collect()
}

/// What runs ops here.
pub(super) fn machine() -> Parts {
    Parts {
        arithmetic: Box::new(CpuArithmetic::default()),
        kernels: Box::new(Cpu::default()),
        senders: Vec::new(),
        arrivals_max: 1,
        memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
    }
}

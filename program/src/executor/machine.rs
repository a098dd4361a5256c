//! State of a running program: variables, queues, accumulators and received values, and the execution of its units.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::marking::UnitRunner;
use super::merge::merged;
use super::plan::{Accumulator, ExecutionPlan, UnitIndex, UnitKind};
use super::queue::Queue;
use super::wait::Wait;
use crate::plain::{read, run_node};
use crate::values::VariableValues;
use crate::{
    Arithmetic, Destination, Elements, Graph, Node, OpKind, ProgramPeer, Tensor, VariableFacts, VariableIndex,
    VariableValue, infer,
};
use pserver_core::accumulator::{AccumulatorPace, PieceList, Sent};
use pserver_core::error::Failure;
use pserver_core::limits::{PROGRAM_QUEUE_MAX, PROGRAM_STRING_BYTES_MAX};
use pserver_core::port::Kernels;
use pserver_core::rows::{RowLayout, SelectedRows};

/// Transport of values between programs.
pub trait ProgramLink {
    /// Whether a destination takes one more value on a channel.
    fn has_room(&mut self, to: ProgramPeer, channel: &str) -> bool;

    /// Sends a value with the sender's address. Called only after [`has_room`](Self::has_room) returned true.
    fn send(&mut self, to: ProgramPeer, channel: &str, value: &VariableValue);
}

/// The components and options of an executor.
pub struct ExecutorParts {
    /// Runs arithmetic.
    pub arithmetic: Box<dyn Arithmetic>,
    /// Runs updates.
    pub kernels: Box<dyn Kernels>,
    /// The senders of pieces to accumulators with a pace.
    pub senders: Vec<ProgramPeer>,
    /// The most values of one sender and channel that wait to be received, above zero.
    pub arrivals_max: usize,
    /// The most bytes of all variables together; an op that would exceed them is refused before it runs.
    pub memory_bytes_max: u64,
}

/// A value that has arrived.
#[derive(Clone)]
pub(super) struct ReceivedValue {
    pub(super) from: ProgramPeer,
    pub(super) value: VariableValue,
}

/// A piece in an accumulator.
#[derive(Clone)]
pub(super) struct GradientPiece {
    pub(super) from: ProgramPeer,
    pub(super) value: VariableValue,
}

impl Sent for GradientPiece {
    type Sender = ProgramPeer;

    fn sender(&self) -> ProgramPeer {
        self.from
    }
}

/// The origin of a string: the process whose address it is, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StringOrigin {
    Process(ProgramPeer),
    Unknown,
}

/// A string in an accumulator.
#[derive(Clone)]
pub(super) struct StringPiece {
    origin: StringOrigin,
    pub(super) text: String,
}

impl StringPiece {
    pub(super) fn of(text: String) -> Self {
        Self { origin: peer(&text).map_or(StringOrigin::Unknown, StringOrigin::Process), text }
    }
}

impl Sent for StringPiece {
    type Sender = StringOrigin;

    fn sender(&self) -> StringOrigin {
        self.origin
    }
}

/// State of an op between its units.
#[derive(Clone)]
pub(super) enum OpState {
    Nothing,
    /// Received values of a `recv`, in order of arrival.
    Arrivals(Vec<ReceivedValue>),
    /// The ids that a `pull_rows` has asked for, and received rows in order of arrival.
    Rows(Vec<u64>, Vec<ReceivedValue>),
    /// A gradient accumulator's pieces, and how many pieces of each sender it has given.
    Gradients(PieceList<GradientPiece>, Vec<(ProgramPeer, u64)>),
    Strings(PieceList<StringPiece>),
}

/// The part of the state that a run can change.
pub(super) struct StateBefore {
    states: Vec<(VariableIndex, Option<VariableValue>)>,
    queues: Vec<Option<Queue<VariableValue>>>,
    kept: Vec<OpState>,
}

/// The state of a program that runs.
pub(super) struct ProgramState {
    graph: Arc<Graph>,
    parts: ExecutorParts,
    pub(super) values: VariableValues,
    /// Parameters and states that a run writes.
    written: Vec<VariableIndex>,
    /// By variable.
    pub(super) queues: Vec<Option<Queue<VariableValue>>>,
    /// By node.
    pub(super) kept: Vec<OpState>,
}

/// A machine with the link that it runs with.
pub(super) struct LinkedState<'a> {
    pub(super) machine: &'a mut ProgramState,
    pub(super) link: &'a mut dyn ProgramLink,
}

impl ProgramState {
    pub(super) fn new(graph: Arc<Graph>, plan: &ExecutionPlan, parts: ExecutorParts) -> Self {
        let queue = |facts: &VariableFacts| match facts {
            VariableFacts::Queue { capacity, .. } => {
                Some(Queue::new(usize::try_from(*capacity).expect("a queue is small, see `limits`")))
            }
            _ => None,
        };
        let queues = graph.variables().iter().map(|variable| queue(&variable.facts)).collect();
        let kept = plan.nodes().iter().map(|node| match node.kind {
            OpKind::Recv { .. } => OpState::Arrivals(Vec::new()),
            OpKind::PullRows { .. } => OpState::Rows(Vec::new(), Vec::new()),
            OpKind::GradientAccumulator { .. } => OpState::Gradients(PieceList::default(), Vec::new()),
            OpKind::StringAccumulator { .. } => OpState::Strings(PieceList::default()),
            _ => OpState::Nothing,
        });
        let outputs: BTreeSet<VariableIndex> = plan.nodes().iter().flat_map(|node| &node.outputs).copied().collect();
        let is_kept = |index: &VariableIndex| graph.variable(*index).purpose.is_persistable();
        let written = outputs.into_iter().filter(is_kept).collect();
        let values = VariableValues::new(&graph, parts.memory_bytes_max);
        Self { values, written, queues, kept: kept.collect(), graph, parts }
    }

    /// A copy of everything that a run can change.
    pub(super) fn save(&self) -> StateBefore {
        let states = self.written.iter().map(|index| (*index, self.values.get(*index).cloned()));
        StateBefore { states: states.collect(), queues: self.queues.clone(), kept: self.kept.clone() }
    }

    pub(super) fn restore(&mut self, before: StateBefore) {
        let StateBefore { states, queues, kept } = before;
        states.into_iter().for_each(|(index, value)| self.values.set(index, value));
        (self.queues, self.kept) = (queues, kept);
    }

    pub(super) fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Refuses data of different batches.
    pub(super) fn check_batch(&self) -> Result<(), Failure> {
        self.values.check_batch(&self.graph)
    }

    /// Runs an op that is no flow.
    pub(super) fn compute(&mut self, node: &Node) -> Result<(), Failure> {
        let (arithmetic, kernels) = (&mut *self.parts.arithmetic, &mut *self.parts.kernels);
        run_node(&self.graph, &mut self.values, arithmetic, kernels, node)
    }

    /// Queues a value for the op at this index; returns it when the sender's share of the queue is full.
    pub(super) fn arrive(&mut self, node: usize, from: ProgramPeer, value: VariableValue) -> Option<VariableValue> {
        if !self.has_room(node, from) {
            return Some(value);
        }
        match &mut self.kept[node] {
            OpState::Arrivals(arrivals) | OpState::Rows(_, arrivals) => arrivals.push(ReceivedValue { from, value }),
            _ => unreachable!("the node receives"),
        }
        None
    }

    /// Whether a value of this sender would be queued.
    pub(super) fn has_room(&self, node: usize, from: ProgramPeer) -> bool {
        let (OpState::Arrivals(arrivals) | OpState::Rows(_, arrivals)) = &self.kept[node] else {
            unreachable!("the node receives")
        };
        arrivals.iter().filter(|one| one.from == from).count() < self.parts.arrivals_max
    }

    /// The senders that accumulators with a pace wait for.
    pub(super) fn senders(&self) -> &[ProgramPeer] {
        &self.parts.senders
    }

    pub(super) fn set_senders(&mut self, senders: Vec<ProgramPeer>) {
        self.parts.senders = senders;
    }

    /// The first arrival that may be received now.
    fn next_arrival(&self, plan: &ExecutionPlan, unit: UnitIndex) -> Option<usize> {
        let OpState::Arrivals(arrivals) = &self.kept[node_of(plan, unit)] else { unreachable!("the node is a recv") };
        let Some(pace) = plan.pace_of(unit) else { return (!arrivals.is_empty()).then_some(0) };
        let OpState::Gradients(pieces, given) = &self.kept[pace.node as usize] else {
            unreachable!("the node is an accumulator")
        };
        let count = |peer: ProgramPeer| given.iter().find(|(known, _)| *known == peer).map_or(0, |(_, count)| *count);
        let fewest = || self.parts.senders.iter().map(|peer| count(*peer)).min().unwrap_or(0);
        arrivals.iter().position(|one| pace.pace.admits(pieces.of(one.from).is_some(), count(one.from), fewest))
    }

    /// The reason why an accumulator with this many pieces is not complete; `has` tells whether a sender has one of
    /// them.
    fn lacks(&self, held: usize, has: impl Fn(ProgramPeer) -> bool, count: u32, pace: AccumulatorPace) -> Option<Wait> {
        let (needed, senders) = (count as usize, &self.parts.senders);
        // A round does not wait for departed senders.
        let is_whole = || !senders.is_empty() && senders.iter().all(|sender| has(*sender));
        let is_full = held >= needed || (pace == AccumulatorPace::Rounds && held > 0 && is_whole());
        (!is_full).then_some(Wait::Pieces { held, needed })
    }

    fn waits_to_take(&self, plan: &ExecutionPlan, unit: UnitIndex) -> Option<Wait> {
        match (&self.kept[node_of(plan, unit)], &plan.node(&plan.units()[unit.place()]).kind) {
            (OpState::Gradients(pieces, _), OpKind::GradientAccumulator { count, staleness, .. }) => {
                let has = |sender| pieces.of(sender).is_some();
                self.lacks(pieces.as_slice().len(), has, *count, AccumulatorPace::of(*staleness))
            }
            (OpState::Strings(lines), OpKind::StringAccumulator { count }) => {
                // The list of senders belongs to the merged gradient of their pieces, of which there may be fewer after
                // a departure.
                let has = |sender| lines.of(StringOrigin::Process(sender)).is_some();
                self.lacks(
                    lines.as_slice().len(),
                    has,
                    *count,
                    plan.pace_of(unit).map_or(AccumulatorPace::Any, |one| one.pace),
                )
            }
            _ => unreachable!("the node is an accumulator"),
        }
    }

    fn waits_to_put(&self, plan: &ExecutionPlan, unit: UnitIndex) -> Option<Wait> {
        let held = match &self.kept[node_of(plan, unit)] {
            OpState::Gradients(pieces, _) => pieces.as_slice().len(),
            OpState::Strings(lines) => lines.as_slice().len(),
            OpState::Nothing | OpState::Arrivals(_) | OpState::Rows(..) => unreachable!("the node is an accumulator"),
        };
        self.waits_to_take(plan, unit).is_none().then_some(Wait::Room { held })
    }

    fn queue(&mut self, node: &Node) -> &mut Queue<VariableValue> {
        self.queues[node.inputs[0].place()].as_mut().expect("a checked program has a queue here")
    }

    fn read(&self, node: &Node, input: usize) -> Result<&VariableValue, Failure> {
        read(&self.graph, &self.values, node.inputs[input])
    }

    fn write(&mut self, node: &Node, output: usize, value: VariableValue) {
        self.values.set(node.outputs[output], value);
    }

    fn recv(&mut self, plan: &ExecutionPlan, unit: UnitIndex, node: &Node) {
        let at = self.next_arrival(plan, unit).expect("the unit is ready");
        let OpState::Arrivals(arrivals) = &mut self.kept[node_of(plan, unit)] else { unreachable!("it is a recv") };
        let ReceivedValue { from, value } = arrivals.remove(at);
        self.write(node, 0, value);
        if node.outputs.len() == 2 {
            self.write(node, 1, VariableValue::Strings(vec![from.to_string()]));
        }
    }

    /// The ids of the inputs of a `pull_rows` that its rows have, relative to the first row: ascending, each once.
    fn ids(&self, node: &Node) -> Result<Vec<u64>, Failure> {
        let OpKind::PullRows { first, .. } = node.kind else { unreachable!("the node is a pull_rows") };
        let height = rows_layout(&self.graph.variable(node.outputs[0]).facts)?.height().bound();
        let mut ids = Vec::new();
        for input in 1..node.inputs.len() {
            let Elements::Int64(all) = self.read(node, input)?.tensor().elements() else {
                unreachable!("a checked program has int64")
            };
            let rows = all.iter().filter_map(|id| u64::try_from(*id).ok()?.checked_sub(first));
            ids.extend(rows.filter(|row| *row < height));
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// The rows stay until they are taken: a failure changes nothing.
    fn take_rows(&mut self, place: usize, node: &Node) -> Result<(), Failure> {
        let OpState::Rows(ids, arrivals) = &mut self.kept[place] else { unreachable!("it is a pull_rows") };
        let layout = rows_layout(&self.graph.variable(node.outputs[0]).facts)?;
        let values = arrivals.first().expect("the unit is ready").value.tensor();
        let rows = SelectedRows::new(layout, ids, values.bytes())?;
        arrivals.remove(0);
        self.write(node, 0, VariableValue::SelectedRows(rows));
        Ok(())
    }

    fn put_gradient(&mut self, place: usize, node: &Node) -> Result<(), Failure> {
        let value = self.read(node, 0)?.clone();
        // Without an address all pieces have one sender, and so keep the order of arrival.
        let from = if node.inputs.len() == 2 { address(self.read(node, 1)?)? } else { ProgramPeer::Trainer(0) };
        let OpState::Gradients(pieces, _) = &mut self.kept[place] else { unreachable!("it is an accumulator") };
        pieces.put(GradientPiece { from, value });
        Ok(())
    }

    fn take_gradient(&mut self, accumulator: &Accumulator, node: &Node) -> Result<(), Failure> {
        let OpState::Gradients(pieces, given) = &mut self.kept[accumulator.node as usize] else {
            unreachable!("it is an accumulator")
        };
        let facts = &self.graph.variable(node.outputs[0]).facts;
        let ExecutorParts { arithmetic, kernels, .. } = &mut self.parts;
        // The pieces stay until the merge succeeded: a failure changes nothing.
        let several = match pieces.as_slice() {
            [_] => None,
            all => {
                let values: Vec<&VariableValue> = all.iter().map(|piece| &piece.value).collect();
                Some(merged(&mut **arithmetic, &mut **kernels, facts, &values, accumulator.merge)?)
            }
        };
        let mut last = None;
        for piece in pieces.drain() {
            match given.iter_mut().find(|(known, _)| *known == piece.from) {
                Some((_, count)) => *count += 1,
                None => given.push((piece.from, 1)),
            }
            last = Some(piece.value);
        }
        self.write(node, 0, several.or(last).expect("an accumulator gives what it holds"));
        Ok(())
    }

    /// Strings are accepted whatever their content, all of a value or none.
    fn put_strings(&mut self, place: usize, node: &Node) -> Result<(), Failure> {
        let VariableValue::Strings(new) = self.read(node, 0)?.clone() else {
            unreachable!("a checked program has strings")
        };
        let OpState::Strings(lines) = &mut self.kept[place] else { unreachable!("it is an accumulator") };
        if let Some(long) = new.iter().find(|string| string.len() > PROGRAM_STRING_BYTES_MAX) {
            let (bytes, most) = (long.len(), PROGRAM_STRING_BYTES_MAX);
            return Err(Failure::call(format!("found a string of {bytes} bytes; expected at most {most}")));
        }
        let count = (lines.as_slice().len() + new.len()) as u64;
        if count > PROGRAM_QUEUE_MAX {
            return Err(Failure::call(format!("found {count} strings; expected at most {PROGRAM_QUEUE_MAX}")));
        }
        for text in new {
            lines.put(StringPiece::of(text));
        }
        Ok(())
    }

    /// Addresses come first, in their senders' order, then other strings in the order of their text.
    fn take_strings(&mut self, place: usize, node: &Node) {
        let OpState::Strings(lines) = &mut self.kept[place] else { unreachable!("it is an accumulator") };
        let mut lines: Vec<StringPiece> = lines.drain().collect();
        lines.sort_by(|one, other| (one.origin, &one.text).cmp(&(other.origin, &other.text)));
        let strings = lines.into_iter().map(|line| line.text).collect();
        self.write(node, 0, VariableValue::Strings(strings));
    }

    fn dequeue(&mut self, node: &Node) {
        for output in 0..node.outputs.len() {
            let item = self.queue(node).take().expect("the unit is ready");
            self.write(node, output, item);
        }
    }
}

impl LinkedState<'_> {
    /// The destinations of a `send`, each once: room is checked for one value.
    fn destinations(&self, node: &Node) -> Result<Vec<ProgramPeer>, Failure> {
        let OpKind::Send { to, .. } = node.kind else { unreachable!("the node is a send") };
        match to {
            Destination::Peer(peer) => Ok(vec![peer]),
            Destination::Senders => {
                let VariableValue::Strings(all) = self.machine.read(node, 1)? else {
                    unreachable!("a checked program")
                };
                let mut known = BTreeSet::new();
                let peers = all.iter().map(|text| addressed(text));
                peers.filter(|peer| peer.as_ref().map_or(true, |peer| known.insert(*peer))).collect()
            }
        }
    }

    fn send(&mut self, node: &Node) -> Result<(), Failure> {
        let OpKind::Send { channel, .. } = &node.kind else { unreachable!("the node is a send") };
        for to in self.destinations(node)? {
            self.link.send(to, channel, self.machine.read(node, 0)?);
        }
        Ok(())
    }

    fn ask_rows(&mut self, place: usize, node: &Node) -> Result<(), Failure> {
        let OpKind::PullRows { channel, to, .. } = &node.kind else { unreachable!("the node is a pull_rows") };
        let ids = self.machine.ids(node)?;
        let sent = ids.iter().map(|id| i64::try_from(*id).expect("it was one")).collect();
        self.link.send(*to, channel, &Tensor::new([ids.len() as u64], Elements::Int64(sent)).into());
        let OpState::Rows(asked, _) = &mut self.machine.kept[place] else { unreachable!("it is a pull_rows") };
        *asked = ids;
        Ok(())
    }

    fn waits_to_ask(&mut self, node: &Node) -> Option<Wait> {
        let OpKind::PullRows { channel, to, .. } = &node.kind else { unreachable!("the node is a pull_rows") };
        (!self.link.has_room(*to, channel)).then_some(Wait::Destination)
    }

    fn waits_to_send(&mut self, node: &Node) -> Option<Wait> {
        let OpKind::Send { channel, .. } = &node.kind else { unreachable!("the node is a send") };
        // A string that is no address fails when the op runs.
        let destinations = self.destinations(node).unwrap_or_default();
        let has_room = destinations.into_iter().all(|to| self.link.has_room(to, channel));
        (!has_room).then_some(Wait::Destination)
    }
}

impl UnitRunner for LinkedState<'_> {
    type Error = Failure;

    fn waits(&mut self, plan: &ExecutionPlan, index: UnitIndex) -> Option<Wait> {
        let unit = &plan.units()[index.place()];
        let node = plan.node(unit);
        match unit.act {
            UnitKind::Compute | UnitKind::Loop => None,
            UnitKind::Recv => self.machine.next_arrival(plan, index).is_none().then_some(Wait::Arrival),
            UnitKind::Send => self.waits_to_send(node),
            UnitKind::AskRows => self.waits_to_ask(node),
            UnitKind::TakeRows => match &self.machine.kept[unit.node as usize] {
                OpState::Rows(_, arrivals) => arrivals.is_empty().then_some(Wait::Arrival),
                _ => unreachable!("the node is a pull_rows"),
            },
            UnitKind::Enqueue => {
                let queue = self.machine.queue(node);
                queue.is_full().then_some(Wait::Space { held: queue.len() })
            }
            UnitKind::Dequeue => {
                let (held, needed) = (self.machine.queue(node).len(), node.outputs.len());
                (held < needed).then_some(Wait::Items { held, needed })
            }
            UnitKind::PutGradient | UnitKind::PutString => self.machine.waits_to_put(plan, index),
            UnitKind::TakeGradient | UnitKind::TakeString => self.machine.waits_to_take(plan, index),
        }
    }

    fn run(&mut self, plan: &ExecutionPlan, index: UnitIndex) -> Result<(), Failure> {
        let unit = &plan.units()[index.place()];
        let (place, node) = (unit.node as usize, plan.node(unit));
        match unit.act {
            UnitKind::Compute => self.machine.compute(node)?,
            UnitKind::Loop => {}
            UnitKind::Recv => self.machine.recv(plan, index, node),
            UnitKind::Send => self.send(node)?,
            UnitKind::AskRows => self.ask_rows(place, node)?,
            UnitKind::TakeRows => self.machine.take_rows(place, node)?,
            UnitKind::Enqueue => {
                let item = self.machine.read(node, 1)?.clone();
                self.machine.queue(node).put(item);
            }
            UnitKind::Dequeue => self.machine.dequeue(node),
            UnitKind::PutGradient => self.machine.put_gradient(place, node)?,
            UnitKind::TakeGradient => {
                let own = plan.accumulator(unit.node).expect("the plan has every accumulator");
                self.machine.take_gradient(own, node)?;
            }
            UnitKind::PutString => self.machine.put_strings(place, node)?,
            UnitKind::TakeString => self.machine.take_strings(place, node),
        }
        Ok(())
    }
}

fn node_of(plan: &ExecutionPlan, unit: UnitIndex) -> usize {
    plan.units()[unit.place()].node as usize
}

/// The layout of selected rows.
fn rows_layout(facts: &VariableFacts) -> Result<RowLayout, Failure> {
    let VariableFacts::SelectedRows { element_type, height, width } = *facts else {
        unreachable!("a checked program has rows")
    };
    infer::layout(element_type, height, width).map_err(Failure::call)
}

/// The only address in a value.
fn address(value: &VariableValue) -> Result<ProgramPeer, Failure> {
    match value {
        VariableValue::Strings(all) if all.len() == 1 => addressed(&all[0]),
        other => Err(Failure::call(format!("found {other}; expected one address"))),
    }
}

/// The process of an address.
fn addressed(address: &str) -> Result<ProgramPeer, Failure> {
    peer(address).ok_or_else(|| Failure::call(format!("found {address:?}; expected an address, trainer:0 or server:0")))
}

/// The process of a string that is an address; none for other strings.
fn peer(string: &str) -> Option<ProgramPeer> {
    let (kind, number) = string.split_once(':')?;
    match (kind, number.parse().ok()?) {
        ("trainer", number) => Some(ProgramPeer::Trainer(number)),
        ("server", number) => Some(ProgramPeer::Server(number)),
        _ => None,
    }
}

//! What runs the units of a program over values: variables, queues, accumulators, and what has arrived.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::flow::{Pace, Pieces, Queue, Sent};
use super::marking::Port;
use super::merge::merged;
use super::plan::{Accumulator, Act, Plan, UnitIndex};
use super::wait::Wait;
use crate::error::Failure;
use crate::limits::{PROGRAM_QUEUE_MAX, PROGRAM_STRING_BYTES_MAX};
use crate::port::{Arithmetic, Kernels};
use crate::program::plain::{read, run_node};
use crate::program::values::Values;
use crate::program::{Destination, Facts, Graph, Node, OpKind, Peer, Value, VariableIndex};

/// What carries values to other programs.
pub trait Link {
    /// Whether a destination takes one more value on a channel.
    fn has_room(&mut self, to: Peer, channel: &str) -> bool;

    /// Gives it one, with the sender's address. Asked only after [`has_room`](Self::has_room) said yes.
    fn send(&mut self, to: Peer, channel: &str, value: &Value);
}

/// What an executor is made of, and what it is told.
pub struct Parts {
    /// Runs arithmetic.
    pub arithmetic: Box<dyn Arithmetic>,
    /// Runs updates.
    pub kernels: Box<dyn Kernels>,
    /// Who sends pieces to accumulators that mind whose turn it is.
    pub senders: Vec<Peer>,
    /// How many values of one sender and channel may wait to be received, above zero.
    pub arrivals_max: usize,
    /// How many bytes its variables may take together; an op that would give more is refused before it runs.
    pub memory_bytes_max: u64,
}

/// A value that has arrived.
#[derive(Clone)]
struct Arrival {
    from: Peer,
    value: Value,
}

/// A piece in an accumulator.
#[derive(Clone)]
struct Piece {
    from: Peer,
    value: Value,
}

impl Sent for Piece {
    type Sender = Peer;

    fn sender(&self) -> Peer {
        self.from
    }
}

/// Whom a string is from: the process that it is the address of, or nobody in particular.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    Process(Peer),
    Nobody,
}

/// A string in an accumulator.
#[derive(Clone)]
struct Line {
    origin: Origin,
    text: String,
}

impl Sent for Line {
    type Sender = Origin;

    fn sender(&self) -> Origin {
        self.origin
    }
}

/// What an op keeps between its units.
#[derive(Clone)]
enum Kept {
    Nothing,
    /// What a `recv` was sent, in order of arrival.
    Arrivals(Vec<Arrival>),
    /// A gradient accumulator's pieces, and how many pieces of each sender it has given.
    Gradients(Pieces<Piece>, Vec<(Peer, u64)>),
    Strings(Pieces<Line>),
}

/// What a run can change.
pub(super) struct Before {
    states: Vec<(VariableIndex, Option<Value>)>,
    queues: Vec<Option<Queue<Value>>>,
    kept: Vec<Kept>,
}

/// The state of a program that runs.
pub(super) struct Machine {
    graph: Arc<Graph>,
    parts: Parts,
    pub(super) values: Values,
    /// Parameters and states that a run writes.
    written: Vec<VariableIndex>,
    /// By variable.
    queues: Vec<Option<Queue<Value>>>,
    /// By node.
    kept: Vec<Kept>,
}

/// A machine with the link that it runs with.
pub(super) struct Linked<'a> {
    pub(super) machine: &'a mut Machine,
    pub(super) link: &'a mut dyn Link,
}

impl Machine {
    pub(super) fn new(graph: Arc<Graph>, plan: &Plan, parts: Parts) -> Self {
        let queue = |facts: &Facts| match facts {
            Facts::Queue { capacity, .. } => {
                Some(Queue::new(usize::try_from(*capacity).expect("a queue is small, see `limits`")))
            }
            _ => None,
        };
        let queues = graph.variables().iter().map(|variable| queue(&variable.facts)).collect();
        let kept = plan.nodes().iter().map(|node| match node.kind {
            OpKind::Recv { .. } => Kept::Arrivals(Vec::new()),
            OpKind::GradientAccumulator { .. } => Kept::Gradients(Pieces::default(), Vec::new()),
            OpKind::StringAccumulator { .. } => Kept::Strings(Pieces::default()),
            _ => Kept::Nothing,
        });
        let outputs: BTreeSet<VariableIndex> = plan.nodes().iter().flat_map(|node| &node.outputs).copied().collect();
        let is_kept = |index: &VariableIndex| graph.variable(*index).purpose.is_persistable();
        let written = outputs.into_iter().filter(is_kept).collect();
        let values = Values::new(&graph, parts.memory_bytes_max);
        Self { values, written, queues, kept: kept.collect(), graph, parts }
    }

    /// What a run can change, as it is now.
    pub(super) fn save(&self) -> Before {
        let states = self.written.iter().map(|index| (*index, self.values.get(*index).cloned()));
        Before { states: states.collect(), queues: self.queues.clone(), kept: self.kept.clone() }
    }

    pub(super) fn restore(&mut self, before: Before) {
        let Before { states, queues, kept } = before;
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

    /// Runs an op that moves nothing.
    pub(super) fn compute(&mut self, node: &Node) -> Result<(), Failure> {
        let (arithmetic, kernels) = (&mut *self.parts.arithmetic, &mut *self.parts.kernels);
        run_node(&self.graph, &mut self.values, arithmetic, kernels, node)
    }

    /// Keeps a value for the `recv` that is the node at this place; gives it back when as many of the sender wait as
    /// may.
    pub(super) fn arrive(&mut self, node: usize, from: Peer, value: Value) -> Option<Value> {
        let Kept::Arrivals(arrivals) = &mut self.kept[node] else { unreachable!("the node is a recv") };
        if arrivals.iter().filter(|one| one.from == from).count() >= self.parts.arrivals_max {
            return Some(value);
        }
        arrivals.push(Arrival { from, value });
        None
    }

    /// Whether a value of this sender would be kept.
    pub(super) fn has_room(&self, node: usize, from: Peer) -> bool {
        let Kept::Arrivals(arrivals) = &self.kept[node] else { unreachable!("the node is a recv") };
        arrivals.iter().filter(|one| one.from == from).count() < self.parts.arrivals_max
    }

    /// Nobody waits for this sender any more.
    pub(super) fn leave(&mut self, sender: Peer) {
        self.parts.senders.retain(|one| *one != sender);
    }

    /// The first arrival that may be received now.
    fn next_arrival(&self, plan: &Plan, unit: UnitIndex) -> Option<usize> {
        let Kept::Arrivals(arrivals) = &self.kept[node_of(plan, unit)] else { unreachable!("the node is a recv") };
        let Some(pace) = plan.pace_of(unit) else { return (!arrivals.is_empty()).then_some(0) };
        let Kept::Gradients(pieces, given) = &self.kept[pace.node as usize] else {
            unreachable!("the node is an accumulator")
        };
        let count = |peer: Peer| given.iter().find(|(known, _)| *known == peer).map_or(0, |(_, count)| *count);
        let fewest = || self.parts.senders.iter().map(|peer| count(*peer)).min().unwrap_or(0);
        arrivals.iter().position(|one| pace.pace.admits(pieces.of(one.from).is_some(), count(one.from), fewest))
    }

    /// Why an accumulator does not give yet that holds so many pieces, and one of a sender when `has` says so.
    fn lacks(&self, held: usize, has: impl Fn(Peer) -> bool, count: u32, pace: Pace) -> Option<Wait> {
        let (needed, senders) = (count as usize, &self.parts.senders);
        // In rounds somebody may have left, and is not waited for.
        let is_whole = || !senders.is_empty() && senders.iter().all(|sender| has(*sender));
        let is_full = held >= needed || (pace == Pace::Rounds && held > 0 && is_whole());
        (!is_full).then_some(Wait::Pieces { held, needed })
    }

    fn waits_to_take(&self, plan: &Plan, unit: UnitIndex) -> Option<Wait> {
        match (&self.kept[node_of(plan, unit)], &plan.node(&plan.units()[unit.place()]).kind) {
            (Kept::Gradients(pieces, _), OpKind::GradientAccumulator { count, staleness, .. }) => {
                let has = |sender| pieces.of(sender).is_some();
                self.lacks(pieces.as_slice().len(), has, *count, Pace::of(*staleness))
            }
            (Kept::Strings(lines), OpKind::StringAccumulator { count }) => {
                // A list of senders goes with the gradient that is merged of what they sent, of which there may be
                // fewer pieces.
                let has = |sender| lines.of(Origin::Process(sender)).is_some();
                self.lacks(lines.as_slice().len(), has, *count, plan.pace_of(unit).map_or(Pace::Any, |one| one.pace))
            }
            _ => unreachable!("the node is an accumulator"),
        }
    }

    fn waits_to_put(&self, plan: &Plan, unit: UnitIndex) -> Option<Wait> {
        let held = match &self.kept[node_of(plan, unit)] {
            Kept::Gradients(pieces, _) => pieces.as_slice().len(),
            Kept::Strings(lines) => lines.as_slice().len(),
            Kept::Nothing | Kept::Arrivals(_) => unreachable!("the node is an accumulator"),
        };
        self.waits_to_take(plan, unit).is_none().then_some(Wait::Room { held })
    }

    fn queue(&mut self, node: &Node) -> &mut Queue<Value> {
        self.queues[node.inputs[0].place()].as_mut().expect("a checked program has a queue here")
    }

    fn read(&self, node: &Node, input: usize) -> Result<&Value, Failure> {
        read(&self.graph, &self.values, node.inputs[input])
    }

    fn write(&mut self, node: &Node, output: usize, value: Value) {
        self.values.set(node.outputs[output], value);
    }

    fn recv(&mut self, plan: &Plan, unit: UnitIndex, node: &Node) {
        let at = self.next_arrival(plan, unit).expect("the unit is ready");
        let Kept::Arrivals(arrivals) = &mut self.kept[node_of(plan, unit)] else { unreachable!("it is a recv") };
        let Arrival { from, value } = arrivals.remove(at);
        self.write(node, 0, value);
        if node.outputs.len() == 2 {
            self.write(node, 1, Value::Strings(vec![from.to_string()]));
        }
    }

    fn put_gradient(&mut self, place: usize, node: &Node) -> Result<(), Failure> {
        let value = self.read(node, 0)?.clone();
        // Without an address all pieces have one sender, and so keep the order of arrival.
        let from = if node.inputs.len() == 2 { address(self.read(node, 1)?)? } else { Peer::Trainer(0) };
        let Kept::Gradients(pieces, _) = &mut self.kept[place] else { unreachable!("it is an accumulator") };
        pieces.put(Piece { from, value });
        Ok(())
    }

    fn take_gradient(&mut self, accumulator: &Accumulator, node: &Node) -> Result<(), Failure> {
        let Kept::Gradients(pieces, given) = &mut self.kept[accumulator.node as usize] else {
            unreachable!("it is an accumulator")
        };
        let facts = &self.graph.variable(node.outputs[0]).facts;
        let Parts { arithmetic, kernels, .. } = &mut self.parts;
        // The pieces stay until they are one: what fails leaves them as they were.
        let several = match pieces.as_slice() {
            [_] => None,
            all => Some(merged(&mut **arithmetic, &mut **kernels, facts, all, |one| &one.value, accumulator.merge)?),
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

    /// Strings are taken whatever they say, all of a value or none.
    fn put_strings(&mut self, place: usize, node: &Node) -> Result<(), Failure> {
        let Value::Strings(new) = self.read(node, 0)?.clone() else { unreachable!("a checked program has strings") };
        let Kept::Strings(lines) = &mut self.kept[place] else { unreachable!("it is an accumulator") };
        if let Some(long) = new.iter().find(|string| string.len() > PROGRAM_STRING_BYTES_MAX) {
            let (bytes, most) = (long.len(), PROGRAM_STRING_BYTES_MAX);
            return Err(Failure::call(format!("found a string of {bytes} bytes; expected at most {most}")));
        }
        let count = (lines.as_slice().len() + new.len()) as u64;
        if count > PROGRAM_QUEUE_MAX {
            return Err(Failure::call(format!("found {count} strings; expected at most {PROGRAM_QUEUE_MAX}")));
        }
        for text in new {
            lines.put(Line { origin: peer(&text).map_or(Origin::Nobody, Origin::Process), text });
        }
        Ok(())
    }

    /// Addresses come first, in their senders' order, then other strings in the order of their text.
    fn take_strings(&mut self, place: usize, node: &Node) {
        let Kept::Strings(lines) = &mut self.kept[place] else { unreachable!("it is an accumulator") };
        let mut lines: Vec<Line> = lines.drain().collect();
        lines.sort_by(|one, other| (one.origin, &one.text).cmp(&(other.origin, &other.text)));
        let strings = lines.into_iter().map(|line| line.text).collect();
        self.write(node, 0, Value::Strings(strings));
    }

    fn dequeue(&mut self, node: &Node) {
        for output in 0..node.outputs.len() {
            let item = self.queue(node).take().expect("the unit is ready");
            self.write(node, output, item);
        }
    }
}

impl Linked<'_> {
    /// Whom a `send` sends to, each once: room is asked for one value.
    fn destinations(&self, node: &Node) -> Result<Vec<Peer>, Failure> {
        let OpKind::Send { to, .. } = node.kind else { unreachable!("the node is a send") };
        match to {
            Destination::Peer(peer) => Ok(vec![peer]),
            Destination::Senders => {
                let Value::Strings(all) = self.machine.read(node, 1)? else { unreachable!("a checked program") };
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

    fn waits_to_send(&mut self, node: &Node) -> Option<Wait> {
        let OpKind::Send { channel, .. } = &node.kind else { unreachable!("the node is a send") };
        // What has no address fails when it runs.
        let destinations = self.destinations(node).unwrap_or_default();
        let has_room = destinations.into_iter().all(|to| self.link.has_room(to, channel));
        (!has_room).then_some(Wait::Destination)
    }
}

impl Port for Linked<'_> {
    type Error = Failure;

    fn waits(&mut self, plan: &Plan, index: UnitIndex) -> Option<Wait> {
        let unit = &plan.units()[index.place()];
        let node = plan.node(unit);
        match unit.act {
            Act::Compute | Act::Loop => None,
            Act::Recv => self.machine.next_arrival(plan, index).is_none().then_some(Wait::Arrival),
            Act::Send => self.waits_to_send(node),
            Act::Enqueue => {
                let queue = self.machine.queue(node);
                queue.is_full().then_some(Wait::Space { held: queue.len() })
            }
            Act::Dequeue => {
                let (held, needed) = (self.machine.queue(node).len(), node.outputs.len());
                (held < needed).then_some(Wait::Items { held, needed })
            }
            Act::PutGradient | Act::PutString => self.machine.waits_to_put(plan, index),
            Act::TakeGradient | Act::TakeString => self.machine.waits_to_take(plan, index),
        }
    }

    fn run(&mut self, plan: &Plan, index: UnitIndex) -> Result<(), Failure> {
        let unit = &plan.units()[index.place()];
        let (place, node) = (unit.node as usize, plan.node(unit));
        match unit.act {
            Act::Compute => self.machine.compute(node)?,
            Act::Loop => {}
            Act::Recv => self.machine.recv(plan, index, node),
            Act::Send => self.send(node)?,
            Act::Enqueue => {
                let item = self.machine.read(node, 1)?.clone();
                self.machine.queue(node).put(item);
            }
            Act::Dequeue => self.machine.dequeue(node),
            Act::PutGradient => self.machine.put_gradient(place, node)?,
            Act::TakeGradient => {
                let own = plan.accumulator(unit.node).expect("the plan has every accumulator");
                self.machine.take_gradient(own, node)?;
            }
            Act::PutString => self.machine.put_strings(place, node)?,
            Act::TakeString => self.machine.take_strings(place, node),
        }
        Ok(())
    }
}

fn node_of(plan: &Plan, unit: UnitIndex) -> usize {
    plan.units()[unit.place()].node as usize
}

/// The only address in a value.
fn address(value: &Value) -> Result<Peer, Failure> {
    match value {
        Value::Strings(all) if all.len() == 1 => addressed(&all[0]),
        other => Err(Failure::call(format!("found {other}; expected one address"))),
    }
}

/// The process that an address is of.
fn addressed(address: &str) -> Result<Peer, Failure> {
    peer(address).ok_or_else(|| Failure::call(format!("found {address:?}; expected an address, trainer:0 or server:0")))
}

/// The process that a string is the address of, if it is one.
fn peer(string: &str) -> Option<Peer> {
    let (kind, number) = string.split_once(':')?;
    match (kind, number.parse().ok()?) {
        ("trainer", number) => Some(Peer::Trainer(number)),
        ("server", number) => Some(Peer::Server(number)),
        _ => None,
    }
}

//! Cost model: an estimate of each process's time per step, by which placements are compared.
//!
//! ```text
//! own  = messages * message_seconds + ops * op_seconds + rows * row_seconds
//!      + flops / flops_per_second + memory bytes / memory_bytes_per_second
//! wire = (bytes sent + bytes received) / link_bytes_per_second
//! ```
//!
//! `step_time` makes the time of a step of them. Counted per step of all trainers:
//!
//! - *Bytes* are those of the elements: of a dense tensor all, of selected rows 8 for each row's number as well. A
//!   batch has [`CostModel::batch`] examples, and selected rows are as many as the ids that looked them up, at most the
//!   height; of a table that is only looked up these rows travel. Addresses and frames are left out.
//! - *Messages* are frames: all dense gradients of a trainer for a server travel in one, and the parameters come back
//!   in another. A table has two for the gradients of its rows and two for the rows that are read. Each counts where it
//!   is sent and where it is received.
//! - *Round trips* of a trainer: one for dense values, one for all rows that are read and one for all their gradients.
//!   Each takes longer where processes that exchange messages are more than the cores they share.
//! - *Ops* are those of the program that run, a `recv` and a `send` too.
//! - *Rows* are selected rows that a trainer sends, asks for and looks up among those that came, and that a server
//!   adds, updates and looks up: each is found by its number.
//! - *Flops*: `2 n k m` for a matrix product, two for every product of a convolution, 200 for every element of an
//!   exponential or the like, whose loops are scalar, and one for every element of the largest operand otherwise.
//! - *Memory bytes*: what an op reads and writes, once each; an update or a lookup by rows touches these rows only. A
//!   trainer copies what it sends. An accumulator reads a piece: servers add while they update.
//! - What runs once, before the steps, is left out: a server's ops outside of its loop, and every `initialise`.
//!
//! An op of a server runs as often as its inputs come: a `recv` once for every `send` to it, what follows an
//! accumulator of `N` once for every `N` pieces.

use std::collections::BTreeMap;

use crate::graph::{Graph, Node, VariableIndex};
use crate::op::{Destination, OpKind, OpRole, ProgramPeer};
use crate::variable::{Dim, Purpose, Variable, VariableFacts};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::CHUNK_BYTES_DEFAULT;

use super::part::ProgramPart;
use super::step_time::{ProcessGroup, ProcessSeconds, StepPace};

/// Vector operations in the time of one scalar exponential: 4 ns at 50 Gflop/s.
const SCALAR_FUNCTION_FLOPS: u64 = 200;

/// The rates of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessRates {
    /// Bytes per second of its link, both directions together.
    pub link_bytes_per_second: f64,
    /// Seconds that a message costs beyond its bytes.
    pub message_seconds: f64,
    /// Seconds that an op costs beyond its arithmetic.
    pub op_seconds: f64,
    /// Seconds that a selected row costs beyond its bytes.
    pub row_seconds: f64,
    /// Floating-point operations per second.
    pub flops_per_second: f64,
    /// Bytes per second that it reads and writes.
    pub memory_bytes_per_second: f64,
}

impl Default for ProcessRates {
    /// A link of 100 Gbit/s, 10 us for a message, 1 us for an op, 0.1 us for a row, 100 Gflop/s and 20 GB/s: a modest
    /// host, to be replaced by measured rates.
    fn default() -> Self {
        Self {
            link_bytes_per_second: 12.5e9,
            message_seconds: 10e-6,
            op_seconds: 1e-6,
            row_seconds: 0.1e-6,
            flops_per_second: 100e9,
            memory_bytes_per_second: 20e9,
        }
    }
}

/// Assumptions of an estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Every trainer.
    pub trainer: ProcessRates,
    /// Every server.
    pub server: ProcessRates,
    /// Examples in a trainer's batch.
    pub batch: u64,
    /// Pieces of a parameter are multiples of this many bytes, as far as rows allow.
    pub chunk_bytes: u32,
    /// Cores that all processes share, on one machine; zero if each has a machine of its own.
    pub shared_cores: u32,
    /// Seconds by which a round trip takes longer for each process that exchanges messages beyond those cores.
    pub crowding_seconds: f64,
    /// Bytes that a server may hold; zero without a limit.
    pub server_bytes_max: u64,
}

impl Default for CostModel {
    fn default() -> Self {
        let machine = ProcessRates::default();
        Self {
            trainer: machine,
            server: machine,
            batch: 64,
            chunk_bytes: CHUNK_BYTES_DEFAULT,
            shared_cores: 0,
            crowding_seconds: 50e-6,
            server_bytes_max: 0,
        }
    }
}

impl CostModel {
    /// Refuses rates and sizes that give no estimate.
    ///
    /// # Errors
    /// Names the field, the found and the expected value.
    pub fn validate(&self) -> Result<(), Failure> {
        for (machine, rates) in [("trainer", self.trainer), ("server", self.server)] {
            let above_zero = [
                ("link_bytes_per_second", rates.link_bytes_per_second),
                ("flops_per_second", rates.flops_per_second),
                ("memory_bytes_per_second", rates.memory_bytes_per_second),
            ];
            for (field, rate) in above_zero {
                if !(rate.is_finite() && rate > 0.0) {
                    return Err(Failure::call(format!("{machine}.{field} is {rate}; expected a rate above zero")));
                }
            }
            let not_below_zero = [
                ("message_seconds", rates.message_seconds),
                ("op_seconds", rates.op_seconds),
                ("row_seconds", rates.row_seconds),
            ];
            for (field, seconds) in not_below_zero {
                if !(seconds.is_finite() && seconds >= 0.0) {
                    return Err(Failure::call(format!("{machine}.{field} is {seconds}; expected zero or above")));
                }
            }
        }
        let seconds = self.crowding_seconds;
        if !(seconds.is_finite() && seconds >= 0.0) {
            return Err(Failure::call(format!("crowding_seconds is {seconds}; expected zero or above")));
        }
        for (field, value) in [("batch", self.batch), ("chunk_bytes", self.chunk_bytes.into())] {
            if value == 0 {
                return Err(Failure::call(format!("{field} is 0; expected 1 or more")));
            }
        }
        Ok(())
    }
}

/// The work of a process in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Messages, both ways.
    pub messages: u64,
    /// Ops that run.
    pub ops: u64,
    /// Selected rows.
    pub rows: u64,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written in memory.
    pub memory_bytes: u64,
}

impl StepWork {
    /// Its duration in seconds, at these rates.
    #[must_use]
    pub fn seconds(&self, machine: &ProcessRates) -> f64 {
        self.process_seconds(machine).sum()
    }

    /// The same by parts.
    pub(super) fn process_seconds(&self, machine: &ProcessRates) -> ProcessSeconds {
        let linked = self.sent_bytes.saturating_add(self.received_bytes);
        ProcessSeconds {
            own: real(self.messages) * machine.message_seconds
                + real(self.ops) * machine.op_seconds
                + real(self.rows) * machine.row_seconds
                + real(self.flops) / machine.flops_per_second
                + real(self.memory_bytes) / machine.memory_bytes_per_second,
            wire: real(linked) / machine.link_bytes_per_second,
        }
    }

    pub(super) fn add(&mut self, other: &Self, times: u64) {
        let sum = |total: &mut u64, more: u64| *total = total.saturating_add(more.saturating_mul(times));
        sum(&mut self.sent_bytes, other.sent_bytes);
        sum(&mut self.received_bytes, other.received_bytes);
        sum(&mut self.messages, other.messages);
        sum(&mut self.ops, other.ops);
        sum(&mut self.rows, other.rows);
        sum(&mut self.flops, other.flops);
        sum(&mut self.memory_bytes, other.memory_bytes);
    }
}

/// One process of an estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeEstimate {
    /// The process.
    pub peer: ProgramPeer,
    /// Its work in one step.
    pub work: StepWork,
    /// Bytes that it holds, if it is a server: parameters and states, a parameter's next value where an update replaces
    /// it, and the gradients of a round.
    pub held_bytes: u64,
    /// Its duration in seconds.
    pub seconds: f64,
}

/// The estimated cost of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Every process, in the order of the parts.
    pub nodes: Vec<NodeEstimate>,
    /// The duration of a step in seconds.
    pub step_seconds: f64,
}

impl Estimate {
    /// Refuses a server that holds more than it may.
    pub(super) fn check_held(&self, parts: &[ProgramPart], costs: &CostModel) -> Result<(), Failure> {
        let fullest = self.nodes.iter().max_by_key(|node| node.held_bytes);
        let limit = costs.server_bytes_max;
        let Some(fullest) = fullest.filter(|node| 0 < limit && limit < node.held_bytes) else { return Ok(()) };
        let own = parts.iter().find(|part| part.peers.contains(&fullest.peer)).map(|part| part.graph.variables());
        let bytes = |variable: &Variable| {
            variable.facts.fixed_dense().map_or(0, |(element_type, shape)| {
                shape.iter().fold(element_type.bytes(), |bytes, length| bytes.saturating_mul(*length))
            })
        };
        let parameters = own.unwrap_or_default().iter().filter(|one| one.purpose == Purpose::Parameter);
        let largest = parameters.max_by_key(|one| bytes(one)).map_or("", |one| &one.name);
        let found: u64 = self.nodes.iter().map(|node| node.held_bytes).fold(0, u64::saturating_add);
        let (peer, held, servers) = (fullest.peer, fullest.held_bytes, self.servers().count());
        Err(Failure::call(format!(
            "{peer} would hold {held} bytes, with {largest:?} as its largest parameter, and all {servers} servers \
             {found}; expected at most {limit} for each: more servers, more memory, or parameters that can be cut"
        )))
    }

    fn servers(&self) -> impl Iterator<Item = &NodeEstimate> {
        self.nodes.iter().filter(|node| matches!(node.peer, ProgramPeer::Server(_)))
    }

    /// The time of the slowest server; zero without servers.
    #[must_use]
    pub fn server_seconds(&self) -> f64 {
        self.servers().map(|node| node.seconds).fold(0.0, f64::max)
    }
}

/// How the trainers' values of a step travel to a server: dense ones in one exchange of two messages, rows of a table
/// in two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Exchanges {
    pub(super) has_dense: bool,
    /// Gradients of selected rows.
    pub(super) tables: u32,
}

impl Exchanges {
    /// The exchanges of a value with these facts.
    pub(super) fn of(facts: &VariableFacts) -> Self {
        let has_rows = matches!(facts, VariableFacts::SelectedRows { .. });
        Self { has_dense: !has_rows, tables: has_rows.into() }
    }

    pub(super) fn messages(self) -> u64 {
        2 * u64::from(self.has_dense) + 4 * u64::from(self.tables)
    }

    pub(super) fn round_trips(self) -> u32 {
        u32::from(self.has_dense) + 2 * u32::from(self.tables > 0)
    }

    pub(super) fn add(&mut self, other: Self) {
        self.has_dense |= other.has_dense;
        self.tables = self.tables.saturating_add(other.tables);
    }
}

/// The pieces of a step on one channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ChannelPieces {
    /// Pieces.
    pub(super) count: u64,
    /// Rows of each, if they are selected rows, or the ids of such rows.
    pub(super) rows: u64,
}

/// Values that trainers send in a step.
#[derive(Default)]
struct Traffic<'p> {
    pieces: BTreeMap<(ProgramPeer, &'p str), ChannelPieces>,
    messages: BTreeMap<ProgramPeer, u64>,
    /// Round trips of the trainer that has most.
    round_trips: u32,
}

impl<'p> Traffic<'p> {
    fn of(parts: &'p [ProgramPart], costs: &CostModel) -> Self {
        let mut traffic = Self::default();
        for part in parts {
            let senders = part.peers.iter().filter(|peer| matches!(peer, ProgramPeer::Trainer(_))).count() as u64;
            if senders > 0 {
                traffic.add(part, senders, costs);
            }
        }
        traffic
    }

    fn add(&mut self, part: &'p ProgramPart, senders: u64, costs: &CostModel) {
        let sizes = Sizes::new(&part.graph, costs, &|_| 0);
        let mut servers: BTreeMap<ProgramPeer, Exchanges> = BTreeMap::new();
        let mut own = 0;
        for node in &part.graph.scopes()[0].nodes {
            if let OpKind::PullRows { channel, to, .. } = &node.kind {
                // Its messages are those of the rows of the gradient.
                let pieces = ChannelPieces { count: senders, rows: sizes.rows(node.outputs[0]) };
                self.pieces.insert((*to, channel), pieces);
            }
            let OpKind::Send { channel, to: Destination::Peer(to) } = &node.kind else { continue };
            let pieces = self.pieces.entry((*to, channel)).or_default();
            pieces.count += senders;
            pieces.rows = pieces.rows.max(sizes.rows(node.inputs[0]));
            if let ProgramPeer::Server(_) = to {
                servers.entry(*to).or_default().add(Exchanges::of(&part.graph.variable(node.inputs[0]).facts));
            } else {
                own += 1;
                *self.messages.entry(*to).or_default() += senders;
            }
        }
        let mut all = Exchanges::default();
        for (server, exchanges) in servers {
            all.add(exchanges);
            own += exchanges.messages();
            *self.messages.entry(server).or_default() += senders * exchanges.messages();
        }
        self.round_trips = self.round_trips.max(all.round_trips());
        part.peers.iter().for_each(|peer| *self.messages.entry(*peer).or_default() += own);
    }
}

/// Estimates the cost of one step of sub-programs.
#[must_use]
pub fn estimate(parts: &[ProgramPart], costs: &CostModel) -> Estimate {
    let traffic = Traffic::of(parts, costs);
    let merges = |node: &Node| matches!(node.kind, OpKind::GradientAccumulator { count: 2.., .. });
    let mut all = parts.iter().flat_map(|part| part.graph.scopes()).flat_map(|scope| &scope.nodes);
    let trainer_count =
        parts.iter().flat_map(|part| &part.peers).filter(|peer| matches!(peer, ProgramPeer::Trainer(_)));
    let is_waiting = trainer_count.count() < 2 || all.any(merges);
    let pace = StepPace { is_waiting, shared_cores: costs.shared_cores, crowding_seconds: costs.crowding_seconds };
    let linked = traffic.messages.values().filter(|messages| **messages > 0).count();
    let (mut trainers, mut servers) = (ProcessGroup::default(), ProcessGroup::default());
    let nodes = parts.iter().flat_map(|part| part.peers.iter().map(|peer| (*peer, &part.graph)));
    let nodes = nodes.map(|(peer, graph)| {
        let pieces = |channel: &str| traffic.pieces.get(&(peer, channel)).copied().unwrap_or_default();
        let (machine, group, mut work, held_bytes) = match peer {
            ProgramPeer::Trainer(_) => (&costs.trainer, &mut trainers, trainer_work(graph, costs), 0),
            ProgramPeer::Server(_) => {
                let work = server_work(graph, &pieces, costs);
                (&costs.server, &mut servers, work, held_bytes(graph, &pieces, costs))
            }
        };
        work.messages = traffic.messages.get(&peer).copied().unwrap_or(0);
        let seconds = work.process_seconds(machine);
        group.add(seconds, 1);
        NodeEstimate { peer, work, held_bytes, seconds: seconds.sum() }
    });
    let nodes = nodes.collect();
    let crowding = pace.crowding(linked, traffic.round_trips);
    Estimate { nodes, step_seconds: pace.step_seconds(&trainers, &servers) + crowding }
}

/// Everything in block 0 once, without messages.
fn trainer_work(graph: &Graph, costs: &CostModel) -> StepWork {
    let mut work = StepWork::default();
    trainer_works(graph, costs).for_each(|(_, op)| work.add(&op, 1));
    work
}

/// The ops of a trainer's step, each with its work.
pub(super) fn trainer_works<'a>(graph: &'a Graph, costs: &'a CostModel) -> impl Iterator<Item = (&'a Node, StepWork)> {
    let sizes = Sizes::new(graph, costs, &|_| 0);
    let nodes = graph.scopes()[0].nodes.iter().filter(|node| node.role != OpRole::Initialise);
    nodes.map(move |node| (node, sizes.work(node, 1)))
}

/// The work in loops, as often as the inputs arrive, without messages.
pub(super) fn server_work(graph: &Graph, arriving: &dyn Fn(&str) -> ChannelPieces, costs: &CostModel) -> StepWork {
    let mut work = StepWork::default();
    let sizes = Sizes::new(graph, costs, &|channel| arriving(channel).rows);
    // How often a variable gets a value in a step, and how many strings it has then.
    let mut values: BTreeMap<VariableIndex, (u64, u64)> = BTreeMap::new();
    for node in graph.scopes().iter().skip(1).flat_map(|scope| &scope.nodes) {
        let known = node.inputs.iter().filter_map(|input| values.get(input));
        let runs = match &node.kind {
            OpKind::Recv { channel } => arriving(channel).count,
            _ => known.map(|(runs, _)| *runs).min().unwrap_or(0),
        };
        let addresses = node.inputs.get(1).and_then(|input| values.get(input)).map_or(1, |(_, strings)| *strings);
        work.add(&sizes.work(node, addresses), runs);
        let given = match node.kind {
            OpKind::GradientAccumulator { count, .. } => (runs / u64::from(count), 1),
            OpKind::StringAccumulator { count } => (runs / u64::from(count), count.into()),
            OpKind::Dequeue { min_count } => (runs / u64::from(min_count), 1),
            _ => (runs, 1),
        };
        if let OpKind::Enqueue = node.kind {
            values.insert(node.inputs[0], (runs, 1));
        }
        let temporary = node.outputs.iter().filter(|output| !node.inputs.contains(output));
        values.extend(temporary.map(|output| (*output, given)));
    }
    work
}

/// The bytes that a server holds, as [`NodeEstimate::held_bytes`].
pub(super) fn held_bytes(graph: &Graph, arriving: &dyn Fn(&str) -> ChannelPieces, costs: &CostModel) -> u64 {
    let sizes = Sizes::new(graph, costs, &|channel| arriving(channel).rows);
    let kept = graph.variables().iter().filter(|variable| variable.purpose.is_persistable());
    let kept = kept.filter_map(|variable| graph.find(&variable.name)).map(|index| sizes.bytes(index));
    let nodes = graph.scopes().iter().skip(1).flat_map(|scope| &scope.nodes);
    let of_rounds = nodes.map(|node| match node.kind {
        OpKind::GradientAccumulator { count, .. } => sizes.bytes(node.inputs[0]).saturating_mul(count.into()),
        OpKind::Update { .. } if sizes.rows(node.inputs[1]) == 0 => sizes.bytes(node.inputs[0]),
        _ => 0,
    });
    kept.chain(of_rounds).fold(0, u64::saturating_add)
}

/// Rows of the selected rows that a program's ops compute, by name.
pub(super) fn row_counts<'a>(graph: &'a Graph, costs: &CostModel) -> BTreeMap<&'a str, u64> {
    let sizes = Sizes::new(graph, costs, &|_| 0);
    sizes.row_counts.iter().map(|(index, rows)| (graph.variable(*index).name.as_str(), *rows)).collect()
}

/// The ids in some variables.
pub(super) fn id_count(graph: &Graph, variables: &[&str], costs: &CostModel) -> u64 {
    let sizes = Sizes { graph, costs, row_counts: BTreeMap::new(), joined: BTreeMap::new() };
    let ids = variables.iter().filter_map(|name| graph.find(name));
    ids.map(|index| sizes.elements(index)).fold(0, u64::saturating_add)
}

/// Sizes of values and the work of ops.
struct Sizes<'a> {
    graph: &'a Graph,
    costs: &'a CostModel,
    /// Rows of each variable of selected rows, and the batch of ids that are asked for and of the rows that answer.
    row_counts: BTreeMap<VariableIndex, u64>,
    /// The height of the table of which a variable is rows of a piece.
    joined: BTreeMap<VariableIndex, u64>,
}

impl<'a> Sizes<'a> {
    /// `arriving` gives the rows of each piece on a channel.
    fn new(graph: &'a Graph, costs: &'a CostModel, arriving: &dyn Fn(&str) -> u64) -> Self {
        let mut sizes = Self { graph, costs, row_counts: BTreeMap::new(), joined: BTreeMap::new() };
        for node in &graph.scopes()[0].nodes {
            if let (OpKind::Concat { .. }, [output]) = (&node.kind, &node.outputs[..])
                && let VariableFacts::SelectedRows { height, .. } = graph.variable(*output).facts
            {
                sizes.joined.extend(node.inputs.iter().map(|piece| (*piece, height)));
            }
        }
        for node in graph.scopes().iter().flat_map(|scope| &scope.nodes) {
            sizes.count_asked(node, arriving);
            for output in &node.outputs {
                if let VariableFacts::SelectedRows { height, .. } = graph.variable(*output).facts {
                    let rows = sizes.written_rows(node, height, arriving).clamp(1, height.max(1));
                    sizes.row_counts.insert(*output, rows);
                }
            }
        }
        sizes
    }

    /// Counts the ids that a server receives, and the rows that it looks up for them.
    fn count_asked(&mut self, node: &Node, arriving: &dyn Fn(&str) -> u64) {
        let rows = match &node.kind {
            OpKind::Recv { channel } => arriving(channel),
            OpKind::LookupTable { .. } => self.rows(node.inputs[1]),
            _ => 0,
        };
        if rows == 0 {
            return;
        }
        if let VariableFacts::Dense { shape, .. } = &self.graph.variable(node.outputs[0]).facts
            && shape.contains(&Dim::Batch)
        {
            self.row_counts.insert(node.outputs[0], rows);
        }
    }

    /// The share of some rows that a piece of this height of a table has.
    fn share(rows: u64, height: u64, whole: u64) -> u64 {
        let share = u128::from(rows) * u128::from(height);
        u64::try_from(share.div_ceil(whole.max(1).into())).unwrap_or(u64::MAX)
    }

    /// The rows of an output of this height.
    fn written_rows(&self, node: &Node, height: u64, arriving: &dyn Fn(&str) -> u64) -> u64 {
        let from = |index: &VariableIndex| self.rows(*index);
        match &node.kind {
            OpKind::LookupTableGradient { .. } => self.elements(node.inputs[0]),
            OpKind::Recv { channel } => arriving(channel),
            OpKind::GradientAccumulator { count, .. } => from(&node.inputs[0]).saturating_mul((*count).into()),
            OpKind::Split { .. } => {
                let VariableFacts::SelectedRows { height: whole, .. } = self.graph.variable(node.inputs[0]).facts
                else {
                    return height;
                };
                Self::share(from(&node.inputs[0]), height, whole)
            }
            OpKind::PullRows { .. } => {
                let ids = node.inputs[1..].iter().map(|ids| self.elements(*ids)).fold(0, u64::saturating_add);
                Self::share(ids, height, self.joined.get(&node.outputs[0]).copied().unwrap_or(height))
            }
            _ => node.inputs.iter().map(from).fold(0, u64::saturating_add),
        }
    }

    /// Rows of selected rows; zero for other values.
    fn rows(&self, index: VariableIndex) -> u64 {
        self.row_counts.get(&index).copied().unwrap_or(0)
    }

    /// The work of one run of an op; a `send` to the senders of a round goes to this many addresses.
    fn work(&self, node: &Node, addresses: u64) -> StepWork {
        let op = StepWork { ops: 1, ..StepWork::default() };
        match &node.kind {
            OpKind::Send { to, .. } => {
                let bytes = self.bytes(node.inputs[0]);
                match to {
                    Destination::Senders => StepWork { sent_bytes: bytes.saturating_mul(addresses), ..op },
                    Destination::Peer(_) => {
                        let (rows, memory_bytes) = (self.rows(node.inputs[0]), bytes.saturating_mul(2));
                        StepWork { sent_bytes: bytes, rows, memory_bytes, ..op }
                    }
                }
            }
            OpKind::Recv { .. } => StepWork { received_bytes: self.bytes(node.outputs[0]), ..op },
            OpKind::PullRows { .. } => {
                let (all, ids) = (self.bytes(node.outputs[0]), self.rows(node.outputs[0]).saturating_mul(8));
                let rows = self.rows(node.outputs[0]);
                StepWork { sent_bytes: ids, received_bytes: all.saturating_sub(ids), rows, memory_bytes: all, ..op }
            }
            OpKind::GradientAccumulator { .. } => StepWork {
                rows: self.rows(node.inputs[0]),
                flops: self.elements(node.inputs[0]),
                memory_bytes: self.bytes(node.inputs[0]),
                ..op
            },
            OpKind::StringAccumulator { .. }
            | OpKind::LoopForever { .. }
            | OpKind::Enqueue
            | OpKind::Dequeue { .. } => StepWork::default(),
            kind => {
                let rows = match kind {
                    OpKind::Update { .. } => self.rows(node.inputs[1]),
                    OpKind::LookupTable { .. } if self.is_by_number(node) => self.elements(node.inputs[1]),
                    _ => 0,
                };
                StepWork { rows, flops: self.flops(node), memory_bytes: self.memory_bytes(node), ..op }
            }
        }
    }

    /// Whether a lookup finds each row by its number: on a server, and among rows that were pulled.
    fn is_by_number(&self, node: &Node) -> bool {
        let table = &self.graph.variable(node.inputs[0]).facts;
        node.role == OpRole::Communication || matches!(table, VariableFacts::SelectedRows { .. })
    }

    fn flops(&self, node: &Node) -> u64 {
        let all = node.inputs.iter().chain(&node.outputs);
        match node.kind {
            OpKind::Matmul { transpose_left, .. } => {
                let inner = usize::from(!transpose_left);
                let inner = self.shape(node.inputs[0]).get(inner).copied().unwrap_or(1);
                self.elements(node.outputs[0]).saturating_mul(inner).saturating_mul(2)
            }
            OpKind::Conv2d { .. } => self.convolution_flops(node.outputs[0], node.inputs[1]),
            OpKind::Conv2dInputGradient { .. } => self.convolution_flops(node.inputs[1], node.inputs[0]),
            OpKind::Conv2dFilterGradient { .. } => self.convolution_flops(node.inputs[1], node.outputs[0]),
            OpKind::Update { .. } => self.elements(node.inputs[1]),
            OpKind::LookupTable { .. } => self.elements(node.outputs[0]),
            OpKind::Exp
            | OpKind::Log
            | OpKind::Pow
            | OpKind::Tanh
            | OpKind::Sigmoid
            | OpKind::Softmax
            | OpKind::LogSoftmax
            | OpKind::SoftmaxWithCrossEntropy
            | OpKind::SigmoidCrossEntropy
            | OpKind::Gelu { .. } => self.elements(node.inputs[0]).saturating_mul(SCALAR_FUNCTION_FLOPS),
            _ => all.map(|index| self.elements(*index)).max().unwrap_or(0),
        }
    }

    /// Of a convolution or of a gradient of one: every output element has a product for every element of one filter.
    fn convolution_flops(&self, y: VariableIndex, filter: VariableIndex) -> u64 {
        let products = self.shape(filter).iter().skip(1).fold(2_u64, |all, length| all.saturating_mul(*length));
        self.elements(y).saturating_mul(products)
    }

    fn memory_bytes(&self, node: &Node) -> u64 {
        let all = || node.inputs.iter().chain(&node.outputs);
        let touched = |index: &VariableIndex| match node.kind {
            OpKind::Update { .. } => self.bytes(*index).min(self.touched_bytes(node.inputs[1], *index)),
            OpKind::LookupTable { .. } if *index == node.inputs[0] => self.bytes(node.outputs[0]),
            _ => self.bytes(*index),
        };
        all().map(touched).fold(0, u64::saturating_add)
    }

    /// The bytes of a tensor that an update by this gradient touches.
    fn touched_bytes(&self, gradient: VariableIndex, tensor: VariableIndex) -> u64 {
        match &self.graph.variable(gradient).facts {
            VariableFacts::SelectedRows { .. } if tensor != gradient => {
                self.elements(gradient).saturating_mul(self.element_bytes(tensor))
            }
            _ => u64::MAX,
        }
    }

    fn element_bytes(&self, index: VariableIndex) -> u64 {
        self.graph.variable(index).facts.element_type().map_or(0, ElementType::bytes)
    }

    fn bytes(&self, index: VariableIndex) -> u64 {
        let numbers = match &self.graph.variable(index).facts {
            VariableFacts::SelectedRows { .. } => self.rows(index).saturating_mul(8),
            _ => 0,
        };
        self.elements(index).saturating_mul(self.element_bytes(index)).saturating_add(numbers)
    }

    fn elements(&self, index: VariableIndex) -> u64 {
        match &self.graph.variable(index).facts {
            VariableFacts::Dense { .. } => self.shape(index).iter().fold(1, |all, length| all.saturating_mul(*length)),
            VariableFacts::SelectedRows { width, .. } => self.rows(index).saturating_mul(*width),
            VariableFacts::Queue { .. } | VariableFacts::Strings => 0,
        }
    }

    fn shape(&self, index: VariableIndex) -> Vec<u64> {
        let VariableFacts::Dense { shape, .. } = &self.graph.variable(index).facts else { return Vec::new() };
        let length = |dim: &Dim| match dim {
            Dim::Fixed(length) => *length,
            Dim::Batch => self.row_counts.get(&index).copied().unwrap_or(self.costs.batch),
        };
        shape.iter().map(length).collect()
    }
}

/// A count as a real number; rounding beyond 2^53 does not matter to an estimate.
pub(super) const fn real(count: u64) -> f64 {
    count as f64
}

//! Cost model: an estimate of each process's time per step, by which placements are compared.
//!
//! The time of a process is a sum of four quotients, so nothing in it overlaps:
//!
//! ```text
//! seconds = (bytes sent + bytes received) / link_bytes_per_second
//!         + messages * message_seconds
//!         + flops / flops_per_second
//!         + memory bytes / memory_bytes_per_second
//! ```
//!
//! and the time of a step is that of the slowest process. Counted per step of all trainers:
//!
//! - *Bytes* are those of the elements: of a dense tensor all, of selected rows 8 for each row's number as well. A
//!   batch has [`CostModel::batch`] examples, and selected rows are one for every [`CostModel::rows_apart`] of the
//!   height. Addresses and frames are left out.
//! - *Messages* are counted where they are sent and where they are received.
//! - *Flops*: `2 n k m` for a matrix product, two for every product of a convolution, and one for every element of
//!   the largest operand otherwise.
//! - *Memory bytes*: what an op reads and writes, once each; an update or a lookup by rows touches these rows only. An
//!   accumulator reads a piece, and reads and writes the sum.
//! - What runs once, before the steps, is left out: a server's ops outside of its loop, and every `initialise`.
//!
//! An op of a server runs as often as its inputs come: a `recv` once for every `send` to it, what follows an
//! accumulator of `N` once for every `N` pieces.

use std::collections::BTreeMap;

use crate::graph::{Graph, Node, VariableIndex};
use crate::op::{Destination, OpKind, OpRole, ProgramPeer};
use crate::variable::{Dim, VariableFacts};
use pserver_core::error::Failure;
use pserver_core::limits::CHUNK_BYTES_DEFAULT;

use super::part::{Cluster, ProgramPart};

/// The rates of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessRates {
    /// Bytes per second of its link, both directions together.
    pub link_bytes_per_second: f64,
    /// Seconds that a message costs beyond its bytes.
    pub message_seconds: f64,
    /// Floating-point operations per second.
    pub flops_per_second: f64,
    /// Bytes per second that it reads and writes.
    pub memory_bytes_per_second: f64,
}

impl Default for ProcessRates {
    /// A link of 100 Gbit/s, 10 us for a message, 100 Gflop/s and 20 GB/s: a modest host, to be replaced by measured
    /// rates.
    fn default() -> Self {
        Self {
            link_bytes_per_second: 12.5e9,
            message_seconds: 10e-6,
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
    /// A gradient of selected rows has one row for this many of the table's.
    pub rows_apart: u64,
    /// Pieces of a parameter are multiples of this many bytes, as far as rows allow.
    pub chunk_bytes: u32,
}

impl Default for CostModel {
    fn default() -> Self {
        let machine = ProcessRates::default();
        Self { trainer: machine, server: machine, batch: 64, rows_apart: 256, chunk_bytes: CHUNK_BYTES_DEFAULT }
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
            let seconds = rates.message_seconds;
            if !(seconds.is_finite() && seconds >= 0.0) {
                return Err(Failure::call(format!("{machine}.message_seconds is {seconds}; expected zero or above")));
            }
        }
        for (field, value) in
            [("batch", self.batch), ("rows_apart", self.rows_apart), ("chunk_bytes", self.chunk_bytes.into())]
        {
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
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written in memory.
    pub memory_bytes: u64,
}

impl StepWork {
    /// Its duration in seconds, at these rates.
    #[must_use]
    pub fn seconds(&self, machine: &ProcessRates) -> f64 {
        let linked = self.sent_bytes.saturating_add(self.received_bytes);
        real(linked) / machine.link_bytes_per_second
            + real(self.messages) * machine.message_seconds
            + real(self.flops) / machine.flops_per_second
            + real(self.memory_bytes) / machine.memory_bytes_per_second
    }

    fn add(&mut self, other: &Self, times: u64) {
        let sum = |total: &mut u64, more: u64| *total = total.saturating_add(more.saturating_mul(times));
        sum(&mut self.sent_bytes, other.sent_bytes);
        sum(&mut self.received_bytes, other.received_bytes);
        sum(&mut self.messages, other.messages);
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
    /// Its duration in seconds.
    pub seconds: f64,
}

/// The estimated cost of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Every process, in the order of the parts.
    pub nodes: Vec<NodeEstimate>,
}

impl Estimate {
    /// The time of the slowest process.
    #[must_use]
    pub fn step_seconds(&self) -> f64 {
        self.nodes.iter().map(|node| node.seconds).fold(0.0, f64::max)
    }

    /// The time of the slowest server; zero without servers.
    #[must_use]
    pub fn server_seconds(&self) -> f64 {
        let servers = self.nodes.iter().filter(|node| matches!(node.peer, ProgramPeer::Server(_)));
        servers.map(|node| node.seconds).fold(0.0, f64::max)
    }
}

/// Estimates the cost of one step of sub-programs.
#[must_use]
pub fn estimate(parts: &[ProgramPart], costs: &CostModel) -> Estimate {
    let mut sends: BTreeMap<(ProgramPeer, &str), u64> = BTreeMap::new();
    for (part, op) in parts.iter().flat_map(|part| part.graph.program().blocks[0].ops.iter().map(move |op| (part, op)))
    {
        if let OpKind::Send { channel, to: Destination::Peer(to) } = &op.kind {
            let senders = part.peers.iter().filter(|peer| matches!(peer, ProgramPeer::Trainer(_))).count() as u64;
            *sends.entry((*to, channel)).or_default() += senders;
        }
    }
    let nodes = parts.iter().flat_map(|part| part.peers.iter().map(|peer| (*peer, &part.graph)));
    let nodes = nodes.map(|(peer, graph)| {
        let sent = |channel: &str| sends.get(&(peer, channel)).copied().unwrap_or(0);
        let (machine, work) = match peer {
            ProgramPeer::Trainer(_) => (&costs.trainer, trainer_work(graph, costs)),
            ProgramPeer::Server(_) => (&costs.server, server_work(graph, &sent, costs)),
        };
        NodeEstimate { peer, work, seconds: work.seconds(machine) }
    });
    Estimate { nodes: nodes.collect() }
}

/// The work of a server in a step in which each of its channels gets a piece from every trainer.
pub(super) fn group_work(graph: &Graph, cluster: Cluster, costs: &CostModel) -> StepWork {
    server_work(graph, &|_| cluster.trainers.into(), costs)
}

/// Everything in block 0 once.
fn trainer_work(graph: &Graph, costs: &CostModel) -> StepWork {
    let mut work = StepWork::default();
    for node in graph.scopes()[0].nodes.iter().filter(|node| node.role != OpRole::Initialise) {
        work.add(&Sizes { graph, costs }.work(node, 1), 1);
    }
    work
}

/// The work in loops, as often as the inputs arrive.
fn server_work(graph: &Graph, sent: &dyn Fn(&str) -> u64, costs: &CostModel) -> StepWork {
    let mut work = StepWork::default();
    // How often a variable gets a value in a step, and how many strings it has then.
    let mut values: BTreeMap<VariableIndex, (u64, u64)> = BTreeMap::new();
    for node in graph.scopes().iter().skip(1).flat_map(|scope| &scope.nodes) {
        let known = node.inputs.iter().filter_map(|input| values.get(input));
        let runs = match &node.kind {
            OpKind::Recv { channel } => sent(channel),
            _ => known.map(|(runs, _)| *runs).min().unwrap_or(0),
        };
        let addresses = node.inputs.get(1).and_then(|input| values.get(input)).map_or(1, |(_, strings)| *strings);
        work.add(&Sizes { graph, costs }.work(node, addresses), runs);
        let given = match node.kind {
            OpKind::GradientAccumulator { count, .. } => (runs / u64::from(count), 1),
            OpKind::StringAccumulator { count } => (runs / u64::from(count), count.into()),
            _ => (runs, 1),
        };
        let temporary = node.outputs.iter().filter(|output| !node.inputs.contains(output));
        values.extend(temporary.map(|output| (*output, given)));
    }
    work
}

/// Sizes of values and the work of ops.
struct Sizes<'a> {
    graph: &'a Graph,
    costs: &'a CostModel,
}

impl Sizes<'_> {
    /// The work of one run of an op; a `send` to the senders of a round goes to this many addresses.
    fn work(&self, node: &Node, addresses: u64) -> StepWork {
        let none = StepWork::default();
        match &node.kind {
            OpKind::Send { to, .. } => {
                let copies = if *to == Destination::Senders { addresses } else { 1 };
                let bytes = self.bytes(node.inputs[0]);
                StepWork { sent_bytes: bytes.saturating_mul(copies), messages: copies, ..none }
            }
            OpKind::Recv { .. } => StepWork { received_bytes: self.bytes(node.outputs[0]), messages: 1, ..none },
            OpKind::GradientAccumulator { .. } => StepWork {
                flops: self.elements(node.inputs[0]),
                memory_bytes: self.bytes(node.inputs[0]).saturating_mul(3),
                ..none
            },
            OpKind::StringAccumulator { .. }
            | OpKind::LoopForever { .. }
            | OpKind::Enqueue
            | OpKind::Dequeue { .. } => none,
            _ => StepWork { flops: self.flops(node), memory_bytes: self.memory_bytes(node), ..none },
        }
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
        match &self.graph.variable(index).facts {
            VariableFacts::Dense { element_type, .. } | VariableFacts::SelectedRows { element_type, .. } => {
                element_type.bytes()
            }
            VariableFacts::Queue { .. } | VariableFacts::Strings => 0,
        }
    }

    fn bytes(&self, index: VariableIndex) -> u64 {
        let numbers = match &self.graph.variable(index).facts {
            VariableFacts::SelectedRows { height, .. } => height.div_ceil(self.costs.rows_apart).saturating_mul(8),
            _ => 0,
        };
        self.elements(index).saturating_mul(self.element_bytes(index)).saturating_add(numbers)
    }

    fn elements(&self, index: VariableIndex) -> u64 {
        match &self.graph.variable(index).facts {
            VariableFacts::Dense { .. } => self.shape(index).iter().fold(1, |all, length| all.saturating_mul(*length)),
            VariableFacts::SelectedRows { height, width, .. } => {
                height.div_ceil(self.costs.rows_apart).saturating_mul(*width)
            }
            VariableFacts::Queue { .. } | VariableFacts::Strings => 0,
        }
    }

    fn shape(&self, index: VariableIndex) -> Vec<u64> {
        let VariableFacts::Dense { shape, .. } = &self.graph.variable(index).facts else { return Vec::new() };
        let length = |dim: &Dim| match dim {
            Dim::Fixed(length) => *length,
            Dim::Batch => self.costs.batch,
        };
        shape.iter().map(length).collect()
    }
}

/// A count as a real number; rounding beyond 2^53 does not matter to an estimate.
pub(super) const fn real(count: u64) -> f64 {
    count as f64
}

//! Programs in few words, and a wire between them.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::executor::{Executor, ExecutorParts, ProgramLink};
use crate::{
    Block, Destination, Elements, Graph, Op, OpKind, OpRole, PlainArithmetic, Program, ProgramPeer, Purpose, Tensor,
    Variable, VariableFacts, VariableValue,
};
use pserver_core::accumulator::LateGradients;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;
use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_core::port::Plain;

pub(super) fn op(kind: OpKind, inputs: &[&str], outputs: &[&str]) -> Op {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Op { kind, inputs: owned(inputs), outputs: owned(outputs), role: OpRole::Communication }
}

pub(super) fn recv(channel: &str, outputs: &[&str]) -> Op {
    op(OpKind::Recv { channel: channel.into() }, &[], outputs)
}

pub(super) fn send(channel: &str, to: ProgramPeer, input: &str) -> Op {
    op(OpKind::Send { channel: channel.into(), to: Destination::Peer(to) }, &[input], &[])
}

pub(super) fn answer(channel: &str, input: &str, senders: &str) -> Op {
    op(OpKind::Send { channel: channel.into(), to: Destination::Senders }, &[input, senders], &[])
}

pub(super) fn enqueue(queue: &str, input: &str) -> Op {
    op(OpKind::Enqueue, &[queue, input], &[])
}

pub(super) fn dequeue(queue: &str, outputs: &[&str]) -> Op {
    let min_count = u32::try_from(outputs.len()).expect("few");
    op(OpKind::Dequeue { min_count }, &[queue], outputs)
}

pub(super) fn accumulate(count: u32, merge: Merge, staleness: Option<u32>, inputs: &[&str], output: &str) -> Op {
    let late = LateGradients::Drop;
    op(OpKind::GradientAccumulator { count, merge, staleness, late }, inputs, &[output])
}

pub(super) fn strings(count: u32, input: &str, output: &str) -> Op {
    op(OpKind::StringAccumulator { count }, &[input], &[output])
}

pub(super) fn variable(name: &str, facts: VariableFacts, purpose: Purpose) -> Variable {
    Variable { name: name.into(), facts, purpose }
}

/// The facts of one number.
pub(super) fn number() -> VariableFacts {
    VariableFacts::fixed(ElementType::Float64, &[1])
}

pub(super) fn queue(capacity: u64) -> VariableFacts {
    VariableFacts::Queue { of: Box::new(number()), capacity }
}

/// A program of loops over common variables; temporaries that are received are declared in the loop.
pub(super) fn loops(outer: Vec<Variable>, bodies: Vec<(Vec<Variable>, Vec<Op>)>) -> Graph {
    let kinds = (1..).zip(&bodies).map(|(block, _)| OpKind::LoopForever { block });
    let ops = kinds.map(|kind| op(kind, &[], &[])).collect();
    let bodies = bodies.into_iter().map(|(variables, ops)| Block { parent: Some(0), variables, ops });
    let blocks = std::iter::once(Block { parent: None, variables: outer, ops }).chain(bodies).collect();
    Graph::new(Program { blocks }).expect("the test's program is valid")
}

pub(super) fn one(value: impl Into<f64>) -> VariableValue {
    Tensor::new([1], Elements::Float64(vec![value.into()])).into()
}

pub(super) fn as_number(value: &VariableValue) -> f64 {
    match value.tensor().elements() {
        Elements::Float64(values) => values[0],
        other => panic!("{:?} is no float64", other.element_type()),
    }
}

pub(super) fn executor(graph: &Arc<Graph>, senders: &[ProgramPeer], arrivals_max: usize) -> Executor {
    let parts = ExecutorParts {
        arithmetic: Box::new(PlainArithmetic),
        kernels: Box::new(Plain),
        senders: senders.to_vec(),
        arrivals_max,
        memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
    };
    Executor::new(Arc::clone(graph), parts).expect("the test's program can run")
}

/// A sent value with its destination and channel.
pub(super) type Letter = (ProgramPeer, String, VariableValue);

/// A link that stores sent values, up to a bound.
#[derive(Default)]
pub(super) struct Post {
    pub(super) sent: VecDeque<Letter>,
    pub(super) room: usize,
}

impl Post {
    pub(super) fn new(room: usize) -> Self {
        Self { sent: VecDeque::new(), room }
    }
}

impl ProgramLink for Post {
    fn has_room(&mut self, _: ProgramPeer, _: &str) -> bool {
        self.sent.len() < self.room
    }

    fn send(&mut self, to: ProgramPeer, channel: &str, value: &VariableValue) {
        self.sent.push_back((to, channel.to_owned(), value.clone()));
    }
}

//! Writer of parts: their blocks and unique names.

use std::collections::BTreeSet;

use crate::block::{Block, Program};
use crate::graph::Graph;
use crate::op::{Destination, Op, OpKind, OpRole, ProgramPeer};
use crate::variable::{Purpose, Variable, VariableFacts};
use pserver_core::error::Failure;

use super::part::ProgramPart;

/// The names in use: those of a program, and generated ones.
pub(super) struct UsedNames<'a> {
    graph: &'a Graph,
    made: BTreeSet<String>,
}

impl<'a> UsedNames<'a> {
    /// The names of a program.
    pub(super) fn of(graph: &'a Graph) -> Self {
        Self { graph, made: BTreeSet::new() }
    }

    /// This name, or when it is in use the first one with `_` after it that is not.
    pub(super) fn fresh(&mut self, mut name: String) -> String {
        while self.graph.find(&name).is_some() || self.made.contains(&name) {
            name.push('_');
        }
        self.made.insert(name.clone());
        name
    }
}

/// A block while it is written.
#[derive(Default)]
pub(super) struct BlockWriter {
    pub(super) block: Block,
}

impl BlockWriter {
    pub(super) fn declare(&mut self, name: &str, facts: VariableFacts, purpose: Purpose) {
        self.block.variables.push(Variable { name: name.to_owned(), facts, purpose });
    }

    pub(super) fn op(&mut self, kind: OpKind, inputs: &[&str], outputs: &[&str], role: OpRole) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        self.block.ops.push(Op { kind, inputs: owned(inputs), outputs: owned(outputs), role });
    }

    /// Sends a value to one process.
    pub(super) fn send(&mut self, name: &str, channel: &str, to: ProgramPeer) {
        let kind = OpKind::Send { channel: channel.to_owned(), to: Destination::Peer(to) };
        self.op(kind, &[name], &[], OpRole::Communication);
    }

    /// Receives a value, into a new temporary with these facts.
    pub(super) fn recv(&mut self, channel: &str, name: &str, facts: VariableFacts) {
        self.declare(name, facts, Purpose::Temporary);
        self.op(OpKind::Recv { channel: channel.to_owned() }, &[], &[name], OpRole::Communication);
    }
}

/// Checks the part of some processes of a whole program.
///
/// # Errors
/// When it does not check, which a limit can be the reason for: a part has more variables than the program.
pub(super) fn part(whole: &Graph, peers: Vec<ProgramPeer>, blocks: Vec<Block>) -> Result<ProgramPart, Failure> {
    let names = peers.first().map_or(String::new(), ProgramPeer::to_string);
    let graph =
        whole.part(Program { blocks }).map_err(|failure| Failure::call(format!("{names}'s part: {failure}")))?;
    Ok(ProgramPart { peers, graph })
}

//! Generator of a server's part.
//!
//! ```text
//! initialise the variables of its groups
//! send each parameter that trainers read, to every trainer
//! loop_forever {
//!     for each group or piece of one: its update loop, see `program::update_loop`; before an op that reads a number of
//!         several groups, send of the share, and recv of the number
//! }
//! loop_forever {
//!     for each table of which trainers pull rows: the rows of received ids, sent to their sender
//! }
//! ```
//!
//! Of such a table trainers are not sent the value but the count of its updates.

use std::collections::BTreeSet;

use crate::block::Block;
use crate::op::{Destination, Op, OpKind, OpRole, ProgramPeer};
use crate::update_loop::loop_forever;
use crate::variable::{Dim, Purpose, VariableFacts};
use pserver_core::accumulator::AccumulatorSettings;
use pserver_core::config::Merge;
use pserver_core::dtype::ElementType;

use super::division::{Division, GroupSlice, PullNames, TotalNames};
use super::outline::variable;
use super::write::BlockWriter;

/// The blocks of one server.
pub(super) fn blocks(division: &Division<'_>, server: u32) -> Vec<Block> {
    let pieces: Vec<&GroupSlice<'_>> = division.pieces.iter().filter(|piece| piece.server == server).collect();
    if pieces.is_empty() {
        return vec![Block::default()];
    }
    let mut outer = BlockWriter::default();
    let mut declared = BTreeSet::new();
    for piece in &pieces {
        begin(division, piece, &mut declared, &mut outer);
    }
    for piece in &pieces {
        for (name, channel) in sent(division, piece) {
            let to = (0..division.cluster.trainers).map(ProgramPeer::Trainer);
            to.for_each(|trainer| outer.send(name, channel, trainer));
        }
    }
    outer.block.ops.push(loop_forever(1));
    let mut inner = BlockWriter::default();
    inner.block.parent = Some(0);
    for piece in &pieces {
        turn(division, piece, &mut inner);
    }
    let mut answers = BlockWriter::default();
    answers.block.parent = Some(0);
    for piece in &pieces {
        piece
            .pulls
            .iter()
            .for_each(|(table, pulls)| pulls.iter().for_each(|pull| answer(piece, table, pull, &mut answers)));
    }
    if answers.block.ops.is_empty() {
        return vec![outer.block, inner.block];
    }
    outer.block.ops.push(loop_forever(2));
    vec![outer.block, inner.block, answers.block]
}

/// Answers a pull of rows of a table. The batch of this block is the number of ids.
fn answer(piece: &GroupSlice<'_>, table: &str, pull: &PullNames, answers: &mut BlockWriter) {
    let PullNames { channel, ids, sender, values, .. } = pull;
    answers.declare(ids, VariableFacts::dense(ElementType::Int64, [Dim::Batch]), Purpose::Temporary);
    answers.op(OpKind::Recv { channel: channel.clone() }, &[], &[ids, sender], OpRole::Communication);
    answers.op(OpKind::LookupTable { padding: None }, &[piece.name(table), ids], &[values], OpRole::Communication);
    let kind = OpKind::Send { channel: channel.clone(), to: Destination::Senders };
    answers.op(kind, &[values, sender], &[], OpRole::Communication);
}

/// Declares the variables of a piece, and fills them as the whole would have been filled.
fn begin<'a>(
    division: &Division<'a>,
    piece: &GroupSlice<'a>,
    declared: &mut BTreeSet<String>,
    outer: &mut BlockWriter,
) {
    let graph = division.graph;
    let block = &graph.program().blocks[0];
    let own = || piece.group.kept.iter().chain(&piece.group.read).map(String::as_str);
    let needed = division.outline.beginnings(own());
    let filled = needed.iter().flat_map(|place| &block.ops[*place].outputs).map(String::as_str);
    let mut new = BTreeSet::new();
    for known in division.outline.in_order(own().chain(filled)) {
        let name = piece.name(&known.name);
        if declared.insert(name.to_owned()) {
            new.insert(known.name.as_str());
            outer.declare(name, piece.facts(&known.facts), known.purpose);
        }
    }
    for op in needed.iter().map(|place| &block.ops[*place]) {
        // A variable that several groups read is filled once.
        let is_new = |name: &String| variable(graph, name).1 == Purpose::Temporary || new.contains(name.as_str());
        if op.outputs.iter().any(is_new) {
            outer.block.ops.push(renamed(op, piece));
        }
    }
}

/// The ops of a piece for one merged gradient.
fn turn(division: &Division<'_>, piece: &GroupSlice<'_>, inner: &mut BlockWriter) {
    for (gradient, arrival) in piece.group.arrivals.iter().zip(&piece.arrivals) {
        let facts = piece.facts(variable(division.graph, gradient).0);
        let to = widened(division, piece, &facts);
        let element_type = element_type(&facts);
        inner.declare(&arrival.piece, facts, Purpose::Temporary);
        inner.block.ops.extend(arrival.ops(division.accumulators, element_type, to));
    }
    let block = &division.graph.program().blocks[0];
    let mut total = piece.total.as_ref();
    for op in piece.group.ops.iter().map(|place| &block.ops[*place]) {
        if let Some(names) = total.take_if(|_| op.inputs.contains(&piece.group.totals[0])) {
            exchange(division, piece, names, inner);
        }
        for output in &op.outputs {
            let known = division.outline.declared(output);
            if let Some(known) = known.filter(|known| known.purpose == Purpose::Temporary) {
                inner.declare(piece.name(output), piece.facts(&known.facts), Purpose::Temporary);
            }
        }
        inner.block.ops.push(renamed(op, piece));
    }
    let answers = sent(division, piece).into_iter();
    inner.block.ops.extend(answers.map(|(name, channel)| piece.arrivals[0].answer(name, channel)));
}

/// Sends the share of a piece, and receives the total that trainers make of all shares: all of them one number.
fn exchange(division: &Division<'_>, piece: &GroupSlice<'_>, names: &TotalNames, inner: &mut BlockWriter) {
    if let Some(share) = piece.group.shares.first() {
        inner.block.ops.push(piece.arrivals[0].answer(share, &names.share));
    }
    let facts = variable(division.graph, &piece.group.totals[0]).0.clone();
    let accumulators = AccumulatorSettings { merge: Merge::Mean, ..division.accumulators };
    let element_type = element_type(&facts);
    inner.declare(&names.arrival.piece, facts, Purpose::Temporary);
    inner.block.ops.extend(names.arrival.ops(accumulators, element_type, None));
}

/// The type of a gradient's elements.
fn element_type(facts: &VariableFacts) -> ElementType {
    facts.element_type().expect("an update was checked, and takes tensors and rows")
}

/// The type in which a half is added: its parameter's.
fn widened(division: &Division<'_>, piece: &GroupSlice<'_>, facts: &VariableFacts) -> Option<ElementType> {
    let is_half = matches!(facts, VariableFacts::Dense { element_type, .. } if !element_type.is_parameter_type());
    let kept = piece.group.kept.iter().map(|name| variable(division.graph, name));
    let types = kept.filter_map(|(facts, purpose)| match facts {
        VariableFacts::Dense { element_type, .. } if purpose == Purpose::Parameter => Some(*element_type),
        _ => None,
    });
    types.take(1).find(|_| is_half)
}

/// The variables that a piece sends to trainers, in order of first use, each with its channel.
fn sent<'p>(division: &Division<'p>, piece: &'p GroupSlice<'_>) -> Vec<(&'p str, &'p str)> {
    let place = |name: &&String| division.wanted.get(name.as_str());
    let mut sent: Vec<&String> = piece.group.kept.iter().filter(|name| place(name).is_some()).collect();
    sent.sort_by_key(place);
    let value = |name| division.tables.get(name).map_or(name, |table| table.count);
    sent.into_iter().map(|name| (piece.name(value(name.as_str())), piece.name(name))).collect()
}

/// An op over a piece's variables; initialisation begins at the piece's first row.
fn renamed(op: &Op, piece: &GroupSlice<'_>) -> Op {
    let names = |names: &[String]| names.iter().map(|name| piece.name(name).to_owned()).collect();
    let mut kind = op.kind.clone();
    if let Some(rows) = &piece.rows {
        kind.skip_rows(rows.start);
    }
    Op { kind, inputs: names(&op.inputs), outputs: names(&op.outputs), role: op.role }
}

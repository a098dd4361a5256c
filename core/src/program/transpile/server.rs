//! A server's part.
//!
//! ```text
//! initialise what it keeps
//! send each parameter that trainers read, to every trainer
//! loop_forever {
//!     for each piece that it keeps: its turn, see `program::turn`
//! }
//! ```

use std::collections::BTreeSet;

use crate::dtype::ElementType;
use crate::program::block::Block;
use crate::program::op::{Op, OpKind, Peer};
use crate::program::turn::turns;
use crate::program::variable::{Facts, Purpose};

use super::parameter_server::{Division, Piece, variable};
use super::write::Writer;

/// The blocks of one server.
pub(super) fn blocks(division: &Division<'_>, server: u32) -> Vec<Block> {
    let pieces: Vec<&Piece<'_>> = division.pieces.iter().filter(|piece| piece.server == server).collect();
    if pieces.is_empty() {
        return vec![Block::default()];
    }
    let mut outer = Writer::default();
    let mut declared = BTreeSet::new();
    for piece in &pieces {
        begin(division, piece, &mut declared, &mut outer);
    }
    for piece in &pieces {
        for name in sent(division, piece) {
            let to = (0..division.cluster.trainers).map(Peer::Trainer);
            to.for_each(|trainer| outer.send(name, name, trainer));
        }
    }
    outer.block.ops.push(turns(1));
    let mut inner = Writer::default();
    inner.block.parent = Some(0);
    for piece in &pieces {
        turn(division, piece, &mut inner);
    }
    vec![outer.block, inner.block]
}

/// Declares what a piece keeps and reads, and fills it as the whole would have been filled.
fn begin<'a>(division: &Division<'a>, piece: &Piece<'a>, declared: &mut BTreeSet<String>, outer: &mut Writer) {
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
        // What several groups read is filled once.
        let is_new = |name: &String| variable(graph, name).1 == Purpose::Temporary || new.contains(name.as_str());
        if op.outputs.iter().any(is_new) {
            outer.block.ops.push(renamed(op, piece));
        }
    }
}

/// What a piece does with one gradient of every trainer, or with one.
fn turn(division: &Division<'_>, piece: &Piece<'_>, inner: &mut Writer) {
    for (gradient, arrival) in piece.group.arrivals.iter().zip(&piece.arrivals) {
        let facts = piece.facts(variable(division.graph, gradient).0);
        let to = widened(division, piece, &facts);
        let element_type = element_type(&facts);
        inner.declare(&arrival.piece, facts, Purpose::Temporary);
        inner.block.ops.extend(arrival.ops(division.terms, element_type, to));
    }
    let block = &division.graph.program().blocks[0];
    for op in piece.group.ops.iter().map(|place| &block.ops[*place]) {
        for output in &op.outputs {
            let known = division.outline.declared(output);
            if let Some(known) = known.filter(|known| known.purpose == Purpose::Temporary) {
                inner.declare(piece.name(output), piece.facts(&known.facts), Purpose::Temporary);
            }
        }
        inner.block.ops.push(renamed(op, piece));
    }
    inner.block.ops.extend(sent(division, piece).into_iter().map(|name| piece.arrivals[0].answer(name)));
}

/// The type of a gradient's elements.
fn element_type(facts: &Facts) -> ElementType {
    match facts {
        Facts::Dense { element_type, .. } | Facts::SelectedRows { element_type, .. } => *element_type,
        Facts::Queue { .. } | Facts::Strings => unreachable!("an update was checked, and takes no {facts}"),
    }
}

/// The type in which a half is added: its parameter's.
fn widened(division: &Division<'_>, piece: &Piece<'_>, facts: &Facts) -> Option<ElementType> {
    let is_half = matches!(facts, Facts::Dense { element_type, .. } if !element_type.is_parameter_type());
    let kept = piece.group.kept.iter().map(|name| variable(division.graph, name));
    let types = kept.filter_map(|(facts, purpose)| match facts {
        Facts::Dense { element_type, .. } if purpose == Purpose::Parameter => Some(*element_type),
        _ => None,
    });
    types.take(1).find(|_| is_half)
}

/// What a piece sends to trainers, in the order in which they read it first.
fn sent<'p>(division: &Division<'_>, piece: &'p Piece<'_>) -> Vec<&'p str> {
    let place = |name: &&String| division.wanted.get(name.as_str());
    let mut sent: Vec<&String> = piece.group.kept.iter().filter(|name| place(name).is_some()).collect();
    sent.sort_by_key(place);
    sent.into_iter().map(|name| piece.name(name)).collect()
}

/// An op over a piece's variables; what makes random numbers begins where the piece does.
fn renamed(op: &Op, piece: &Piece<'_>) -> Op {
    let names = |names: &[String]| names.iter().map(|name| piece.name(name).to_owned()).collect();
    let mut kind = op.kind.clone();
    if let (OpKind::Uniform { first, .. } | OpKind::Gaussian { first, .. }, Some(rows)) = (&mut kind, &piece.rows) {
        *first = first.saturating_add(rows.start);
    }
    Op { kind, inputs: names(&op.inputs), outputs: names(&op.outputs), role: op.role }
}

//! Generator of the part of all trainers.
//!
//! ```text
//! initialise the trainers' variables
//! parameter = recv, and concat where it is in pieces
//! forward and backward; after the op that computes ids, rows = pull_rows, and concat where the table is in pieces;
//!     after the op that computes a gradient, split where it is in pieces, and send
//! share = recv of each parameter that reads a number of several; the ops that make it; send to each
//! ```

use std::collections::{BTreeMap, BTreeSet};

use crate::block::Block;
use crate::op::{OpKind, OpRole, ProgramPeer};
use crate::variable::{Dim, Purpose, Variable, VariableFacts};
use pserver_core::dtype::ElementType;

use super::division::{Division, GroupSlice, PullNames};
use super::outline::{ops, variable};
use super::pulls::Pull;
use super::write::BlockWriter;

/// The one block.
pub(super) fn block(division: &Division<'_>) -> Block {
    let graph = division.graph;
    let mut writer = BlockWriter::default();
    let is_own = |known: &&Variable| division.groups.keeper(&known.name).is_none() && !is_hidden(division, known);
    writer.block.variables = graph.program().blocks[0].variables.iter().filter(is_own).cloned().collect();
    let places = initialised(division);
    writer.block.ops.extend(places.iter().map(|place| graph.program().blocks[0].ops[*place].clone()));
    let mut wanted: Vec<(usize, &str)> = division.wanted.iter().map(|(name, place)| (*place, *name)).collect();
    wanted.sort_unstable();
    let keepers = keepers(division);
    for (_, name) in wanted {
        receive(division, name, &keepers[name], &mut writer);
    }
    let mut gradients = gradients(division);
    let fed = graph.variables().iter().filter(|variable| variable.purpose == Purpose::Data);
    for pieces in fed.filter_map(|variable| gradients.remove(variable.name.as_str())) {
        send(&pieces, division, &mut writer);
    }
    let pulls = pulls(division, &keepers);
    let pull_after = |place, writer: &mut BlockWriter| {
        pulls.iter().filter(|one| one.pull.after == place).for_each(|one| one.write(writer));
    };
    pull_after(None, &mut writer);
    let lookups = pulls.iter().flat_map(|one| one.pull.lookups.iter().map(|lookup| (*lookup, one.joined())));
    let tables: BTreeMap<usize, &str> = lookups.collect();
    for (place, op) in ops(graph).filter(|(_, op)| matches!(op.role, OpRole::Forward | OpRole::Backward)) {
        let mut own = op.clone();
        if let Some(rows) = tables.get(&place) {
            own.inputs[0] = (*rows).to_owned();
        }
        writer.block.ops.push(own);
        pull_after(Some(place), &mut writer);
        for pieces in op.outputs.iter().filter_map(|output| gradients.remove(output.as_str())) {
            send(&pieces, division, &mut writer);
        }
    }
    totals(division, &mut writer);
    writer.block
}

/// The ops that make numbers of several groups, between the groups' shares and those that read the numbers.
fn totals(division: &Division<'_>, writer: &mut BlockWriter) {
    let with_total = || division.pieces.iter().filter_map(|piece| Some((piece, piece.total.as_ref()?)));
    for (piece, names) in with_total() {
        if let Some(share) = piece.group.shares.first() {
            writer.recv(&names.share, share, variable(division.graph, share).0.clone());
        }
    }
    let ops = &division.graph.program().blocks[0].ops;
    writer.block.ops.extend(division.groups.totals.ops.iter().map(|place| ops[*place].clone()));
    for (piece, names) in with_total() {
        writer.send(&piece.group.totals[0], &names.arrival.channel, ProgramPeer::Server(piece.server));
    }
}

/// The ops that fill the trainers' variables, including those that servers need too.
fn initialised(division: &Division<'_>) -> Vec<usize> {
    let graph = division.graph;
    let block = &graph.program().blocks[0];
    let is_kept = |name: &str| division.groups.keeper(name).is_some();
    let kept = block.variables.iter().filter(|known| is_kept(&known.name)).map(|known| known.name.as_str());
    let of_servers: BTreeSet<usize> = division.outline.beginnings(kept).into_iter().collect();
    let own = block.variables.iter().filter(|known| known.purpose.is_persistable() && !is_kept(&known.name));
    let own = division.outline.beginnings(own.map(|known| known.name.as_str()));
    let of_trainers: BTreeSet<usize> = own.into_iter().collect();
    let all = ops(graph).filter(|(_, op)| op.role == OpRole::Initialise).map(|(place, _)| place);
    all.filter(|place| of_trainers.contains(place) || !of_servers.contains(place)).collect()
}

/// Whether only optimizer ops write a temporary, so that trainers have none.
fn is_hidden(division: &Division<'_>, known: &Variable) -> bool {
    let mut writers = division.outline.writers(&known.name);
    let is_of_servers = writers.any(|op| op.role == OpRole::Optimize);
    known.purpose == Purpose::Temporary && is_of_servers && !division.groups.totals.writes(division.graph, &known.name)
}

/// The pieces that keep each variable.
fn keepers<'d>(division: &'d Division<'d>) -> BTreeMap<&'d str, Vec<&'d GroupSlice<'d>>> {
    let mut keepers: BTreeMap<&str, Vec<&GroupSlice<'_>>> = BTreeMap::new();
    for piece in &division.pieces {
        piece.group.kept.iter().for_each(|name| keepers.entry(name).or_default().push(piece));
    }
    keepers
}

fn receive(division: &Division<'_>, name: &str, pieces: &[&GroupSlice<'_>], writer: &mut BlockWriter) {
    if division.tables.contains_key(name) {
        for piece in pieces {
            let count = VariableFacts::fixed(ElementType::Int64, &[]);
            writer.recv(piece.name(name), &piece.pulls[name][0].count, count);
        }
        return;
    }
    let facts = variable(division.graph, name).0;
    for piece in pieces {
        writer.recv(piece.name(name), piece.name(name), piece.facts(facts));
    }
    if pieces.len() > 1 {
        let names: Vec<&str> = pieces.iter().map(|piece| piece.name(name)).collect();
        writer.op(OpKind::Concat { axis: 0 }, &names, &[name], OpRole::Communication);
    }
}

/// A pull of rows of all pieces of a table.
struct TablePull<'d> {
    pull: &'d Pull<'d>,
    /// In the order of rows.
    pieces: Vec<(&'d GroupSlice<'d>, &'d PullNames)>,
    /// Of the table.
    facts: &'d VariableFacts,
}

fn pulls<'d>(division: &'d Division<'d>, keepers: &BTreeMap<&str, Vec<&'d GroupSlice<'d>>>) -> Vec<TablePull<'d>> {
    let mut all = Vec::new();
    for (name, table) in division.tables {
        for (number, pull) in table.pulls.iter().enumerate() {
            let pieces = keepers[name].iter().map(|piece| (*piece, &piece.pulls[name][number])).collect();
            all.push(TablePull { pull, pieces, facts: variable(division.graph, name).0 });
        }
    }
    all
}

impl TablePull<'_> {
    /// The variable that lookups read in place of the table.
    fn joined(&self) -> &str {
        &self.pieces[0].1.joined
    }

    fn write(&self, writer: &mut BlockWriter) {
        for (piece, names) in &self.pieces {
            let VariableFacts::Dense { element_type, shape } = piece.facts(self.facts) else {
                unreachable!("a table is dense")
            };
            let [Dim::Fixed(height), Dim::Fixed(width)] = shape[..] else { unreachable!("a table is a matrix") };
            writer.declare(
                &names.rows,
                VariableFacts::SelectedRows { element_type, height, width },
                Purpose::Temporary,
            );
            let kind = OpKind::PullRows {
                channel: names.channel.clone(),
                to: ProgramPeer::Server(piece.server),
                first: piece.rows.as_ref().map_or(0, |rows| rows.start),
            };
            let inputs: Vec<&str> = [names.count.as_str()].into_iter().chain(self.pull.ids.iter().copied()).collect();
            writer.op(kind, &inputs, &[&names.rows], OpRole::Communication);
        }
        if self.pieces.len() > 1 {
            let rows: Vec<&str> = self.pieces.iter().map(|(_, names)| names.rows.as_str()).collect();
            writer.op(OpKind::Concat { axis: 0 }, &rows, &[self.joined()], OpRole::Communication);
        }
    }
}

/// The pieces that each gradient goes to, with the place among the arrivals of each.
fn gradients<'d>(division: &'d Division<'d>) -> BTreeMap<&'d str, Vec<(&'d GroupSlice<'d>, usize)>> {
    let mut gradients: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for piece in &division.pieces {
        for (place, name) in piece.group.arrivals.iter().enumerate() {
            gradients.entry(name).or_default().push((piece, place));
        }
    }
    gradients
}

fn send(pieces: &[(&GroupSlice<'_>, usize)], division: &Division<'_>, writer: &mut BlockWriter) {
    let (first, place) = pieces[0];
    let gradient = first.group.arrivals[place].as_str();
    let names: Vec<&str> = pieces.iter().map(|(piece, place)| piece.arrivals[*place].piece.as_str()).collect();
    let lengths: Vec<u64> =
        pieces.iter().filter_map(|(piece, _)| piece.rows.as_ref().map(|rows| rows.end - rows.start)).collect();
    if !lengths.is_empty() {
        for (name, (piece, _)) in names.iter().zip(pieces) {
            writer.declare(name, piece.facts(variable(division.graph, gradient).0), Purpose::Temporary);
        }
        writer.op(OpKind::Split { axis: 0, lengths }, &[gradient], &names, OpRole::Communication);
    }
    for (name, (piece, place)) in names.iter().zip(pieces) {
        writer.send(name, &piece.arrivals[*place].channel, ProgramPeer::Server(piece.server));
    }
}

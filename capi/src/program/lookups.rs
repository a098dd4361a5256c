//! Which rows of a table a step will look up.

use pserver_core::error::Failure;
use pserver_core::program::{Graph, Node, OpKind, Purpose, VariableIndex};

use super::kept::{dimensions, nodes};

/// A piece of a table on the trainer: as large as the whole, with the rows of this step as the server has them.
#[derive(Debug)]
pub(super) struct Table {
    /// Its place among what servers keep.
    pub(super) kept: usize,
    /// The first row of the piece, as the whole table counts.
    pub(super) first: u64,
    /// Rows of the piece.
    pub(super) height: u64,
    /// The data that hold the ids of rows.
    pub(super) ids: Vec<VariableIndex>,
}

/// Finds the pieces of the table variables, given with the lengths that they are put together from.
pub(super) fn tables(graph: &Graph, pieces: &[(usize, VariableIndex)]) -> Result<Vec<Table>, Failure> {
    pieces.iter().map(|(kept, piece)| table(graph, *kept, *piece)).collect()
}

fn table(graph: &Graph, kept: usize, piece: VariableIndex) -> Result<Table, Failure> {
    let rows = |index| dimensions(&graph.variable(index).facts).map_or(0, |(_, shape)| shape[0]);
    let readers = |index| nodes(graph).filter(move |node: &&Node| node.inputs.contains(&index));
    let (mut whole, mut first) = (piece, 0);
    if let Some(concat) = readers(piece).find(|node| matches!(node.kind, OpKind::Concat { .. })) {
        whole = concat.outputs[0];
        first = concat.inputs.iter().take_while(|input| **input != piece).map(|input| rows(*input)).sum();
    }
    let mut ids = Vec::new();
    for reader in readers(whole) {
        let refuse = |found: String| {
            let name = &graph.variable(whole).name;
            Failure::call(format!("table {name:?}: found {found}; expected lookup_table with ids that are fed"))
        };
        if reader.kind != OpKind::LookupTable || reader.inputs[0] != whole {
            return Err(refuse(format!("{} that reads it", reader.kind.name())));
        }
        let variable = graph.variable(reader.inputs[1]);
        if variable.purpose != Purpose::Data {
            return Err(refuse(format!("ids {:?}, which are computed", variable.name)));
        }
        ids.push(reader.inputs[1]);
    }
    Ok(Table { kept, first, height: rows(piece), ids })
}

impl Table {
    /// The rows of this piece among the ids of a step, each once, as the piece counts.
    pub(super) fn wanted<'a>(&self, ids: impl Iterator<Item = &'a i64>) -> Vec<u64> {
        let rows = ids.filter_map(|id| u64::try_from(*id).ok()?.checked_sub(self.first));
        let mut rows: Vec<u64> = rows.filter(|row| *row < self.height).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

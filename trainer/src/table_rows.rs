//! Rows of tables that a step looks up.

use pserver_core::error::Failure;
use pserver_program::{Graph, Node, OpKind, Purpose, VariableIndex};

use super::server_parameters::{dimensions, nodes};

/// One server's piece of a table on the trainer. Its tensor has every row, and the values of this step's rows.
#[derive(Debug)]
pub(super) struct TablePiece {
    /// Index of the server parameter.
    pub(super) parameter: usize,
    /// The first row of the piece within the whole table.
    pub(super) first: u64,
    /// Rows of the piece.
    pub(super) height: u64,
    /// Fed variables with the ids of looked-up rows.
    pub(super) ids: Vec<VariableIndex>,
}

/// Describes the pieces of tables; `pieces` has the server parameter and the variable of each.
pub(super) fn tables(graph: &Graph, pieces: &[(usize, VariableIndex)]) -> Result<Vec<TablePiece>, Failure> {
    pieces.iter().map(|(parameter, piece)| table(graph, *parameter, *piece)).collect()
}

fn table(graph: &Graph, parameter: usize, piece: VariableIndex) -> Result<TablePiece, Failure> {
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
        if !matches!(reader.kind, OpKind::LookupTable { .. }) || reader.inputs[0] != whole {
            return Err(refuse(format!("{} that reads it", reader.kind.name())));
        }
        let variable = graph.variable(reader.inputs[1]);
        if variable.purpose != Purpose::Data {
            return Err(refuse(format!("ids {:?}, which are computed", variable.name)));
        }
        ids.push(reader.inputs[1]);
    }
    Ok(TablePiece { parameter, first, height: rows(piece), ids })
}

impl TablePiece {
    /// The unique rows of this piece among the ids of a step, relative to the first row of the piece.
    pub(super) fn rows_of<'a>(&self, ids: impl Iterator<Item = &'a i64>) -> Vec<u64> {
        let rows = ids.filter_map(|id| u64::try_from(*id).ok()?.checked_sub(self.first));
        let mut rows: Vec<u64> = rows.filter(|row| *row < self.height).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

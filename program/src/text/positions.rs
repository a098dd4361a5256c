//! Positions of a program's declarations and ops in its text, for errors about their meaning.
//!
//! They stand beside the program: not in its equality, not in its messages. A program that was appended to keeps them;
//! what was appended has none.

use pserver_core::text::Position;

use crate::op::OpKind;

/// Where the blocks, declarations and ops of a program are in its text. Empty for a program without a text.
#[derive(Clone, Debug, Default)]
pub struct ProgramPositions {
    file: Option<String>,
    pub(super) blocks: Vec<BlockPositions>,
}

/// The positions of a block.
#[derive(Clone, Debug)]
pub(super) struct BlockPositions {
    /// Of the word `block`.
    start: Position,
    /// Of the purpose of each declared variable.
    pub(super) variables: Vec<Position>,
    /// Of the role of each op.
    pub(super) ops: Vec<Position>,
}

impl BlockPositions {
    pub(super) const fn new(start: Position) -> Self {
        Self { start, variables: Vec::new(), ops: Vec::new() }
    }
}

impl ProgramPositions {
    pub(super) fn of_file(file: Option<&str>) -> Self {
        Self { file: file.map(str::to_owned), blocks: Vec::new() }
    }

    /// The name of a block in errors, after its position.
    pub(crate) fn block(&self, block: usize) -> String {
        self.locate(block, |places| Some(places.start), format!("block {block}"))
    }

    /// The name of a declared variable in errors, after its position.
    pub(crate) fn variable(&self, block: usize, place: usize, name: &str) -> String {
        let label = format!("block {block}, variable {name:?}");
        self.locate(block, |places| places.variables.get(place).copied(), label)
    }

    /// The name of an op in errors, after its position.
    pub(crate) fn op(&self, block: usize, place: usize, kind: &OpKind) -> String {
        let label = format!("block {block}, op {place} {}", kind.name());
        self.locate(block, |places| places.ops.get(place).copied(), label)
    }

    fn locate(&self, block: usize, find: impl Fn(&BlockPositions) -> Option<Position>, label: String) -> String {
        match self.blocks.get(block).and_then(find) {
            Some(position) => format!("{}: {label}", position.label(self.file.as_deref())),
            None => label,
        }
    }
}

//! Unchecked form of a program. A [`Graph`](super::Graph) is its checked form.

use super::op::Op;
use super::variable::Variable;

/// Variables and ops that run together. An op sees the variables of its own block and of the blocks around it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    /// The index of the enclosing block, which is lower than its own; none for block 0 only.
    pub parent: Option<u32>,
    /// The declared variables.
    pub variables: Vec<Variable>,
    /// The ops. Where two touch one variable and one of them writes it, the earlier comes first.
    pub ops: Vec<Op>,
}

/// A program. It begins with block 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The blocks.
    pub blocks: Vec<Block>,
}

//! What does the arithmetic of a program's ops.

use crate::error::Failure;
use crate::program::{Facts, Node, Value};

/// The arithmetic of a graph: everything but flow and updates. Every implementation gives the same bits for the same
/// inputs on one machine; across implementations a measured tolerance holds, and what only moves or counts is equal.
pub trait Arithmetic: Send {
    /// Runs one op of a checked graph and gives its outputs in order. `outputs` has their facts; `inputs` are values
    /// that the facts of the node's inputs admit, all with one batch.
    ///
    /// # Errors
    /// When an input names what is not there: an id beyond its table, a label beyond its classes. Names both.
    ///
    /// # Panics
    /// When the op is no arithmetic, or an input is not what the graph says: whoever feeds a graph has checked it.
    fn run(&mut self, node: &Node, inputs: &[&Value], outputs: &[&Facts]) -> Result<Vec<Value>, Failure>;

    /// Its name, for the line that says what was chosen.
    fn name(&self) -> &'static str;
}

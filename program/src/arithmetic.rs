//! Interface for the arithmetic of a program's ops.

use pserver_core::error::Failure;

use super::graph::Node;
use super::value::VariableValue;
use super::variable::VariableFacts;

/// The arithmetic of a graph, without flow and updates. Every implementation is deterministic on one machine;
/// implementations agree within a measured tolerance, and exactly where an op only moves or counts.
pub trait Arithmetic: Send {
    /// Runs one op of a checked graph and gives its outputs in order. `outputs` has their facts; `inputs` are values
    /// that the facts of the node's inputs admit, all with one batch.
    ///
    /// # Errors
    /// When an input refers to a missing id or label. Names both.
    ///
    /// # Panics
    /// When the op is no arithmetic, or an input contradicts the graph: the caller checks both.
    fn run(
        &mut self,
        node: &Node,
        inputs: &[&VariableValue],
        outputs: &[&VariableFacts],
    ) -> Result<Vec<VariableValue>, Failure>;

    /// Its name, for the log.
    fn name(&self) -> &'static str;
}

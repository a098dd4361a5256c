//! Values of a program's variables while it runs, and their bound of memory.

use pserver_core::error::Failure;

use super::graph::{Graph, Node, VariableIndex};
use super::value::{VariableValue, check_memory};
use super::variable::{Dim, Purpose, VariableFacts};

/// The values of variables, within a common bound of bytes.
pub(crate) struct VariableValues {
    held: Vec<Option<VariableValue>>,
    bytes: u64,
    bytes_max: u64,
}

impl VariableValues {
    /// No variable has a value.
    pub(crate) fn new(graph: &Graph, bytes_max: u64) -> Self {
        Self { held: vec![None; graph.variables().len()], bytes: 0, bytes_max }
    }

    pub(crate) fn get(&self, index: VariableIndex) -> Option<&VariableValue> {
        self.held[index.place()].as_ref()
    }

    pub(crate) fn set(&mut self, index: VariableIndex, value: impl Into<Option<VariableValue>>) {
        let value = value.into();
        self.bytes += value.as_ref().map_or(0, VariableValue::byte_count);
        let before = std::mem::replace(&mut self.held[index.place()], value);
        self.bytes -= before.as_ref().map_or(0, VariableValue::byte_count);
    }

    pub(crate) fn take(&mut self, index: VariableIndex) -> Option<VariableValue> {
        let value = self.held[index.place()].take();
        self.bytes -= value.as_ref().map_or(0, VariableValue::byte_count);
        value
    }

    /// Refuses data of different batches.
    ///
    /// # Errors
    /// Names the variable, what was found and expected.
    pub(crate) fn check_batch(&self, graph: &Graph) -> Result<(), Failure> {
        let mut batch = None;
        for (variable, value) in graph.variables().iter().zip(&self.held) {
            if let (Purpose::Data, Some(value)) = (variable.purpose, value) {
                let refuse = |failure| Failure::call(format!("variable {:?}: {failure}", variable.name));
                value.check(&variable.facts, &mut batch).map_err(refuse)?;
            }
        }
        Ok(())
    }

    /// Refuses an op for which there is no memory, before anything is allocated for it.
    ///
    /// # Errors
    /// When its outputs and all values together exceed the bound, or the system's memory.
    pub(crate) fn check_room(&self, graph: &Graph, node: &Node) -> Result<(), Failure> {
        let needed = self.output_bytes(graph, node);
        let (held, most) = (self.bytes, self.bytes_max);
        if needed > most.saturating_sub(held) {
            return Err(Failure::call(format!(
                "found {needed} bytes of outputs beside {held} bytes of values; expected at most {most} together"
            )));
        }
        check_memory(needed)
    }

    /// Bytes that an op allocates for outputs and intermediate values, for the batch size of its inputs.
    fn output_bytes(&self, graph: &Graph, node: &Node) -> u64 {
        let given = || node.inputs.iter().filter_map(|index| Some((&graph.variable(*index).facts, self.get(*index)?)));
        if node.rule.is_some() {
            // Updates are in place. Selected rows are made dense for them.
            let is_whole = given().all(|(facts, _)| !matches!(facts, VariableFacts::SelectedRows { .. }));
            return if is_whole { 0 } else { given().take(1).map(|(_, value)| value.byte_count()).sum() };
        }
        let batch = given().find_map(|(facts, value)| batch(facts, value)).unwrap_or(1);
        let rows: u64 = given().map(|(_, value)| value.byte_count()).fold(0, u64::saturating_add);
        let outputs = node.outputs.iter().map(|index| match &graph.variable(*index).facts {
            VariableFacts::Dense { element_type, shape } => {
                shape.iter().fold(element_type.bytes(), |bytes, dim| match dim {
                    Dim::Fixed(length) => bytes.saturating_mul(*length),
                    Dim::Batch => bytes.saturating_mul(batch),
                })
            }
            // The rows of an output are those of an input, or of its gradient.
            VariableFacts::SelectedRows { .. } => rows,
            VariableFacts::Queue { .. } | VariableFacts::Strings => 0,
        });
        outputs.fold(0, u64::saturating_add)
    }
}

/// The batch of a value, where its facts have one.
fn batch(facts: &VariableFacts, value: &VariableValue) -> Option<u64> {
    let (VariableFacts::Dense { shape, .. }, VariableValue::Dense(tensor)) = (facts, value) else { return None };
    let lengths = shape.iter().zip(tensor.shape());
    lengths.filter(|(dim, _)| **dim == Dim::Batch).map(|(_, length)| *length).next()
}

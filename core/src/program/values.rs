//! The values of a program's variables while it runs, and the memory that they may take.

use crate::error::Failure;

use super::graph::{Graph, Node, VariableIndex};
use super::value::Value;
use super::variable::{Dim, Facts, Purpose};

/// What an op gives is asked of the system beforehand from so many bytes on: asking costs less than touching them.
const ASKED_BYTES_MIN: u64 = 16 << 20;

/// A value for every variable that has one, which together stay within a bound.
pub(in crate::program) struct Values {
    held: Vec<Option<Value>>,
    bytes: u64,
    bytes_max: u64,
}

impl Values {
    /// No variable has a value.
    pub(in crate::program) fn new(graph: &Graph, bytes_max: u64) -> Self {
        Self { held: vec![None; graph.variables().len()], bytes: 0, bytes_max }
    }

    pub(in crate::program) fn get(&self, index: VariableIndex) -> Option<&Value> {
        self.held[index.place()].as_ref()
    }

    pub(in crate::program) fn set(&mut self, index: VariableIndex, value: impl Into<Option<Value>>) {
        let value = value.into();
        self.bytes += value.as_ref().map_or(0, Value::byte_count);
        let before = std::mem::replace(&mut self.held[index.place()], value);
        self.bytes -= before.as_ref().map_or(0, Value::byte_count);
    }

    pub(in crate::program) fn take(&mut self, index: VariableIndex) -> Option<Value> {
        let value = self.held[index.place()].take();
        self.bytes -= value.as_ref().map_or(0, Value::byte_count);
        value
    }

    /// Refuses data of different batches.
    ///
    /// # Errors
    /// Names the variable, what was found and expected.
    pub(in crate::program) fn check_batch(&self, graph: &Graph) -> Result<(), Failure> {
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
    /// When its outputs, beside all values, are more than the bound, or more than the system gives.
    pub(in crate::program) fn check_room(&self, graph: &Graph, node: &Node) -> Result<(), Failure> {
        let needed = self.output_bytes(graph, node);
        let (held, most) = (self.bytes, self.bytes_max);
        if needed > most.saturating_sub(held) {
            return Err(Failure::call(format!(
                "found {needed} bytes of outputs beside {held} bytes of values; expected at most {most} together"
            )));
        }
        check_memory(needed)
    }

    /// Bytes that an op gives, or makes on its way, in the batch of what it is given.
    fn output_bytes(&self, graph: &Graph, node: &Node) -> u64 {
        let given = || node.inputs.iter().filter_map(|index| Some((&graph.variable(*index).facts, self.get(*index)?)));
        if node.rule.is_some() {
            // Updates are in place. Selected rows are made whole for it.
            let is_whole = given().all(|(facts, _)| !matches!(facts, Facts::SelectedRows { .. }));
            return if is_whole { 0 } else { given().take(1).map(|(_, value)| value.byte_count()).sum() };
        }
        let batch = given().find_map(|(facts, value)| batch(facts, value)).unwrap_or(1);
        let rows: u64 = given().map(|(_, value)| value.byte_count()).fold(0, u64::saturating_add);
        let outputs = node.outputs.iter().map(|index| match &graph.variable(*index).facts {
            Facts::Dense { element_type, shape } => shape.iter().fold(element_type.bytes(), |bytes, dim| match dim {
                Dim::Fixed(length) => bytes.saturating_mul(*length),
                Dim::Batch => bytes.saturating_mul(batch),
            }),
            // Rows that are given are rows, or slopes, that were there.
            Facts::SelectedRows { .. } => rows,
            Facts::Queue { .. } | Facts::Strings => 0,
        });
        outputs.fold(0, u64::saturating_add)
    }
}

/// The batch of a value, where its facts have one.
fn batch(facts: &Facts, value: &Value) -> Option<u64> {
    let (Facts::Dense { shape, .. }, Value::Dense(tensor)) = (facts, value) else { return None };
    let lengths = shape.iter().zip(tensor.shape());
    lengths.filter(|(dim, _)| **dim == Dim::Batch).map(|(_, length)| *length).next()
}

/// Refuses what the system has no memory for: where an allocation would end the process, this is an error.
///
/// # Errors
/// Says how many bytes.
pub(in crate::program) fn check_memory(bytes: u64) -> Result<(), Failure> {
    if bytes < ASKED_BYTES_MIN {
        return Ok(());
    }
    let mut room = Vec::<u8>::new();
    let asked = usize::try_from(bytes).ok().and_then(|bytes| room.try_reserve_exact(bytes).ok());
    // Memory that nobody looks at need not be asked for, as far as the compiler can tell.
    std::hint::black_box(&room);
    asked.ok_or_else(|| Failure::call(format!("found no memory for {bytes} bytes; expected as many")))
}

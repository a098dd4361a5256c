//! Given values: tensors from outside of a program, with which its ops `given` fill variables.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::value::Tensor;
use super::variable::VariableFacts;

/// A source of dense values by name, such as a file. A graph takes values from it with
/// [`Graph::with_values`](super::Graph::with_values).
pub trait GivenValues: Send + Sync {
    /// Type and dimensions of a value.
    ///
    /// # Errors
    /// When there is no such value, or its elements have a type that no variable has.
    fn facts(&self, name: &str) -> Result<(ElementType, Vec<u64>), Failure>;

    /// Reads as many bytes as `content` has, little endian, from the beginning of row `first` on. A row is one index of
    /// the first dimension; a scalar has one row.
    ///
    /// # Errors
    /// When there is no such value, it ends before, or it cannot be read.
    fn read(&self, name: &str, first: u64, content: &mut [u8]) -> Result<(), Failure>;
}

/// Tensors in memory.
impl GivenValues for BTreeMap<String, Tensor> {
    fn facts(&self, name: &str) -> Result<(ElementType, Vec<u64>), Failure> {
        let tensor = find(self, name)?;
        Ok((tensor.elements().element_type(), tensor.shape().to_vec()))
    }

    fn read(&self, name: &str, first: u64, content: &mut [u8]) -> Result<(), Failure> {
        let tensor = find(self, name)?;
        let row_bytes =
            tensor.shape().iter().skip(1).fold(tensor.elements().element_type().bytes(), |all, one| all * one);
        let begin = first.checked_mul(row_bytes).and_then(|begin| usize::try_from(begin).ok());
        let rest = begin.and_then(|begin| tensor.bytes().get(begin..)).unwrap_or_default();
        let found = rest.get(..content.len()).ok_or_else(|| {
            let (found, expected) = (rest.len(), content.len());
            Failure::call(format!("value {name:?} has {found} bytes from row {first} on; expected {expected}"))
        })?;
        content.copy_from_slice(found);
        Ok(())
    }
}

fn find<'a>(values: &'a BTreeMap<String, Tensor>, name: &str) -> Result<&'a Tensor, Failure> {
    values.get(name).ok_or_else(|| Failure::call(format!("found no value {name:?}; expected one of this name")))
}

/// The values that a graph has taken; none of a graph without.
#[derive(Clone, Default)]
pub(crate) struct TakenValues(pub(crate) Option<Arc<dyn GivenValues>>);

impl TakenValues {
    /// A tensor of rows of a value.
    pub(crate) fn tensor(&self, name: &str, first: u64, facts: &VariableFacts) -> Result<Tensor, Failure> {
        let values = self.0.as_ref().ok_or_else(|| {
            Failure::call(format!(
                "found no values for given(name={name:?}); expected a file with them (pserver train --values) or a \
                 call of Graph::with_values"
            ))
        })?;
        let (element_type, shape) = facts.fixed_dense().expect("a checked op fills a tensor of fixed dimensions");
        let mut tensor = Tensor::try_zeros(element_type, &shape)?;
        values.read(name, first, tensor.bytes_mut())?;
        Ok(tensor)
    }

    /// Refuses a value that does not have the type and the dimensions of a variable; from a later `first` row on, one
    /// that does not have as many rows as the variable.
    pub(crate) fn check(&self, name: &str, first: u64, facts: &VariableFacts) -> Result<(), String> {
        let Some(values) = &self.0 else { return Ok(()) };
        let (element_type, shape) = facts.fixed_dense().expect("a checked op fills a tensor of fixed dimensions");
        let (found_type, found) = values.facts(name).map_err(|failure| failure.to_string())?;
        let has_rows = match (found.split_first(), shape.split_first()) {
            (Some((height, rest)), Some((rows, others))) if first > 0 => {
                rest == others && first.checked_add(*rows).is_some_and(|end| end <= *height)
            }
            _ => found == shape && first == 0,
        };
        if found_type == element_type && has_rows {
            return Ok(());
        }
        let from = if first > 0 { format!(" from row {first} on") } else { String::new() };
        Err(format!("value {name:?} is {found_type}{found:?}; expected {element_type}{shape:?}{from}"))
    }
}

/// Programs are compared, and not where values come from.
impl PartialEq for TakenValues {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl fmt::Debug for TakenValues {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "values" } else { "no values" })
    }
}

//! Numbers that gradients carry: a learning rate, and settings by name.

use pserver_client::CarriedNumbers;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use crate::session::name_for_good;

/// A tuple of a learning rate or none, and of pairs of names and values.
#[derive(FromPyObject)]
pub(crate) struct RawNumbers(Option<f64>, #[pyo3(from_py_with = settings)] Vec<(&'static str, f64)>);

impl RawNumbers {
    /// The numbers as the client takes them.
    pub(crate) fn carried(&self) -> CarriedNumbers<'_> {
        CarriedNumbers { rate: self.0, settings: &self.1 }
    }
}

fn settings(pairs: &Bound<'_, PyAny>) -> PyResult<Vec<(&'static str, f64)>> {
    let pairs: Vec<(PyBackedStr, f64)> = pairs.extract()?;
    Ok(pairs.iter().map(|(name, value)| (name_for_good(name), *value)).collect())
}

//! Numbers that gradients carry: a learning rate, and settings by name.

use pserver_client::CarriedNumbers;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use crate::session::name_for_good;

/// A tuple of a learning rate or none, and of pairs of names and values.
pub(crate) struct RawNumbers(Option<f64>, Vec<(&'static str, f64)>);

impl RawNumbers {
    /// The numbers as the client takes them.
    pub(crate) fn carried(&self) -> CarriedNumbers<'_> {
        CarriedNumbers { rate: self.0, settings: &self.1 }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for RawNumbers {
    type Error = PyErr;

    fn extract(numbers: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let (rate, settings): (Option<f64>, Vec<(PyBackedStr, f64)>) = numbers.extract()?;
        Ok(Self(rate, settings.iter().map(|(name, value)| (name_for_good(name), *value)).collect()))
    }
}

//! Calls that were started and are waited for later.

use std::sync::{Arc, Mutex};

use pserver_client::CallNumber;
use pserver_core::error::Failure;
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::outcome;
use crate::session::{PythonSession, locked};

/// A call that was started. Its arrays are the library's until it is over.
#[pyclass(frozen, name = "RawCall", module = "pserver._pserver")]
pub(crate) struct RawCall {
    session: Arc<PythonSession>,
    number: CallNumber,
    /// Whether the result has the checksums of the values.
    is_summed: bool,
    /// The result, once a thread has waited for it.
    result: Mutex<Option<Result<Option<Vec<u32>>, Failure>>>,
}

impl RawCall {
    pub(crate) fn new(session: Arc<PythonSession>, number: CallNumber) -> Self {
        Self { session, number, is_summed: false, result: Mutex::default() }
    }

    /// Gives the call to `noted`, the program's object for it, before any interrupt of the program; `is_summed`: it
    /// sums values.
    pub(crate) fn note(mut self, noted: &Bound<'_, PyAny>, is_summed: bool) -> PyResult<()> {
        self.is_summed = is_summed;
        noted.setattr(intern!(noted.py(), "_raw"), self)
    }

    fn finish(&self) -> Result<Option<Vec<u32>>, Failure> {
        let client = self.session.client();
        let sums = if self.is_summed {
            Some(client.wait_sums(self.number)?)
        } else {
            client.wait(self.number)?;
            None
        };
        self.session.store(self.number).map(|()| sums)
    }
}

#[pymethods]
impl RawCall {
    /// Waits until the call is over. A second wait has the same result.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<Vec<u32>>> {
        let result = py.detach(|| {
            let mut result = locked(&self.result);
            result.get_or_insert_with(|| self.finish()).clone()
        });
        self.session.release(self.number);
        outcome(py, result)
    }

    /// Cancels the call, unless it is over.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        outcome(py, py.detach(|| self.session.client().cancel_started(self.number)))
    }

    /// Whether a wait would return at once.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let is_over = py.detach(|| self.session.client().is_over(self.number));
        outcome(py, is_over)
    }
}

impl Drop for RawCall {
    fn drop(&mut self) {
        if locked(&self.result).is_none() && !self.session.is_of_parent() {
            self.session.drop_call(self.number);
        }
    }
}

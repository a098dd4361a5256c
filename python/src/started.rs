//! Calls that were started and are waited for later.

use std::sync::{Arc, Mutex};

use pserver_client::CallNumber;
use pserver_core::error::Failure;
use pyo3::prelude::*;

use crate::errors::outcome;
use crate::session::{PythonSession, locked};

/// A call that was started. Its arrays are the library's until it is over.
#[pyclass(frozen, name = "RawCall", module = "pserver._pserver")]
pub(crate) struct RawCall {
    session: Arc<PythonSession>,
    number: CallNumber,
    /// Whether the result has checksums.
    is_watched: bool,
    /// The result, once a thread has waited for it.
    result: Mutex<Option<Result<Option<Checksums>, Failure>>>,
}

/// The checksums of arrays before their values came, and those after.
type Checksums = (Vec<u32>, Vec<u32>);

impl RawCall {
    pub(crate) fn new(session: Arc<PythonSession>, number: CallNumber) -> Self {
        Self { session, number, is_watched: false, result: Mutex::default() }
    }

    /// The same of a call that was started to be watched.
    pub(crate) fn watched(mut self) -> Self {
        self.is_watched = true;
        self
    }

    fn finish(&self) -> Result<Option<Checksums>, Failure> {
        let client = self.session.client();
        let sums = if self.is_watched {
            let overwritten = client.wait_watched(self.number)?;
            Some(overwritten.into_iter().map(|one| (one.before, one.after)).unzip())
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
    fn wait(&self, py: Python<'_>) -> PyResult<Option<Checksums>> {
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

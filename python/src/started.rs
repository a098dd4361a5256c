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
    /// Whether the result has the checksums of the values.
    is_summed: bool,
    /// Whether the call is cancelled when the program drops it.
    ends_when_dropped: bool,
    /// The result, once a thread has waited for it.
    result: Mutex<Option<Result<Option<Vec<u32>>, Failure>>>,
}

impl RawCall {
    pub(crate) fn new(session: Arc<PythonSession>, number: CallNumber) -> Self {
        Self { session, number, is_summed: false, ends_when_dropped: false, result: Mutex::default() }
    }

    /// The same of a call that is part of a step, and ends when it is dropped; `is_summed`: it sums values.
    pub(crate) fn of_step(mut self, is_summed: bool) -> Self {
        (self.is_summed, self.ends_when_dropped) = (is_summed, true);
        self
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
        if locked(&self.result).is_some() || self.session.is_of_parent() {
            return;
        }
        // A call behind one that was cancelled and is not over would fail with it. Without an interpreter the process
        // ends.
        let is_ended = self.ends_when_dropped && Python::try_attach(|py| py.detach(|| self.end())).is_some();
        if !is_ended {
            self.session.drop_call(self.number);
        }
    }
}

impl RawCall {
    /// Cancels the call, whose result nobody wants, and waits until its memory is the program's.
    fn end(&self) {
        let client = self.session.client();
        let _ = client.cancel_started(self.number);
        let _ = client.wait(self.number);
        self.session.release(self.number);
    }
}

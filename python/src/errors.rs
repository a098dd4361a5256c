//! Failures as exceptions of the package, and interrupts of calls by signals.

use std::cell::RefCell;

use pserver_core::error::{CallEnd, Failure};
use pyo3::prelude::*;

thread_local! {
    /// The exception that a handler of a signal raised while this thread waited in a call.
    static INTERRUPT: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs Python's handlers of signals, which it runs in its main thread only; true if one raised an exception.
pub(crate) fn is_interrupted() -> bool {
    if rustix::thread::gettid() != rustix::process::getpid() {
        return false;
    }
    let checked = Python::try_attach(|py| py.check_signals());
    let Some(Err(error)) = checked else { return false };
    INTERRUPT.set(Some(error));
    true
}

/// The result of a call as Python has it. The exception of a handler has precedence.
pub(crate) fn outcome<T>(py: Python<'_>, result: Result<T, Failure>) -> PyResult<T> {
    if let Some(error) = INTERRUPT.take() {
        return Err(error);
    }
    result.map_err(|failure| exception(py, &failure))
}

/// The exception of a failure.
pub(crate) fn exception(py: Python<'_>, failure: &Failure) -> PyErr {
    let text = failure.to_string();
    let made = match failure.end() {
        CallEnd::Refused => raised(py, "Refused", (text,)),
        CallEnd::NotInitialised => raised(py, "NotInitialised", (text,)),
        CallEnd::Timeout => raised(py, "Timeout", (text,)),
        CallEnd::MissingTrainers(ranks) => raised(py, "MissingTrainer", (text, ranks)),
        CallEnd::ServerLost => raised(py, "ServerLost", (text,)),
        CallEnd::Cancelled => raised(py, "Cancelled", (text,)),
    };
    made.unwrap_or_else(|error| error)
}

/// A mistake in what a call was given.
pub(crate) fn refused(py: Python<'_>, text: impl Into<String>) -> PyErr {
    exception(py, &Failure::call(text))
}

fn raised<'py>(py: Python<'py>, name: &str, arguments: impl pyo3::call::PyCallArgs<'py>) -> PyResult<PyErr> {
    let class = py.import("pserver._errors")?.getattr(name)?;
    Ok(PyErr::from_value(class.call1(arguments)?))
}

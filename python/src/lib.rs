//! The extension module of the Python package: the Rust client and the `pserver` program as Python objects.
//!
//! Read in this order: `client` (calls), `started` (calls that are waited for later), `rows` (arrays of calls by rows),
//! `carried` (numbers beside gradients), `held` (arrays of several calls), `arrays` (memory of Python objects),
//! `tensors` (memory of the library), `dlpack` (the form of both), `errors` (failures as exceptions, interrupts),
//! `logs` (lines of the library).
//!
//! Not here: names, dictionaries and defaults of calls (`python/pserver/_client.py`), what a call does
//! ([`pserver_client`]).

mod arrays;
mod carried;
mod client;
mod dlpack;
mod errors;
mod held;
mod logs;
mod rows;
mod session;
mod started;
mod tensors;

use std::ffi::OsString;
use std::path::PathBuf;

use pserver_core::checksum::checksum;
use pyo3::prelude::*;

use crate::arrays::{Access, HeldArray};
use crate::dlpack::TensorLibrary;

/// Runs the `pserver` program with these arguments, its own name first, and returns its exit status. `path` is the file
/// that it starts as processes of its own.
#[pyfunction]
fn program(py: Python<'_>, arguments: Vec<OsString>, path: Option<PathBuf>) -> u8 {
    py.detach(|| pserver_cli::commands::run(arguments, path))
}

/// The launcher's part of the environment: whether it names server 0, rather than have it assumed; this trainer's rank;
/// the number of trainers.
#[pyfunction]
fn launched(py: Python<'_>) -> PyResult<(bool, Option<u32>, Option<u32>)> {
    errors::outcome(py, session::launched())
}

/// A checksum of each array's contents: equal ones have not changed.
#[pyfunction]
fn checksums(py: Python<'_>, all: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<u32>> {
    let mut library = TensorLibrary::default();
    let held = all.iter().map(|one| HeldArray::within(&mut library, one, &"an array", Access::Look));
    let held = held.collect::<PyResult<Vec<_>>>()?;
    Ok(py.detach(|| held.iter().map(|one| checksum(one.contents())).collect()))
}

#[pymodule]
fn _pserver(module: &Bound<'_, PyModule>) -> PyResult<()> {
    pserver_client::ask_while_waiting(errors::is_interrupted);
    module.add_class::<client::RawClient>()?;
    module.add_class::<tensors::LibraryTensor>()?;
    module.add_class::<started::RawCall>()?;
    module.add_class::<held::ParameterArrays>()?;
    module.add_function(wrap_pyfunction!(logs::begin_log, module)?)?;
    module.add_function(wrap_pyfunction!(logs::log_lines, module)?)?;
    module.add_function(wrap_pyfunction!(logs::end_log, module)?)?;
    module.add_function(wrap_pyfunction!(launched, module)?)?;
    module.add_function(wrap_pyfunction!(checksums, module)?)?;
    module.add_function(wrap_pyfunction!(program, module)?)
}

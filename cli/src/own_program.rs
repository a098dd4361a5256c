//! The file that this program starts as processes of its own.

use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::{Context, Result};

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Names the file, where it is not the executable of this process: Python runs this program within an interpreter. The
/// first name stays.
pub(crate) fn set(program: PathBuf) {
    let _ = PROGRAM.set(program);
}

/// The file to start.
///
/// # Errors
/// When the system does not say where the executable of this process is.
pub(crate) fn path() -> Result<PathBuf> {
    match PROGRAM.get() {
        Some(program) => Ok(program.clone()),
        None => std::env::current_exe().context("cannot find the path of this program"),
    }
}

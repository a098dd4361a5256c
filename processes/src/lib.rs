//! Processes that a program starts and watches on its own machine, and the first line of a server among them.
//!
//! Not here: the processes of a job on several hosts (`pserver_cli::launch`), and what a process does.
//!
//! Read in this order: [`ready`] (where a server is), [`Children`] (processes that are started, read and reaped on
//! every path), [`parent_death`] (a child notices the end of its parent).

mod children;
pub mod parent_death;
pub mod ready;

use std::path::Path;
use std::process::Command;

pub use children::{ChildEvent, ChildId, Children};

/// A command for a process without the `PSERVER_*` variables of this environment, which belong to another job.
#[must_use]
pub fn unconfigured(program: &Path) -> Command {
    let mut command = Command::new(program);
    unconfigure(&mut command);
    command
}

/// Removes the `PSERVER_*` variables of this environment from the one of a command.
pub fn unconfigure(command: &mut Command) {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"PSERVER_")) {
        command.env_remove(name);
    }
}

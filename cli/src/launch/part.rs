//! The moment before a trainer's program: it is to end with the agent, also where that is killed.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use pserver_client::console;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::descriptors;

/// Exit status where the program cannot be run, as of shells.
const NOT_EXECUTABLE: u8 = 126;
/// Exit status where there is no such program, as of shells.
const NOT_FOUND: u8 = 127;

/// Arguments of `pserver launch-exec`.
#[derive(clap::Args, Clone, Debug)]
pub struct LaunchExecArgs {
    /// The agent's process.
    parent: i32,
    /// The soft limit of descriptors that the program gets, if it has one.
    #[arg(long)]
    open_files: Option<u64>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Becomes the program. Returns only where that fails.
///
/// # Errors
/// The agent is gone.
pub fn run(args: &LaunchExecArgs) -> Result<u8> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    ensure!(getppid() == Pid::from_raw(args.parent), "found no agent {}; expected it as parent", args.parent);
    descriptors::restore(args.open_files);
    let error = Command::new(&args.command[0]).args(&args.command[1..]).exec();
    let program = Path::new(&args.command[0]).display();
    console::remark(format_args!("pserver: {program} cannot be started: {error}"));
    Ok(if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE })
}

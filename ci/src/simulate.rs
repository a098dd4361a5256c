//! Simulated clusters: runs `pserver-simulate` of the package `simulator`.

use anyhow::Result;

use crate::built::Built;
use crate::workspace::{Tally, Workspace};

/// Seeds of a run.
const SEEDS: &str = "1000";
const SEEDS_LONG: &str = "100000";

/// The seeds of every run, by the program that `rust-tests` has built.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    let program = Built::tests(workspace)?.program("pserver-simulate", false)?;
    workspace.step(workspace.command(program).args(["--seeds", SEEDS]))
}

/// The seeds of the long form.
pub(crate) fn long(workspace: &Workspace) -> Result<Tally> {
    with(workspace, &["--seeds".to_owned(), SEEDS_LONG.to_owned()])
}

/// A run with these arguments.
pub(crate) fn with<'a>(workspace: &Workspace, arguments: impl IntoIterator<Item = &'a String>) -> Result<Tally> {
    let mut cargo = workspace.cargo();
    cargo.args(["run", "--quiet", "--package", "pserver-simulator", "--"]);
    workspace.step(cargo.args(arguments))
}

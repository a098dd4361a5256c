//! Simulated clusters: runs `pserver-simulate` of the package `simulator`.

use anyhow::Result;

use crate::workspace::{Tally, Workspace};

/// Seeds of a run.
const SEEDS: &str = "1000";
const SEEDS_LONG: &str = "100000";

/// The seeds of every run.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    with(workspace, &["--seeds".to_owned(), SEEDS.to_owned()])
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

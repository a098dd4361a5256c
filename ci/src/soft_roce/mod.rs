//! `cargo ci soft-roce`: RDMA without a device. A virtual machine runs Debian's kernel, whose module `rdma_rxe` (RoCE
//! in software) is a device like any other to libibverbs, and in it run our own programs.
//!
//! Not here: the tests, which are the packages' own. Read [`plan`] (what is run), [`guest`] (who runs it), [`report`]
//! (what is believed), then [`furnish`], [`image`] and [`machine`] (how a machine comes to be).

mod furnish;
pub(crate) mod guest;
mod image;
mod machine;
mod plan;
mod report;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::soft_roce::furnish::{Downloads, Furnishing};
use crate::soft_roce::machine::Machine;
use crate::soft_roce::plan::Scenario;
use crate::soft_roce::report::Report;
use crate::workspace::{Tally, Workspace};

/// All machines together, from the first that starts to the last that ends.
const LIMIT: Duration = Duration::from_secs(300);

/// The task.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    let downloads = match possible(workspace) {
        Ok(downloads) => downloads,
        Err(error) => return skip(workspace, &format!("{error:#}")),
    };
    let mut furnishing = furnish(workspace, &downloads)?;
    let report = alone(workspace, &mut furnishing, &plan::ALONE)?;
    let wanted: Vec<_> = plan::ALONE.programs.iter().map(|program| program.name).collect();
    show(&report);
    Ok(report.tally(&wanted))
}

/// The tool `guest`: one line of a person's, in a machine of its own.
pub(crate) fn by_hand(workspace: &Workspace, line: &str) -> Result<Tally> {
    let mut furnishing = furnish(workspace, &possible(workspace)?)?;
    furnishing.by_hand(line);
    let report = alone(workspace, &mut furnishing, &plan::BY_HAND)?;
    Ok(report.tally(&["by-hand"]))
}

fn alone(workspace: &Workspace, furnishing: &mut Furnishing, scenario: &Scenario) -> Result<Report> {
    let image = furnishing.write(workspace, scenario.name)?;
    Machine::start(scenario.name, &furnishing.kernel, &image, None)?.watch(machine::deadline(LIMIT))
}

/// What this machine must have; an error says what it lacks.
fn possible(workspace: &Workspace) -> Result<Downloads> {
    ensure!(cfg!(target_arch = "x86_64"), "the guest is an x86-64 machine, and so must be the programs in it");
    ensure!(Machine::is_possible(), "there is no qemu-system-x86_64");
    Downloads::fetch(workspace)
}

/// A skip as tests write it; with `rdma` in `PSERVER_REQUIRE` it is a failure.
fn skip(workspace: &Workspace, why: &str) -> Result<Tally> {
    let required = std::env::var("PSERVER_REQUIRE").unwrap_or_default();
    if required.split(',').any(|what| what.trim() == "rdma") {
        bail!("PSERVER_REQUIRE wants rdma: {why}");
    }
    workspace.skip("rdma", why)?;
    Ok(Tally::default())
}

/// Builds the programs of this workspace that guests run, and puts them beside Debian's.
fn furnish(workspace: &Workspace, downloads: &Downloads) -> Result<Furnishing> {
    let mut furnishing = Furnishing::collect(downloads)?;
    for (name, arguments) in PROGRAMS {
        let mut cargo = workspace.cargo();
        let program = built(cargo.args(*arguments).arg("--message-format=json-render-diagnostics"))
            .with_context(|| format!("cannot build {name}"))?;
        furnishing.add(workspace, name, &program)?;
    }
    Ok(furnishing)
}

/// The guest's name of a program, and what cargo builds it with.
const PROGRAMS: &[(&str, &[&str])] =
    &[("transport-unit", &["test", "--quiet", "--no-run", "--package", "pserver-transport", "--lib"])];

/// Runs cargo, and returns the program that it says it built last.
fn built(cargo: &mut Command) -> Result<PathBuf> {
    let output = cargo.stderr(std::process::Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo ended with {}", output.status);
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    executable(&messages).map(PathBuf::from).context("cargo names no program")
}

/// The last `"executable":"…"` of cargo's messages.
fn executable(messages: &str) -> Option<&str> {
    let (_, rest) = messages.rsplit_once("\"executable\":\"")?;
    rest.split_once('"').map(|(path, _)| path)
}

fn show(report: &Report) {
    for run in &report.programs {
        let status = run.status.as_deref().unwrap_or("did not end");
        println!("soft-roce: {:<16} {:>6} ms  {status}", run.name, run.millis);
    }
}

#[cfg(test)]
mod tests {
    use super::executable;

    #[test]
    fn the_program_that_was_built_last_is_meant() {
        let messages = "{\"executable\":null}\n{\"executable\":\"/a/b-1\",\"fresh\":true}\n{\"success\":true}\n";
        assert_eq!(executable(messages), Some("/a/b-1"));
        assert_eq!(executable("{\"executable\":null}"), None);
    }
}

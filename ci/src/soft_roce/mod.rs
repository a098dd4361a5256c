//! `cargo ci soft-roce`: RDMA without a device. A virtual machine runs Debian's kernel, whose module `rdma_rxe` (RoCE
//! in software) is a device like any other to libibverbs, and in it run our own programs.
//!
//! Not here: the tests, which are the packages' own. Read [`plan`] (what is run), [`guest`] (who runs it), [`report`]
//! (what is believed) and [`figures`] (what was measured), then [`furnish`], [`image`] and [`machine`] (how a machine comes to be).

mod figures;
mod furnish;
pub(crate) mod guest;
mod image;
mod machine;
mod plan;
mod report;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::soft_roce::furnish::{Downloads, Furnishing};
use crate::soft_roce::machine::{Machine, Wire};
use crate::soft_roce::plan::Scenario;
use crate::soft_roce::report::Report;
use crate::workspace::{Tally, Workspace};

/// All machines together, from the first that starts to the last that ends.
const LIMIT: Duration = Duration::from_secs(600);
/// A person's machine.
const LIMIT_BY_HAND: Duration = Duration::from_secs(660);

/// The task.
pub(crate) fn run(workspace: &Workspace) -> Result<Tally> {
    let downloads = match possible(workspace) {
        Ok(downloads) => downloads,
        Err(error) => return skip(workspace, &format!("{error:#}")),
    };
    let mut furnishing = furnish(workspace, &downloads)?;
    let end = machine::deadline(LIMIT);
    let report = alone(workspace, &mut furnishing, &plan::ALONE, end)?;
    let (server, trainer) = two(workspace, &mut furnishing, end)?;
    let mut total = Tally::default();
    for (scenario, report) in [(plan::ALONE, &report), (plan::SERVER, &server), (plan::TRAINER, &trainer)] {
        show(report);
        report.skipped.iter().try_for_each(|line| workspace.skip("in the guest", line))?;
        let names: Vec<_> = scenario.programs.iter().map(|program| program.name).collect();
        total += report.tally(&names);
    }
    println!("{}", figures::table(&report));
    total += models_agree(&server);
    if total.failed == 0 {
        let count = workspace.make_up_for("rdma")?;
        println!("soft-roce: {count} tests that skipped for want of a device have been run in the guest");
    }
    Ok(total)
}

/// The tool `guest`: one line of a person's, in a machine of its own.
pub(crate) fn by_hand(workspace: &Workspace, line: &str) -> Result<Tally> {
    let mut furnishing = furnish(workspace, &possible(workspace)?)?;
    furnishing.by_hand(line);
    let report = alone(workspace, &mut furnishing, &plan::BY_HAND, machine::deadline(LIMIT_BY_HAND))?;
    Ok(report.tally(&["by-hand"]))
}

/// One machine, until it is off.
fn alone(workspace: &Workspace, furnishing: &mut Furnishing, scenario: &Scenario, end: Instant) -> Result<Report> {
    let image = furnishing.write(workspace, scenario.name)?;
    Machine::start(scenario.name, &furnishing.kernel, &image, None)?.watch(end)
}

/// Two machines and a wire, until both are off: what the server's said, and the trainer's.
fn two(workspace: &Workspace, furnishing: &mut Furnishing, end: Instant) -> Result<(Report, Report)> {
    let images = [plan::SERVER, plan::TRAINER].map(|scenario| furnishing.write(workspace, scenario.name));
    let [server, trainer] = images;
    // A socket's path must be short.
    let path = std::env::temp_dir().join(format!("pserver-wire-{}", std::process::id()));
    let (near, far) = (Wire { path: &path, listens: true }, Wire { path: &path, listens: false });
    let server = Machine::start(plan::SERVER.name, &furnishing.kernel, &server?, Some(&near))?;
    near.wait(end)?;
    let trainer = Machine::start(plan::TRAINER.name, &furnishing.kernel, &trainer?, Some(&far))?;
    let watcher = thread::spawn(move || server.watch(end));
    let trainer = trainer.watch(end);
    let server = watcher.join().expect("watching does not panic");
    // QEMU may have taken it away itself.
    let _ = fs::remove_file(&path);
    Ok((server?, trainer?))
}

/// Whether every job that the server's machine served came to the same model, to the bit.
fn models_agree(server: &Report) -> Tally {
    let lines = server.programs.iter().flat_map(|run| &run.output);
    let models: Vec<_> = lines.filter_map(|line| line.strip_prefix("model ")).collect();
    println!("soft-roce: models {models:?}");
    Tally::of_step(models.len() == plan::SERVER.programs.len() && models.iter().all(|model| *model == models[0]))
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
const PROGRAMS: &[(&str, &[&str])] = &[
    ("transport-unit", &["test", "--quiet", "--no-run", "--package", "pserver-transport", "--lib"]),
    ("pserver", &["build", "--quiet", "--package", "pserver", "--bin", "pserver"]),
    ("psbench", &["build", "--quiet", "--package", "pserver-bench", "--bin", "psbench"]),
];

/// Runs cargo, and returns the program that it says it built last.
fn built(cargo: &mut Command) -> Result<PathBuf> {
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
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

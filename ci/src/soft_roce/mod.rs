//! `cargo ci soft-roce`: RDMA without a device. A virtual machine runs Debian's kernel, whose module `rdma_rxe` (RoCE
//! in software) is a device like any other to libibverbs, and in it run our own programs.
//!
//! Not here: the tests, which are the packages' own. Read [`plan`] (what is run), [`guest`] (who runs it), [`report`]
//! (what is believed) and [`figures`] (what was measured), then [`furnish`], [`image`] and [`machine`] (how a machine
//! comes to be).

mod figures;
mod furnish;
pub(crate) mod guest;
mod image;
mod machine;
mod plan;
mod report;

use std::fs;
use std::path::Path;
use std::process::Stdio;
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
    let mut furnishing = furnish(workspace, &downloads, EVERYTHING)?;
    let end = machine::deadline(LIMIT);
    let report = alone(workspace, &mut furnishing, &plan::ALONE, end)?;
    let (server, trainer) = two(workspace, &mut furnishing, end)?;
    let mut total = judged(workspace, &[(plan::ALONE, &report), (plan::SERVER, &server), (plan::TRAINER, &trainer)])?;
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
    let mut furnishing = furnish(workspace, &possible(workspace)?, EVERYTHING)?;
    furnishing.by_hand(line);
    let report = alone(workspace, &mut furnishing, &plan::BY_HAND, machine::deadline(LIMIT_BY_HAND))?;
    Ok(report.tally(&["by-hand"]))
}

/// The tool `wire`: only the two machines.
pub(crate) fn wire(workspace: &Workspace) -> Result<Tally> {
    let mut furnishing = furnish(workspace, &possible(workspace)?, &["pserver"])?;
    let (server, trainer) = two(workspace, &mut furnishing, machine::deadline(LIMIT))?;
    let mut total = judged(workspace, &[(plan::SERVER, &server), (plan::TRAINER, &trainer)])?;
    total += models_agree(&server);
    Ok(total)
}

/// What came of each machine's programs.
fn judged(workspace: &Workspace, reports: &[(Scenario, &Report)]) -> Result<Tally> {
    let mut total = Tally::default();
    for (scenario, report) in reports {
        show(report);
        report.skipped.iter().try_for_each(|line| workspace.skip("in the guest", line))?;
        let names: Vec<_> = scenario.programs.iter().map(|program| program.name).collect();
        total += report.tally(&names);
    }
    Ok(total)
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

/// Programs of this workspace that guests run, by their names there.
const EVERYTHING: &[&str] = &["transport-unit", "pserver", "psbench"];

/// Builds programs of this workspace, and puts them beside Debian's. The whole workspace is built as `rust-tests`
/// builds it, so that after them nothing is left to do.
fn furnish(workspace: &Workspace, downloads: &Downloads, names: &[&str]) -> Result<Furnishing> {
    let mut furnishing = Furnishing::collect(downloads)?;
    let mut cargo = workspace.cargo();
    cargo.args(["test", "--quiet", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo ended with {}", output.status);
    let messages = String::from_utf8_lossy(&output.stdout);
    for name in names {
        let program = built(&messages, name).with_context(|| format!("cargo does not say that it built {name}"))?;
        furnishing.add(workspace, name, Path::new(&program))?;
    }
    Ok(furnishing)
}

/// Where cargo says that it put a program: `transport-unit` are the tests within `pserver-transport`, any other name is
/// the program's own.
fn built(messages: &str, name: &str) -> Option<String> {
    let (target, is_test) = if name == "transport-unit" { ("pserver_transport", true) } else { (name, false) };
    messages.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_wanted = message["target"]["name"] == target && message["profile"]["test"] == is_test;
        message["executable"].as_str().filter(|_| is_wanted).map(str::to_owned)
    })
}

fn show(report: &Report) {
    for run in &report.programs {
        let status = run.status.as_deref().unwrap_or("did not end");
        println!("soft-roce: {:<16} {:>6} ms  {status}", run.name, run.millis);
    }
}

#[cfg(test)]
mod tests {
    use super::built;

    #[test]
    fn a_program_is_found_among_the_messages_of_cargo() {
        let message = |name: &str, test: bool, path: &str| {
            let executable = if path.is_empty() { "null".to_owned() } else { format!("\"{path}\"") };
            format!(
                "{{\"target\":{{\"name\":\"{name}\"}},\"profile\":{{\"test\":{test}}},\"executable\":{executable}}}"
            )
        };
        let messages = [
            message("pserver_transport", false, ""),
            message("pserver_transport", true, "/a/unit"),
            message("pserver", true, "/a/tests-of-pserver"),
            "not json".to_owned(),
            message("pserver", false, "/a/pserver"),
        ];
        let messages = messages.join("\n");
        assert_eq!(built(&messages, "transport-unit").as_deref(), Some("/a/unit"));
        assert_eq!(built(&messages, "pserver").as_deref(), Some("/a/pserver"));
        assert_eq!(built(&messages, "psbench"), None);
    }
}

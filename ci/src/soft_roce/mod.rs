//! `cargo ci soft-roce`: RDMA without a device. A virtual machine runs Debian's kernel, whose module `rdma_rxe` (RoCE
//! in software) is a device like any other to libibverbs, and in it run our own programs.
//!
//! Not here: the tests, which are the packages' own. Read [`plan`] (what is run), [`guest`] (who runs it), [`report`]
//! (what is believed), [`verdicts`] (what must be equal) and [`figures`] (what was measured), then [`programs`],
//! [`mod@furnish`], [`image`] and [`machine`] (how a machine comes to be).

mod figures;
mod furnish;
pub(crate) mod guest;
mod image;
mod machine;
mod plan;
mod programs;
mod report;
mod verdicts;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};

use crate::soft_roce::furnish::{Downloads, Furnishing};
use crate::soft_roce::machine::{Machine, Wire};
use crate::soft_roce::plan::Scenario;
use crate::soft_roce::programs::Build;
use crate::soft_roce::report::Report;
use crate::workspace::{Ending, Tally, Workspace};

/// The time that all machines together may take on two idle processors.
const GOAL: Duration = Duration::from_secs(360);
/// A machine that runs longer hangs, also where much else runs.
const LIMIT: Duration = Duration::from_secs(3600);
/// A person's machine.
const LIMIT_BY_HAND: Duration = Duration::from_secs(660);

/// The reports of the machines and their time.
struct MachineReports {
    alone: Report,
    server: Report,
    trainer: Report,
    took: Duration,
}

/// The task of `cargo ci test`: machines that run the programs as tests are built.
pub(crate) fn begin(workspace: &Workspace) -> Result<Ending> {
    begin_with(workspace, Build::OfTests, plan::ALONE)
}

/// The task of `cargo ci long`: programs are built for speed, and their figures are those of docs/reports/rdma.md.
pub(crate) fn long(workspace: &Workspace) -> Result<Tally> {
    begin_with(workspace, Build::ForSpeed, plan::ALONE_LONG)?(workspace)
}

/// Builds the images and runs the machines one after the other on a thread. The console of a machine is shown line by
/// line, between the output of other tasks.
fn begin_with(workspace: &Workspace, build: Build, scenario: Scenario) -> Result<Ending> {
    let downloads = match possible(workspace) {
        Ok(downloads) => downloads,
        Err(error) => return Ok(Box::new(move |workspace| skip(workspace, &format!("{error:#}")))),
    };
    let (mut furnishing, lock) = furnish(workspace, &downloads, build)?;
    let workspace = workspace.clone();
    let machines = thread::spawn(move || -> Result<MachineReports> {
        // Held until the machines are off.
        let _lock = lock;
        let began = Instant::now();
        let end = machine::deadline(LIMIT);
        let alone = alone(&workspace, &mut furnishing, &scenario, end)?;
        let (server, trainer) = two(&workspace, &mut furnishing, end)?;
        Ok(MachineReports { alone, server, trainer, took: began.elapsed() })
    });
    Ok(Box::new(move |workspace| {
        let said = machines.join().map_err(|_| anyhow!("the thread that runs machines panicked"))?;
        judge(workspace, scenario, &said?)
    }))
}

/// The verdict on the machines. The tests of this machine are over: a test that they skipped and a guest passed is
/// not counted as skipped.
fn judge(workspace: &Workspace, scenario: Scenario, said: &MachineReports) -> Result<Tally> {
    let MachineReports { alone: report, server, trainer, took } = said;
    let mut total = judged(workspace, &[(scenario, report), (plan::SERVER, server), (plan::TRAINER, trainer)])?;
    if report.run("ib_write_bw").is_some() {
        say!("{}", figures::table(report));
    }
    total += verdicts::nothing_is_copied(report);
    total += verdicts::models_agree(server);
    total += verdicts::digits_agree(report);
    let passed = report.tests_passed().collect();
    let count = workspace.make_up_for("rdma", &passed)?;
    say!("soft-roce: {count} tests that skipped for want of a device have passed in the guest");
    let spent = [report, server, trainer].iter().map(|report| report.processor.as_secs()).sum::<u64>();
    let (took, goal) = (took.as_secs(), GOAL.as_secs());
    say!("soft-roce: machines took {took} s, and {spent} s of processors; on two idle ones the goal is {goal} s");
    Ok(total)
}

/// The tool `guest`: one line of a person's, in a machine of its own.
pub(crate) fn by_hand(workspace: &Workspace, line: &str) -> Result<Tally> {
    let (mut furnishing, _lock) = furnish(workspace, &possible(workspace)?, Build::ForSpeed)?;
    furnishing.by_hand(line);
    let report = alone(workspace, &mut furnishing, &plan::BY_HAND, machine::deadline(LIMIT_BY_HAND))?;
    Ok(report.tally(&["by-hand"]))
}

/// The tool `wire`: only the two machines.
pub(crate) fn wire(workspace: &Workspace) -> Result<Tally> {
    let (mut furnishing, _lock) = furnish(workspace, &possible(workspace)?, Build::ForSpeed)?;
    let (server, trainer) = two(workspace, &mut furnishing, machine::deadline(LIMIT))?;
    let mut total = judged(workspace, &[(plan::SERVER, &server), (plan::TRAINER, &trainer)])?;
    total += verdicts::models_agree(&server);
    Ok(total)
}

/// The tool `counts`: instructions of rounds over verbs beside those of perftest, and of bytes beside gloo's.
pub(crate) fn counts(workspace: &Workspace) -> Result<Tally> {
    let downloads = possible(workspace)?;
    let (mut furnishing, _lock) = furnish(workspace, &downloads, Build::ForSpeed)?;
    programs::add_gloo(workspace, &mut furnishing, &downloads)?;
    let report = alone(workspace, &mut furnishing, &plan::COUNTED, machine::deadline(LIMIT))?;
    let total = judged(workspace, &[(plan::COUNTED, &report)])?;
    say!("{}", figures::counts(&report));
    Ok(total)
}

/// The results of each machine's programs.
fn judged(workspace: &Workspace, reports: &[(Scenario, &Report)]) -> Result<Tally> {
    let mut total = Tally::default();
    for (scenario, report) in reports {
        show(report);
        report.skipped.iter().try_for_each(|line| workspace.skip("in the guest", line))?;
        let names: Vec<_> = scenario.programs().map(|program| program.name).collect();
        total += report.tally(&names);
    }
    Ok(total)
}

/// One machine, until it is off.
fn alone(workspace: &Workspace, furnishing: &mut Furnishing, scenario: &Scenario, end: Instant) -> Result<Report> {
    let image = furnishing.write(workspace, scenario.name)?;
    Machine::start(scenario, &furnishing.kernel, &image, None)?.watch(end)
}

/// Two machines and a wire, until both are off: what the server's said, and the trainer's.
fn two(workspace: &Workspace, furnishing: &mut Furnishing, end: Instant) -> Result<(Report, Report)> {
    let images = [plan::SERVER, plan::TRAINER].map(|scenario| furnishing.write(workspace, scenario.name));
    let [server, trainer] = images;
    // A socket's path must be short.
    let path = std::env::temp_dir().join(format!("pserver-wire-{}", std::process::id()));
    let (near, far) = (Wire { path: &path, listens: true }, Wire { path: &path, listens: false });
    let server = Machine::start(&plan::SERVER, &furnishing.kernel, &server?, Some(&near))?;
    near.wait(end)?;
    let trainer = Machine::start(&plan::TRAINER, &furnishing.kernel, &trainer?, Some(&far))?;
    let watcher = thread::spawn(move || server.watch(end));
    let trainer = trainer.watch(end);
    let server = watcher.join().expect("watching does not panic");
    // QEMU may have taken it away itself.
    let _ = fs::remove_file(&path);
    Ok((server?, trainer?))
}

/// The requirements of the task; the error names the one that this machine lacks.
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

/// Collects the files of the machines. A second run in the same folder waits until the machines of the first are off.
fn furnish(workspace: &Workspace, downloads: &Downloads, build: Build) -> Result<(Furnishing, fs::File)> {
    let lock = programs::lock(workspace)?;
    let mut furnishing = Furnishing::collect(downloads)?;
    programs::add(workspace, &mut furnishing, build)?;
    Ok((furnishing, lock))
}

fn show(report: &Report) {
    for run in &report.programs {
        let status = run.status.as_deref().unwrap_or("did not end");
        say!("soft-roce: {:<18} {:>6} ms  {status}", run.name, run.millis);
        run.said("figure").for_each(|figure| say!("soft-roce: {:<18} {figure}", run.name));
    }
}

//! Inside of the guest: this program is its first process. It makes a network, adds the device, runs what it is told,
//! says how each ended, and switches the machine off.
//!
//! Not here: what is run, see [`super::plan`]; how the machine came to be, see [`mod@super::furnish`].

use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::debian::succeed;
use crate::soft_roce::plan::{self, GuestProgram};
use crate::soft_roce::report::ReportLine;
use crate::workspace::SKIP_REPORT;

/// The file that makes a machine a guest of ours: the name of its scenario.
pub(super) const SCENARIO: &str = "scenario";
/// The modules to load, in this order, one a line.
pub(super) const MODULES: &str = "modules/order";
/// The line of `cargo ci guest`, in the scenario that runs nothing else.
pub(super) const BY_HAND: &str = "by-hand";

const SKIPS: &str = "/tmp/skips";
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Whether this process is a guest's first.
pub(crate) fn is_first_process() -> bool {
    std::process::id() == 1 && Path::new("/").join(SCENARIO).exists()
}

/// The guest's whole life.
pub(crate) fn live() -> ExitCode {
    if let Err(error) = run() {
        say!("guest: {error:#}");
    }
    // There is nothing to be done about a machine that will not switch itself off; the host ends it.
    let _ = busybox(&["poweroff", "-f"]);
    ExitCode::FAILURE
}

fn run() -> Result<()> {
    mount()?;
    let name = fs::read_to_string(Path::new("/").join(SCENARIO)).context("which scenario?")?;
    let scenario = plan::scenario(&name).with_context(|| format!("there is no scenario {name}"))?;
    for module in fs::read_to_string(Path::new("/").join(MODULES)).context("which modules?")?.lines() {
        busybox(&["insmod", module])?;
    }
    for line in scenario.before {
        shell(line)?;
    }
    for program in scenario.programs() {
        say(&ReportLine::Begin(program.name.to_owned()));
        let began = Instant::now();
        let status = attempt(program).unwrap_or_else(|error| format!("{error:#}"));
        let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if status != "0" {
            // The kernel's log often has the cause.
            let _ = shell("busybox dmesg | busybox tail -n 20");
        }
        say(&ReportLine::End { name: program.name.to_owned(), status, millis });
    }
    // No file means that nothing was skipped.
    for line in fs::read_to_string(SKIPS).unwrap_or_default().lines() {
        say(&ReportLine::Skipped(line.to_owned()));
    }
    say(&ReportLine::Done);
    Ok(())
}

/// File systems of the kernel. The image's own file system is memory: `/tmp` and all else stay what the image
/// says, because a checkout may lie there, and test programs look for `pserver` at the path of its build.
const MOUNTS: [(&str, &str); 3] = [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")];

fn mount() -> Result<()> {
    for (kind, place) in MOUNTS {
        busybox(&["mount", "-t", kind, kind, place])?;
    }
    fs::create_dir_all("/dev/shm").context("cannot make /dev/shm")?;
    busybox(&["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"])
}

/// Runs a program, and the one beside it, within its time.
fn attempt(program: &GuestProgram) -> Result<String> {
    let end = Instant::now() + Duration::from_secs(program.seconds);
    let mut beside = match program.beside {
        Some(line) => Some(start(line)?),
        None => None,
    };
    if let Some(port) = program.port {
        wait_for_listener(port, end)?;
    }
    let mut child = start(program.line)?;
    let mut status = wait(&mut child, end)?;
    if let Some(server) = &mut beside {
        let other = wait(server, end)?;
        if status == "0" && other != "0" {
            status = format!("beside it {other}");
        }
    }
    Ok(status)
}

/// Starts one line of the table. A shell divides it, because a line is what a person reads and repeats by hand.
fn start(line: &str) -> Result<Child> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", line]).stdin(Stdio::null()).env("PATH", "/bin").env("HOME", "/tmp").env("RUST_BACKTRACE", "1");
    command.env(SKIP_REPORT, SKIPS).env("PSERVER_REQUIRE", "rdma").env("PSERVER_RDMA_INTERFACE", "dummy0");
    command.spawn().with_context(|| format!("cannot start {line}"))
}

/// The exit status as text; a program that is out of time is ended.
fn wait(child: &mut Child, end: Instant) -> Result<String> {
    while Instant::now() < end {
        if let Some(status) = child.try_wait().context("cannot wait")? {
            return Ok(shown(status));
        }
        thread::sleep(LOOK_AGAIN);
    }
    child.kill().context("cannot end it")?;
    child.wait().context("cannot wait")?;
    Ok("out of time".to_owned())
}

fn shown(status: ExitStatus) -> String {
    status.code().map_or_else(|| status.to_string(), |code| code.to_string())
}

/// Waits until somebody listens on a TCP port: line by line, the second column of the kernel's table is the local
/// address and port in hexadecimal digits, and the fourth says `0A` for a listener.
fn wait_for_listener(port: u16, end: Instant) -> Result<()> {
    let local = format!(":{port:04X}");
    while Instant::now() < end {
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
        let mut rows = tables.iter().flat_map(|table| table.lines()).map(|row| row.split_whitespace());
        if rows.any(|mut row| row.nth(1).is_some_and(|at| at.ends_with(&local)) && row.nth(1) == Some("0A")) {
            return Ok(());
        }
        thread::sleep(LOOK_AGAIN);
    }
    bail!("nobody listens on port {port}")
}

fn busybox(arguments: &[&str]) -> Result<()> {
    succeed(Command::new("/bin/busybox").args(arguments)).map(|_| ()).with_context(|| arguments.join(" "))
}

fn shell(line: &str) -> Result<()> {
    let status = start(line)?.wait().with_context(|| line.to_owned())?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

/// Writes a line of the report at the beginning of a line, whatever a program left.
fn say(line: &ReportLine) {
    say!("\n{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_mounted_over_a_folder_that_a_checkout_may_lie_in() {
        for place in ["/", "/home", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/usr", "/var", "/work"] {
            let checkout = Path::new(place).join("pserver/target/debug/pserver");
            assert!(MOUNTS.iter().all(|(_, mounted)| !checkout.starts_with(mounted)), "{place} is hidden");
        }
    }
}

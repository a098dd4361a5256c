//! A machine: QEMU with its console on a pipe. It computes every instruction itself, so it needs nothing of the
//! processor and nobody's leave, and is some tens of times slower than what it runs on.
//!
//! Not here: what the console says ([`super::report`]).

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::soft_roce::plan::Scenario;
use crate::soft_roce::report::{Report, ReportLine};

const PROGRAM: &str = "qemu-system-x86_64";
const MEBIBYTES: &str = "3072";

/// One end of what joins two machines.
pub(super) struct Wire<'a> {
    /// A socket of this machine.
    pub(super) path: &'a Path,
    /// Whether this end makes it. The other one starts later.
    pub(super) listens: bool,
}

/// A machine that runs.
pub(super) struct Machine {
    child: Child,
    console: Receiver<String>,
    /// The console's lines until the machine was up.
    first_lines: Vec<String>,
    name: &'static str,
}

/// A machine that is not up after so long is switched off: on a busy host a kernel of two emulated processors has hung
/// before its first line. It takes 10 s on an idle host.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Times that a machine is switched on.
const BOOTS_MAX: u32 = 3;

impl Machine {
    /// Whether QEMU is here.
    pub(super) fn is_possible() -> bool {
        Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    }

    /// Switches it on, and waits until its kernel is up. Without a wire it has no network card.
    pub(super) fn start(scenario: &Scenario, kernel: &Path, image: &Path, wire: Option<&Wire<'_>>) -> Result<Self> {
        for _ in 0..BOOTS_MAX {
            let mut machine = Self::switch_on(scenario, kernel, image, wire)?;
            if machine.is_up() {
                return Ok(machine);
            }
            say!("{}: not up within {} s, switched off", machine.name, BOOT_LIMIT.as_secs());
            drop(machine);
            // QEMU would not listen where a socket is.
            if let Some(wire) = wire.filter(|wire| wire.listens) {
                let _ = fs::remove_file(wire.path);
            }
        }
        bail!("{}: the machine did not get up in {BOOTS_MAX} attempts", scenario.name)
    }

    /// Whether the guest's program speaks, or the machine has ended, in time.
    fn is_up(&mut self) -> bool {
        let end = Instant::now() + BOOT_LIMIT;
        loop {
            match self.console.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.first_lines.push(line);
                    if self.first_lines.last().is_some_and(|line| ReportLine::parse(line).is_some()) {
                        return true;
                    }
                }
                // Its report says what there was.
                Err(RecvTimeoutError::Disconnected) => return true,
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
    }

    fn switch_on(scenario: &Scenario, kernel: &Path, image: &Path, wire: Option<&Wire<'_>>) -> Result<Self> {
        let mut command = Command::new(PROGRAM);
        command.args(scenario.processors).args(["-m", MEBIBYTES]);
        command.args(["-no-reboot", "-nodefaults", "-display", "none", "-monitor", "none", "-serial", "stdio"]);
        // On a busy machine the timer's interrupts come late, and a kernel that counts them at its start would give up.
        command.args(["-append", "console=ttyS0 panic=-1 mitigations=off no_timer_check quiet rdinit=/init"]);
        command.arg("-kernel").arg(kernel).arg("-initrd").arg(image);
        if let Some(wire) = wire {
            let (server, last) = if wire.listens { ("on", 1) } else { ("off", 2) };
            let path = wire.path.display();
            command.arg("-netdev").arg(format!("stream,id=wire,server={server},addr.type=unix,addr.path={path}"));
            command.arg("-device").arg(format!("virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0{last}"));
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {PROGRAM}"))?;
        let output = child.stdout.take().expect("stdout was piped above");
        let (sender, console) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                // A host that no longer listens has decided already.
                let _ = sender.send(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
        });
        Ok(Self { child, console, first_lines: Vec::new(), name: scenario.name })
    }

    /// Reads the console, and shows it, until the machine is off or out of time.
    pub(super) fn watch(self, end: Instant) -> Result<Report> {
        let mut report = Report::default();
        let mut see = |line: &str| {
            say!("{} | {line}", self.name);
            report.take(line);
        };
        self.first_lines.iter().for_each(|line| see(line));
        loop {
            match self.console.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => see(&line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    say!("{}: out of time, switched off", self.name);
                    break;
                }
            }
        }
        report.processor = processor(self.child.id());
        Ok(report)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // One that was waited for is neither.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Wire<'_> {
    /// Waits until the end that listens is there.
    pub(super) fn wait(&self, end: Instant) -> Result<()> {
        while !self.path.exists() {
            ensure!(Instant::now() < end, "no machine listens at {}", self.path.display());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

/// The processor time of a process, also when it has ended and nobody has waited for it: the fourteenth and
/// fifteenth field of what the kernel says, in hundredths of a second. The second is a name, which may have spaces.
fn processor(process: u32) -> Duration {
    let said = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields = said.rsplit(')').next().unwrap_or_default().split_whitespace();
    let spent: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(spent * 10)
}

/// When a machine that starts now must have ended.
pub(super) fn deadline(limit: Duration) -> Instant {
    Instant::now() + limit
}

//! A process of somebody else's, spoken to in lines and for a bounded time.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::alternation::RoundBlock;
use crate::child::ProcessUsage;

/// Lines that wait to be read; one is the rule.
const LINES_MAX: usize = 64;
/// How long somebody may take to end, once nobody wants anything of it; less where its time is nearly over.
const FAREWELL: Duration = Duration::from_secs(10);

/// A process with all that it starts, which ends with this.
pub(super) struct Bounded {
    name: String,
    process: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    begun: Instant,
    limit: Duration,
    log: PathBuf,
}

/// A peer that runs rounds.
pub(crate) struct Partner {
    process: Bounded,
    hello: Hello,
    bytes: u64,
    trainers: u32,
}

/// A peer's first line.
#[derive(Deserialize)]
struct Hello {
    version: String,
}

/// A peer's report of its rounds.
#[derive(Deserialize)]
struct PartnerReport {
    bytes: u64,
    trainers: u32,
    seconds: Vec<f64>,
    wrong: u64,
    /// Of its servers meanwhile, if it has any and knows.
    server_cpu_seconds: Option<f64>,
}

impl Partner {
    /// Starts a peer for rounds of `bytes` bytes and waits until it is ready; it has `limit` for all that it does.
    pub(crate) fn start(command: &[String], bytes: u64, trainers: u32, log: &Path, limit: Duration) -> Result<Self> {
        let mut process = Bounded::start("it", command, log, limit)?;
        let line = process.line()?;
        let hello = serde_json::from_str(&line).with_context(|| format!("it said \"{line}\"; expected who it is"))?;
        Ok(Self { process, hello, bytes, trainers })
    }

    pub(crate) fn version(&self) -> &str {
        &self.hello.version
    }

    /// Runs rounds. In between it is stopped, so that threads of its own that never rest take nothing from others.
    pub(crate) fn block(&mut self, rounds: u32) -> Result<RoundBlock> {
        self.process.signal(Signal::SIGCONT);
        self.process.say(&format!("run {rounds}"))?;
        let line = self.process.line()?;
        self.process.signal(Signal::SIGSTOP);
        let ran: PartnerReport = serde_json::from_str(&line).with_context(|| format!("it said \"{line}\""))?;
        ensure!(
            (ran.bytes, ran.trainers) == (self.bytes, self.trainers),
            "it ran rounds of {} bytes and {} trainers; expected {} and {}",
            ran.bytes,
            ran.trainers,
            self.bytes,
            self.trainers
        );
        let count = ran.seconds.len();
        ensure!(u32::try_from(count) == Ok(rounds), "it ran {count} rounds; expected {rounds}");
        ensure!(ran.seconds.iter().all(|seconds| *seconds > 0.0), "it said that a round took no time");
        let used = ran.server_cpu_seconds;
        ensure!(used.is_none_or(|used| used >= 0.0), "it said that its servers used {used:?} processor seconds");
        let server = used.map(|cpu_seconds| ProcessUsage { cpu_seconds, ..ProcessUsage::default() });
        Ok(RoundBlock { seconds: ran.seconds, wrong: ran.wrong, server, ..RoundBlock::default() })
    }
}

impl Bounded {
    pub(super) fn start(name: &str, command: &[String], log: &Path, limit: Duration) -> Result<Self> {
        let errors = File::create(log).with_context(|| format!("{} cannot be written", log.display()))?;
        let (program, arguments) = command.split_first().context("a command has a program")?;
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{program} cannot be started"))?;
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("it is a pipe"));
        let (sender, lines) = sync_channel(LINES_MAX);
        // Only a thread can wait for a line and be waited for no longer than one likes.
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        let (name, log) = (name.to_owned(), log.to_owned());
        Ok(Self { name, process, input, lines, begun: Instant::now(), limit, log })
    }

    /// Waits for its orderly end; what it says until then is nobody's concern.
    pub(super) fn finish(mut self) -> Result<()> {
        drop(self.input.take());
        while self.next()?.is_some() {}
        let status = self.process.wait()?;
        ensure!(status.success(), "{} ended with {status}; {}", self.name, self.last_words());
        Ok(())
    }

    fn say(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().expect("it is open until the end");
        writeln!(input, "{line}").with_context(|| format!("{} does not listen; {}", self.name, self.last_words()))
    }

    fn line(&mut self) -> Result<String> {
        match self.next()? {
            Some(line) => Ok(line),
            None => bail!("{} ended; {}", self.name, self.last_words()),
        }
    }

    /// Its next line; none when there will be no more.
    fn next(&self) -> Result<Option<String>> {
        match self.lines.recv_timeout(self.limit.saturating_sub(self.begun.elapsed())) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                bail!("{} was not done within {} s; {}", self.name, self.limit.as_secs(), self.last_words())
            }
        }
    }

    /// To it and all that it started; nobody is left at its end, as a rule.
    fn signal(&self, signal: Signal) {
        if let Ok(id) = i32::try_from(self.process.id()) {
            let _ = killpg(Pid::from_raw(id), signal);
        }
    }

    fn last_words(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("nothing");
        format!("it last said \"{last}\" ({})", self.log.display())
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        drop(self.input.take());
        // Its output is closed when all have ended who could write there.
        self.signal(Signal::SIGCONT);
        let left = self.limit.saturating_sub(self.begun.elapsed());
        let (farewell, begun) = (FAREWELL.min(left), Instant::now());
        while self.lines.recv_timeout(farewell.saturating_sub(begun.elapsed())).is_ok() {}
        self.signal(Signal::SIGKILL);
        let _ = self.process.wait();
    }
}

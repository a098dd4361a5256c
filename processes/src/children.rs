//! Child processes: started, read, and reaped on every path.
//!
//! A child has a process group of its own, so that Ctrl-C at a terminal reaches the parent alone, which then stops the
//! children in order. A child's standard input is a pipe that closes with the parent ([`crate::parent_death`]).

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::ready;

/// Period at which the parent polls its children and its own signals.
const POLL_PERIOD: Duration = Duration::from_millis(20);
/// Time from SIGTERM to SIGKILL.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// Time to drain standard error of an ended child: a process that the child started may hold the pipe open.
const STDERR_DRAIN: Duration = Duration::from_secs(1);
/// Lines of a child's standard error that an error repeats.
const STDERR_LINES_MAX: usize = 12;
/// Lines queued for the parent; a child that writes more blocks.
const LINES_QUEUED_MAX: usize = 1024;

/// A child's index, in the order of starting.
pub type ChildId = usize;

/// An event of one child.
#[derive(Debug, PartialEq)]
pub enum ChildEvent {
    /// The child wrote a line to standard output.
    Line(ChildId, String),
    /// The child exited with status 0, and all its output was delivered.
    Exited(ChildId),
}

/// All children of this run.
pub struct Children {
    processes: Vec<ChildProcess>,
    output: Receiver<ChildOutput>,
    sender: SyncSender<ChildOutput>,
    interrupted: Arc<AtomicBool>,
}

struct ChildProcess {
    name: String,
    child: Child,
    stderr_lines: VecDeque<String>,
    /// Open pipes, of standard output and standard error.
    open: u8,
    ended: Option<(ExitStatus, Instant)>,
    /// Whether the end was returned by [`Children::next`].
    is_reported: bool,
}

enum ChildOutput {
    Stdout(ChildId, String),
    Stderr(ChildId, String),
    Closed(ChildId),
}

impl Children {
    /// No child yet. From here on SIGINT and SIGTERM are errors of [`next`](Self::next).
    ///
    /// # Errors
    /// The signals cannot be set up.
    pub fn new() -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("setting up signals")?;
        }
        let (sender, output) = sync_channel(LINES_QUEUED_MAX);
        Ok(Self { processes: Vec::new(), output, sender, interrupted })
    }

    /// Starts a child.
    ///
    /// # Errors
    /// It cannot be started; the error has its name.
    pub fn start(&mut self, name: String, command: &mut Command) -> Result<ChildId> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("{name} cannot be started"))?;
        let child = self.processes.len();
        let output = process.stdout.take().expect("it is a pipe");
        let errors = process.stderr.take().expect("it is a pipe");
        let (stderr_lines, open) = (VecDeque::new(), 2);
        self.processes.push(ChildProcess { name, child: process, stderr_lines, open, ended: None, is_reported: false });
        self.listen(output, child, ChildOutput::Stdout)?;
        self.listen(errors, child, ChildOutput::Stderr)?;
        Ok(child)
    }

    /// Writes a line to a child's standard input.
    ///
    /// # Errors
    /// The child does not read it.
    pub fn tell(&mut self, child: ChildId, line: &str) -> Result<()> {
        let process = &mut self.processes[child];
        let input = process.child.stdin.as_mut().expect("the pipe is open until `stop`");
        writeln!(input, "{line}").with_context(|| format!("{} does not read its standard input", process.name))
    }

    /// Waits until a child says that it is ready, at most so long. Returns its address.
    ///
    /// # Errors
    /// A child failed or ended, the parent was interrupted, or the time has passed.
    pub fn await_ready(&mut self, child: ChildId, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let event = self.next(Some(deadline));
            match event.with_context(|| format!("{} did not get ready", self.name(child)))? {
                ChildEvent::Line(from, line) if from == child => {
                    if let Some(address) = ready::address_in(&line) {
                        return Ok(address.to_owned());
                    }
                }
                ChildEvent::Line(..) => {}
                ChildEvent::Exited(other) => return Err(self.exited_early(other)),
            }
        }
    }

    /// The error of a child that has ended well before its work was done.
    #[must_use]
    pub fn exited_early(&self, child: ChildId) -> anyhow::Error {
        let process = &self.processes[child];
        anyhow!("{} exited before the end of its work: exit status: 0{}", process.name, process.stderr_tail())
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// A child failed, the parent was interrupted, or no event arrived until `deadline`.
    pub fn next(&mut self, deadline: Option<Instant>) -> Result<ChildEvent> {
        loop {
            if self.interrupted.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            match self.output.recv_timeout(POLL_PERIOD) {
                Ok(ChildOutput::Stdout(child, line)) => return Ok(ChildEvent::Line(child, line)),
                Ok(ChildOutput::Stderr(child, line)) => self.processes[child].keep_stderr(line),
                Ok(ChildOutput::Closed(child)) => self.processes[child].open -= 1,
                Err(_) if deadline.is_some_and(|deadline| deadline < Instant::now()) => {
                    bail!("the time limit has passed")
                }
                Err(_) => {}
            }
            for (child, process) in self.processes.iter_mut().enumerate() {
                if let Some(status) = process.end()? {
                    process.is_reported = true;
                    if status.success() {
                        return Ok(ChildEvent::Exited(child));
                    }
                    bail!("{} failed: {status}{}", process.name, process.stderr_tail());
                }
            }
        }
    }

    /// The name a child was started with.
    #[must_use]
    pub fn name(&self, child: ChildId) -> &str {
        &self.processes[child].name
    }

    /// Sends SIGTERM to every child, SIGKILL after five seconds, and reaps them all.
    pub fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let deadline = Instant::now() + STOP_GRACE;
        while self.processes.iter_mut().any(ChildProcess::runs) && Instant::now() < deadline {
            // A child that writes much would block on a full queue for ever.
            let _ = self.output.recv_timeout(POLL_PERIOD);
        }
        self.signal(Signal::SIGKILL);
        for process in &mut self.processes {
            // The process is dead or was just killed; an error here has no reader.
            let _ = process.child.wait();
        }
    }

    /// Signals the children that were not reaped: their process ids are not reused.
    fn signal(&mut self, signal: Signal) {
        for process in &mut self.processes {
            if process.runs() {
                let process = i32::try_from(process.child.id()).expect("process numbers are positive");
                let _ = kill(Pid::from_raw(process), signal);
            }
        }
    }

    fn listen<R>(&self, source: R, child: ChildId, wrap: fn(ChildId, String) -> ChildOutput) -> Result<()>
    where
        R: Read + Send + 'static,
    {
        let sender = self.sender.clone();
        let listen = move || {
            for line in BufReader::new(source).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if sender.send(wrap(child, line)).is_err() {
                    return;
                }
            }
            // The receiver is gone only when the parent stops.
            let _ = sender.send(ChildOutput::Closed(child));
        };
        let thread = thread::Builder::new().name(format!("listen-{child}"));
        thread.spawn(listen).context("cannot start a thread that reads a child's output")?;
        Ok(())
    }
}

impl ChildProcess {
    fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn keep_stderr(&mut self, line: String) {
        if self.stderr_lines.len() == STDERR_LINES_MAX {
            self.stderr_lines.pop_front();
        }
        self.stderr_lines.push_back(line);
    }

    /// The exit status, once, when all output was read.
    fn end(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let status = self.child.try_wait().with_context(|| format!("waiting for the end of {}", self.name))?;
            self.ended = status.map(|status| (status, Instant::now()));
        }
        let ended = self.ended.filter(|(_, since)| self.open == 0 || since.elapsed() > STDERR_DRAIN);
        Ok(ended.filter(|_| !self.is_reported).map(|(status, _)| status))
    }

    fn stderr_tail(&self) -> String {
        self.stderr_lines.iter().map(|line| format!("\n  {line}")).collect()
    }
}

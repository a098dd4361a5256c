//! The parent's children: started, listened to, and reaped on every path.
//!
//! A child stands in a process group of its own, so that Ctrl-C at a terminal reaches the parent alone, which then
//! stops the children in order. A child's standard input is a pipe that closes with the parent; see
//! [`super::lifeline`].

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use signal_hook::consts::{SIGINT, SIGTERM};

/// How often the parent looks at its children and at its own signals.
const LOOK: Duration = Duration::from_millis(20);
/// How long a child may take to stop when asked.
const STOP: Duration = Duration::from_secs(5);
/// How long the last words of an ended child may take: somebody it started may hold its pipe open.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Lines of a child's standard error that an error repeats.
const COMPLAINTS_MAX: usize = 12;
/// Lines that wait for the parent; children that say more wait.
const WAITING_MAX: usize = 1024;

/// A child's place in its family, in the order of starting.
pub(super) type Member = usize;

/// What a child did.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// It wrote a line to standard output.
    Line(Member, String),
    /// It ended well, and everything it wrote was delivered.
    Left(Member),
}

/// All children of this run.
pub(super) struct Family {
    relatives: Vec<Relative>,
    said: Receiver<Said>,
    sayer: SyncSender<Said>,
    interrupted: Arc<AtomicBool>,
}

struct Relative {
    name: String,
    process: Child,
    complaints: VecDeque<String>,
    /// Of standard output and standard error, how many are open.
    open: u8,
    ended: Option<(ExitStatus, Instant)>,
    told: bool,
}

enum Said {
    Output(Member, String),
    Complaint(Member, String),
    Closed(Member),
}

impl Family {
    /// A family without members. From here on an interrupt or a request to terminate is an error of
    /// [`next`](Self::next).
    pub(super) fn new() -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("no signals can be received")?;
        }
        let (sayer, said) = sync_channel(WAITING_MAX);
        Ok(Self { relatives: Vec::new(), said, sayer, interrupted })
    }

    /// Starts a child.
    pub(super) fn start(&mut self, name: String, command: &mut Command) -> Result<Member> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("{name} cannot be started"))?;
        let member = self.relatives.len();
        let output = process.stdout.take().expect("it is a pipe");
        let errors = process.stderr.take().expect("it is a pipe");
        let (complaints, open) = (VecDeque::new(), 2);
        self.relatives.push(Relative { name, process, complaints, open, ended: None, told: false });
        self.listen(output, member, Said::Output)?;
        self.listen(errors, member, Said::Complaint)?;
        Ok(member)
    }

    /// Writes a line to a child's standard input.
    pub(super) fn tell(&mut self, member: Member, line: &str) -> Result<()> {
        let relative = &mut self.relatives[member];
        let input = relative.process.stdin.as_mut().expect("it is a pipe until the family stops");
        writeln!(input, "{line}").with_context(|| format!("{} does not listen", relative.name))
    }

    /// Waits for what happens next.
    ///
    /// # Errors
    /// When a child failed, the parent was interrupted, or nothing happened until `deadline`.
    pub(super) fn next(&mut self, deadline: Option<Instant>) -> Result<Event> {
        loop {
            if self.interrupted.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            match self.said.recv_timeout(LOOK) {
                Ok(Said::Output(member, line)) => return Ok(Event::Line(member, line)),
                Ok(Said::Complaint(member, line)) => self.relatives[member].complain(line),
                Ok(Said::Closed(member)) => self.relatives[member].open -= 1,
                Err(_) if deadline.is_some_and(|deadline| deadline < Instant::now()) => bail!("the time is over"),
                Err(_) => {}
            }
            for (member, relative) in self.relatives.iter_mut().enumerate() {
                if let Some(status) = relative.end()? {
                    relative.told = true;
                    if status.success() {
                        return Ok(Event::Left(member));
                    }
                    bail!("{} failed: {status}{}", relative.name, relative.last_words());
                }
            }
        }
    }

    /// The name a child was started with.
    pub(super) fn name(&self, member: Member) -> &str {
        &self.relatives[member].name
    }

    /// The end of what a child wrote to standard error, on lines of their own.
    pub(super) fn last_words(&self, member: Member) -> String {
        self.relatives[member].last_words()
    }

    /// Asks every child to stop, insists after five seconds, and reaps them all.
    pub(super) fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let patience = Instant::now() + STOP;
        while self.relatives.iter_mut().any(Relative::runs) && Instant::now() < patience {
            // Listening keeps a child that says a lot from waiting for us for ever.
            let _ = self.said.recv_timeout(LOOK);
        }
        self.signal(Signal::SIGKILL);
        for relative in &mut self.relatives {
            // It is dead or was just killed; there is nobody to tell about a failure here.
            let _ = relative.process.wait();
        }
    }

    /// Only children that were not reaped get it, so their numbers are still theirs.
    fn signal(&mut self, signal: Signal) {
        for relative in &mut self.relatives {
            if relative.runs() {
                let process = i32::try_from(relative.process.id()).expect("process numbers are positive");
                let _ = kill(Pid::from_raw(process), signal);
            }
        }
    }

    fn listen<R>(&self, source: R, member: Member, wrap: fn(Member, String) -> Said) -> Result<()>
    where
        R: Read + Send + 'static,
    {
        let sayer = self.sayer.clone();
        let listen = move || {
            for line in BufReader::new(source).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if sayer.send(wrap(member, line)).is_err() {
                    return;
                }
            }
            // Without a parent that listens there is nothing left to do.
            let _ = sayer.send(Said::Closed(member));
        };
        let thread = thread::Builder::new().name(format!("listen-{member}"));
        thread.spawn(listen).context("no thread to listen to a child")?;
        Ok(())
    }
}

impl Relative {
    fn runs(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    fn complain(&mut self, line: String) {
        if self.complaints.len() == COMPLAINTS_MAX {
            self.complaints.pop_front();
        }
        self.complaints.push_back(line);
    }

    /// Its exit status, once, when everything it wrote was read.
    fn end(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let status = self.process.try_wait().with_context(|| format!("{} is lost", self.name))?;
            self.ended = status.map(|status| (status, Instant::now()));
        }
        let ended = self.ended.filter(|(_, since)| self.open == 0 || since.elapsed() > LAST_WORDS);
        Ok(ended.filter(|_| !self.told).map(|(status, _)| status))
    }

    fn last_words(&self) -> String {
        self.complaints.iter().map(|line| format!("\n  {line}")).collect()
    }
}

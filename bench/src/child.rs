//! Processes that take part in a measurement: this same program with hidden arguments.
//!
//! A child says where it is in its first line, then answers each line of standard input with one line of JSON. It
//! ends when standard input does, so none outlives its parent.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, kill};
use nix::sys::time::TimeValLike;
use nix::unistd::Pid;
use pserver_client::console;
use pserver_processes::ready;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::hosts::BenchHost;
use crate::job::BenchJob;

/// A request of the parent process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Run rounds and answer with [`Ran`].
    Run {
        /// How many.
        rounds: u32,
        /// Rounds that are begun in a second, whether or not those before are done; none begins a round when the one
        /// before is done.
        rate: Option<f64>,
        /// Add one to an element of every value before it is checked, so that a check can be seen to fail.
        spoil: bool,
    },
    /// Answer with [`ProcessUsage`].
    Usage,
    /// Answer with what connections said of themselves, [`crate::counters::Heard`].
    Heard,
}

/// The measurements of one trainer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Ran {
    /// Of each round, from its begin (with a rate: from when it should have begun) to its end.
    pub(crate) seconds: Vec<f64>,
    /// Elements that were not what they must be.
    pub(crate) wrong: u64,
    /// The trainer's counters of verbs during the rounds.
    pub(crate) verbs: Verbs,
}

impl Ran {
    /// The measurements of trainers that ran the same rounds; a round's time is that of the slowest trainer.
    pub(crate) fn together(all: &[Self]) -> Result<Self> {
        let mut ran = Self { seconds: vec![0.0; all.first().map_or(0, |one| one.seconds.len())], ..Self::default() };
        for one in all {
            ensure!(one.seconds.len() == ran.seconds.len(), "trainers ran different numbers of rounds");
            ran.seconds.iter_mut().zip(&one.seconds).for_each(|(most, seconds)| *most = most.max(*seconds));
            ran.wrong += one.wrong;
            ran.verbs.copies += one.verbs.copies;
            ran.verbs.registrations += one.verbs.registrations;
            ran.verbs.connections += one.verbs.connections;
        }
        Ok(ran)
    }
}

/// Counters of the verbs transport.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Verbs {
    /// Payload bytes that a processor copied.
    pub(crate) copies: u64,
    /// Pieces of memory that were registered.
    pub(crate) registrations: u64,
    /// Connections that were made, since the trainer began.
    pub(crate) connections: u64,
}

/// The resources that a process has used so far.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessUsage {
    pub(crate) cpu_seconds: f64,
    /// The most that was resident so far.
    pub(crate) peak_rss_bytes: u64,
    /// The resident memory at this moment.
    pub(crate) resident_bytes: u64,
}

/// The cores that a child may run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cores {
    /// All that this process may.
    All,
    /// The first half of them.
    First,
    /// The second half of them.
    Second,
}

/// This thread's cores, given back when it is dropped: a child or a thread inherits those of the thread that starts it.
pub(crate) struct Kept(Option<CpuSet>);

impl Cores {
    pub(crate) fn of_servers(job: &BenchJob) -> Self {
        if job.pin { Self::First } else { Self::All }
    }

    pub(crate) fn of_trainers(job: &BenchJob) -> Self {
        if job.pin { Self::Second } else { Self::All }
    }

    /// Keeps this thread, and those that it starts, on them until what is returned is dropped.
    pub(crate) fn keep(self) -> Result<Kept> {
        let before = sched_getaffinity(Pid::from_raw(0)).context("the system does not say which cores are ours")?;
        let mine: Vec<usize> = (0..CpuSet::count()).filter(|core| before.is_set(*core).unwrap_or(false)).collect();
        let (first, second) = mine.split_at(mine.len() / 2);
        let chosen = match self {
            Self::First => first,
            Self::Second => second,
            Self::All => return Ok(Kept(None)),
        };
        ensure!(!first.is_empty(), "--pin needs two cores; this process has one");
        let mut set = CpuSet::new();
        chosen.iter().try_for_each(|core| set.set(*core)).context("a core's number is too large")?;
        sched_setaffinity(Pid::from_raw(0), &set).context("the system does not let us choose cores")?;
        Ok(Kept(Some(before)))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // They were ours a moment ago.
            let _ = sched_setaffinity(Pid::from_raw(0), before);
        }
    }
}

/// A child, seen by its parent; dropping it ends it.
pub(crate) struct Member {
    name: String,
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Member {
    /// As [`Self::begin`], and hands back where it says it is.
    pub(crate) fn start(
        name: &str,
        program: Option<&str>,
        arguments: &[String],
        cores: Cores,
        host: Option<&BenchHost>,
    ) -> Result<(Self, String)> {
        let mut member = Self::begin(name, program, arguments, cores, host)?;
        let place = member.ready()?;
        Ok((member, place))
    }

    /// Starts this program, or another build of it, with `arguments`; on this machine, or on a host.
    pub(crate) fn begin(
        name: &str,
        program: Option<&str>,
        arguments: &[String],
        cores: Cores,
        host: Option<&BenchHost>,
    ) -> Result<Self> {
        let _kept = cores.keep()?;
        let this = || std::env::current_exe().context("this program does not know where it lies");
        let program = program.map_or_else(this, |program| Ok(program.into()))?;
        let mut process = host
            .map_or_else(|| Command::new(&program), |host| host.command(&program))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{name} cannot be started"))?;
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("it is a pipe"));
        Ok(Self { name: name.to_owned(), process, input, output })
    }

    /// Waits until it is ready.
    pub(crate) fn ready(&mut self) -> Result<String> {
        let line = self.line()?;
        match ready::address_in(&line) {
            Some(place) => Ok(place.to_owned()),
            None => bail!("{} said \"{line}\"; expected \"ready\"", self.name),
        }
    }

    pub(crate) fn ask(&mut self, ask: Ask) -> Result<()> {
        let line = serde_json::to_string(&ask)?;
        let input = self.input.as_mut().expect("it is open while the member lives");
        writeln!(input, "{line}").with_context(|| format!("{} does not listen", self.name))
    }

    pub(crate) fn answer<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("{} said \"{line}\"", self.name))
    }

    pub(crate) fn usage(&mut self) -> Result<ProcessUsage> {
        self.ask(Ask::Usage)?;
        self.answer()
    }

    /// Lets it rest, so that its spinning takes no core from who is measured, or wakes it.
    pub(crate) fn rest(&self, rests: bool) -> Result<()> {
        let signal = if rests { Signal::SIGSTOP } else { Signal::SIGCONT };
        let id = Pid::from_raw(i32::try_from(self.process.id()).context("process numbers are positive")?);
        kill(id, signal).with_context(|| format!("{} is gone", self.name))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).with_context(|| format!("listening to {}", self.name))?;
        if read == 0 {
            let status = self.process.wait().with_context(|| format!("{} is lost", self.name))?;
            bail!("{} ended with {status}; what it said is above", self.name);
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        drop(self.input.take());
        // It may rest, or never look at its input again; it holds nothing that is worth an orderly end.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The child's side: says where it is, then answers until standard input ends.
pub(crate) fn serve(place: &str, mut answer: impl FnMut(Ask) -> Result<serde_json::Value>) -> Result<()> {
    console::print(ready::line(place))?;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading standard input")?;
        let ask = serde_json::from_str(&line).with_context(|| format!("the parent said \"{line}\""))?;
        say(&answer(ask)?.to_string())?;
    }
    Ok(())
}

/// The resources that this process has used so far.
pub(crate) fn usage() -> Result<ProcessUsage> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).context("the system does not say what was used")?;
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    let kibibytes = u64::try_from(usage.max_rss()).context("memory is not negative")?;
    let resident_bytes = resident_bytes().context("/proc/self/status does not say what is resident")?;
    Ok(ProcessUsage { cpu_seconds: micros as f64 * 1e-6, peak_rss_bytes: kibibytes * 1024, resident_bytes })
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// A server's answers: it works on other threads, and only its usage is asked for.
pub(crate) fn serve_usage(place: &str) -> Result<()> {
    serve(place, |_| Ok(serde_json::to_value(usage()?)?))
}

fn say(line: &str) -> Result<()> {
    Ok(console::print(format_args!("{line}\n"))?)
}

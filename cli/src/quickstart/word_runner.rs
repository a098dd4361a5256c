//! `pserver quickstart words`: two servers and two trainers on this machine learn which words are alike, through a
//! program with two tables of rows.
//!
//! Not here: the program ([`super::skip_gram`]), the words ([`super::words`]), what a trainer does
//! ([`super::word_trainer`]).

use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};
use indicatif::DecimalBytes;
use pserver_client::console;
use pserver_transport::verbs::DeviceChoice;
use serde::Serialize;

use super::children::{ChildId, Children};
use super::plan::{Sharing, Way, name};
use super::runner::{CHILDREN_MAX, Servers, follow, of_trainer, start_servers, unconfigured};
use super::skip_gram::WIDTH;
use super::word_trainer::{BATCH, OPTIMIZER, WordReport};
use super::words::{EPOCH_PAIRS, VOCABULARY};
use crate::own_program;

/// Learns which words of the King James Bible are alike, with servers and trainers on this machine.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// How trainers share the tables: sync or async.
    #[arg(long, value_enum, default_value_t)]
    pub mode: Sharing,
    /// Trainer processes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=CHILDREN_MAX))]
    pub trainers: u32,
    /// Server processes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=CHILDREN_MAX))]
    pub servers: u16,
    /// Shards on each server: cores that hold parameters.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub shards: u16,
    /// Steps of each trainer, of 512 pairs of words; about one pass over the text when not given.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub steps: Option<u32>,
    /// Decides the initial values and the order of the verses.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print the result as one line of JSON, and no progress.
    #[arg(long)]
    pub json: bool,
}

/// Result of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct WordSummary {
    /// Steps of each trainer.
    steps: u32,
    /// Trainer 0's mean loss, in nats, from report to report.
    losses: Vec<f32>,
    /// Words with those nearest to them.
    neighbours: Vec<(String, Vec<String>)>,
    /// Bytes that all trainers sent and received while training.
    bytes: u64,
    /// Bytes of fetching both tables and sending dense gradients of both in every step.
    dense_bytes: u64,
    /// Seconds that the slowest trainer trained.
    seconds: f64,
}

/// The program `pserver quickstart words`.
///
/// # Errors
/// The failed child with its status and the end of its standard error, or the interrupt. All children are reaped.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.mode != Sharing::Delta, "found --mode delta, in which servers only add; expected sync or async");
    let program = own_program::path()?;
    let steps = args.steps.unwrap_or_else(|| EPOCH_PAIRS.div_ceil(u32::try_from(BATCH).unwrap_or(1) * args.trainers));
    let job = Servers {
        servers: args.servers,
        shards: args.shards,
        trainers: args.trainers,
        mode: args.mode,
        transport: Way::Tcp,
        rdma_device: &DeviceChoice::None,
        optimizer: OPTIMIZER,
        model_dir: None,
        checkpoint_dir: None,
    };
    let mut children = Children::new()?;
    let outcome = start_servers(&mut children, &job, &program).and_then(|coordinator| {
        let trainers = start_trainers(&mut children, args, steps, &coordinator, &program)?;
        listen(&mut children, args, &trainers)
    });
    children.stop();
    let summary = WordSummary { steps, dense_bytes: dense_bytes(steps, args.trainers), ..outcome? };
    let text = if args.json { serde_json::to_string(&summary)? + "\n" } else { summary.to_string() };
    Ok(console::print(text)?)
}

/// Both tables, to and from every trainer, in every step.
fn dense_bytes(steps: u32, trainers: u32) -> u64 {
    let table = VOCABULARY as u64 * WIDTH * 4;
    u64::from(steps) * u64::from(trainers) * 2 * 2 * table
}

impl fmt::Display for WordSummary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.losses.first().unwrap_or(&0.0), self.losses.last().unwrap_or(&0.0));
        writeln!(formatter, "loss     {first:.3} at first, {last:.3} in the end, after {} steps", self.steps)?;
        for (word, near) in &self.neighbours {
            writeln!(formatter, "{word:<8} {}", near.join(", "))?;
        }
        let (moved, dense) = (DecimalBytes(self.bytes), DecimalBytes(self.dense_bytes));
        let times = self.dense_bytes / self.bytes.max(1);
        writeln!(
            formatter,
            "moved    {moved} in {:.1} s; whole tables would be {dense}, {times} times as much",
            self.seconds
        )
    }
}

fn start_trainers(
    children: &mut Children,
    args: &Args,
    steps: u32,
    coordinator: &str,
    program: &Path,
) -> Result<Vec<ChildId>> {
    let start = |trainer: u32| {
        let mut command = unconfigured(program);
        command
            .args(["quickstart-word-trainer", "--coordinator", coordinator, "--mode", &name(args.mode)])
            .args(["--trainer", &trainer.to_string(), "--trainers", &args.trainers.to_string()])
            .args(["--servers", &args.servers.to_string(), "--steps", &steps.to_string()])
            .args(["--seed", &args.seed.to_string()]);
        children.start(format!("trainer {trainer}"), &mut command)
    };
    (0..args.trainers).map(start).collect()
}

fn listen(children: &mut Children, args: &Args, trainers: &[ChildId]) -> Result<WordSummary> {
    let mut summary = WordSummary::default();
    let mut moved = vec![0; trainers.len()];
    follow(children, trainers, |report| summary.take(report, &mut moved, args.json))?;
    ensure!(!summary.neighbours.is_empty(), "trainer 0 exited with status 0 and did not report what it learned");
    Ok(WordSummary { bytes: moved.iter().sum(), ..summary })
}

impl WordSummary {
    fn take(&mut self, report: WordReport, moved: &mut [u64], quiet: bool) -> Result<()> {
        match report {
            WordReport::Steps { trainer, steps, loss, bytes, seconds } => {
                *of_trainer(moved, trainer)? = bytes;
                self.seconds = self.seconds.max(seconds);
                if trainer == 0 {
                    self.losses.push(loss);
                    if !quiet {
                        console::remark(format_args!("step {steps}: loss {loss:.4}"));
                    }
                }
            }
            WordReport::Final { neighbours } => self.neighbours = neighbours,
        }
        Ok(())
    }
}

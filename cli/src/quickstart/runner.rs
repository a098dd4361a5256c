//! Parent process of the quickstart: starts the servers, then the trainers, shows progress, stops all.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use indicatif::DecimalBytes;
use pserver_client::console;
use pserver_core::metrics::WorkMeter;
use pserver_node::progress::{ProgressUnit, TerminalProgress};
use pserver_processes::{ChildEvent, ChildId, Children, unconfigured};
use pserver_transport::verbs::DeviceChoice;
use serde::Serialize;

use super::plan::{Optimizer, Plan, Sharing, Way, name, optimizer_text, rdma_device};
use super::rule::RuleArgs;
use super::trainer::{FINISH, Report};
use crate::local_servers::{CHILDREN_MAX, LocalServers};
use crate::own_program;

/// Trains a small network on handwritten digits, with servers and trainers on this machine.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// How trainers share the model.
    #[arg(long, value_enum, default_value_t)]
    pub mode: Sharing,
    /// The servers' update rule; in delta mode servers only add differences, and the optimizer is sgd.
    #[arg(long, value_enum, default_value_t)]
    pub optimizer: Optimizer,
    /// A rule in place of an optimizer.
    #[command(flatten)]
    pub rule: RuleArgs,
    /// Trainer processes.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=CHILDREN_MAX))]
    pub trainers: u32,
    /// Server processes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=CHILDREN_MAX))]
    pub servers: u16,
    /// Shards on each server: cores that hold parameters.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub shards: u16,
    /// How trainers reach servers.
    #[arg(long, value_enum, default_value_t)]
    pub transport: Way,
    /// The RDMA device of servers and trainers, as of `pserver serve --rdma-device`.
    #[arg(long, value_name = "DEVICE", value_parser = rdma_device, default_value_t)]
    pub rdma_device: DeviceChoice,
    /// Passes over the training digits; as many as the mode needs when not given.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub epochs: Option<u32>,
    /// Decides the initial values and the order of the digits.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The folder in which the model is saved; it is made when missing.
    #[arg(long, value_name = "FOLDER", default_value = "models")]
    pub model_dir: PathBuf,
    /// Print the result as one line of JSON, and no progress.
    #[arg(long)]
    pub json: bool,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    /// Share of held-out digits that are classified correctly, 0 to 1.
    pub(super) accuracy: f64,
    /// Path of the saved model.
    pub(super) model: String,
    /// Bytes that all trainers sent and received during training.
    pub(super) bytes: u64,
    /// Training time of the slowest trainer, in seconds.
    pub(super) seconds: f64,
    /// `bytes` by `seconds`.
    pub(super) bytes_per_second: f64,
}

/// The program `pserver quickstart`.
///
/// # Errors
/// The failed child with its status and the end of its standard error, or the interrupt. All children are reaped.
pub fn run(args: &Args) -> Result<()> {
    let program = own_program::path()?;
    let summary = run_job(args, &program)?;
    let text = if args.json { serde_json::to_string(&summary)? + "\n" } else { summary.to_string() };
    Ok(console::print(text)?)
}

impl fmt::Display for Summary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "accuracy {:.1} % on held-out digits", self.accuracy * 100.0)?;
        writeln!(formatter, "model    {}", self.model)?;
        let (moved, rate) = (DecimalBytes(self.bytes), self.bytes_per_second / 1e6);
        writeln!(formatter, "moved    {moved} in {:.1} s, {rate:.1} MB/s", self.seconds)
    }
}

/// Runs `program` as every child; a test passes another program.
pub(super) fn run_job(args: &Args, program: &Path) -> Result<Summary> {
    let plan = Plan::new(args.mode, args.optimizer)?;
    let epochs = args.epochs.unwrap_or(plan.epochs);
    let optimizer = args.rule.config(args.mode)?.unwrap_or_else(|| optimizer_text(args.optimizer, plan.rate));
    std::fs::create_dir_all(&args.model_dir)
        .with_context(|| format!("the model folder {} cannot be made", args.model_dir.display()))?;
    let mut children = Children::new()?;
    let job = LocalServers {
        servers: args.servers,
        shards: args.shards,
        trainers: args.trainers,
        mode: args.mode.mode(),
        transport: &name(args.transport),
        rdma_device: &args.rdma_device,
        optimizer: &optimizer,
        model_dir: Some(&args.model_dir),
        checkpoint_dir: None,
    };
    let outcome = job.start(&mut children, program).and_then(|coordinator| {
        let training = TrainerSettings { args, epochs, optimizer: &optimizer, coordinator: &coordinator };
        let trainers = start_trainers(&mut children, &training, program)?;
        listen(&mut children, args, epochs, &trainers)
    });
    children.stop();
    outcome
}

/// The settings of trainers.
struct TrainerSettings<'a> {
    args: &'a Args,
    epochs: u32,
    /// The optimizer of the program, as configuration.
    optimizer: &'a str,
    /// The address of server 0.
    coordinator: &'a str,
}

fn start_trainers(children: &mut Children, training: &TrainerSettings<'_>, program: &Path) -> Result<Vec<ChildId>> {
    let TrainerSettings { args, epochs, optimizer, coordinator } = *training;
    let start = |trainer: u32| {
        let mut command = unconfigured(program);
        command
            .args(["quickstart-trainer", "--coordinator", coordinator])
            .args(["--trainer", &trainer.to_string(), "--trainers", &args.trainers.to_string()])
            .args(["--mode", &name(args.mode), "--epochs", &epochs.to_string()])
            .args(["--seed", &args.seed.to_string(), "--servers", &args.servers.to_string()])
            .args(["--optimizer", optimizer, "--rdma-device", &args.rdma_device.to_string()]);
        children.start(format!("trainer {trainer}"), &mut command)
    };
    (0..args.trainers).map(start).collect()
}

fn listen(children: &mut Children, args: &Args, epochs: u32, trainers: &[ChildId]) -> Result<Summary> {
    let mut progress = Progress::new(u64::from(epochs) * u64::from(args.trainers), args.json, trainers.len());
    follow(children, trainers, |report| progress.take(report))?;
    progress.summary()
}

/// Reads the trainers' reports, lines of JSON, until all have exited. Once trainer 0 is the last one, it is told to
/// measure and save the model.
fn follow(children: &mut Children, trainers: &[ChildId], mut take: impl FnMut(Report) -> Result<()>) -> Result<()> {
    let mut running = trainers.len();
    if running == 1 {
        children.tell(trainers[0], FINISH)?;
    }
    loop {
        match children.next(None)? {
            ChildEvent::Line(child, line) if trainers.contains(&child) => {
                let report = serde_json::from_str(&line);
                let report = report
                    .with_context(|| format!("{} wrote \"{line}\"; expected a report in JSON", children.name(child)))?;
                take(report)?;
            }
            ChildEvent::Line(..) => {}
            ChildEvent::Exited(child) if child == trainers[0] && running == 1 => return Ok(()),
            ChildEvent::Exited(child) if child != trainers[0] && trainers.contains(&child) => {
                running -= 1;
                if running == 1 {
                    children.tell(trainers[0], FINISH)?;
                }
            }
            ChildEvent::Exited(child) => return Err(children.exited_early(child)),
        }
    }
}

/// The entry of a reporting trainer.
fn of_trainer<T>(all: &mut [T], trainer: u32) -> Result<&mut T> {
    let known = usize::try_from(trainer).ok().and_then(|index| all.get_mut(index));
    known.with_context(|| format!("a report of trainer {trainer}, which was not started"))
}

/// Display of progress and totals of the reports so far.
struct Progress {
    meter: Arc<WorkMeter>,
    /// None where no progress is wanted.
    display: Option<TerminalProgress>,
    /// Bytes and seconds of each trainer, from its last report.
    moved: Vec<(u64, f64)>,
    found: Option<(f64, String)>,
}

impl Progress {
    fn new(epochs: u64, quiet: bool, trainers: usize) -> Self {
        let meter = Arc::default();
        let start = || TerminalProgress::start("training", ProgressUnit::Things("epochs"), &meter);
        let display = (!quiet).then(start);
        meter.expect(epochs);
        Self { meter, display, moved: vec![(0, 0.0); trainers], found: None }
    }

    fn take(&mut self, report: Report) -> Result<()> {
        match report {
            Report::Epoch { trainer, loss, bytes, seconds, .. } => {
                *of_trainer(&mut self.moved, trainer)? = (bytes, seconds);
                self.display.iter().for_each(|display| display.note(format!("loss {loss:.4}")));
                self.meter.add(1);
            }
            Report::Final { accuracy, path, .. } => self.found = Some((accuracy, path)),
        }
        Ok(())
    }

    fn summary(self) -> Result<Summary> {
        drop(self.display);
        let Some((accuracy, model)) = self.found else {
            bail!("trainer 0 exited with status 0 and did not report the model's accuracy");
        };
        let bytes = self.moved.iter().map(|(bytes, _)| bytes).sum();
        let seconds = self.moved.iter().map(|&(_, seconds)| seconds).fold(0.0, f64::max);
        ensure!(seconds > 0.0, "no trainer reported an epoch");
        // Exact up to 2^53 bytes, which no quick start moves.
        #[expect(clippy::cast_precision_loss, reason = "a rate is an estimate")]
        let bytes_per_second = bytes as f64 / seconds;
        Ok(Summary { accuracy, model, bytes, seconds, bytes_per_second })
    }
}

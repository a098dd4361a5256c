//! `pserver train`: a program in a file is trained on data in files, with servers and trainers on this machine or as
//! one trainer of a running job.
//!
//! Not here: programs, data and steps of one trainer ([`pserver_trainer`]).
//!
//! Read in this order: `plan` (the program and its data), `worker` (one trainer), `job` (the parent of a job on this
//! machine), `record` (what a resumed training repeats).

mod job;
mod plan;
mod record;
mod worker;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use pserver_core::config::Mode;
use pserver_trainer::TrainingOptions;

use crate::local_servers::CHILDREN_MAX;
use crate::transpile::{Balance, Late, MeasuredRates};

/// Arguments of `pserver train`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The program: text, or protobuf in a file that ends in .pb. Without gradients and optimizer both are added.
    program: PathBuf,
    /// The loss, a scalar.
    #[arg(long, value_name = "NAME", default_value = "loss")]
    loss: String,
    /// The optimizer, such as 'const_lr { learning_rate: 0.1 }', or a file with one; none where the program has
    /// its own.
    #[arg(long, value_name = "TEXT|FILE")]
    optimizer: Option<String>,
    /// The data: .safetensors, .npz, or .csv with a header. A column has the name of a data variable; columns of CSV
    /// are called name.0, name.1 and so on where a row of the variable has several numbers.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Rows of a step of all trainers together; each computes an equal, contiguous part. The rows after the last whole
    /// batch of an epoch are not used.
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Passes over the data, those before --resume included.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Another order of rows in each epoch, which follows from this number; without it the order is the file's.
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,
    /// A scalar to be reported beside the loss, such as the output of an op accuracy; may be repeated.
    #[arg(long = "metric", value_name = "NAME")]
    metrics: Vec<String>,
    /// The values of ops given: .safetensors or .npz.
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
    /// Rows on which loss and metrics are computed in the end: a file, or the share of the data's last rows, such as
    /// 0.2, which are then not trained on.
    #[arg(long, value_name = "FILE|SHARE")]
    validation: Option<String>,
    /// The file for the trained parameters by name; it ends in .safetensors. Rank 0 writes it.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    #[command(flatten)]
    processes: ProcessArgs,
}

/// How trainers share the parameters.
#[derive(clap::Args, Clone, Debug)]
struct SharingArgs {
    /// The gradients that make an update: those of a step of all trainers (sync), or each by itself (async), with the
    /// fastest trainer a bounded number of steps in front of the slowest (bounded). A running job has a mode, which is
    /// taken when this is not given.
    #[arg(long, value_enum)]
    mode: Option<TrainingMode>,
    /// Most steps that a trainer may be in front of the slowest in mode bounded; 1 when not given.
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    staleness: Option<u32>,
    /// Trainers that a round of mode sync does not wait for: the slowest ones, whose gradients are dropped.
    #[arg(long, value_name = "TRAINERS", default_value_t = 0)]
    backup_trainers: u32,
    /// Gradients of backup trainers count in no round, or in the next one, which the executor of a
    /// server computes.
    #[arg(long, value_enum, default_value_t = Late::Drop)]
    late_gradients: Late,
    #[command(flatten)]
    balance: Balance,
    #[command(flatten)]
    measured: MeasuredRates,
}

impl SharingArgs {
    /// The options of a trainer that is started with the same ones, each with its value.
    fn words(&self) -> Vec<(&'static str, OsString)> {
        let Self { mode, staleness, backup_trainers, late_gradients, balance, measured } = self;
        let mode = mode.and_then(|mode| mode.to_possible_value()).map(|mode| ("mode", mode.get_name().into()));
        let staleness = staleness.map(|steps| ("staleness", steps.to_string().into()));
        let backup = (0 < *backup_trainers).then(|| ("backup-trainers", backup_trainers.to_string().into()));
        let is_next = (*late_gradients == Late::Next).then(|| ("late-gradients", "next".into()));
        let rates = measured.rates.as_ref().map(|file| ("rates", file.as_os_str().to_owned()));
        let all = mode.into_iter().chain(staleness).chain(backup).chain(is_next).chain(rates);
        all.chain(balance.words()).collect()
    }
}

/// A mode in which servers optimize.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TrainingMode {
    Sync,
    Async,
    Bounded,
}

impl Args {
    fn training_options(&self) -> Result<TrainingOptions> {
        let SharingArgs { mode, staleness, backup_trainers, late_gradients, ref balance, ref measured } =
            self.processes.sharing;
        let mode = mode.map(|mode| match mode {
            TrainingMode::Sync => Mode::Sync,
            TrainingMode::Async => Mode::Async,
            TrainingMode::Bounded => Mode::Staleness { bound: staleness.unwrap_or(1) },
        });
        let (placement, server_bytes_max) = (balance.placement()?, balance.memory.unwrap_or(0));
        let (batch, late, rates) = (self.batch as usize, late_gradients.into(), measured.read()?);
        Ok(TrainingOptions { batch, mode, placement, server_bytes_max, backup_trainers, late, rates })
    }

    /// Refuses options that contradict each other.
    fn check(&self) -> Result<()> {
        let has_rounds = matches!(self.processes.sharing.mode, None | Some(TrainingMode::Sync));
        let is_columns = self.processes.strategy == TrainingStrategy::Columns;
        ensure!(
            self.processes.sharing.staleness.is_none() || self.processes.sharing.mode == Some(TrainingMode::Bounded),
            "--staleness: found another --mode than bounded, in which alone trainers wait so; expected --mode bounded"
        );
        ensure!(
            !is_columns || self.processes.checkpoint.is_none(),
            "--checkpoint: found --strategy columns, whose trainers keep parameters, which no checkpoint has; expected \
             --strategy parameter-server"
        );
        ensure!(
            !is_columns || self.processes.sharing.backup_trainers == 0,
            "--backup-trainers: found --strategy columns, whose trainers step together; expected 0"
        );
        ensure!(
            self.processes.sharing.late_gradients == Late::Drop || 0 < self.processes.sharing.backup_trainers,
            "--late-gradients next: found no --backup-trainers, without which no gradient is late; expected 1 or more"
        );
        ensure!(
            !is_columns || self.processes.sharing.balance.placement.is_none(),
            "--placement: found --strategy columns, whose servers have no parameters; expected parameter-server"
        );
        ensure!(
            !is_columns || has_rounds,
            "--mode: found --strategy columns, whose trainers step together; expected sync"
        );
        ensure!(
            has_rounds || self.processes.checkpoint.is_none(),
            "--checkpoint: found another --mode than sync, whose servers do not count steps; expected sync, or servers \
             of a job with --checkpoint-dir, which keep its parameters"
        );
        Ok(())
    }
}

/// How a program is divided over the processes of a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TrainingStrategy {
    /// Each trainer computes on a part of the batch; servers have the parameters and run the optimizer.
    ParameterServer,
    /// Trainer 0 computes on the batch; the columns of the largest weight, and their updates, are on all trainers.
    Columns,
}

impl TrainingStrategy {
    const fn name(self) -> &'static str {
        match self {
            Self::ParameterServer => "parameter-server",
            Self::Columns => "columns",
        }
    }

    /// The trainers that compute on data, of all.
    const fn readers(self, trainers: u32) -> u32 {
        match self {
            Self::ParameterServer => trainers,
            Self::Columns => 1,
        }
    }
}

/// The processes of a training.
#[derive(clap::Args, Clone, Debug)]
struct ProcessArgs {
    /// Trainer processes on this machine.
    #[arg(long, default_value_t = 1, conflicts_with = "connect",
        value_parser = clap::value_parser!(u32).range(1..=CHILDREN_MAX))]
    trainers: u32,
    /// How the program is divided.
    #[arg(long, value_enum, default_value_t = TrainingStrategy::ParameterServer)]
    strategy: TrainingStrategy,
    #[command(flatten)]
    sharing: SharingArgs,
    /// Server processes on this machine.
    #[arg(long, default_value_t = 1, conflicts_with = "connect", value_parser = clap::value_parser!(u16).range(1..))]
    servers: u16,
    /// Be one trainer of the running job whose server 0 has this address; env for the address that variables or a file
    /// name, as `pserver env` prints it.
    #[arg(long, value_name = "ADDRESS")]
    connect: Option<String>,
    /// The rank of this trainer, from zero; the lowest free one when not given.
    // clap does not ask for a required option that another one excludes.
    #[arg(long, requires = "connect", conflicts_with_all = ["trainers", "servers", "checkpoint"])]
    rank: Option<u32>,
    /// The servers' checkpoint directory.
    #[arg(long, value_name = "FOLDER", conflicts_with = "connect")]
    checkpoint: Option<PathBuf>,
    /// Go on from the checkpoint, after its last step; program, loss, data, batch, shuffle and servers are those of
    /// before. Of the optimizer a constant learning rate may be another, and after a training that ended the trainers,
    /// too.
    #[arg(long, requires = "checkpoint", conflicts_with = "connect")]
    resume: bool,
    /// Be a child: print reports as JSON, and end with standard input.
    #[arg(long, hide = true, requires = "connect")]
    reports: bool,
}

/// Trains. Progress goes to standard error; the results, a name and a number in each line, to standard output.
///
/// # Errors
/// When a file cannot be read, is not a program or does not fit; when a process fails. All child processes are reaped.
pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    match &args.processes.connect {
        Some(address) => worker::run(args, address),
        None => job::run(args),
    }
}

//! The command line of `psbench`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use pserver_client::console;
use pserver_node::settings::ServeArgs;

use crate::commands::{ceiling, compare, doctor, kernels, latency, memory, peers, programs, pushpull, rows, scale};
use crate::job::BenchJob;
use crate::report::{Report, announce, append_lines_to};
use crate::{baseline, shipped, threads};

/// Measures the parameter server beside the simplest program for each path, and checks every value it gets.
#[derive(Parser)]
#[command(name = "psbench", version)]
struct BenchCli {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: BenchCommand,
}

/// Where results go besides the table.
#[derive(Args)]
struct OutputArgs {
    /// Write JSON to standard output instead of the table.
    #[arg(short = 'J', long, global = true)]
    json: bool,
    /// Write comma-separated values to standard output instead of the table.
    #[arg(long, global = true, conflicts_with = "json")]
    csv: bool,
    /// Show thousand million bits instead of bytes in tables; JSON and CSV keep bytes.
    #[arg(long, global = true, alias = "report_gbits")]
    report_gbits: bool,
    /// Write a page with curves, bars and the table to this file too; it needs nothing but a browser.
    #[arg(long, global = true, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write a page of Markdown with the environment and the table to this file too.
    #[arg(long, global = true, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Append each result to this file as a line of JSON, as soon as it is measured.
    #[arg(long, global = true, value_name = "FILE")]
    lines: Option<PathBuf>,
    /// Write the distributions of latencies to this file too, for HdrHistogram's plotters.
    #[arg(long, global = true, value_name = "FILE")]
    hgrm: Option<PathBuf>,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Push gradients and pull values, beside the baseline server.
    Pushpull(pushpull::Args),
    /// How long one round takes, and how long the slow ones do.
    Latency(latency::Args),
    /// The servers' arithmetic, beside memory's own speed.
    Kernels(kernels::Args),
    /// Rows pushed and pulled, beside the baseline server; with --local a table on one core, beside an array that is
    /// walked in the same order.
    Rows(rows::Args),
    /// Steps of programs, beside the transpiler's estimates.
    Programs(programs::Args),
    /// Resident memory of servers beside the bytes that they must keep.
    Memory(memory::Args),
    /// Time per byte as bytes, parameters and trainers grow.
    Scale(scale::Args),
    /// Throughput of this machine's sockets, shared memory and RDMA without the parameter server.
    Ceiling(ceiling::Args),
    /// Other parameter servers and collectives, alternating on the same work.
    Peers(peers::Args),
    /// Two reports, result by result.
    Compare(compare::Args),
    /// Settings of this machine that limit speed, and how to change them.
    Doctor(doctor::Args),
    /// A server of a measurement.
    #[command(hide = true)]
    ChildServer(Box<ServeArgs>),
    /// A trainer of a measurement.
    #[command(hide = true)]
    ChildTrainer {
        #[command(flatten)]
        trainer: TrainerProcess,
        #[arg(long)]
        coordinator: String,
    },
    /// Servers and trainers of a measurement, in one process.
    #[command(hide = true)]
    ChildWithin {
        #[arg(long)]
        job: String,
        #[arg(long)]
        barrier: Option<String>,
    },
    /// A baseline server of a measurement.
    #[command(hide = true)]
    BaselineServer {
        #[arg(long)]
        plan: String,
    },
    /// A baseline trainer of a measurement.
    #[command(hide = true)]
    BaselineTrainer {
        #[command(flatten)]
        trainer: TrainerProcess,
        #[arg(long)]
        plan: String,
    },
}

#[derive(Args)]
struct TrainerProcess {
    #[arg(long)]
    job: String,
    #[arg(long)]
    trainer: u32,
    #[arg(long)]
    barrier: Option<PathBuf>,
}

/// Runs the program: 0 when all was right, 1 when something failed or a value was wrong.
#[must_use]
pub fn main() -> ExitCode {
    match run(BenchCli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            announce(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: BenchCli) -> Result<bool> {
    if let Some(path) = &cli.output.lines {
        append_lines_to(path)?;
    }
    let mut report = match cli.command {
        BenchCommand::Pushpull(args) => pushpull::run(&args)?,
        BenchCommand::Latency(args) => latency::run(&args)?,
        BenchCommand::Kernels(args) => kernels::run(&args)?,
        BenchCommand::Rows(args) => rows::run(&args)?,
        BenchCommand::Programs(args) => programs::run(&args)?,
        BenchCommand::Memory(args) => memory::run(&args)?,
        BenchCommand::Scale(args) => scale::run(&args)?,
        BenchCommand::Ceiling(args) => ceiling::run(&args)?,
        BenchCommand::Peers(args) => peers::run(&args)?,
        BenchCommand::Compare(args) => compare::run(&args)?,
        BenchCommand::Doctor(args) => doctor::run(&args)?,
        BenchCommand::ChildServer(args) => return shipped::serve(&args).map(|()| true),
        BenchCommand::ChildTrainer { trainer, coordinator } => {
            let (job, barrier) = trainer.read()?;
            return shipped::train(&job, &coordinator, trainer.trainer, barrier).map(|()| true);
        }
        BenchCommand::ChildWithin { job, barrier } => {
            let job = serde_json::from_str(&job).context("--job")?;
            return threads::serve(&job, barrier.as_deref()).map(|()| true);
        }
        BenchCommand::BaselineServer { plan } => {
            return baseline::serve(&serde_json::from_str(&plan).context("--plan")?).map(|()| true);
        }
        BenchCommand::BaselineTrainer { trainer, plan } => {
            let (job, barrier) = trainer.read()?;
            let plan = serde_json::from_str(&plan).context("--plan")?;
            return baseline::train(&plan, &job, trainer.trainer, barrier).map(|()| true);
        }
    };
    report.complete();
    report.in_gigabits = cli.output.report_gbits;
    deliver(&report, &cli.output)?;
    Ok(report.wrong() == 0)
}

fn deliver(report: &Report, output: &OutputArgs) -> Result<()> {
    let write = |path: &PathBuf, text: &str| {
        std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
    };
    let text = match output {
        OutputArgs { json: true, .. } => report.json_text()? + "\n",
        OutputArgs { csv: true, .. } => report.csv()?,
        _ => report.table(),
    };
    // First what the terminal takes: a file that cannot be written does not take the measurements with it.
    let printed = console::print(text);
    if let Some(path) = &output.html {
        write(path, &report.html())?;
    }
    if let Some(path) = &output.markdown {
        write(path, &report.markdown())?;
    }
    if let Some(path) = &output.hgrm {
        write(path, &report.hgrm())?;
    }
    Ok(printed?)
}

impl TrainerProcess {
    fn read(&self) -> Result<(BenchJob, baseline::turns::Barrier)> {
        let job: BenchJob = serde_json::from_str(&self.job).context("--job")?;
        let path = self.barrier.as_ref().and_then(|path| path.to_str());
        let barrier = baseline::barrier(path, &job)?;
        Ok((job, barrier))
    }
}

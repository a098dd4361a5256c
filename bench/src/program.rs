//! The command line of `psbench`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use paddle_pserver::settings::ServeArgs;

use crate::commands::{ceiling, pushpull};
use crate::job::Job;
use crate::report::Report;
use crate::{ours, straight};

/// Measures the parameter server beside the straightest program for each path, and checks every value it gets.
#[derive(Parser)]
#[command(name = "psbench", version)]
struct Cli {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: Command,
}

/// Where results go besides the table.
#[derive(Args)]
struct OutputArgs {
    /// Write JSON to standard output instead of the table.
    #[arg(short = 'J', long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Push gradients and pull values, beside the straight server.
    Pushpull(pushpull::Args),
    /// What this machine can do, with nothing of the parameter server in the way.
    Ceiling(ceiling::Args),
    /// A server of a measurement.
    #[command(hide = true)]
    ChildServer(Box<ServeArgs>),
    /// A trainer of a measurement.
    #[command(hide = true)]
    ChildTrainer {
        #[command(flatten)]
        trainer: TrainerArgs,
        #[arg(long)]
        coordinator: String,
    },
    /// A straight server of a measurement.
    #[command(hide = true)]
    StraightServer {
        #[arg(long)]
        plan: String,
    },
    /// A straight trainer of a measurement.
    #[command(hide = true)]
    StraightTrainer {
        #[command(flatten)]
        trainer: TrainerArgs,
        #[arg(long)]
        plan: String,
    },
}

#[derive(Args)]
struct TrainerArgs {
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
    match run(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("psbench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<bool> {
    let report = match cli.command {
        Command::Pushpull(args) => pushpull::run(&args)?,
        Command::Ceiling(args) => ceiling::run(&args)?,
        Command::ChildServer(args) => return ours::serve(&args).map(|()| true),
        Command::ChildTrainer { trainer, coordinator } => {
            let (job, barrier) = trainer.read()?;
            return ours::train(&job, &coordinator, trainer.trainer, barrier).map(|()| true);
        }
        Command::StraightServer { plan } => {
            return straight::serve(&serde_json::from_str(&plan).context("--plan")?).map(|()| true);
        }
        Command::StraightTrainer { trainer, plan } => {
            let (job, barrier) = trainer.read()?;
            let plan = serde_json::from_str(&plan).context("--plan")?;
            return straight::train(&plan, &job, trainer.trainer, barrier).map(|()| true);
        }
    };
    deliver(&report, &cli.output)?;
    Ok(report.wrong() == 0)
}

fn deliver(report: &Report, output: &OutputArgs) -> Result<()> {
    if output.json {
        println!("{}", report.json_text()?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

impl TrainerArgs {
    fn read(&self) -> Result<(Job, straight::Barrier)> {
        let job: Job = serde_json::from_str(&self.job).context("--job")?;
        let path = self.barrier.as_ref().and_then(|path| path.to_str());
        let barrier = straight::barrier(path, &job)?;
        Ok((job, barrier))
    }
}

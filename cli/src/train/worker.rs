//! One trainer: it joins a running job, trains on its part of each batch, and reports. Rank 0 validates and saves.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pserver_client::environment::{self, Environment};
use pserver_client::{Client, ClientOptions, console, setting_file};
use pserver_node::progress::{self, ProgressUnit, TerminalProgress};
use pserver_trainer::{Batches, Training, write_model};
use serde::{Deserialize, Serialize};

use super::plan::TrainingPlan;
use super::{Args, TrainingStrategy};

/// The address of server 0 that the environment names.
const FOUND: &str = "env";

/// How often rank 0 reports its steps: often enough for a display of progress.
const STEPS_PERIOD: Duration = Duration::from_millis(500);

/// A line of JSON from a trainer to the parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum TrainingReport {
    /// After every epoch.
    Epoch {
        /// The trainer's rank.
        trainer: u32,
        /// Epochs done.
        epochs: u32,
        /// Means over the epoch's steps, of a resumed epoch over its last ones: loss, then metrics.
        means: Vec<f64>,
    },
    /// Rank 0, from time to time.
    Steps {
        /// Steps from the begin of this process to the end of the training.
        steps: u64,
        /// Steps that are done.
        done: u64,
    },
    /// Rank 0, in the end.
    Validation {
        /// Means over the rows for validation: loss, then metrics.
        validation: Vec<f64>,
    },
}

/// Results of a training.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TrainingResults {
    /// Of the last epoch; none where nothing was left to train.
    pub(super) means: Vec<f64>,
    pub(super) validation: Option<Vec<f64>>,
}

impl TrainingResults {
    /// A line for each number: metrics, then the loss; first those of training.
    pub(super) fn print(&self, watched: &[String], epochs: u32) -> Result<()> {
        if self.means.is_empty() {
            let text = "found as many epochs done; nothing is left to train";
            console::remark(format_args!("--epochs {epochs}: {text}"));
        }
        let lines = |prefix: &str, means: &[f64]| {
            let all = watched.iter().zip(means).rev();
            all.map(|(name, mean)| format!("{prefix}{name} {mean:.4}\n")).collect::<String>()
        };
        let validation = self.validation.as_deref().unwrap_or_default();
        Ok(console::print(lines("", &self.means) + &lines("validation ", validation))?)
    }
}

/// Prints the means of an epoch, above a display of progress.
pub(super) fn show_epoch(epoch: u32, epochs: u32, watched: &[String], means: &[f64]) {
    // A training goes on when nobody reads of it.
    let _ = writeln!(progress::stderr(), "epoch {epoch}/{epochs}: {}", shown(watched, means));
}

/// `loss 0.1234, accuracy 0.9712`.
fn shown(watched: &[String], means: &[f64]) -> String {
    let all = watched.iter().zip(means).map(|(name, mean)| format!("{name} {mean:.4}"));
    all.collect::<Vec<_>>().join(", ")
}

pub(super) fn run(args: &Args, address: &str) -> Result<()> {
    if args.processes.reports {
        // The parent writes nothing; its end is what matters.
        let _ = pserver_processes::parent_death::watch(|| std::process::exit(1)).context("watching standard input")?;
    }
    let plan = TrainingPlan::new(args)?;
    let client = Client::new(options(args, address)?)?;
    let (trainer, trainers) = (client.trainer()?, client.trainers()?);
    let batches = batches(args, &plan, trainer, trainers)?;
    let mut training = match args.processes.strategy {
        TrainingStrategy::ParameterServer => Training::join_with(&client, &plan.graph, args.training_options()?)?,
        TrainingStrategy::Columns => Training::join_columns(&client, &plan.graph, args.batch as usize)?,
    };
    if let Some(values) = args.values.as_ref().filter(|_| training.steps_before() > 0 && !args.processes.reports) {
        let (values, steps) = (values.display(), training.steps_before());
        console::remark(format_args!(
            "--values {values}: no effect in a job that has had {steps} steps and its values"
        ));
    }
    if trainer == 0 {
        training.hosted().for_each(|(server, name, reason)| {
            console::remark(format_args!("server {server} runs {name:?} on the executor: {reason}"));
        });
    }
    if !training.takes_data() {
        help(args, &mut training, &batches)?;
        return Ok(client.leave()?);
    }
    let mut results = TrainingResults::default();
    let steps = batches.steps() as u64;
    let meter = Arc::default();
    let progress = TerminalProgress::start("training", ProgressUnit::Things("steps"), &meter);
    meter.expect((u64::from(args.epochs) * steps).saturating_sub(training.steps_before()));
    let mut reported = Instant::now();
    let mut stepped = || {
        meter.add(1);
        if trainer != 0 || reported.elapsed() < STEPS_PERIOD {
            return Ok(());
        }
        reported = Instant::now();
        let (steps, done) = meter.counts();
        report(args, &TrainingReport::Steps { steps, done })
    };
    let first_epoch = u32::try_from(training.steps_before() / steps).unwrap_or(u32::MAX);
    // The first epoch may have begun.
    let mut begin = usize::try_from(training.steps_before() % steps)?;
    for epoch in first_epoch..args.epochs {
        let from = (epoch, std::mem::take(&mut begin));
        results.means = epoch_means(&mut training, &plan, &batches, from, &mut stepped)?;
        report(args, &TrainingReport::Epoch { trainer, epochs: epoch + 1, means: results.means.clone() })?;
        if !args.processes.reports {
            show_epoch(epoch + 1, args.epochs, &plan.watched, &results.means);
        }
    }
    drop(progress);
    if trainer == 0 {
        results.validation = finish(args, &plan, &training)?;
        if let Some(validation) = results.validation.clone() {
            report(args, &TrainingReport::Validation { validation })?;
        }
    }
    client.leave()?;
    if args.processes.reports {
        return Ok(());
    }
    results.print(&plan.watched, args.epochs)
}

/// A trainer without data: as many steps as the others, and what only it has of the parameters.
fn help(args: &Args, training: &mut Training<'_>, batches: &Batches) -> Result<()> {
    for epoch in 0..args.epochs {
        for step in 0..batches.steps() {
            training.step_fed().with_context(|| format!("epoch {}, step {}", epoch + 1, step + 1))?;
        }
    }
    Ok(training.publish()?)
}

/// The part of a trainer in each batch.
pub(super) fn batches(args: &Args, plan: &TrainingPlan, trainer: u32, trainers: u32) -> Result<Batches> {
    let trainers = args.processes.strategy.readers(trainers);
    let trainer = trainer.min(trainers - 1);
    let batches = Batches::new(plan.data.rows(), args.batch as usize, trainer, trainers, args.shuffle);
    batches.with_context(|| args.data.display().to_string())
}

fn options(args: &Args, address: &str) -> Result<ClientOptions> {
    let rank = args.processes.rank.map_or(String::new(), |rank| format!("trainer={rank}"));
    let coordinator = if address == FOUND { String::new() } else { format!("coordinator={address}") };
    let variable = |name: &str| std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
    let surroundings = Environment { variable: &variable, file: &setting_file::open };
    Ok(environment::find(&format!("{coordinator} {rank}"), &surroundings)?.options)
}

/// The means over the steps of an epoch from step `begin` on.
fn epoch_means(
    training: &mut Training<'_>,
    plan: &TrainingPlan,
    batches: &Batches,
    (epoch, begin): (u32, usize),
    stepped: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let mut sums = vec![0.0; plan.watched.len()];
    for (step, rows) in batches.epoch(epoch).iter().enumerate().skip(begin) {
        let place = || format!("epoch {}, step {}", epoch + 1, step + 1);
        training.step(&plan.data, rows).with_context(place)?;
        for (sum, name) in sums.iter_mut().zip(&plan.watched) {
            *sum += training.scalar(name).with_context(place)?;
        }
        ensure!(
            sums[0].is_finite(),
            "{}: the loss {:?} is {}; expected a finite number, which a smaller learning rate gives",
            place(),
            plan.watched[0],
            training.scalar(&plan.watched[0])?
        );
        stepped()?;
    }
    let steps = (batches.steps() - begin) as f64;
    Ok(sums.into_iter().map(|sum| sum / steps).collect())
}

/// Saves, then validates: what fails later does not take the model with it. Values are fetched only for these two.
fn finish(args: &Args, plan: &TrainingPlan, training: &Training<'_>) -> Result<Option<Vec<f64>>> {
    let Some(validation) = &plan.validation else {
        args.save.as_ref().map_or(Ok(()), |path| training.save(path)).context("--save")?;
        return Ok(None);
    };
    let values = training.parameters()?;
    if let Some(path) = &args.save {
        write_model(path, &values).context("--save")?;
    }
    let means = validation.forward.means(&values, &validation.data, args.batch as usize);
    means.map(Some).context("--validation: the model is saved if --save names a file, and its rows cannot be used")
}

fn report(args: &Args, report: &TrainingReport) -> Result<()> {
    if !args.processes.reports {
        return Ok(());
    }
    let line = serde_json::to_string(report)?;
    writeln!(io::stdout().lock(), "{line}").context("writing a report to the parent process")
}

//! Parent process of a training on this machine: starts servers and trainers, shows progress, stops all.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pserver_core::checkpoint::owner::server_directory;
use pserver_core::checkpoint::storage::{Directory, LockOutcome};
use pserver_core::metrics::WorkMeter;
use pserver_node::progress::{ProgressUnit, TerminalProgress};
use pserver_processes::{ChildEvent, ChildId, Children, unconfigured};
use pserver_program::transpile::{Cluster, Columns};
use pserver_transport::verbs::DeviceChoice;

use super::plan::TrainingPlan;
use super::worker::{TrainingReport, TrainingResults, batches, show_epoch};
use super::{Args, TrainingStrategy, record};
use crate::local_servers::{CHILDREN_MAX, LocalServers};
use crate::own_program;

/// How long a resumed training waits for servers of the earlier one to end: they write their last checkpoint.
const EARLIER_SERVERS_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_PERIOD: Duration = Duration::from_millis(20);

pub(super) fn run(args: &Args) -> Result<()> {
    let program = own_program::path()?;
    ensure!(
        i64::from(args.processes.servers) <= CHILDREN_MAX,
        "found --servers {}; expected at most {CHILDREN_MAX} on one machine",
        args.processes.servers
    );
    let plan = TrainingPlan::new(args)?;
    batches(args, &plan, 0, args.processes.trainers)?;
    check_checkpoint(args)?;
    if let Some(folder) = &args.processes.checkpoint {
        record::keep_or_check(args, &plan, folder)?;
    }
    if args.processes.strategy == TrainingStrategy::Columns {
        let cluster = Cluster { trainers: args.processes.trainers, servers: args.processes.servers.into() };
        Columns::shares(&plan.graph, cluster).with_context(|| args.program.display().to_string())?;
    }
    let job = LocalServers {
        servers: args.processes.servers,
        shards: 1,
        trainers: args.processes.trainers,
        mode: args.training_options()?.mode.unwrap_or_default(),
        transport: "tcp",
        rdma_device: &DeviceChoice::None,
        optimizer: "",
        model_dir: None,
        checkpoint_dir: args.processes.checkpoint.as_deref(),
    };
    let mut children = Children::new()?;
    let outcome = job.start(&mut children, &program).and_then(|coordinator| {
        let trainers = start_trainers(&mut children, args, &coordinator, &program)?;
        follow(&mut children, args, &plan, &trainers)
    });
    children.stop();
    outcome?.print(&plan.watched, args.epochs)
}

/// Refuses a checkpoint directory that is used without `--resume`, or is empty with it. Waits for the servers of a
/// training that was killed, which end after it.
fn check_checkpoint(args: &Args) -> Result<()> {
    let Some(folder) = &args.processes.checkpoint else { return Ok(()) };
    let shown = folder.display();
    let is_used = std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    if !args.processes.resume {
        ensure!(!is_used, "--checkpoint {shown}: found files; expected an empty folder, or --resume");
        return Ok(());
    }
    ensure!(is_used, "--resume: found no checkpoint in {shown}; expected the folder of an earlier --checkpoint");
    let directory = Directory::open(folder)?;
    let deadline = Instant::now() + EARLIER_SERVERS_TIMEOUT;
    for server in (0..args.processes.servers).map(server_directory) {
        let is_held = || matches!(directory.lock(&server, b""), Ok(LockOutcome::ByAnother { .. }));
        // A server that still has it at the deadline is named by the one that finds it so.
        while is_held() && Instant::now() < deadline {
            std::thread::sleep(POLL_PERIOD);
        }
    }
    Ok(())
}

fn start_trainers(children: &mut Children, args: &Args, coordinator: &str, program: &Path) -> Result<Vec<ChildId>> {
    let start = |trainer: u32| {
        let mut command = unconfigured(program);
        command.args(arguments(args)).args(["--reports", "--connect", coordinator]);
        command.args(["--rank", &trainer.to_string()]);
        children.start(format!("trainer {trainer}"), &mut command)
    };
    (0..args.processes.trainers).map(start).collect()
}

/// The arguments that a trainer shares with the parent.
fn arguments(args: &Args) -> Vec<OsString> {
    let program = std::path::absolute(&args.program).unwrap_or_else(|_| args.program.clone());
    let mut all: Vec<OsString> = vec!["train".into(), program.into()];
    let mut option = |name: &str, value: OsString| {
        // One word, so that a value may begin with a dash.
        let mut word = OsString::from(format!("--{name}="));
        word.push(value);
        all.push(word);
    };
    option("loss", args.loss.clone().into());
    option("data", args.data.clone().into());
    option("batch", args.batch.to_string().into());
    option("epochs", args.epochs.to_string().into());
    option("strategy", args.processes.strategy.name().into());
    args.metrics.iter().for_each(|metric| option("metric", metric.into()));
    let texts = [("optimizer", &args.optimizer), ("validation", &args.validation)];
    texts.iter().for_each(|(name, text)| {
        if let Some(text) = text {
            option(name, text.into());
        }
    });
    args.processes.sharing.words().into_iter().for_each(|(name, value)| option(name, value));
    if let Some(seed) = args.shuffle {
        option("shuffle", seed.to_string().into());
    }
    for (name, path) in [("save", &args.save), ("values", &args.values)] {
        if let Some(path) = path {
            option(name, path.into());
        }
    }
    all
}

/// Reads the trainers' reports until all have exited.
fn follow(children: &mut Children, args: &Args, plan: &TrainingPlan, trainers: &[ChildId]) -> Result<TrainingResults> {
    let mut results = TrainingResults::default();
    let readers = args.processes.strategy.readers(args.processes.trainers) as usize;
    let meter = Arc::new(WorkMeter::default());
    let _progress = TerminalProgress::start("training", ProgressUnit::Things("steps"), &meter);
    let mut epoch: Vec<(u32, Vec<Option<Vec<f64>>>)> = Vec::new();
    let mut running = trainers.len();
    while running > 0 {
        match children.next(None)? {
            ChildEvent::Line(child, line) if trainers.contains(&child) => {
                let read = serde_json::from_str(&line);
                match read.with_context(|| format!("{} wrote {line:?}; expected a report", children.name(child)))? {
                    TrainingReport::Epoch { trainer, epochs, means } => {
                        let place = epoch.iter().position(|(known, _)| *known == epochs).unwrap_or_else(|| {
                            epoch.push((epochs, vec![None; readers]));
                            epoch.len() - 1
                        });
                        let known = epoch[place].1.get_mut(trainer as usize);
                        *known.with_context(|| format!("a report of trainer {trainer}, which was not started"))? =
                            Some(means);
                        if epoch[place].1.iter().all(Option::is_some) {
                            let (_, all) = epoch.swap_remove(place);
                            results.means = mean(&all.into_iter().flatten().collect::<Vec<_>>());
                            show_epoch(epochs, args.epochs, &plan.watched, &results.means);
                        }
                    }
                    TrainingReport::Steps { steps, done } => {
                        let (known, counted) = meter.counts();
                        meter.expect(steps.saturating_sub(known));
                        meter.add(done.saturating_sub(counted));
                    }
                    TrainingReport::Validation { validation } => results.validation = Some(validation),
                }
            }
            ChildEvent::Line(..) => {}
            ChildEvent::Exited(child) if trainers.contains(&child) => running -= 1,
            ChildEvent::Exited(child) => return Err(children.exited_early(child)),
        }
    }
    // Where a training is resumed at the last step, the trainers that had sent their gradients report no epoch.
    if let Some((_, last)) = epoch.into_iter().find(|(epochs, _)| *epochs == args.epochs) {
        results.means = mean(&last.into_iter().flatten().collect::<Vec<_>>());
    }
    Ok(results)
}

/// The mean of each number over the trainers.
fn mean(all: &[Vec<f64>]) -> Vec<f64> {
    let count = all.len() as f64;
    (0..all[0].len()).map(|place| all.iter().map(|means| means[place]).sum::<f64>() / count).collect()
}

//! Every mode and optimizer reaches the goal with the rates of the plan.

use std::sync::mpsc::channel;
use std::thread;

use anyhow::Context;
use clap::ValueEnum;
use pserver_transport::verbs::DeviceChoice;

use super::super::digits::Digits;
use super::super::plan::{Optimizer, Plan, Sharing, name, optimizer_text};
use super::super::trainer::{DigitTrainerArgs, Report, train};
use pserver_client::{Client, ClientOptions};
use pserver_node::Server;
use pserver_node::settings::Settings;

const TRAINERS: u32 = 4;
/// The share of held-out digits to be named rightly.
const GOAL: f64 = 0.96;

/// A job's only server, in this process.
fn server(sharing: Sharing, optimizer: &str, folder: &str) -> Server {
    let (trainers, mode) = (TRAINERS.to_string(), name(sharing));
    let line = ["--bind", "tcp://127.0.0.1:0", "--merge", "mean", "--log-level", "warn", "--model-dir", folder];
    let more = ["--trainers", &trainers, "--mode", &mode, "--optimizer", optimizer];
    Server::start(Settings::of_words(line.iter().chain(&more)).unwrap()).unwrap()
}

/// Everything that four trainers reported.
fn reports(sharing: Sharing, optimizer: Optimizer, seed: u64) -> Vec<Report> {
    let plan = Plan::new(sharing, optimizer).unwrap();
    let (folder, optimizer) = (tempfile::tempdir().unwrap(), optimizer_text(optimizer, plan.rate));
    let server = server(sharing, &optimizer, folder.path().to_str().unwrap());
    let (digits, (leaves, left)) = (Digits::load().unwrap(), channel());
    let work = |trainer, left: Option<&dyn Fn()>| {
        let (mut reports, coordinator) = (Vec::new(), server.address().to_string());
        let (trainers, epochs, servers, optimizer) = (TRAINERS, plan.epochs, 1, optimizer.clone());
        let (mode, rdma_device) = (sharing, DeviceChoice::default());
        let args = DigitTrainerArgs {
            coordinator,
            trainer,
            trainers,
            mode,
            epochs,
            seed,
            servers,
            optimizer,
            rdma_device,
            token_file: None,
        };
        let options = ClientOptions { trainer: Some(trainer), ..ClientOptions::new(server.address().clone()) };
        let client = Client::new(options).unwrap();
        let mut report = |report: &Report| {
            reports.push(report.clone());
            Ok(())
        };
        let others_left = || {
            left.context("only the first waits")?();
            Ok(())
        };
        train(&args, &digits, &client, &mut report, others_left).unwrap();
        reports
    };
    let all = thread::scope(|scope| {
        let other = |trainer| {
            let (work, leaves) = (&work, leaves.clone());
            scope.spawn(move || {
                let reports = work(trainer, None);
                leaves.send(()).unwrap();
                reports
            })
        };
        let others: Vec<_> = (1..TRAINERS).map(other).collect();
        let wait = || (1..TRAINERS).for_each(|_| left.recv().unwrap());
        let first = work(0, Some(&wait));
        first.into_iter().chain(others.into_iter().flat_map(|other| other.join().unwrap())).collect()
    });
    server.stop().unwrap();
    all
}

fn accuracy(sharing: Sharing, optimizer: Optimizer, seed: u64) -> f64 {
    let found = reports(sharing, optimizer, seed).into_iter().find_map(|report| match report {
        Report::Final { accuracy, .. } => Some(accuracy),
        Report::Epoch { .. } => None,
    });
    found.expect("trainer 0 reports its accuracy")
}

/// With every optimizer it is at least `each`, and together they reach the goal.
fn check_every_optimizer(sharing: Sharing, each: f64) {
    let found: Vec<(Optimizer, f64)> =
        Optimizer::value_variants().iter().map(|&optimizer| (optimizer, accuracy(sharing, optimizer, 1))).collect();
    eprintln!("{sharing:?}: {found:?}");
    for (optimizer, accuracy) in &found {
        assert!(*accuracy >= each, "{sharing:?} with {optimizer:?}: {accuracy}");
    }
    let mean = mean(found.into_iter().map(|(_, accuracy)| accuracy));
    assert!(mean >= GOAL, "{sharing:?}: {mean}");
}

fn mean(all: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = u32::try_from(all.len()).unwrap();
    all.sum::<f64>() / f64::from(count)
}

#[test]
fn sync_reaches_the_goal_with_every_optimizer() {
    check_every_optimizer(Sharing::Sync, GOAL);
}

/// Here the order in which trainers push is random: one run may miss the goal by a few of the 360 digits.
#[test]
fn async_reaches_the_goal_with_every_optimizer() {
    check_every_optimizer(Sharing::Async, GOAL - 0.01);
}

#[test]
fn delta_and_async_come_within_a_point_of_sync() {
    let of = |sharing| mean([1, 2, 3].map(|seed| accuracy(sharing, Optimizer::Sgd, seed)).into_iter());
    let sync = of(Sharing::Sync);
    for sharing in [Sharing::Async, Sharing::Delta] {
        let found = of(sharing);
        eprintln!("{sharing:?} {found}, sync {sync}");
        assert!(found >= GOAL && found >= sync - 0.01, "{sharing:?} {found}, sync {sync}");
    }
}

#[test]
fn two_runs_with_one_seed_report_the_same_losses() {
    let losses = |seed| -> Vec<f32> {
        let reports = reports(Sharing::Sync, Optimizer::Momentum, seed);
        reports.iter().filter_map(|r| if let Report::Epoch { loss, .. } = r { Some(*loss) } else { None }).collect()
    };
    assert_eq!(losses(5), losses(5));
    assert_ne!(losses(5), losses(6));
}

#[test]
fn an_optimizer_that_the_servers_would_not_run_is_refused() {
    let error = Plan::new(Sharing::Delta, Optimizer::Adam).unwrap_err().to_string();
    let expected = "optimizer adam: in delta mode the servers only add; expected --optimizer sgd or another --mode";
    assert_eq!(error, expected);
}

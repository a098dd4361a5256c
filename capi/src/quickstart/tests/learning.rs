//! Every mode and optimizer reaches the goal with the rates of the plan.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;

use anyhow::Result;
use clap::ValueEnum;
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{self, Gradient, Rule, Step};

use super::super::digits::Digits;
use super::super::plan::{Optimizer, Plan, Sharing, optimizer_text};
use super::super::trainer::{ParameterClient, Report, TrainerArgs, train};

const TRAINERS: u32 = 4;

#[derive(Default)]
struct Tensor {
    name: String,
    values: Vec<f32>,
    states: Vec<Vec<f32>>,
    /// This round's gradients, in trainer order.
    pushed: Vec<Option<Vec<f32>>>,
}

struct Held {
    tensors: Vec<Tensor>,
    initialised: bool,
    updates: u64,
    /// Whose push is next: the order is fixed, so that a run can be repeated.
    turn: u32,
    left: u32,
}

/// All servers of a job. Trainers are threads that take turns.
struct Cluster {
    rule: Rule,
    sharing: Sharing,
    held: Mutex<Held>,
    changed: Condvar,
}

struct FakeClient<'a> {
    cluster: &'a Cluster,
    trainer: u32,
    pushes: u64,
    pushed: bool,
    bytes: u64,
}

impl Cluster {
    fn new(sharing: Sharing, optimizer: Optimizer, rate: f32) -> Self {
        let settings = OptimizerSettings::from_text(&optimizer_text(optimizer, rate)).unwrap();
        let held = Held { tensors: Vec::new(), initialised: false, updates: 0, turn: 0, left: 0 };
        Self { rule: settings.rule.unwrap(), sharing, held: Mutex::new(held), changed: Condvar::new() }
    }

    fn wait(&self, until: impl Fn(&Held) -> bool) -> MutexGuard<'_, Held> {
        self.changed.wait_while(self.held.lock().unwrap(), |held| !until(held)).unwrap()
    }

    fn apply(&self, tensor: &mut Tensor, version: u64) {
        let gradients: Vec<Vec<f32>> = tensor.pushed.iter_mut().filter_map(Option::take).collect();
        if self.sharing == Sharing::Delta {
            for (value, delta) in tensor.values.iter_mut().zip(&gradients[0]) {
                *value += delta * 0.25;
            }
            return;
        }
        let scale = if self.sharing == Sharing::Sync { 0.25 } else { 1.0 };
        let step = Step { version: Version(version), rate: None, norm: None, scale };
        let gradients: Vec<Gradient<'_>> = gradients
            .iter()
            .map(|values| Gradient { bytes: bytemuck::cast_slice(values), element_type: ElementType::Float32 })
            .collect();
        let mut states: Vec<&mut [u8]> = tensor.states.iter_mut().map(|s| bytemuck::cast_slice_mut(s)).collect();
        let coefficients = self.rule.coefficients(&step);
        let values = bytemuck::cast_slice_mut(&mut tensor.values);
        optim::update(&self.rule, &coefficients, ElementType::Float32, values, &mut states, &gradients);
    }
}

impl ParameterClient for FakeClient<'_> {
    fn begin_init(&mut self) -> Result<bool> {
        Ok(self.trainer == 0 || !self.cluster.wait(|held| held.initialised).initialised)
    }

    fn init(&mut self, name: &str, shape: &[u64], values: &[f32]) -> Result<()> {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64);
        let states = vec![vec![0.0; values.len()]; self.cluster.rule.states().len()];
        let pushed = vec![None; TRAINERS as usize];
        let tensor = Tensor { name: name.to_owned(), values: values.to_vec(), states, pushed };
        self.cluster.held.lock().unwrap().tensors.push(tensor);
        Ok(())
    }

    fn finish_init(&mut self) -> Result<()> {
        self.cluster.held.lock().unwrap().initialised = true;
        self.cluster.changed.notify_all();
        Ok(())
    }

    fn push(&mut self, gradients: &[(&str, &[f32])]) -> Result<()> {
        let mut held = self.cluster.wait(|held| held.turn == self.trainer);
        let closes = self.cluster.sharing != Sharing::Sync || self.trainer == TRAINERS - 1;
        held.updates += u64::from(closes);
        let version = held.updates;
        for (name, gradient) in gradients {
            let tensor = held.tensors.iter_mut().find(|tensor| tensor.name == *name).unwrap();
            tensor.pushed[self.trainer as usize] = Some(gradient.to_vec());
            self.bytes += gradient.len() as u64 * 4;
            if closes {
                self.cluster.apply(tensor, version);
            }
        }
        self.pushed = true;
        self.pushes += 1;
        if self.cluster.sharing == Sharing::Sync {
            held.turn = (held.turn + 1) % TRAINERS;
            self.cluster.changed.notify_all();
        }
        Ok(())
    }

    /// In sync mode it waits for the round; in the others the turn passes with it, so that every trainer computes
    /// on values that are three pushes old.
    fn pull(&mut self, into: &mut [(&str, &mut [f32])]) -> Result<()> {
        let sync = self.cluster.sharing == Sharing::Sync;
        let mut held = self.cluster.wait(|held| !sync || self.pushes <= held.updates);
        for ((name, values), tensor) in into.iter_mut().zip(&held.tensors) {
            assert_eq!(*name, tensor.name);
            values.copy_from_slice(&tensor.values);
            self.bytes += values.len() as u64 * 4;
        }
        if self.pushed && !sync {
            held.turn = (held.turn + 1) % TRAINERS;
            self.cluster.changed.notify_all();
        }
        self.pushed = false;
        Ok(())
    }

    fn leave(&mut self) -> Result<()> {
        self.cluster.held.lock().unwrap().left += 1;
        self.cluster.changed.notify_all();
        Ok(())
    }

    fn bytes_moved(&self) -> u64 {
        self.bytes
    }

    fn trainer(&self) -> u32 {
        self.trainer
    }

    fn save(&mut self, path: &str) -> Result<String> {
        assert_eq!(self.cluster.held.lock().unwrap().left, TRAINERS - 1, "the model is saved when nobody pushes");
        Ok(format!("models/{path}.safetensors"))
    }
}

/// Everything that four trainers reported.
fn reports(sharing: Sharing, optimizer: Optimizer, seed: u64) -> Vec<Report> {
    let plan = Plan::new(sharing, optimizer).unwrap();
    let (cluster, digits) = (Cluster::new(sharing, optimizer, plan.rate), Digits::load().unwrap());
    let (cluster, digits) = (&cluster, &digits);
    let work = |trainer| {
        let (mut reports, coordinator) = (Vec::new(), "nowhere".to_owned());
        let (trainers, epochs) = (TRAINERS, plan.epochs);
        let args = TrainerArgs { coordinator, trainer, trainers, mode: sharing, epochs, seed };
        let mut client = FakeClient { cluster, trainer, pushes: 0, pushed: false, bytes: 0 };
        let mut report = |report: &Report| {
            reports.push(report.clone());
            Ok(())
        };
        let others_left = || {
            drop(cluster.wait(|held| held.left == TRAINERS - 1));
            Ok(())
        };
        train(&args, digits, &mut client, &mut report, others_left).unwrap();
        reports
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..TRAINERS).map(|trainer| scope.spawn(move || work(trainer))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

fn accuracy(sharing: Sharing, optimizer: Optimizer, seed: u64) -> f64 {
    let found = reports(sharing, optimizer, seed).into_iter().find_map(|report| match report {
        Report::Final { accuracy, .. } => Some(accuracy),
        Report::Epoch { .. } => None,
    });
    found.expect("trainer 0 reports its accuracy")
}

fn check_every_optimizer(sharing: Sharing) {
    let found: Vec<(Optimizer, f64)> =
        Optimizer::value_variants().iter().map(|&optimizer| (optimizer, accuracy(sharing, optimizer, 1))).collect();
    eprintln!("{sharing:?}: {found:?}");
    for (optimizer, accuracy) in found {
        assert!(accuracy >= 0.96, "{sharing:?} with {optimizer:?}: {accuracy}");
    }
}

#[test]
fn sync_reaches_the_goal_with_every_optimizer() {
    check_every_optimizer(Sharing::Sync);
}

#[test]
fn async_reaches_the_goal_with_every_optimizer() {
    check_every_optimizer(Sharing::Async);
}

#[test]
fn delta_and_async_come_within_a_point_of_sync() {
    let sync = accuracy(Sharing::Sync, Optimizer::Sgd, 1);
    for sharing in [Sharing::Async, Sharing::Delta] {
        let found = accuracy(sharing, Optimizer::Sgd, 1);
        assert!(found >= 0.96 && found >= sync - 0.01, "{sharing:?} {found}, sync {sync}");
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

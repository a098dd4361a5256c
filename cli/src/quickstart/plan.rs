//! How long each way of training takes, and how large its steps are. The numbers were chosen so that four trainers
//! reach the goal of 96 % on held-out digits; the tests of [`super::trainer`] hold them to it.

use anyhow::{Result, ensure};
use clap::ValueEnum;
use pserver_core::config::Mode;
use pserver_transport::verbs::{DEVICE_EXPECTED, DeviceChoice};

/// Digits in one step of one trainer.
pub(super) const BATCH: usize = 32;
/// Steps a trainer takes on its own before it pushes a difference.
pub(super) const LOCAL_STEPS: u32 = 5;

/// How trainers share the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Sharing {
    /// One update a round, from the mean of every trainer's gradient.
    #[default]
    Sync,
    /// One update a gradient, as it arrives.
    Async,
    /// Trainers step on their own and push differences, which the server adds.
    Delta,
}

impl Sharing {
    /// The mode of the job.
    pub(super) const fn mode(self) -> Mode {
        match self {
            Self::Sync => Mode::Sync,
            Self::Async => Mode::Async,
            Self::Delta => Mode::Delta,
        }
    }
}

/// How trainers reach servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// Sockets, which are everywhere.
    #[default]
    Tcp,
    /// Memory that the processes share.
    Shm,
    /// An RDMA device of this machine.
    Verbs,
}

/// The optimizer that the servers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Optimizer {
    /// Plain gradient descent.
    #[default]
    Sgd,
    /// Gradient descent with momentum 0.9.
    Momentum,
    /// Gradient descent with Nesterov's momentum 0.9.
    Nesterov,
    /// Adagrad.
    Adagrad,
    /// Adadelta.
    Adadelta,
    /// RMSProp.
    Rmsprop,
    /// Adam.
    Adam,
    /// Adam with decoupled weight decay.
    Adamw,
    /// Follow the regularized leader.
    Ftrl,
}

/// A run's length and step size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Plan {
    /// Passes over the training digits.
    pub(super) epochs: u32,
    /// The learning rate, on the server or, with differences, on the trainer.
    pub(super) rate: f32,
}

impl Plan {
    /// The plan for one way of training.
    ///
    /// # Errors
    /// When the servers would not run the optimizer: they only add differences.
    pub(super) fn new(sharing: Sharing, optimizer: Optimizer) -> Result<Self> {
        ensure!(
            sharing != Sharing::Delta || optimizer == Optimizer::Sgd,
            "optimizer {}: in delta mode the servers only add; expected --optimizer sgd or another --mode",
            name(optimizer)
        );
        // Gradients that come late ask for shorter steps, and a momentum of 0.9 makes each ten times as long in the
        // end.
        let late = sharing == Sharing::Async;
        let rate = match optimizer {
            Optimizer::Sgd => match sharing {
                Sharing::Sync => 0.4,
                Sharing::Async => 0.15,
                Sharing::Delta => 0.3,
            },
            Optimizer::Momentum | Optimizer::Nesterov => {
                if late {
                    0.01
                } else {
                    0.03
                }
            }
            Optimizer::Adagrad | Optimizer::Ftrl => 0.03,
            Optimizer::Adadelta => {
                if late {
                    0.3
                } else {
                    1.0
                }
            }
            Optimizer::Rmsprop | Optimizer::Adam | Optimizer::Adamw => {
                if late {
                    0.001
                } else {
                    0.003
                }
            }
        };
        // The mean of differences moves the model less than each trainer moved its own.
        let epochs = if sharing == Sharing::Delta { 80 } else { 40 };
        Ok(Self { epochs, rate })
    }
}

/// The servers' configuration in protobuf's text form.
pub(crate) fn optimizer_text(optimizer: Optimizer, rate: f32) -> String {
    let rule = match optimizer {
        Optimizer::Sgd => "optimizer: SGD sgd { }",
        Optimizer::Momentum => "optimizer: SGD sgd { momentum: 0.9 }",
        Optimizer::Nesterov => "optimizer: SGD sgd { momentum: 0.9 nesterov: true }",
        Optimizer::Adagrad => "optimizer: Adagrad adagrad { epsilon: 1e-6 }",
        Optimizer::Adadelta => "optimizer: Adadelta adadelta { rho: 0.9 epsilon: 1e-4 }",
        Optimizer::Rmsprop => "algorithm: \"rmsprop\" rmsprop { rho: 0.9 epsilon: 1e-6 }",
        Optimizer::Adam => "optimizer: Adam adam { beta_1: 0.9 beta_2: 0.999 epsilon: 1e-8 }",
        Optimizer::Adamw => "algorithm: \"adamw\" adamw { beta_1: 0.9 beta_2: 0.999 epsilon: 1e-8 } l2: 0.01",
        // A beta above zero would pull the initial weights to zero, where the network learns nothing.
        Optimizer::Ftrl => "algorithm: \"ftrl\" ftrl { learning_rate_power: -0.5 beta: 0 }",
    };
    format!("{rule} lr_policy: Const const_lr {{ learning_rate: {rate} }}")
}

/// The word that the command line has for a value.
pub(super) fn name(value: impl ValueEnum) -> String {
    let word = value.to_possible_value().expect("no value is skipped");
    word.get_name().to_owned()
}

/// Parses `--rdma-device`.
pub(super) fn rdma_device(text: &str) -> Result<DeviceChoice, String> {
    text.parse().map_err(|()| format!("expected {DEVICE_EXPECTED}"))
}

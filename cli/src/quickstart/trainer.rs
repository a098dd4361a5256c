//! One trainer of the quickstart: what a user's training loop looks like against a parameter server.
//!
//! In rounds and without, it runs its part of the program of [`super::network`]; in delta mode it runs the whole
//! program and pushes how far that came. Not here: how a part runs ([`pserver_trainer`]); the parent that starts
//! trainers, [`super::run`].

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pserver_core::config::{Merge, Mode};
use pserver_core::dtype::ElementType;
use pserver_core::wire::Address;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, Transpiler};
use pserver_program::{Elements, Graph, PlainRun, Purpose, Tensor, VariableValue};
use pserver_transport::network::JobToken;
use pserver_transport::verbs::DeviceChoice;
use serde::{Deserialize, Serialize};

use super::digits::{Digit, Digits};
use super::network;
use super::plan::{BATCH, LOCAL_STEPS, Sharing, rdma_device};
use super::shuffler::Shuffler;
use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_trainer::{Trainer, initialise, initialise_for_deltas};

/// The parent's line to the first trainer when all others have exited.
pub(super) const FINISH: &str = "finish";
/// The saved model's path within the servers' model folder.
const MODEL_PATH: &str = "digits.safetensors";

/// The options of `pserver quickstart-trainer`, which only `pserver quickstart` starts.
#[derive(Clone, Debug, clap::Args)]
pub struct DigitTrainerArgs {
    /// The address of server 0.
    #[arg(long, value_name = "ADDRESS")]
    pub coordinator: String,
    /// This trainer's rank, from zero.
    #[arg(long)]
    pub trainer: u32,
    /// How many trainers there are.
    #[arg(long)]
    pub trainers: u32,
    /// How trainers share the model.
    #[arg(long, value_enum)]
    pub mode: Sharing,
    /// Passes over the training digits.
    #[arg(long)]
    pub epochs: u32,
    /// Decides the initial values and the order of the digits.
    #[arg(long)]
    pub seed: u64,
    /// How many servers there are.
    #[arg(long)]
    pub servers: u32,
    /// The optimizer of the program, as configuration.
    #[arg(long, value_name = "TEXT")]
    pub optimizer: String,
    /// Which RDMA device it uses.
    #[arg(long, value_parser = rdma_device, default_value_t)]
    pub rdma_device: DeviceChoice,
    /// The file with the job's token.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

/// A line of JSON from a trainer to the parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Report {
    /// After every epoch.
    Epoch {
        /// The trainer's rank.
        trainer: u32,
        /// Epochs done.
        epoch: u32,
        /// The epoch's mean loss, in nats.
        loss: f32,
        /// Steps done.
        steps: u64,
        /// Bytes sent and received so far.
        bytes: u64,
        /// Seconds since the first step.
        seconds: f64,
    },
    /// The last line of trainer 0, when all others have exited.
    Final {
        /// The trainer's rank.
        trainer: u32,
        /// Share of held-out digits that are classified correctly, 0 to 1.
        accuracy: f64,
        /// Where the model was saved.
        path: String,
    },
}

/// The program `pserver quickstart-trainer`: connects, trains, and reports on standard output. It ends at once
/// when standard input closes, because then the parent is gone.
///
/// # Errors
/// The reason that training stopped.
pub fn run(args: &DigitTrainerArgs) -> Result<()> {
    let orders = pserver_processes::parent_death::watch(|| std::process::exit(1))
        .context("starting the thread that watches the parent process")?;
    let digits = Digits::load()?;
    let coordinator = Address::parse(&args.coordinator)?;
    let (trainer, rdma_device) = (Some(args.trainer), args.rdma_device.clone());
    let token = args.token_file.as_deref().map(JobToken::read).transpose()?;
    let client = Client::new(ClientOptions { trainer, rdma_device, token, ..ClientOptions::new(coordinator) })?;
    let mut report = |report: &Report| {
        let line = serde_json::to_string(report)?;
        writeln!(io::stdout().lock(), "{line}").context("writing a report to the parent process")
    };
    let others_departed = || {
        let order = orders.recv().context("the parent process ended")?;
        ensure!(order == FINISH, "the parent process sent \"{order}\"; expected \"{FINISH}\"");
        Ok(())
    };
    train(args, &digits, &client, &mut report, others_departed)
}

/// Trains, and on trainer 0 measures and saves once `others_departed` returns.
pub(super) fn train(
    args: &DigitTrainerArgs,
    digits: &Digits,
    client: &Client,
    report: &mut dyn FnMut(&Report) -> Result<()>,
    others_departed: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let graph = network::program(&args.optimizer, args.seed)?;
    let parts = transpiler(args.mode).transpile(&graph, cluster(args), &CostModel::default())?;
    let mut own = None;
    match args.mode {
        Sharing::Sync | Sharing::Async => initialise(client, &parts)?,
        Sharing::Delta => initialise_for_deltas(client, &parts)?,
    }
    let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
    let mut whole = Whole { client, run: PlainRun::new(&graph, &mut arithmetic, &mut kernels)?, names: names(&graph) };
    let mut course = DigitBatches::new(args, digits)?;
    let mut pace = match args.mode {
        Sharing::Sync | Sharing::Async => TrainingStep::Remote(own.insert(Trainer::new(client, &parts)?)),
        Sharing::Delta => TrainingStep::Local { anchor: whole.pull()?, whole: &mut whole, since_pull: 0 },
    };
    let start = Instant::now();
    for epoch in 1..=args.epochs {
        let mut loss = 0.0;
        for batch in course.epoch(epoch) {
            loss += finite(pace.step(&batch)?)? / course.steps_as_real();
        }
        let (steps, moved) = (u64::from(epoch) * course.steps as u64, client.moved());
        let (bytes, seconds) = (moved.sent + moved.received, start.elapsed().as_secs_f64());
        report(&Report::Epoch { trainer: args.trainer, epoch, loss, steps, bytes, seconds })?;
    }
    pace.finish()?;
    if args.trainer == 0 {
        others_departed()?;
        whole.pull()?;
        let accuracy = whole.accuracy(&digits.held_out())?;
        let path = client.save_model(MODEL_PATH)?.0;
        report(&Report::Final { trainer: 0, accuracy, path })?;
    }
    Ok(client.leave()?)
}

/// The transpiler of the program. Servers that add differences keep the same as those that optimize.
fn transpiler(sharing: Sharing) -> ParameterServer {
    let mode = match sharing.mode() {
        Mode::Delta => Mode::Sync,
        mode => mode,
    };
    ParameterServer { mode, merge: Merge::Mean, ..ParameterServer::default() }
}

fn cluster(args: &DigitTrainerArgs) -> Cluster {
    Cluster { trainers: args.trainers, servers: args.servers }
}

fn names(graph: &Graph) -> Vec<String> {
    let parameters = graph.variables().iter().filter(|variable| variable.purpose == Purpose::Parameter);
    parameters.map(|variable| variable.name.clone()).collect()
}

/// The order in which a trainer sees its digits.
struct DigitBatches<'a> {
    share: Vec<&'a Digit>,
    seed: [u64; 2],
    /// Steps in one epoch: the same for every trainer, because a round needs a gradient of each.
    steps: usize,
}

impl<'a> DigitBatches<'a> {
    fn new(args: &DigitTrainerArgs, digits: &'a Digits) -> Result<Self> {
        let share = digits.part(args.trainer, args.trainers)?;
        // The last trainer's share is the shortest.
        let shortest = digits.part(args.trainers - 1, args.trainers)?.len();
        Ok(Self { share, seed: [args.seed, u64::from(args.trainer)], steps: shortest.div_ceil(BATCH) })
    }

    /// The batches of an epoch. A share that does not fill the last batch begins again.
    fn epoch(&mut self, epoch: u32) -> Vec<Vec<&'a Digit>> {
        let mut order = self.share.clone();
        Shuffler::of(&[self.seed[0], self.seed[1], u64::from(epoch)]).shuffle(&mut order);
        let mut next = order.iter().copied().cycle();
        (0..self.steps).map(|_| next.by_ref().take(BATCH).collect()).collect()
    }

    fn steps_as_real(&self) -> f32 {
        f32::from(u16::try_from(self.steps).expect("an epoch has at most 45 steps"))
    }
}

/// The whole program in this process, with the servers' parameters. They are small, and so never cut.
struct Whole<'a> {
    client: &'a Client,
    run: PlainRun<'a>,
    /// Slots of the parameters.
    names: Vec<String>,
}

impl Whole<'_> {
    /// Sets the parameters to what the servers have.
    fn pull(&mut self) -> Result<Vec<Tensor>> {
        let mut tensors = self.parameters();
        let places = self.names.iter().zip(&mut tensors);
        let mut wanted: Vec<DestinationSlice<'_>> =
            places.map(|(name, tensor)| DestinationSlice::new(name, tensor.bytes_mut())).collect();
        self.client.pull(&mut wanted)?;
        for (name, tensor) in self.names.iter().zip(&tensors) {
            self.run.set(name, tensor.clone())?;
        }
        Ok(tensors)
    }

    fn parameters(&self) -> Vec<Tensor> {
        let value = |name: &String| self.run.value(name).expect("a parameter has a value").tensor().clone();
        self.names.iter().map(value).collect()
    }

    fn push(&self, differences: &[Tensor]) -> Result<()> {
        let one =
            |(name, tensor)| GradientSlice { name, element_type: ElementType::Float32, content: Tensor::bytes(tensor) };
        let given: Vec<GradientSlice<'_>> = self.names.iter().map(String::as_str).zip(differences).map(one).collect();
        Ok(self.client.push(&given, None)?)
    }

    fn step(&mut self, batch: &[&Digit]) -> Result<f32> {
        for (name, tensor) in network::data(batch) {
            self.run.set(name, tensor)?;
        }
        self.run.step()?;
        scalar(self.run.value("loss"))
    }

    /// Share of these digits that are classified correctly, 0 to 1.
    fn accuracy(&mut self, digits: &[&Digit]) -> Result<f64> {
        self.step(digits)?;
        Ok(scalar(self.run.value("accuracy"))?.into())
    }
}

/// How a batch changes the model.
enum TrainingStep<'a, 'c> {
    /// The servers step.
    Remote(&'a mut Trainer<'c>),
    /// The trainer steps and pushes how far it came since its last pull.
    Local { whole: &'a mut Whole<'c>, since_pull: u32, anchor: Vec<Tensor> },
}

impl TrainingStep<'_, '_> {
    /// Learns from a batch; gives its loss.
    fn step(&mut self, batch: &[&Digit]) -> Result<f32> {
        match self {
            Self::Remote(own) => {
                for (name, tensor) in network::data(batch) {
                    own.feed(name, tensor)?;
                }
                own.step()?;
                scalar(own.value("loss"))
            }
            Self::Local { whole, since_pull, .. } => {
                let loss = whole.step(batch)?;
                *since_pull += 1;
                if *since_pull == LOCAL_STEPS {
                    self.finish()?;
                }
                Ok(loss)
            }
        }
    }

    /// Pushes the steps that were not pushed yet.
    fn finish(&mut self) -> Result<()> {
        let Self::Local { whole, since_pull, anchor } = self else { return Ok(()) };
        if *since_pull > 0 {
            let pairs = whole.parameters().into_iter().zip(&*anchor).map(|(new, old)| difference(&new, old));
            let differences: Vec<Tensor> = pairs.collect();
            whole.push(&differences)?;
            *anchor = whole.pull()?;
            *since_pull = 0;
        }
        Ok(())
    }
}

fn difference(new: &Tensor, old: &Tensor) -> Tensor {
    let difference = floats(new).iter().zip(floats(old)).map(|(new, old)| new - old).collect();
    Tensor::new(new.shape(), Elements::Float32(difference))
}

/// A loss that training can go on from.
///
/// # Errors
/// When it is infinite or no number: what to change.
fn finite(loss: f32) -> Result<f32> {
    ensure!(
        loss.is_finite(),
        "the training diverged: the loss is {loss}; expected a finite number, which a smaller learning rate gives"
    );
    Ok(loss)
}

fn scalar(value: Option<&VariableValue>) -> Result<f32> {
    let value = value.context("found no value after a step")?;
    Ok(floats(value.tensor())[0])
}

fn floats(tensor: &Tensor) -> &[f32] {
    match tensor.elements() {
        Elements::Float32(values) => values,
        other => panic!("the network has {}", other.element_type()),
    }
}

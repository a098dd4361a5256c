//! One trainer of the quickstart: what a user's training loop looks like against a parameter server.
//!
//! Not here: the connection to the servers, which is the library's [`ParameterClient`]; the parent that starts
//! trainers, [`super::run`].

use std::io::{self, Write};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::digits::{Digit, Digits};
use super::lifeline;
use super::luck::Luck;
use super::model::{Gradients, Model};
use super::plan::{BATCH, LOCAL_STEPS, Optimizer, Plan, Sharing};

/// What the parent writes to the first trainer when all others are gone.
pub(super) const FINISH: &str = "finish";
/// The saved model's name within the servers' model folder.
const MODEL_NAME: &str = "digits";

/// What a trainer needs of the library. Every call blocks, and fails rather than hangs.
pub trait ParameterClient {
    /// True for the one trainer that must give the initial values; false, once they are there, for all others.
    ///
    /// # Errors
    /// As every call's: what went wrong, and where.
    fn begin_init(&mut self) -> Result<bool>;
    /// Gives a parameter its shape and its first values.
    ///
    /// # Errors
    /// When the servers refuse it or are gone.
    fn init(&mut self, name: &str, shape: &[u64], values: &[f32]) -> Result<()>;
    /// Says that every parameter was given.
    ///
    /// # Errors
    /// When the servers refuse it or are gone.
    fn finish_init(&mut self) -> Result<()>;
    /// Sends one gradient, or one difference, for each parameter named.
    ///
    /// # Errors
    /// When the servers refuse it or are gone.
    fn push(&mut self, gradients: &[(&str, &[f32])]) -> Result<()>;
    /// Fetches values that have seen this trainer's last push.
    ///
    /// # Errors
    /// When the servers refuse it or are gone.
    fn pull(&mut self, into: &mut [(&str, &mut [f32])]) -> Result<()>;
    /// Says that this trainer pushes no more.
    ///
    /// # Errors
    /// When the servers are gone.
    fn leave(&mut self) -> Result<()>;
    /// Bytes sent and received so far.
    fn bytes_moved(&self) -> u64;
    /// This trainer's rank, from zero.
    fn trainer(&self) -> u32;
    /// Saves the whole model under `path` in the servers' model folder; says where it lies.
    ///
    /// # Errors
    /// When the path leaves the folder, or it cannot be written.
    fn save(&mut self, path: &str) -> Result<String>;
}

/// The options of `pserver quickstart-trainer`, which only `pserver quickstart` starts.
#[derive(Clone, Debug, clap::Args)]
pub struct TrainerArgs {
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
    /// The last line of trainer 0, when all others are gone.
    Final {
        /// The trainer's rank.
        trainer: u32,
        /// The share of held-out digits named rightly, 0 to 1.
        accuracy: f64,
        /// Where the model was saved.
        path: String,
    },
}

/// The program `pserver quickstart-trainer`: connects, trains, and reports on standard output. It ends at once
/// when standard input closes, because then the parent is gone.
///
/// # Errors
/// What stopped the training.
pub fn run<C: ParameterClient>(args: &TrainerArgs, connect: impl FnOnce(&TrainerArgs) -> Result<C>) -> Result<()> {
    let orders = lifeline::watch(|| std::process::exit(1)).context("no thread to watch the parent")?;
    let digits = Digits::load()?;
    let mut client = connect(args)?;
    let mut report = |report: &Report| {
        let line = serde_json::to_string(report)?;
        writeln!(io::stdout().lock(), "{line}").context("the parent takes no more reports")
    };
    let others_left = || {
        let order = orders.recv().context("the parent is gone")?;
        ensure!(order == FINISH, "the parent said \"{order}\"; expected \"{FINISH}\"");
        Ok(())
    };
    train(args, &digits, &mut client, &mut report, others_left)
}

/// Trains, and on trainer 0 measures and saves once `others_left` returns.
pub(super) fn train(
    args: &TrainerArgs,
    digits: &Digits,
    client: &mut dyn ParameterClient,
    report: &mut dyn FnMut(&Report) -> Result<()>,
    others_left: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut model = Model::new(args.seed);
    initialise(client, &model)?;
    pull(client, &mut model)?;
    let mut course = Course::new(args, digits)?;
    let mut pace = Pace::new(args.mode, &model)?;
    let start = Instant::now();
    for epoch in 1..=args.epochs {
        let mut loss = 0.0;
        for batch in course.epoch(epoch) {
            let gradients = model.gradients(&batch);
            loss += gradients.loss / course.steps_as_real();
            pace.step(client, &mut model, &gradients)?;
        }
        report(&Report::Epoch {
            trainer: args.trainer,
            epoch,
            loss,
            steps: u64::from(epoch) * course.steps as u64,
            bytes: client.bytes_moved(),
            seconds: start.elapsed().as_secs_f64(),
        })?;
    }
    pace.finish(client, &mut model)?;
    if args.trainer == 0 {
        others_left()?;
        pull(client, &mut model)?;
        let accuracy = model.accuracy(&digits.held_out());
        let path = client.save(MODEL_NAME)?;
        report(&Report::Final { trainer: 0, accuracy, path })?;
    }
    client.leave()
}

/// The order in which a trainer sees its digits.
struct Course<'a> {
    share: Vec<&'a Digit>,
    seed: [u64; 2],
    /// Steps in one epoch: the same for every trainer, because a round needs a gradient of each.
    steps: usize,
}

impl<'a> Course<'a> {
    fn new(args: &TrainerArgs, digits: &'a Digits) -> Result<Self> {
        let share = digits.part(args.trainer, args.trainers)?;
        // The last trainer's share is the shortest.
        let shortest = digits.part(args.trainers - 1, args.trainers)?.len();
        Ok(Self { share, seed: [args.seed, u64::from(args.trainer)], steps: shortest.div_ceil(BATCH) })
    }

    /// The batches of an epoch. A share that does not fill the last batch begins again.
    fn epoch(&mut self, epoch: u32) -> Vec<Vec<&'a Digit>> {
        let mut order = self.share.clone();
        Luck::of(&[self.seed[0], self.seed[1], u64::from(epoch)]).shuffle(&mut order);
        let mut next = order.iter().copied().cycle();
        (0..self.steps).map(|_| next.by_ref().take(BATCH).collect()).collect()
    }

    fn steps_as_real(&self) -> f32 {
        f32::from(u16::try_from(self.steps).expect("an epoch has at most 45 steps"))
    }
}

/// What happens between one batch and the next.
enum Pace {
    /// The servers step.
    Remote,
    /// The trainer steps and pushes how far it came since its last pull.
    Local { rate: f32, since_pull: u32, anchor: Model },
}

impl Pace {
    fn new(sharing: Sharing, model: &Model) -> Result<Self> {
        Ok(match sharing {
            Sharing::Sync | Sharing::Async => Self::Remote,
            Sharing::Delta => {
                Self::Local { rate: Plan::new(sharing, Optimizer::Sgd)?.rate, since_pull: 0, anchor: model.clone() }
            }
        })
    }

    fn step(&mut self, client: &mut dyn ParameterClient, model: &mut Model, gradients: &Gradients) -> Result<()> {
        match self {
            Self::Remote => {
                push(client, model, &gradients.by_parameter)?;
                pull(client, model)
            }
            Self::Local { rate, since_pull, .. } => {
                model.descend(gradients, *rate);
                *since_pull += 1;
                if *since_pull == LOCAL_STEPS { self.finish(client, model) } else { Ok(()) }
            }
        }
    }

    /// Pushes the steps that were not pushed yet.
    fn finish(&mut self, client: &mut dyn ParameterClient, model: &mut Model) -> Result<()> {
        let Self::Local { since_pull, anchor, .. } = self else {
            return Ok(());
        };
        if *since_pull > 0 {
            push(client, model, &differences(model, anchor))?;
            pull(client, model)?;
            anchor.clone_from(model);
            *since_pull = 0;
        }
        Ok(())
    }
}

fn differences(new: &Model, old: &Model) -> Vec<Vec<f32>> {
    let pairs = new.parameters().iter().zip(old.parameters());
    pairs.map(|(new, old)| new.values.iter().zip(&old.values).map(|(new, old)| new - old).collect()).collect()
}

fn initialise(client: &mut dyn ParameterClient, model: &Model) -> Result<()> {
    if client.begin_init()? {
        for parameter in model.parameters() {
            client.init(&parameter.name, &parameter.shape, &parameter.values)?;
        }
        client.finish_init()?;
    }
    Ok(())
}

fn push(client: &mut dyn ParameterClient, model: &Model, values: &[Vec<f32>]) -> Result<()> {
    let names = model.parameters().iter().map(|parameter| parameter.name.as_str());
    let named: Vec<(&str, &[f32])> = names.zip(values.iter().map(Vec::as_slice)).collect();
    client.push(&named)
}

fn pull(client: &mut dyn ParameterClient, model: &mut Model) -> Result<()> {
    let parameters = model.parameters_mut().iter_mut();
    let mut into: Vec<(&str, &mut [f32])> =
        parameters.map(|parameter| (parameter.name.as_str(), parameter.values.as_mut_slice())).collect();
    client.pull(&mut into)
}

//! One trainer of the quickstart with words: its part of the program of [`super::skip_gram`], run against servers.
//!
//! Not here: the parent that starts trainers ([`super::run_words`]); how a part runs ([`pserver_trainer`]).

use std::io::{self, Write};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use pserver_core::config::{Merge, Mode};
use pserver_core::wire::Address;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, ProgramPart, Transpiler};
use pserver_program::{Elements, Tensor, VariableValue};
use serde::{Deserialize, Serialize};

use super::parent_death;
use super::plan::Sharing;
use super::skip_gram::{TABLE, WIDTH, program};
use super::trainer::{FINISH, finite};
use super::words::{EpochPairs, NEGATIVES, Pairs, Words, nearest};
use pserver_client::{Client, ClientOptions};
use pserver_trainer::{Trainer, initialise};

/// Pairs in one step of one trainer.
pub(super) const BATCH: usize = 512;
/// The servers' optimizer: word frequencies differ widely, and Adagrad adapts the rate of each row.
pub(super) const OPTIMIZER: &str =
    "optimizer: Adagrad adagrad { epsilon: 1e-6 } lr_policy: Const const_lr { learning_rate: 0.1 }";
/// Steps between two reports.
const REPORT_STEPS: u32 = 50;
/// The words whose neighbours are shown.
const SHOWN: [&str; 5] = ["king", "lord", "bread", "sea", "mother"];
/// Neighbours shown of each.
const NEIGHBOURS: usize = 8;

/// The options of `pserver quickstart-word-trainer`, which only `pserver quickstart words` starts.
#[derive(Clone, Debug, clap::Args)]
pub struct WordTrainerArgs {
    /// The address of server 0.
    #[arg(long, value_name = "ADDRESS")]
    pub coordinator: String,
    /// This trainer's rank, from zero.
    #[arg(long)]
    pub trainer: u32,
    /// How many trainers there are.
    #[arg(long)]
    pub trainers: u32,
    /// How many servers there are.
    #[arg(long)]
    pub servers: u32,
    /// How trainers share the tables.
    #[arg(long, value_enum)]
    pub mode: Sharing,
    /// Steps of this trainer.
    #[arg(long)]
    pub steps: u32,
    /// Decides the initial values and the order of the verses.
    #[arg(long)]
    pub seed: u64,
}

/// A line of JSON from a trainer to the parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum WordReport {
    /// Every now and then, and at the end.
    Steps {
        /// The trainer's rank.
        trainer: u32,
        /// Steps done.
        steps: u32,
        /// The mean loss since the report before, in nats.
        loss: f32,
        /// Bytes sent and received since the first step.
        bytes: u64,
        /// Seconds since the first step.
        seconds: f64,
    },
    /// The last line of trainer 0, when all others are gone.
    Final {
        /// Words with those nearest to them.
        neighbours: Vec<(String, Vec<String>)>,
    },
}

/// The program `pserver quickstart-word-trainer`. It ends at once when standard input closes, because then the parent
/// is gone.
///
/// # Errors
/// The reason that training stopped.
pub fn run(args: &WordTrainerArgs) -> Result<()> {
    let orders =
        parent_death::watch(|| std::process::exit(1)).context("starting the thread that watches the parent process")?;
    let words = Words::load()?;
    let coordinator = Address::parse(&args.coordinator)?;
    let client = Client::new(ClientOptions { trainer: Some(args.trainer), ..ClientOptions::new(coordinator) })?;
    let parts = parts(args)?;
    initialise(&client, &parts)?;
    let mut own = Trainer::new(&client, &parts)?;
    train(args, &words, &client, &mut own)?;
    if args.trainer == 0 {
        let order = orders.recv().context("the parent process ended")?;
        ensure!(order == FINISH, "the parent process sent \"{order}\"; expected \"{FINISH}\"");
        report(&WordReport::Final { neighbours: neighbours(&words, &own.fetch(TABLE)?)? })?;
    }
    Ok(client.leave()?)
}

/// The program, divided over the job's trainers and servers. Every process computes the same parts.
fn parts(args: &WordTrainerArgs) -> Result<Vec<ProgramPart>> {
    let mode = match args.mode {
        Sharing::Sync => Mode::Sync,
        Sharing::Async => Mode::Async,
        Sharing::Delta => bail!("found --mode delta, in which trainers optimize; expected sync or async"),
    };
    let transpiler = ParameterServer { mode, merge: Merge::Mean, ..ParameterServer::default() };
    let cluster = Cluster { trainers: args.trainers, servers: args.servers };
    let costs = CostModel { batch: BATCH as u64, ..CostModel::default() };
    Ok(transpiler.transpile(&program(OPTIMIZER, args.seed)?, cluster, &costs)?)
}

fn train(args: &WordTrainerArgs, words: &Words, client: &Client, own: &mut Trainer<'_>) -> Result<()> {
    let moved = || client.moved().sent + client.moved().received;
    let (before, start) = (moved(), Instant::now());
    let mut course = WordBatches::new(args, words)?;
    let (mut loss, mut since) = (0.0, 0_u16);
    for steps in 1..=args.steps {
        for (name, tensor) in data(course.next()?) {
            own.feed(name, tensor)?;
        }
        own.step()?;
        loss += finite(last_loss(own)?)?;
        since += 1;
        if steps % REPORT_STEPS == 0 || steps == args.steps {
            let (bytes, seconds) = (moved() - before, start.elapsed().as_secs_f64());
            report(&WordReport::Steps { trainer: args.trainer, steps, loss: loss / f32::from(since), bytes, seconds })?;
            (loss, since) = (0.0, 0);
        }
    }
    Ok(())
}

/// The pairs of a trainer, epoch after epoch: every trainer takes as many steps, because a round needs a gradient of
/// each, however many pairs its verses have.
struct WordBatches<'a> {
    args: &'a WordTrainerArgs,
    words: &'a Words,
    epoch: u32,
    pairs: EpochPairs<'a>,
}

impl<'a> WordBatches<'a> {
    fn new(args: &'a WordTrainerArgs, words: &'a Words) -> Result<Self> {
        Ok(Self { args, words, epoch: 0, pairs: words.pairs(args.trainer, args.trainers, 0, args.seed)? })
    }

    fn next(&mut self) -> Result<Pairs> {
        if let Some(pairs) = self.pairs.next(BATCH) {
            return Ok(pairs);
        }
        self.epoch += 1;
        self.pairs = self.words.pairs(self.args.trainer, self.args.trainers, self.epoch, self.args.seed)?;
        self.pairs.next(BATCH).context("the verses of a trainer have fewer pairs than a step")
    }
}

fn data(pairs: Pairs) -> [(&'static str, Tensor); 3] {
    let (batch, targets) = (BATCH as u64, 1 + NEGATIVES as u64);
    [
        ("center", Tensor::new([batch, 1], Elements::Int64(pairs.centers))),
        ("target", Tensor::new([batch, targets], Elements::Int64(pairs.targets))),
        ("label", Tensor::new([batch, targets], Elements::Float32(pairs.labels))),
    ]
}

fn last_loss(own: &Trainer<'_>) -> Result<f32> {
    match own.value("loss") {
        Some(VariableValue::Dense(tensor)) => Ok(floats(tensor)?[0]),
        _ => bail!("found no loss after a step"),
    }
}

fn floats(tensor: &Tensor) -> Result<&[f32]> {
    match tensor.elements() {
        Elements::Float32(values) => Ok(values),
        other => bail!("found {}; expected float32", other.element_type()),
    }
}

fn neighbours(words: &Words, table: &Tensor) -> Result<Vec<(String, Vec<String>)>> {
    let (table, width) = (floats(table)?, usize::try_from(WIDTH)?);
    let of = |name: &str| {
        let word = words.find(name).with_context(|| format!("the text has no word {name:?}"))?;
        let near = nearest(table, width, word, NEIGHBOURS);
        let named = near.iter().map(|(near, _)| Ok(words.vocabulary()[usize::try_from(*near)?].clone()));
        Ok((name.to_owned(), named.collect::<Result<_>>()?))
    };
    SHOWN.into_iter().map(of).collect()
}

fn report(report: &WordReport) -> Result<()> {
    let line = serde_json::to_string(report)?;
    writeln!(io::stdout().lock(), "{line}").context("writing a report to the parent process")
}

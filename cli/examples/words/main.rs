//! One trainer of a job that learns which words of the King James Bible are alike: skip-gram with negative sampling
//! over two tables, of which a step moves the rows that it touches.
//!
//!     cargo build --release -p pserver --bins --examples
//!     target/release/pserver launch --servers 2 --trainers 2 -- target/release/examples/words
//!
//! Read in this order: [`text`] (words and their pairs), [`skip_gram`] (the program), [`learn`] (a trainer's steps).

mod skip_gram;
mod text;

use anyhow::{Context, Result, bail};
use clap::Parser;
use pserver_client::environment::{self, Environment};
use pserver_client::{Client, console, setting_file};
use pserver_core::config::{Merge, Mode};
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, ProgramPart, Transpiler};
use pserver_program::{Elements, Tensor, VariableValue};
use pserver_trainer::{Trainer, initialise};

use skip_gram::{TABLE, WIDTH, program};
use text::{EPOCH_PAIRS, EpochPairs, NEGATIVES, Pairs, Words, nearest};

/// Pairs in one step of one trainer.
const BATCH: u32 = 512;
/// The servers' optimizer: word frequencies differ widely, and Adagrad adapts the rate of each row.
const OPTIMIZER: &str = "optimizer: Adagrad adagrad { epsilon: 1e-6 } lr_policy: Const const_lr { learning_rate: 0.1 }";
/// Steps between two reports.
const REPORT_STEPS: u32 = 50;
/// The words whose neighbours are shown.
const SHOWN: [&str; 5] = ["king", "lord", "bread", "sea", "mother"];
/// Neighbours shown of each.
const NEIGHBOURS: usize = 8;

/// A trainer of word vectors, for `pserver launch`.
#[derive(Parser)]
struct Args {
    /// Steps of each trainer, of 512 pairs of words; about one pass over the text when not given.
    #[arg(long)]
    steps: Option<u32>,
    /// Update without rounds: each gradient as it arrives.
    #[arg(long)]
    asynchronous: bool,
    /// Decides the initial values and the order of the verses.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let variable = |name: &str| std::env::var(name).ok();
    let found = environment::find("", &Environment { variable: &variable, file: &setting_file::open })?;
    let client = Client::new(found.options)?;
    let words = Words::load()?;
    let is_shown = client.trainer()? == 0;
    let show = |steps, loss| {
        if is_shown {
            console::remark(format_args!("step {steps}: loss {loss:.4}"));
        }
    };
    let trainer = learn(&client, &words, &args, show)?;
    if is_shown {
        for (word, near) in neighbours(&words, &trainer.fetch(TABLE)?)? {
            console::print(format_args!("{word:<8} {}\n", near.join(", ")))?;
        }
    }
    drop(trainer);
    Ok(client.leave()?)
}

/// Takes this trainer's steps; `report` has the number of steps and the mean loss, in nats, since the report before.
fn learn<'a>(client: &'a Client, words: &Words, args: &Args, mut report: impl FnMut(u32, f32)) -> Result<Trainer<'a>> {
    let cluster = Cluster { trainers: client.trainers()?, servers: client.servers()? };
    let parts = parts(args, cluster)?;
    initialise(client, &parts)?;
    let mut own = Trainer::new(client, &parts)?;
    let steps = args.steps.unwrap_or_else(|| EPOCH_PAIRS.div_ceil(BATCH * cluster.trainers));
    let mut batches = WordBatches::new(words, (client.trainer()?, cluster.trainers), args.seed)?;
    let (mut loss, mut since) = (0.0, 0_u16);
    for step in 1..=steps {
        for (name, tensor) in data(batches.next()?) {
            own.feed(name, tensor)?;
        }
        own.step()?;
        loss += last_loss(&own)?;
        since += 1;
        if step % REPORT_STEPS == 0 || step == steps {
            report(step, loss / f32::from(since));
            (loss, since) = (0.0, 0);
        }
    }
    Ok(own)
}

/// The program, divided over the job's trainers and servers. Every process computes the same parts.
fn parts(args: &Args, cluster: Cluster) -> Result<Vec<ProgramPart>> {
    let mode = if args.asynchronous { Mode::Async } else { Mode::Sync };
    let transpiler = ParameterServer { mode, merge: Merge::Mean, ..ParameterServer::default() };
    let costs = CostModel { batch: BATCH.into(), ..CostModel::default() };
    Ok(transpiler.transpile(&program(OPTIMIZER, args.seed)?, cluster, &costs)?)
}

/// The pairs of a trainer, epoch after epoch: every trainer takes as many steps, because a round needs a gradient of
/// each, however many pairs its verses have.
struct WordBatches<'a> {
    words: &'a Words,
    /// The trainer's rank, and the number of trainers.
    rank: (u32, u32),
    seed: u64,
    epoch: u32,
    pairs: EpochPairs<'a>,
}

impl<'a> WordBatches<'a> {
    fn new(words: &'a Words, rank: (u32, u32), seed: u64) -> Result<Self> {
        Ok(Self { words, rank, seed, epoch: 0, pairs: words.pairs(rank.0, rank.1, 0, seed)? })
    }

    fn next(&mut self) -> Result<Pairs> {
        if let Some(pairs) = self.pairs.next(BATCH as usize) {
            return Ok(pairs);
        }
        self.epoch += 1;
        self.pairs = self.words.pairs(self.rank.0, self.rank.1, self.epoch, self.seed)?;
        self.pairs.next(BATCH as usize).context("the verses of a trainer have fewer pairs than a step")
    }
}

fn data(pairs: Pairs) -> [(&'static str, Tensor); 3] {
    let (batch, targets) = (u64::from(BATCH), 1 + NEGATIVES as u64);
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

/// The words of [`SHOWN`], each with those nearest to it.
fn neighbours(words: &Words, table: &Tensor) -> Result<Vec<(&'static str, Vec<String>)>> {
    let (table, width) = (floats(table)?, usize::try_from(WIDTH)?);
    let of = |name: &'static str| {
        let word = words.find(name).with_context(|| format!("the text has no word {name:?}"))?;
        let near = nearest(table, width, word, NEIGHBOURS);
        let named = near.iter().map(|(near, _)| Ok(words.vocabulary()[usize::try_from(*near)?].clone()));
        Ok((name, named.collect::<Result<_>>()?))
    };
    SHOWN.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::f64::consts::LN_2;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;

    use pserver_client::{Client, ClientOptions};
    use pserver_node::Server;
    use pserver_node::settings::Settings;

    use super::skip_gram::TABLE;
    use super::text::{VOCABULARY, Words};
    use super::{Args, SHOWN, WIDTH, learn, neighbours};

    const TRAINERS: u32 = 2;
    const STEPS: u32 = 250;

    /// Two servers of a job, in this process.
    fn servers() -> Vec<Server> {
        let mut servers: Vec<Server> = Vec::new();
        for index in ["0", "1"] {
            let line = ["--bind", "tcp://127.0.0.1:0", "--servers", "2", "--trainers", "2", "--index", index];
            let first = servers.first().map(|server| format!("--coordinator={}", server.address()));
            let settings = Settings::of_words(line.into_iter().map(str::to_owned).chain(first));
            let settings = settings.expect("the settings are right");
            servers.push(Server::start(settings).expect("a server starts on a free port"));
        }
        servers
    }

    /// The result of one trainer.
    struct Learned {
        losses: Vec<f64>,
        bytes: u64,
    }

    /// Trainer `trainer`'s whole job. The first one waits for the others, and looks at the table.
    fn work(trainer: u32, servers: &[Server], (words, args): (&Words, &Args), others: Option<Receiver<()>>) -> Learned {
        let options = ClientOptions { trainer: Some(trainer), ..ClientOptions::new(servers[0].address().clone()) };
        let client = Client::new(options).unwrap();
        let mut losses = Vec::new();
        let own = learn(&client, words, args, |_, loss| losses.push(loss.into())).unwrap();
        let moved = client.moved();
        if let Some(others) = others {
            assert!(others.recv().is_err(), "nobody sends; the last one to leave closes the channel");
            let shown = neighbours(words, &own.fetch(TABLE).unwrap()).unwrap();
            assert!(shown.iter().map(|(word, _)| *word).eq(SHOWN), "{shown:?}");
            assert!(shown.iter().all(|(_, near)| near.len() == 8), "{shown:?}");
        }
        drop(own);
        client.leave().unwrap();
        Learned { losses, bytes: moved.sent + moved.received }
    }

    fn check(asynchronous: bool) {
        let (servers, words) = (servers(), Words::load().unwrap());
        let args = Args { steps: Some(STEPS), asynchronous, seed: 1 };
        let (leaving, others) = channel::<()>();
        let (first, second) = thread::scope(|scope| {
            let (servers, data) = (&servers, (&words, &args));
            let second = scope.spawn(move || {
                let learned = work(1, servers, data, None);
                drop(leaving);
                learned
            });
            (work(0, servers, data, Some(others)), second.join().unwrap())
        });
        servers.into_iter().for_each(|server| server.stop().unwrap());
        let losses = &first.losses;
        let (begin, end) = (losses[0], losses[losses.len() - 1]);
        // Before anything is learned every answer is as likely as the other. Without rounds the other trainer may have
        // learned much when this one begins.
        assert!(begin < LN_2 + 0.03, "{losses:?}");
        assert!(end < begin - 0.03 && end < LN_2 - 0.08, "the loss falls: {losses:?}");
        // Both tables, to and from every trainer, in every step.
        let dense = u64::from(STEPS) * u64::from(TRAINERS) * 2 * 2 * VOCABULARY as u64 * WIDTH * 4;
        let moved = first.bytes + second.bytes;
        assert!(0 < moved && moved < dense / 10, "{moved} bytes moved; whole tables would be {dense}");
    }

    #[test]
    fn words_are_learned_in_rounds() {
        check(false);
    }

    #[test]
    fn words_are_learned_without_rounds() {
        check(true);
    }
}

//! Model parallelism: a layer whose columns are on two trainer processes, by turns with the same network in one.
//!
//! The network has a layer of `WIDTH` by `WIDTH` between two narrow ones, and gradient descent. The server, which holds
//! the queues, is a thread of this process; trainers are child processes over TCP. Every process computes with one
//! thread. The values are compared bit for bit: of the first forward pass with one process, of all parameters with one
//! process that multiplies by the halves of the weight apart. The ceiling is half the time of one process and a copy of
//! the bytes that trainers send and receive.
//! `cargo bench -p pserver-bench --bench columns`

use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use pserver_bench::{is_measured, serve};
use pserver_client::{Client, ClientOptions};
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::prng::Prng;
use pserver_core::rows::Initializer;
use pserver_core::wire::Address;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::transpile::{Cluster, Columns, CostModel, ProgramPart, Transpiler};
use pserver_program::{Builder, Dim, Elements, Graph, PlainRun, Tensor, append_backward, append_optimizer};
use pserver_trainer::{Trainer, initialise_for_batch};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const TRAINERS: u32 = 2;
const INPUTS: u64 = 16;
const CLASSES: u64 = 10;
/// The first argument of a child process.
const CHILD: &str = "columns-trainer";

/// One measurement.
#[derive(Clone, Copy)]
struct LayerCase {
    width: u64,
    batch: u64,
    turns: usize,
    /// Steps of one side before the other has its turn.
    steps: usize,
}

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == CHILD) {
        return train(&words[1], words[2].parse()?, LayerCase::of(&words[3..])?);
    }
    let cases: &[LayerCase] = if is_measured() {
        let case = |batch| LayerCase { width: 4096, batch, turns: 7, steps: 4 };
        &[case(64), case(256)]
    } else {
        &[LayerCase { width: 64, batch: 6, turns: 2, steps: 2 }]
    };
    println!("width batch one_ms (min max) two_ms (min max) ratio moved_mb copy_ms ratio_to_ceiling");
    cases.iter().try_for_each(|case| case.compare())
}

impl LayerCase {
    fn of(words: &[String]) -> Outcome<Self> {
        let number = |place: usize| words[place].parse::<u64>();
        let (turns, steps) = (usize::try_from(number(2)?)?, usize::try_from(number(3)?)?);
        Ok(Self { width: number(0)?, batch: number(1)?, turns, steps })
    }

    fn words(&self) -> [String; 4] {
        [self.width.to_string(), self.batch.to_string(), self.turns.to_string(), self.steps.to_string()]
    }

    /// The network, with the wide layer as one product or, as trainers have it, as two.
    fn graph(&self, is_split: bool) -> Outcome<Graph> {
        let (p, half) = (Builder::new(), self.width / 2);
        let random = |deviation| Initializer::Gaussian { mean: 0.0, deviation };
        let (x, label) = (p.data("x", Float32, [Dim::Batch, Dim::Fixed(INPUTS)]), p.data("label", Int64, [Dim::Batch]));
        let first = p.parameter("first", Float32, &[INPUTS, self.width], random(0.2), 1);
        let wide = p.parameter("wide", Float32, &[self.width, self.width], random(0.01), 2);
        let last = p.parameter("last", Float32, &[self.width, CLASSES], random(0.01), 3);
        let hidden = p.tanh(p.matmul(x, first));
        let product = if is_split {
            p.concat(&p.split(wide, 1, [half, half]).map(|share| p.matmul(hidden, share)), 1)
        } else {
            p.matmul(hidden, wide)
        };
        let product = p.named("product", product);
        let (losses, _) = p.softmax_with_cross_entropy(p.matmul(p.relu(product), last), label);
        p.named("loss", p.mean(losses));
        let mut program = p.finish()?.into_program();
        let gradients = append_backward(&mut program, "loss")?;
        append_optimizer(&mut program, "const_lr { learning_rate: 0.1 }", &gradients)?;
        Ok(Graph::new(program)?)
    }

    fn parts(&self) -> Outcome<Vec<ProgramPart>> {
        let cluster = Cluster { trainers: TRAINERS, servers: 1 };
        Ok(Columns.transpile(&self.graph(false)?, cluster, &CostModel::default())?)
    }

    fn data(&self, prng: &mut Prng) -> [(&'static str, Tensor); 2] {
        let x = (0..self.batch * INPUTS).map(|_| prng.below(2001) as f32 / 1000.0 - 1.0).collect();
        let label = (0..self.batch).map(|_| prng.below(CLASSES).cast_signed()).collect();
        let x = Tensor::new([self.batch, INPUTS], Elements::Float32(x));
        [("x", x), ("label", Tensor::new([self.batch], Elements::Int64(label)))]
    }

    /// Runs both sides by turns; the first turn of each makes memory and connections, and is not counted.
    fn compare(&self) -> Outcome<()> {
        let server = serve("tcp", "mean", TRAINERS, (1, 1))?.remove(0);
        let mut trainers: Vec<ColumnsTrainer> =
            (0..TRAINERS).map(|rank| ColumnsTrainer::start(server.address(), rank, *self)).collect::<Outcome<_>>()?;
        let graph = self.graph(false)?;
        let mut one = OneProcess::new(*self, &graph)?;
        let (mut alone, mut together) = (Vec::new(), Vec::new());
        for turn in 0..self.turns {
            let begun = one.turn()?;
            let found: Vec<f64> = trainers[0].ask()?.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
            if turn > 0 {
                alone.extend(begun);
                together.extend(found);
            }
        }
        let forward = one.forward.expect("a step was run");
        self.check(forward, &mut trainers)?;
        let moved: u64 = trainers[0].ask()?.parse()?;
        trainers.into_iter().try_for_each(ColumnsTrainer::end)?;
        server.stop()?;
        self.print([&mut alone, &mut together], moved);
        Ok(())
    }

    /// Compares bits of the trainers with those of one process.
    fn check(&self, forward: u64, trainers: &mut [ColumnsTrainer]) -> Outcome<()> {
        let graph = self.graph(true)?;
        let mut alike = OneProcess::new(*self, &graph)?;
        for _ in 0..self.turns {
            alike.turn()?;
        }
        let value = |name: &str| alike.run.value(name).expect("it is kept").tensor().bytes();
        let half = usize::try_from(self.width * 2)?;
        let share = |share: usize| digest(value("wide").chunks_exact(half).skip(share).step_by(2));
        let expected = format!("{forward} {} {} {}", whole(value("first")), whole(value("last")), share(0));
        assert_eq!(trainers[0].ask()?, expected, "forward pass, first, last, columns of wide");
        assert_eq!(trainers[1].ask()?, share(1).to_string(), "columns of wide");
        Ok(())
    }

    fn print(&self, times: [&mut Vec<f64>; 2], moved: u64) {
        let [one, two] = times.map(|all| {
            all.sort_by(f64::total_cmp);
            (all[all.len() / 2], all[0], all[all.len() - 1])
        });
        let copy = copy_ms(usize::try_from(moved).expect("it is in memory"));
        let ceiling = one.0 / 2.0 + copy;
        println!(
            "{} {} {:.1} ({:.1} {:.1}) {:.1} ({:.1} {:.1}) {:.2} {:.2} {:.2} {:.2}",
            self.width,
            self.batch,
            one.0,
            one.1,
            one.2,
            two.0,
            two.1,
            two.2,
            one.0 / two.0,
            moved as f64 / 1e6,
            copy,
            ceiling / two.0
        );
    }
}

/// The undivided network in this process.
struct OneProcess<'g> {
    case: LayerCase,
    run: PlainRun<'g>,
    prng: Prng,
    /// The digest of the first step's product.
    forward: Option<u64>,
}

impl<'g> OneProcess<'g> {
    fn new(case: LayerCase, graph: &'g Graph) -> Outcome<Self> {
        let (arithmetic, kernels) = (Box::leak(Box::<CpuArithmetic>::default()), Box::leak(Box::<Cpu>::default()));
        Ok(Self { case, run: PlainRun::new(graph, arithmetic, kernels)?, prng: Prng(case.batch), forward: None })
    }

    /// The milliseconds of each step.
    fn turn(&mut self) -> Outcome<Vec<f64>> {
        let mut milliseconds = Vec::new();
        for _ in 0..self.case.steps {
            self.case.data(&mut self.prng).into_iter().try_for_each(|(name, tensor)| self.run.set(name, tensor))?;
            let begun = Instant::now();
            self.run.step()?;
            milliseconds.push(begun.elapsed().as_secs_f64() * 1e3);
            let product = || whole(self.run.value("product").expect("it is computed").tensor().bytes());
            self.forward.get_or_insert_with(product);
        }
        Ok(milliseconds)
    }
}

/// A child: answers each line of its input with one line.
fn train(coordinator: &str, rank: u32, case: LayerCase) -> Outcome<()> {
    let options = ClientOptions { trainer: Some(rank), ..ClientOptions::new(Address::parse(coordinator)?) };
    let (client, parts) = (Client::new(options)?, case.parts()?);
    initialise_for_batch(&client, &parts, case.batch)?;
    let mut own = Trainer::new(&client, &parts)?;
    let before = client.moved();
    if rank > 0 {
        (0..case.turns * case.steps).try_for_each(|_| own.step())?;
        return answer(|| Ok(digest_of(&own, &format!("wide@columns{rank}")).to_string()));
    }
    let (mut prng, mut forward) = (Prng(case.batch), None);
    for _ in 0..case.turns {
        answer(|| {
            let mut milliseconds = Vec::new();
            for _ in 0..case.steps {
                case.data(&mut prng).into_iter().try_for_each(|(name, tensor)| own.feed(name, tensor))?;
                let begun = Instant::now();
                own.step()?;
                milliseconds.push((begun.elapsed().as_secs_f64() * 1e3).to_string());
                forward.get_or_insert_with(|| digest_of(&own, "product"));
            }
            Ok(milliseconds.join(" "))
        })?;
    }
    let after = client.moved();
    let kept = ["first", "last", "wide@columns0"].map(|name| digest_of(&own, name).to_string()).join(" ");
    answer(|| Ok(format!("{} {kept}", forward.ok_or("no step was run")?)))?;
    let steps = u64::try_from(case.turns * case.steps)?;
    answer(|| Ok(((after.sent + after.received - before.sent - before.received) / steps).to_string()))
}

/// Waits for a line and prints another.
fn answer(mut line: impl FnMut() -> Outcome<String>) -> Outcome<()> {
    let asked = std::io::stdin().lines().next();
    asked.ok_or("the parent is gone")??;
    println!("{}", line()?);
    Ok(std::io::stdout().flush()?)
}

fn digest_of(own: &Trainer<'_>, name: &str) -> u64 {
    whole(own.value(name).expect("it is there").tensor().bytes())
}

fn whole(bytes: &[u8]) -> u64 {
    digest(std::iter::once(bytes))
}

/// A digest of bytes one after the other.
fn digest<'b>(all: impl Iterator<Item = &'b [u8]>) -> u64 {
    let mut hasher = DefaultHasher::new();
    all.for_each(|bytes| hasher.write(bytes));
    hasher.finish()
}

/// The least milliseconds of a copy.
fn copy_ms(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    let copy = |_| {
        let begun = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        begun.elapsed().as_secs_f64() * 1e3
    };
    (0..9).map(copy).fold(f64::INFINITY, f64::min)
}

/// A trainer, seen by its parent; dropping it ends it.
struct ColumnsTrainer {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl ColumnsTrainer {
    fn start(coordinator: &Address, rank: u32, case: LayerCase) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([CHILD, &coordinator.to_string(), &rank.to_string()]).args(case.words());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (input, output) = (input.expect("it is a pipe"), output.expect("it is a pipe"));
        Ok(Self { process, input, output: BufReader::new(output) })
    }

    /// The line with which it answers one.
    fn ask(&mut self) -> Outcome<String> {
        writeln!(self.input)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() {
            return Err("a trainer ended; what it said is above".into());
        }
        Ok(line.trim_end().to_owned())
    }

    /// Waits for its end.
    fn end(mut self) -> Outcome<()> {
        let status = self.process.wait()?;
        if status.success() { Ok(()) } else { Err(format!("a trainer ended with {status}").into()) }
    }
}

impl Drop for ColumnsTrainer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

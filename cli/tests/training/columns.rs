//! A layer whose columns are on several trainers, with servers as queues between them: the bits of one process, also
//! when the server is killed, and the refusals.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cluster::job::{Job, Local, client, client_with, folder};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;
use pserver_client::{Client, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::ids::Version;
use pserver_core::rows::Initializer;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::transpile::{Cluster, Columns, CostModel, ProgramPart, Transpiler};
use pserver_program::{Builder, Dim, Elements, Graph, PlainRun, Tensor, append_backward, append_optimizer};
use pserver_trainer::{Trainer, initialise, initialise_for_batch};

const ADAM: &str = "optimizer: Adam adam { } const_lr { learning_rate: 0.01 }";
const BATCH: usize = 6;
const STEPS: usize = 7;
/// The time that a call waits for an absent server.
const SHORT: Duration = Duration::from_secs(1);

/// A network whose second layer is the largest, undivided or as two products of one process.
fn network(is_split: bool) -> Graph {
    let p = Builder::new();
    let random = Initializer::Uniform { low: -0.5, high: 0.5 };
    let (x, label) = (p.data("x", Float32, [Dim::Batch, Dim::Fixed(11)]), p.data("label", Int64, [Dim::Batch]));
    let first = p.parameter("first", Float32, &[11, 23], random, 1);
    let wide = p.parameter("wide", Float32, &[23, 40], random, 2);
    let last = p.parameter("last", Float32, &[40, 5], random, 3);
    let hidden = p.tanh(p.matmul(x, first));
    let product = if is_split {
        p.concat(&p.split(wide, 1, [20, 20]).map(|share| p.matmul(hidden, share)), 1)
    } else {
        p.matmul(hidden, wide)
    };
    let product = p.named("product", product);
    let (losses, _) = p.softmax_with_cross_entropy(p.matmul(p.relu(product), last), label);
    p.named("loss", p.mean(losses));
    let mut program = p.finish().expect("it fits").into_program();
    let gradients = append_backward(&mut program, "loss").expect("it has gradients");
    append_optimizer(&mut program, ADAM, &gradients).expect("it has updates");
    Graph::new(program).expect("it is a program")
}

fn batch(prng: &mut SeededPrng) -> [(&'static str, Tensor); 2] {
    let rows = BATCH as u64;
    let mut number = |bound: usize| i64::try_from(prng.below(bound)).expect("it is small");
    let x = (0..BATCH * 11).map(|_| f32::from(i16::try_from(number(2001)).expect("it is small") - 1000) / 700.0);
    let x = Elements::Float32(x.collect());
    let label = Elements::Int64((0..BATCH).map(|_| number(5)).collect());
    [("x", Tensor::new([rows, 11], x)), ("label", Tensor::new([rows], label))]
}

fn batches() -> Vec<[(&'static str, Tensor); 2]> {
    let mut prng = SeededPrng::new(5);
    (0..STEPS).map(|_| batch(&mut prng)).collect()
}

/// The parameters that steps leave, and of each step product and loss.
#[derive(Default)]
struct Outcome {
    parameters: BTreeMap<&'static str, Vec<u8>>,
    forward: Vec<[Vec<u8>; 2]>,
    /// How often trainer 0 had to repeat a step.
    failures: usize,
}

/// One process.
fn alone(graph: &Graph) -> Outcome {
    let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
    let mut run = PlainRun::new(graph, &mut arithmetic, &mut kernels).expect("the program begins");
    let mut outcome = Outcome::default();
    for data in batches() {
        data.into_iter().for_each(|(name, tensor)| run.set(name, tensor).expect("it fits"));
        run.step().expect("a step succeeds");
        let value = |name| run.value(name).expect("it is computed").tensor().bytes().to_vec();
        outcome.forward.push(["product", "loss"].map(value));
    }
    let value = |name| (name, run.value(name).expect("it is there").tensor().bytes().to_vec());
    outcome.parameters = ["first", "wide", "last"].map(value).into();
    outcome
}

fn parts(trainers: u32, servers: u32) -> Vec<ProgramPart> {
    let cluster = Cluster { trainers, servers };
    Columns.transpile(&network(false), cluster, &CostModel::default()).expect("it can be divided")
}

/// Repeats a step until it succeeds; returns the number of failures.
fn step(own: &mut Trainer<'_>) -> usize {
    let failures = std::iter::repeat_with(|| own.step()).take(99).take_while(Result::is_err).count();
    assert!(failures < 99, "{:?}", own.step());
    failures
}

fn value(own: &Trainer<'_>, name: &str) -> Vec<u8> {
    own.value(name).unwrap_or_else(|| panic!("{name} is there")).tensor().bytes().to_vec()
}

/// Trainer 0; `after` is called after each of its steps.
fn first(client: &Client, parts: &[ProgramPart], mut after: impl FnMut(usize)) -> Outcome {
    initialise_for_batch(client, parts, BATCH as u64).expect("somebody initialises");
    let mut own = Trainer::new(client, parts).expect("the part can run");
    let mut outcome = Outcome::default();
    for (number, data) in batches().into_iter().enumerate() {
        data.into_iter().for_each(|(name, tensor)| own.feed(name, tensor).expect("it fits"));
        outcome.failures += step(&mut own);
        outcome.forward.push(["product", "loss"].map(|name| value(&own, name)));
        after(number);
    }
    outcome.parameters = ["first", "last"].map(|name| (name, value(&own, name))).into();
    outcome.parameters.insert("wide", value(&own, "wide@columns0"));
    outcome
}

/// Another trainer; returns its columns.
fn other(client: &Client, parts: &[ProgramPart], share: usize) -> Vec<u8> {
    initialise_for_batch(client, parts, BATCH as u64).expect("somebody initialises");
    let mut own = Trainer::new(client, parts).expect("the part can run");
    for _ in 0..STEPS {
        step(&mut own);
    }
    value(&own, &format!("wide@columns{share}"))
}

/// The columns of 23 rows of all shares, side by side.
fn joined(shares: &[Vec<u8>]) -> Vec<u8> {
    let row = |row: usize| shares.iter().flat_map(move |share| &share[row * share.len() / 23..][..share.len() / 23]);
    (0..23).flat_map(row).copied().collect()
}

/// Trainers as threads against a job.
fn distributed(parts: &[ProgramPart], clients: &[Client], after: impl FnMut(usize)) -> Outcome {
    std::thread::scope(|scope| {
        let others = (1..).zip(&clients[1..]).map(|(share, client)| scope.spawn(move || other(client, parts, share)));
        let others: Vec<_> = others.collect();
        let mut outcome = first(&clients[0], parts, after);
        let mut shares = vec![outcome.parameters["wide"].clone()];
        shares.extend(others.into_iter().map(|one| one.join().expect("a trainer does not panic")));
        outcome.parameters.insert("wide", joined(&shares));
        outcome
    })
}

fn check(found: &Outcome) {
    let (whole, alike) = (alone(&network(false)), alone(&network(true)));
    assert!(found.forward[0] == whole.forward[0], "the forward pass has other bits than that of one process");
    assert!(found.forward == alike.forward, "a later step has other bits than one that splits its sums alike");
    for (name, bytes) in &alike.parameters {
        assert!(
            found.parameters[name] == *bytes,
            "{name:?} has other bits than one process that splits its sums alike"
        );
    }
    assert!(whole.parameters["first"] != alike.parameters["first"], "no sum is split, so nothing is shown of it");
}

#[test]
fn two_trainers_equal_one_process_for_any_servers_and_shards() {
    for (servers, shards) in [(1, 1), (2, 2), (9, 1)] {
        let job = Job { shards, chunk_bytes: 4096, ..Job::new(servers, 2) };
        let running = Local::start(&job);
        let clients = [0, 1].map(|trainer| client(&running.coordinator(), trainer));
        check(&distributed(&parts(2, servers.into()), &clients, |_| {}));
        running.stop();
    }
}

#[test]
fn a_killed_server_changes_no_bit() {
    let folder = folder();
    let job = Job { shards: 2, chunk_bytes: 4096, ..Job::new(1, 2) };
    let mut servers = Processes::start(job.with_checkpoints(folder.path()).with("--journal", "on"));
    let clients = [0, 1].map(|trainer| client_with(&servers.coordinator(), trainer, SHORT));
    let (step, steps) = std::sync::mpsc::channel();
    let killing = std::thread::spawn(move || {
        for number in steps {
            if number % 2 == 0 {
                servers.kill(0);
                // Steps are continued after their calls have failed.
                // tidy: allow sleep: calls fail meanwhile, by their deadline, which nothing tells
                std::thread::sleep(SHORT * 3 / 2);
                servers.start_again(0);
            }
        }
        servers.terminate();
    });
    let found = distributed(&parts(2, 1), &clients, |number| step.send(number).expect("the servers are there"));
    check(&found);
    assert!(found.failures > 0, "no call failed, so nothing is shown of steps that are continued");
    drop((step, clients));
    killing.join().expect("the servers stop");
}

#[test]
fn a_training_that_cannot_be_continued_is_refused_by_name() {
    let (running, parts) = (Local::start(&Job::new(1, 2)), parts(2, 1));
    let first = client(&running.coordinator(), 0);
    let said = initialise(&first, &parts).expect_err("the batch is not known").to_string();
    assert!(said.contains("found float32[batch, 23] of a batch not given; expected initialise_for_batch"), "{said}");
    initialise_for_batch(&first, &parts, BATCH as u64).expect("it is chosen");
    let mut own = Trainer::new(&first, &parts).expect("the part can run");
    let said = own.feed("label", Tensor::new([2], Elements::Int64(vec![0, 1]))).expect_err("two rows").to_string();
    let expected = "variable \"label\": found a batch of 2; expected 6, for which the job's queues were initialised";
    assert_eq!(said, expected);
    let [(_, x), _] = batch(&mut SeededPrng::new(5));
    own.feed("x", x.clone()).expect("it fits");
    own.feed("label", Tensor::new([6], Elements::Int64(vec![9; 6]))).expect("its labels are looked at later");
    std::thread::scope(|scope| {
        let second = client_with(&running.coordinator(), 1, SHORT);
        let parts = &parts;
        scope.spawn(move || {
            let mut other = Trainer::new(&second, parts).expect("the part can run");
            assert!(other.step().is_err(), "it waits for a slope that does not come");
            let said = other.feed("x", x).expect_err("the step has not ended").to_string();
            assert!(said.contains("found a step that has not ended; expected another call of step"), "{said}");
        });
        let said = own.step().expect_err("there are five classes").to_string();
        assert!(said.contains("label 9 in row 0"), "{said}");
        assert!(said.contains("found a step that other trainers have begun; expected a new job"), "{said}");
        assert_eq!(own.step().expect_err("it stays so").to_string(), said);
    });
    let again = client(&running.coordinator(), 1);
    let said = Trainer::new(&again, &parts).map(drop).expect_err("its columns are lost").to_string();
    assert!(said.contains("found 1 items sent; expected a new job"), "{said}");
    running.stop();
}

/// More than a chunk.
const QUEUE_BYTES: usize = 12_000;

fn item(number: u64) -> Vec<u8> {
    let byte = u8::try_from(number).expect("there are few");
    vec![byte; QUEUE_BYTES]
}

fn send(client: &Client, number: u64) -> Result<(), pserver_core::error::Failure> {
    client.push(&[GradientSlice { name: "q", element_type: Float32, content: &item(number) }], None)
}

/// Waits for an item and returns its number.
fn received(client: &Client, number: u64) -> u64 {
    let mut found = vec![0; QUEUE_BYTES];
    let latest = client.pull_version(&mut [DestinationSlice::new("q", &mut found)], Version(number));
    let Version(latest) = latest.expect("it comes");
    assert!(found == item(latest), "the bytes are those of item {latest}");
    latest
}

#[test]
fn items_of_one_sender_arrive_in_order_when_the_server_is_killed() {
    let folder = folder();
    let job = Job { shards: 2, chunk_bytes: 4096, ..Job::new(1, 2) };
    let mut servers = Processes::start(job.with_checkpoints(folder.path()).with("--journal", "on"));
    let [reader, sender] = [0, 1].map(|trainer| client(&servers.coordinator(), trainer));
    assert_eq!(reader.begin_init(&OptimizerSettings::default()), Ok(true));
    let queue = OptimizerSettings::from_text("algorithm: 'sum' sender: 1").expect("it is a queue");
    reader.init_param("q", Float32, &[QUEUE_BYTES as u64 / 4], &item(0), &queue).expect("it fits");
    reader.finish_init().expect("all is there");
    std::thread::scope(|scope| {
        let (taken, takes) = std::sync::mpsc::channel();
        scope.spawn(move || {
            for number in 1..=9 {
                send(&sender, number).expect("it is taken");
                takes.recv().expect("the reader goes on");
            }
        });
        for number in 1..=9 {
            if number % 3 == 0 {
                servers.kill(0);
                servers.start_again(0);
            }
            assert_eq!(received(&reader, number), number, "the sender waits until it was taken");
            taken.send(()).expect("the sender goes on");
        }
    });
    let text = send(&reader, 1).expect_err("it is no sender").to_string();
    assert!(text.contains("parameter \"q\": trainer 0 sent to it; expected 1"), "{text}");
    assert_eq!(received(&reader, 3), 9, "an item that was overwritten is told by its number");
    servers.terminate();
}

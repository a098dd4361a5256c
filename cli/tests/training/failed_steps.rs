//! A failed and repeated step of a program ends like an undisturbed step, to the bit. A job runs with the mode and the
//! initialising ops of the parts of a program, or refuses them by name.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cluster::job::{Job, Local, client, client_with, folder};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;
use pserver_client::{Client, JobSharing};
use pserver_core::config::{Merge, Mode, OptimizerSettings};
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::rows::Initializer;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, Placement, ProgramPart, Transpiler};
use pserver_program::{
    Builder, Dim, Elements, Graph, Op, OpKind, OpRole, PlainRun, Program, Purpose, Tensor, Variable, VariableFacts,
    append_backward, append_optimizer,
};
use pserver_trainer::{Trainer, initialise};

const HEIGHT: u64 = 40;
const WIDTH: u64 = 6;
const CLASSES: u64 = 3;
const BATCH: usize = 7;
/// The time that a call waits for an absent server.
const SHORT: Duration = Duration::from_secs(3);
const MOMENTUM: &str = "sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 }";

/// Ids and labels of a step.
type Data = [Vec<i64>; 2];
type VariableValues = BTreeMap<&'static str, Vec<u8>>;

/// A table, and a layer on top. Servers in turn keep them: the table is the first's, the layer the last's.
fn program() -> Program {
    let p = Builder::new();
    let random = Initializer::Gaussian { mean: 0.0, deviation: 0.5 };
    let table = p.parameter("table", Float32, &[HEIGHT, WIDTH], random, 3);
    let weight = p.parameter("weight", Float32, &[WIDTH, CLASSES], random, 4);
    let (ids, label) = (p.data("ids", Int64, [Dim::Batch]), p.data("label", Int64, [Dim::Batch]));
    let (losses, _) = p.softmax_with_cross_entropy(p.matmul(p.lookup_table(table, ids), weight), label);
    p.named("loss", p.mean(losses));
    let mut program = p.finish().expect("it fits").into_program();
    let gradients = append_backward(&mut program, "loss").expect("it has gradients");
    append_optimizer(&mut program, MOMENTUM, &gradients).expect("it has updates");
    program
}

fn parts_of(program: Program, transpiler: ParameterServer, cluster: Cluster) -> Vec<ProgramPart> {
    let graph = Graph::new(program).expect("it is a program");
    transpiler.transpile(&graph, cluster, &CostModel::default()).expect("it can be divided")
}

fn parts(trainers: u32, servers: u32) -> Vec<ProgramPart> {
    let transpiler = ParameterServer { placement: Placement::RoundRobin, ..ParameterServer::default() };
    parts_of(program(), transpiler, Cluster { trainers, servers })
}

fn data(prng: &mut SeededPrng) -> Data {
    let mut below = |bound: u64| {
        let bound = usize::try_from(bound).expect("it is small");
        (0..BATCH).map(|_| i64::try_from(prng.below(bound)).expect("it is small")).collect()
    };
    [below(HEIGHT), below(CLASSES)]
}

fn tensors([ids, label]: &Data) -> [(&'static str, Tensor); 2] {
    let tensor = |values: &Vec<i64>| Tensor::new([values.len() as u64], Elements::Int64(values.clone()));
    [("ids", tensor(ids)), ("label", tensor(label))]
}

fn feed(own: &mut Trainer<'_>, data: &Data) {
    for (name, tensor) in tensors(data) {
        own.feed(name, tensor).expect("it fits");
    }
}

fn fetched(own: &Trainer<'_>) -> VariableValues {
    ["table", "weight"].map(|name| (name, own.fetch(name).expect("it is there").bytes().to_vec())).into()
}

/// The values after a run of these batches in one process.
fn expected(all: &[Data]) -> VariableValues {
    expected_of(program(), all)
}

fn expected_of(program: Program, all: &[Data]) -> VariableValues {
    let graph = Graph::new(program).expect("it is a program");
    let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
    let mut run = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("the program begins");
    for data in all {
        tensors(data).into_iter().for_each(|(name, tensor)| run.set(name, tensor).expect("it fits"));
        run.step().expect("a step succeeds");
    }
    ["table", "weight"].map(|name| (name, run.value(name).expect("it is there").tensor().bytes().to_vec())).into()
}

fn refused(own: &mut Trainer<'_>, expected: &str) {
    let text = own.step().expect_err("the step fails").to_string();
    assert!(text.contains(expected), "found {text:?}; expected {expected:?} in it");
}

#[test]
fn a_step_that_an_op_refuses_changes_nothing() {
    let parts = parts(1, 2);
    let running = Local::start(&Job::new(2, 1));
    let client = client(&running.coordinator(), 0);
    initialise(&client, &parts).expect("it is chosen");
    let mut own = Trainer::new(&client, &parts).expect("the part can run");
    let mut prng = SeededPrng::new(7);
    let all: Vec<Data> = (0..6).map(|_| data(&mut prng)).collect();
    refused(&mut own, "found no value in data");
    refused(&mut own, "found no value in data");
    for (step, data) in all.iter().enumerate() {
        let [mut bad_ids, mut bad_label] = [data.clone(), data.clone()];
        bad_ids[0][BATCH - 1] = i64::try_from(HEIGHT).expect("it is small");
        bad_label[1][2] = -1;
        for (bad, text) in [(&bad_label, "label -1 in row 2; expected 0 to 2"), (&bad_ids, "id 40 at place 6")] {
            for _ in 0..step % 3 {
                feed(&mut own, bad);
                refused(&mut own, text);
            }
        }
        let mut short = data.clone();
        short[1].pop();
        feed(&mut own, &short);
        refused(&mut own, "where batch is 7");
        feed(&mut own, data);
        own.step().expect("a step succeeds");
    }
    assert!(fetched(&own) == expected(&all), "a step that failed has left something");
    running.stop();
}

/// The layer's server is killed once the table's server has the rows, and the table's server before it returns any.
#[test]
fn a_step_whose_server_was_killed_counts_once() {
    let folder = folder();
    let parts = parts(1, 2);
    let job = Job::new(2, 1).with_checkpoints(folder.path()).with("--journal", "on");
    let mut servers = Processes::start(job);
    let client = client_with(&servers.coordinator(), 0, SHORT);
    initialise(&client, &parts).expect("it is chosen");
    assert_eq!((client.servers_of("table"), client.servers_of("weight")), (Ok(vec![0]), Ok(vec![1])));
    let mut own = Trainer::new(&client, &parts).expect("the part can run");
    let mut prng = SeededPrng::new(8);
    let all: Vec<Data> = (0..6).map(|_| data(&mut prng)).collect();
    for (step, data) in all.iter().enumerate() {
        feed(&mut own, data);
        if step == 2 || step == 4 {
            let before = client.list_rows("table").expect("it is a table").len();
            servers.kill(1);
            refused(&mut own, "sending gradients of \"weight\"");
            refused(&mut own, "sending gradients of \"weight\"");
            assert!(client.list_rows("table").expect("it is a table").len() >= before, "the rows are there");
            let text = own.feed("ids", tensors(data)[0].1.clone()).expect_err("it is not over").to_string();
            assert!(text.contains("found a step whose gradients are not all sent"), "{text}");
            servers.start_again(1);
        }
        if step == 3 {
            servers.kill(0);
            refused(&mut own, "fetching \"table\"");
            servers.start_again(0);
        }
        own.step().expect("a step succeeds");
    }
    assert!(fetched(&own) == expected(&all), "a step that was repeated counts otherwise than once");
    servers.terminate();
}

#[test]
fn initialisation_sets_the_mode_and_merge_of_the_job() {
    let one = |mode, merge| {
        let transpiler = ParameterServer { mode, merge, ..ParameterServer::default() };
        parts_of(program(), transpiler, Cluster { trainers: 2, servers: 1 })
    };
    let cases = [
        (Mode::Sync, Merge::Sum, Merge::Sum),
        (Mode::Sync, Merge::Mean, Merge::Mean),
        (Mode::Async, Merge::Sum, Merge::Mean),
        (Mode::Staleness { bound: 3 }, Merge::Mean, Merge::Mean),
    ];
    for (mode, merge, kept) in cases {
        let running = Local::start(&Job::new(1, 2));
        let client = client(&running.coordinator(), 0);
        initialise(&client, &one(mode, merge)).expect("it is chosen");
        assert_eq!(client.sharing(), Ok(JobSharing { mode, merge: kept, trainers: 2 }));
        running.stop();
    }
}

fn said(client: &Client, parts: &[ProgramPart]) -> String {
    initialise(client, parts).expect_err("it does not fit").to_string()
}

#[test]
fn a_job_with_another_mode_or_merge_is_refused_with_both_named() {
    let running = Local::start(&Job::new(1, 2));
    let first = client(&running.coordinator(), 0);
    assert_eq!(said(&first, &parts(3, 1)), "found a job of 2 trainers; expected 3, for which the program was divided");
    let settings = OptimizerSettings::from_text("mode: Async merge: Sum").expect("it is settings");
    assert_eq!(first.begin_init(&settings), Ok(true));
    first.finish_init().expect("there is nothing to wait for");
    let second = client(&running.coordinator(), 1);
    let expected = "found a job in mode async, merge sum, 2 trainers; expected mode sync, merge mean, 2 trainers, for \
                    which the program was divided";
    let beginning = "found mode Sync in the configuration; expected Async, as the job has, or none: servers are \
                     started with another --mode";
    assert_eq!(said(&second, &parts(2, 1)), beginning);
    let made = Trainer::new(&second, &parts(2, 1)).map(|_| ()).expect_err("it does not fit").to_string();
    assert_eq!(made, expected);
    running.stop();
}

/// The program with other initialising ops.
fn begun(change: impl Fn(&mut Vec<Op>)) -> Vec<ProgramPart> {
    let mut program = program();
    change(&mut program.blocks[0].ops);
    parts_of(program, ParameterServer::default(), Cluster { trainers: 1, servers: 1 })
}

fn filler<'a>(ops: &'a mut [Op], name: &str) -> &'a mut Op {
    let fills = |op: &&mut Op| op.role == OpRole::Initialise && op.outputs == [name];
    ops.iter_mut().find(fills).expect("it has a beginning")
}

fn temporary(name: &str, shape: [u64; 2]) -> Variable {
    Variable { name: name.to_owned(), facts: VariableFacts::fixed(Float32, &shape), purpose: Purpose::Temporary }
}

fn scaled(name: &str) -> Op {
    let names = vec![name.to_owned()];
    Op { kind: OpKind::Scale { factor: 2.0 }, inputs: names.clone(), outputs: names, role: OpRole::Initialise }
}

#[test]
fn all_initialising_ops_run() {
    let parts = begun(|ops| {
        filler(ops, "weight").kind = OpKind::Fill { value: 3.0 };
        let place = ops.iter().position(|op| op.role != OpRole::Initialise).expect("there are others");
        ops.splice(place..place, [scaled("weight"), scaled("weight")]);
        // The last initialiser of a variable wins.
        let again = filler(ops, "table").clone();
        filler(ops, "table").kind = OpKind::Fill { value: 5.0 };
        ops.insert(place, again);
    });
    let running = Local::start(&Job::new(1, 1));
    let client = client(&running.coordinator(), 0);
    initialise(&client, &parts).expect("it is chosen");
    let own = Trainer::new(&client, &parts).expect("the part can run");
    let weight = own.fetch("weight").expect("it is there");
    assert_eq!(weight.elements(), &Elements::Float32(vec![12.0; usize::try_from(WIDTH * CLASSES).expect("few")]));
    assert!(fetched(&own)["table"] == expected(&[])["table"], "the table begins as its last op says");
    running.stop();
}

#[test]
fn a_trainer_that_cannot_initialise_lets_another_one_at_once() {
    let running = Local::start(&Job::new(1, 2));
    let first = client(&running.coordinator(), 0);
    // The first trainer's product would need two matrices of 2^42 elements.
    let mut large = program();
    let (left, right) = (temporary("left", [WIDTH, 1 << 42]), temporary("right", [1 << 42, CLASSES]));
    large.blocks[0].variables.extend([left, right]);
    let product = OpKind::Matmul { transpose_left: false, transpose_right: false };
    let inputs = vec!["left".to_owned(), "right".to_owned()];
    *filler(&mut large.blocks[0].ops, "weight") =
        Op { kind: product, inputs, outputs: vec!["weight".to_owned()], role: OpRole::Initialise };
    let fill = |name: &str| Op {
        kind: OpKind::Fill { value: 1.0 },
        inputs: Vec::new(),
        outputs: vec![name.to_owned()],
        role: OpRole::Initialise,
    };
    large.blocks[0].ops.splice(0..0, ["left", "right"].map(fill));
    let large = parts_of(large, ParameterServer::default(), Cluster { trainers: 2, servers: 1 });
    let refused = said(&first, &large);
    assert!(refused.contains("bytes of outputs beside"), "{refused}");
    // The first trainer is alive, and its lease would end after the deadline of this one.
    let second = client_with(&running.coordinator(), 1, SHORT);
    initialise(&second, &parts(2, 1)).expect("it is chosen");
    initialise(&first, &parts(2, 1)).expect("it is initialised by now");
    running.stop();
}

#[test]
fn initialising_ops_that_servers_cannot_run_are_refused() {
    let running = Local::start(&Job::new(1, 1));
    let client = client(&running.coordinator(), 0);
    let fill = |name: &'static str, value| begun(move |ops| filler(ops, name).kind = OpKind::Fill { value });
    let only_scaled = |name: &'static str| begun(move |ops| *filler(ops, name) = scaled(name));
    for (parts, expected) in [
        (
            only_scaled("weight"),
            "server 0, parameter \"weight\": found the initialising op scale of \"weight\", which no earlier op \
             writes; expected an op that does",
        ),
        (
            only_scaled("table"),
            "server 0, parameter \"table\": found scale as the initialising op of a table; expected fill, uniform, \
             gaussian or given, whose rows do not depend on each other",
        ),
        (
            fill("table@count", 3.0),
            "server 0, parameter \"table\": found fill(value=3.0) as the initial value of the state \"table@count\"; \
             expected fill(value=0.0), as in the rule",
        ),
        (
            begun(|ops| ops.retain(|op| op.role != OpRole::Initialise || op.outputs != ["weight"])),
            "server 0, parameter \"weight\": found no initialising op; expected one",
        ),
    ] {
        let found = said(&client, &parts);
        assert!(found.starts_with(expected), "{found}");
    }
    running.stop();
}

/// The flow of a parameter begins with the states of its rule; from others the executor goes on.
#[test]
fn a_state_that_does_not_begin_as_in_its_rule_is_that_of_one_process() {
    let begin = |ops: &mut Vec<Op>| filler(ops, "weight@state.momentum").kind = OpKind::Fill { value: 0.5 };
    let mut changed = program();
    begin(&mut changed.blocks[0].ops);
    let parts = begun(begin);
    let running = Local::start(&Job::new(1, 1));
    let client = client(&running.coordinator(), 0);
    initialise(&client, &parts).expect("it is chosen");
    let mut own = Trainer::new(&client, &parts).expect("the part can run");
    let mut prng = SeededPrng::new(9);
    let all: Vec<Data> = (0..6).map(|_| data(&mut prng)).collect();
    for data in &all {
        feed(&mut own, data);
        own.step().expect("a step succeeds");
    }
    assert!(fetched(&own) == expected_of(changed, &all), "the values are others");
    assert!(fetched(&own) != expected(&all), "the state begins as in the rule");
    running.stop();
}

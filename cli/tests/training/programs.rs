//! A program that is divided over trainers and the servers of a job computes what it computes in one process, to the
//! bit, and depends on no number of servers or shards.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cluster::job::{Job, Local, client, folder};
use crate::cluster::seeded::SeededPrng;
use pserver_cli::quickstart::digits::Digits;
use pserver_cli::quickstart::network;
use pserver_client::{Client, DestinationSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::rows::Initializer;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, ProcessRates, ProgramPart, Transpiler};
use pserver_program::{
    Builder, Dim, Elements, Graph, Op, OpKind, OpRole, PlainRun, Program, ProgramPeer, Purpose, Tensor, VariableValue,
    append_backward, append_optimizer,
};
use pserver_trainer::{Trainer, initialise};

const STEPS: usize = 20;
/// Pieces this small cut the tables and the layers over the servers.
const CHUNK_BYTES: u32 = 4096;

/// Inputs of a step.
type Data = Vec<(&'static str, Tensor)>;
/// Every parameter's bytes, by name.
type VariableValues = BTreeMap<String, Vec<u8>>;

const LARGE: u64 = 500;
const SMALL: u64 = 30;
const WIDTH: u64 = 16;
const BATCH: usize = 12;

/// Ids of which some repeat, and the labels.
fn table_data(prng: &mut SeededPrng) -> Data {
    let mut ids = |bound: u64| {
        let bound = usize::try_from(bound).expect("it is small");
        let ids =
            (0..BATCH).map(|_| i64::try_from(prng.below(bound) * prng.below(bound) / bound).expect("it is small"));
        Tensor::new([BATCH as u64], Elements::Int64(ids.collect()))
    };
    let (one, other) = (ids(LARGE), ids(SMALL));
    let labels = (0..BATCH).map(|_| if prng.below(2) == 0 { 0.0 } else { 1.0 }).collect();
    let label = Tensor::new([BATCH as u64, 1], Elements::Float32(labels));
    vec![("one", one), ("other", other), ("label", label)]
}

/// A program, what each trainer feeds in each step, and how many bytes it may move for that.
struct Case {
    graph: Graph,
    data: Vec<Vec<Data>>,
    moved_max: u64,
}

/// Runs a trainer's part.
fn run(own: &mut Trainer<'_>, data: &[Data]) {
    for step in data {
        for (name, tensor) in step {
            own.feed(name, tensor.clone()).expect("it fits");
        }
        own.step().expect("a step succeeds");
    }
}

/// Each parameter of a server's part is on that server, and on no other.
fn check_homes(client: &Client, parts: &[ProgramPart]) {
    for part in parts {
        let ProgramPeer::Server(server) = part.peers[0] else { continue };
        let kept = part.graph.variables().iter().filter(|known| known.purpose == Purpose::Parameter);
        for name in kept.map(|known| &known.name) {
            let found = client.servers_of(name).expect("it is declared");
            assert_eq!(found.into_iter().map(u32::from).collect::<Vec<_>>(), [server], "{name:?}");
        }
    }
}

/// A trainer holds no more rows of a table than a step may ask for.
fn check_rows(own: &Trainer<'_>, graph: &Graph) {
    let of_tables = |name: &str| ["large", "small"].iter().any(|table| name.starts_with(table));
    for variable in graph.variables().iter().filter(|known| of_tables(&known.name)) {
        let bytes = own.value(&variable.name).map_or(0, VariableValue::byte_count);
        let most = 5 * BATCH as u64 * (8 + WIDTH * 4);
        assert!(bytes <= most, "{:?} has {bytes} bytes; at most {most} are expected", variable.name);
    }
}

impl Case {
    fn digits(trainers: u32, optimizer: &str) -> Self {
        let digits = Digits::load().expect("the digits are in the program");
        let part = |trainer| digits.part(trainer, trainers).expect("there is a share for everybody");
        let data =
            |trainer| part(trainer).chunks(16).cycle().take(STEPS).map(|batch| network::data(batch).into()).collect();
        Self {
            graph: network::program(optimizer, 1).expect("the network is a program"),
            data: (0..trainers).map(data).collect(),
            moved_max: u64::MAX,
        }
    }

    /// Two tables, whose rows meet, and a layer on top.
    fn tables(trainers: u32, optimizer: &str) -> Self {
        let p = Builder::new();
        let id = |name| p.data(name, Int64, [Dim::Batch]);
        let label = p.data("label", Float32, [Dim::Batch, Dim::Fixed(1)]);
        let random = Initializer::Gaussian { mean: 0.0, deviation: 0.5 };
        let large = p.parameter("large", Float32, &[LARGE, WIDTH], random, 3);
        let small = p.parameter("small", Float32, &[SMALL, WIDTH], Initializer::Constant(0.25), 0);
        let weight = p.parameter("weight", Float32, &[WIDTH, 1], random, 4);
        let met = p.mul(p.lookup_table(large, id("one")), p.lookup_table(small, id("other")));
        p.named("loss", p.mean(p.sigmoid_cross_entropy(p.matmul(met, weight), label)));
        let mut program = p.finish().expect("it fits").into_program();
        let gradients = append_backward(&mut program, "loss").expect("it has gradients");
        append_optimizer(&mut program, optimizer, &gradients).expect("it has updates");
        Self::of_tables(program, trainers)
    }

    /// Of a program whose data are those of tables.
    fn of_tables(program: Program, trainers: u32) -> Self {
        let data = |trainer: u32| {
            let mut prng = SeededPrng::new(trainer.into());
            (0..STEPS).map(|_| table_data(&mut prng)).collect()
        };
        // Only the rows of a step's lookups are transferred: far less than the whole large table twice a step.
        let moved_max = STEPS as u64 * LARGE * WIDTH * 4 * 2 / 5;
        let graph = Graph::new(program).expect("it is a program");
        Self { graph, data: (0..trainers).map(data).collect(), moved_max }
    }

    /// The same, with values from outside of the program for everything that it initialises: two tables, of which one
    /// is cut, and a layer.
    fn given(self) -> Self {
        let mut program = self.graph.into_program();
        let mut prng = SeededPrng::new(11);
        let mut values = BTreeMap::new();
        for name in ["large", "small", "weight"] {
            let mut fillers = program.blocks[0].ops.iter_mut().filter(|op| op.outputs == [name]);
            fillers.next().expect("it is initialised").kind = OpKind::Given { name: format!("my {name}"), first: 0 };
            let known = program.blocks[0].variables.iter().find(|known| known.name == name).expect("it is declared");
            let (element_type, shape) = known.facts.fixed_dense().expect("a parameter is dense");
            let mut tensor = Tensor::zeros(element_type, &shape);
            for bytes in tensor.bytes_mut().chunks_exact_mut(4) {
                let value = f32::from(u16::try_from(prng.below(1000)).expect("it is small")) / 1000.0 - 0.5;
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            values.insert(format!("my {name}"), tensor);
        }
        let graph = Graph::new(program).and_then(|graph| graph.with_values(Arc::new(values)));
        Self { graph: graph.expect("the values fit"), ..self }
    }

    /// Two tables of which one is looked up by fed ids, by ids that are computed from others, and by ids that are
    /// computed from the rows of these. The other is looked up by the same fed ids; one of its rows is padding.
    fn computed_ids(trainers: u32) -> Self {
        let p = Builder::new();
        let (one, other) = (p.data("one", Int64, [Dim::Batch]), p.data("other", Int64, [Dim::Batch]));
        let label = p.data("label", Float32, [Dim::Batch, Dim::Fixed(1)]);
        let random = Initializer::Gaussian { mean: 0.0, deviation: 0.5 };
        let large = p.parameter("large", Float32, &[LARGE, WIDTH], random, 3);
        let small = p.parameter("small", Float32, &[SMALL, WIDTH], random, 5);
        let weight = p.parameter("weight", Float32, &[WIDTH, 1], random, 4);
        let ids_of = |x| p.cast(p.scale(p.sigmoid(x), LARGE as f64 - 0.5), Int64);
        let first = p.lookup_table(large, one);
        let second = p.lookup_table(large, ids_of(p.scale(p.cast(other, Float32), 0.1)));
        let third = p.lookup_table(large, ids_of(p.reduce_sum(p.mul(first, second), 1)));
        let [kept] = p.op(OpKind::LookupTable { padding: Some(2) }, &[small, other]);
        let [again] = p.op(OpKind::LookupTable { padding: None }, &[small, other]);
        let met = p.sum(&[first, second, third, kept, again]);
        p.named("loss", p.mean(p.sigmoid_cross_entropy(p.matmul(met, weight), label)));
        let mut program = p.finish().expect("it fits").into_program();
        let gradients = append_backward(&mut program, "loss").expect("it has gradients");
        append_optimizer(&mut program, TABLE_OPTIMIZERS[0], &gradients).expect("it has updates");
        Self::of_tables(program, trainers)
    }

    fn parameters(&self) -> impl Iterator<Item = String> {
        let all = self.graph.variables().iter().filter(|variable| variable.purpose == Purpose::Parameter);
        all.map(|variable| variable.name.clone())
    }

    /// In one process, for one trainer.
    fn local(&self) -> VariableValues {
        let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
        let mut run = PlainRun::new(&self.graph, &mut arithmetic, &mut kernels).expect("the program begins");
        for step in &self.data[0] {
            for (name, tensor) in step {
                run.set(name, tensor.clone()).expect("it fits");
            }
            run.step().expect("a step succeeds");
        }
        let bytes = |name: &String| run.value(name).expect("a parameter has a value").tensor().bytes().to_vec();
        self.parameters().map(|name| (name.clone(), bytes(&name))).collect()
    }

    fn parts(&self, servers: u16) -> Vec<ProgramPart> {
        let trainers = u32::try_from(self.data.len()).expect("they are few");
        // With free messages, ops and trainer memory, the placement cuts every parameter that may be cut.
        let server =
            ProcessRates { message_seconds: 0.0, op_seconds: 0.0, row_seconds: 0.0, ..ProcessRates::default() };
        let trainer = ProcessRates { flops_per_second: 1e30, memory_bytes_per_second: 1e30, ..server };
        let costs = CostModel { chunk_bytes: CHUNK_BYTES, trainer, server, ..CostModel::default() };
        let cluster = Cluster { trainers, servers: servers.into() };
        ParameterServer::default().transpile(&self.graph, cluster, &costs).expect("the program can be divided")
    }

    /// Against the servers of a job.
    fn distributed(&self, servers: u16, shards: u16) -> VariableValues {
        let trainers = u32::try_from(self.data.len()).expect("they are few");
        let parts = Arc::new(self.parts(servers));
        let job = Job { shards, chunk_bytes: CHUNK_BYTES, ..Job::new(servers, trainers) }.with("--merge", "mean");
        let running = Local::start(&job);
        let coordinator = running.coordinator();
        let train = |trainer: u32, data: &[Data]| {
            let client = client(&coordinator, trainer);
            initialise(&client, &parts).expect("somebody initialises");
            let mut own = Trainer::new(&client, &parts).expect("the part can run");
            check_homes(&client, &parts);
            let before = client.moved();
            run(&mut own, data);
            check_rows(&own, &parts[0].graph);
            let after = client.moved();
            let moved = after.sent + after.received - before.sent - before.received;
            assert!(moved < self.moved_max, "{moved} bytes moved; at most {} are expected", self.moved_max);
            let fetch = |name: String| (name.clone(), own.fetch(&name).expect("it is there").bytes().to_vec());
            self.parameters().map(fetch).collect::<VariableValues>()
        };
        let values = std::thread::scope(|scope| {
            let train = &train;
            let turns = (0..).zip(&self.data);
            let all: Vec<_> = turns.map(|(trainer, data)| scope.spawn(move || train(trainer, data))).collect();
            all.into_iter().map(|one| one.join().expect("a trainer does not panic")).collect::<Vec<_>>()
        });
        running.stop();
        assert!(values.windows(2).all(|pair| pair[0] == pair[1]), "every trainer sees the same in the end");
        values.into_iter().next().expect("there is a trainer")
    }

    /// However many servers and shards, it ends as `expected`.
    fn check(&self, expected: &VariableValues) {
        for (servers, shards) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
            let found = self.distributed(servers, shards);
            for (name, bytes) in expected {
                assert!(found[name] == *bytes, "{servers} servers of {shards} shards: {name:?} differs");
            }
        }
    }
}

const OPTIMIZERS: [&str; 2] =
    ["const_lr { learning_rate: 0.2 }", "optimizer: Adam adam { } const_lr { learning_rate: 0.003 }"];

/// The second rule changes rows without a gradient.
const TABLE_OPTIMIZERS: [&str; 2] = [
    "optimizer: Adagrad adagrad { epsilon: 1e-6 } const_lr { learning_rate: 0.1 }",
    "sgd { momentum: 0.9 } const_lr { learning_rate: 0.05 } l2: 0.01",
];

#[test]
fn one_trainer_equals_one_process() {
    for optimizer in OPTIMIZERS {
        let case = Case::digits(1, optimizer);
        case.check(&case.local());
    }
}

#[test]
fn four_trainers_compute_the_same_for_any_servers_and_shards() {
    let case = Case::digits(4, OPTIMIZERS[1]);
    case.check(&case.distributed(1, 1));
}

#[test]
fn tables_end_as_in_one_process() {
    for optimizer in TABLE_OPTIMIZERS {
        let case = Case::tables(1, optimizer);
        let parts = case.parts(2);
        let pieces = parts[0].graph.variables().iter().filter(|known| known.name.starts_with("large@piece"));
        assert!(pieces.count() >= 2, "the large table is in pieces, or nothing is shown of their beginnings");
        case.check(&case.local());
    }
}

#[test]
fn tables_with_given_values_end_as_in_one_process() {
    let case = Case::tables(1, TABLE_OPTIMIZERS[0]).given();
    let texts: Vec<String> = case.parts(2).iter().map(|part| part.graph.program().to_string()).collect();
    let pieces = texts.iter().filter(|text| text.contains("given(name=\"my large\", first="));
    assert!(pieces.count() >= 1, "a piece begins in the middle of the value:\n{}", texts.join("\n"));
    case.check(&case.local());
}

#[test]
fn tables_of_four_trainers_end_the_same_for_any_servers_and_shards() {
    let case = Case::tables(4, TABLE_OPTIMIZERS[0]);
    case.check(&case.distributed(1, 1));
}

#[test]
fn ids_may_be_computed_also_from_rows() {
    let case = Case::computed_ids(1);
    case.check(&case.local());
    let case = Case::computed_ids(4);
    case.check(&case.distributed(1, 1));
}

#[test]
fn a_table_that_is_read_whole_is_refused() {
    let mut case = Case::tables(1, TABLE_OPTIMIZERS[0]);
    let mut program = case.graph.clone().into_program();
    let total = OpKind::ReduceSum { axes: Vec::new(), keep: false };
    let (inputs, outputs) = (vec!["large".to_owned()], vec!["total".to_owned()]);
    let place = program.blocks[0].ops.iter().position(|op| op.role == OpRole::Forward).expect("there is one");
    program.blocks[0].ops.insert(place, Op { kind: total, inputs, outputs, role: OpRole::Forward });
    case.graph = Graph::new(program).expect("it is a program");
    let running = Local::start(&Job::new(1, 1));
    let client = client(&running.coordinator(), 0);
    let parts = case.parts(1);
    initialise(&client, &parts).expect("it is chosen");
    let text = Trainer::new(&client, &parts).map(|_| ()).expect_err("the table does not travel").to_string();
    let expected = "table \"large\": found reduce_sum that reads it; expected only lookup_table, as the first input";
    assert_eq!(text, expected);
    running.stop();
}

#[test]
fn the_owner_of_a_parameter_is_kept_when_servers_restart() {
    let folder = folder();
    let job = Job { shards: 2, chunk_bytes: CHUNK_BYTES, ..Job::new(3, 1) }.with_checkpoints(folder.path());
    let value: Vec<u8> = (0..5 * 4096_u32).flat_map(u32::to_le_bytes).collect();
    let names = ["everywhere", "zero", "one", "two"];
    let homes = [vec![0, 1, 2], vec![0], vec![1], vec![2]];
    let check = |client: &Client| {
        for (name, home) in names.iter().zip(&homes) {
            assert_eq!(client.servers_of(name).as_ref(), Ok(home), "{name}");
            let mut found = vec![0; value.len()];
            client.pull(&mut [DestinationSlice::new(name, &mut found)]).expect("it is there");
            assert!(found == value, "{name} has another value");
        }
    };
    let running = Local::start(&job);
    let first = client(&running.coordinator(), 0);
    assert_eq!(first.begin_init(&OptimizerSettings::default()), Ok(true));
    for (name, wish) in names.iter().zip(["", "home: 0", "home: 1", "home: 2"]) {
        let settings = OptimizerSettings::from_text(wish).expect("it is a setting");
        first.init_param(name, Float32, &[5 * 4096], &value, &settings).expect("it fits");
    }
    first.finish_init().expect("all is there");
    check(&first);
    drop(first);
    running.stop();
    let running = Local::start(&job);
    check(&client(&running.coordinator(), 0));
    running.stop();
}

#[test]
fn the_owner_setting_is_per_parameter_and_names_a_server_of_the_job() {
    let wish = OptimizerSettings::from_text("home: 1").expect("it is a setting");
    let running = Local::start(&Job::new(1, 1));
    let chosen = client(&running.coordinator(), 0);
    assert_eq!(chosen.begin_init(&OptimizerSettings::default()), Ok(true));
    let text = chosen.init_param("w", Float32, &[1], &[0; 4], &wish).unwrap_err().to_string();
    assert!(text.contains("parameter \"w\": its home is server 1; expected one below 1"), "{text}");
    running.stop();
    let running = Local::start(&Job::new(2, 1));
    let text = client(&running.coordinator(), 0).begin_init(&wish).unwrap_err().to_string();
    assert!(text.contains("home is a setting of one parameter"), "{text}");
    running.stop();
}

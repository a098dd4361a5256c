//! A server runs the ops that a program has around an update: their bits are those of the program in one process, for
//! any servers and trainers, and after a server was killed.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cluster::job::{Job, Local, client, folder};
use crate::cluster::process::Processes;
use crate::cluster::seeded::SeededPrng;
use pserver_client::{Client, DestinationSlice, GradientSlice};
use pserver_core::dtype::ElementType;
use pserver_kernels::cpu::Cpu;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, ProcessRates, ProgramPart, Transpiler};
use pserver_program::{Elements, Graph, PlainArithmetic, PlainRun, Program, Tensor, append_backward};
use pserver_trainer::{Trainer, initialise};

const STEPS: usize = 6;
const CHUNK_BYTES: u32 = 4096;
const BATCH: u64 = 5;
const ROWS: u64 = 96;
const COLUMNS: u64 = 40;

/// From data to the loss.
const FORWARD: &str = "
    data x: float32[batch, 96]
    data y: float32[batch, 40]
    parameter w: float32[96, 40]
    parameter b: float32[40]
    initialise w = uniform(low=-0.5, high=0.5, seed=7)
    initialise b = fill(value=0.0)
    forward product = matmul(x, w)
    forward scores = add(product, b)
    forward losses = sigmoid_cross_entropy(scores, y)
    forward loss = mean(losses)
";
/// The optimizer alone, with gradients as data.
const GIVEN: &str = "
    data w@gradient: float32[96, 40]
    data b@gradient: float32[40]
    parameter w: float32[96, 40]
    parameter b: float32[40]
    initialise w = uniform(low=-0.5, high=0.5, seed=7)
    initialise b = fill(value=0.0)
";
/// Clipping of both parameters by the norm of both gradients.
const GLOBAL_NORM: Stage = Stage {
    name: "clip by the norm of all gradients",
    lines: "
            temporary limit: float32[]
            state w@velocity: float32[96, 40]
            initialise w@velocity = fill(value=0.0)
            optimize w@squares = mul(w@gradient, w@gradient)
            optimize w@square = reduce_sum(w@squares)
            optimize b@squares = mul(b@gradient, b@gradient)
            optimize b@square = reduce_sum(b@squares)
            optimize square = sum(w@square, b@square)
            optimize norm = sqrt(square)
            optimize limit = fill(value=0.03)
            optimize divisor = max(limit, norm)
            optimize factor = div(limit, divisor)
            optimize w@clipped = mul(w@gradient, factor)
            optimize b@clipped = mul(b@gradient, factor)
            optimize b, b@count = update(b, b@clipped, b@count, config=\"const_lr { learning_rate: 0.5 }\")
            optimize w, w@count, w@velocity = update(w, w@clipped, w@count, w@velocity,
                config=\"sgd { momentum: 0.9 } const_lr { learning_rate: 0.5 }\")",
    is_cut: false,
};

/// The counts.
const COUNTS: &str = "
    state w@count: int64[]
    state b@count: int64[]
    initialise w@count = fill(value=0.0)
    initialise b@count = fill(value=0.0)
";
/// The update of `b`, which has no op around it.
const UPDATE: &str = "
    optimize b, b@count = update(b, b@gradient, b@count, config=\"const_lr { learning_rate: 0.5 }\")
";

/// An optimizer of `w`: its lines, and whether its parameter may be cut.
struct Stage {
    name: &'static str,
    lines: &'static str,
    is_cut: bool,
}

const STAGES: [Stage; 14] = [
    GLOBAL_NORM,
    Stage {
        name: "momentum in ops",
        lines: "
            state w@speed: float32[96, 40]
            initialise w@speed = fill(value=0.25)
            optimize kept = scale(w@speed, factor=0.9)
            optimize w@speed = add(kept, w@gradient)
            optimize move = scale(w@speed, factor=-0.5)
            optimize w = add(w, move)",
        is_cut: true,
    },
    Stage {
        name: "squares of both moments in ops",
        lines: "
            temporary small: float32[]
            state w@first: float32[96, 40]
            state w@second: float32[96, 40]
            initialise w@first = fill(value=0.0)
            initialise w@second = fill(value=0.0)
            optimize first@old = scale(w@first, factor=0.9)
            optimize first@new = scale(w@gradient, factor=0.1)
            optimize w@first = add(first@old, first@new)
            optimize square = mul(w@gradient, w@gradient)
            optimize second@old = scale(w@second, factor=0.99)
            optimize second@new = scale(square, factor=0.01)
            optimize w@second = add(second@old, second@new)
            optimize small = fill(value=1e-6)
            optimize root = sqrt(w@second)
            optimize below = add(root, small)
            optimize ratio = div(w@first, below)
            optimize move = scale(ratio, factor=-0.01)
            optimize w = add(w, move)",
        is_cut: true,
    },
    Stage {
        name: "a step of one length in ops",
        lines: "
            optimize squares = mul(w@gradient, w@gradient)
            optimize square = reduce_sum(squares)
            optimize norm = sqrt(square)
            optimize unit = div(w@gradient, norm)
            optimize move = scale(unit, factor=-0.1)
            optimize w = add(w, move)",
        is_cut: false,
    },
    Stage {
        name: "a softmax, which no stage has",
        lines: "
            optimize weights = softmax(w@gradient)
            optimize weighted = mul(w@gradient, weights)
            optimize move = scale(weighted, factor=-0.5)
            optimize w = add(w, move)",
        is_cut: false,
    },
    Stage {
        name: "a state that both parameters share",
        lines: "
            state scale: float32[]
            initialise scale = fill(value=1.0)
            optimize w@squares = mul(w@gradient, w@gradient)
            optimize w@square = reduce_sum(w@squares)
            optimize b@squares = mul(b@gradient, b@gradient)
            optimize b@square = reduce_sum(b@squares)
            optimize square = add(w@square, b@square)
            optimize scale = add(scale, square)
            optimize root = sqrt(scale)
            optimize w@unit = div(w@gradient, root)
            optimize w@move = scale(w@unit, factor=-0.5)
            optimize w = add(w, w@move)
            optimize b@unit = div(b@gradient, root)
            optimize b@move = scale(b@unit, factor=-0.5)
            optimize b = add(b, b@move)",
        is_cut: false,
    },
    Stage {
        name: "scale",
        lines: "
            optimize half = scale(w@gradient, factor=0.3)
            optimize w, w@count = update(w, half, w@count, config=\"const_lr { learning_rate: 0.5 }\")",
        is_cut: true,
    },
    Stage {
        name: "clip by value",
        lines: "
            temporary low: float32[]
            temporary high: float32[]
            state w@first: float32[96, 40]
            state w@second: float32[96, 40]
            initialise w@first = fill(value=0.0)
            initialise w@second = fill(value=0.0)
            optimize low = fill(value=-0.002)
            optimize high = fill(value=0.002)
            optimize above = max(w@gradient, low)
            optimize bounded = min(above, high)
            optimize w, w@count, w@first, w@second = update(w, bounded, w@count, w@first, w@second,
                config=\"optimizer: Adam adam { } const_lr { learning_rate: 0.01 }\")",
        is_cut: true,
    },
    Stage {
        name: "clip by norm",
        lines: "
            temporary limit: float32[]
            state w@velocity: float32[96, 40]
            initialise w@velocity = fill(value=0.0)
            optimize squares = mul(w@gradient, w@gradient)
            optimize square = reduce_sum(squares)
            optimize norm = sqrt(square)
            optimize limit = fill(value=0.03)
            optimize divisor = max(limit, norm)
            optimize factor = div(limit, divisor)
            optimize clipped = mul(w@gradient, factor)
            optimize w, w@count, w@velocity = update(w, clipped, w@count, w@velocity,
                config=\"sgd { momentum: 0.9 } const_lr { learning_rate: 0.5 }\")",
        is_cut: false,
    },
    Stage {
        name: "clip_norm of what the ops make",
        lines: "
            optimize root = abs(w@gradient)
            optimize signed = sqrt(root)
            optimize w, w@count = update(w, signed, w@count,
                config=\"const_lr { learning_rate: 0.5 } clip_norm: 0.7\")",
        is_cut: false,
    },
    Stage {
        name: "a schedule as the rate",
        lines: "
            temporary base: float32[]
            state w@start: float32[]
            state w@first: float32[96, 40]
            state w@second: float32[96, 40]
            initialise w@start = fill(value=0.05)
            initialise w@first = fill(value=0.0)
            initialise w@second = fill(value=0.0)
            optimize step = cast(w@count, to=float32)
            optimize base = fill(value=0.7)
            optimize decay = pow(base, step)
            optimize rate = mul(w@start, decay)
            optimize w, w@count, w@first, w@second = update(w, w@gradient, w@count, w@first, w@second, rate,
                config=\"optimizer: Adam adam { } rate_scale: 0.5\")",
        is_cut: true,
    },
    Stage {
        name: "a schedule as a factor",
        lines: "
            temporary steps: float64[]
            temporary one: float64[]
            optimize step = cast(w@count, to=float64)
            optimize steps = fill(value=3.0)
            optimize one = fill(value=1.0)
            optimize share = div(step, steps)
            optimize warm = min(share, one)
            optimize warmed = exp(warm)
            optimize narrow = cast(warmed, to=float32)
            optimize g = mul(w@gradient, narrow)
            optimize w, w@count = update(w, g, w@count, config=\"const_lr { learning_rate: 0.1 }\")",
        is_cut: true,
    },
    Stage {
        name: "an average that pulls its parameter",
        lines: "
            state w@average: float32[96, 40]
            initialise w@average = fill(value=0.25)
            optimize far = sub(w, w@average)
            optimize pull = scale(far, factor=0.01)
            optimize pulled = add(w@gradient, pull)
            optimize w, w@count = update(w, pulled, w@count, config=\"const_lr { learning_rate: 0.5 }\")
            optimize old = scale(w@average, factor=0.9)
            optimize new = scale(w, factor=0.1)
            optimize w@average = add(old, new)",
        is_cut: true,
    },
    Stage {
        name: "a user's rule between ops on gradient and parameter",
        lines: "
            temporary lowest: float32[]
            temporary third: float32[96, 40]
            state w@m: float32[96, 40]
            initialise w@m = fill(value=0.0)
            optimize mean = mean(w)
            optimize centred = sub(w, mean)
            optimize sign = sign(centred)
            optimize third = fill(value=0.001)
            optimize decay = mul(third, sign)
            optimize g = sum(w@gradient, decay, decay)
            optimize w, w@count, w@m = update(w, g, w@count, w@m,
                config=\"rule: 'state m = 0; m = 0.9*m + g; w -= lr*sign(m)' const_lr { learning_rate: 0.01 }\")
            optimize lowest = fill(value=-0.4)
            optimize raised = max(w, lowest)
            optimize is_raised = greater(raised, w@gradient)
            optimize kept = mul(raised, is_raised)
            optimize w = add(kept, lowest)",
        is_cut: false,
    },
];

/// Inputs of a step.
type Data = [(&'static str, Tensor); 2];
type VariableValues = BTreeMap<&'static str, Vec<u8>>;

fn data(trainer: u64) -> Vec<Data> {
    let mut prng = SeededPrng::new(trainer);
    let mut number = |below: usize| f32::from(u16::try_from(prng.below(below)).expect("it is small"));
    let mut tensor = |columns: u64, below: usize, factor: f32| {
        let count = usize::try_from(BATCH * columns).expect("it is small");
        let values = (0..count).map(|_| number(below) * factor).collect();
        Tensor::new([BATCH, columns], Elements::Float32(values))
    };
    (0..STEPS).map(|_| [("x", tensor(ROWS, 2000, 0.001)), ("y", tensor(COLUMNS, 2, 1.0))]).collect()
}

/// The lines before those of a stage.
fn common(lines: &str) -> String {
    let update = if lines.contains("optimize b,") || lines.contains("optimize b =") { "" } else { UPDATE };
    format!("{COUNTS}\n{update}")
}

fn program(lines: &str) -> Program {
    format!("block 0 {{\n{lines}\n}}").parse().unwrap_or_else(|failure| panic!("{failure}\n{lines}"))
}

fn graph(program: Program) -> Graph {
    Graph::new(program).unwrap_or_else(|failure| panic!("{failure}"))
}

/// Forward and backward.
fn gradients(forward: &str) -> Program {
    let mut program = program(forward);
    append_backward(&mut program, "loss").expect("it has gradients");
    program
}

/// A program with these optimizer lines.
fn whole(forward: &str, lines: &str) -> Graph {
    let text = gradients(forward).to_string();
    let body = text.trim_end().strip_suffix('}').expect("it ends with a brace");
    graph(format!("{body}\n{lines}\n}}").parse().unwrap_or_else(|failure| panic!("{failure}")))
}

fn parts(lines: &str, trainers: u32, servers: u32) -> Vec<ProgramPart> {
    // With free messages, ops and trainer memory, the placement cuts every parameter that may be cut.
    let server = ProcessRates { message_seconds: 0.0, op_seconds: 0.0, ..ProcessRates::default() };
    let trainer = ProcessRates { flops_per_second: 1e30, memory_bytes_per_second: 1e30, ..server };
    let costs = CostModel { chunk_bytes: CHUNK_BYTES, trainer, server, ..CostModel::default() };
    let cluster = Cluster { trainers, servers };
    let graph = whole(FORWARD, &format!("{}\n{lines}", common(lines)));
    ParameterServer::default().transpile(&graph, cluster, &costs).expect("the program can be divided")
}

/// In one process, op after op: the gradients of every trainer, their mean, and the optimizer on it.
fn local(lines: &str, all: &[Vec<Data>]) -> VariableValues {
    let (computing, optimizing) =
        (graph(gradients(FORWARD)), graph(program(&format!("{GIVEN}\n{}\n{lines}", common(lines)))));
    let (mut fast, mut fast_kernels) = (CpuArithmetic::default(), Cpu::default());
    let (mut plain, mut kernels) = (PlainArithmetic, Cpu::default());
    let mut compute = PlainRun::new(&computing, &mut fast, &mut fast_kernels).expect("it begins");
    let mut optimize = PlainRun::new(&optimizing, &mut plain, &mut kernels).expect("it begins");
    let value = |run: &PlainRun<'_>, name: &str| run.value(name).expect("it has a value").tensor().clone();
    for step in 0..STEPS {
        for name in ["w", "b"] {
            compute.set(name, value(&optimize, name)).expect("it fits");
        }
        let mut sums: [Vec<f32>; 2] = Default::default();
        for data in all {
            data[step].iter().for_each(|(name, tensor)| compute.set(name, tensor.clone()).expect("it fits"));
            compute.step().expect("a step succeeds");
            for (sum, name) in sums.iter_mut().zip(["w@gradient", "b@gradient"]) {
                let gradient = value(&compute, name);
                let Elements::Float32(gradient) = gradient.elements() else { panic!("gradients are of f32") };
                sum.resize(gradient.len(), 0.0);
                sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
            }
        }
        for (sum, name) in sums.into_iter().zip(["w@gradient", "b@gradient"]) {
            let share = 1.0 / f32::from(u8::try_from(all.len()).expect("trainers are few"));
            let mean = sum.iter().map(|sum| sum * share).collect();
            let shape = if name == "w@gradient" { vec![ROWS, COLUMNS] } else { vec![COLUMNS] };
            optimize.set(name, Tensor::new(shape, Elements::Float32(mean))).expect("it fits");
        }
        optimize.step().expect("a step succeeds");
    }
    ["w", "b"].into_iter().map(|name| (name, value(&optimize, name).bytes().to_vec())).collect()
}

fn step(own: &mut Trainer<'_>, data: &Data) {
    data.iter().for_each(|(name, tensor)| own.feed(name, tensor.clone()).expect("it fits"));
    own.step().expect("a step succeeds");
}

fn fetched(own: &Trainer<'_>) -> VariableValues {
    ["w", "b"].into_iter().map(|name| (name, own.fetch(name).expect("it is there").bytes().to_vec())).collect()
}

fn train(client: &Client, parts: &[ProgramPart], data: &[Data]) -> VariableValues {
    initialise(client, parts).unwrap_or_else(|failure| panic!("{failure}"));
    let mut own = Trainer::new(client, parts).expect("the part can run");
    data.iter().for_each(|data| step(&mut own, data));
    let said = own.fetch("w@count").expect_err("it is a state").to_string();
    assert!(said.ends_with("; states of the optimizer are with the servers alone"), "{said}");
    fetched(&own)
}

/// Against the servers of a job.
fn distributed(lines: &str, all: &[Vec<Data>], (servers, shards): (u16, u16)) -> VariableValues {
    let trainers = u32::try_from(all.len()).expect("they are few");
    let parts = Arc::new(parts(lines, trainers, servers.into()));
    let job = Job { shards, chunk_bytes: CHUNK_BYTES, ..Job::new(servers, trainers) };
    let running = Local::start(&job);
    let coordinator = running.coordinator();
    let values = std::thread::scope(|scope| {
        let (parts, coordinator) = (&parts, &coordinator);
        let turns = (0..).zip(all);
        let threads = turns.map(|(number, data)| scope.spawn(move || train(&client(coordinator, number), parts, data)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|one| one.join().expect("a trainer does not panic")).collect::<Vec<_>>()
    });
    running.stop();
    assert!(values.windows(2).all(|pair| pair[0] == pair[1]), "every trainer sees the same in the end");
    values.into_iter().next().expect("there is a trainer")
}

/// A table whose rows are read by a few ids, and the ops around its update, which change rows without a gradient.
const TABLE: &str = "
    data ids: int64[batch]
    data y: float32[batch, 8]
    parameter t: float32[300, 8]
    initialise t = uniform(low=-0.5, high=0.5, seed=9)
    forward rows = lookup_table(t, ids)
    forward losses = sigmoid_cross_entropy(rows, y)
    forward loss = mean(losses)
";
const TABLE_OPTIMIZERS: [&str; 2] = [
    "
    state t@count: int64[]
    initialise t@count = fill(value=0.0)
    optimize half = scale(t@gradient, factor=-0.5)
    optimize t, t@count = update(t, half, t@count, config=\"const_lr { learning_rate: 0.5 }\")
    optimize t = scale(t, factor=0.75)",
    "
    state t@count: int64[]
    state t@m: float32[300, 8]
    state t@average: float32[300, 8]
    initialise t@count = fill(value=0.0)
    initialise t@m = fill(value=0.0)
    initialise t@average = fill(value=0.0)
    optimize half = scale(t@gradient, factor=0.5)
    optimize t, t@count, t@m = update(t, half, t@count, t@m,
        config=\"sgd { momentum: 0.9 } const_lr { learning_rate: 0.5 }\")
    optimize old = scale(t@average, factor=0.9)
    optimize new = scale(t, factor=0.1)
    optimize t@average = add(old, new)
    optimize far = sub(t, t@average)
    optimize back = scale(far, factor=0.01)
    optimize t = sub(t, back)",
];

#[test]
fn the_server_stage_runs_for_rows_without_a_gradient() {
    for lines in TABLE_OPTIMIZERS {
        let graph = whole(TABLE, lines);
        let data: Vec<[(&str, Tensor); 2]> = (0..9_u16)
            .map(|step| {
                let ids = [1, 7, 7, 200 + i64::from(step)].map(|id| if step % 3 == 1 { id } else { id + 3 });
                let labels = (0..32).map(|place| f32::from(place % (step + 2) / 2 % 2)).collect();
                let ids = Tensor::new([4], Elements::Int64(ids.to_vec()));
                [("ids", ids), ("y", Tensor::new([4, 8], Elements::Float32(labels)))]
            })
            .collect();
        let (mut arithmetic, mut kernels) = (CpuArithmetic::default(), Cpu::default());
        let mut local = PlainRun::new(&graph, &mut arithmetic, &mut kernels).expect("it begins");
        for step in &data {
            step.iter().for_each(|(name, tensor)| local.set(name, tensor.clone()).expect("it fits"));
            local.step().expect("a step succeeds");
        }
        let expected = local.value("t").expect("it has a value").tensor().bytes().to_vec();
        for servers in [1, 2] {
            let cluster = Cluster { trainers: 1, servers: servers.into() };
            let parts = ParameterServer::default().transpile(&graph, cluster, &CostModel::default());
            let parts = parts.expect("the program can be divided");
            let running = Local::start(&Job::new(servers, 1));
            let client = client(&running.coordinator(), 0);
            initialise(&client, &parts).unwrap_or_else(|failure| panic!("{failure}"));
            let mut own = Trainer::new(&client, &parts).expect("the part can run");
            data.iter().for_each(|data| step(&mut own, data));
            let found = BTreeMap::from([("t", own.fetch("t").expect("it is there").bytes().to_vec())]);
            assert_eq!(difference(&found, &BTreeMap::from([("t", expected.clone())])), None, "{servers} servers");
            running.stop();
        }
    }
}

/// The first element that differs, with both values.
fn difference(found: &VariableValues, expected: &VariableValues) -> Option<String> {
    let floats = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|one| f32::from_le_bytes(*one)).collect::<Vec<f32>>();
    expected.iter().find_map(|(name, expected)| {
        let (found, expected) = (floats(&found[name]), floats(expected));
        let differs = |(one, other): (&f32, &f32)| one.to_bits() != other.to_bits();
        let place = found.iter().zip(&expected).position(differs)?;
        Some(format!("{name}[{place}] is {}; expected {}", found[place], expected[place]))
    })
}

fn check(trainers: u64) {
    let all: Vec<Vec<Data>> = (0..trainers).map(data).collect();
    for Stage { name, lines, is_cut } in STAGES {
        let expected = local(lines, &all);
        let pieces = parts(lines, 1, 3)[0].graph.find("w@piece0").is_some();
        assert_eq!(pieces, is_cut, "{name}");
        for (servers, shards) in [(1, 1), (1, 2), (3, 1)] {
            let found = distributed(lines, &all, (servers, shards));
            let difference = difference(&found, &expected);
            assert_eq!(difference, None, "{name}: {trainers} trainers, {servers} servers of {shards} shards");
        }
    }
}

#[test]
fn one_trainer_has_the_bits_of_one_process() {
    check(1);
}

#[test]
fn four_trainers_have_the_bits_of_one_process() {
    check(4);
}

#[test]
fn a_killed_server_goes_on_with_its_stage() {
    for Stage { name, lines, .. } in STAGES {
        let data = [data(3)];
        let folder = folder();
        let job = Job { chunk_bytes: CHUNK_BYTES, ..Job::new(2, 1) }.with_checkpoints(folder.path());
        let parts = parts(lines, 1, 2);
        let mut servers = Processes::start(job);
        let client = client(&servers.coordinator(), 0);
        initialise(&client, &parts).unwrap_or_else(|failure| panic!("{failure}"));
        let mut own = Trainer::new(&client, &parts).expect("the part can run");
        for (number, data) in data[0].iter().enumerate() {
            if number == 2 || number == 4 {
                servers.kill(1);
                servers.start_again(1);
                servers.kill(0);
                servers.start_again(0);
            }
            step(&mut own, data);
        }
        assert_eq!(difference(&fetched(&own), &local(lines, &data)), None, "{name}");
        servers.terminate();
    }
}

/// The value of a parameter of float32 on servers.
fn pulled(client: &Client, name: &str, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * count];
    client.pull(&mut [DestinationSlice::new(name, &mut bytes)]).expect("it is there");
    bytes.as_chunks().0.iter().map(|one| f32::from_le_bytes(*one)).collect()
}

/// The shares of a round that this client has pushed.
fn shares(client: &Client) -> [f64; 2] {
    let (mut w, mut b) = ([0; 8], [0; 8]);
    let places = [DestinationSlice::new("w@share", &mut w), DestinationSlice::new("b@share", &mut b)];
    client.pull(&mut { places }).expect("the shares are there");
    [w, b].map(f64::from_le_bytes)
}

fn push(client: &Client, values: [(&str, Vec<u8>); 2], element_type: ElementType) {
    let slices = values.each_ref().map(|(name, content)| GradientSlice { name, element_type, content });
    client.push(&slices, None).expect("the servers have it");
}

fn push_gradients(client: &Client, value: f32) {
    let bytes = |count: u64| value.to_le_bytes().repeat(usize::try_from(count).expect("it is small"));
    push(client, [("w", bytes(ROWS * COLUMNS)), ("b", bytes(COLUMNS))], ElementType::Float32);
}

fn push_totals(client: &Client, total: f64) {
    let bytes = || total.to_le_bytes().to_vec();
    push(client, [("w@total", bytes()), ("b@total", bytes())], ElementType::Float64);
}

/// Kills between a round's last gradient and its total: of both servers, of a trainer that is started again, and of one
/// that is not.
#[test]
fn a_round_that_waits_for_its_total_survives_kills_of_servers_and_trainers() {
    let folder = folder();
    let job = Job { chunk_bytes: CHUNK_BYTES, ..Job::new(2, 2) }.with_checkpoints(folder.path());
    let parts = parts(GLOBAL_NORM.lines, 2, 2);
    let mut servers = Processes::start(job);
    let first = client(&servers.coordinator(), 0);
    initialise(&first, &parts).unwrap_or_else(|failure| panic!("{failure}"));
    let second = client(&servers.coordinator(), 1);
    let elements = usize::try_from(ROWS * COLUMNS).expect("it is small");
    let before = pulled(&first, "w", elements);
    // The mean of the gradients is 1, so the shares count the elements.
    let counts = [f64::from(96 * 40), 40.0];

    push_gradients(&first, 1.5);
    push_gradients(&second, 0.5);
    assert_eq!(shares(&second), counts);
    restart(&mut servers);
    assert_eq!(shares(&first), counts, "after the servers were killed");
    // The second trainer sends no total, nor anything else.
    push_totals(&first, 0.25);
    assert_eq!(pulled(&first, "b", 40), [-0.125; 40]);

    let third = client(&servers.coordinator(), 1);
    assert_eq!(third.resume_rounds().expect("the job has rounds"), 1);
    push_gradients(&third, 0.5);
    push_gradients(&first, 1.5);
    assert_eq!(shares(&first), counts);
    // The round is complete, so another process of the rank repeats gradients that are applied already.
    let fourth = client(&servers.coordinator(), 1);
    assert_eq!(fourth.resume_rounds().expect("the job has rounds"), 1);
    push_gradients(&fourth, 9.0);
    assert_eq!(shares(&fourth), counts, "of the gradients that were there first");
    restart(&mut servers);
    push_totals(&fourth, 0.5);
    push_totals(&first, 7.0);
    restart(&mut servers);
    assert_eq!(pulled(&first, "b", 40), [-0.375; 40]);
    assert_eq!(pulled(&fourth, "b", 40), [-0.375; 40]);
    // The velocity is 0.25, then 0.9 * 0.25 + 0.5.
    let is_moved = |(found, before): (&f32, &f32)| (before - found - 0.5 * (0.25 + 0.725)).abs() < 1e-6;
    assert!(pulled(&first, "w", elements).iter().zip(&before).all(is_moved));
    servers.terminate();
}

fn restart(servers: &mut Processes) {
    for server in [1, 0] {
        servers.kill(server);
        servers.start_again(server);
    }
}

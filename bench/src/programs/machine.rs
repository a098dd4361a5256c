//! Rates of this machine for the transpiler's cost model, each measured by the code that a step runs.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use pserver_client::{Client, ClientOptions, DestinationRows, DestinationSlice, GradientRows, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::limits::PROGRAM_MEMORY_BYTES_MAX;
use pserver_kernels::cpu::Cpu;
use pserver_node::Server;
use pserver_program::cpu::CpuArithmetic;
use pserver_program::executor::{Executor, ExecutorParts, ProgramLink};
use pserver_program::transpile::{MachineRates, ProcessRates};
use pserver_program::{Elements, Graph, Program, ProgramPeer, Tensor, VariableValue};

use crate::servers::serve;
use crate::statistics::median;

/// Repetitions of each measurement; the median counts.
const SAMPLES: usize = 15;
/// Exchanges in a repetition: a step's processes are awake, and one exchange alone would measure how they wake up.
const EXCHANGES: u32 = 64;
/// Rows and columns of the multiplied matrices.
const SIDE: u64 = 256;
/// Elements of the added tensors: as the values of a step they stay in the cache of a core.
const ELEMENTS: u64 = 1 << 15;
/// Ops of a program of small ops.
const OPS: u32 = 64;
/// Rounds of work between exchanges: some 50 us.
const WORK: u32 = 7_000;
/// Elements of the large parameter.
const LARGE: u64 = 1 << 22;
/// Rows of a table, of which an exchange has every eighth.
const ROWS: u64 = 1 << 15;
/// Elements of a row.
const WIDTH: u64 = 16;

/// A program without flow sends nothing.
struct NoLink;

impl ProgramLink for NoLink {
    fn has_room(&mut self, _: ProgramPeer, _: &str) -> bool {
        false
    }

    fn send(&mut self, _: ProgramPeer, _: &str, _: &VariableValue) {}
}

/// The rates of processes of a job on this machine alone.
pub(crate) fn machine_rates() -> Result<MachineRates> {
    let shared_cores = std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1));
    let process = rates()?;
    let crowding_seconds = crowding_seconds(shared_cores, process.message_seconds)?;
    Ok(MachineRates { process, shared_cores, crowding_seconds })
}

/// Rates in one line.
pub(crate) fn in_a_line(rates: &MachineRates) -> String {
    rates.to_string().trim_end().replace('\n', ", ")
}

/// The rates of one process.
fn rates() -> Result<ProcessRates> {
    let square = ["a", "b"].map(|name| (name, vec![SIDE, SIDE]));
    let product = program_seconds("forward c = matmul(a, b)", &square)?;
    let long = ["a", "b"].map(|name| (name, vec![ELEMENTS]));
    let sum = program_seconds("forward c = add(a, b)", &long)?;
    let chain: String = (0..OPS).map(|op| format!("forward x{} = scale(x{op}, factor=1.5)\n", op + 1)).collect();
    let op_seconds = program_seconds(&chain, &[("x0", vec![1])])? / f64::from(OPS);
    let NetworkRates { message_seconds, link_bytes_per_second, row_seconds } = network()?;
    Ok(ProcessRates {
        link_bytes_per_second,
        message_seconds,
        op_seconds,
        row_seconds,
        flops_per_second: 2.0 * (SIDE * SIDE * SIDE) as f64 / product,
        memory_bytes_per_second: 3.0 * 4.0 * ELEMENTS as f64 / sum,
    })
}

/// Seconds of a run of these ops on these data.
fn program_seconds(ops: &str, data: &[(&str, Vec<u64>)]) -> Result<f64> {
    let shape = |shape: &[u64]| shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let declared: String = data.iter().map(|(name, all)| format!("data {name}: float32[{}]\n", shape(all))).collect();
    let graph = Graph::new(format!("block 0 {{ {declared} {ops} }}").parse::<Program>()?)?;
    let parts = ExecutorParts {
        arithmetic: Box::new(CpuArithmetic::default()),
        kernels: Box::new(Cpu::default()),
        senders: Vec::new(),
        arrivals_max: 1,
        memory_bytes_max: PROGRAM_MEMORY_BYTES_MAX,
    };
    let mut executor = Executor::new(Arc::new(graph), parts)?;
    for (name, shape) in data {
        let elements = vec![0.5; usize::try_from(shape.iter().product::<u64>())?];
        executor.set(name, Tensor::new(shape.clone(), Elements::Float32(elements)))?;
    }
    // The first run is the one that has begun.
    executor.run(&mut NoLink, u64::MAX)?;
    samples(|| {
        executor.begin()?;
        executor.run(&mut NoLink, u64::MAX)?;
        Ok(())
    })
}

/// The median of the times of an action.
fn samples(mut action: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut seconds = Vec::new();
    for _ in 0..SAMPLES {
        let begun = Instant::now();
        action()?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    Ok(median(&seconds))
}

struct NetworkRates {
    message_seconds: f64,
    link_bytes_per_second: f64,
    row_seconds: f64,
}

/// An exchange of one element after so much work, in a row of them.
fn exchange_seconds(client: &Client, rounds: u32) -> Result<f64> {
    let mut small = [0; 4];
    let all = samples(|| {
        for _ in 0..EXCHANGES {
            work(rounds);
            let gradient = GradientSlice { name: "small", element_type: Float32, content: &[0; 4] };
            client.push_pull(&[gradient], None, &mut [DestinationSlice::new("small", &mut small)])?;
        }
        Ok(())
    })?;
    Ok(all / f64::from(EXCHANGES))
}

/// Keeps a core busy, for a time in proportion to the rounds.
fn work(rounds: u32) {
    let mut value = 1.0_f64;
    for _ in 0..rounds {
        value = std::hint::black_box(value.sqrt() + 1.0);
    }
}

/// Seconds by which an exchange takes longer than its messages where processes are one more than the cores: a server
/// and as many trainers as there are cores, whose gradients the server adds. Trainers compute between exchanges, as in
/// a step: a server that waits takes a core from them, and is awake or not when they are done.
fn crowding_seconds(cores: u32, message_seconds: f64) -> Result<f64> {
    let servers = serve("tcp", "sum", cores, (1, 1))?;
    let coordinator = servers[0].address();
    let work_seconds = samples(|| {
        work(WORK);
        Ok(())
    })?;
    let trainer = |trainer| {
        let client = Client::new(ClientOptions { trainer: Some(trainer), ..ClientOptions::new(coordinator.clone()) })?;
        if client.begin_init(&OptimizerSettings::default())? {
            let rule = OptimizerSettings::from_text("const_lr { learning_rate: 0.1 }")?;
            client.init_param("small", Float32, &[1], &[0; 4], &rule)?;
            client.finish_init()?;
        }
        let seconds = exchange_seconds(&client, WORK)?;
        client.leave()?;
        Ok(seconds)
    };
    let seconds: Result<Vec<f64>> = std::thread::scope(|scope| {
        let trainers: Vec<_> = (0..cores).map(|number| scope.spawn(move || trainer(number))).collect();
        trainers.into_iter().map(|thread| thread.join().unwrap_or_else(|_| bail!("a trainer panicked"))).collect()
    });
    servers.into_iter().try_for_each(Server::stop)?;
    // All trainers' two messages at the same time on their cores, then the server's, one after the other.
    let messages = 2.0 + 2.0 * f64::from(cores);
    Ok((median(&seconds?) - work_seconds - messages * message_seconds).max(0.0))
}

/// Rates of a job of one trainer and one server.
fn network() -> Result<NetworkRates> {
    let servers = serve("tcp", "sum", 1, (1, 1))?;
    let client = Client::new(ClientOptions::new(servers[0].address().clone()))?;
    client.begin_init(&OptimizerSettings::default())?;
    let rule = "const_lr { learning_rate: 0.1 }";
    let dense = OptimizerSettings::from_text(rule)?;
    let mut large = vec![0; usize::try_from(LARGE * 4)?];
    client.init_param("small", Float32, &[1], &[0; 4], &dense)?;
    client.init_param("large", Float32, &[LARGE], &large, &dense)?;
    let sparse = OptimizerSettings::from_text(&format!("{rule} sparse {{ height: {ROWS} width: {WIDTH} }}"))?;
    client.init_param("table", Float32, &[], &[], &sparse)?;
    client.finish_init()?;
    let exchange = exchange_seconds(&client, 0)?;
    // An exchange is two messages on either side, one after the other.
    let message_seconds = exchange / 4.0;
    let pull = samples(|| Ok(client.pull(&mut [DestinationSlice::new("large", &mut large)])?))?;
    let link_bytes_per_second = large.len() as f64 / (pull - exchange).max(1e-9);
    let ids: Vec<u64> = (0..ROWS).step_by(8).collect();
    let mut values = vec![0; ids.len() * usize::try_from(WIDTH * 4)?];
    let rows = samples(|| {
        client.push_rows(&[GradientRows { name: "table", element_type: Float32, ids: &ids, values: &values }], None)?;
        Ok(client.pull_rows(&mut [DestinationRows { name: "table", ids: &ids, values: &mut values }])?)
    })?;
    client.leave()?;
    drop(client);
    servers.into_iter().try_for_each(Server::stop)?;
    // The trainer sends a row and asks for it; the server adds, updates and finds it.
    let bytes = 2.0 * (values.len() + 8 * ids.len()) as f64;
    let row_seconds = (rows - 2.0 * exchange - bytes / link_bytes_per_second).max(0.0) / (5.0 * ids.len() as f64);
    Ok(NetworkRates { message_seconds, link_bytes_per_second, row_seconds })
}

//! Steps of a program with a table of rows, by its height and by the number of servers, in turns in this process.
//!
//! The program looks up 12 rows for each of 64 examples, adds them, and trains a layer on top by gradient descent; the
//! ids are uniform. The table is cut over all servers, which are threads of this process and reached over TCP. The
//! times are those of [`Trainer::step`], which asks for rows, computes, and sends gradients.
//! `cargo bench -p pserver-bench --bench table_steps`

use std::time::Instant;

use pserver_bench::{is_measured, serve};
use pserver_client::{Client, ClientOptions};
use pserver_core::dtype::ElementType::{Float32, Int64};
use pserver_core::error::Failure;
use pserver_core::prng::Prng;
use pserver_core::rows::Initializer;
use pserver_program::transpile::{Cluster, CostModel, ParameterServer, ProcessRates, ProgramPart, Transpiler};
use pserver_program::{Builder, Dim, Elements, Graph, Tensor, append_backward, append_optimizer};
use pserver_trainer::{Trainer, initialise};

const BATCH: u64 = 64;
const IDS: u64 = 12;
const WIDTH: u64 = 16;
/// Steps of a case before the next one has its turn.
const TURN: usize = 20;

fn main() {
    let (heights, turns): (&[u64], usize) =
        if is_measured() { (&[200_000, 2_000_000, 8_000_000], 25) } else { (&[2_000], 1) };
    let mut servers = Vec::new();
    let mut coordinators = Vec::new();
    for _ in heights {
        for count in [1, 2] {
            let own = serve("tcp", "mean", 1, (count, 1)).expect("servers start");
            coordinators.push(own[0].address().clone());
            servers.extend(own);
        }
    }
    let client = |coordinator: &_| {
        Client::new(ClientOptions { trainer: Some(0), ..ClientOptions::new(Clone::clone(coordinator)) })
    };
    let clients: Vec<Client> = coordinators.iter().map(|one| client(one).expect("a client joins")).collect();
    let cases = heights.iter().flat_map(|height| [(*height, 1), (*height, 2)]);
    let mut cases: Vec<StepCase<'_>> =
        clients.iter().zip(cases).map(|(client, case)| StepCase::new(client, case).expect("a part runs")).collect();
    for turn in 0..=turns {
        for case in &mut cases {
            // The first turn makes connections and memory, and is not counted.
            case.run(turn > 0).expect("steps succeed");
        }
    }
    println!("rows servers median_ms p90_ms loss");
    for case in &mut cases {
        case.milliseconds.sort_by(f64::total_cmp);
        let percentile = |percent| case.milliseconds[case.milliseconds.len() * percent / 100];
        println!("{} {} {:.3} {:.3} {:.4}", case.height, case.servers, percentile(50), percentile(90), case.loss());
    }
    drop(cases);
    drop(clients);
    servers.into_iter().for_each(|server| server.stop().expect("a server stops"));
}

/// A table of one height on some servers.
struct StepCase<'c> {
    height: u64,
    servers: u32,
    trainer: Trainer<'c>,
    prng: Prng,
    milliseconds: Vec<f64>,
}

impl<'c> StepCase<'c> {
    fn new(client: &'c Client, (height, servers): (u64, u32)) -> Result<Self, Failure> {
        let parts = parts(height, servers)?;
        initialise(client, &parts)?;
        let trainer = Trainer::new(client, &parts)?;
        Ok(Self { height, servers, trainer, prng: Prng(height), milliseconds: Vec::new() })
    }

    fn run(&mut self, is_counted: bool) -> Result<(), Failure> {
        for _ in 0..TURN {
            let ids = (0..BATCH * IDS).map(|_| self.prng.below(self.height).cast_signed()).collect();
            self.trainer.feed("ids", Tensor::new([BATCH, IDS], Elements::Int64(ids)))?;
            let labels = (0..BATCH).map(|_| self.prng.below(2) as f32).collect();
            self.trainer.feed("label", Tensor::new([BATCH, 1], Elements::Float32(labels)))?;
            let begun = Instant::now();
            self.trainer.step()?;
            if is_counted {
                self.milliseconds.push(begun.elapsed().as_secs_f64() * 1e3);
            }
        }
        Ok(())
    }

    fn loss(&self) -> f32 {
        match self.trainer.value("loss").expect("a step was computed").tensor().elements() {
            Elements::Float32(loss) => loss[0],
            other => panic!("a loss of {:?}", other.element_type()),
        }
    }
}

fn parts(height: u64, servers: u32) -> Result<Vec<ProgramPart>, Failure> {
    let p = Builder::new();
    let ids = p.data("ids", Int64, [Dim::Batch, Dim::Fixed(IDS)]);
    let label = p.data("label", Float32, [Dim::Batch, Dim::Fixed(1)]);
    let random = Initializer::Uniform { low: -0.1, high: 0.1 };
    let table = p.parameter("table", Float32, &[height, WIDTH], random, 1);
    let weight = p.parameter("weight", Float32, &[WIDTH, 1], random, 2);
    let pooled = p.reduce_sum(p.lookup_table(table, ids), 1);
    p.named("loss", p.mean(p.sigmoid_cross_entropy(p.matmul(pooled, weight), label)));
    let mut program = p.finish()?.into_program();
    let gradients = append_backward(&mut program, "loss")?;
    append_optimizer(&mut program, "const_lr { learning_rate: 0.01 }", &gradients)?;
    // Where messages, ops and a trainer's memory cost nothing, a table is cut over all servers.
    let server = ProcessRates { message_seconds: 0.0, op_seconds: 0.0, ..ProcessRates::default() };
    let trainer = ProcessRates { flops_per_second: 1e30, memory_bytes_per_second: 1e30, ..server };
    let costs = CostModel { chunk_bytes: 4096, trainer, server, ..CostModel::default() };
    let parts =
        ParameterServer::default().transpile(&Graph::new(program)?, Cluster { trainers: 1, servers }, &costs)?;
    let ops = &parts[0].graph.program().blocks[0].ops;
    let pulls = ops.iter().filter(|op| op.kind.name() == "pull_rows").count();
    assert_eq!(pulls, servers as usize, "the table is on every server");
    Ok(parts)
}

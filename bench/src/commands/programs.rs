//! `psbench programs`: steps of programs in jobs on this machine, beside the estimates of the transpiler's cost model
//! with this machine's measured rates.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pserver_program::transpile::{Cluster, CostModel};
use pserver_program::{Graph, Program};
use pserver_trainer::trainable;
use serde_json::json;

use crate::alternation::BLOCKS_MIN;
use crate::counters::{self, Carried};
use crate::job::TransportName;
use crate::programs::{RandomProgram, StepComparison, StepPlan, in_a_line, machine_rates};
use crate::report::{Column, Outcome, Report, announce, plain, scaled};
use crate::route::Route;

/// The options of `psbench programs`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Programs in the text form of docs/PROGRAMS.md.
    programs: Vec<PathBuf>,
    /// The optimizer of programs that have none.
    #[arg(long, default_value = "optimizer: Adagrad adagrad { epsilon: 1e-6 } const_lr { learning_rate: 0.01 }")]
    optimizer: String,
    /// Examples of a trainer's step; several numbers with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "32")]
    batch: Vec<u64>,
    /// Trainers; several numbers with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    trainers: Vec<u32>,
    /// Servers; several numbers with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    servers: Vec<u32>,
    /// Random programs, of 1 or 2 trainers and 1 to 4 servers, whose placements differ by an estimated tenth or more.
    #[arg(long, default_value_t = 0)]
    random: u32,
    /// The seed of the first random program.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Blocks of steps of each placement, by turns.
    #[arg(long, default_value_t = BLOCKS_MIN)]
    blocks: u32,
    /// Seconds of a block, about.
    #[arg(short = 'D', long, default_value_t = 0.1)]
    duration: f64,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("trainers", "trainers"),
    plain("servers", "servers"),
    plain("batch", "batch"),
    scaled("estimated_us", "estimated[ms]", 1e3, 3),
    scaled("latency_us_p50", "measured[ms]", 1e3, 3),
    scaled("latency_us_low", "low", 1e3, 3),
    scaled("latency_us_high", "high", 1e3, 3),
    scaled("estimated_ratio", "measured/estimated", 1.0, 2),
    scaled("in_turn_estimated_us", "round robin: estimated", 1e3, 3),
    scaled("in_turn_latency_us_p50", "measured", 1e3, 3),
    plain("is_order_estimated", "order"),
    plain("wrong", "#wrong"),
];

/// A program and its job.
struct MeasuredProgram {
    name: String,
    graph: Graph,
    cluster: Cluster,
    batch: u64,
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    ensure!(!args.programs.is_empty() || args.random > 0, "found no program; expected files, or --random above zero");
    ensure!(args.blocks > 0 && args.duration > 0.0, "expected blocks, and a duration above zero");
    let rates = machine_rates()?;
    let rates_text = in_a_line(&rates);
    announce(&format!("rates of this machine: {rates_text}"));
    let costs = rates.model();
    let parameters = json!({ "programs": args.programs, "optimizer": args.optimizer, "random": args.random,
        "seed": args.seed, "blocks": args.blocks, "duration_seconds": args.duration, "rates": rates_text });
    let mut report = Report::new("programs", parameters, COLUMNS);
    counters::listen();
    let files = args.files()?;
    report.expect(files.len() + args.random as usize, "programs");
    for program in files {
        measure(&program, args, costs, &mut report)?;
        report.measured(1);
    }
    let (mut seed, mut measured) = (args.seed, 0);
    while measured < args.random {
        let RandomProgram { graph, cluster, batch } = RandomProgram::new(seed, 2, 4)?;
        let program = MeasuredProgram { name: format!("random {seed}"), graph, cluster, batch };
        if StepComparison::is_divided_differently(&program.graph, &program.plan(args, costs), 1.1)? {
            measure(&program, args, costs, &mut report)?;
            report.measured(1);
            measured += 1;
        }
        seed += 1;
    }
    let order: Vec<bool> =
        report.results().iter().filter_map(|one| one.field("is_order_estimated").as_bool()).collect();
    let held = order.iter().filter(|held| **held).count();
    announce(&format!("{held} of {} placements are ordered as estimated", order.len()));
    report.travelled(&Route::of(Carried::of(TransportName::Tcp, &counters::heard()), "127.0.0.1", "auto"));
    Ok(report)
}

impl Args {
    /// The programs in files, for every job.
    fn files(&self) -> Result<Vec<MeasuredProgram>> {
        let mut all = Vec::new();
        for path in &self.programs {
            let shown = || path.display().to_string();
            let text = std::fs::read_to_string(path).with_context(shown)?;
            let program: Program = text.parse().with_context(shown)?;
            let graph = trainable(program.clone(), "loss", Some(&self.optimizer));
            let graph = graph.or_else(|_| trainable(program, "loss", None)).with_context(shown)?;
            let name = path.file_stem().map_or_else(shown, |name| name.to_string_lossy().into_owned());
            for trainers in &self.trainers {
                for servers in &self.servers {
                    let cluster = Cluster { trainers: *trainers, servers: *servers };
                    all.extend(self.batch.iter().map(|batch| MeasuredProgram {
                        name: name.clone(),
                        graph: graph.clone(),
                        cluster,
                        batch: *batch,
                    }));
                }
            }
        }
        Ok(all)
    }
}

impl MeasuredProgram {
    fn plan(&self, args: &Args, costs: CostModel) -> StepPlan {
        let costs = CostModel { batch: self.batch, ..costs };
        StepPlan { cluster: self.cluster, costs, blocks: args.blocks, block_seconds: args.duration }
    }
}

fn measure(program: &MeasuredProgram, args: &Args, costs: CostModel, report: &mut Report) -> Result<()> {
    let MeasuredProgram { name, graph, cluster, batch } = program;
    announce(&format!("{name}, {} trainers, {} servers", cluster.trainers, cluster.servers));
    let found = StepComparison::measure(graph, &program.plan(args, costs)).with_context(|| name.clone())?;
    let balanced = &found.balanced;
    let (low, high) = balanced.interval();
    let mut outcome = Outcome::new(name)
        .without_ratio("an estimate is no ceiling")
        .with("trainers", cluster.trainers)
        .with("servers", cluster.servers)
        .with("batch", *batch)
        .with("estimated_us", balanced.estimated * 1e6)
        .with("latency_us_p50", balanced.median() * 1e6)
        .with("latency_us_low", low * 1e6)
        .with("latency_us_high", high * 1e6)
        .with("estimated_ratio", balanced.median() / balanced.estimated)
        .with("block_latency_us", balanced.measured.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
        .with("wrong", found.wrong);
    if let Some(in_turn) = &found.in_turn {
        let is_order_estimated = (balanced.estimated < in_turn.estimated) == (balanced.median() < in_turn.median());
        outcome = outcome
            .with("in_turn_estimated_us", in_turn.estimated * 1e6)
            .with("in_turn_latency_us_p50", in_turn.median() * 1e6)
            .with("is_order_estimated", is_order_estimated);
    }
    report.push(outcome);
    Ok(())
}

//! `psbench kernels`: the servers' arithmetic beside memory's own speed for the same streams.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use pserver_core::config::OptimizerSettings;
use pserver_core::ids::Version;
use pserver_core::optim::{Rule, Step};
use serde_json::json;

use crate::duel::BLOCKS_MIN;
use crate::environment::memory_bytes;
use crate::report::{Column, Outcome, Report, plain, scaled};
use crate::sizes::{self, length};
use crate::statistics::{median, median_interval};
use crate::tensors::Tensors;

/// What is reckoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// The sum of gradients, and nothing else.
    Sum,
    /// Gradient descent.
    Sgd,
    /// Momentum.
    Momentum,
    /// Adagrad.
    Adagrad,
    /// Adam.
    Adam,
    /// Adam with a decay of its own.
    Adamw,
}

/// The options of `psbench kernels`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Rules; several with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sum,sgd,momentum,adam,adagrad")]
    rule: Vec<Kernel>,
    /// Elements of a tensor.
    #[arg(long, value_parser = sizes::parse, default_value = "10000000")]
    elements: u64,
    /// Gradients that are summed; several counts with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    gradients: Vec<u32>,
    /// Repetitions of each kernel.
    #[arg(short = 'n', long, default_value_t = BLOCKS_MIN)]
    iterations: u32,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("streams_read", "read"),
    plain("streams_updated", "updated"),
    plain("streams_written", "written"),
    scaled("bytes_per_second", "GB/s", 1e9, 2),
    scaled("elements_per_second", "Gelem/s", 1e9, 3),
    scaled("ceiling_bytes_per_second", "memory[GB/s]", 1e9, 2),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    plain("wrong", "#wrong"),
];

impl Kernel {
    /// Its rule; a sum has none.
    pub(crate) fn rule(self) -> Result<Option<Rule>> {
        let text = match self {
            Self::Sum => return Ok(None),
            Self::Sgd => "optimizer: SGD sgd { }",
            Self::Momentum => "optimizer: SGD sgd { momentum: 0.9 }",
            Self::Adagrad => "optimizer: Adagrad adagrad { epsilon: 1e-6 }",
            Self::Adam => "optimizer: Adam adam { }",
            Self::Adamw => "optimizer: Adam adam { decay: 0.01 }",
        };
        let settings = OptimizerSettings::from_text(&format!("{text} const_lr {{ learning_rate: 0.001 }}"))?;
        Ok(Some(settings.rule.context("the message names a rule")?))
    }
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    let rules = args.rule.iter().map(|rule| crate::job::word(*rule)).collect::<Vec<_>>();
    let parameters = json!({ "rules": rules, "elements": args.elements, "gradients": args.gradients,
        "iterations": args.iterations, "dtype": "f32", "threads": 1 });
    ensure!(args.elements > 0 && args.iterations > 0, "expected elements and iterations");
    let most = args.gradients.iter().max().context("--gradients: expected a count")?;
    ensure!((1..=64).contains(most), "--gradients {most}: expected 1 to 64");
    // Two states, the parameter and the sum besides the gradients.
    let needed = (u64::from(*most) + 4).saturating_mul(args.elements).saturating_mul(4);
    if let Some(there) = memory_bytes() {
        ensure!(needed < there, "these tensors take {needed} bytes; this machine has {there}");
    }
    let mut report = Report::new("kernels", parameters, COLUMNS);
    for kernel in &args.rule {
        for gradients in &args.gradients {
            let name = crate::job::word(*kernel);
            eprintln!("psbench: {name} of {gradients}");
            let tensors = Tensors::new(length(args.elements), length(u64::from(*gradients)), kernel.rule()?);
            report.results.push(measure(&name, tensors, args));
        }
    }
    Ok(report)
}

fn measure(name: &str, mut tensors: Tensors, args: &Args) -> Outcome {
    let (mut kernel, mut lines, mut tiles) = (Vec::new(), Vec::new(), Vec::new());
    for count in 0..=args.iterations {
        let step = Step { version: Version(u64::from(count) + 1), rate: None, norm: None, scale: 1.0 };
        let own = timed(|| tensors.step(&step));
        let (line, tile) = (timed(|| tensors.stream(false)), timed(|| tensors.stream(true)));
        tensors.step_plain(&step);
        // The first of each touches memory that nobody has touched.
        if count > 0 {
            kernel.push(own);
            lines.push(line);
            tiles.push(tile);
        }
    }
    // Memory's best is the better of two ways to walk it.
    let ceiling = if median(&tiles) < median(&lines) { tiles } else { lines };
    let (own, other) = (median(&kernel), median(&ceiling));
    let ratios: Vec<f64> = kernel.iter().zip(&ceiling).map(|(own, other)| other / own).collect();
    let (low, high) = median_interval(&ratios);
    let streams = tensors.streams();
    let bytes = args.elements as f64 * 4.0 * (streams.read + 2 * streams.updated + streams.written) as f64;
    let count = tensors.gradients();
    let gradients = if count == 1 { "1 gradient".to_owned() } else { format!("{count} gradients") };
    Outcome::new(&format!("{name}, {gradients}"))
        .with("rule", name)
        .with("gradients", count)
        .with("elements", args.elements)
        .with("streams_read", streams.read)
        .with("streams_updated", streams.updated)
        .with("streams_written", streams.written)
        .with("bytes_per_second", bytes / own)
        .with("elements_per_second", args.elements as f64 / own)
        .with("block_latency_us", kernel.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
        .with("ceiling_bytes_per_second", bytes / other)
        .with("ratio_to_ceiling", other / own)
        .with("ratio_low", low)
        .with("ratio_high", high)
        .with("wrong", tensors.wrong())
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

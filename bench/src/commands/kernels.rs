//! `psbench kernels`: the servers' arithmetic beside memory's own speed for the same streams.

mod device;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use nix::time::{ClockId, clock_gettime};
use pserver_core::config::OptimizerSettings;
use pserver_core::ids::Version;
use pserver_core::optim::{Algorithm, Rule, Step};
use pserver_core::rule::{CheckedRule, RuleSettings};
use serde_json::json;

use crate::alternation::BLOCKS_MIN;
use crate::environment::memory_bytes;
use crate::fused::Fused;
use crate::report::{Column, Outcome, Report, announce, plain, scaled};
use crate::sizes::{self, length};
use crate::statistics::{median, median_interval};
use crate::tensors::Tensors;

/// The operation to measure.
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
    /// A rule that is only a text.
    Lion,
    /// Adam as a user writes it: a text that no kernel is shipped for.
    AdamText,
}

/// Adam with moments that go a part of the way to the gradient: other operations, as many streams.
const ADAM_TEXT: &str = "state m = 0; state v = 0; m = m + 0.1*(g - m); v = v + 0.001*(g*g - v); \
    w -= lr * sqrt(1 - pow(0.999, n)) / (1 - pow(0.9, n)) * m / (sqrt(v) + 1e-8)";

/// Where kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KernelDevice {
    /// On one core.
    Cpu,
    /// On a device of CUDA.
    Cuda,
}

/// A measurement on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Measured {
    /// Kernels on tensors in the device's memory.
    Kernel,
    /// A server's step, from pinned memory of the host to pinned memory.
    ServerStep,
}

/// Gradients that are summed on a core, when nobody says how many.
const GRADIENTS: [u32; 2] = [1, 8];

/// The options of `psbench kernels`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Where kernels run.
    #[arg(long, value_enum, default_value = "cpu")]
    device: KernelDevice,
    /// Which device, from zero, of those that there are.
    #[arg(long, default_value_t = 0)]
    ordinal: u32,
    /// Rules; several with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sum,sgd,momentum,adam,lion,adagrad")]
    rule: Vec<Kernel>,
    /// Elements of a tensor.
    #[arg(long, value_parser = sizes::parse, default_value = "10000000")]
    elements: u64,
    /// Gradients that are summed; several counts with commas between them. 1,8 unless said otherwise, and 1,4,8,16 on
    /// a device.
    #[arg(long, value_delimiter = ',')]
    gradients: Vec<u32>,
    /// Repetitions of each kernel.
    #[arg(short = 'n', long, default_value_t = BLOCKS_MIN)]
    iterations: u32,
    /// On a device: elements of a server's step, if memory is enough and a tensor has as many.
    #[arg(long, value_parser = sizes::parse, default_value = "33554432")]
    step_elements: u64,
    /// On a device: what is measured.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,server-step")]
    measure: Vec<Measured>,
    /// On a device: a Python that has torch with CUDA, which does the same afterwards.
    #[arg(long, value_name = "PYTHON")]
    torch: Option<PathBuf>,
    /// On a device: say of each goal of `docs/CUDA.md` whether it is met.
    #[arg(long)]
    goals: bool,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("streams_read", "read"),
    plain("streams_updated", "updated"),
    plain("streams_written", "written"),
    plain("rounds", "#iters"),
    scaled("bytes_per_second_peak", "peak[GB/s]", 1e9, 2),
    scaled("bytes_per_second", "GB/s", 1e9, 2),
    scaled("elements_per_second", "Gelem/s", 1e9, 3),
    scaled("ceiling_bytes_per_second", "memory[GB/s]", 1e9, 2),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    scaled("ratio_to_fused", "by hand", 1.0, 3),
    scaled("ratio_to_fused_low", "low", 1.0, 3),
    scaled("ratio_to_fused_high", "high", 1.0, 3),
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
            Self::Lion => return Ok(Some(Fused::Lion.rule()?)),
            Self::AdamText => {
                let algorithm = Algorithm::Custom(Arc::new(CheckedRule::new(ADAM_TEXT, &RuleSettings::new())?));
                return Ok(Some(Rule { algorithm, ..Fused::Adam.rule()? }));
            }
        };
        let settings = OptimizerSettings::from_text(&format!("{text} const_lr {{ learning_rate: 0.001 }}"))?;
        Ok(Some(settings.rule.context("the message names a rule")?))
    }
}

impl Kernel {
    /// The loop that was written for it by hand, where there is one.
    fn fused(self) -> Option<Fused> {
        Fused::ALL.into_iter().find(|fused| fused.name() == crate::job::word(self))
    }
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    if args.device == KernelDevice::Cuda {
        return device::run(args);
    }
    let counts = if args.gradients.is_empty() { GRADIENTS.to_vec() } else { args.gradients.clone() };
    let rules = args.rule.iter().map(|rule| crate::job::word(*rule)).collect::<Vec<_>>();
    let parameters = json!({ "rules": rules, "elements": args.elements, "gradients": counts,
        "iterations": args.iterations, "dtype": "f32", "threads": 1 });
    ensure!(args.elements > 0 && args.iterations > 0, "expected elements and iterations");
    let most = counts.iter().max().context("--gradients: expected a count")?;
    ensure!((1..=64).contains(most), "--gradients {most}: expected 1 to 64");
    // Two states, the parameter and the sum besides the gradients.
    let needed = (u64::from(*most) + 4).saturating_mul(args.elements).saturating_mul(4);
    if let Some(there) = memory_bytes() {
        ensure!(needed < there, "these tensors take {needed} bytes; this machine has {there}");
    }
    let mut report = Report::new("kernels", parameters, COLUMNS);
    report.expect(args.rule.len() * counts.len(), "kernels");
    for kernel in &args.rule {
        for gradients in &counts {
            let name = crate::job::word(*kernel);
            announce(&format!("{name} of {gradients}"));
            let tensors = Tensors::new(length(args.elements), length(u64::from(*gradients)), kernel.rule()?);
            let fused = kernel.fused().filter(|_| *gradients == 1);
            report.push(measure(&name, tensors, fused, args)?);
            report.measured(1);
        }
    }
    Ok(report)
}

/// Seconds of each repetition.
#[derive(Default)]
struct KernelTimes {
    kernel: Vec<f64>,
    fused: Vec<f64>,
    lines: Vec<f64>,
    tiles: Vec<f64>,
}

impl KernelTimes {
    /// All in turns. The first of each touches memory that nobody has touched, and is not counted.
    fn take(tensors: &mut Tensors, fused: Option<Fused>, iterations: u32) -> Result<Self> {
        let mut times = Self::default();
        let mut step = Step { version: Version(0), ..Step::FIRST };
        for count in 0..=iterations {
            step.version.0 += 1;
            let kernel = timed(|| tensors.step(&step))?;
            tensors.step_plain(&step);
            let (lines, tiles) = (timed(|| tensors.stream(false))?, timed(|| tensors.stream(true))?);
            if count > 0 {
                times.kernel.push(kernel);
                times.lines.push(lines);
                times.tiles.push(tiles);
            }
            let Some(fused) = fused else { continue };
            step.version.0 += 1;
            let by_hand = timed(|| tensors.step_fused(fused, &step))?;
            tensors.step_plain(&step);
            if count > 0 {
                times.fused.push(by_hand);
            }
        }
        Ok(times)
    }
}

fn measure(name: &str, mut tensors: Tensors, fused: Option<Fused>, args: &Args) -> Result<Outcome> {
    let KernelTimes { kernel, fused, lines, tiles } = KernelTimes::take(&mut tensors, fused, args.iterations)?;
    // Memory's best is the better of two ways to walk it.
    let ceiling = if median(&tiles) < median(&lines) { tiles } else { lines };
    let (own, other) = (median(&kernel), median(&ceiling));
    let ratios = |others: &[f64]| kernel.iter().zip(others).map(|(own, other)| other / own).collect::<Vec<f64>>();
    let (low, high) = median_interval(&ratios(&ceiling));
    let streams = tensors.streams();
    let bytes = args.elements as f64 * 4.0 * (streams.read + 2 * streams.updated + streams.written) as f64;
    let count = tensors.gradients();
    let gradients = if count == 1 { "1 gradient".to_owned() } else { format!("{count} gradients") };
    let mut outcome = Outcome::new(&format!("{name}, {gradients}"))
        .with("rule", name)
        .with("gradients", count)
        .with("elements", args.elements)
        .with("streams_read", streams.read)
        .with("streams_updated", streams.updated)
        .with("streams_written", streams.written)
        .with("rounds", kernel.len())
        .with("bytes_per_second", bytes / own)
        .with("bytes_per_second_peak", bytes / kernel.iter().copied().fold(f64::INFINITY, f64::min))
        .with("elements_per_second", args.elements as f64 / own)
        .with("block_latency_us", kernel.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
        .with("ceiling_bytes_per_second", bytes / other)
        .with("ratio_to_ceiling", other / own)
        .with("ratio_low", low)
        .with("ratio_high", high)
        .with("wrong", tensors.wrong());
    if !fused.is_empty() {
        let (low, high) = median_interval(&ratios(&fused));
        outcome = outcome.with("ratio_to_fused", median(&fused) / own);
        outcome = outcome.with("ratio_to_fused_low", low).with("ratio_to_fused_high", high);
    }
    Ok(outcome)
}

/// Seconds of this thread on a processor: what else runs on the machine takes turns, and none of this time.
fn timed(work: impl FnOnce()) -> Result<f64> {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let start = now()?;
    work();
    Ok((now()? - start).as_secs_f64())
}

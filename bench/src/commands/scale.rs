//! `psbench scale`: time per byte as bytes, parameters and trainers grow. Flat lines are what one hopes for.

use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde_json::json;

use super::pushpull::RunArgs;
use crate::comparison::measure;
use crate::environment::memory_bytes;
use crate::job::{BenchJob, word};
use crate::report::{Column, Report, announce, plain, scaled};
use crate::sizes;

/// The quantity that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Axis {
    /// The bytes of one parameter.
    Bytes,
    /// The parameters that the same bytes are cut into.
    Params,
    /// The trainers that push the same bytes.
    Trainers,
}

/// Tensors of a job's bytes that are there at once, of one side: a trainer's gradient and value, the server's value and
/// a gradient that waits.
const COPIES: u64 = 4;

/// The options of `psbench scale`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The axes that grow, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bytes,params,trainers")]
    axis: Vec<Axis>,
    /// The bytes that grow.
    #[arg(short = 's', long, visible_alias = "size", value_parser = sizes::parse, value_delimiter = ',',
        default_value = "4KiB,64KiB,1MiB,16MiB,64MiB")]
    bytes: Vec<u64>,
    /// The numbers of parameters.
    #[arg(long, value_delimiter = ',', default_value = "1,10,100,1000,10000")]
    cuts: Vec<u32>,
    /// The numbers of trainers.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    teams: Vec<u32>,
    /// The bytes while parameters or trainers grow.
    #[arg(long, value_parser = sizes::parse, default_value = "10MiB")]
    fixed: u64,
    #[command(flatten)]
    work: RunArgs,
}

const COLUMNS: &[Column] = &[
    plain("axis", "grows"),
    plain("name", "what"),
    scaled("latency_us_p50", "p50[us]", 1.0, 1),
    scaled("latency_us_p99", "p99", 1.0, 1),
    scaled("nanoseconds_per_kilobyte", "ns/kB", 1.0, 1),
    scaled("growth", "growth", 1.0, 2),
    scaled("bytes_per_second_peak", "peak[GB/s]", 1e9, 3),
    scaled("bytes_per_second_average", "avg", 1e9, 3),
    scaled("rounds_per_second", "rounds/s", 1.0, 1),
    scaled("ceiling_latency_us_p50", "baseline", 1.0, 1),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("server_cpu_percent", "cpu%", 1.0, 1),
    plain("wrong", "#wrong"),
];

pub(crate) fn run(args: &Args) -> Result<Report> {
    ensure!(args.work.connect.is_none(), "--connect: the parameters of that job do not grow; expected none");
    let axes = args.axis.iter().map(|axis| Ok((*axis, jobs(args, *axis)?))).collect::<Result<Vec<_>>>()?;
    for job in axes.iter().flat_map(|(_, jobs)| jobs) {
        check_memory(job, args.work.alone)?;
    }
    let parameters = json!({ "bytes": args.bytes, "cuts": args.cuts, "teams": args.teams, "fixed_bytes": args.fixed,
        "axis": args.axis.iter().map(|axis| word(*axis)).collect::<Vec<_>>(),
        "duration_seconds": args.work.duration, "iterations": args.work.iterations,
        "job": args.work.job(args.fixed)? });
    let mut report = Report::new("scale", parameters, COLUMNS);
    args.work.terms().expect(axes.iter().map(|(_, jobs)| jobs.len()).sum(), &mut report);
    for (axis, jobs) in &axes {
        let first = report.results().len();
        for job in jobs {
            announce(&format!("scale of {}", job.title()));
            measure(job, &args.work.terms(), &mut report)?;
            per_byte(&mut report, *axis, job, first);
        }
    }
    Ok(report)
}

fn jobs(args: &Args, axis: Axis) -> Result<Vec<BenchJob>> {
    let with = |change: &dyn Fn(&mut RunArgs)| {
        let mut work = args.work.clone();
        change(&mut work);
        work.job(args.fixed)
    };
    match axis {
        Axis::Bytes => args.bytes.iter().map(|bytes| args.work.job(*bytes)).collect(),
        Axis::Params => args.cuts.iter().map(|params| with(&|work| work.params = *params)).collect(),
        Axis::Trainers => args.teams.iter().map(|trainers| with(&|work| work.trainers = *trainers)).collect(),
    }
}

/// Refuses what the machine has no memory for, before hours are spent on what comes before it.
fn check_memory(job: &BenchJob, alone: bool) -> Result<()> {
    let sides = if alone { 1 } else { 2 };
    let needed = job.bytes.saturating_mul(COPIES * u64::from(job.trainers) * sides);
    let there = memory_bytes().unwrap_or(u64::MAX);
    ensure!(
        needed < there,
        "{} needs about {}, and this machine has {}; expected less, or --alone, which needs half",
        job.title(),
        sizes::show(needed >> 20 << 20),
        sizes::show(there >> 20 << 20)
    );
    Ok(())
}

/// Adds the time per byte to the last result, and how much more it is than at the first of its axis.
fn per_byte(report: &mut Report, axis: Axis, job: &BenchJob, first: usize) {
    let result = report.results().last().expect("one was just measured").clone();
    let moved = f64::from(job.trainers) * (job.value_bytes() + job.gradient_bytes()) as f64;
    let micros = result.field("latency_us_p50").as_f64().unwrap_or(f64::NAN);
    // Microseconds a byte are 10^6 nanoseconds a kilobyte.
    let time = micros / moved * 1e6;
    let least = report.results().get(first).and_then(|one| one.field("nanoseconds_per_kilobyte").as_f64());
    let result = result
        .with("axis", word(axis))
        .with("nanoseconds_per_kilobyte", time)
        .with("growth", time / least.unwrap_or(time));
    report.replace(result);
}

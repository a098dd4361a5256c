//! `psbench latency`: how long one round takes, and how long the slow ones do.
//!
//! Without a rate the loop is closed: a round begins when the one before has ended. With a rate it is open: rounds
//! have a time at which they should begin, and their latency counts from it, so that a slow round shows in all that
//! had to wait behind it.

use anyhow::{Result, ensure};
use serde_json::json;

use super::pushpull::RunArgs;
use crate::alternation::RoundPace;
use crate::comparison::{Terms, measure};
use crate::report::{Column, Report, announce, plain, scaled};
use crate::sizes;

/// The options of `psbench latency`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of all parameters together; several sizes with commas between them.
    #[arg(short = 's', long, visible_alias = "size", value_parser = sizes::parse, value_delimiter = ',',
        default_value = "4KiB")]
    bytes: Vec<u64>,
    /// Every power of two from 4 bytes to 8 MiB instead.
    #[arg(short = 'a', long, conflicts_with = "bytes")]
    all: bool,
    /// Rounds that should begin in a second (an open loop); without it a round begins when the last has ended.
    #[arg(long)]
    rate: Option<f64>,
    #[command(flatten)]
    work: RunArgs,
}

const COLUMNS: &[Column] = &[
    plain("bytes", "#bytes"),
    plain("rounds", "#iters"),
    plain("rule", "op"),
    scaled("rounds_per_second", "rounds/s", 1.0, 1),
    scaled("latency_us_min", "min[us]", 1.0, 1),
    scaled("latency_us_p50", "p50", 1.0, 1),
    scaled("latency_us_p99", "p99", 1.0, 1),
    scaled("latency_us_p999", "p99.9", 1.0, 1),
    scaled("latency_us_max", "max", 1.0, 1),
    scaled("ceiling_latency_us_p50", "baseline p50", 1.0, 1),
    scaled("ceiling_latency_us_p99", "p99", 1.0, 1),
    scaled("ceiling_latency_us_p999", "p99.9", 1.0, 1),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    scaled("server_cpu_percent", "cpu%", 1.0, 1),
    plain("wrong", "#wrong"),
];

pub(crate) fn run(args: &Args) -> Result<Report> {
    if let Some(rate) = args.rate {
        ensure!(rate.is_finite() && rate > 0.0, "--rate {rate}: expected rounds a second, above zero");
    }
    let bytes = if args.all { sizes::all() } else { args.bytes.clone() };
    let jobs = args.work.jobs(&bytes)?;
    let parameters = json!({ "bytes": bytes, "rate_rounds_per_second": args.rate,
        "loop": if args.rate.is_some() { "open" } else { "closed" }, "duration_seconds": args.work.duration,
        "iterations": args.work.iterations, "job": jobs.first() });
    let mut report = Report::new("latency", parameters, COLUMNS);
    args.work.terms().expect(jobs.len(), &mut report);
    for job in &jobs {
        announce(&format!("latency of {}", job.title()));
        let terms = args.work.terms();
        measure(job, &Terms { pace: RoundPace { rate: args.rate, ..terms.pace }, ..terms }, &mut report)?;
    }
    Ok(report)
}

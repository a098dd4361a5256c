//! `psbench rows`: rows over the network, beside a baseline server that does the same for them; with `--local` a row
//! table on one core, beside a plain array that is walked in the same order.

use anyhow::{Result, ensure};
use clap::ValueEnum;
use pserver_core::rows::CatchUp;
use serde_json::json;

use crate::alternation::BLOCKS_MIN;
use crate::commands::kernels::Kernel;
use crate::counters::{self, Carried};
use crate::environment::memory_bytes;
use crate::job::{TransportName, word};
use crate::report::{Column, Outcome, Report, announce, plain, scaled};
use crate::route::Route;
use crate::rows::{BatchTimes, Distribution, Local, NetworkPlan, NetworkTimes, TablePlan};
use crate::sizes::{self, length};
use crate::statistics::{median, median_interval, percentile};

/// The treatment of updates that a row has missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Missed {
    /// Rows see them all before they are wanted again.
    Exact,
    /// Rows see only the updates they are in.
    Lazy,
}

/// The options of `psbench rows`.
//
// tidy: allow fields: one field for each option of a command line.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// One table in this process, and one core.
    #[arg(long)]
    local: bool,
    /// How bytes travel.
    #[arg(long, value_enum, default_value_t = TransportName::Tcp, conflicts_with = "local")]
    transport: TransportName,
    /// Trainers; each is a thread.
    #[arg(long, default_value_t = 1, conflicts_with = "local")]
    trainers: u32,
    /// Servers, within this process.
    #[arg(long, default_value_t = 1, conflicts_with = "local")]
    servers: u16,
    /// Shards of each server; each is a thread.
    #[arg(long, default_value_t = 1, conflicts_with = "local")]
    shards: u16,
    /// Spoil every value before it is checked: the run must fail.
    #[arg(long, hide = true, conflicts_with = "local")]
    spoil: bool,
    /// Rows of the table.
    #[arg(long, value_parser = sizes::parse, default_value = "2000000")]
    rows: u64,
    /// Elements of a row, f32.
    #[arg(long, default_value_t = 64)]
    width: u32,
    /// Ids of a batch, each counted as often as it comes.
    #[arg(long, value_parser = sizes::parse, default_value = "65536")]
    batch: u64,
    /// Rules, with --local; several with commas between them. Over the network it is gradient descent, whose values
    /// can be checked by counting.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "adagrad", requires = "local")]
    rule: Vec<Kernel>,
    /// How often rows are wanted; several with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "zipf,uniform")]
    distribution: Vec<Distribution>,
    /// How steep Zipf's law is.
    #[arg(long, default_value_t = 1.05)]
    exponent: f64,
    /// Treatment of updates that a row has missed, with --local.
    #[arg(long, value_enum, default_value = "exact", requires = "local")]
    missed: Missed,
    /// Batches that are looked up, and as many that are updated.
    #[arg(short = 'n', long, default_value_t = 5 * BLOCKS_MIN)]
    iterations: u32,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    scaled("rows_per_second", "Mrows/s", 1e6, 2),
    scaled("ceiling_rows_per_second", "array[Mrows/s]", 1e6, 2),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    scaled("latency_us_max", "slowest[ms]", 1e3, 3),
    scaled("latency_us_p50", "median[ms]", 1e3, 3),
    plain("wrong", "#wrong"),
];

pub(crate) fn run(args: &Args) -> Result<Report> {
    if !args.local {
        return over_network(args);
    }
    let rules: Vec<_> = args.rule.iter().map(|rule| crate::job::word(*rule)).collect();
    let distributions: Vec<_> = args.distribution.iter().map(|one| crate::job::word(*one)).collect();
    let parameters = json!({ "local": args.local, "rows": args.rows, "width": args.width, "batch": args.batch,
        "rules": rules, "distributions": distributions, "exponent": args.exponent,
        "missed": crate::job::word(args.missed), "iterations": args.iterations, "dtype": "f32", "threads": 1 });
    ensure!(args.rows > 0 && args.batch > 0 && args.iterations > 0, "expected rows, a batch and iterations");
    ensure!(args.exponent.is_finite() && args.exponent >= 0.0, "--exponent {}: expected zero or above", args.exponent);
    // The table and the array with two states, and the values that are compared.
    let needed = args.rows.saturating_mul(u64::from(args.width) * 4 * 7 + 64);
    if let Some(there) = memory_bytes() {
        ensure!(needed < there, "these tables take {needed} bytes; this machine has {there}");
    }
    let mut report = Report::new("rows", parameters, COLUMNS);
    report.expect(args.rule.len() * args.distribution.len(), "tables");
    for kernel in &args.rule {
        let name = crate::job::word(*kernel);
        let Some(rule) = kernel.rule()? else { anyhow::bail!("--rule {name}: expected one that updates") };
        for distribution in &args.distribution {
            announce(&format!("{name}, {}", crate::job::word(*distribution)));
            let plan = TablePlan {
                rows: args.rows,
                width: args.width,
                batch: length(args.batch),
                rule: rule.clone(),
                catch_up: if args.missed == Missed::Lazy { CatchUp::Lazy } else { CatchUp::Exact },
                distribution: *distribution,
                exponent: args.exponent,
                iterations: args.iterations,
            };
            outcomes(&name, &plan, &Local::measure(&plan)?, &mut report);
            report.measured(1);
        }
    }
    Ok(report)
}

fn outcomes(rule: &str, plan: &TablePlan, local: &Local, report: &mut Report) {
    let distribution = crate::job::word(plan.distribution);
    let outcome = |what: &str, times: &BatchTimes| {
        let (own, baseline) = (median(&times.own), median(&times.baseline));
        let ratios: Vec<f64> = times.own.iter().zip(&times.baseline).map(|(own, baseline)| baseline / own).collect();
        let (low, high) = median_interval(&ratios);
        let slowest = times.own.iter().copied().fold(0.0, f64::max);
        let batch = plan.batch.min(length(plan.rows)) as f64;
        let batch = if what == "first touch" { batch } else { plan.batch as f64 };
        Outcome::new(&format!("{what}, {rule}, {distribution}"))
            .with("rule", rule)
            .with("distribution", distribution.as_str())
            .with("rows_per_second", batch / own)
            .with("ceiling_rows_per_second", batch / baseline)
            .with("ratio_to_ceiling", baseline / own)
            .with("ratio_low", low)
            .with("ratio_high", high)
            .with("latency_us_p50", own * 1e6)
            .with("latency_us_max", slowest * 1e6)
            .with("block_latency_us", times.own.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
            .with("record_bytes", local.record_bytes)
            .with("index_bytes", local.index_bytes)
    };
    report.push(outcome("first touch", &local.touch));
    report.push(outcome("lookup", &local.lookup).with("wrong", local.wrong));
    report.push(outcome("update", &local.update).with("unique_rows_per_batch", local.unique));
}

/// Every distribution over the network.
fn over_network(args: &Args) -> Result<Report> {
    let distributions: Vec<_> = args.distribution.iter().map(|one| word(*one)).collect();
    let parameters = json!({ "local": false, "transport": word(args.transport), "trainers": args.trainers,
        "servers": args.servers, "shards": args.shards, "rows": args.rows, "width": args.width, "batch": args.batch,
        "distributions": distributions, "exponent": args.exponent, "iterations": args.iterations, "dtype": "f32" });
    ensure!(args.rows > 0 && args.batch > 0 && args.iterations > 0, "expected rows, a batch and iterations");
    ensure!(args.trainers > 0 && args.servers > 0 && args.shards > 0, "expected at least one of everybody");
    ensure!(args.transport != TransportName::Loopback, "--transport loopback: expected tcp, shm or verbs");
    let mut report = Report::new("rows", parameters, NETWORK_COLUMNS);
    counters::listen();
    report.expect(args.distribution.len(), "tables");
    for distribution in &args.distribution {
        announce(&format!("rows over {}, {}", word(args.transport), word(*distribution)));
        let plan = NetworkPlan {
            transport: args.transport,
            trainers: args.trainers,
            servers: args.servers,
            shards: args.shards,
            rows: args.rows,
            width: args.width,
            batch: length(args.batch),
            distribution: *distribution,
            exponent: args.exponent,
            iterations: args.iterations,
            spoil: args.spoil,
        };
        let network = NetworkTimes::measure(&plan)?;
        let chosen = Carried::of(args.transport, &counters::heard());
        report.travelled(&Route::of(chosen, &network.coordinator, "auto"));
        network_outcomes(&plan, &network, &mut report);
        report.measured(1);
    }
    Ok(report)
}

const NETWORK_COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("rounds", "#iters"),
    scaled("bytes_per_second_peak", "peak[GB/s]", 1e9, 3),
    scaled("bytes_per_second_average", "avg", 1e9, 3),
    scaled("rows_per_second", "Mrows/s", 1e6, 3),
    scaled("latency_us_min", "min[ms]", 1e3, 3),
    scaled("latency_us_p50", "p50", 1e3, 3),
    scaled("latency_us_p99", "p99", 1e3, 3),
    scaled("latency_us_max", "max", 1e3, 3),
    scaled("ceiling_latency_us_p50", "baseline", 1e3, 3),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    scaled("bytes_moved", "moved[MB]", 1e6, 3),
    scaled("dense_bytes", "dense[MB]", 1e6, 1),
    scaled("dense_bytes_ratio", "dense/moved", 1.0, 1),
    plain("wrong", "#wrong"),
];

fn network_outcomes(plan: &NetworkPlan, network: &NetworkTimes, report: &mut Report) {
    let dense = plan.rows as f64 * f64::from(plan.width) * 4.0;
    let outcome = |what: &str, times: &BatchTimes, bytes: f64| {
        let (own, baseline) = (median(&times.own), median(&times.baseline));
        let ratios: Vec<f64> = times.own.iter().zip(&times.baseline).map(|(own, baseline)| baseline / own).collect();
        let (low, high) = median_interval(&ratios);
        let all_bytes = bytes * f64::from(plan.trainers);
        let least = times.own.iter().copied().fold(f64::INFINITY, f64::min);
        let most = times.own.iter().copied().fold(0.0, f64::max);
        let rounds = times.own.len();
        let rate = rounds as f64 / times.own.iter().sum::<f64>();
        Outcome::new(&format!("{what}, {}", word(plan.distribution)))
            .with("distribution", word(plan.distribution))
            .with("rounds", rounds)
            .with("rounds_per_second", rate)
            .with("bytes_per_second_peak", all_bytes / least)
            .with("bytes_per_second_average", all_bytes * rate)
            .with("latency_us_min", least * 1e6)
            .with("latency_us_p99", percentile(&times.own, 0.99) * 1e6)
            .with("latency_us_max", most * 1e6)
            .with("rows_per_second", plan.batch as f64 * f64::from(plan.trainers) / own)
            .with("ratio_to_ceiling", baseline / own)
            .with("ratio_low", low)
            .with("ratio_high", high)
            .with("ceiling_name", "baseline tcp, a hash table")
            .with("latency_us_p50", own * 1e6)
            .with("ceiling_latency_us_p50", baseline * 1e6)
            .with("block_latency_us", times.own.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
            .with("bytes_moved", bytes)
            .with("dense_bytes", dense)
            .with("dense_bytes_ratio", dense / bytes)
    };
    report.push(outcome("push", &network.push, network.push_bytes));
    report.push(outcome("pull", &network.pull, network.pull_bytes).with("wrong", network.wrong));
}

//! `psbench pushpull`: gradients to the servers and values back, beside the straight server of the same path.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::duel::{BLOCKS_MIN, Block, Pace, Team, alternate, rounds_for};
use crate::job::{Dtype, Job, ModeName, Poll, RuleName, Transport, word};
use crate::report::{Column, Outcome, Report, plain, scaled};
use crate::sizes;
use crate::statistics::{median, median_interval, percentile};
use crate::straight::Shape;

/// What is moved, how, and by whom.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Work {
    /// How bytes travel.
    #[arg(long, value_enum, default_value_t = Transport::Tcp)]
    pub(crate) transport: Transport,
    /// Trainers; each is a process.
    #[arg(long, default_value_t = 1)]
    pub(crate) trainers: u32,
    /// Servers; each is a process.
    #[arg(long, default_value_t = 1)]
    pub(crate) servers: u16,
    /// Shards of each server.
    #[arg(long, default_value_t = 1)]
    pub(crate) shards: u16,
    /// Parameters that the bytes are cut into.
    #[arg(long, default_value_t = 1)]
    pub(crate) params: u32,
    /// The servers' chunk.
    #[arg(long, value_parser = sizes::parse, default_value = "1MiB")]
    pub(crate) chunk: u64,
    /// How trainers share parameters.
    #[arg(long, value_enum, default_value_t = ModeName::Sync)]
    pub(crate) mode: ModeName,
    /// The type of gradients.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub(crate) dtype: Dtype,
    /// What the servers do with gradients.
    #[arg(long, value_enum, default_value_t = RuleName::Sgd)]
    pub(crate) rule: RuleName,
    /// How everybody waits.
    #[arg(long, value_enum, default_value_t = Poll::Block)]
    pub(crate) poll: Poll,
    /// Seconds of a size, both servers together.
    #[arg(short = 'D', long, default_value_t = 4.0)]
    pub(crate) duration: f64,
    /// Rounds of each server and size, instead of a duration.
    #[arg(short = 'n', long)]
    pub(crate) iterations: Option<u32>,
    /// Use the servers of this job instead of starting some; they must run with `--merge sum`.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) connect: Option<String>,
    /// Spoil every value before it is checked: the run must fail.
    #[arg(long, hide = true)]
    pub(crate) spoil: bool,
}

/// The options of `psbench pushpull`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of all parameters together; several sizes with commas between them.
    #[arg(short = 's', long, value_parser = sizes::parse, value_delimiter = ',', default_value = "4KiB,1MiB,4MiB,64MiB")]
    pub(crate) bytes: Vec<u64>,
    #[command(flatten)]
    pub(crate) work: Work,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("rounds", "rounds"),
    scaled("latency_us_p50", "p50[us]", 1.0, 1),
    scaled("latency_us_p99", "p99[us]", 1.0, 1),
    scaled("bytes_per_second", "GB/s", 1e9, 3),
    scaled("ceiling_latency_us_p50", "straight[us]", 1.0, 1),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    scaled("server_cpu_seconds_per_gigabyte", "cpu[s/GB]", 1.0, 3),
    scaled("ceiling_server_cpu_seconds_per_gigabyte", "straight", 1.0, 3),
    scaled("server_peak_rss_bytes", "rss[MB]", 1e6, 1),
    plain("wrong", "#wrong"),
];

impl Work {
    /// The job of a size.
    pub(crate) fn job(&self, bytes: u64) -> Result<Job> {
        let job = Job {
            transport: self.transport,
            trainers: self.trainers,
            servers: self.servers,
            shards: self.shards,
            bytes,
            parameters: self.params,
            chunk_bytes: self.chunk,
            mode: self.mode,
            dtype: self.dtype,
            rule: self.rule,
            poll: self.poll,
        };
        job.check()?;
        Ok(job)
    }
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    let work = &args.work;
    let jobs = args.bytes.iter().map(|bytes| work.job(*bytes)).collect::<Result<Vec<_>>>()?;
    let parameters = json!({ "bytes": args.bytes, "duration_seconds": work.duration, "iterations": work.iterations,
        "connect": work.connect, "job": jobs.first() });
    let mut report = Report::new("pushpull", parameters, COLUMNS);
    for job in &jobs {
        eprintln!("psbench: pushpull {} of {}", word(job.transport), job.title());
        measure(job, work, &mut report)?;
    }
    Ok(report)
}

/// Measures one job beside its straight server.
pub(crate) fn measure(job: &Job, work: &Work, report: &mut Report) -> Result<()> {
    ensure!(work.duration > 0.0, "--duration {}: expected seconds above zero", work.duration);
    let pace = Pace { rate: None, spoil: work.spoil };
    let mut ours = Team::ours(job, work.connect.as_deref())?;
    let mut straight = Team::best_straight(Shape::of(job.transport), job)?;
    let mut teams = [&mut ours, &mut straight];
    let rounds = match work.iterations {
        Some(iterations) => {
            alternate(&mut teams, pace, 1, 1)?;
            iterations.div_ceil(BLOCKS_MIN).max(1)
        }
        None => rounds_for(&mut teams, pace, work.duration)?,
    };
    // The straight server's rounds are checked too, but only ours are spoiled on purpose.
    let results = alternate(&mut teams, pace, rounds, BLOCKS_MIN)?;
    let [mine, theirs] = results.as_slice() else { unreachable!("there are two teams") };
    note_intervals(report, job, mine, theirs);
    report.results.push(outcome(job, (&ours, mine), (&straight, theirs)));
    Ok(())
}

fn outcome(job: &Job, (ours, mine): (&Team, &[Block]), (straight, theirs): (&Team, &[Block])) -> Outcome {
    let seconds: Vec<f64> = mine.iter().flat_map(|block| block.seconds.iter().copied()).collect();
    let medians = |blocks: &[Block]| blocks.iter().map(|block| median(&block.seconds)).collect::<Vec<_>>();
    let (own, other) = (medians(mine), medians(theirs));
    let ratios: Vec<f64> = own.iter().zip(&other).map(|(own, other)| other / own).collect();
    let (low, high) = median_interval(&ratios);
    let p50 = median(&own);
    let moved = |blocks: &[Block]| {
        let rounds: usize = blocks.iter().map(|block| block.seconds.len()).sum();
        rounds as f64 * f64::from(job.trainers) * (job.bytes + job.gradient_bytes()) as f64
    };
    let cpu =
        |blocks: &[Block]| blocks.iter().map(|block| block.server.cpu_seconds).sum::<f64>() / (moved(blocks) * 1e-9);
    let per_round = f64::from(job.trainers) * (job.bytes + job.gradient_bytes()) as f64;
    let wrong: u64 = mine.iter().chain(theirs).map(|block| block.wrong).sum();
    let rss = mine.iter().map(|block| block.server.peak_rss_bytes).max().unwrap_or(0);
    let known = |value: f64| if ours.has_servers() { json!(value) } else { Value::Null };
    let mut result = Outcome::new(&format!("{} {}", ours.name, job.title()));
    for (key, value) in parameters(job) {
        result = result.with(&key, value);
    }
    result
        .with("rounds", seconds.len())
        .with("blocks", mine.len())
        .with("latency_us_min", percentile(&seconds, 0.0) * 1e6)
        .with("latency_us_p50", p50 * 1e6)
        .with("latency_us_p99", percentile(&seconds, 0.99) * 1e6)
        .with("latency_us_p999", percentile(&seconds, 0.999) * 1e6)
        .with("latency_us_max", percentile(&seconds, 1.0) * 1e6)
        .with("block_latency_us", own.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
        .with("bytes_per_second", per_round / p50)
        .with("ceiling_name", straight.name.as_str())
        .with("ceiling_chunk_bytes", straight.chunk_bytes)
        .with("ceiling_latency_us_p50", median(&other) * 1e6)
        .with("ratio_to_ceiling", median(&other) / p50)
        .with("ratio_low", low)
        .with("ratio_high", high)
        .with("server_cpu_seconds_per_gigabyte", known(cpu(mine)))
        .with("ceiling_server_cpu_seconds_per_gigabyte", cpu(theirs))
        .with("server_peak_rss_bytes", known(rss as f64))
        .with("server_peak_rss_per_parameter_byte", known(rss as f64 / job.bytes as f64))
        .with("wrong", wrong)
}

/// A job's parameters as fields of a result.
pub(crate) fn parameters(job: &Job) -> serde_json::Map<String, Value> {
    match serde_json::to_value(job) {
        Ok(Value::Object(fields)) => fields,
        _ => unreachable!("a job is written as an object"),
    }
}

fn note_intervals(report: &mut Report, job: &Job, mine: &[Block], theirs: &[Block]) {
    for (index, (own, other)) in mine.iter().zip(theirs).enumerate() {
        report.intervals.push(json!({
            "block": index,
            "bytes": job.bytes,
            "rounds": own.seconds.len(),
            "latency_us_p50": median(&own.seconds) * 1e6,
            "ceiling_latency_us_p50": median(&other.seconds) * 1e6,
            "server_cpu_seconds": own.server.cpu_seconds,
            "wrong": own.wrong + other.wrong,
        }));
    }
}

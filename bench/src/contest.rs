//! A job measured beside the straight server of its path, as one result.

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use pserver_core::wire::Address;
use serde_json::{Map, Value, json};

use crate::child::Verbs;
use crate::duel::{BLOCKS_MIN, Block, Pace, Team, alternate, rounds_for};
use crate::job::Job;
use crate::report::{Outcome, Report};
use crate::statistics::{median, median_interval};
use crate::straight::Shape;

/// How a job is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'a> {
    /// Seconds of both together.
    pub(crate) duration: f64,
    /// Rounds of each, instead of a duration.
    pub(crate) iterations: Option<u32>,
    /// Servers that are there already.
    pub(crate) connect: Option<&'a str>,
    /// Without the straight server.
    pub(crate) alone: bool,
    pub(crate) pace: Pace,
}

/// A team's blocks, with what was made of them.
struct Score<'a> {
    team: &'a Team,
    blocks: &'a [Block],
    /// Of each block the median, in seconds.
    medians: Vec<f64>,
    /// Of all rounds, in nanoseconds.
    latencies: Histogram<u64>,
    /// Of a round, in both directions, of all trainers.
    round_bytes: f64,
}

/// Measures a job, and notes its blocks, its latencies and the result.
pub(crate) fn measure(job: &Job, terms: &Terms<'_>, report: &mut Report) -> Result<()> {
    ensure!(terms.duration > 0.0, "--duration {}: expected seconds above zero", terms.duration);
    let mut ours = Team::ours(job, terms.connect)?;
    // What this machine does says nothing about servers on another.
    let is_here = match terms.connect {
        _ if terms.alone => false,
        Some(address) => Address::parse(address)?.is_loopback(),
        None => true,
    };
    let mut straight = is_here.then(|| Team::best_straight(Shape::of(job), job)).transpose()?;
    let mut teams: Vec<&mut Team> = std::iter::once(&mut ours).chain(&mut straight).collect();
    let rounds = match (terms.iterations, terms.pace.rate) {
        (Some(iterations), _) => {
            alternate(&mut teams, terms.pace, 1, 1)?;
            iterations.div_ceil(BLOCKS_MIN).max(1)
        }
        // How long a block takes is the rate's choice.
        (None, Some(rate)) => {
            alternate(&mut teams, Pace { rate: None, ..terms.pace }, 10, 1)?;
            whole(terms.duration * rate / f64::from(2 * BLOCKS_MIN))
        }
        (None, None) => rounds_for(&mut teams, terms.pace, terms.duration)?,
    };
    let results = alternate(&mut teams, terms.pace, rounds, BLOCKS_MIN)?;
    let mine = Score::new(&ours, job, &results[0])?;
    let theirs = straight.as_ref().map(|team| Score::new(team, job, &results[1])).transpose()?;
    note_intervals(report, job, &mine, theirs.as_ref());
    let mut result = outcome(job, &mine);
    let name = result.name().to_owned();
    if let Some(theirs) = theirs {
        result = beside(result, &mine, &theirs);
        report.histograms.push((format!("{} for {name}", theirs.team.name), theirs.latencies));
    }
    report.histograms.push((name, mine.latencies));
    report.results.push(result);
    Ok(())
}

impl<'a> Score<'a> {
    fn new(team: &'a Team, job: &Job, blocks: &'a [Block]) -> Result<Self> {
        let medians = blocks.iter().map(|block| median(&block.seconds)).collect();
        // Three digits, from a nanosecond to an hour.
        let mut latencies = Histogram::new_with_bounds(1, 3_600_000_000_000, 3)?;
        for seconds in blocks.iter().flat_map(|block| &block.seconds) {
            latencies.saturating_record(nanoseconds(*seconds));
        }
        let round_bytes = f64::from(job.trainers) * (job.value_bytes() + job.gradient_bytes()) as f64;
        Ok(Self { team, blocks, medians, latencies, round_bytes })
    }

    fn p50_us(&self) -> f64 {
        median(&self.medians) * 1e6
    }

    fn latency_us(&self, share: f64) -> f64 {
        // A count of nanoseconds below an hour is exact.
        self.latencies.value_at_quantile(share) as f64 * 1e-3
    }

    fn wrong(&self) -> u64 {
        self.blocks.iter().map(|block| block.wrong).sum()
    }

    /// Of its servers, for a thousand million bytes in either direction.
    fn cpu_seconds_per_gigabyte(&self) -> Option<f64> {
        let used: f64 = self.blocks.iter().map(|block| block.server.cpu_seconds).sum();
        self.team.has_servers().then(|| used / (self.round_bytes * self.latencies.len() as f64 * 1e-9))
    }

    /// What went over verbs in all blocks, on the trainers' side.
    fn verbs(&self, what: fn(&Verbs) -> u64) -> u64 {
        self.blocks.iter().map(|block| what(&block.verbs)).sum()
    }

    fn peak_rss_bytes(&self) -> Option<u64> {
        let most = self.blocks.iter().map(|block| block.server.peak_rss_bytes).max();
        most.filter(|_| self.team.has_servers())
    }
}

/// What was measured of ours.
fn outcome(job: &Job, mine: &Score<'_>) -> Outcome {
    let round_bytes = mine.round_bytes;
    let rss = mine.peak_rss_bytes();
    let mut result = Outcome::new(&format!("{} {}", mine.team.name, job.title()));
    for (key, value) in parameters(job) {
        result = result.with(&key, value);
    }
    result
        .with("rounds", mine.latencies.len())
        .with("blocks", mine.blocks.len())
        .with("latency_us_min", mine.latencies.min() as f64 * 1e-3)
        .with("latency_us_p50", mine.p50_us())
        .with("latency_us_p99", mine.latency_us(0.99))
        .with("latency_us_p999", mine.latency_us(0.999))
        .with("latency_us_max", mine.latencies.max() as f64 * 1e-3)
        .with("block_latency_us", mine.medians.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
        .with("bytes_per_second", round_bytes / mine.p50_us() * 1e6)
        .with("server_cpu_seconds_per_gigabyte", json!(mine.cpu_seconds_per_gigabyte()))
        .with("server_peak_rss_bytes", json!(rss))
        .with("server_peak_rss_per_parameter_byte", json!(rss.map(|rss| rss as f64 / job.bytes as f64)))
        .with("copies", json!(mine.verbs(|verbs| verbs.copies)))
        .with("registrations", json!(mine.verbs(|verbs| verbs.registrations)))
        .with("connections", json!(mine.blocks.last().map_or(0, |block| block.verbs.connections)))
        .with("wrong", mine.wrong())
}

/// The same with what was measured of the straight server, in the same run.
fn beside(result: Outcome, mine: &Score<'_>, theirs: &Score<'_>) -> Outcome {
    let ratios: Vec<f64> = mine.medians.iter().zip(&theirs.medians).map(|(own, other)| other / own).collect();
    let (low, high) = median_interval(&ratios);
    result
        .with("ceiling_name", theirs.team.name.as_str())
        .with("ceiling_chunk_bytes", theirs.team.chunk_bytes)
        .with("ceiling_latency_us_p50", theirs.p50_us())
        .with("ceiling_latency_us_p99", theirs.latency_us(0.99))
        .with("ceiling_latency_us_p999", theirs.latency_us(0.999))
        .with("ratio_to_ceiling", theirs.p50_us() / mine.p50_us())
        .with("ratio_low", low)
        .with("ratio_high", high)
        .with("ceiling_server_cpu_seconds_per_gigabyte", json!(theirs.cpu_seconds_per_gigabyte()))
        .with("wrong", mine.wrong() + theirs.wrong())
}

/// A job's parameters as fields of a result.
fn parameters(job: &Job) -> Map<String, Value> {
    match serde_json::to_value(job) {
        Ok(Value::Object(fields)) => fields,
        _ => unreachable!("a job is written as an object"),
    }
}

fn note_intervals(report: &mut Report, job: &Job, mine: &Score<'_>, theirs: Option<&Score<'_>>) {
    for (index, own) in mine.blocks.iter().enumerate() {
        report.intervals.push(json!({
            "block": index,
            "name": format!("{} {}", mine.team.name, job.title()),
            "rounds": own.seconds.len(),
            "latency_us_p50": mine.medians[index] * 1e6,
            "ceiling_latency_us_p50": theirs.map(|theirs| theirs.medians[index] * 1e6),
            "server_cpu_seconds": own.server.cpu_seconds,
            "wrong": own.wrong + theirs.map_or(0, |theirs| theirs.blocks[index].wrong),
        }));
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time is positive, and short")]
fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).max(1.0) as u64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is within 1 and a million")]
fn whole(rounds: f64) -> u32 {
    rounds.clamp(1.0, 1e6) as u32
}

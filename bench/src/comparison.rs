//! A job measured beside the baseline server of its path, as one result.

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use pserver_core::wire::Address;
use serde_json::{Map, Value, json};

use crate::alternation::{BLOCKS_MIN, RoundBlock, RoundPace, Team, TeamServers, alternate, rounds_for};
use crate::baseline::Shape;
use crate::child::Verbs;
use crate::job::{BenchJob, TransportName};
use crate::report::{Outcome, Report};
use crate::statistics::{median, median_interval};

/// How a job is run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'a> {
    /// Seconds of both together.
    pub(crate) duration: f64,
    /// Rounds of each, instead of a duration.
    pub(crate) iterations: Option<u32>,
    /// Servers that are there already.
    pub(crate) connect: Option<&'a str>,
    /// Without the baseline server.
    pub(crate) alone: bool,
    /// Settings of the servers of ours that stand in the baseline server's place.
    pub(crate) beside: &'a [String],
    /// The build of those servers and their trainers.
    pub(crate) beside_program: Option<&'a str>,
    pub(crate) pace: RoundPace,
}

impl Terms<'_> {
    /// Sides that alternate, as far as is known before the servers are asked where they are.
    fn sides(&self) -> usize {
        if self.alone { 1 } else { 2 }
    }

    /// Announces the blocks of so many jobs.
    pub(crate) fn expect(&self, jobs: usize, report: &mut Report) {
        report.expect(jobs * self.sides() * BLOCKS_MIN as usize, "blocks");
    }

    /// The job as others of ours do it in the baseline server's place, if they do.
    fn other(&self, job: &BenchJob) -> Option<BenchJob> {
        let serve = [&job.serve[..], self.beside].concat();
        let program = self.beside_program.map(str::to_owned);
        (!self.beside.is_empty() || program.is_some()).then(|| BenchJob { serve, program, ..job.clone() })
    }
}

/// A team's blocks, with what was made of them.
pub(crate) struct Score<'a> {
    team: &'a Team,
    blocks: &'a [RoundBlock],
    /// Of each block the median, in seconds.
    medians: Vec<f64>,
    /// Of all rounds, in nanoseconds.
    latencies: Histogram<u64>,
    /// Of a round, in both directions, of all trainers.
    round_bytes: f64,
    /// In which rounds were under way.
    timed_seconds: f64,
    /// Of all blocks, with what happens between rounds.
    whole_seconds: f64,
}

/// Measures a job, and notes its blocks, its latencies and the result.
pub(crate) fn measure(job: &BenchJob, terms: &Terms<'_>, report: &mut Report) -> Result<()> {
    ensure!(terms.duration > 0.0, "--duration {}: expected seconds above zero", terms.duration);
    let servers = terms.connect.map_or(TeamServers::Own, TeamServers::At);
    let mut ours = Team::ours(job, servers)?;
    // Trainers have met all servers when a round is over.
    ours.block(1, RoundPace { rate: None, ..terms.pace })?;
    let route = ours.route(job)?;
    report.travelled(&route);
    let is_far = terms.connect.map(Address::parse).transpose()?.is_some_and(|address| !address.is_loopback());
    // The load of this machine says nothing about servers on another machine.
    let is_beside = !is_far && !terms.alone;
    let chosen = BenchJob { transport: route.carried.transport().unwrap_or(TransportName::Tcp), ..job.clone() };
    let baseline = || match terms.other(job) {
        Some(other) => Team::ours(&other, TeamServers::Own),
        None => Team::best_baseline(Shape::of(&chosen), &chosen, None),
    };
    let mut baseline = is_beside.then(baseline).transpose()?;
    let mut teams: Vec<&mut Team> = std::iter::once(&mut ours).chain(&mut baseline).collect();
    let (rounds, seconds) = match (terms.iterations, terms.pace.rate) {
        (Some(iterations), _) => {
            alternate(&mut teams, terms.pace, 1, (1, 0.0), &mut |_| ())?;
            (iterations.div_ceil(BLOCKS_MIN).max(1), 0.0)
        }
        // How long a block takes is the rate's choice.
        (None, Some(rate)) => {
            alternate(&mut teams, RoundPace { rate: None, ..terms.pace }, 10, (1, 0.0), &mut |_| ())?;
            (whole(terms.duration * rate / f64::from(2 * BLOCKS_MIN)), 0.0)
        }
        (None, None) => (rounds_for(&mut teams, terms.pace, terms.duration)?, terms.duration),
    };
    report.measured(terms.sides() * BLOCKS_MIN as usize - teams.len() * BLOCKS_MIN as usize);
    let count = &mut |is_more: bool| {
        if is_more {
            report.expect(1, "blocks");
        }
        report.measured(1);
    };
    let results = alternate(&mut teams, terms.pace, rounds, (BLOCKS_MIN, seconds), count)?;
    let mine = Score::new(&ours, job, &results[0], terms.pace)?;
    let ceiling = baseline.as_ref().map(|team| Score::new(team, job, &results[1], terms.pace)).transpose()?;
    note_intervals(report, job, &mine, ceiling.as_ref());
    let mut result = outcome(job, &mine).with("carried_by", route.carried.by.as_str());
    let name = result.name().to_owned();
    if !is_beside {
        let link = route.link.bits_per_second.filter(|_| is_far);
        result = beside_link(result, job, link, mine.p50_us(), terms.alone);
    }
    if let Some(ceiling) = ceiling {
        result = beside(result, &mine, &ceiling);
        report.histograms.push((format!("{} for {name}", ceiling.team.name), ceiling.latencies));
    }
    report.histograms.push((name, mine.latencies));
    report.push(result);
    Ok(())
}

/// A result without a baseline server: beside the link's own speed, if that is known.
fn beside_link(result: Outcome, job: &BenchJob, bits_per_second: Option<u64>, p50_us: f64, is_alone: bool) -> Outcome {
    let Some(bits_per_second) = bits_per_second else {
        return result.without_ratio(if is_alone {
            "--alone leaves the baseline server out"
        } else {
            "--connect: the servers are on another machine, and the system does not know how fast the link there is"
        });
    };
    // Both directions are busy at once, and all trainers are here.
    let bytes = u64::from(job.trainers) * job.value_bytes().max(job.gradient_bytes());
    let least_us = bytes as f64 * 8.0 / bits_per_second as f64 * 1e6;
    result
        .with("ceiling_name", "the link's speed")
        .with("ceiling_latency_us_p50", least_us)
        .with("ratio_to_ceiling", least_us / p50_us)
}

impl<'a> Score<'a> {
    pub(crate) fn new(team: &'a Team, job: &BenchJob, blocks: &'a [RoundBlock], pace: RoundPace) -> Result<Self> {
        let medians = blocks.iter().map(|block| median(&block.seconds)).collect();
        // Three digits, from a nanosecond to an hour.
        let mut latencies = Histogram::new_with_bounds(1, 3_600_000_000_000, 3)?;
        for seconds in blocks.iter().flat_map(|block| &block.seconds) {
            latencies.saturating_record(nanoseconds(*seconds));
        }
        let round_bytes = f64::from(job.trainers) * (job.value_bytes() + job.gradient_bytes()) as f64;
        let all = |seconds: fn(&RoundBlock) -> f64| blocks.iter().map(seconds).sum::<f64>();
        let whole_seconds = all(|block| block.whole_seconds);
        // With a rate, rounds count from when they should have begun, and may overlap.
        let timed_seconds = if pace.rate.is_some() { whole_seconds } else { all(|block| block.seconds.iter().sum()) };
        Ok(Self { team, blocks, medians, latencies, round_bytes, timed_seconds, whole_seconds })
    }

    fn p50_us(&self) -> f64 {
        median(&self.medians) * 1e6
    }

    fn latency_us(&self, share: f64) -> f64 {
        // A count of nanoseconds below an hour is exact.
        self.latencies.value_at_quantile(share) as f64 * 1e-3
    }

    pub(crate) fn wrong(&self) -> u64 {
        self.blocks.iter().map(|block| block.wrong).sum()
    }

    /// Of its servers, for a thousand million bytes in either direction.
    fn cpu_seconds_per_gigabyte(&self) -> Option<f64> {
        Some(self.cpu_seconds()? / (self.bytes() * 1e-9))
    }

    /// Of its servers together: how much of one processor they took while rounds were under way.
    fn cpu_percent(&self) -> Option<f64> {
        // Servers that spin do so between rounds too.
        let seconds = if self.team.spins() { self.whole_seconds } else { self.timed_seconds };
        Some(self.cpu_seconds()? / seconds * 100.0)
    }

    fn cpu_seconds(&self) -> Option<f64> {
        self.blocks.iter().map(|block| block.server.map(|server| server.cpu_seconds)).sum()
    }

    /// Of all rounds.
    fn bytes(&self) -> f64 {
        self.round_bytes * self.latencies.len() as f64
    }

    /// The columns that every result of rounds has.
    pub(crate) fn figures(&self, result: Outcome) -> Outcome {
        let fastest = self.medians.iter().copied().fold(f64::INFINITY, f64::min);
        result
            .with("rounds", self.latencies.len())
            .with("blocks", self.blocks.len())
            .with("latency_us_min", self.latencies.min() as f64 * 1e-3)
            .with("latency_us_p50", self.p50_us())
            .with("latency_us_p99", self.latency_us(0.99))
            .with("latency_us_p999", self.latency_us(0.999))
            .with("latency_us_max", self.latencies.max() as f64 * 1e-3)
            .with("block_latency_us", self.medians.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>())
            .with("bytes_per_second", self.round_bytes / self.p50_us() * 1e6)
            .with("bytes_per_second_peak", self.round_bytes / fastest)
            .with("bytes_per_second_average", self.bytes() / self.timed_seconds)
            .with("rounds_per_second", self.latencies.len() as f64 / self.timed_seconds)
            .with("server_cpu_percent", json!(self.cpu_percent()))
            .with("server_cpu_seconds_per_gigabyte", json!(self.cpu_seconds_per_gigabyte()))
    }

    /// The trainers' counters of verbs in all blocks.
    fn verbs(&self, what: fn(&Verbs) -> u64) -> u64 {
        self.blocks.iter().map(|block| what(&block.verbs)).sum()
    }

    fn peak_rss_bytes(&self) -> Option<u64> {
        self.blocks.iter().filter_map(|block| block.server.map(|server| server.peak_rss_bytes)).max()
    }
}

/// The measurements of pserver.
fn outcome(job: &BenchJob, mine: &Score<'_>) -> Outcome {
    let rss = mine.peak_rss_bytes();
    let mut result = Outcome::new(&format!("{} {}", mine.team.name, job.title()));
    for (key, value) in parameters(job) {
        result = result.with(&key, value);
    }
    mine.figures(result)
        .with("server_peak_rss_bytes", json!(rss))
        .with("server_peak_rss_per_parameter_byte", json!(rss.map(|rss| rss as f64 / job.bytes as f64)))
        .with("copies", json!(mine.verbs(|verbs| verbs.copies)))
        .with("registrations", json!(mine.verbs(|verbs| verbs.registrations)))
        .with("connections", json!(mine.blocks.last().map_or(0, |block| block.verbs.connections)))
        .with("wrong", mine.wrong())
}

/// The same with what was measured of the baseline server, in the same run.
fn beside(result: Outcome, mine: &Score<'_>, ceiling: &Score<'_>) -> Outcome {
    let ratios: Vec<f64> = mine.medians.iter().zip(&ceiling.medians).map(|(own, other)| other / own).collect();
    let (low, high) = median_interval(&ratios);
    result
        .with("ceiling_name", ceiling.team.name.as_str())
        .with("ceiling_chunk_bytes", ceiling.team.chunk_bytes)
        .with("ceiling_latency_us_p50", ceiling.p50_us())
        .with("ceiling_latency_us_p99", ceiling.latency_us(0.99))
        .with("ceiling_latency_us_p999", ceiling.latency_us(0.999))
        .with("ratio_to_ceiling", ceiling.p50_us() / mine.p50_us())
        .with("ratio_low", low)
        .with("ratio_high", high)
        .with("ceiling_server_cpu_seconds_per_gigabyte", json!(ceiling.cpu_seconds_per_gigabyte()))
        .with("wrong", mine.wrong() + ceiling.wrong())
}

/// A job's parameters as fields of a result.
fn parameters(job: &BenchJob) -> Map<String, Value> {
    match serde_json::to_value(job) {
        Ok(Value::Object(fields)) => fields,
        _ => unreachable!("a job is written as an object"),
    }
}

fn note_intervals(report: &mut Report, job: &BenchJob, mine: &Score<'_>, ceiling: Option<&Score<'_>>) {
    for (index, own) in mine.blocks.iter().enumerate() {
        report.intervals.push(json!({
            "block": index,
            "name": format!("{} {}", mine.team.name, job.title()),
            "rounds": own.seconds.len(),
            "latency_us_p50": mine.medians[index] * 1e6,
            "ceiling_latency_us_p50": ceiling.map(|ceiling| ceiling.medians[index] * 1e6),
            "server_cpu_seconds": own.server.map(|server| server.cpu_seconds),
            "wrong": own.wrong + ceiling.map_or(0, |ceiling| ceiling.blocks[index].wrong),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::RuleName;
    use crate::pattern::tests::job;

    #[test]
    fn the_ceiling_of_remote_servers_is_the_rate_of_the_link() {
        let job = BenchJob { bytes: 1_000_000, trainers: 2, ..job(RuleName::Sum) };
        // Two megabytes a direction at 10 Gb/s take 1.6 ms.
        let result = beside_link(Outcome::new("x"), &job, Some(10_000_000_000), 3200.0, false);
        assert_eq!(result.field("ratio_to_ceiling"), 0.5);
        assert!(result.field("no_ratio_because").is_null());
        for (is_alone, words) in [(true, "--alone"), (false, "--connect")] {
            let result = beside_link(Outcome::new("x"), &job, None, 3200.0, is_alone);
            assert!(result.field("ratio_to_ceiling").is_null());
            assert!(result.field("no_ratio_because").as_str().is_some_and(|why| why.starts_with(words)));
        }
    }
}

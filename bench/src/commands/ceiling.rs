//! `psbench ceiling`: what this machine can do, with nothing of the parameter server in the way.

mod memory;

use anyhow::Result;
use serde_json::json;

use crate::duel::{BLOCKS_MIN, CHUNKS, Pace, Team, alternate, rounds_for};
use crate::job::{Buffers, Checks, Dtype, Job, ModeName, Poll, RuleName, Transport, word};
use crate::report::{Column, Outcome, Report, plain, scaled};
use crate::sizes::{self, length};
use crate::statistics::{median, percentile};
use crate::straight::Shape;
use crate::straight::link::Link;

/// The options of `psbench ceiling`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of a gradient; several sizes with commas between them.
    #[arg(short = 's', long, value_parser = sizes::parse, value_delimiter = ',', default_value = sizes::USUAL)]
    bytes: Vec<u64>,
    /// Trainers of the straight servers; several counts with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    trainers: Vec<u32>,
    /// How everybody waits; several ways with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "block,busy")]
    poll: Vec<Poll>,
    /// Seconds of each straight server.
    #[arg(short = 'D', long, default_value_t = 0.5)]
    duration: f64,
    /// Bytes of the arrays that measure memory: in memory, and in the cache.
    #[arg(long, value_parser = sizes::parse, value_delimiter = ',', default_value = "256MiB,1MiB")]
    arrays: Vec<u64>,
    /// Streams of the raw TCP link; several counts with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    streams: Vec<u32>,
    /// Bytes on each stream of the raw TCP link.
    #[arg(long, value_parser = sizes::parse, default_value = "128MiB")]
    link_bytes: u64,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("poll", "poll"),
    plain("chunk_bytes", "chunk[B]"),
    scaled("latency_us_p50", "p50[us]", 1.0, 1),
    scaled("latency_us_p99", "p99[us]", 1.0, 1),
    scaled("bytes_per_second", "GB/s", 1e9, 2),
    scaled("server_cpu_seconds_per_gigabyte", "cpu[s/GB]", 1.0, 3),
    plain("wrong", "#wrong"),
];

pub(crate) fn run(args: &Args) -> Result<Report> {
    let parameters = json!({ "bytes": args.bytes, "trainers": args.trainers, "duration_seconds": args.duration,
        "poll": args.poll.iter().map(|poll| word(*poll)).collect::<Vec<_>>(), "arrays_bytes": args.arrays,
        "streams": args.streams, "link_bytes": args.link_bytes });
    let mut report = Report::new("ceiling", parameters, COLUMNS);
    for bytes in &args.arrays {
        memory::measure(*bytes, &mut report);
    }
    for streams in &args.streams {
        for both_ways in [false, true] {
            link(*streams, both_ways, args.link_bytes, &mut report)?;
        }
    }
    for (shape, name) in [(Shape::Tcp, "tcp ping, 4 bytes"), (Shape::ShmInPlace, "shared memory ping, 4 bytes")] {
        for poll in &args.poll {
            let mut result = straight(shape, &job(4, 1, *poll), args.duration)?;
            result = result.with("name", name);
            report.results.push(result);
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for shape in [Shape::Tcp, Shape::ShmCopy, Shape::ShmInPlace] {
        for trainers in &args.trainers {
            for poll in &args.poll {
                let spinners = length(u64::from(*trainers)) + 1;
                if *poll == Poll::Busy && cores < spinners {
                    eprintln!("psbench: {}: {spinners} processes cannot spin on {cores} cores", shape.name());
                    continue;
                }
                for bytes in &args.bytes {
                    report.results.push(straight(shape, &job(*bytes, *trainers, *poll), args.duration)?);
                }
            }
        }
    }
    Ok(report)
}

fn job(bytes: u64, trainers: u32, poll: Poll) -> Job {
    Job {
        transport: Transport::Tcp,
        trainers,
        servers: 1,
        shards: 1,
        bytes,
        parameters: 1,
        chunk_bytes: bytes,
        mode: ModeName::Sync,
        staleness: 0,
        checks: Checks::BetweenHosts,
        rdma_device: "auto".to_owned(),
        token_file: None,
        dtype: Dtype::F32,
        values: None,
        rule: RuleName::Sum,
        poll,
        buffers: Buffers::Ordinary,
        pin: false,
    }
}

fn straight(shape: Shape, job: &Job, duration: f64) -> Result<Outcome> {
    job.check()?;
    eprintln!("psbench: {} of {}", shape.name(), job.title());
    let pace = Pace { rate: None, spoil: false };
    let mut team = Team::best_straight(shape, job)?;
    let rounds = rounds_for(&mut [&mut team], pace, duration)?;
    let blocks = alternate(&mut [&mut team], pace, rounds, BLOCKS_MIN)?.remove(0);
    let seconds: Vec<f64> = blocks.iter().flat_map(|block| block.seconds.iter().copied()).collect();
    let medians: Vec<f64> = blocks.iter().map(|block| median(&block.seconds)).collect();
    let per_round = f64::from(job.trainers) * (job.bytes + job.gradient_bytes()) as f64;
    let cpu = blocks.iter().map(|block| block.server.cpu_seconds).sum::<f64>();
    Ok(Outcome::new(&format!("{}, {}", shape.name(), job.title()))
        .with("bytes", job.bytes)
        .with("trainers", job.trainers)
        .with("poll", word(job.poll))
        .with("chunk_bytes", team.chunk_bytes)
        .with("rounds", seconds.len())
        .with("latency_us_p50", median(&medians) * 1e6)
        .with("latency_us_p99", percentile(&seconds, 0.99) * 1e6)
        .with("block_latency_us", medians.iter().map(|one| one * 1e6).collect::<Vec<_>>())
        .with("bytes_per_second", per_round / median(&medians))
        .with("server_cpu_seconds_per_gigabyte", cpu / (per_round * seconds.len() as f64 * 1e-9))
        .with("ratio_to_ceiling", 1.0)
        .with("wrong", blocks.iter().map(|block| block.wrong).sum::<u64>()))
}

/// What a raw TCP link carries, each direction counted alone.
fn link(streams: u32, both_ways: bool, bytes: u64, report: &mut Report) -> Result<()> {
    eprintln!("psbench: raw tcp, {streams} streams");
    let link = Link::new(streams)?;
    let mut best: Option<(u64, f64)> = None;
    for chunk in CHUNKS {
        let samples = (0..BLOCKS_MIN).map(|_| link.seconds(length(bytes), length(chunk), both_ways));
        let seconds = median(&samples.collect::<Result<Vec<_>>>()?);
        if best.is_none_or(|(_, least)| seconds < least) {
            best = Some((chunk, seconds));
        }
    }
    let (chunk, seconds) = best.expect("several chunks were tried");
    let ways = if both_ways { "both ways, per direction" } else { "one way" };
    let many = if streams == 1 { "1 stream".to_owned() } else { format!("{streams} streams") };
    report.results.push(
        Outcome::new(&format!("raw tcp, {ways}, {many}"))
            .with("streams", streams)
            .with("chunk_bytes", chunk)
            .with("bytes_per_second", f64::from(streams) * bytes as f64 / seconds)
            .with("ratio_to_ceiling", 1.0),
    );
    Ok(())
}

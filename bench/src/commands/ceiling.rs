//! `psbench ceiling`: what this machine can do, with nothing of the parameter server in the way.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use pserver_core::dtype::ElementType;
use pserver_core::optim::Gradient;
use pserver_core::port::Kernels;
use pserver_kernels::cpu::Cpu;
use serde_json::json;

use crate::duel::{BLOCKS_MIN, Pace, Team, alternate, rounds_for};
use crate::job::{Dtype, Job, ModeName, Poll, RuleName, Transport, word};
use crate::report::{Column, Outcome, Report, plain, scaled};
use crate::sizes::{self, length, show};
use crate::statistics::{median, percentile};
use crate::straight::Shape;

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
        "poll": args.poll.iter().map(|poll| word(*poll)).collect::<Vec<_>>(), "arrays_bytes": args.arrays });
    let mut report = Report::new("ceiling", parameters, COLUMNS);
    for bytes in &args.arrays {
        memory(*bytes, &mut report);
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
                    straight(shape, &job(*bytes, *trainers, *poll), args.duration, &mut report)?;
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
        dtype: Dtype::F32,
        rule: RuleName::Sum,
        poll,
        pin: false,
    }
}

fn straight(shape: Shape, job: &Job, duration: f64, report: &mut Report) -> Result<()> {
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
    report.results.push(
        Outcome::new(&format!("{}, {}", shape.name(), job.title()))
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
            .with("wrong", blocks.iter().map(|block| block.wrong).sum::<u64>()),
    );
    Ok(())
}

/// Memory's own speed on one core: payload bytes a second, each byte counted once.
fn memory(bytes: u64, report: &mut Report) {
    let elements = length(bytes) / 4;
    let (from, mut to) = (vec![1.0_f32; elements], vec![0.0_f32; elements]);
    let mut line = |name: &str, seconds: f64| {
        let result = Outcome::new(&format!("{name}, {} arrays, one core", show(bytes)))
            .with("bytes", bytes)
            .with("bytes_per_second", bytes as f64 / seconds)
            .with("latency_us_p50", seconds * 1e6)
            .with("ratio_to_ceiling", 1.0);
        report.results.push(result);
    };
    line("memcpy", timed(bytes, || black_box(&mut to).copy_from_slice(black_box(&from))));
    let gradient = [Gradient { bytes: bytemuck::cast_slice(&from), element_type: ElementType::Float32 }];
    line(
        "in-place add",
        timed(bytes, || {
            let into = black_box(&mut to);
            into.iter_mut().zip(black_box(&from)).for_each(|(into, from)| *into += from);
        }),
    );
    line(
        "read",
        timed(bytes, || {
            black_box(sum_of(black_box(&from)));
        }),
    );
    let into: &mut [u8] = bytemuck::cast_slice_mut(&mut to);
    line("sum of one", timed(bytes, || Cpu.sum(ElementType::Float32, black_box(into), &gradient)));
}

/// Reads every element once, in lanes that no addition waits for another in.
fn sum_of(values: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 64];
    for piece in values.chunks_exact(64) {
        lanes.iter_mut().zip(piece).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().sum()
}

/// The median of several repetitions, each long enough to time.
fn timed(bytes: u64, mut work: impl FnMut()) -> f64 {
    let repetitions = ((64 << 20) / bytes.max(1)).max(1);
    work();
    let samples: Vec<f64> = (0..BLOCKS_MIN)
        .map(|_| {
            let start = Instant::now();
            (0..repetitions).for_each(|_| work());
            start.elapsed().as_secs_f64() / repetitions as f64
        })
        .collect();
    median(&samples)
}

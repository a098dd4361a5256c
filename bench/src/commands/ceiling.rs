//! `psbench ceiling`: what this machine can do, with nothing of the parameter server in the way.

mod memory;

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::alternation::{BLOCKS_MIN, CHUNKS, RoundPace, Team, alternate, rounds_for};
use crate::baseline::Shape;
use crate::baseline::link::WarmStreams;
use crate::comparison::Score;
use crate::job::{BenchJob, Buffers, Checks, Dtype, ModeName, Poll, RuleName, TransportName, word};
use crate::report::{Column, Outcome, Report, announce, plain, scaled};
use crate::route::Route;
use crate::sizes::{self, length};
use crate::statistics::median;

/// The options of `psbench ceiling`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of a gradient; several sizes with commas between them.
    #[arg(short = 's', long, visible_alias = "size", value_parser = sizes::parse, value_delimiter = ',',
        default_value = sizes::USUAL)]
    bytes: Vec<u64>,
    /// Bytes of a write, of the baseline servers and of the raw TCP link: the chunk of the run that this is the ceiling
    /// for. Without it 256 KiB, 1 MiB and 4 MiB are tried, and the best counts.
    #[arg(long, value_parser = sizes::parse)]
    chunk: Option<u64>,
    /// Trainers of the baseline servers; several counts with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    trainers: Vec<u32>,
    /// How everybody waits; several ways with commas between them.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "block,busy")]
    poll: Vec<Poll>,
    /// Seconds of each baseline server.
    #[arg(short = 'D', long, default_value_t = 0.5)]
    duration: f64,
    /// Bytes of the arrays that measure memory: in memory, and in the cache.
    #[arg(long, value_parser = sizes::parse, value_delimiter = ',', default_value = "256MiB,1MiB")]
    arrays: Vec<u64>,
    /// Streams of the raw TCP link: the connections of the run that this is the ceiling for, which are its trainers
    /// times servers times shards; several counts with commas between them. As many as trainers unless said otherwise.
    #[arg(long, value_delimiter = ',')]
    streams: Vec<u32>,
    /// Bytes on each stream of the raw TCP link.
    #[arg(long, value_parser = sizes::parse, default_value = "128MiB")]
    link_bytes: u64,
}

const COLUMNS: &[Column] = &[
    plain("name", "what"),
    plain("poll", "poll"),
    plain("chunk_bytes", "chunk[B]"),
    scaled("bytes_per_second_peak", "peak[GB/s]", 1e9, 2),
    scaled("bytes_per_second", "GB/s", 1e9, 2),
    scaled("rounds_per_second", "rounds/s", 1.0, 1),
    scaled("latency_us_min", "min[us]", 1.0, 1),
    scaled("latency_us_p50", "p50", 1.0, 1),
    scaled("latency_us_p99", "p99", 1.0, 1),
    scaled("latency_us_p999", "p99.9", 1.0, 1),
    scaled("latency_us_max", "max", 1.0, 1),
    scaled("ratio_to_raw", "of raw", 1.0, 3),
    scaled("server_cpu_percent", "cpu%", 1.0, 1),
    scaled("server_cpu_seconds_per_gigabyte", "s/GB", 1.0, 3),
    plain("wrong", "#wrong"),
];

/// The measurements of this machine so far, without the parameter server.
struct Raw<'a> {
    args: &'a Args,
    /// Bytes a second of a copy of the longest array.
    memcpy: Option<f64>,
    /// Of a TCP link both ways together, by its streams and the bytes of a write.
    links: BTreeMap<(u32, u64), f64>,
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    let streams = if args.streams.is_empty() { &args.trainers } else { &args.streams };
    let parameters = json!({ "bytes": args.bytes, "trainers": args.trainers, "duration_seconds": args.duration,
        "poll": args.poll.iter().map(|poll| word(*poll)).collect::<Vec<_>>(), "arrays_bytes": args.arrays,
        "streams": streams, "link_bytes": args.link_bytes, "chunk": args.chunk });
    ensure!(args.chunk != Some(0), "--chunk 0: expected bytes above zero");
    ensure!(!streams.contains(&0), "--streams 0: expected 1 or more");
    let mut report = Report::new("ceiling", parameters, COLUMNS);
    report.travelled(&Route::within_machine(&[TransportName::Tcp, TransportName::Shm]));
    let (paths, polls) = (3 * args.trainers.len() * args.bytes.len(), args.poll.len());
    report.expect(args.arrays.len() + 2 * streams.len() + (2 + paths) * polls, "ceilings");
    let mut raw = Raw { args, memcpy: None, links: BTreeMap::new() };
    for bytes in &args.arrays {
        let rate = memory::measure(*bytes, &mut report);
        report.measured(1);
        // Payloads of rounds come from everywhere, so the longest array's copy counts.
        if Some(bytes) == args.arrays.iter().max() {
            raw.memcpy = Some(rate);
        }
    }
    for streams in streams {
        for both_ways in [false, true] {
            raw.link(*streams, both_ways, &mut report)?;
            report.measured(1);
        }
    }
    for (shape, name) in [(Shape::Tcp, "tcp ping, 4 bytes"), (Shape::ShmInPlace, "shared memory ping, 4 bytes")] {
        for poll in &args.poll {
            let (_, result) = baseline(shape, &job(4, 1, *poll), args)?;
            report.push(result.with("name", name));
            report.measured(1);
        }
    }
    raw.paths(&mut report)?;
    Ok(report)
}

impl Raw<'_> {
    /// The baseline servers over every path.
    fn paths(&mut self, report: &mut Report) -> Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for shape in [Shape::Tcp, Shape::ShmCopy, Shape::ShmInPlace] {
            let ways = |trainers: &u32| self.args.poll.iter().map(|poll| (*trainers, *poll)).collect::<Vec<_>>();
            for (trainers, poll) in self.args.trainers.iter().flat_map(ways).collect::<Vec<_>>() {
                let spinners = length(u64::from(trainers)) + 1;
                if poll == Poll::Busy && cores < spinners {
                    announce(&format!("{}: {spinners} processes cannot spin on {cores} cores", shape.name()));
                    report.measured(self.args.bytes.len());
                    continue;
                }
                for bytes in &self.args.bytes {
                    let (chunk, result) = baseline(shape, &job(*bytes, trainers, poll), self.args)?;
                    let raw = self.beneath(shape, trainers, chunk)?;
                    let rate = result.field("bytes_per_second").as_f64();
                    let ratio = rate.zip(raw).map(|(rate, raw)| rate / raw);
                    report.push(result.with("ratio_to_raw", json!(ratio)));
                    report.measured(1);
                }
            }
        }
        Ok(())
    }

    /// Bytes a second of what a path is made of: of a TCP link with as many streams and as long writes, of a copy. In
    /// place nothing moves.
    fn beneath(&mut self, shape: Shape, streams: u32, chunk: u64) -> Result<Option<f64>> {
        Ok(match shape {
            Shape::Tcp => Some(match self.links.get(&(streams, chunk)) {
                Some(known) => *known,
                None => self.carry(streams, chunk, true)?,
            }),
            Shape::ShmCopy => self.memcpy,
            Shape::ShmInPlace => None,
        })
    }

    /// The throughput of a raw TCP link, for each direction.
    fn link(&mut self, streams: u32, both_ways: bool, report: &mut Report) -> Result<()> {
        announce(&format!("raw tcp, {streams} streams"));
        let mut best: Option<(f64, u64)> = None;
        for chunk in self.args.chunk.map_or(CHUNKS.to_vec(), |chunk| vec![chunk]) {
            let rate = self.carry(streams, chunk, both_ways)?;
            if best.is_none_or(|(most, _)| most < rate) {
                best = Some((rate, chunk));
            }
        }
        let (rate, chunk) = best.expect("a chunk was tried");
        let (ways, directions) = if both_ways { ("both ways, per direction", 2.0) } else { ("one way", 1.0) };
        let many = if streams == 1 { "1 stream".to_owned() } else { format!("{streams} streams") };
        report.push(
            Outcome::new(&format!("raw tcp, {ways}, {many}"))
                .with("streams", streams)
                .with("chunk_bytes", chunk)
                .with("bytes_per_second", rate / directions)
                .with("ratio_to_ceiling", 1.0),
        );
        Ok(())
    }

    /// Bytes a second that so many streams carry in writes of so many bytes, in all directions together.
    fn carry(&mut self, streams: u32, chunk: u64, both_ways: bool) -> Result<f64> {
        let (link, bytes) = (WarmStreams::new(streams)?, self.args.link_bytes);
        let samples = (0..BLOCKS_MIN).map(|_| link.seconds(length(bytes), length(chunk), both_ways));
        let seconds = median(&samples.collect::<Result<Vec<_>>>()?);
        let directions = if both_ways { 2.0 } else { 1.0 };
        let rate = directions * f64::from(streams) * bytes as f64 / seconds;
        if both_ways {
            self.links.insert((streams, chunk), rate);
        }
        Ok(rate)
    }
}

fn job(bytes: u64, trainers: u32, poll: Poll) -> BenchJob {
    BenchJob {
        transport: TransportName::Tcp,
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
        serve: Vec::new(),
        program: None,
    }
}

/// A baseline server by itself, and the chunk that it worked with.
fn baseline(shape: Shape, job: &BenchJob, args: &Args) -> Result<(u64, Outcome)> {
    job.check()?;
    announce(&format!("{} of {}", shape.name(), job.title()));
    let pace = RoundPace { rate: None, spoil: false };
    let mut team = match args.chunk {
        Some(chunk) => Team::baseline(shape, job, chunk, None)?,
        None => Team::best_baseline(shape, job, None)?,
    };
    let rounds = rounds_for(&mut [&mut team], pace, args.duration)?;
    let blocks = alternate(&mut [&mut team], pace, rounds, (BLOCKS_MIN, args.duration), &mut |_| ())?.remove(0);
    let score = Score::new(&team, job, &blocks, pace)?;
    let result = score.figures(Outcome::new(&format!("{}, {}", shape.name(), job.title())));
    let result = result
        .with("bytes", job.bytes)
        .with("trainers", job.trainers)
        .with("poll", word(job.poll))
        .with("chunk_bytes", team.chunk_bytes)
        .with("ratio_to_ceiling", 1.0)
        .with("wrong", score.wrong());
    Ok((team.chunk_bytes, result))
}

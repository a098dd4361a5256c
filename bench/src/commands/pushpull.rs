//! `psbench pushpull`: gradients to the servers and values back, beside the baseline server of the same path.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::alternation::RoundPace;
use crate::comparison::{Terms, measure};
use crate::job::{BenchJob, Buffers, Checks, Dtype, ModeName, Poll, RuleName, TransportName, word};
use crate::report::{Column, Report, announce, plain, scaled};
use crate::sizes;

/// The work of a run: payloads, transport, trainers and servers.
//
// tidy: allow fields: one field for each option of a command line.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// How bytes travel.
    #[arg(long, value_enum, default_value_t = TransportName::Tcp)]
    pub(crate) transport: TransportName,
    /// Trainers; each is a process, or with --transport loopback a thread.
    #[arg(long, default_value_t = 1)]
    pub(crate) trainers: u32,
    /// Servers; each is a process, or with --transport loopback threads of the trainers' one.
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
    /// How many rounds one trainer may be ahead of the slowest, with --mode bounded.
    #[arg(long, default_value_t = 1)]
    pub(crate) staleness: u32,
    /// Which payloads over TCP carry checksums, ours only: the baseline server has none.
    #[arg(long, value_enum, default_value_t = Checks::BetweenHosts)]
    pub(crate) checks: Checks,
    /// The RDMA device of servers and trainers, as of `pserver serve --rdma-device`.
    #[arg(long, default_value = "auto")]
    pub(crate) rdma_device: String,
    /// The type of gradients.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub(crate) dtype: Dtype,
    /// The type that values come back as: theirs unless it is said, or f16 or bf16 for values of f32; with --alone, as
    /// the baseline servers send values whole.
    #[arg(long, value_enum, requires = "alone")]
    pub(crate) values: Option<Dtype>,
    /// The servers' update rule.
    #[arg(long, value_enum, default_value_t = RuleName::Sum)]
    pub(crate) rule: RuleName,
    /// How everybody waits.
    #[arg(long, value_enum, default_value_t = Poll::Block)]
    pub(crate) poll: Poll,
    /// The memory of gradients and values; with registered buffers the baseline server over shared memory works in
    /// place too.
    #[arg(long, value_enum, default_value_t = Buffers::Ordinary)]
    pub(crate) buffers: Buffers,
    /// Keep servers on the first half of the cores and trainers on the second, theirs as well as ours.
    #[arg(long)]
    pub(crate) pin: bool,
    /// Seconds of a size, both servers together.
    #[arg(short = 'D', long, default_value_t = 4.0)]
    pub(crate) duration: f64,
    /// Rounds of each server and size, instead of a duration.
    #[arg(short = 'n', long, visible_alias = "iters")]
    pub(crate) iterations: Option<u32>,
    /// Use the servers of this job instead of starting some; they must run with `--merge sum`.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) connect: Option<String>,
    /// The file with that job's token, if it has one.
    #[arg(long, value_name = "FILE", requires = "connect")]
    pub(crate) token_file: Option<String>,
    /// One more setting of `pserver serve`, such as `nonfinite=accept`, or `encrypt=tcp`, which trainers then have too;
    /// may be given several times. With `checkpoint_dir` the servers of each size, and those beside them, have a folder
    /// of their own there, which goes with them.
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    pub(crate) serve: Vec<String>,
    /// Beside it, instead of the baseline server, servers of ours with this setting too; may be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting, conflicts_with_all = ["connect", "alone"])]
    pub(crate) beside: Vec<String>,
    /// Beside it, instead of the baseline server, servers and trainers of another build of psbench.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["connect", "alone"])]
    pub(crate) beside_program: Option<String>,
    /// Without the baseline server beside it: less memory is needed, and there is no ratio.
    #[arg(long)]
    pub(crate) alone: bool,
    /// Spoil every value before it is checked: the run must fail.
    #[arg(long, hide = true)]
    pub(crate) spoil: bool,
}

/// The options of `psbench pushpull`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of all parameters together; several sizes with commas between them.
    #[arg(short = 's', long, visible_alias = "size", value_parser = sizes::parse, value_delimiter = ',',
        default_value = sizes::USUAL)]
    bytes: Vec<u64>,
    /// Every power of two from 4 bytes to 8 MiB instead.
    #[arg(short = 'a', long, conflicts_with = "bytes")]
    all: bool,
    #[command(flatten)]
    pub(crate) work: RunArgs,
}

const COLUMNS: &[Column] = &[
    plain("bytes", "#bytes"),
    plain("rounds", "#iters"),
    plain("rule", "op"),
    scaled("bytes_per_second_peak", "peak[GB/s]", 1e9, 3),
    scaled("bytes_per_second_average", "avg", 1e9, 3),
    scaled("rounds_per_second", "rounds/s", 1.0, 1),
    scaled("latency_us_min", "min[us]", 1.0, 1),
    scaled("latency_us_p50", "p50", 1.0, 1),
    scaled("latency_us_p99", "p99", 1.0, 1),
    scaled("latency_us_p999", "p99.9", 1.0, 1),
    scaled("latency_us_max", "max", 1.0, 1),
    scaled("ceiling_latency_us_p50", "baseline", 1.0, 1),
    scaled("ratio_to_ceiling", "ratio", 1.0, 3),
    scaled("ratio_low", "low", 1.0, 3),
    scaled("ratio_high", "high", 1.0, 3),
    scaled("server_cpu_percent", "cpu%", 1.0, 1),
    scaled("server_cpu_seconds_per_gigabyte", "s/GB", 1.0, 3),
    plain("wrong", "#wrong"),
];

impl RunArgs {
    /// The job of a size.
    pub(crate) fn job(&self, bytes: u64) -> Result<BenchJob> {
        let job = BenchJob {
            transport: self.transport,
            trainers: self.trainers,
            servers: self.servers,
            shards: self.shards,
            bytes,
            parameters: self.params,
            chunk_bytes: self.chunk,
            mode: self.mode,
            staleness: self.staleness,
            checks: self.checks,
            rdma_device: self.rdma_device.clone(),
            token_file: self.token_file.clone(),
            dtype: self.dtype,
            values: self.values,
            rule: self.rule,
            poll: self.poll,
            buffers: self.buffers,
            pin: self.pin,
            serve: self.serve.clone(),
            program: None,
        };
        job.check()?;
        ensure!(
            self.connect.is_none() || job.transport != TransportName::Loopback,
            "--connect: servers that are reached with --transport loopback are in this process; expected none"
        );
        Ok(job)
    }

    /// The jobs of several sizes.
    pub(crate) fn jobs(&self, bytes: &[u64]) -> Result<Vec<BenchJob>> {
        ensure!(
            self.connect.is_none() || bytes.len() == 1,
            "--connect: the parameters of that job have one size; found {} sizes in --bytes",
            bytes.len()
        );
        bytes.iter().map(|bytes| self.job(*bytes)).collect()
    }

    /// How the job is run.
    pub(crate) fn terms(&self) -> Terms<'_> {
        Terms {
            duration: self.duration,
            iterations: self.iterations,
            connect: self.connect.as_deref(),
            alone: self.alone,
            beside: &self.beside,
            beside_program: self.beside_program.as_deref(),
            pace: RoundPace { rate: None, spoil: self.spoil },
        }
    }
}

/// A setting and its value.
pub(crate) fn setting(text: &str) -> Result<String, String> {
    let is_setting = text.split_once('=').is_some_and(|(name, _)| !name.is_empty());
    is_setting.then(|| text.to_owned()).ok_or_else(|| "expected a setting and its value, such as checks=always".into())
}

pub(crate) fn run(args: &Args) -> Result<Report> {
    let work = &args.work;
    let bytes = if args.all { sizes::all() } else { args.bytes.clone() };
    let jobs = work.jobs(&bytes)?;
    let parameters = json!({ "bytes": bytes, "duration_seconds": work.duration, "iterations": work.iterations,
        "connect": work.connect, "job": jobs.first() });
    let mut report = Report::new("pushpull", parameters, COLUMNS);
    work.terms().expect(jobs.len(), &mut report);
    for job in &jobs {
        announce(&format!("pushpull {} of {}", word(job.transport), job.title()));
        measure(job, &work.terms(), &mut report)?;
    }
    Ok(report)
}

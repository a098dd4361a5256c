//! The server's configuration: read from four places, checked once, and then a value.
//!
//! A setting comes from the command line, else from the environment (`PSERVER_` and its name in capitals), else from
//! the file that `--config` or `PSERVER_CONFIG` names (TOML), else from its default. `--print-config` shows which.
//! Not here: what the settings do; the optimizer message's own fields ([`pserver_core::config`]).
//!
//! Read in this order: [`ServeArgs`] (what can be set), [`Settings`] (what it becomes), `sources` (who wins).

mod args;
mod sources;
#[cfg(test)]
mod tests;
mod values;

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use pserver_core::config::{Merge, Mode, OptimizerSettings};
use pserver_core::limits;
use pserver_core::wire::Address;
use pserver_transport::network::{CHECKS_EXPECTED, Checks, POLL_EXPECTED, Poll};
use pserver_transport::verbs::{self, DeviceChoice};

pub use args::ServeArgs;
use sources::Sources;

/// How much of each update survives a crash between two checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Journal {
    /// Nothing: a restart resumes at the last checkpoint.
    Off,
    /// Updates are written, and survive the process.
    On,
    /// Updates are written and synced, and survive the machine.
    Sync,
}

/// What updates the parameters of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The first device of CUDA, or the processor where there is none.
    Auto,
    /// The processor.
    Cpu,
    /// This device of CUDA, or the server does not start.
    Cuda {
        /// Its number, as the driver counts.
        ordinal: u32,
    },
    /// The processor behind an accelerator's port, for tests: `simulated`.
    Simulated,
}

/// What a device can be.
const DEVICE_EXPECTED: &str = "auto, cpu or cuda:N with the number of a device";

impl FromStr for Device {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "simulated" => Ok(Self::Simulated),
            _ => {
                let ordinal = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                ordinal.map(|ordinal| Self::Cuda { ordinal }).ok_or(())
            }
        }
    }
}

/// How much the program says on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// What went wrong.
    Error,
    /// And what may go wrong.
    Warn,
    /// And what happens to the job.
    Info,
    /// And what happens to connections and rounds.
    Debug,
    /// And every frame.
    Trace,
}

/// How the program says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// Lines of JSON for machines.
    Json,
}

/// Everything a server needs to know before it starts, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// This server's place, below `servers`.
    pub index: u16,
    /// Servers in the job.
    pub servers: u16,
    /// Trainers in the job.
    pub trainers: u32,
    /// Shards on this server.
    pub shards: u16,
    /// Where it listens.
    pub bind: Address,
    /// Where others reach it, when that is not where it listens.
    pub advertise: Option<Address>,
    /// Where server 0 is reached; server 0 itself has none.
    pub coordinator: Option<Address>,
    /// The size of a chunk: a power of two.
    pub chunk_bytes: u32,
    /// How trainers share a parameter, with the bound of staleness.
    pub mode: Mode,
    /// How the gradients of one round become one.
    pub merge: Merge,
    /// What a parameter without a configuration of its own gets: an optimizer message in protobuf's text form.
    pub optimizer: String,
    /// Where checkpoints lie; without it there are none.
    pub checkpoint_dir: Option<PathBuf>,
    /// Time between checkpoints.
    pub checkpoint_interval: Duration,
    /// What survives between checkpoints; off when there are none.
    pub journal: Journal,
    /// The folder that saved models stay in.
    pub model_dir: PathBuf,
    /// How long a round may wait for its last gradient.
    pub round_timeout: Duration,
    /// How long the initialising trainer may be silent before another is chosen.
    pub lease: Duration,
    /// Whether anybody who reaches an address other than loopback may join.
    pub insecure: bool,
    /// The file with the token that who connects must show.
    pub token_file: Option<PathBuf>,
    /// How a shard waits.
    pub poll: Poll,
    /// Where payloads over TCP carry checksums.
    pub checks: Checks,
    /// What updates parameters.
    pub device: Device,
    /// Which RDMA device connections use.
    pub rdma_device: DeviceChoice,
    /// Bytes of the device's memory for parameters and states, of all shards; none is what is free.
    pub device_memory: Option<u64>,
    /// Bytes of the device's memory for gradients on their way, of all shards; none is reckoned from the job.
    pub device_gradients: Option<u64>,
    /// Chunks shorter than this stay on the processor.
    pub device_least: u64,
    /// Where rules that were compiled for the device are kept; none is nowhere.
    pub device_cache: Option<PathBuf>,
    /// How much is logged.
    pub log_level: LogLevel,
    /// How it is logged.
    pub log_format: LogFormat,
    /// An open descriptor that gets a line when the server is ready, and is then closed.
    pub ready_fd: Option<i32>,
}

impl Settings {
    /// Reads every source and checks every value, alone and with the others. `environment` is the process's, handed
    /// in so that only the program asks for it.
    ///
    /// # Errors
    /// All wrong values at once: each with its name, where it came from, what it was and what was expected.
    pub fn load(args: &ServeArgs, environment: &[(String, String)]) -> Result<Self> {
        let sources = Sources::collect(args, environment)?;
        let (settings, mut problems) = Self::read(&sources);
        if problems.is_empty() {
            problems = settings.contradictions(&sources);
        }
        if !problems.is_empty() {
            bail!("the configuration is wrong:\n  {}", problems.join("\n  "));
        }
        Ok(settings)
    }

    /// The effective configuration as TOML that [`load`](Self::load) reads back, each line with its source.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn print(args: &ServeArgs, environment: &[(String, String)]) -> Result<String> {
        Self::load(args, environment).context("there is no effective configuration to print")?;
        Ok(Sources::collect(args, environment)?.print())
    }

    fn read(sources: &Sources) -> (Self, Vec<String>) {
        let mut reader = sources.reader();
        let staleness = reader.take("staleness", values::whole(0, u64::from(u32::MAX)));
        let settings = Self {
            index: reader.take("index", values::whole(0, u64::from(limits::SERVERS_MAX) - 1)),
            servers: reader.take("servers", values::whole(1, u64::from(limits::SERVERS_MAX))),
            trainers: reader.take("trainers", values::whole(1, u64::from(limits::TRAINERS_MAX))),
            shards: reader.take("shards", values::whole(1, u64::from(limits::SHARDS_MAX))),
            bind: reader.take("bind", values::address),
            advertise: reader.take("advertise", values::optional(values::reachable)),
            coordinator: reader.take("coordinator", values::optional(values::reachable)),
            chunk_bytes: reader.take("chunk_bytes", values::chunk_bytes),
            mode: reader.take("mode", |text| values::mode(text, staleness)),
            merge: reader.take("merge", values::merge),
            optimizer: reader.take("optimizer", values::optimizer),
            checkpoint_dir: reader.take("checkpoint_dir", values::optional(values::path)),
            checkpoint_interval: reader.take("checkpoint_interval_seconds", values::seconds),
            journal: reader.take("journal", values::word),
            model_dir: reader.take("model_dir", values::path),
            round_timeout: reader.take("round_timeout_seconds", values::seconds),
            lease: reader.take("lease_seconds", values::seconds),
            insecure: reader.take("insecure", values::plain("true or false")),
            token_file: reader.take("token_file", values::optional(values::path)),
            poll: reader.take("poll", values::plain(POLL_EXPECTED)),
            checks: reader.take("checks", values::plain(CHECKS_EXPECTED)),
            device: reader.take("device", values::plain(DEVICE_EXPECTED)),
            rdma_device: reader.take("rdma_device", values::plain(verbs::DEVICE_EXPECTED)),
            device_memory: reader.take("device_memory", values::optional(values::bytes)),
            device_gradients: reader.take("device_gradients", values::optional(values::bytes)),
            device_least: reader.take("device_least", values::bytes),
            device_cache: reader.take("device_cache", values::optional(values::path)),
            log_level: reader.take("log_level", values::word),
            log_format: reader.take("log_format", values::word),
            ready_fd: reader.take("ready_fd", values::optional(values::whole(3, u64::from(u16::MAX)))),
        };
        (settings, reader.problems())
    }

    /// What is wrong between values that are right alone.
    fn contradictions(&self, sources: &Sources) -> Vec<String> {
        let bounded = matches!(self.mode, Mode::Staleness { .. });
        let staleness = sources.get("staleness").text.trim().parse() != Ok(0_u32);
        let open = !self.bind.is_loopback() && !self.insecure && self.token_file.is_none();
        let everywhere = self.bind.host.parse().is_ok_and(|number: IpAddr| number.is_unspecified());
        let settings = OptimizerSettings::from_text(&self.optimizer).unwrap_or_default();
        let gradients_least =
            u64::from(self.shards) * pserver_kernels::cuda::Settings::gradient_bytes_least(self.chunk_bytes);
        let contradictory = settings.mode.is_some_and(|mode| mode != self.mode);
        [
            (self.servers <= self.index, "index", format!("an index below servers, which is {}", self.servers)),
            (self.index > 0 && self.coordinator.is_none(), "coordinator", "the address of server 0".to_owned()),
            (self.index == 0 && self.coordinator.is_some(), "coordinator", "none, as this is server 0".to_owned()),
            (staleness && !bounded, "staleness", "0, or mode bounded with it".to_owned()),
            (bounded && !staleness, "staleness", "1 or more with mode bounded".to_owned()),
            (
                self.journal != Journal::Off && self.checkpoint_dir.is_none(),
                "journal",
                "off, or a checkpoint_dir with it".to_owned(),
            ),
            (open, "bind", "a loopback address, a token_file, or insecure = true to let anybody join".to_owned()),
            (
                everywhere && self.advertise.is_none(),
                "advertise",
                "the address at which others reach this server, as bind is every address of this machine".to_owned(),
            ),
            (
                self.device_gradients.is_some_and(|bytes| bytes < gradients_least),
                "device_gradients",
                format!("{gradients_least} bytes or more: room for four chunks of each shard"),
            ),
            (contradictory, "optimizer", "no mode in it, or the same as the setting mode".to_owned()),
        ]
        .into_iter()
        .chain(self.not_for_all(&settings))
        .filter(|(wrong, ..)| *wrong)
        .map(|(_, key, expected)| sources.get(key).complaint(key, &expected))
        .collect()
    }

    /// What the optimizer of all parameters may not say, beside a mode: what is said of one, and another merge.
    fn not_for_all(&self, settings: &OptimizerSettings) -> [(bool, &'static str, String); 3] {
        let other = settings.merge.is_some_and(|merge| merge != self.merge);
        [
            (other, "optimizer", "no merge in it, or the same as the setting merge".to_owned()),
            (settings.sparse.is_some(), "optimizer", "no sparse in it, which is said of one parameter".to_owned()),
            (settings.home.is_some(), "optimizer", "no home in it, which is said of one parameter".to_owned()),
        ]
    }
}

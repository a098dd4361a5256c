//! The server's configuration: read from four places, checked once, and then a value.
//!
//! A setting comes from the command line, else from the environment (`PSERVER_` and its name in capitals), else from
//! the file that `--config` or `PSERVER_CONFIG` names (TOML), else from its default. `--print-config` shows which.
//! Not here: the effect of settings; the optimizer message's own fields ([`pserver_core::config`]).
//!
//! Read in this order: [`ServeArgs`] (the settings), [`Settings`] (their checked values), `sources` (precedence),
//! `idle` (settings without effect).

mod args;
mod idle;
mod sources;
#[cfg(test)]
mod tests;
mod values;

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, FromArgMatches, ValueEnum};
use pserver_core::config::{Merge, Mode, OptimizerSettings};
use pserver_core::limits;
use pserver_core::server::NonFinite;
use pserver_core::wire::Address;
use pserver_transport::network::{CHECKS_EXPECTED, ChecksumPolicy, POLL_EXPECTED, PollPolicy};
use pserver_transport::tls::{ENCRYPT_EXPECTED, EncryptPolicy, EncryptionSettings};
use pserver_transport::verbs::{self, DeviceChoice, FabricOption, FabricSettings};

pub use args::ServeArgs;
use idle::ExplicitSetting;
pub(crate) use idle::shown_mode;
use sources::SettingTexts;
pub use values::bytes;

/// How much of each update survives a crash between two checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum JournalSetting {
    /// Nothing: a restart resumes at the last checkpoint.
    Off,
    /// Updates are written, and survive the process.
    On,
    /// Updates are written and synced, and survive the machine.
    Sync,
}

/// The device that updates parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceSetting {
    /// The first device of CUDA, or the processor where there is none or it is slower.
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

/// Expected text of the address for metrics.
const HTTP_EXPECTED: &str = "the number of an address and a port, such as 127.0.0.1:9464";
/// Expected texts of a device.
const DEVICE_EXPECTED: &str = "auto, cpu or cuda:N with the number of a device";

impl FromStr for DeviceSetting {
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

/// Log level on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// Failures.
    Error,
    /// Also warnings.
    Warn,
    /// Also events of the job.
    Info,
    /// Also events of connections and rounds.
    Debug,
    /// Also every frame.
    Trace,
}

/// Log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// Lines of JSON for machines.
    Json,
}

/// Checked settings of a server. The groups are those of `serve --help`.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// This server's place, below `servers`.
    pub index: u16,
    /// Shards on this server.
    pub shards: u16,
    /// Threads that serve them, where that is said.
    pub threads: Option<u16>,
    /// How a shard waits.
    pub poll: PollPolicy,
    /// The job's settings.
    pub job: JobSettings,
    /// Addresses and transports.
    pub addresses: AddressSettings,
    /// Checkpoints and saved models.
    pub storage: StorageSettings,
    /// Time limits.
    pub times: TimeLimits,
    /// Admission of clients.
    pub admission: AdmissionSettings,
    /// The device that updates parameters.
    pub device: DeviceSettings,
    /// Logs and readiness.
    pub output: OutputSettings,
    /// The settings that are configured explicitly.
    made: Vec<ExplicitSetting>,
}

/// Settings that all servers of a job share.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSettings {
    /// Servers in the job.
    pub servers: u16,
    /// Trainers in the job.
    pub trainers: u32,
    /// The size of a chunk: a power of two.
    pub chunk_bytes: u32,
    /// How trainers share a parameter, with the bound of staleness.
    pub mode: Mode,
    /// How the gradients of one round become one.
    pub merge: Merge,
    /// Policy for gradients with NaN or infinite elements.
    pub nonfinite: NonFinite,
    /// Default optimizer of parameters: a message in protobuf's text form.
    pub optimizer: String,
}

/// Addresses of servers, and how bytes travel.
#[derive(Clone, Debug, PartialEq)]
pub struct AddressSettings {
    /// Where it listens.
    pub bind: Address,
    /// Where others reach it, when that is not where it listens.
    pub advertise: Option<Address>,
    /// Where server 0 is reached; server 0 itself has no use for it.
    pub coordinator: Option<Address>,
    /// Where payloads over TCP carry checksums.
    pub checks: ChecksumPolicy,
    /// Which RDMA devices connections use.
    pub rdma_device: DeviceChoice,
    /// Settings of the fabric of RDMA, which the environment has.
    pub fabric: FabricSettings,
    /// Where metrics, status and page are served; without it nowhere.
    pub http: Option<SocketAddr>,
}

/// Checkpoints, the journal and saved models.
#[derive(Clone, Debug, PartialEq)]
pub struct StorageSettings {
    /// Where checkpoints lie; without it there are none.
    pub checkpoint_dir: Option<PathBuf>,
    /// Time between checkpoints.
    pub checkpoint_interval: Duration,
    /// Durability of updates between checkpoints; off without checkpoints.
    pub journal: JournalSetting,
    /// Whether a journal that is damaged in the middle ends there, instead of being refused.
    pub accept_torn_tail: bool,
    /// Whether a lock keeps a second server out of the directory of one that lives.
    pub directory_lock: bool,
    /// The folder that saved models stay in.
    pub model_dir: PathBuf,
}

/// How long the server waits for trainers and servers.
#[derive(Clone, Debug, PartialEq)]
pub struct TimeLimits {
    /// How long a round may wait for its last gradient.
    pub round_timeout: Duration,
    /// How long the initialising trainer may be silent before another is elected.
    pub lease: Duration,
    /// How long the place of a trainer or server is kept after its connection was closed.
    pub rank_grace: Duration,
}

/// Admission of clients.
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionSettings {
    /// Whether clients without a token may join over addresses other than loopback.
    pub insecure: bool,
    /// The file with the token that clients and servers must prove to have.
    pub token_file: Option<PathBuf>,
    /// The file with the token that readers of metrics and status must send.
    pub http_token_file: Option<PathBuf>,
    /// Encryption, and the files with certificates.
    pub encryption: EncryptionSettings,
}

/// The device that updates parameters, and its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSettings {
    /// Which device updates parameters.
    pub processor: DeviceSetting,
    /// Bytes of the device's memory for parameters and states, of all shards; none is what is free.
    pub memory: Option<u64>,
    /// Bytes of the device's memory for gradients on their way, of all shards; none is reckoned from the job.
    pub gradients: Option<u64>,
    /// Chunks shorter than this stay on the processor.
    pub least: u64,
    /// Where rules that were compiled for the device are kept; none is nowhere.
    pub cache: Option<PathBuf>,
}

/// Logs and readiness.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputSettings {
    /// How much is logged.
    pub log_level: LogLevel,
    /// How it is logged.
    pub log_format: LogFormat,
    /// An open descriptor that gets a line when the server is ready, and is then closed.
    pub ready_fd: Option<i32>,
}

impl Settings {
    /// The settings that these words of a command line `pserver serve` make, without variables of the environment.
    ///
    /// # Errors
    /// When a word is no option; and as [`Settings::load`].
    pub fn of_words(words: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self> {
        let line = std::iter::once("serve".into()).chain(words.into_iter().map(Into::into));
        let command = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&command.try_get_matches_from(line)?)?;
        Self::load(&args, &[])
    }

    /// Reads every source and checks every value, alone and with the others. `environment` is the process's, handed
    /// in so that only the program asks for it.
    ///
    /// # Errors
    /// All wrong values at once: each with its name, where it came from, what it was and what was expected.
    pub fn load(args: &ServeArgs, environment: &[(String, String)]) -> Result<Self> {
        let sources = SettingTexts::collect(args, environment)?;
        let (mut settings, mut problems) = Self::read(&sources);
        let variable = |name: &str| environment.iter().find(|(other, _)| other == name).map(|(_, text)| text.clone());
        match FabricSettings::find(&sources.fabric(), &variable) {
            Ok((fabric, _)) => settings.addresses.fabric = fabric,
            Err(problem) => problems.push(problem),
        }
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
        Self::load(args, environment)?;
        Ok(SettingTexts::collect(args, environment)?.print())
    }

    fn read(sources: &SettingTexts) -> (Self, Vec<String>) {
        let mut reader = sources.reader();
        let staleness = reader.take("staleness", values::whole(0, u64::from(u32::MAX)));
        let settings = Self {
            index: reader.take("index", values::whole(0, u64::from(limits::SERVERS_MAX) - 1)),
            shards: reader.take("shards", values::whole(1, u64::from(limits::SHARDS_MAX))),
            threads: reader.take("threads", values::optional(values::whole(1, u64::from(limits::SHARDS_MAX)))),
            poll: reader.take("poll", values::plain(POLL_EXPECTED)),
            job: JobSettings {
                servers: reader.take("servers", values::whole(1, u64::from(limits::SERVERS_MAX))),
                trainers: reader.take("trainers", values::whole(1, u64::from(limits::TRAINERS_MAX))),
                chunk_bytes: reader.take("chunk_bytes", values::chunk_bytes),
                mode: reader.take("mode", |text| values::mode(text, staleness)),
                merge: reader.take("merge", values::merge),
                nonfinite: reader.take("nonfinite", values::nonfinite),
                optimizer: reader.take("optimizer", values::optimizer),
            },
            addresses: AddressSettings {
                bind: reader.take("bind", values::address),
                advertise: reader.take("advertise", values::optional(values::reachable)),
                coordinator: reader.take("coordinator", values::optional(values::reachable)),
                checks: reader.take("checks", values::plain(CHECKS_EXPECTED)),
                rdma_device: reader.take("rdma_device", values::plain(verbs::DEVICE_EXPECTED)),
                fabric: reader.take("rdma_fabric", |text| {
                    // With the environment's settings below.
                    FabricOption::new(text, "").map(|_| FabricSettings::default())
                }),
                http: reader.take("http", values::optional(values::plain(HTTP_EXPECTED))),
            },
            storage: StorageSettings {
                checkpoint_dir: reader.take("checkpoint_dir", values::optional(values::path)),
                checkpoint_interval: reader.take("checkpoint_interval_seconds", values::seconds),
                journal: reader.take("journal", values::word),
                accept_torn_tail: reader.take("accept_torn_tail", values::plain("true or false")),
                directory_lock: reader.take("directory_lock", values::plain("true or false")),
                model_dir: reader.take("model_dir", values::path),
            },
            times: TimeLimits {
                round_timeout: reader.take("round_timeout_seconds", values::seconds),
                lease: reader.take("lease_seconds", values::seconds),
                rank_grace: reader.take("rank_grace_seconds", values::seconds_from_none),
            },
            admission: AdmissionSettings {
                insecure: reader.take("insecure", values::plain("true or false")),
                token_file: reader.take("token_file", values::optional(values::path)),
                http_token_file: reader.take("http_token_file", values::optional(values::path)),
                encryption: EncryptionSettings {
                    policy: reader.take("encrypt", values::plain(ENCRYPT_EXPECTED)),
                    certificate: reader.take("certificate", values::optional(values::path)),
                    private_key: reader.take("private_key", values::optional(values::path)),
                    authority: reader.take("certificate_authority", values::optional(values::path)),
                },
            },
            device: DeviceSettings {
                processor: reader.take("device", values::plain(DEVICE_EXPECTED)),
                memory: reader.take("device_memory", values::optional(values::bytes)),
                gradients: reader.take("device_gradients", values::optional(values::bytes)),
                least: reader.take("device_least", values::bytes),
                cache: reader.take("device_cache", values::optional(values::path)),
            },
            output: OutputSettings {
                log_level: reader.take("log_level", values::word),
                log_format: reader.take("log_format", values::word),
                ready_fd: reader.take("ready_fd", values::optional(values::whole(3, u64::from(u16::MAX)))),
            },
            made: sources.made(),
        };
        (settings, reader.problems())
    }

    /// Threads that serve the shards.
    #[must_use]
    pub fn threads(&self) -> u16 {
        let half = std::thread::available_parallelism().map_or(1, |processors| processors.get() / 2);
        let threads = self.threads.unwrap_or_else(|| u16::try_from(half).unwrap_or(u16::MAX));
        threads.clamp(1, self.shards)
    }

    /// Contradictions between values that are valid alone.
    fn contradictions(&self, sources: &SettingTexts) -> Vec<String> {
        let bounded = matches!(self.job.mode, Mode::Staleness { .. });
        let staleness = sources.get("staleness").text.trim().parse() != Ok(0_u32);
        let encryption = &self.admission.encryption;
        // Clients are then known by their certificates.
        let is_mutual = encryption.policy != EncryptPolicy::Off && encryption.authority.is_some();
        let is_admitting = self.admission.insecure || self.admission.token_file.is_some() || is_mutual;
        let open = !self.addresses.bind.is_loopback() && !is_admitting;
        let unresolved = unresolved(&self.addresses.bind).filter(|_| open);
        let everywhere = self.addresses.bind.host.parse().is_ok_and(|number: IpAddr| number.is_unspecified());
        let settings = OptimizerSettings::from_text(&self.job.optimizer).unwrap_or_default();
        let gradients_least =
            u64::from(self.shards) * pserver_kernels::cuda::CudaSettings::gradient_bytes_least(self.job.chunk_bytes);
        let contradictory = settings.mode.is_some_and(|mode| mode != self.job.mode);
        [
            (self.job.servers <= self.index, "index", format!("an index below servers, which is {}", self.job.servers)),
            (
                self.index > 0 && self.addresses.coordinator.is_none(),
                "coordinator",
                "the address of server 0".to_owned(),
            ),
            (
                self.is_told_of_another(sources),
                "coordinator",
                "none or this server's own address, as this is server 0".to_owned(),
            ),
            (staleness && !bounded, "staleness", "0, or mode bounded with it".to_owned()),
            (bounded && !staleness, "staleness", "1 or more with mode bounded".to_owned()),
            (
                self.storage.journal != JournalSetting::Off && self.storage.checkpoint_dir.is_none(),
                "journal",
                "off, or a checkpoint_dir with it".to_owned(),
            ),
            (unresolved.is_some(), "bind", unresolved.clone().unwrap_or_default()),
            (
                open && unresolved.is_none(),
                "bind",
                "a loopback address, a token_file, or insecure = true, with which any client may join".to_owned(),
            ),
            (
                everywhere && self.addresses.advertise.is_none(),
                "advertise",
                "the address at which other hosts reach this server, as bind is every address of this machine"
                    .to_owned(),
            ),
            (
                self.device.gradients.is_some_and(|bytes| bytes < gradients_least),
                "device_gradients",
                format!("{gradients_least} bytes or more: room for four chunks of each shard"),
            ),
            (
                self.addresses.http.is_some_and(|http| !http.ip().is_loopback())
                    && self.admission.http_token_file.is_none(),
                "http",
                "a loopback address, or an http_token_file with it".to_owned(),
            ),
            (contradictory, "optimizer", "no mode in it, or the same as the setting mode".to_owned()),
        ]
        .into_iter()
        .chain(self.not_for_all(&settings))
        .chain(self.encryption_mistakes())
        .filter(|(wrong, ..)| *wrong)
        .map(|(_, key, expected)| sources.get(key).complaint(key, &expected))
        .collect()
    }

    /// Whether the command line of server 0 names another server as server 0. In the environment and in a file the
    /// address is for everybody, and server 0 has no use for it.
    fn is_told_of_another(&self, sources: &SettingTexts) -> bool {
        let Some(coordinator) = self.addresses.coordinator.as_ref().filter(|_| self.index == 0) else { return false };
        let is_own = |own: &Address| (&own.host, own.port) == (&coordinator.host, coordinator.port);
        sources.get("coordinator").is_flag()
            && !is_own(&self.addresses.bind)
            && !self.addresses.advertise.as_ref().is_some_and(is_own)
    }

    /// Refuses certificates without encryption, of which a server would be unencrypted by mistake, and encryption
    /// without anything by which clients know the server.
    fn encryption_mistakes(&self) -> [(bool, &'static str, String); 6] {
        let EncryptionSettings { policy, certificate, private_key, authority } = &self.admission.encryption;
        let is_off = *policy == EncryptPolicy::Off;
        let with = || "none, or encrypt = tcp or required with it".to_owned();
        let is_near = self.addresses.bind.is_loopback() && !self.admission.insecure;
        let is_unknown = certificate.is_none() && self.admission.token_file.is_none() && !is_near;
        [
            (is_off && certificate.is_some(), "certificate", with()),
            (is_off && private_key.is_some(), "private_key", with()),
            (is_off && authority.is_some(), "certificate_authority", with()),
            (
                !is_off && certificate.is_some() && private_key.is_none(),
                "certificate",
                "a private_key with it".to_owned(),
            ),
            (
                !is_off && certificate.is_none() && private_key.is_some(),
                "private_key",
                "a certificate with it".to_owned(),
            ),
            (
                !is_off && is_unknown,
                "encrypt",
                "off, or a certificate or a token_file with it, by which clients know the server".to_owned(),
            ),
        ]
    }

    /// Refuses settings of single parameters, and another merge, in the default optimizer.
    fn not_for_all(&self, settings: &OptimizerSettings) -> [(bool, &'static str, String); 6] {
        let other = settings.merge.is_some_and(|merge| merge != self.job.merge);
        [
            (other, "optimizer", "no merge in it, or the same as the setting merge".to_owned()),
            (settings.sparse.is_some(), "optimizer", "no sparse in it, which is a setting of one parameter".to_owned()),
            (settings.owner.is_some(), "optimizer", "no home in it, which is a setting of one parameter".to_owned()),
            (settings.sender.is_some(), "optimizer", "no sender in it, which is a setting of one parameter".to_owned()),
            (
                settings.total_part.is_some(),
                "optimizer",
                "no total_part in it, which is a setting of one parameter".to_owned(),
            ),
            (
                0 < settings.backup_trainers,
                "optimizer",
                "no backup_trainers in it, which is a setting of one parameter".to_owned(),
            ),
        ]
    }
}

/// Error text for a host that this machine cannot resolve; none for a known host or a number.
fn unresolved(bind: &Address) -> Option<String> {
    let error = (bind.host.as_str(), bind.port).to_socket_addrs().err()?;
    Some(format!("a host that this machine can resolve ({error})"))
}

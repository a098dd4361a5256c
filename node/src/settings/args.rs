//! The command line of `pserver serve`, and with it the list of all settings.

use std::path::PathBuf;

use clap::Arg;
use pserver_client::environment::variable_of;

// The groups of `serve --help`, in the order in which settings of them are declared.
const FILE: &str = "Configuration";
const JOB: &str = "The job";
const PROCESSOR: &str = "Shards and processor cores";
const ADDRESSES: &str = "Addresses and transports";
const DISK: &str = "Checkpoints and saved models";
const TIMES: &str = "Time limits";
const ADMISSION: &str = "Admission of clients";
const DEVICE: &str = "CUDA devices";
const OUTPUT: &str = "Logs and readiness";

/// The options of `pserver serve`. Each may also stand in the configuration file under its name with underscores,
/// and in the environment as PSERVER_ and that name in capitals.
//
// Values stay text here: `Settings` checks them all in one way, wherever they come from.
// tidy: allow fields: one field for each option of a command line, which clap and the list of settings read.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(mut_args(name_variable))]
pub struct ServeArgs {
    /// Read settings from this TOML file.
    #[arg(long, help_heading = FILE, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the effective configuration, with where each value came from, and stop.
    #[arg(long, help_heading = FILE)]
    pub print_config: bool,
    /// Stop when standard input closes, as the server then has no parent process.
    #[arg(long, hide = true)]
    pub until_stdin_closes: bool,
    /// This server's index, from 0 [default: 0].
    #[arg(long, help_heading = JOB, value_name = "NUMBER")]
    pub index: Option<String>,
    /// Servers in the job [default: 1].
    #[arg(long, help_heading = JOB, value_name = "NUMBER")]
    pub servers: Option<String>,
    /// Trainers in the job [default: 1].
    #[arg(long, help_heading = JOB, value_name = "NUMBER")]
    pub trainers: Option<String>,
    /// Shards on this server: parts of the parameters, which can move to other servers [default: 4].
    #[arg(long, help_heading = PROCESSOR, value_name = "NUMBER")]
    pub shards: Option<String>,
    /// Threads that serve the shards [default: one for each shard, and no more than half of the processors].
    #[arg(long, help_heading = PROCESSOR, value_name = "NUMBER")]
    pub threads: Option<String>,
    /// The address to listen on; port 0 takes a free one. Trainers on this machine share memory with the server,
    /// unless tcp:// stands before the host; with shm:// only they can connect [default: 127.0.0.1:7164].
    #[arg(long, help_heading = ADDRESSES, value_name = "ADDRESS")]
    pub bind: Option<String>,
    /// The address at which other hosts reach this server, when it differs from bind; bind to 0.0.0.0 needs it.
    #[arg(long, help_heading = ADDRESSES, value_name = "ADDRESS")]
    pub advertise: Option<String>,
    /// The address of server 0; every other server needs it, and server 0 ignores the variable and the file.
    #[arg(long, help_heading = ADDRESSES, value_name = "ADDRESS")]
    pub coordinator: Option<String>,
    /// The size of a chunk, a power of two from 4KiB to 16MiB [default: 1MiB].
    #[arg(long, help_heading = JOB, value_name = "SIZE")]
    pub chunk_bytes: Option<String>,
    /// How trainers share a parameter: sync, async, bounded or delta [default: sync].
    #[arg(long, help_heading = JOB, value_name = "MODE")]
    pub mode: Option<String>,
    /// With mode bounded: the steps the fastest trainer may be ahead of the slowest, 1 or more; with any other mode 0
    /// [default: 0].
    #[arg(long, help_heading = JOB, value_name = "STEPS")]
    pub staleness: Option<String>,
    /// How gradients of a round become one: mean or sum [default: mean].
    #[arg(long, help_heading = JOB, value_name = "MERGE")]
    pub merge: Option<String>,
    /// Treatment of a gradient with a NaN or infinite element: refuse (the push fails and names it, and the
    /// round waits for a corrected one), skip (it counts as zeros, and a warning counts it) or accept
    /// [default: refuse].
    #[arg(long, help_heading = JOB, value_name = "SETTING")]
    pub nonfinite: Option<String>,
    /// The optimizer of parameters without their own: an OptimizerConfig message in protobuf's text form.
    #[arg(long, help_heading = JOB, value_name = "MESSAGE")]
    pub optimizer: Option<String>,
    /// The folder of checkpoints; without it there are none.
    #[arg(long, help_heading = DISK, value_name = "FOLDER")]
    pub checkpoint_dir: Option<String>,
    /// Seconds between checkpoints, from 0.1 [default: 600].
    #[arg(long, help_heading = DISK, value_name = "SECONDS")]
    pub checkpoint_interval_seconds: Option<String>,
    /// Updates that survive between checkpoints: off (none), on (after a crash) or sync (after a power cut)
    /// [default: on with checkpoint-dir, else off].
    #[arg(long, help_heading = DISK, value_name = "JOURNAL")]
    pub journal: Option<String>,
    /// Start although a journal is damaged in the middle, and drop the records behind the damage: with journal on or
    /// sync these are acknowledged updates. The log names and counts them.
    #[arg(long, help_heading = DISK, value_name = "BOOLEAN", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub accept_torn_tail: Option<String>,
    /// Whether a lock keeps a second server from starting in the directory of a running one; without it the second
    /// replaces the first, which stops at its next write [default: true].
    #[arg(long, help_heading = DISK, value_name = "BOOLEAN", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub directory_lock: Option<String>,
    /// The folder that saved models stay in [default: models].
    #[arg(long, help_heading = DISK, value_name = "FOLDER")]
    pub model_dir: Option<String>,
    /// Seconds a round may wait for a trainer that is alive, from 0.1: the log names it after 10 s and each minute, and
    /// then calls that wait for it fail. One whose connection closed is named after rank-grace-seconds [default: 600].
    #[arg(long, help_heading = TIMES, value_name = "SECONDS")]
    pub round_timeout_seconds: Option<String>,
    /// Seconds the initialising trainer may be silent, from 0.1 [default: 10].
    #[arg(long, help_heading = TIMES, value_name = "SECONDS")]
    pub lease_seconds: Option<String>,
    /// Seconds that the rank of a trainer or the index of a server is kept after its connection closed, from 0: the
    /// time to connect again before the rank is given away, or the rounds that wait for the trainer end [default: 2].
    #[arg(long, help_heading = TIMES, value_name = "SECONDS")]
    pub rank_grace_seconds: Option<String>,
    /// Listen without a token, on loopback too: any client that reaches the address may join. Otherwise a server on
    /// loopback without a token file writes a token that clients of its user find by themselves.
    #[arg(long, help_heading = ADMISSION, value_name = "BOOLEAN")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub insecure: Option<String>,
    /// The file with the job's token, 16 random bytes or more: each client must prove that it has the same token.
    #[arg(long, help_heading = ADMISSION, value_name = "FILE")]
    pub token_file: Option<String>,
    /// Encryption by TLS 1.3: off (none), tcp (connections over TCP and HTTP; verbs and shared memory are used too, and
    /// are not encrypted) or required (as tcp, and verbs are refused) [default: off].
    #[arg(long, help_heading = ADMISSION, value_name = "WHAT")]
    pub encrypt: Option<String>,
    /// The PEM file with this server's certificate and those between it and its authority; without one the server makes
    /// a certificate, and clients know the server by the token.
    #[arg(long, help_heading = ADMISSION, value_name = "FILE")]
    pub certificate: Option<String>,
    /// The PEM file with the private key of the certificate.
    #[arg(long, help_heading = ADMISSION, value_name = "FILE")]
    pub private_key: Option<String>,
    /// The PEM file with certificates of authorities: each client must show a certificate of one of them.
    #[arg(long, help_heading = ADMISSION, value_name = "FILE")]
    pub certificate_authority: Option<String>,
    /// How a shard waits: block (its thread sleeps), adaptive (polls briefly, then sleeps) or busy (polls, with a core
    /// for each shard alone) [default: adaptive].
    #[arg(long, help_heading = PROCESSOR, value_name = "POLL")]
    pub poll: Option<String>,
    /// Which payloads over TCP this side sends with checksums: those between-hosts; always, for connections that end on
    /// this host at a proxy; never, unless the other side has always [default: between-hosts].
    #[arg(long, help_heading = ADDRESSES, value_name = "WHERE")]
    pub checks: Option<String>,
    /// Processor that updates parameters: cpu, cuda:N (the device of that number, which must have room for all
    /// chunks that it can update), or auto (the first CUDA device if there is one that is not slower, for the chunks
    /// that fit) [default: auto].
    #[arg(long, help_heading = DEVICE, value_name = "DEVICE")]
    pub device: Option<String>,
    /// The RDMA devices of connections between machines: auto (the best ones), none, or names, with port and number of
    /// the address where a device has several: mlx5_0, mlx5_0:1:3, or mlx5_0,mlx5_1, which shards use in turn; mlx5_*
    /// means all that begin so, and ^mlx5_bond_0 all others [default: auto].
    #[arg(long, help_heading = ADDRESSES, value_name = "DEVICES")]
    pub rdma_device: Option<String>,
    /// Settings of RDMA fabrics, such as traffic_class=106,timeout=20 (docs/LAUNCH.md#rdma-devices); a setting that is
    /// not named is the environment's.
    #[arg(long, help_heading = ADDRESSES, value_name = "SETTINGS")]
    pub rdma_fabric: Option<String>,
    /// The address at which metrics, status and the page of the job are served over HTTP (docs/WATCH.md); without it
    /// there is no such listener.
    #[arg(long, help_heading = ADDRESSES, value_name = "ADDRESS")]
    pub http: Option<String>,
    /// The file with the token, 16 bytes or more, that readers of metrics and status send in a bearer header; needed
    /// for an http address beyond loopback.
    #[arg(long, help_heading = ADMISSION, value_name = "FILE")]
    pub http_token_file: Option<String>,
    /// Memory of the device that parameters and their states may take, of all shards together, in bytes or with KiB,
    /// MiB or GiB [default: all free memory].
    #[arg(long, help_heading = DEVICE, value_name = "SIZE")]
    pub device_memory: Option<String>,
    /// Memory of the device for gradients in transfer, of all shards together [default: for each shard four times the
    /// gradients of one chunk, from 32MiB to 256MiB].
    #[arg(long, help_heading = DEVICE, value_name = "SIZE")]
    pub device_gradients: Option<String>,
    /// Chunks shorter than this stay on the processor [default: 64KiB].
    #[arg(long, help_heading = DEVICE, value_name = "SIZE")]
    pub device_least: Option<String>,
    /// The cache of rules that were compiled for the device: a folder that only this user may write; empty for no cache
    /// [default: $XDG_CACHE_HOME/pserver/rules, or ~/.cache/pserver/rules].
    #[arg(long, help_heading = DEVICE, value_name = "FOLDER")]
    pub device_cache: Option<String>,
    /// The log's level: off, error, warn, info, debug or trace [default: info].
    #[arg(long, help_heading = OUTPUT, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// The log's format: text or json [default: text].
    #[arg(long, help_heading = OUTPUT, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// An open descriptor that gets a line when the server is ready.
    #[arg(long, help_heading = OUTPUT, value_name = "DESCRIPTOR")]
    pub ready_fd: Option<String>,
}

/// Adds a setting's variable to its help. clap's own `env` would read the variable too, past [`Settings::load`].
///
/// [`Settings::load`]: super::Settings::load
fn name_variable(arg: Arg) -> Arg {
    let name = arg.get_id().as_str().to_owned();
    let is_setting = name == "config" || ServeArgs::default().keys().iter().any(|key| key.name == name);
    let help = arg.get_help().filter(|_| is_setting).map(|help| format!("{help} [env: {}]", variable_of(&name)));
    match help {
        Some(help) => arg.help(help),
        None => arg,
    }
}

/// Dependent defaults: the first setting defaults to the third value where the second setting is configured.
pub(super) const DEPENDENT_DEFAULTS: [(&str, &str, &str); 1] = [("journal", "checkpoint_dir", "on")];

/// A setting that can be made.
pub(super) struct SettingKey<'a> {
    pub(super) name: &'static str,
    /// The default; empty is not set.
    pub(super) default: &'static str,
    /// The value on the command line.
    pub(super) flag: Option<&'a str>,
}

impl ServeArgs {
    /// Every setting, in the order of printing.
    pub(super) fn keys(&self) -> Vec<SettingKey<'_>> {
        [
            ("index", "0", &self.index),
            ("servers", "1", &self.servers),
            ("trainers", "1", &self.trainers),
            ("shards", "4", &self.shards),
            ("threads", "", &self.threads),
            ("bind", "127.0.0.1:7164", &self.bind),
            ("advertise", "", &self.advertise),
            ("coordinator", "", &self.coordinator),
            ("chunk_bytes", "1MiB", &self.chunk_bytes),
            ("mode", "sync", &self.mode),
            ("staleness", "0", &self.staleness),
            ("merge", "mean", &self.merge),
            ("nonfinite", "refuse", &self.nonfinite),
            ("optimizer", "", &self.optimizer),
            ("checkpoint_dir", "", &self.checkpoint_dir),
            ("checkpoint_interval_seconds", "600", &self.checkpoint_interval_seconds),
            ("journal", "off", &self.journal),
            ("accept_torn_tail", "false", &self.accept_torn_tail),
            ("directory_lock", "true", &self.directory_lock),
            ("model_dir", "models", &self.model_dir),
            ("round_timeout_seconds", "600", &self.round_timeout_seconds),
            ("lease_seconds", "10", &self.lease_seconds),
            ("rank_grace_seconds", "2", &self.rank_grace_seconds),
            ("insecure", "false", &self.insecure),
            ("token_file", "", &self.token_file),
            ("encrypt", "off", &self.encrypt),
            ("certificate", "", &self.certificate),
            ("private_key", "", &self.private_key),
            ("certificate_authority", "", &self.certificate_authority),
            ("http", "", &self.http),
            ("http_token_file", "", &self.http_token_file),
            ("poll", "adaptive", &self.poll),
            ("checks", "between-hosts", &self.checks),
            ("device", "auto", &self.device),
            ("rdma_device", "auto", &self.rdma_device),
            ("rdma_fabric", "", &self.rdma_fabric),
            ("device_memory", "", &self.device_memory),
            ("device_gradients", "", &self.device_gradients),
            ("device_least", "64KiB", &self.device_least),
            ("device_cache", "", &self.device_cache),
            ("log_level", "info", &self.log_level),
            ("log_format", "text", &self.log_format),
            ("ready_fd", "", &self.ready_fd),
        ]
        .into_iter()
        .map(|(name, default, flag)| SettingKey { name, default, flag: flag.as_deref() })
        .collect()
    }
}

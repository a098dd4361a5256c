//! `pserver launch`: a whole job, started by one command on this machine, on hosts, or within an allocation.
//!
//! The launcher starts carriers, which start agents, which run the parts: servers and trainers. Server 0 is first; its
//! address is passed on to the others. When a part fails, everything ends.
//!
//! Read in this order: `message` (between launcher and agents), `supervisor` (the launcher), `carriers` (how agents are
//! started), `agent` (a host's parts), `descendants`, `part`, `output`.

mod agent;
mod carriers;
mod descendants;
mod message;
mod output;
mod part;
mod supervisor;

use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;

use anyhow::Result;

pub use agent::run as run_agent;
pub use carriers::LaunchMethod;
use message::{AgentMessage, PartKind};
pub use part::{LaunchExecArgs, run as run_part};

/// Arguments of `pserver launch`.
//
// tidy: allow fields: one field for each option of a command line.
#[derive(clap::Args, Clone, Debug)]
pub struct LaunchArgs {
    /// Server processes [default: 1, with --colocate none beside those].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    servers: Option<u16>,
    /// A server on each host that has trainers, beside --servers on hosts of their own (with mpirun on those that it
    /// chooses). A trainer reaches the server of its host through shared memory. Hosts with a trainer each exchange no
    /// more than in an all-reduce.
    #[arg(long)]
    colocate: bool,
    /// Trainer processes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    trainers: u32,
    /// Options of every server as one text, such as '--shards 4 --optimizer "const_lr { learning_rate: 0.1 }"'; see
    /// `pserver serve --help`.
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true, default_value = "", hide_default_value = true)]
    server_args: String,
    /// Where server 0 serves metrics, status and a page of the whole job, such as 127.0.0.1:9464.
    #[arg(long, value_name = "ADDRESS")]
    http: Option<String>,
    /// Encryption of servers and trainers: off, tcp or required (`pserver serve --help`). The token of the launch
    /// authenticates both ends, so no certificates are needed.
    #[arg(long, value_name = "WHAT", value_parser = ["off", "tcp", "required"])]
    encrypt: Option<String>,
    /// How the parts are started [default: ssh with hosts, srun within a Slurm allocation, mpirun within one of PBS,
    /// LSF or Grid Engine, else local].
    #[arg(long, value_enum, value_name = "METHOD")]
    with: Option<LaunchMethod>,
    /// Hosts for ssh, such as a,b or n[01-04]; servers in turn, trainers in equal blocks. With --colocate the last
    /// hosts are those of --servers.
    #[arg(long, value_name = "HOSTS")]
    hosts: Option<String>,
    /// A file with a host in each line.
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    hostfile: Option<PathBuf>,
    /// The command in place of ssh, srun or mpirun, with options, such as 'ssh -p 2222' or 'mpirun.mpich -bind-to
    /// core'.
    #[arg(long, value_name = "COMMAND")]
    launcher: Option<String>,
    #[command(flatten)]
    limits: LaunchLimits,
    /// A variable for all parts, beside PSERVER_...; without a value that of this environment. May be repeated. On this
    /// machine and by srun or mpirun parts have the environment of the launcher or its agents anyway.
    #[arg(long = "env", value_name = "NAME[=VALUE]")]
    variables: Vec<String>,
    /// The trainer's program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl LaunchArgs {
    /// Servers besides those beside trainers.
    fn dedicated_servers(&self) -> u16 {
        self.servers.unwrap_or(u16::from(!self.colocate))
    }
}

/// Time limits of a launch, in seconds.
#[derive(clap::Args, Clone, Debug)]
struct LaunchLimits {
    /// Seconds until a host or rank must have answered.
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
        value_parser = clap::value_parser!(u32).range(1..=3600))]
    connect_timeout: u32,
    /// Seconds of silence after which a host is given up, and after which a host without its launcher ends its parts.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    heartbeat_timeout: u32,
    /// Seconds from SIGTERM to SIGKILL at an early end.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=3600))]
    grace: u32,
}

/// One process of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct JobPart {
    kind: PartKind,
    /// The server's index, or the trainer's rank.
    index: usize,
}

/// A sender of the launcher's events.
type LaunchSender = SyncSender<LaunchEvent>;

/// An event of the launcher.
enum LaunchEvent {
    /// An agent connected by itself.
    Connected(TcpStream),
    /// An agent sent a message; the text is one that is none.
    Message(usize, Result<AgentMessage, String>),
    /// An agent's connection ended.
    Closed(usize),
    /// A carrier wrote a line of its own.
    CarrierLine { carrier: usize, text: String },
    /// An output of a carrier ended.
    CarrierSilent { carrier: usize },
}

/// Runs a job.
///
/// # Errors
/// The job cannot be started. The exit status is that of the first part that failed, 128 more than a signal's number.
pub fn run(args: &LaunchArgs) -> Result<u8> {
    supervisor::run(args)
}

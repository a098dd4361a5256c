//! Messages between the launcher and the agents that run the parts of a job: lines of JSON.
//!
//! Read in this order: [`AgentMessage`] (from an agent), [`AgentOrder`] (to it).

use std::ffi::OsString;
use std::io::{BufRead, Read, Write};

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Heartbeats within the silence after which the other side is given up.
pub(super) const HEARTBEATS: u32 = 4;
/// Longest message: a job's order has an argument list, of which the kernel allows 2 MiB.
const MESSAGE_BYTES_MAX: u64 = 8 << 20;

/// The kind of a job's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PartKind {
    Server,
    Trainer,
}

/// The order by which an agent starts one process of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PartOrder {
    /// Position among the job's parts.
    pub(super) part: usize,
    /// Whether it is server 0, which is started before the others.
    pub(super) is_first: bool,
    /// Its name in errors, such as `trainer 3`.
    pub(super) name: String,
    pub(super) kind: PartKind,
    pub(super) arguments: Vec<String>,
    /// Variables besides those of the agent.
    pub(super) variables: Vec<(String, String)>,
}

/// The parts that an agent runs, and what they need.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct AgentParts {
    /// The job's token, which goes through no file, command line or environment.
    pub(super) token: String,
    /// Its name may be other bytes than text.
    pub(super) folder: OsString,
    pub(super) parts: Vec<PartOrder>,
    /// Time from SIGTERM to SIGKILL.
    pub(super) grace_millis: u64,
    /// Silence after which either side gives the other up; none on the launcher's machine, where a connection ends with
    /// either process.
    pub(super) silence_millis: Option<u64>,
}

/// From the launcher to an agent.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum AgentOrder {
    /// The first message. The agent starts server 0, if it has it.
    Parts(AgentParts),
    /// Server 0 is at this address: the agent starts its other parts.
    Start { coordinator: String },
    /// A signal for all parts of a kind.
    Signal { kind: PartKind, signal: i32 },
    /// End everything: SIGTERM, then SIGKILL after the grace, or at once.
    Stop { is_urgent: bool },
    /// The launcher is there.
    Heartbeat,
}

/// From an agent to the launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum AgentMessage {
    /// The first message.
    Hello(AgentHello),
    /// A part wrote a line.
    Line { part: usize, is_error: bool, text: String },
    /// A part ended, and its output was delivered.
    Ended { part: usize, end: PartEnd },
    /// The agent cannot do what it was told.
    Failed { text: String },
    /// The agent is there.
    Heartbeat,
}

/// An agent's place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct AgentHello {
    /// Proof that the launcher started the agent, where it connects by itself.
    pub(super) secret: String,
    /// Index of the launcher's command that started it.
    pub(super) carrier: usize,
    /// Its rank among the agents of the same command, where that starts several.
    pub(super) rank: Option<u32>,
    pub(super) host: String,
    /// Equal for agents that share loopback: on the same machine, in the same network namespace.
    pub(super) boot: String,
    /// The address at which other hosts reach this one.
    pub(super) address: Option<String>,
}

/// How a part ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PartEnd {
    Exited(i32),
    Killed(i32),
}

/// Writes a message as one line, at once.
///
/// # Errors
/// The other side is gone.
pub(super) fn write<M: Serialize>(to: &mut dyn Write, message: &M) -> Result<()> {
    let mut line = serde_json::to_vec(message).context("a message as JSON")?;
    line.push(b'\n');
    to.write_all(&line).and_then(|()| to.flush()).context("writing a message")
}

/// Reads the next line and its message; none at the end. A line that is no message is an error with its text.
///
/// # Errors
/// The connection failed, or the line is too long.
pub(super) fn read<M: DeserializeOwned>(from: &mut dyn BufRead) -> Result<Option<Result<M, String>>> {
    let mut line = Vec::new();
    let bytes = from.take(MESSAGE_BYTES_MAX).read_until(b'\n', &mut line).context("reading a message")?;
    ensure!((bytes as u64) < MESSAGE_BYTES_MAX, "a message of more than {MESSAGE_BYTES_MAX} bytes");
    if bytes == 0 {
        return Ok(None);
    }
    let message = serde_json::from_slice(&line);
    Ok(Some(message.map_err(|_| String::from_utf8_lossy(&line).trim_end().to_owned())))
}

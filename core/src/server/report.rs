//! Report of a shard: what it holds, which trainers it knows, and what it waits for, for people and monitoring.
//!
//! A report is made when it is asked for, and takes a pass over the chunks. Not here: what is counted all the time
//! (`counters`), and how a report is made (`status`).

use serde::{Deserialize, Serialize};

use crate::wire::JobMessage;

/// Phase of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardPhase {
    /// No trainer has begun to initialise.
    #[default]
    Empty,
    /// A trainer sends the initial values.
    Initialising,
    /// Gradients are taken.
    Serving,
}

/// Report of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Its phase.
    pub phase: ShardPhase,
    /// The generation that is served; zero before initialisation.
    pub generation: u32,
    /// Chunks held.
    pub chunks: u64,
    /// Bytes of values held.
    pub value_bytes: u64,
    /// The least version of any chunk.
    pub slowest_version: u64,
    /// The greatest version of any chunk.
    pub fastest_version: u64,
    /// Mapped memory by reason, in the order of the alphabet.
    pub memory: Vec<MemoryReport>,
    /// The trainers that have connected since its start, by rank.
    pub trainers: Vec<TrainerConnection>,
    /// Requests that wait for a version.
    pub waiting_requests: u64,
    /// The oldest wait.
    pub wait: Option<WaitReport>,
    /// Bytes of the journal over its life.
    pub journal_position: u64,
    /// The programs that the executor runs here.
    pub programs: Vec<ProgramReport>,
}

/// A program that the executor runs on a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramReport {
    /// The name of its parameter.
    pub name: String,
    /// The items that trainers have sent to it.
    pub items: u64,
    /// The waits of its ops, or why it has stopped.
    pub state: String,
}

/// Report of the coordinator: the members of the job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoordinatorReport {
    /// The job's epoch.
    pub epoch: u64,
    /// The committed generation; zero before initialisation.
    pub generation: u32,
    /// The settings of the job.
    pub job: JobMessage,
    /// Trainers by rank.
    pub trainers: Vec<TrainerReport>,
    /// Servers by index.
    pub servers: Vec<ServerReport>,
}

/// State of a trainer's rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainerState {
    /// No process has joined with it.
    Absent,
    /// Its process is connected.
    Connected,
    /// Its connection closed without a leave.
    Lost,
    /// It has left.
    Departed,
}

/// A trainer as the coordinator knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerReport {
    /// Its rank.
    pub rank: u32,
    /// Its state.
    pub state: TrainerState,
    /// Its host, as its hello says.
    pub host: String,
    /// Its process number, as its hello says.
    pub process: u32,
    /// The processes that have had the rank.
    pub incarnation: u32,
    /// Milliseconds since its last message to the coordinator.
    pub silent_milliseconds: u64,
}

/// A server as the coordinator knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReport {
    /// Its address; empty before it has registered.
    pub address: String,
    /// Whether its connection is open.
    pub is_connected: bool,
    /// Milliseconds since a connected server's last renewal, which it sends every second.
    pub silent_milliseconds: u64,
    /// The status that it reported last, in JSON, unchecked; empty when it has reported none.
    pub status: Vec<u8>,
}

/// A line of the budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The use of the memory.
    pub reason: String,
    /// Its bytes, mapped and perhaps not yet touched.
    pub bytes: u64,
}

/// A trainer's connection with a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerConnection {
    /// Its rank.
    pub rank: u32,
    /// The transport of its connection and the reason for it, such as `shm: ...`.
    pub transport: String,
    /// Whether a connection is open.
    pub is_connected: bool,
}

/// A wait of a chunk's round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitReport {
    /// How long the oldest request has waited, in milliseconds.
    pub milliseconds: u64,
    /// The parameter, chunk and round, and what they wait for.
    pub text: String,
    /// The ranks that the round waits for.
    pub trainers: Vec<u32>,
}

//! Settings of a shard and its policies, fixed at start.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::{Epoch, Term};
use crate::port::{CompileFlow, LoadProgram};
use crate::shares::ShardNeed;
use crate::wire::JobMessage;

/// Settings of a shard.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// The job's life; frames of another are refused.
    pub epoch: Epoch,
    /// The term under which this server leads the shard; frames of another are refused.
    pub term: Term,
    /// Longest wait of a pull or push-pull for its version; the error then names the missing trainers.
    pub round_timeout: Duration,
    /// Time for a disconnected trainer to reconnect; after it, calls that wait for the trainer fail.
    pub grace: Duration,
    /// Whether chunk memory is shared, so that trainers on this host read values in place.
    pub shares_memory: bool,
    /// Receives that the transport posts at once for one connection, at most.
    pub receives: usize,
    /// The memory that the shards of this process may take; beyond it the system would end the process.
    pub memory_limit: Option<ProcessMemory>,
    /// Policy for gradients with NaN or infinite elements.
    pub nonfinite: NonFinite,
    /// Compiler of the programs that the shard runs.
    pub compile: CompileFlow,
    /// Loader of the programs that the shard hosts.
    pub load: LoadProgram,
}

/// The bytes that a process may take, and a shard's need of them.
#[derive(Clone, Debug)]
pub struct ProcessMemory {
    /// The limit.
    pub bytes: u64,
    /// The need of this shard.
    pub need: ShardNeed,
}

impl ProcessMemory {
    /// The bytes that the other shards of the process leave.
    pub(super) fn left(&self) -> u64 {
        self.need.left_of(self.bytes)
    }
}

/// Policy of a shard for a gradient with a NaN or infinite element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// Refuse the frame with trainer, parameter, element and value; the round waits for a corrected gradient.
    #[default]
    Refuse,
    /// Zero it: for a dense parameter the chunk with the element, for a sparse one the rows of the frame.
    Skip,
    /// Apply it unchanged.
    Accept,
}

/// Policy for parameters that find no room on the accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// They stay on the processor, and a log line says so.
    Processor,
    /// The initialisation is refused with the bytes asked for and free; a shard that restores them stops.
    Refused,
}

/// Settings of the coordinator, fixed at start.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// Epoch of the job, unless an earlier start's is recalled.
    pub epoch: Epoch,
    /// How many servers there are.
    pub servers: u16,
    /// Settings of the job from the operator; the initialiser may change mode and merge.
    pub job: JobMessage,
    /// Default configuration of a parameter, encoded.
    pub default_config: Vec<u8>,
    /// The settings of the job that the operator has made, by name, each as a person reads it.
    pub given: OperatorSettings,
    /// Lease time of the initialiser.
    pub lease: Duration,
    /// Time for which a disconnected trainer or server keeps its rank or slot.
    pub grace: Duration,
    /// Whether servers report their status.
    pub watches: bool,
    /// Whether servers take gradients with NaN or infinite elements.
    pub takes_nonfinite: bool,
    /// The folder that saved models stay in, as other servers are told.
    pub model_dir: String,
}

/// The settings of a job that the operator has made, by name, each as a person reads it: `trainers = 3 (from
/// --trainers)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperatorSettings(pub BTreeMap<&'static str, String>);

impl OperatorSettings {
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

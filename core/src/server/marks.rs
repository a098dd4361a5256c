//! Messages of a checkpoint: the description of a shard, and the marks of a chunk, which say which gradients its value
//! contains.

use prost::Message;

use super::bucket::Bucket;
use super::call::{CallId, TrainerMarks};
use super::chunk::Chunk;
use super::saved_program::SavedProgramMessage;
use crate::ids::{Incarnation, Sequence, Version};
use crate::rows::RateChanges;
use crate::wire::{InitMessage, JobMessage};

/// Description of a shard.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AboutMessage {
    #[prost(uint32, tag = "2")]
    pub(super) generation: u32,
    #[prost(uint64, tag = "3")]
    pub(super) chunks: u64,
    #[prost(message, optional, tag = "4")]
    pub(super) job: Option<JobMessage>,
    #[prost(message, repeated, tag = "5")]
    pub(super) parameters: Vec<InitMessage>,
    #[prost(uint32, repeated, tag = "6")]
    pub(super) known: Vec<u32>,
    /// The incarnation with which each trainer departed from this run; zero for one that rounds wait for.
    #[prost(uint32, repeated, tag = "7")]
    pub(super) left: Vec<u32>,
    /// The run of each known incarnation.
    #[prost(uint32, repeated, tag = "8")]
    pub(super) runs: Vec<u32>,
    /// The run that the shard is in.
    #[prost(uint32, tag = "9")]
    pub(super) run: u32,
    /// The incarnation with which each trainer departed from an earlier run, while its next process is awaited; else
    /// zero.
    #[prost(uint32, repeated, tag = "10")]
    pub(super) expected: Vec<u32>,
    /// The trainers of the run of each known incarnation.
    #[prost(uint32, repeated, tag = "11")]
    pub(super) run_trainers: Vec<u32>,
}

/// State of a chunk beside its tensors.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MarksMessage {
    #[prost(message, repeated, tag = "1")]
    pub(super) heard: Vec<HeardMessage>,
    /// Where the journal was when the chunk was written.
    #[prost(uint64, tag = "2")]
    pub(super) position: u64,
    /// Of a bucket: the learning rates that steps brought with them, where they changed.
    #[prost(message, repeated, tag = "4")]
    pub(super) rates: Vec<RateMessage>,
    /// Updates that the optimizer's state has seen beyond the version.
    #[prost(sint64, tag = "6")]
    pub(super) updates_beyond: i64,
    /// Of the first chunk of a hosted program: where it is.
    #[prost(message, optional, tag = "7")]
    pub(super) host: Option<SavedProgramMessage>,
}

impl MarksMessage {
    /// Of a chunk as it is when the journal is at this position.
    pub(super) fn of(chunk: &Chunk, position: u64) -> Self {
        let heard = chunk.heard.iter().map(HeardMessage::of).collect();
        let rates = chunk.bucket().map(RateMessage::of).unwrap_or_default();
        Self { heard, position, rates, updates_beyond: chunk.updates_beyond, host: None }
    }

    /// The learning rates of a bucket.
    pub(super) fn rates(&self) -> RateChanges {
        let mut rates = RateChanges::default();
        self.rates.iter().for_each(|one| rates.note(Version(one.version), one.rate));
        rates
    }
}

/// From which version on steps brought which learning rate; absent where the schedule's holds.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct RateMessage {
    #[prost(uint64, tag = "1")]
    pub(super) version: u64,
    #[prost(double, optional, tag = "2")]
    pub(super) rate: Option<f64>,
}

impl RateMessage {
    fn of(bucket: &Bucket) -> Vec<Self> {
        let changes = bucket.rates().changes().iter();
        changes.map(|(version, rate)| Self { version: version.0, rate: *rate }).collect()
    }
}

/// The last calls of a trainer in the value, and its clock.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct HeardMessage {
    #[prost(uint32, tag = "1")]
    pub(super) push_incarnation: u32,
    #[prost(uint64, tag = "2")]
    pub(super) push_sequence: u64,
    #[prost(uint32, tag = "3")]
    pub(super) set_incarnation: u32,
    #[prost(uint64, tag = "4")]
    pub(super) set_sequence: u64,
    #[prost(uint64, tag = "5")]
    pub(super) clock: u64,
}

impl HeardMessage {
    fn of(heard: &TrainerMarks) -> Self {
        Self {
            push_incarnation: heard.push.incarnation.0,
            push_sequence: heard.push.sequence.0,
            set_incarnation: heard.set.incarnation.0,
            set_sequence: heard.set.sequence.0,
            clock: heard.clock,
        }
    }
}

impl From<&HeardMessage> for TrainerMarks {
    fn from(message: &HeardMessage) -> Self {
        Self {
            push: call_of(message.push_incarnation, message.push_sequence),
            set: call_of(message.set_incarnation, message.set_sequence),
            clock: message.clock,
        }
    }
}

fn call_of(incarnation: u32, sequence: u64) -> CallId {
    CallId { incarnation: Incarnation(incarnation), sequence: Sequence(sequence) }
}

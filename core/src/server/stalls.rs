//! Stalled work: complete rounds whose update lacks memory, time or a device, and answers that lack memory.
//!
//! Not here: the retries (`retry`).

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::TrainerId;
use crate::time::Now;

/// The stalled work of a shard.
#[derive(Default)]
pub(super) struct Stalls {
    /// Chunks with a stalled update, and the reason; of a group the first chunk.
    pub(super) updates: BTreeMap<usize, StallReason>,
    /// Chunks with a half-precision answer that lacks a lease.
    pub(super) answers: BTreeSet<usize>,
    /// The trainer whose refused leave, set or rejoin goes ahead of new gradients for a device, and the deadline of
    /// that privilege; see `update::grouped`.
    pub(super) priority: Option<(TrainerId, Now)>,
    /// When the records of decided rounds are tried again, which the disk did not take.
    pub(super) record_due: Option<Now>,
}

/// Why the update of a complete round is stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StallReason {
    /// A lease for the next value.
    Memory,
    /// Another turn: its rows replay many missed updates.
    Time,
    /// A device that works on some of the chunks that step together.
    Device,
    /// The record of the decided round, which the disk does not take.
    Record,
}

impl StallReason {
    /// The reason, for log lines and errors.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Memory => "memory that readers hold",
            Self::Time => "rows that catch up with missed updates",
            Self::Device => "a device",
            Self::Record => "the disk, which does not take its record",
        }
    }
}

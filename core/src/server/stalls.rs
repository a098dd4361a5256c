//! Stalled work: complete rounds whose update lacks memory, time or a device, and answers that lack memory.
//!
//! Not here: the retries (`retry`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::group::SlotIndex;
use crate::ids::TrainerId;
use crate::limits::DEVICE_PRIORITY;
use crate::time::Now;

/// Pause before a record that the disk did not take is tried again.
const RECORD_PAUSE: Duration = Duration::from_millis(10);

/// The stalled work of a shard.
#[derive(Default)]
pub(super) struct Stalls {
    /// Chunks with a stalled update, and the reason; of a group the first chunk.
    pub(super) updates: BTreeMap<SlotIndex, StallReason>,
    /// Chunks with a half-precision answer that lacks a lease.
    pub(super) answers: BTreeSet<SlotIndex>,
    /// The trainer whose refused leave, set or rejoin goes ahead of new gradients for a device, and the deadline of
    /// that privilege; see [`Stalls::note_refused`].
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

impl Stalls {
    /// Records a stalled update; it is retried when the reason may be gone.
    pub(super) fn add(&mut self, slot_index: SlotIndex, lack: StallReason) {
        self.updates.insert(slot_index, lack);
    }

    /// Removes a chunk from the stalled ones after its update.
    #[inline]
    pub(super) fn note_updated(&mut self, slot_index: SlotIndex) {
        if !self.updates.is_empty() {
            self.updates.remove(&slot_index);
        }
    }

    /// Whether any update is stalled.
    pub(super) fn is_any(&self) -> bool {
        !self.updates.is_empty()
    }

    /// Whether any update is stalled for this reason.
    pub(super) fn has(&self, lack: StallReason) -> bool {
        self.updates.values().any(|one| *one == lack)
    }

    /// Whether an update or an answer lacks memory.
    pub(super) fn lacks_memory(&self) -> bool {
        !self.answers.is_empty() || self.has(StallReason::Memory)
    }

    /// Whether records that the disk did not take are to be tried again.
    pub(super) fn is_record_due(&self, now: Now) -> bool {
        self.record_due.is_some_and(|due| due <= now)
    }

    /// Gives a trainer priority whose leave, set or rejoin was refused because a device was at work: no new gradient
    /// enters before it was retried, or [`DEVICE_PRIORITY`] has passed.
    pub(super) fn note_refused(&mut self, now: Now, trainer: TrainerId) {
        self.priority = Some((trainer, now + DEVICE_PRIORITY));
    }

    /// Ends the priority of a trainer whose leave, set or rejoin was accepted.
    pub(super) fn note_admitted(&mut self, trainer: TrainerId) {
        self.priority = self.priority.filter(|(first, _)| *first != trainer);
    }

    /// Ends an expired priority.
    pub(super) fn forget_refused(&mut self, now: Now) {
        self.priority = self.priority.filter(|(_, until)| now < *until);
    }

    /// The reason why the update of a unit is stalled, by its first chunk.
    pub(super) fn of(&self, first: SlotIndex) -> Option<StallReason> {
        self.updates.get(&first).copied()
    }

    /// Stalls a unit until its decided round has its record.
    pub(super) fn await_record(&mut self, now: Now, first: SlotIndex) {
        self.add(first, StallReason::Record);
        self.record_due = Some(now + RECORD_PAUSE);
    }
}

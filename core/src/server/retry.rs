//! Retries of stalled work, when the reason of the stall may be gone.

use std::time::Duration;

use super::context::Context;
use super::serving::Serving;
use super::stalls::StallReason;
use crate::time::Now;

/// Pause before a record that the disk did not take is tried again.
const RECORD_PAUSE: Duration = Duration::from_millis(10);

impl Serving {
    /// Records a stalled update; it is retried when the reason may be gone.
    pub(super) fn stall(&mut self, slot_index: usize, lack: StallReason) {
        self.stalls.updates.insert(slot_index, lack);
    }

    /// Removes a chunk from the stalled ones after its update.
    #[inline]
    pub(super) fn note_updated(&mut self, slot_index: usize) {
        if !self.stalls.updates.is_empty() {
            self.stalls.updates.remove(&slot_index);
        }
    }

    /// Whether any update is stalled.
    pub(super) fn is_stalled(&self) -> bool {
        !self.stalls.updates.is_empty()
    }

    /// Whether any update is stalled for this reason.
    pub(super) fn lacks(&self, lack: StallReason) -> bool {
        self.stalls.updates.values().any(|one| *one == lack)
    }

    /// Whether an update or an answer lacks memory.
    pub(super) fn lacks_memory(&self) -> bool {
        !self.stalls.answers.is_empty() || self.lacks(StallReason::Memory)
    }

    /// Whether rows replay missed updates, which is work for every turn.
    pub(super) fn is_catching_up(&self) -> bool {
        !self.slow_pulls.is_empty() || self.lacks(StallReason::Time)
    }

    /// Logs the number of stalled updates, if there are any.
    pub(super) fn log_stalled(&self) {
        if let Some((slot_index, lack)) = self.stalls.updates.first_key_value() {
            let id = self.table.chunks[*slot_index].id;
            let (count, name) = (self.stalls.updates.len(), self.table.held(id).name());
            tracing::warn!("{count} updates wait, first {name:?} chunk {} for {}", id.chunk, lack.text());
        }
    }

    /// Stalls a chunk's unit until its decided round has its record.
    pub(super) fn await_record(&mut self, now: Now, slot_index: usize) {
        let first = self.table.unit(slot_index).slot_indices()[0];
        self.stall(first, StallReason::Record);
        self.stalls.record_due = Some(now + RECORD_PAUSE);
    }

    /// Whether a decided round lacks its record, whatever its unit waits for.
    pub(super) fn lacks_records(&self) -> bool {
        self.stalls.updates.keys().any(|slot_index| !self.unrecorded(*slot_index).is_empty())
    }

    /// Whether records that the disk did not take are to be tried again.
    pub(super) fn is_record_due(&self, now: Now) -> bool {
        self.stalls.record_due.is_some_and(|due| due <= now)
    }

    /// Tries the records again that rounds lack.
    pub(super) fn record_again(&mut self, cx: &mut Context<'_>) {
        self.stalls.record_due = None;
        let others = self.stalls.updates.iter().filter(|(_, lack)| **lack != StallReason::Record);
        let others: Vec<usize> = others.map(|(slot_index, _)| *slot_index).collect();
        self.record_missing(cx, &others);
        self.retry_lacking(cx, StallReason::Record);
    }

    /// Retries updates and answers that lacked a lease; true when any succeeded.
    pub(super) fn retry(&mut self, cx: &mut Context<'_>) -> bool {
        let is_any = self.retry_lacking(cx, StallReason::Memory);
        self.answer_starved(cx) || is_any
    }

    /// Continues updates and pulls that take several turns, each with a budget of `replays` bytes of missed row
    /// updates. True when there was any.
    pub(super) fn go_on_catching_up(&mut self, cx: &mut Context<'_>, replays: u64) -> bool {
        cx.replay_left = replays;
        let is_any = self.retry_lacking(cx, StallReason::Time) || cx.replay_left < replays;
        cx.replay_left = replays;
        self.read_on_slow(cx) || is_any
    }

    fn retry_lacking(&mut self, cx: &mut Context<'_>, wanted: StallReason) -> bool {
        let stalled: Vec<usize> =
            self.stalls.updates.extract_if(.., |_, lack| *lack == wanted).map(|(slot_index, _)| slot_index).collect();
        self.record_missing(cx, &stalled);
        self.run_all(cx, stalled.iter().copied());
        stalled.iter().any(|slot_index| !self.stalls.updates.contains_key(slot_index))
    }
}

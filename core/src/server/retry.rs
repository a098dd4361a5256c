//! Retries of stalled work, when the reason of the stall may be gone.

use super::context::Context;
use super::group::SlotIndex;
use super::serving::Serving;
use super::stalls::StallReason;

impl Serving {
    /// Whether rows replay missed updates, which is work for every turn.
    pub(super) fn is_catching_up(&self) -> bool {
        !self.slow_pulls.is_empty() || self.stalls.has(StallReason::Time)
    }

    /// Logs the number of stalled updates, if there are any.
    pub(super) fn log_stalled(&self) {
        if let Some((slot_index, lack)) = self.stalls.updates.first_key_value() {
            let id = self.table.chunks[*slot_index].id;
            let (count, name) = (self.stalls.updates.len(), self.table.held(id).name());
            tracing::warn!("{count} updates wait, first {name:?} chunk {} for {}", id.chunk, lack.text());
        }
    }

    /// Whether a decided round lacks its record, whatever its unit waits for.
    pub(super) fn lacks_records(&self) -> bool {
        self.stalls.updates.keys().any(|slot_index| !self.unrecorded(*slot_index).is_empty())
    }

    /// Tries the records again that rounds lack.
    pub(super) fn record_again(&mut self, cx: &mut Context<'_>) {
        self.stalls.record_due = None;
        let others = self.stalls.updates.iter().filter(|(_, lack)| **lack != StallReason::Record);
        let others: Vec<SlotIndex> = others.map(|(slot_index, _)| *slot_index).collect();
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
        let stalled: Vec<SlotIndex> =
            self.stalls.updates.extract_if(.., |_, lack| *lack == wanted).map(|(slot_index, _)| slot_index).collect();
        self.record_missing(cx, &stalled);
        self.run_all(cx, stalled.iter().copied());
        stalled.iter().any(|slot_index| !self.stalls.updates.contains_key(slot_index))
    }
}

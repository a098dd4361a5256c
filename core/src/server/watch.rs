//! Log lines about stalled rounds: which round waits, for which trainers, and when it continued.
//!
//! Only the longest wait of a shard is logged, once, and at most one per minute: a job of uneven trainers waits in
//! every round.
//!
//! Not here: the expiry of a wait (`waits`).

use std::time::Duration;

use super::group::SlotIndex;
use super::presence::Presence;
use super::serving::Serving;
use super::shard::{Phase, Shard};
use super::wait_index::{ReportedWait, StallLog};
use crate::accumulator::AccumulatorPace;
use crate::ids::Version;
use crate::time::Now;

/// Pause between two reported waits.
const PAUSE: Duration = Duration::from_secs(60);

impl Serving {
    /// The lines to log now.
    pub(super) fn wait_report(&mut self, now: Now, trainers: &Presence) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(open) =
            self.waits.log.open.take_if(|open| self.table.chunks[open.slot_index].version > open.version)
        {
            let waited = open.since.until(now).as_secs_f64();
            lines.push(format!("{} went on after {waited:.1} s", self.version_text(open.slot_index, open.version)));
        }
        let first = self.waits.by_time.first().copied();
        if let Some((since, slot_index)) = first.filter(|_| self.waits.report_due().is_some_and(|due| due <= now)) {
            let version = self.table.chunks[slot_index].version;
            let waited = since.until(now).as_secs();
            let waits_for = self.awaited_text(now, trainers, slot_index);
            lines.push(format!("{} has waited {waited} s for {waits_for}", self.version_text(slot_index, version)));
            self.waits.log = StallLog { open: Some(ReportedWait { slot_index, version, since }), next: now + PAUSE };
        }
        lines
    }

    /// Names the round or update that makes the next version.
    fn version_text(&self, slot_index: SlotIndex, version: Version) -> String {
        let kind = if self.flows.of(slot_index).pace == AccumulatorPace::Rounds { "round" } else { "update" };
        let id = self.table.chunks[slot_index].id;
        format!("{kind} {} of \"{}\" chunk {}", version.0 + 1, self.table.held(id).name(), id.chunk)
    }
}

impl Shard {
    /// The lines to log about stalled rounds.
    pub(super) fn wait_report(&mut self, now: Now) -> Vec<String> {
        match &mut self.phase {
            Phase::Serving(serving) => serving.wait_report(now, &self.trainers),
            Phase::Empty | Phase::Filling(_) => Vec::new(),
        }
    }

    pub(super) fn log_waits(&mut self, now: Now) {
        self.wait_report(now).iter().for_each(|text| tracing::warn!("{text}"));
    }
}

//! Calls that wait for a version: their count by connection, and their expiry, on their deadline or when a trainer that
//! they wait for is lost.
//!
//! An expired wait changes no state: the round stays open, and a repeated call waits for the same round. The round
//! completes when a trainer of the missing rank sends its gradient or leaves.

use std::time::Duration;

use super::chunk::Chunk;
use super::context::Context;
use super::group::SlotIndex;
use super::presence::Presence;
use super::reply::Refusal;
use super::serving::Serving;
use super::waiters::Waiter;
use crate::accumulator::AccumulatorPace;
use crate::ids::{PeerId, TrainerId, Version};
use crate::limits::WAITS_ENDED_PER_TURN;
use crate::time::Now;

/// How often waits for a lost trainer are searched for, while one is lost.
const LOOK: Duration = Duration::from_millis(100);

impl Serving {
    /// The next time at which a wait expires.
    pub(super) fn deadline(&self, limit: Duration, trainers: &Presence) -> Option<Now> {
        let first = self.waits.by_time.first().map(|(since, _)| *since + limit)?;
        let first = self.waits.report_due().map_or(first, |due| due.min(first));
        let lost = trainers.losses().filter(|(trainer, _)| self.is_active(*trainer));
        lost.map(|(_, lost)| lost.max(self.waits.lost_checked_at + LOOK)).chain([first]).min()
    }

    /// Ends waits older than `limit` with an error that names the missing trainers; bounded per turn.
    pub(super) fn expire(&mut self, cx: &mut Context<'_>, limit: Duration) {
        let now = cx.now;
        let is_over = |since: Now| since + limit <= now;
        let mut left = WAITS_ENDED_PER_TURN;
        while let Some((_, slot_index)) = self.waits.by_time.first().copied().filter(|(since, _)| is_over(*since)) {
            if left == 0 {
                return;
            }
            let mut expired = self.table.chunks[slot_index].waiters.take_overdue(is_over, left);
            self.waits.note_taken(&expired);
            left -= expired.len();
            expired.extend(self.take_overdue(cx, slot_index, is_over));
            if let Some(deferred_set) = &mut self.table.chunks[slot_index].deferred_set
                && deferred_set.since.is_some_and(is_over)
            {
                deferred_set.since = None;
                let (peer, head, version) = (deferred_set.peer, deferred_set.head, deferred_set.after);
                expired.extend(peer.map(|peer| Waiter::new(peer, head, version, cx.now)));
            }
            self.give_up_gathered(cx, slot_index, limit);
            self.waits.note(slot_index, &mut self.table.chunks[slot_index]);
            for waiter in expired {
                let text = self.missing_text(cx, slot_index, &waiter, limit);
                cx.replies.error(
                    waiter.peer,
                    &waiter.head,
                    &Refusal::awaiting(self.awaited_trainers(slot_index), text),
                );
            }
        }
    }

    /// Ends waits for lost trainers; bounded per turn.
    pub(super) fn expire_lost(&mut self, cx: &mut Context<'_>) {
        let is_lost = |(trainer, from): &(TrainerId, Now)| *from <= cx.now && self.is_active(*trainer);
        let lost: Vec<TrainerId> = cx.trainers.losses().filter(is_lost).map(|(trainer, _)| trainer).collect();
        if lost.is_empty() {
            return;
        }
        let mut left = WAITS_ENDED_PER_TURN;
        let slot_indices: Vec<SlotIndex> = self.waits.by_time.iter().map(|(_, slot_index)| *slot_index).collect();
        for slot_index in slot_indices {
            if left == 0 {
                // The next turn continues.
                return;
            }
            let Some(trainer) = self.awaits_one_of(slot_index, &lost) else { continue };
            let chunk = &self.table.chunks[slot_index];
            let version = chunk.version;
            let text = format!(
                "{}, which has not connected again; the round stays open for a trainer that takes rank {trainer}; a \
                 trainer that ends before the others leaves the job at its end (leave)",
                self.round_text(chunk, &format!("trainer {}", cx.trainers.describe(cx.now, trainer))),
            );
            let mut ended = self.table.chunks[slot_index].waiters.take_beyond(version, left);
            self.waits.note_taken(&ended);
            left -= ended.len();
            ended.extend(self.take_overdue(cx, slot_index, |_| true));
            self.waits.note(slot_index, &mut self.table.chunks[slot_index]);
            for waiter in ended {
                cx.replies.error(waiter.peer, &waiter.head, &Refusal::awaiting(vec![trainer], text.as_str()));
            }
        }
        self.waits.lost_checked_at = cx.now;
    }

    /// Describes the oldest wait of a connection.
    pub(super) fn describe_wait(&self, now: Now, trainers: &Presence, peer: PeerId) -> Option<String> {
        let is_waited_for = |slot_index: &SlotIndex| {
            let chunk = &self.table.chunks[*slot_index];
            let mut sent = chunk.round.contributions().iter().chain(chunk.round.all_ahead());
            self.waits.per_peer.contains_key(&peer) && chunk.waiters.has_any_of(peer)
                || sent.any(|one| one.since.is_some() && one.sending.peer == Some(peer))
        };
        let slot_index = self.waits.by_time.iter().map(|(_, slot_index)| *slot_index).find(is_waited_for)?;
        Some(self.wait_text(now, trainers, slot_index))
    }

    /// The first of these trainers that a chunk's round waits for.
    fn awaits_one_of(&self, slot_index: SlotIndex, lost: &[TrainerId]) -> Option<TrainerId> {
        let slot_index = self.round_of(slot_index);
        let unit = self.table.unit(slot_index);
        let group = unit.slot_indices();
        let is_at_work = group.iter().any(|slot_index| {
            self.table.chunks[*slot_index].on_device.as_ref().is_some_and(|on_device| on_device.waits_for().is_some())
        });
        if is_at_work || self.stalls.of(group[0]).is_some() {
            return None;
        }
        let pace = self.flows.of(slot_index).pace;
        let awaits = |slot_index: &SlotIndex, trainer: TrainerId| {
            self.flows.is_awaited(*slot_index, trainer) && self.awaits(&self.table.chunks[*slot_index], pace, trainer)
        };
        if pace == AccumulatorPace::Rounds && group.iter().all(|slot_index| self.can_do_without(*slot_index, lost)) {
            return None;
        }
        lost.iter().copied().find(|trainer| group.iter().any(|slot_index| awaits(slot_index, *trainer)))
    }

    fn awaits(&self, chunk: &Chunk, pace: AccumulatorPace, trainer: TrainerId) -> bool {
        let owns = || self.table.group(chunk).is_some_and(|group| group.owner == Some(trainer));
        let clock = |trainer: TrainerId| chunk.heard(trainer).clock;
        match pace {
            AccumulatorPace::Rounds => chunk.decided == 0 && chunk.round.contribution(trainer).is_none(),
            AccumulatorPace::Bounded(_) => {
                let mut ahead = chunk.round.all_ahead().iter().filter(|one| one.trainer != trainer);
                owns() || ahead.any(|one| !pace.admits(false, clock(one.trainer), || clock(trainer)))
            }
            AccumulatorPace::Any => owns(),
        }
    }

    /// Overdue unanswered contributions of a chunk, as waiters for the next version.
    fn take_overdue(
        &mut self,
        cx: &mut Context<'_>,
        slot_index: SlotIndex,
        is_over: impl Fn(Now) -> bool,
    ) -> Vec<Waiter> {
        let chunk = &mut self.table.chunks[slot_index];
        let version = Version(chunk.version.0 + 1);
        let overdue = chunk.round.take_overdue(cx.pool, is_over).into_iter();
        overdue.map(|(peer, head)| Waiter::new(peer, head, version, cx.now)).collect()
    }

    fn missing_text(&self, cx: &Context<'_>, slot_index: SlotIndex, waiter: &Waiter, limit: Duration) -> String {
        let seconds = limit.as_secs_f64();
        if let Some(text) = self.memory_wait_text(slot_index, waiter) {
            return format!("{text}, and had none within {seconds:.1} s");
        }
        let chunk = &self.table.chunks[slot_index];
        format!(
            "parameter \"{}\" chunk {}: version {} was not reached within {seconds:.1} s (--round-timeout-seconds of \
             the servers); it is at version {} and round {} waits for {}",
            self.table.held(chunk.id).name(),
            chunk.id.chunk,
            waiter.version,
            chunk.version,
            chunk.version.0 + 1,
            self.awaited_text(cx.now, cx.trainers, slot_index)
        )
    }

    /// Names what a chunk's round waits for: a device, a stall reason, or trainers.
    pub(super) fn awaited_text(&self, now: Now, trainers: &Presence, slot_index: SlotIndex) -> String {
        let slot_index = self.round_of(slot_index);
        let unit = self.table.unit(slot_index);
        let group = unit.slot_indices();
        let device = group.iter().find_map(|slot_index| self.table.chunks[*slot_index].on_device.as_ref()?.waits_for());
        let lack = device.or_else(|| self.stalls.of(group[0]).map(|lack| lack.text().to_owned()));
        lack.or_else(|| self.programs.program_wait(slot_index)).unwrap_or_else(|| {
            if self.awaits_total(slot_index) {
                return "its total, which a trainer sends".to_owned();
            }
            let missing = self.missing(slot_index);
            if missing.is_empty() {
                return "a gradient".to_owned();
            }
            let missing: Vec<String> = missing.iter().map(|trainer| trainers.describe(now, *trainer)).collect();
            format!("trainer {}", missing.join(", "))
        })
    }

    /// The trainers that [`awaited_text`](Self::awaited_text) names.
    fn awaited_trainers(&self, slot_index: SlotIndex) -> Vec<TrainerId> {
        let unit = self.table.unit(slot_index);
        let group = unit.slot_indices();
        let is_device = |slot_index: &SlotIndex| {
            self.table.chunks[*slot_index].on_device.as_ref().is_some_and(|on_device| on_device.waits_for().is_some())
        };
        let is_stalled = group.iter().any(is_device) || self.stalls.of(group[0]).is_some();
        if is_stalled { Vec::new() } else { self.missing(slot_index) }
    }

    fn round_text(&self, chunk: &Chunk, awaited: &str) -> String {
        let (name, number, round) = (self.table.held(chunk.id).name(), chunk.id.chunk, chunk.version.0 + 1);
        format!("parameter \"{name}\" chunk {number}: round {round} waits for {awaited}")
    }

    /// Names the chunk's round and what it waits for.
    pub(super) fn wait_text(&self, now: Now, trainers: &Presence, slot_index: SlotIndex) -> String {
        self.round_text(&self.table.chunks[slot_index], &self.awaited_text(now, trainers, slot_index))
    }

    /// The trainers that the chunk's round waits for.
    pub(super) fn missing(&self, slot_index: SlotIndex) -> Vec<TrainerId> {
        let chunk = &self.table.chunks[slot_index];
        let clock = |trainer: &TrainerId| chunk.heard(*trainer).clock;
        match self.flows.of(slot_index).pace {
            AccumulatorPace::Rounds => {
                self.awaited(slot_index).filter(|trainer| chunk.round.contribution(*trainer).is_none()).collect()
            }
            AccumulatorPace::Bounded(_) => {
                let slowest = self.active().map(|trainer| clock(&trainer)).min();
                self.active().filter(|trainer| Some(clock(trainer)) == slowest).collect()
            }
            AccumulatorPace::Any => self.table.group(chunk).and_then(|group| group.owner).into_iter().collect(),
        }
    }
}

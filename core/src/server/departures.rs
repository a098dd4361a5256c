//! Departures and returns of trainers: no round waits for a departed trainer, and a push that it left unfinished is
//! withdrawn.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::call::CallId;
use super::chunk::Chunk;
use super::context::{Context, Origin};
use super::group::{GroupIndex, SlotIndex};
use super::presence::TrainerLife;
use super::reply::Refusal;
use super::serving::Serving;
use crate::accumulator::AccumulatorPace;
use crate::ids::{TrainerId, Version};
use crate::wire::Head;

impl Serving {
    /// Marks a trainer as departed: rounds of this run no longer wait for it.
    pub(super) fn leave(&mut self, cx: &mut Context<'_>, head: &Head) -> Result<(), Refusal> {
        self.stalls.note_admitted(head.trainer);
        if !self.participants.depart(head.trainer, head.incarnation) {
            cx.replies.done_whole(cx.peer, head);
            return Ok(());
        }
        self.forget_gathered(cx.origin, head.trainer);
        self.withdraw_unfinished(cx, head.trainer, |_| true);
        // Gradients that waited for the departed trainer may enter now.
        self.run_all(cx, self.table.chunks.slot_indices());
        cx.replies.done_whole(cx.peer, head);
        Ok(())
    }

    /// Whether a frame comes from a newer incarnation of a departed trainer.
    #[inline]
    pub(super) fn is_rejoin(&self, head: &Head) -> bool {
        self.participants.of(head.trainer).left().is_some_and(|left| left < head.incarnation)
    }

    /// Makes a departed trainer active again, at its first push.
    pub(super) fn rejoin(&mut self, origin: Origin, head: &Head) {
        if !self.is_rejoin(head) {
            return;
        }
        let was_awaited = self.is_active(head.trainer);
        self.participants.join(head.trainer);
        self.stalls.note_admitted(head.trainer);
        if was_awaited {
            return;
        }
        // The trainer's clock starts at that of the slowest other trainer, so that none waits for steps never taken.
        for slot_index in self.table.chunks.slot_indices() {
            let chunk = &self.table.chunks[slot_index];
            let others = self.active().filter(|one| *one != head.trainer).map(|one| chunk.heard(one).clock).min();
            if !origin.is_before_restored(chunk) {
                let heard = self.table.chunks[slot_index].heard_mut(head.trainer);
                heard.clock = heard.clock.max(others.unwrap_or(0));
            }
        }
    }

    /// Withdraws a trainer's partial pushes to groups of chunks, of those calls that it will not finish.
    fn withdraw_unfinished(&mut self, cx: &mut Context<'_>, trainer: TrainerId, is_over: impl Fn(CallId) -> bool) {
        for group in (0..self.table.groups.len()).map(GroupIndex::new) {
            for call in self.unfinished_pushes(group, trainer) {
                if is_over(call) {
                    self.withdraw_push(cx, group, trainer, call);
                }
            }
        }
    }

    /// The calls of a trainer that have a gradient in some chunks of a group and none in others. The trainer's earlier
    /// call may be under way to a device in all of them.
    fn unfinished_pushes(&self, group: GroupIndex, trainer: TrainerId) -> BTreeSet<CallId> {
        let slot_indices = &self.table.groups[group.place()].chunks;
        if self.flows.of(slot_indices[0]).pace == AccumulatorPace::Rounds {
            return BTreeSet::new();
        }
        let round = |slot_index: &SlotIndex| &self.table.chunks[*slot_index].round;
        let mut calls: BTreeSet<CallId> = slot_indices.iter().flat_map(|one| round(one).calls(trainer)).collect();
        calls.retain(|call| slot_indices.iter().any(|one| !round(one).calls(trainer).any(|other| other == *call)));
        calls
    }

    /// Withdraws a partial push that its trainer will not finish, so that it no longer blocks others. Chunks restored
    /// from a newer checkpoint stay as they are: they record the later state.
    fn withdraw_push(&mut self, cx: &mut Context<'_>, group: GroupIndex, trainer: TrainerId, call: CallId) {
        let slot_indices = Arc::clone(&self.table.groups[group.place()].chunks);
        if cx.is_before_restored(&self.table.chunks[slot_indices[0]]) {
            return;
        }
        for slot_index in slot_indices.iter() {
            let chunk = &mut self.table.chunks[*slot_index];
            // The sender, if connected, gets the requested value after the next gradient of another trainer.
            let version = Version(chunk.version.0 + 1);
            let withdrawn = chunk.round.withdraw(trainer, call);
            if withdrawn.is_some() {
                self.table.groups[group.place()].owner = None;
            }
            match withdrawn.and_then(|one| one.waiter(version, one.since?)) {
                Some(waiter) => self.waits.add(*slot_index, chunk, waiter),
                None => self.waits.note(*slot_index, chunk),
            }
        }
        self.run(cx, slot_indices[0], None);
    }

    /// Drops the partial pushes of a trainer's earlier incarnations: parts of rows, and gradients of some chunks of a
    /// group.
    pub(super) fn forget_earlier_lives(&mut self, cx: &mut Context<'_>, life: TrainerLife) {
        let TrainerLife { trainer, incarnation } = life;
        for bucket in self.table.chunks.iter_mut().filter_map(Chunk::bucket_mut) {
            bucket.forget(trainer, |call| call.incarnation < incarnation);
        }
        self.withdraw_unfinished(cx, trainer, |call| call.incarnation < incarnation);
    }

    /// Drops the partial contributions of a departed trainer.
    fn forget_gathered(&mut self, origin: Origin, trainer: TrainerId) {
        for chunk in self.table.chunks.iter_mut().filter(|chunk| !origin.is_before_restored(chunk)) {
            if let Some(bucket) = chunk.bucket_mut() {
                bucket.forget(trainer, |_| true);
            }
        }
    }
}

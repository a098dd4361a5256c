//! Departures and returns of trainers: no round waits for a departed trainer, and a push that it left unfinished is
//! withdrawn.

use std::sync::Arc;

use super::call::CallId;
use super::chunk::Chunk;
use super::context::{Context, Origin};
use super::group::{GroupIndex, SlotIndex};
use super::presence::TrainerLife;
use super::reply::Refusal;
use super::saved_program::Arrival;
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
        self.tell_programs(cx, Arrival::Leave(head.trainer));
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
    pub(super) fn rejoin(&mut self, cx: &mut Context<'_>, head: &Head) {
        if !self.is_rejoin(head) {
            return;
        }
        let origin = cx.origin;
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
        self.tell_programs(cx, Arrival::Join(head.trainer));
    }

    /// Withdraws a trainer's partial pushes to groups of chunks, of those calls that it will not finish.
    fn withdraw_unfinished(&mut self, cx: &mut Context<'_>, trainer: TrainerId, is_over: impl Fn(CallId) -> bool) {
        for group in (0..self.table.groups.len()).map(GroupIndex::new) {
            if let Some((call, is_behind)) = self.unfinished_push(group, trainer)
                && is_over(call)
            {
                self.withdraw_push(cx, group, trainer, is_behind);
            }
        }
    }

    /// A trainer's partial push to a group of chunks, as long as a chunk of the group lacks it: its call, and whether
    /// it waits behind a whole push of the trainer, which may be under way to a device.
    fn unfinished_push(&self, group: GroupIndex, trainer: TrainerId) -> Option<(CallId, bool)> {
        let slot_indices = &self.table.groups[group.place()].chunks;
        if self.flows.of(slot_indices[0]).pace == AccumulatorPace::Rounds {
            return None;
        }
        let find = |is_behind: bool| {
            let push = |slot_index: &SlotIndex| {
                let round = &self.table.chunks[*slot_index].round;
                let (entered, ahead) = (round.contribution(trainer), round.ahead(trainer));
                if is_behind { ahead.filter(|_| entered.is_some()) } else { entered.or(ahead) }
            };
            let call = slot_indices.iter().find_map(push)?.sending.call;
            slot_indices.iter().any(|slot_index| push(slot_index).is_none()).then_some((call, is_behind))
        };
        find(false).or_else(|| find(true))
    }

    /// Withdraws a partial push that its trainer will not finish, so that it no longer blocks others. Chunks restored
    /// from a newer checkpoint stay as they are: they record the later state.
    fn withdraw_push(&mut self, cx: &mut Context<'_>, group: GroupIndex, trainer: TrainerId, is_behind: bool) {
        let slot_indices = Arc::clone(&self.table.groups[group.place()].chunks);
        if cx.is_before_restored(&self.table.chunks[slot_indices[0]]) {
            return;
        }
        let held = &mut self.table.groups[group.place()];
        held.owner = held.owner.filter(|owner| is_behind || *owner != trainer);
        for slot_index in slot_indices.iter() {
            let chunk = &mut self.table.chunks[*slot_index];
            // The sender, if connected, gets the requested value after the next gradient of another trainer.
            let version = Version(chunk.version.0 + 1);
            match chunk.round.withdraw(trainer, is_behind).and_then(|one| one.waiter(version, one.since?)) {
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

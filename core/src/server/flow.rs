//! The flow of a server: receive, accumulate, publish.
//!
//! A gradient is received into the open round of its chunk, or waits for it. The round accumulates; once it is complete
//! the compiled stage of the parameter makes an update of it, and the update is published to the trainers that wait for
//! it. The modes differ in the pace at which a round receives and completes, and in nothing else.
//!
//! A unit is updated and published at once: the chunks of a parameter whose rule needs the whole gradient, or any other
//! chunk alone.

use super::chunk::as_half;
use super::context::Context;
use super::contribution::Contribution;
use super::group::UpdateUnit;
use super::round::FOLD_AT;
use super::serving::Serving;
use super::totals::ShareStep;
use crate::accumulator::AccumulatorPace;
use crate::ids::TrainerId;

/// The gradient that a unit receives next.
#[derive(Clone, Copy)]
enum NextGradient {
    /// The gradient of the current frame.
    Arrived,
    /// A gradient that waited, in this slot and of this trainer.
    Ahead(usize, TrainerId),
}

impl Serving {
    /// Runs the flow of a chunk's unit, with a new gradient of the chunk if there is one, until nothing is left to do.
    /// A gradient that may not enter its round waits.
    pub(super) fn run(&mut self, cx: &mut Context<'_>, slot_index: usize, arrived: Option<Contribution>) {
        if self.is_before_restored(cx, slot_index) {
            return;
        }
        let unit = self.table.unit(slot_index);
        self.run_unit(cx, &unit, slot_index, arrived);
    }

    fn run_unit(
        &mut self,
        cx: &mut Context<'_>,
        unit: &UpdateUnit,
        slot_index: usize,
        mut arrived: Option<Contribution>,
    ) {
        let slot_indices = unit.slot_indices();
        let pace = self.flows.of(slot_index).pace;
        let is_stalled = loop {
            self.receive(cx, slot_indices, slot_index, &mut arrived);
            match self.publish_share(cx, unit) {
                ShareStep::Nothing => {}
                // An early total may enter now.
                ShareStep::Published => continue,
                ShareStep::Stalled => break true,
            }
            if !slot_indices.iter().all(|slot_index| self.may_update(pace, *slot_index)) {
                break false;
            }
            // The trainers of this update have fetched the value of the last one, whose memory this one may need.
            slot_indices.iter().for_each(|slot_index| self.table.chunks[*slot_index].of_step = None);
            if !self.update(cx, unit) {
                break true;
            }
            self.note_updated(slot_indices[0]);
            slot_indices.iter().for_each(|slot_index| self.publish(cx, *slot_index));
        };
        if let Some(early) = arrived {
            self.table.chunks[slot_index].round.add_ahead(early);
        }
        // Every other complete round is closed.
        if is_stalled || slot_indices.iter().any(|slot_index| self.table.chunks[*slot_index].on_device.is_some()) {
            self.seal(pace, slot_indices);
        }
        slot_indices.iter().for_each(|slot_index| self.note_waits(*slot_index));
    }

    /// Adds every gradient that may enter now to its round: in rounds the new one if it may, else the first waiting one
    /// by chunk and trainer; in other modes the earliest by arrival.
    #[inline]
    fn receive(&mut self, cx: &mut Context<'_>, unit: &[usize], slot_index: usize, arrived: &mut Option<Contribution>) {
        while let Some(next) = self.next_gradient(unit, slot_index, arrived.as_ref()) {
            let (slot_index, gradient) = match next {
                NextGradient::Arrived => (slot_index, arrived.take()),
                NextGradient::Ahead(slot_index, trainer) => {
                    (slot_index, self.table.chunks[slot_index].round.take_ahead(trainer))
                }
            };
            self.enter(cx, slot_index, gradient.expect("the gradient was just looked at"));
            self.fold_early(cx, slot_index);
        }
    }

    #[inline]
    fn next_gradient(&self, unit: &[usize], slot_index: usize, arrived: Option<&Contribution>) -> Option<NextGradient> {
        let pace = self.flows.of(slot_index).pace;
        let arrived = || arrived.filter(|one| self.may_enter(pace, slot_index, one)).map(|_| NextGradient::Arrived);
        if let [lone] = unit
            && self.table.chunks[*lone].round.all_ahead().is_empty()
        {
            // The common case: no other candidate.
            return arrived();
        }
        let mut waiting = unit.iter().flat_map(|slot_index| {
            let ahead = self.table.chunks[*slot_index].round.all_ahead().iter();
            ahead.filter(|one| self.may_enter(pace, *slot_index, one)).map(|one| (*slot_index, one))
        });
        let ahead = |(slot_index, one): (usize, &Contribution)| NextGradient::Ahead(slot_index, one.trainer);
        match pace {
            AccumulatorPace::Rounds => arrived().or_else(|| waiting.next().map(ahead)),
            // The new gradient is the latest.
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => {
                waiting.min_by_key(|(_, one)| one.sending.arrival).map(ahead).or_else(arrived)
            }
        }
    }

    /// Whether a contribution may enter the open round of its chunk.
    #[inline]
    fn may_enter(&self, pace: AccumulatorPace, slot_index: usize, one: &Contribution) -> bool {
        let chunk = &self.table.chunks[slot_index];
        if pace == AccumulatorPace::Rounds {
            let has_piece = chunk.round.contribution(one.trainer).is_some();
            return one.round.0 == chunk.version.0 + 1 && pace.admits(has_piece, 0, || 0);
        }
        let clock = |trainer| chunk.heard(trainer).clock;
        // With no active trainers, staleness is unbounded.
        let fewest = || self.active().map(clock).min().unwrap_or(u64::MAX);
        if !pace.admits(false, clock(one.trainer), fewest) {
            return false;
        }
        let owner = self.table.group(chunk).and_then(|group| group.owner);
        chunk.round.is_empty() && owner.is_none_or(|owner| owner == one.trainer)
    }

    #[inline]
    pub(super) fn enter(&mut self, cx: &mut Context<'_>, slot_index: usize, contribution: Contribution) {
        let chunk = &mut self.table.chunks[slot_index];
        if let Some(group) = chunk.group
            && self.flows.of(slot_index).pace != AccumulatorPace::Rounds
        {
            self.table.groups[group.place()].owner = Some(contribution.trainer);
        }
        let entry = chunk.open_entry();
        cx.acknowledge(chunk.round.add(contribution), entry);
    }

    /// Whether the open round of a chunk is complete.
    #[inline]
    pub(super) fn is_complete(&self, pace: AccumulatorPace, slot_index: usize) -> bool {
        let chunk = &self.table.chunks[slot_index];
        let round = &chunk.round;
        match pace {
            // Early contributions enter first, those of departed trainers too.
            AccumulatorPace::Rounds if round.all_ahead().iter().any(|one| one.round.0 == chunk.version.0 + 1) => false,
            AccumulatorPace::Rounds if 0 < chunk.sealed => !round.is_empty(),
            AccumulatorPace::Rounds => round.is_complete(self.awaited(slot_index)),
            AccumulatorPace::Any | AccumulatorPace::Bounded(_) => !round.is_empty(),
        }
    }

    /// Whether every awaited trainer has sent a gradient for the round after the open one.
    pub(super) fn is_next_complete(&self, slot_index: usize) -> bool {
        let round = &self.table.chunks[slot_index].round;
        !round.all_ahead().is_empty() && self.awaited(slot_index).all(|trainer| round.ahead(trainer).is_some())
    }

    /// Sums the first contributions of an incomplete round early.
    #[inline]
    fn fold_early(&mut self, cx: &mut Context<'_>, slot_index: usize) {
        let chunk = &self.table.chunks[slot_index];
        if chunk.round.contributors() < FOLD_AT || chunk.group.is_some() {
            return;
        }
        if !self.is_complete(self.flows.of(slot_index).pace, slot_index) {
            self.fold(cx, slot_index);
        }
    }

    fn fold(&mut self, cx: &mut Context<'_>, slot_index: usize) {
        // A departed trainer may rejoin while the round is open, and keeps its position in the summation order.
        let everybody = (0..self.job.trainers).map(TrainerId);
        let chunk = &mut self.table.chunks[slot_index];
        // A device sums all gradients in one pass.
        if chunk.bucket().is_some() || chunk.on_device.is_some() {
            return;
        }
        chunk.round.fold(cx.kernels, cx.pool, chunk.element_type, chunk.bytes, everybody);
    }

    /// Closes the round of an updated chunk: records the contributions and sends the value to the trainers that asked
    /// for it.
    fn publish(&mut self, cx: &mut Context<'_>, slot_index: usize) {
        let halves = self.halves_of_round(cx, slot_index);
        let chunk = &mut self.table.chunks[slot_index];
        let (entry, version) = (chunk.value_entry(None), chunk.version);
        let arrivals = chunk.round.contributions().iter().map(|one| (one.trainer, one.sending.nanos));
        cx.counters.updated(version, cx.nanos, arrivals);
        let mut starved = Vec::new();
        chunk.close_round(&halves, |one, since, value| match value {
            Some(value) => cx.replies.value(one.sending.peer, &one.sending.head, as_half(entry, one.half), value),
            None => starved.extend(one.waiter(version, since)),
        });
        starved.into_iter().for_each(|waiter| self.wait_for_memory(slot_index, waiter));
        self.answer_waiters(cx, slot_index);
        let chunk = &self.table.chunks[slot_index];
        if chunk.on_device.is_some() || chunk.deferred_set.is_some() {
            self.after_update(cx, slot_index);
        }
    }
}

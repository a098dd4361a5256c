//! The flow of a server: receive, accumulate, decide, publish.
//!
//! A gradient is received into the open round of its chunk, or waits for it. The round accumulates; once it is complete
//! it is decided: its record goes to the journal, and no later message changes it. The compiled stage of the parameter
//! then makes an update of it, as soon as memory and devices allow, and the update is published to the trainers that
//! wait for it. The modes differ in the pace at which a round receives and completes, and in nothing else.
//!
//! A unit has a queue of steps: the rounds that are decided, at most two (where a gradient is a round of its own, all
//! that have arrived), the share of a total behind the first, and a set of each chunk behind those that were decided
//! when it came. Deciding takes no time; the steps are made one after the other as soon as their record is written and
//! memory, device and rows allow. A unit that lacks something other than the device of its own chunk, or its total,
//! stands in [`stalls`](super::stalls) with the reason. In rounds a later frame finds the unit as if all steps were
//! made; where the next admission depends on the outcome of a step, it is refused until then.
//!
//! A unit is updated and published at once: the chunks of a parameter whose rule needs the whole gradient, or any other
//! chunk alone.

use super::chunk::as_half;
use super::context::Context;
use super::contribution::{Contribution, PushHeader};
use super::decided::DecidedRound;
use super::group::{SlotIndex, SlotIndices, UpdateUnit};
use super::round::FOLD_AT;
use super::serving::Serving;
use super::stalls::StallReason;
use super::totals::ShareStep;
use crate::accumulator::AccumulatorPace;
use crate::ids::TrainerId;
use crate::wire::{Entry, Flags};

/// The gradient that a unit receives next.
#[derive(Clone, Copy)]
enum NextGradient {
    /// The gradient of the current frame.
    Arrived,
    /// A gradient that waited, in this slot and of this trainer.
    Ahead(SlotIndex, TrainerId),
}

/// The outcome of a look at a unit.
enum UnitStep {
    /// A round is closed, a share published, or a set applied.
    Advanced,
    /// Its decided round waits for memory, time, a device or its record.
    Stalled,
    /// Its open round is not complete.
    Open,
}

impl Serving {
    /// Takes a new gradient of a chunk if there is one, and advances the chunk's unit until nothing is left to do.
    pub(super) fn run(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, arrived: Option<Contribution>) {
        if cx.is_before_restored(&self.table.chunks[slot_index]) {
            return;
        }
        self.take_in(cx, slot_index, arrived);
        self.advance(cx, &mut SlotIndices::from_slice(&[slot_index]));
    }

    /// As [`run`](Self::run), of several chunks without new gradients.
    pub(super) fn run_all(&mut self, cx: &mut Context<'_>, slot_indices: impl Iterator<Item = SlotIndex>) {
        let mut slot_indices: SlotIndices = slot_indices.collect();
        slot_indices.retain(|slot_index| !cx.is_before_restored(&self.table.chunks[*slot_index]));
        slot_indices.iter().for_each(|slot_index| self.take_in(cx, *slot_index, None));
        self.advance(cx, &mut slot_indices);
    }

    /// Adds to their rounds a new gradient, if there is one, and those that waited and may enter. A gradient that may
    /// not enter its round waits.
    pub(super) fn take_in(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, mut arrived: Option<Contribution>) {
        let unit = self.table.unit(slot_index);
        self.receive(cx, unit.slot_indices(), slot_index, &mut arrived);
        if let Some(early) = arrived {
            self.table.chunks[slot_index].round.add_ahead(early);
        }
    }

    /// Advances the chunks that have a new gradient of the frame.
    pub(super) fn advance_received(&mut self, cx: &mut Context<'_>) {
        let mut received = std::mem::take(&mut self.pushes.received);
        self.advance(cx, &mut received);
        self.pushes.received = received;
    }

    /// Decides the complete rounds of these chunks' units, updates and publishes what may be, and goes on until nothing
    /// is left to do. Rounds that are complete together have one record.
    pub(super) fn advance(&mut self, cx: &mut Context<'_>, slot_indices: &mut SlotIndices) {
        while !slot_indices.is_empty() {
            let mut decided = Vec::new();
            for slot_index in slot_indices.iter() {
                self.decide(cx, *slot_index, false, &mut decided);
            }
            self.record(cx, decided);
            slot_indices.retain(|slot_index| self.advance_unit(cx, *slot_index));
            if !self.programs.is_empty() {
                slot_indices.extend(self.take_awakened(cx));
            }
        }
    }

    /// Makes one step of a chunk's unit; true where another one may follow.
    fn advance_unit(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex) -> bool {
        let unit = self.table.unit(slot_index);
        let slot_indices = unit.slot_indices();
        let step = self.step_unit(cx, &unit);
        if matches!(step, UnitStep::Advanced) {
            self.step_aside(cx, slot_indices);
            // An early gradient, or an early total, may enter now.
            self.receive(cx, slot_indices, slot_index, &mut None);
            return true;
        }
        let is_stalled = matches!(step, UnitStep::Stalled);
        if is_stalled || slot_indices.iter().any(|slot_index| self.table.chunks[*slot_index].on_device.is_some()) {
            self.note_awaited(self.flows.of(slot_index).pace, slot_indices);
            // Now that the open round's update does not need the memory that merging takes.
            let mut decided = Vec::new();
            self.decide(cx, slot_index, true, &mut decided);
            self.record(cx, decided);
        }
        slot_indices.iter().for_each(|slot_index| self.waits.note(*slot_index, &mut self.table.chunks[*slot_index]));
        false
    }

    /// The step that comes next: a set, a share or an update, each behind those that were decided before it.
    fn step_unit(&mut self, cx: &mut Context<'_>, unit: &UpdateUnit) -> UnitStep {
        let slot_indices = unit.slot_indices();
        if self.step_aside(cx, slot_indices) {
            return UnitStep::Advanced;
        }
        if slot_indices.iter().any(|slot_index| self.lacks_record(cx, *slot_index)) {
            self.await_record(cx, slot_indices);
            return UnitStep::Stalled;
        }
        if let Some(host) = self.programs.of(slot_indices[0]) {
            // An input is closed when it is delivered, and goes on then.
            self.run_program(cx, host);
            return UnitStep::Open;
        }
        match self.publish_share(cx, unit) {
            ShareStep::Nothing => {}
            ShareStep::Published => return UnitStep::Advanced,
            ShareStep::Stalled => return UnitStep::Stalled,
        }
        let pace = self.flows.of(slot_indices[0]).pace;
        if !slot_indices.iter().all(|slot_index| self.may_update(pace, *slot_index)) {
            return UnitStep::Open;
        }
        // The trainers of this update have fetched the value of the last one, whose memory this one may need.
        slot_indices.iter().for_each(|slot_index| self.table.chunks[*slot_index].of_step = None);
        if !self.update(cx, unit) {
            return UnitStep::Stalled;
        }
        self.stalls.note_updated(slot_indices[0]);
        slot_indices.iter().for_each(|slot_index| self.publish(cx, *slot_index));
        UnitStep::Advanced
    }

    /// Notes why a unit lacks its record, unless it is known: gradients that are still to be merged, or the disk.
    fn await_record(&mut self, cx: &Context<'_>, slot_indices: &[SlotIndex]) {
        let first = slot_indices[0];
        let lacks_sum = |slot_index: &SlotIndex| {
            let chunk = &self.table.chunks[*slot_index];
            chunk.is_recorded_whole(false) && !chunk.round.is_merged(false)
        };
        match self.stalls.of(first) {
            Some(_) => {}
            None if slot_indices.iter().any(lacks_sum) => self.stalls.add(first, StallReason::Memory),
            None => self.stalls.await_record(cx.now, first),
        }
    }

    /// Decides the open round of a chunk's unit, or the next one, if it is complete, as if updates took no time: of a
    /// group with a total first that of its gradients, and then that of the total. Appends what is to be recorded. A
    /// replay decides nothing.
    fn decide(&mut self, cx: &Context<'_>, slot_index: SlotIndex, is_next: bool, decided: &mut Vec<DecidedRound>) {
        if self.flows.of(slot_index).pace != AccumulatorPace::Rounds || cx.origin.is_replay() {
            return;
        }
        let unit = self.table.unit(slot_index);
        let (gradients, total) = self.split_total(&unit);
        // A round is decided behind the one before it, and its record follows that one's.
        let is_behind = |slot_index: &SlotIndex| {
            self.lacks_record(cx, *slot_index) || is_next && !self.table.chunks[*slot_index].has_decided(false)
        };
        if unit.slot_indices().iter().any(is_behind) {
            return;
        }
        for part in [gradients, total.as_slice()] {
            if part.first().is_none_or(|first| self.table.chunks[*first].has_decided(is_next)) {
                continue;
            }
            if !part.iter().all(|slot_index| self.is_round_complete(*slot_index, is_next)) {
                return;
            }
            self.set_decided(cx, part, is_next, decided);
        }
    }

    fn set_decided(
        &mut self,
        cx: &Context<'_>,
        slot_indices: &[SlotIndex],
        is_next: bool,
        decided: &mut Vec<DecidedRound>,
    ) {
        for slot_index in slot_indices {
            let chunk = &mut self.table.chunks[*slot_index];
            chunk.decided += 1;
            chunk.round.drop_void(is_next);
        }
        if !cx.keeps_journal() {
            slot_indices.iter().for_each(|slot_index| self.programs.note_arrival(*slot_index));
        } else {
            decided.extend(slot_indices.iter().map(|slot_index| DecidedRound { slot_index: *slot_index, is_next }));
        }
    }

    /// The chunks of a unit that gradients are sent to, and that of its total.
    fn split_total<'a>(&self, unit: &'a UpdateUnit) -> (&'a [SlotIndex], Option<SlotIndex>) {
        let slot_indices = unit.slot_indices();
        match unit {
            UpdateUnit::Group(group, _) if self.table.groups[group.place()].total.is_some() => {
                let (total, gradients) = slot_indices.split_last().expect("a group has chunks");
                (gradients, Some(*total))
            }
            _ => (slot_indices, None),
        }
    }

    /// Whether a chunk's open round is decided, and its record still to be written.
    #[inline]
    fn lacks_record(&self, cx: &Context<'_>, slot_index: SlotIndex) -> bool {
        cx.keeps_journal() && self.table.chunks[slot_index].lacks_record(false)
    }

    /// Writes the records of these chunks' decided rounds that the disk did not take.
    pub(super) fn record_missing(&mut self, cx: &mut Context<'_>, slot_indices: &[SlotIndex]) {
        if cx.keeps_journal() {
            let missing = slot_indices.iter().flat_map(|slot_index| self.unrecorded(*slot_index)).collect();
            self.record(cx, missing);
        }
    }

    /// The decided rounds of a chunk's unit that have no record.
    pub(super) fn unrecorded(&self, slot_index: SlotIndex) -> Vec<DecidedRound> {
        let unit = self.table.unit(slot_index);
        let of_unit = |is_next: bool| {
            let all =
                unit.slot_indices().iter().map(move |slot_index| DecidedRound { slot_index: *slot_index, is_next });
            all.filter(move |one| self.table.chunks[one.slot_index].lacks_record(is_next))
        };
        of_unit(false).chain(of_unit(true)).collect()
    }

    /// Writes the records of decided rounds. Those of which the disk takes none are stalled, and retried.
    fn record(&mut self, cx: &mut Context<'_>, mut decided: Vec<DecidedRound>) {
        self.merge_decided(cx, &mut decided);
        let journal = &mut *cx.journal;
        let (recorded, refused) =
            self.table.append_rounds(&decided, |frame, payloads| journal.append(frame, payloads.iter().copied()));
        decided[..recorded].iter().for_each(|one| self.note_recorded(cx, *one));
        if let Some(refusal) = refused {
            tracing::warn!("decided rounds wait for their record: {}", refusal.text);
            for one in &decided[recorded..] {
                self.stalls.await_record(cx.now, self.table.first_of_unit(one.slot_index));
            }
        }
    }

    /// Merges the gradients of decided rounds whose records have the sum. Units without a lease are stalled.
    fn merge_decided(&mut self, cx: &mut Context<'_>, decided: &mut Vec<DecidedRound>) {
        let mut short = Vec::new();
        for DecidedRound { slot_index, is_next } in decided.iter().copied() {
            let chunk = &mut self.table.chunks[slot_index];
            let tensor = (chunk.element_type, chunk.bytes);
            if chunk.is_recorded_whole(is_next) && chunk.round.merge(is_next, cx.kernels, cx.pool, tensor).is_err() {
                short.push(self.table.first_of_unit(slot_index));
            }
        }
        for first in short {
            self.stalls.add(first, StallReason::Memory);
            decided.retain(|one| self.table.first_of_unit(one.slot_index) != first);
        }
    }

    /// Notes a round's record, and answers the pushes that have waited for it and not for the value.
    fn note_recorded(&mut self, cx: &mut Context<'_>, one: DecidedRound) {
        let DecidedRound { slot_index, is_next } = one;
        let chunk = &mut self.table.chunks[slot_index];
        let entry = chunk.open_entry();
        chunk.round.set_recorded(is_next, |one| {
            let PushHeader { peer, head, .. } = &*one.sending;
            if !is_next && !head.flags.contains(Flags::WANT_VALUE) && one.since.take().is_some() {
                cx.replies.done(*peer, head, entry);
            }
        });
        self.programs.note_arrival(slot_index);
    }

    /// Adds every gradient that may enter now to its round: in rounds the new one if it may, else the first waiting one
    /// by chunk and trainer; in other modes the earliest by arrival.
    #[inline]
    fn receive(
        &mut self,
        cx: &mut Context<'_>,
        unit: &[SlotIndex],
        slot_index: SlotIndex,
        arrived: &mut Option<Contribution>,
    ) {
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
    fn next_gradient(
        &self,
        unit: &[SlotIndex],
        slot_index: SlotIndex,
        arrived: Option<&Contribution>,
    ) -> Option<NextGradient> {
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
        let ahead = |(slot_index, one): (SlotIndex, &Contribution)| NextGradient::Ahead(slot_index, one.trainer);
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
    fn may_enter(&self, pace: AccumulatorPace, slot_index: SlotIndex, one: &Contribution) -> bool {
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
    pub(super) fn enter(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, contribution: Contribution) {
        let chunk = &mut self.table.chunks[slot_index];
        if let Some(group) = chunk.group
            && self.flows.of(slot_index).pace != AccumulatorPace::Rounds
        {
            self.table.groups[group.place()].owner = Some(contribution.trainer);
        }
        let entry = chunk.open_entry();
        cx.acknowledge(chunk.round.add(contribution), entry);
    }

    /// Sums the first contributions of an incomplete round early.
    #[inline]
    fn fold_early(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex) {
        let chunk = &self.table.chunks[slot_index];
        if chunk.round.contributors() < FOLD_AT || chunk.group.is_some() {
            return;
        }
        let is_open = self.flows.of(slot_index).pace == AccumulatorPace::Rounds && chunk.decided == 0;
        if is_open && !self.is_round_complete(slot_index, false) {
            self.fold(cx, slot_index);
        }
    }

    fn fold(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex) {
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
    pub(super) fn publish(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex) {
        let halves = self.halves_of_round(cx, slot_index);
        let chunk = &mut self.table.chunks[slot_index];
        let (entry, version) = (chunk.value_entry(None), chunk.version);
        let arrivals = chunk.round.contributions().iter().map(|one| (one.trainer, one.sending.nanos));
        cx.counters.updated(version, cx.nanos, arrivals);
        let mut starved = Vec::new();
        chunk.close_round(&halves, |one, since, value| match value {
            _ if !one.sending.head.flags.contains(Flags::WANT_VALUE) => {
                cx.replies.done(one.sending.peer, &one.sending.head, Entry { bytes: 0, ..entry });
            }
            Some(value) => cx.replies.value(one.sending.peer, &one.sending.head, as_half(entry, one.half), value),
            None => starved.extend(one.waiter(version, since)),
        });
        starved.into_iter().for_each(|waiter| self.wait_for_memory(slot_index, waiter));
        self.answer_waiters(cx, slot_index);
    }
}

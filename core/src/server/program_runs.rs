//! Runs of hosted programs: what has arrived is delivered, and what a run gives is published.
//!
//! Not here: what a program has not taken in ([`programs`](super::programs)).

use std::sync::Arc;

use super::context::Context;
use super::contribution::Contribution;
use super::group::{SlotIndex, SlotIndices};
use super::reply::Refusal;
use super::saved_program::Arrival;
use super::serving::Serving;
use super::stalls::StallReason;

impl Serving {
    /// Runs new programs for the first time, and publishes what they send before the first input.
    pub(super) fn begin_programs(&mut self, cx: &mut Context<'_>) {
        for number in 0..self.programs.all.len() {
            let program = &mut self.programs.all[number];
            let index = self.table.chunks[program.slot].id.parameter;
            if self.table.programs.remove(&index).is_none()
                && let Err(failure) = program.program.run_until_waiting()
            {
                program.stop_for(&failure);
            }
            self.run_program(cx, number);
        }
    }

    /// A trainer leaves every program, or joins every one again.
    pub(super) fn tell_programs(&mut self, cx: &mut Context<'_>, arrival: Arrival) {
        for number in 0..self.programs.all.len() {
            let program = &mut self.programs.all[number];
            if cx.is_before_restored(&self.table.chunks[program.slot]) {
                continue;
            }
            program.arrivals.push_back(arrival);
            self.run_program(cx, number);
        }
    }

    /// Delivers what has arrived to a program as far as it has room, in order, and publishes what each run gives.
    pub(super) fn run_program(&mut self, cx: &mut Context<'_>, number: usize) {
        while self.publish_program(cx, number) && self.take_arrival(cx, number) {
            let program = &mut self.programs.all[number];
            if let Err(failure) = program.program.run_until_waiting() {
                program.stop_for(&failure);
            }
        }
        if self.programs.all[number].failed.is_some() {
            self.refuse_waiters(cx, number);
        }
    }

    /// Publishes the values that a program has made; false while one lacks memory, or the program has stopped.
    fn publish_program(&mut self, cx: &mut Context<'_>, number: usize) -> bool {
        loop {
            let program = &mut self.programs.all[number];
            if program.failed.is_some() {
                return false;
            }
            let Some((end, value)) = program.program.unpublished() else {
                self.stalls.note_updated(program.slot);
                return true;
            };
            let slots = Arc::clone(&program.slots[end]);
            let chunks = &mut self.table.chunks;
            if slots.iter().any(|slot_index| chunks[*slot_index].make_writable(cx.pool).is_err()) {
                self.stalls.add(program.slot, StallReason::Memory);
                return false;
            }
            let mut rest = value;
            for slot_index in slots.iter() {
                let (piece, after) = rest.split_at(chunks[*slot_index].bytes as usize);
                chunks[*slot_index].install(piece);
                rest = after;
            }
            program.program.note_published();
            for slot_index in slots.iter() {
                self.answer_waiters(cx, *slot_index);
                self.waits.note(*slot_index, &mut self.table.chunks[*slot_index]);
            }
        }
    }

    /// Delivers the first arrival that a program has room for; false if there is none.
    fn take_arrival(&mut self, cx: &mut Context<'_>, number: usize) -> bool {
        let mut at = 0;
        while at < self.programs.all[number].arrivals.len() {
            let program = &mut self.programs.all[number];
            if !program.may_overtake(at) {
                at += 1;
                continue;
            }
            let end = match program.arrivals[at] {
                Arrival::Item(end) => end,
                arrival => {
                    program.take_membership(at, arrival);
                    return true;
                }
            };
            let slots = Arc::clone(&program.slots[end]);
            if slots.iter().any(|slot_index| self.table.chunks[*slot_index].decided == 0) {
                // A checkpoint carries the item over, behind this record.
                return false;
            }
            let item = self.table.chunks.item(&slots);
            match program.program.deliver(end, &item) {
                Ok(false) => at += 1,
                Ok(true) => {
                    program.arrivals.remove(at);
                    self.close_input(cx, &slots);
                    return true;
                }
                Err(failure) => {
                    program.stop_for(&failure);
                    return false;
                }
            }
        }
        false
    }

    /// Closes the round of a delivered input.
    fn close_input(&mut self, cx: &mut Context<'_>, slots: &[SlotIndex]) {
        for slot_index in slots {
            self.table.chunks[*slot_index].version.0 += 1;
            self.publish(cx, *slot_index);
            self.waits.note(*slot_index, &mut self.table.chunks[*slot_index]);
        }
        self.programs.awakened.push(slots[0]);
    }

    /// The inputs of which a next item may enter now, one chunk of each.
    pub(super) fn take_awakened(&mut self, cx: &mut Context<'_>) -> SlotIndices {
        let awakened = std::mem::take(&mut self.programs.awakened);
        awakened.iter().for_each(|slot_index| self.take_in(cx, *slot_index, None));
        awakened
    }

    /// Ends the waits of calls for a program that has stopped: for its values, and for room for their items.
    fn refuse_waiters(&mut self, cx: &mut Context<'_>, number: usize) {
        let program = &self.programs.all[number];
        let refusal = Refusal::invalid(program.failed.as_deref().unwrap_or_default());
        let slots: SlotIndices = program.slots.iter().flat_map(|slots| slots.iter().copied()).collect();
        for slot_index in slots {
            let sender = self.table.held(self.table.chunks[slot_index].id).declaration.sender;
            let chunk = &mut self.table.chunks[slot_index];
            let ended = chunk.waiters.take_beyond(chunk.version, usize::MAX);
            self.waits.note_taken(&ended);
            let ahead = sender.and_then(|sender| chunk.round.take_ahead(sender)).filter(|one| one.since.is_some());
            self.waits.note(slot_index, chunk);
            for waiter in ended {
                cx.replies.error(waiter.peer, &waiter.head, &refusal);
            }
            if let Some(Contribution { sending, .. }) = ahead
                && let Some(peer) = sending.peer
            {
                cx.replies.error(peer, &sending.head, &refusal);
            }
        }
    }
}

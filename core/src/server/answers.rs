//! Answers to all requests that wait for a version: with rows, with the value in the wanted type, or without a payload.

use std::collections::BTreeSet;

use super::context::Context;
use super::group::SlotIndex;
use super::serving::Serving;
use super::waiters::Waiter;
use crate::wire::{Flags, Kind};

impl Serving {
    pub(super) fn answer_or_wait(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, waiter: Waiter) {
        if waiter.version <= self.table.chunks[slot_index].version {
            self.answer(cx, slot_index, waiter);
            return;
        }
        self.waits.add(slot_index, &mut self.table.chunks[slot_index], waiter);
    }

    pub(super) fn answer_waiters(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex) {
        let chunk = &self.table.chunks[slot_index];
        let version = chunk.version;
        if chunk.waiters.is_empty() {
            return;
        }
        let due = self.table.chunks[slot_index].waiters.take_due(version);
        self.waits.note_taken(&due);
        for waiter in due {
            self.answer(cx, slot_index, waiter);
        }
    }

    /// Answers a due request: with rows, with the value, or with an acknowledgement for a push that wants none.
    pub(super) fn answer(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, waiter: Waiter) {
        let wants_value = waiter.head.kind != Kind::Push || waiter.head.flags.contains(Flags::WANT_VALUE);
        match &waiter.wish {
            Some(_) => self.answer_rows(cx, slot_index, waiter, None),
            None if wants_value => self.send_value(cx, slot_index, waiter),
            None => cx.replies.done(waiter.peer, &waiter.head, self.table.chunks[slot_index].version_entry()),
        }
    }

    /// Retries answers that lacked a lease; true when any was sent.
    pub(super) fn answer_starved(&mut self, cx: &mut Context<'_>) -> bool {
        let starved: BTreeSet<SlotIndex> = std::mem::take(&mut self.stalls.answers);
        for slot_index in &starved {
            self.answer_waiters(cx, *slot_index);
            self.waits.note(*slot_index, &mut self.table.chunks[*slot_index]);
        }
        starved.iter().any(|slot_index| !self.stalls.answers.contains(slot_index))
    }
}

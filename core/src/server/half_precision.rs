//! Answers in half precision: float32 values for trainers, each element rounded once, half the bytes.
//!
//! A copy is made at the first request and kept in [`half_values`](super::half_values).
//!
//! An answer without a lease waits like a request for a version. While an update waits for memory no copy is made:
//! returned leases go to the update first.
//!
//! The budget holds one version per trainer. A trainer that reads a value in all three types, or pulls again before
//! releasing views, holds more; updates and half-precision answers then wait for it, up to their deadline.

use std::sync::Arc;

use super::context::Context;
use super::group::SlotIndex;
use super::half_values::RoundHalves;
use super::reply::Refusal;
use super::serving::Serving;
use super::stalls::StallReason;
use super::waiters::Waiter;
use crate::dtype::Half;
use crate::memory::Value;
use crate::wire::{Entry, Flags, Kind};

impl Serving {
    /// Refuses half precision for sparse parameters and types other than float32.
    #[inline]
    pub(super) fn check_half(&self, slot_index: SlotIndex, entry: &Entry) -> Result<(), Refusal> {
        match entry.half {
            None => Ok(()),
            Some(half) => self.check_has_halves(slot_index, half),
        }
    }

    #[cold]
    fn check_has_halves(&self, slot_index: SlotIndex, half: Half) -> Result<(), Refusal> {
        let chunk = &self.table.chunks[slot_index];
        let name = self.table.held(chunk.id).name();
        let element_type = chunk.element_type;
        if chunk.bucket().is_some() {
            return Err(Refusal::invalid(format!(
                "parameter \"{name}\" is sparse: its rows were asked for as {half}, expected {element_type}"
            )));
        }
        if element_type.has_halves() {
            return Ok(());
        }
        Err(Refusal::invalid(format!(
            "parameter \"{name}\": its value was asked for as {half}, expected {element_type}; only values of float32 \
             convert to half precision"
        )))
    }

    /// The value in the requested type. A missing copy is made and kept.
    fn value_as(&self, cx: &mut Context<'_>, slot_index: SlotIndex, half: Option<Half>) -> Option<Arc<Value>> {
        let chunk = &self.table.chunks[slot_index];
        let Some(half) = half else { return Some(chunk.value()) };
        if let Some(made) = cx.pool.halves.get(chunk.id, half) {
            return Some(made);
        }
        let made = self.narrowed(cx, half, chunk.value_bytes())?;
        cx.pool.halves.keep(chunk.id, half, &made);
        Some(made)
    }

    /// A copy of a value in half precision, if there is a lease that no update waits for.
    fn narrowed(&self, cx: &mut Context<'_>, half: Half, value: &[u8]) -> Option<Arc<Value>> {
        if self.stalls.has(StallReason::Memory) {
            return None;
        }
        let bytes = u32::try_from(value.len() / 2).expect("a chunk's bytes are counted in 32 bits");
        let mut made = Value::new(cx.pool.take(bytes).ok()?, bytes);
        cx.kernels.narrow_to_half(half, value, made.bytes_mut());
        Some(Arc::new(made))
    }

    /// The copies that a round's answers need, as far as they can be made.
    pub(super) fn halves_of_round(&self, cx: &mut Context<'_>, slot_index: SlotIndex) -> RoundHalves {
        let waiting = self.table.chunks[slot_index].round.contributions().iter().filter(|one| one.since.is_some());
        let mut made = RoundHalves::default();
        for half in waiting.filter_map(|one| one.half) {
            if made.get(half).is_none() {
                made.put(half, self.value_as(cx, slot_index, Some(half)));
            }
        }
        made
    }

    /// Sends the value in the requested type, or queues the answer until a lease is free.
    pub(super) fn send_value(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, waiter: Waiter) {
        let is_of_step = waiter.head.kind == Kind::Push || waiter.head.flags.contains(Flags::OF_STEP);
        let replaced = self.table.chunks[slot_index].of_step.as_ref().filter(|_| is_of_step);
        let value = match (replaced, waiter.half) {
            (None, half) => self.value_as(cx, slot_index, half),
            (Some(replaced), None) => Some(Arc::clone(replaced)),
            (Some(replaced), Some(half)) => self.narrowed(cx, half, replaced.bytes()),
        };
        match value {
            Some(value) => {
                let entry = self.table.chunks[slot_index].value_entry(waiter.half);
                cx.replies.value(waiter.peer, &waiter.head, entry, value);
            }
            None => self.wait_for_memory(slot_index, waiter),
        }
    }

    /// Queues an answer until a lease is returned.
    pub(super) fn wait_for_memory(&mut self, slot_index: SlotIndex, waiter: Waiter) {
        self.waits.add(slot_index, &mut self.table.chunks[slot_index], waiter);
        self.stalls.answers.insert(slot_index);
    }

    /// Describes an answer that is due and lacks memory.
    pub(super) fn memory_wait_text(&self, slot_index: SlotIndex, waiter: &Waiter) -> Option<String> {
        let chunk = &self.table.chunks[slot_index];
        let half = waiter.half.filter(|_| waiter.version <= chunk.version)?;
        Some(format!(
            "parameter \"{}\" chunk {}: its value as {half} waits for memory that readers hold",
            self.table.held(chunk.id).name(),
            chunk.id.chunk
        ))
    }
}

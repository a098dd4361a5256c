//! Grouped updates: chunks of a parameter whose rule needs the norm of the whole gradient, or reductions such as
//! `norm(w)`, and which therefore update together.
//!
//! ```text
//! sums       of every chunk, and of each its sums of squares
//! norm       of the squares of all chunks, in their order
//! updates    of every chunk, with the numbers that the norm gives
//! values     all in place at once
//! ```
//!
//! On the processor this is one call, and so are reductions: a rule with them stays there. Chunks on a device return
//! once with their sums, for the norm, and once with their values, so the update of such a parameter is called three
//! times; `update` is ready when all chunks have reached the next step. The processor's own chunks of a group are
//! summed with the others and updated last. Leases for all values are taken first, so that a started update can always
//! finish.

use std::sync::Arc;

use crate::accumulator::AccumulatorPace;
use crate::error::Failure;
use crate::memory::Lease;
use crate::optim::{Formula, Step, reduce, square_sums};
use crate::port::{Work, squares_bytes};
use crate::server::chunk::Chunk;
use crate::server::context::Context;
use crate::server::device_chunk::{DeviceActivity, DeviceSum};
use crate::server::group::{GroupIndex, GroupedUpdate, SlotIndex};
use crate::server::serving::Serving;
use crate::server::stalls::StallReason;

impl Serving {
    /// Updates a group whose gradients are complete. False while a device has work in flight, or when a lease is
    /// missing; it is then retried.
    pub(in crate::server) fn apply_group(
        &mut self,
        cx: &mut Context<'_>,
        group: GroupIndex,
        slot_indices: &[SlotIndex],
    ) -> bool {
        let has_seat = slot_indices.iter().any(|slot_index| self.table.chunks[*slot_index].on_device.is_some());
        // Every chunk on a device has reached the same step.
        match &self.table.groups[group.place()].update {
            None if has_seat => {
                self.begin_sums(cx, group, slot_indices);
                false
            }
            Some(grouped_update) if grouped_update.norm.is_none() => {
                self.begin_updates(cx, group, slot_indices) && self.end_updates(cx, group, slot_indices)
            }
            _ => self.end_updates(cx, group, slot_indices),
        }
    }

    /// Starts the sums of every chunk.
    fn begin_sums(&mut self, cx: &mut Context<'_>, group: GroupIndex, slot_indices: &[SlotIndex]) {
        let Ok(mut leases) = self.room_for_values(cx, slot_indices) else {
            self.stalls.add(slot_indices[0], StallReason::Memory);
            return;
        };
        let mut grouped_update = GroupedUpdate { awaited: 0, norm: None, room: Vec::new() };
        for (slot_index, lease) in slot_indices.iter().zip(leases.drain(..)) {
            let chunk = &mut self.table.chunks[*slot_index];
            let Some(on_device) = &mut chunk.on_device else {
                grouped_update.room.push(lease);
                continue;
            };
            on_device.doing = DeviceActivity::Summing;
            let gradients = chunk.round.take_gradients(chunk.element_type, chunk.bytes);
            cx.device().push(Work::Sum { slot: on_device.slot, gradients, squares: lease });
            grouped_update.awaited += 1;
        }
        self.table.groups[group.place()].update = Some(Box::new(grouped_update));
    }

    /// Takes a lease for the next value of every chunk, and folds the gradients of the processor's chunks; all or
    /// nothing.
    fn room_for_values(&mut self, cx: &mut Context<'_>, slot_indices: &[SlotIndex]) -> Result<Vec<Lease>, Failure> {
        let lease = |slot_index: &SlotIndex| {
            let chunk = &mut self.table.chunks[*slot_index];
            if chunk.on_device.is_none() {
                chunk.fold_all(cx)?;
            }
            cx.pool.take(chunk.bytes.max(squares_bytes(chunk.bytes)))
        };
        slot_indices.iter().map(lease).collect()
    }

    /// Starts the updates on the device; true when it has none.
    fn begin_updates(&mut self, cx: &mut Context<'_>, group: GroupIndex, slot_indices: &[SlotIndex]) -> bool {
        let norm = self.norm(slot_indices);
        let mut awaited = 0;
        for slot_index in slot_indices {
            let step = self.step(*slot_index, Some(norm));
            awaited += usize::from(self.table.chunks[*slot_index].begin_update_of_sum(cx, &step));
        }
        let grouped_update = self.table.groups[group.place()].update.as_mut().expect("it has begun");
        (grouped_update.norm, grouped_update.awaited) = (Some(norm), awaited);
        awaited == 0
    }

    /// Updates the processor's chunks and installs every value; false when it is stalled. A bucket is alone in its
    /// group, with its total.
    fn end_updates(&mut self, cx: &mut Context<'_>, group: GroupIndex, slot_indices: &[SlotIndex]) -> bool {
        let held = &mut self.table.groups[group.place()];
        let (slots, grouped_update) = (held.total, held.update.take());
        let parameter_chunks = &slot_indices[..slot_indices.len() - usize::from(slots.is_some())];
        let norm = match grouped_update {
            // The reserved leases are free again, for these values.
            Some(grouped_update) => Some(grouped_update.norm.expect("the updates have begun")),
            None => {
                // All leases are taken before the first update, so that all rounds close or none.
                for slot_index in slot_indices {
                    let chunk = &mut self.table.chunks[*slot_index];
                    if chunk.bucket().is_some() {
                        continue;
                    }
                    let is_total = slots.is_some_and(|slots| slots.total == *slot_index);
                    let made = chunk.make_writable(cx.pool);
                    if made.and_then(|()| if is_total { Ok(()) } else { chunk.fold_all(cx) }).is_err() {
                        self.stalls.add(slot_indices[0], StallReason::Memory);
                        return false;
                    }
                }
                let is_clipped = self.table.chunks[slot_indices[0]].rule.rule().clip_norm.is_some();
                is_clipped.then(|| self.norm(parameter_chunks))
            }
        };
        let total = slots.map(|slots| self.table.chunks[slots.total].total().expect("the total is there"));
        let reduced = self.reduce(cx, parameter_chunks, norm, total);
        for slot_index in parameter_chunks {
            if !self.apply(cx, *slot_index, norm, &reduced) {
                assert!(
                    self.table.chunks[*slot_index].bucket().is_some(),
                    "there is room for every value of the group"
                );
                return false;
            }
        }
        if let (Some(slots), Some(total)) = (slots, total) {
            let installed = self.table.chunks[slots.total].install_number(cx.pool, total);
            installed.expect("the value is writable");
        }
        self.table.groups[group.place()].owner = None;
        true
    }

    /// The values of the rule's reductions over all chunks, which the processor has and whose rounds are folded.
    fn reduce(
        &mut self,
        cx: &mut Context<'_>,
        slot_indices: &[SlotIndex],
        norm: Option<f64>,
        total: Option<f64>,
    ) -> Vec<f64> {
        let rule = Arc::clone(&self.table.chunks[slot_indices[0]].rule);
        if rule.reductions().is_empty() {
            return Vec::new();
        }
        let step = self.step(slot_indices[0], norm);
        let chunks = &mut self.table.chunks;
        reduce(cx.kernels, &rule, &step, total, |piece| {
            slot_indices.iter().for_each(|slot_index| chunks[*slot_index].reduce(piece));
        })
    }

    /// The norm of the merged gradient: one total over all blocks, in order.
    fn norm(&self, slot_indices: &[SlotIndex]) -> f64 {
        let mut total = 0.0;
        for slot_index in slot_indices {
            self.table.chunks[*slot_index].squares(&mut |block| total += block);
        }
        total.sqrt() * self.step(slot_indices[0], None).scale
    }

    /// Marks a group in a mode without rounds as stalled on a device: the next admission may depend on its result.
    pub(in crate::server) fn note_awaited(&mut self, pace: AccumulatorPace, slot_indices: &[SlotIndex]) {
        let is_whole =
            pace == AccumulatorPace::Any && slot_indices.iter().all(|slot_index| self.is_decided(pace, *slot_index));
        if is_whole && self.table.chunks[slot_indices[0]].group.is_some() {
            self.stalls.updates.entry(slot_indices[0]).or_insert(StallReason::Device);
        }
    }

    /// Records the completion of a chunk's work; true while work of other chunks in the group is awaited.
    pub(in crate::server) fn note_over(&mut self, slot_index: SlotIndex, was_awaited: bool) -> bool {
        let chunk = &self.table.chunks[slot_index];
        let is_over = was_awaited && !chunk.is_awaited();
        let Some(group) = chunk.group else { return false };
        let Some(grouped_update) = &mut self.table.groups[group.place()].update else { return false };
        grouped_update.awaited -= usize::from(is_over);
        0 < grouped_update.awaited
    }
}

impl Chunk {
    /// Sums the gradients of the open round. Rows of a bucket are summed where they are used.
    pub(in crate::server) fn fold_all(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        if self.bucket().is_some() {
            return Ok(());
        }
        self.round.fold_all(cx.kernels, cx.pool, self.element_type, self.bytes)
    }

    /// Sums of squares of the chunk's summed gradient, block by block.
    fn squares(&self, out: &mut impl FnMut(f64)) {
        let Some(on_device) = &self.on_device else {
            let sum = self.round.gradients(self.element_type, self.bytes);
            return square_sums(self.element_type, sum[0].bytes, out);
        };
        let DeviceActivity::Summed(summed) = &on_device.doing else {
            panic!("every sum is there when the norm is asked for")
        };
        let squares = &summed.into.bytes()[..squares_bytes(self.bytes) as usize];
        squares.as_chunks().0.iter().for_each(|block| out(f64::from_le_bytes(*block)));
    }

    /// Starts the update of a chunk whose sum is on the device; false when the processor does it.
    fn begin_update_of_sum(&mut self, cx: &mut Context<'_>, step: &Step) -> bool {
        let Some(on_device) = &mut self.on_device else { return false };
        let DeviceActivity::Summed(summed) = std::mem::take(&mut on_device.doing) else { panic!("its sum is there") };
        let mut numbers = Vec::new();
        let formula = self.rule.formula(step, &mut numbers);
        assert!(matches!(formula, Formula::Rule { .. }), "what is exact needs no norm");
        let (slot, is_leaving) = (on_device.slot, on_device.is_leaving);
        let DeviceSum { gradients, into } = *summed;
        let work = Work::Update { slot, numbers, gradients, is_summed: true, into };
        if is_leaving {
            self.return_to_host(cx.kernels, Some(work));
        } else {
            on_device.doing = DeviceActivity::Updating;
            cx.device().push(work);
        }
        !is_leaving
    }
}

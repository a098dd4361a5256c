//! Updates: the next value of a unit whose rounds are complete, by the stage of its parameter.
//!
//! Each case has a file: [`dense`] (a chunk that the processor updates in place), [`rows`] (a bucket), [`device`] (a
//! chunk on an accelerator, whose update ends later) and [`grouped`] (chunks whose rule needs the norm of the whole
//! gradient).

mod dense;
mod device;
mod grouped;
mod rows;

use super::context::Context;
use super::group::UpdateUnit;
use super::serving::Serving;
use super::stalls::StallReason;
use crate::ids::Version;
use crate::optim::{Algorithm, Step};
use crate::server::group::SlotIndex;

impl Serving {
    /// Makes the update of a unit whose rounds are complete. False when the update stalls: it lacks a lease, or runs on
    /// a device, and is retried.
    pub(in crate::server) fn update(&mut self, cx: &mut Context<'_>, unit: &UpdateUnit) -> bool {
        if self.is_passed(unit) {
            self.pass(unit);
            return true;
        }
        match unit {
            UpdateUnit::One(slot_index) => self.apply(cx, *slot_index, None, &[]),
            UpdateUnit::Group(group, slot_indices) => self.apply_group(cx, *group, slot_indices),
        }
    }

    /// Whether the rounds of a unit end without an update. Some chunks of a group may be done: a device computes them
    /// one by one.
    fn is_passed(&self, unit: &UpdateUnit) -> bool {
        let slot_indices = match unit {
            UpdateUnit::One(slot_index) => std::slice::from_ref(slot_index),
            UpdateUnit::Group(group, _) => self.table.groups[group.place()].parameter_chunks(),
        };
        let is_passed = |slot_index: &SlotIndex| {
            let chunk = &self.table.chunks[*slot_index];
            chunk.round.is_passed(chunk.bucket().is_some())
        };
        slot_indices.iter().all(is_passed)
    }

    /// Makes the next version of a unit whose rounds end without an update: values and states stay, and the rule's
    /// count of updates too.
    fn pass(&mut self, unit: &UpdateUnit) {
        let total = match unit {
            UpdateUnit::One(_) => None,
            UpdateUnit::Group(group, _) => self.table.groups[group.place()].total.map(|slots| slots.total),
        };
        for slot_index in unit.slot_indices() {
            let chunk = &mut self.table.chunks[*slot_index];
            chunk.version.0 += 1;
            if total != Some(*slot_index) {
                chunk.set_updates(chunk.updates() - 1);
            }
        }
        if let UpdateUnit::Group(group, _) = unit {
            self.table.groups[group.place()].owner = None;
        }
    }

    /// The inputs that the stage gives the rule for the next update of a chunk.
    pub(in crate::server) fn step(&self, slot_index: SlotIndex, norm: Option<f64>) -> Step {
        let chunk = &self.table.chunks[slot_index];
        Step {
            version: Version(chunk.updates() + 1),
            rate: chunk.round.rate(),
            norm,
            scale: self.flows.of(slot_index).stage.scale(chunk.round.contributors()),
            settings: chunk.round.settings(&chunk.rule),
        }
    }

    /// Applies one update of one chunk, with the norm of the whole gradient and the values of the rule's reductions
    /// where they are needed; false when it is stalled.
    fn apply(&mut self, cx: &mut Context<'_>, slot_index: SlotIndex, norm: Option<f64>, reduced: &[f64]) -> bool {
        let step = self.step(slot_index, norm);
        let chunk = &mut self.table.chunks[slot_index];
        let is_sum = chunk.rule.rule().algorithm == Algorithm::Sum && step.scale == 1.0;
        let only = if is_sum { chunk.round.take_only(chunk.element_type) } else { None };
        let updated = match only {
            Some(gradient) => {
                chunk.adopt_gradient(cx.pool, gradient);
                Ok(true)
            }
            None if chunk.on_device.is_some() => return self.apply_on_device(cx, slot_index, &step),
            None if chunk.bucket().is_some() => {
                chunk.update_rows(&mut self.rows_room, cx.kernels, (&step, reduced), &mut cx.replay_left)
            }
            None => chunk.update(cx.kernels, cx.pool, &mut self.numbers, &step, reduced).map(|()| true),
        };
        let lack = match updated {
            Ok(true) => return true,
            Ok(false) => StallReason::Time,
            Err(_) => StallReason::Memory,
        };
        self.stalls.add(slot_index, lack);
        false
    }
}

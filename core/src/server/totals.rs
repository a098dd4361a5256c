//! Totals: numbers that trainers make of several parameters between the completion of a round and its updates, such as
//! the norm of all gradients.
//!
//! ```text
//! w         round complete, sealed        updated, with the total in its stage
//! w@share   computed, next version        .
//! w@total   .                             first number of the round, next version
//! ```
//!
//! A parameter whose stage reads a total has two parameters beside it, on its shard: its share, which this shard
//! computes, and the total, which trainers push. The total's chunk is the last of the parameter's group, so a round of
//! the group is complete when the gradients and the total are there, and all of it is published, recorded and restored
//! together. The share goes one version ahead of its group between the two.
//!
//! Not here: what is computed ([`share`]), and the trainers' part (`trainer`).

use std::sync::Arc;

use crate::accumulator::AccumulatorPace;
use crate::config::Mode;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::ParameterIndex;
use crate::memory::Value;
use crate::optim::{Algorithm, Prepared, Step, share};
use crate::partition::TotalPart;

use super::chunk::{Chunk, Content};
use super::compiled_flows::Sender;
use super::context::Context;
use super::group::{GroupIndex, TotalSlots, UpdateUnit};
use super::initialisation::{ChunkTable, ShardParameter};
use super::job::Job;
use super::pool::Pool;
use super::serving::Serving;
use super::stalls::StallReason;

/// Outcome of a look at a unit's share.
pub(super) enum ShareStep {
    /// There is none to compute now.
    Nothing,
    /// It was computed and published.
    Published,
    /// It lacks a lease.
    Stalled,
}

/// Checks that every total of a job can be made: its share and its number are on this shard, in a job with rounds.
///
/// # Errors
/// Names the parameter, what was found and what was expected.
pub(super) fn check_totals(job: &Job, table: &ChunkTable) -> Result<(), Failure> {
    for (index, held) in &table.parameters {
        let refused = |why: String| Failure::call(format!("parameter \"{}\": {why}", held.name()));
        let part = |part: TotalPart| {
            let index = index.0.checked_add(part.number()).map(ParameterIndex);
            let found = index.and_then(|index| table.parameters.get(&index));
            found.is_some_and(|one| one.declaration.total_part == Some(part))
        };
        if let Some(part) = held.declaration.total_part {
            let reader = part.reader(*index).and_then(|reader| table.parameters.get(&reader));
            if !reader.is_some_and(|reader| reader.rule.rule().has_total()) {
                return Err(refused(format!(
                    "a part of a total ({part:?}) of no parameter here; expected one before it"
                )));
            }
            if !is_one_number(held) {
                return Err(refused("a part of a total; expected one float64 with the algorithm sum".to_owned()));
            }
        } else if held.rule.rule().has_total() {
            if job.mode != Mode::Sync {
                let found = job.mode;
                return Err(refused(format!("its stage has total in a job in {found:?}; expected mode sync")));
            }
            if !part(TotalPart::Share) || !part(TotalPart::Total) {
                return Err(refused("its stage has total; expected its share and its total after it".to_owned()));
            }
        }
    }
    Ok(())
}

fn is_one_number(held: &ShardParameter) -> bool {
    let is_number = (held.element_type(), held.declaration.bytes) == (ElementType::Float64, 8);
    is_number && held.rows.is_none() && held.chunks.len() == 1 && held.rule.rule().algorithm == Algorithm::Sum
}

impl Serving {
    /// Computes the share of a group whose gradients are complete, and seals its round: what the share was computed of
    /// must be what the update is made of.
    #[inline]
    pub(super) fn publish_share(&mut self, cx: &mut Context<'_>, unit: &UpdateUnit) -> ShareStep {
        match unit {
            UpdateUnit::Group(group, _) if self.table.groups[group.place()].total.is_some() => {
                self.publish_share_of(cx, *group)
            }
            _ => ShareStep::Nothing,
        }
    }

    fn publish_share_of(&mut self, cx: &mut Context<'_>, group: GroupIndex) -> ShareStep {
        let group = &self.table.groups[group.place()];
        let (Some(slots), all) = (group.total, Arc::clone(&group.chunks)) else { return ShareStep::Nothing };
        let gradients = &all[..group.parameter_chunks().len()];
        let pace = self.flows.of(gradients[0]).pace;
        let is_there = self.has_share(slots, gradients[0]);
        if is_there || !gradients.iter().all(|slot_index| self.is_complete(pace, *slot_index)) {
            return ShareStep::Nothing;
        }
        let share = &mut self.table.chunks[slots.share];
        let mut room = share.make_writable(cx.pool);
        for slot_index in gradients {
            room = room.and_then(|()| self.table.chunks[*slot_index].fold_all(cx));
        }
        if room.is_err() {
            self.stall(gradients[0], StallReason::Memory);
            return ShareStep::Stalled;
        }
        let step = self.step(gradients[0], None);
        let rule = Arc::clone(&self.table.chunks[gradients[0]].rule);
        let chunks = &mut self.table.chunks;
        let number = share_of(cx, &rule, &step, chunks, gradients);
        chunks[slots.share].install_number(cx.pool, number).expect("the value is writable");
        self.note_updated(gradients[0]);
        gradients.iter().for_each(|slot_index| self.table.chunks[*slot_index].sealed = 1);
        self.answer_waiters(cx, slots.share);
        self.note_waits(slots.share);
        ShareStep::Published
    }

    /// Seals what is complete of a group whose update is stalled, as if neither its share nor its update took time.
    pub(super) fn seal_with_total(&mut self, pace: AccumulatorPace, group: GroupIndex) {
        let group = &self.table.groups[group.place()];
        let (Some(slots), all) = (group.total, Arc::clone(&group.chunks)) else { return };
        let gradients = &all[..group.parameter_chunks().len()];
        let sealed = self.table.chunks[gradients[0]].sealed;
        if sealed == 0 && !gradients.iter().all(|slot_index| self.is_complete(pace, *slot_index)) {
            return;
        }
        let total = &self.table.chunks[slots.total].round;
        let (has_total, has_next_total) = (!total.is_empty(), !total.all_ahead().is_empty());
        let is_next = sealed == 2 || has_total && gradients.iter().all(|slot_index| self.is_next_complete(*slot_index));
        for slot_index in gradients {
            self.table.chunks[*slot_index].sealed = 1 + u8::from(is_next);
        }
        self.table.chunks[slots.total].sealed = u8::from(has_total) + u8::from(has_total && is_next && has_next_total);
    }

    /// Whether the share of a group's open round is computed, so that only its total is missing.
    fn has_share(&self, slots: TotalSlots, reader: usize) -> bool {
        self.table.chunks[reader].version < self.table.chunks[slots.share].version
    }

    /// Whether a chunk's round waits for its total alone.
    pub(super) fn awaits_total(&self, slot_index: usize) -> bool {
        let Some(group) = self.table.group(&self.table.chunks[slot_index]) else { return false };
        let is_missing = |slots: TotalSlots| {
            self.has_share(slots, group.chunks[0]) && self.table.chunks[slots.total].round.is_empty()
        };
        group.total.is_some_and(is_missing)
    }

    /// The chunk whose round a wait on this one is for: of a share the first chunk of what it is computed of.
    pub(super) fn round_of(&self, slot_index: usize) -> usize {
        if self.flows.sender(slot_index) != Sender::Nobody {
            return slot_index;
        }
        let reader = TotalPart::Share.reader(self.table.chunks[slot_index].id.parameter);
        let reader = reader.and_then(|reader| self.table.parameters.get(&reader));
        reader.map_or(slot_index, |reader| reader.chunks[0])
    }

    /// Forgets a share whose round is open again.
    pub(super) fn forget_share(&mut self, group: GroupIndex) {
        let group = &self.table.groups[group.place()];
        if let Some(slots) = group.total {
            let version = self.table.chunks[group.chunks[0]].version;
            self.table.chunks[slots.share].version = version;
        }
    }
}

fn share_of(cx: &mut Context<'_>, rule: &Prepared, step: &Step, chunks: &mut [Chunk], slot_indices: &[usize]) -> f64 {
    share(cx.kernels, rule, step, |piece| {
        slot_indices.iter().for_each(|slot_index| chunks[*slot_index].reduce(piece));
    })
}

impl Chunk {
    /// The first number that a trainer sent for the open round of a total.
    pub(super) fn total(&self) -> Option<f64> {
        let bytes = self.round.contributions().first()?.gradient()?.bytes;
        bytes.first_chunk().map(|bytes| f64::from_le_bytes(*bytes))
    }

    /// Installs a number as the next version of a chunk of one float64.
    pub(super) fn install_number(&mut self, pool: &mut Pool, number: f64) -> Result<(), Failure> {
        self.make_writable(pool)?;
        let Content::Dense(value) = &mut self.content else { panic!("a number is dense") };
        let value: &mut Value = Arc::get_mut(value).expect("nobody else holds it");
        value.bytes_mut()[..8].copy_from_slice(&number.to_le_bytes());
        self.version.0 += 1;
        Ok(())
    }
}

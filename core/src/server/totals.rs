//! Totals: numbers that trainers make of several parameters between the completion of a round and its updates, such as
//! the norm of all gradients.
//!
//! ```text
//! w         round decided                 updated, with the total in its stage
//! w@share   computed, next version        .
//! w@total   .                             first number of the round, next version
//! ```
//!
//! A parameter whose stage reads a total has two parameters beside it, on its shard: its share, which this shard
//! computes, and the total, which trainers push. The total's chunk is the last of the parameter's group, so a round of
//! the group is complete when the gradients and the total are there, and all of it is published, recorded and restored
//! together. The share goes one version ahead of its group between the two. Of a table each bucket has a group, and
//! share and total have a number for each bucket.
//!
//! Not here: what is computed ([`share`]), and the trainers' part (`trainer`).

use std::sync::Arc;

use crate::config::Mode;
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{ChunkId, ChunkIndex};
use crate::memory::Value;
use crate::optim::{Algorithm, share};
use crate::partition::{Declaration, TotalPart};

use super::chunk::{Chunk, Content};
use super::chunk_table::{ChunkTable, ShardParameter};
use super::compiled_flows::Sender;
use super::context::Context;
use super::group::{GroupIndex, SlotIndex, TotalSlots, UpdateUnit};
use super::job::Job;
use super::pool::Pool;
use super::serving::Serving;
use super::stalls::StallReason;

const NUMBER_BYTES: u32 = TotalPart::NUMBER_BYTES;

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
        let is_at = |part: TotalPart, reader: ChunkId| {
            let id = part.of(reader);
            table.slot_index(id).is_some() && table.held(id).declaration.total_part == Some(part)
        };
        let part = |part: TotalPart| match held.rows {
            None => is_at(part, ChunkId { parameter: *index, chunk: ChunkIndex(0) }),
            Some(_) => held.chunks.iter().all(|slot_index| is_at(part, table.chunks[*slot_index].id)),
        };
        if let Some(part) = held.declaration.total_part {
            let reader = part.reader(*index).and_then(|reader| table.parameters.get(&reader));
            let Some(reader) = reader.filter(|reader| reader.rule.rule().has_total()) else {
                return Err(refused(format!(
                    "a part of a total ({part:?}) of no parameter here; expected one before it"
                )));
            };
            let numbers = reader.rows.as_ref().map_or(1, |plan| plan.buckets.count);
            if !is_of_numbers(held, numbers) {
                let expected = if numbers == 1 { "one".to_owned() } else { numbers.to_string() };
                return Err(refused(format!("a part of a total; expected {expected} float64 with the algorithm sum")));
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

/// Whether a parameter is so many numbers, each a chunk.
fn is_of_numbers(held: &ShardParameter, count: u32) -> bool {
    let Declaration { element_type, bytes, .. } = held.declaration;
    let is_as_long = (element_type, bytes) == (ElementType::Float64, u64::from(NUMBER_BYTES) * u64::from(count));
    let is_cut = count == 1 || held.chunk_bytes == NUMBER_BYTES;
    is_as_long && is_cut && held.rows.is_none() && held.rule.rule().algorithm == Algorithm::Sum
}

impl Serving {
    /// Computes the share of a group whose gradients' round is decided: what the share is computed of is what the
    /// update is made of.
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
        let is_there = self.has_share(slots, gradients[0]);
        if is_there || self.table.chunks[gradients[0]].decided == 0 {
            return ShareStep::Nothing;
        }
        let share = &mut self.table.chunks[slots.share];
        let mut room = share.make_writable(cx.pool);
        for slot_index in gradients {
            room = room.and_then(|()| self.table.chunks[*slot_index].fold_all(cx));
        }
        let Ok(number) = room.and_then(|()| self.share_of(cx, gradients)) else {
            self.stalls.add(gradients[0], StallReason::Memory);
            return ShareStep::Stalled;
        };
        self.table.chunks[slots.share].install_number(cx.pool, number).expect("the value is writable");
        self.stalls.note_updated(gradients[0]);
        self.answer_waiters(cx, slots.share);
        self.waits.note(slots.share, &mut self.table.chunks[slots.share]);
        ShareStep::Published
    }

    /// The share of chunks whose gradients are summed, or of a bucket.
    fn share_of(&mut self, cx: &mut Context<'_>, slot_indices: &[SlotIndex]) -> Result<f64, Failure> {
        let step = self.step(slot_indices[0], None);
        let rule = Arc::clone(&self.table.chunks[slot_indices[0]].rule);
        let (chunks, room) = (&mut self.table.chunks, &mut self.rows_room);
        let mut made = Ok(());
        let number = share(cx.kernels, &rule, &step, |piece| {
            for slot_index in slot_indices {
                let chunk = &mut chunks[*slot_index];
                match chunk.bucket() {
                    None => chunk.reduce(piece),
                    Some(_) if made.is_ok() => made = chunk.reduce_rows(room, piece),
                    Some(_) => {}
                }
            }
        });
        made.map(|()| number)
    }

    /// Whether the share of a group's open round is computed, so that only its total is missing.
    fn has_share(&self, slots: TotalSlots, reader: SlotIndex) -> bool {
        self.table.chunks[reader].version < self.table.chunks[slots.share].version
    }

    /// Whether a chunk's round waits for its total alone.
    pub(super) fn awaits_total(&self, slot_index: SlotIndex) -> bool {
        let Some(group) = self.table.group(&self.table.chunks[slot_index]) else { return false };
        let is_missing = |slots: TotalSlots| {
            self.has_share(slots, group.chunks[0]) && self.table.chunks[slots.total].round.is_empty()
        };
        group.total.is_some_and(is_missing)
    }

    /// The chunk whose round a wait on this one is for: of a share the first chunk, or the bucket, of which it is
    /// computed.
    pub(super) fn round_of(&self, slot_index: SlotIndex) -> SlotIndex {
        if self.flows.sender(slot_index) != Sender::Nobody {
            return slot_index;
        }
        let first = self.table.first_of_group(self.table.chunks[slot_index].id);
        self.table.slot_index(first).unwrap_or(slot_index)
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

impl Chunk {
    /// The first number that a trainer sent for the open round of a total.
    pub(super) fn total(&self) -> Option<f64> {
        let bytes = self.round.contributions().first()?.gradient()?.bytes;
        bytes.first_chunk().map(|bytes| f64::from_le_bytes(*bytes))
    }

    /// Installs a number as the next version of a chunk of one float64.
    pub(super) fn install_number(&mut self, pool: &mut Pool, number: f64) -> Result<(), Failure> {
        self.make_writable(pool)?;
        self.install(&number.to_le_bytes());
        Ok(())
    }

    /// Installs bytes that the server has computed as the next version, in a value that is writable.
    pub(super) fn install(&mut self, bytes: &[u8]) {
        let Content::Dense(value) = &mut self.content else { panic!("a computed value is dense") };
        let value: &mut Value = Arc::get_mut(value).expect("nobody else holds it");
        value.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        self.version.0 += 1;
    }
}

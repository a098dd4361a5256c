//! Needs of a shard: the memory and the disk that parameters take, computed before they are used. A shard checks and
//! prints them when its parameters are declared; `pserver needs` computes them for a job that does not run.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

use crate::checkpoint::{disk_need, journal_room};
use crate::limits::{FRAME_ENTRIES_MAX, FRAME_PAYLOAD_BYTES_MAX, RECEIVES_MAX};
use crate::memory::Budget;

/// About what a checkpoint takes for each tensor beside its bytes, and for each trainer of a chunk.
const TENSOR_BYTES: u64 = 128;
const MARKS_BYTES: u64 = 64;
/// Tensors of a bucket of rows.
const BUCKET_TENSORS: u64 = 5;
/// A row's index at most, and the number of its last update, in memory; its id and that number in a checkpoint.
const ROW_INDEX_BYTES: u64 = 51 + 8;
const ROW_RECORD_BYTES: u64 = 16;

/// The parameters of a shard, as far as their sizes go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// How many dense chunks there are of each length, in bytes, and number of states.
    dense: BTreeMap<(u32, u64), u64>,
    /// How many rows there are of each length and number of states. In a checkpoint each of them takes its bytes.
    rows: BTreeMap<(u64, u64), u64>,
    /// How many buckets of rows there are.
    buckets: u64,
    trainers: u64,
}

/// The memory and the disk that a shard's parameters take, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Dense values.
    pub values: u64,
    /// The states of their rules.
    pub states: u64,
    /// A gradient of each trainer.
    pub gradients: u64,
    /// Rows of tables with their states and their index. Payloads of rows come on top.
    pub rows: u64,
    /// The memory of dense parameters when every trainer is a round ahead and reads.
    pub most: u64,
    /// A checkpoint.
    pub checkpoint: u64,
    /// The journal between two checkpoints; 0 without one.
    pub journal: u64,
    /// The whole disk: two checkpoints that are kept, one that is written, and the journal of each.
    pub disk: u64,
}

impl Needs {
    /// The memory that dense parameters take in any case.
    #[must_use]
    pub fn least(&self) -> u64 {
        self.values.saturating_add(self.states).saturating_add(self.gradients)
    }
}

impl fmt::Display for Needs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { values, states, gradients, most, disk, .. } = self;
        write!(formatter, "{} bytes of memory (values {values}, states {states}, ", self.least())?;
        write!(formatter, "a gradient of each trainer {gradients}), at most {most}")?;
        if self.rows > 0 {
            write!(formatter, ", and {} for rows when tables have all of them", self.rows)?;
        }
        write!(formatter, "; with a checkpoint directory {disk} bytes of disk")
    }
}

impl Holdings {
    /// Holdings of nothing yet, in a job of so many trainers.
    #[must_use]
    pub fn new(trainers: u32) -> Self {
        Self { trainers: trainers.into(), ..Self::default() }
    }

    /// Adds dense chunks of a length in bytes, each with so many states.
    pub fn add_chunks(&mut self, bytes: u32, states: u64, count: u64) {
        let known = self.dense.entry((bytes, states)).or_default();
        *known = known.saturating_add(count);
    }

    /// Adds rows of a length in bytes, each with so many states, in so many buckets.
    pub fn add_rows(&mut self, bytes: u64, states: u64, count: u64, buckets: u64) {
        let known = self.rows.entry((bytes, states)).or_default();
        *known = known.saturating_add(count);
        self.buckets = self.buckets.saturating_add(buckets);
    }

    /// The same in a job of another number of trainers.
    #[must_use]
    pub fn with_trainers(self, trainers: u32) -> Self {
        Self { trainers: trainers.into(), ..self }
    }

    /// How many trainers the job has.
    #[must_use]
    pub fn trainers(&self) -> u64 {
        self.trainers
    }

    /// Adds the holdings of another shard.
    pub fn extend(&mut self, other: &Self) {
        other.dense.iter().for_each(|(&(bytes, states), &count)| self.add_chunks(bytes, states, count));
        other.rows.iter().for_each(|(&(bytes, states), &count)| self.add_rows(bytes, states, count, 0));
        self.buckets = self.buckets.saturating_add(other.buckets);
        self.trainers = self.trainers.max(other.trainers);
    }

    /// The part of the fullest of so many shards. Chunks go from the largest to the smallest, each to the emptiest
    /// shard; rows go evenly.
    #[must_use]
    pub fn divided(&self, shards: u64) -> Self {
        let shards = shards.max(1);
        let mut part = Self::new(0);
        (part.trainers, part.buckets) = (self.trainers, self.buckets.div_ceil(shards));
        part.rows = self.rows.iter().map(|(class, count)| (*class, count.div_ceil(shards))).collect();
        part.dense = self.dense.iter().map(|(class, count)| (*class, count / shards)).collect();
        // As many chunks of a class as do not go to all shards go to some.
        let rest: u64 = self.dense.values().map(|count| count % shards).sum();
        let mut held = vec![BTreeMap::new(); usize::try_from(rest.min(shards)).unwrap_or(usize::MAX)];
        let mut emptiest: BinaryHeap<Reverse<(u64, usize)>> = (0..held.len()).map(|at| Reverse((0, at))).collect();
        for (&(bytes, states), count) in self.dense.iter().rev() {
            for _ in 0..count % shards {
                let Reverse((taken, at)) = emptiest.pop().expect("there is one for each chunk, or all shards");
                *held[at].entry((bytes, states)).or_default() += 1;
                emptiest.push(Reverse((taken + u64::from(bytes) * (1 + states), at)));
            }
        }
        let fullest = emptiest.into_iter().map(|Reverse(one)| one).max();
        let fullest = fullest.map(|(_, at)| std::mem::take(&mut held[at]));
        for ((bytes, states), count) in fullest.into_iter().flatten() {
            part.add_chunks(bytes, states, count);
        }
        part
    }

    /// The needs of a shard that keeps a journal or not. Payloads of any transport find room.
    #[must_use]
    pub fn needs(&self, has_journal: bool) -> Needs {
        self.needs_of(RECEIVES_MAX as u64, has_journal)
    }

    pub(super) fn needs_of(&self, receives: u64, has_journal: bool) -> Needs {
        let values = self.dense(|bytes, _| bytes);
        let checkpoint = self.checkpoint();
        Needs {
            values,
            states: self.dense(u64::saturating_mul),
            gradients: values.saturating_mul(self.trainers),
            rows: self.rows(ROW_INDEX_BYTES),
            most: self.budget(receives).bytes().saturating_add(values),
            checkpoint,
            journal: if has_journal { journal_room(values) } else { 0 },
            disk: disk_need(checkpoint, values, has_journal),
        }
    }

    /// The bytes of a checkpoint.
    pub(super) fn checkpoint(&self) -> u64 {
        let of_trainers = MARKS_BYTES * self.trainers;
        let dense = self.dense(|bytes, states| (bytes + TENSOR_BYTES).saturating_mul(1 + states) + of_trainers);
        // A bucket has a tensor of values, one of ids, one of the numbers of updates, and those of few states.
        let buckets = self.buckets.saturating_mul(BUCKET_TENSORS * TENSOR_BYTES + of_trainers);
        dense.saturating_add(self.rows(ROW_RECORD_BYTES)).saturating_add(buckets)
    }

    /// The bytes of values, rows among them.
    pub(super) fn values(&self) -> u64 {
        let rows = self.rows.iter().map(|(&(bytes, _), &count)| bytes.saturating_mul(count));
        rows.fold(self.dense(|bytes, _| bytes), u64::saturating_add)
    }

    /// A sum over dense chunks, of a function of a chunk's length and number of states.
    fn dense(&self, each: impl Fn(u64, u64) -> u64) -> u64 {
        let classes =
            self.dense.iter().map(|(&(bytes, states), &count)| each(bytes.into(), states).saturating_mul(count));
        classes.fold(0, u64::saturating_add)
    }

    /// The bytes of rows with their states, and so many beside each of them.
    fn rows(&self, beside: u64) -> u64 {
        let classes = self.rows.iter().map(|(&(bytes, states), &count)| {
            bytes.saturating_mul(1 + states).saturating_add(beside).saturating_mul(count)
        });
        classes.fold(0, u64::saturating_add)
    }

    /// The reasons for chunk memory beyond the values, which are allocated already.
    pub(super) fn budget(&self, receives: u64) -> Budget {
        let mut budget = Budget::new();
        for (class, (chunks, states)) in self.classes() {
            budget.line("optimizer state", class, states);
            budget.line("the sum of a round's first gradients", class, chunks.saturating_mul(2));
            budget.line("a value that is set and waits for updates", class, chunks);
            budget.line("a new version beside the ones that are still being read", class, chunks);
            trainer_lines(&mut budget, (class, chunks), self.trainers, receives);
        }
        budget
    }

    /// The chunk memory that so many more trainers take.
    pub(super) fn growth(&self, more: u32, receives: u64) -> Budget {
        let mut budget = Budget::new();
        for (class, (chunks, _)) in self.classes() {
            trainer_lines(&mut budget, (class, chunks), more.into(), receives);
        }
        budget
    }

    /// The chunks of each size of slot, and the states of them all.
    fn classes(&self) -> BTreeMap<u32, (u64, u64)> {
        let mut classes: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for (&(bytes, states), &count) in &self.dense {
            let class = classes.entry(bytes.max(64).next_power_of_two()).or_default();
            class.0 = class.0.saturating_add(count);
            class.1 = class.1.saturating_add(count.saturating_mul(states));
        }
        classes
    }
}

/// The reasons for chunk memory that each of so many trainers has.
fn trainer_lines(budget: &mut Budget, (class, chunks): (u32, u64), trainers: u64, receives: u64) {
    // A trainer has one connection.
    let frame = chunks.min(u64::from(FRAME_ENTRIES_MAX)).min(u64::from(FRAME_PAYLOAD_BYTES_MAX / class));
    let each = chunks.saturating_mul(trainers);
    budget.line("gradients that are received", class, trainers.saturating_mul(receives).saturating_mul(frame));
    budget.line("gradients that wait for their round, or are one ahead of it", class, each.saturating_mul(2));
    budget.line("a new version beside the ones that are still being read", class, each);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_those_of_the_formulas() {
        let mut held = Holdings::new(2);
        held.add_chunks(1 << 20, 2, 10);
        held.add_chunks(3000, 2, 1);
        held.add_rows(256, 1, 1000, 2);
        let values = 10 * (1 << 20) + 3000;
        let needs = held.needs(true);
        assert_eq!((needs.values, needs.states, needs.gradients), (values, 2 * values, 2 * values));
        assert_eq!(needs.rows, 1000 * (2 * 256 + 59));
        let rows = 1000 * (2 * 256 + 16) + 2 * (5 * 128 + 2 * 64);
        assert_eq!(needs.checkpoint, 3 * values + 11 * (3 * 128 + 2 * 64) + rows);
        assert_eq!(needs.disk, 3 * (needs.checkpoint + values) + 2 * 1024 * 1024);
        assert!(needs.most > needs.least(), "{needs}");
        assert_eq!(held.needs(false).journal, 0);

        // The fullest of two shards has six of eleven chunks.
        let part = held.divided(2);
        assert_eq!(part.needs(true).values, 5 * (1 << 20) + 3000);
        let mut both = part.clone();
        both.extend(&part);
        assert_eq!(both.needs(true).rows, needs.rows);
        // Chunks of several lengths balance: 8 | 5 + 3.
        let mut several = Holdings::new(1);
        [3, 8, 5].into_iter().for_each(|bytes| several.add_chunks(bytes, 0, 1));
        assert_eq!(several.divided(2).needs(true).values, 8);
        assert_eq!(several.divided(4000).needs(true).values, 8);
        // Tables of any height are declared.
        held.add_rows(u64::from(u32::MAX), 2, u64::MAX, 1);
        held.add_chunks(1 << 20, 2, u64::MAX);
        let needs = held.with_trainers(u32::MAX).needs(true);
        assert_eq!((needs.disk, needs.most), (u64::MAX, u64::MAX));
    }
}

//! A chunk in a shard: value, optimizer state, version, and the last call of each trainer.

use std::sync::Arc;

use smallvec::SmallVec;

use super::bucket::Bucket;
use super::call::{CallId, TrainerMarks};
use super::contribution::{Contribution, DeferredSet};
use super::device_chunk::DeviceChunk;
use super::group::GroupIndex;
use super::half_values::RoundHalves;
use super::pool::Pool;
use super::round::OpenRound;
use super::waiters::Waiters;
use crate::dtype::{ElementType, Half};
use crate::ids::{ChunkId, Round, TrainerId, Version};
use crate::memory::{Lease, Value};
use crate::optim::Prepared;
use crate::time::Now;
use crate::wire::Entry;

/// Contents of a chunk.
pub(super) enum Content {
    /// A part of a dense tensor.
    Dense(Arc<Value>),
    /// A table of rows.
    Rows(Box<Bucket>),
}

impl Content {
    pub(super) fn dense(&self) -> &Arc<Value> {
        match self {
            Self::Dense(value) => value,
            Self::Rows(_) => panic!("a bucket has no single value; callers check for buckets first"),
        }
    }
}

/// A part of a parameter, the unit of updates.
// tidy: allow fields: a gradient reads all of them, and the parts with rules of their own are types
pub(super) struct Chunk {
    pub(super) id: ChunkId,
    /// Length of the value in bytes; zero for a bucket, whose size varies.
    pub(super) bytes: u32,
    pub(super) element_type: ElementType,
    /// The parameter's rule.
    pub(super) rule: Arc<Prepared>,
    /// The chunks that are updated together with this one, where the rule needs the whole gradient.
    pub(super) group: Option<GroupIndex>,
    pub(super) version: Version,
    /// Updates that the optimizer's state has seen beyond the version; negative where it has seen fewer.
    pub(super) updates_beyond: i64,
    /// Per trainer; a single entry is stored inline.
    pub(super) heard: SmallVec<[TrainerMarks; 1]>,
    pub(super) round: OpenRound,
    pub(super) waiters: Waiters,
    /// Time of the chunk's entry in the shard's list of waits.
    pub(super) noted: Option<Now>,
    /// Count of decided rounds, from the open one on: no later message affects them. At most two.
    pub(super) decided: u8,
    /// A set that waits for earlier updates.
    pub(super) deferred_set: Option<Box<DeferredSet>>,
    /// In rounds of several trainers: the value that the last update made, where a set has replaced it since. A trainer
    /// that fetches it later gets that of its step, as those before the set did.
    pub(super) of_step: Option<Arc<Value>>,
    /// Optimizer state; of a chunk on an accelerator the last stored copy, and empty while a transfer has it.
    pub(super) states: Vec<Lease>,
    /// State on an accelerator, if the chunk lives on one.
    pub(super) on_device: Option<Box<DeviceChunk>>,
    /// During replay: the journal position as of which the checkpoint has this chunk; later records are new to it.
    pub(super) restored: Option<u64>,
    pub(super) content: Content,
}

impl Chunk {
    pub(super) fn new(id: ChunkId, element_type: ElementType, rule: Arc<Prepared>, value: Lease, bytes: u32) -> Self {
        Self::with(id, element_type, rule, bytes, Content::Dense(Arc::new(Value::new(value, bytes))))
    }

    /// A bucket of rows.
    pub(super) fn of_rows(id: ChunkId, rule: Arc<Prepared>, bucket: Bucket) -> Self {
        Self::with(id, bucket.element_type(), rule, 0, Content::Rows(Box::new(bucket)))
    }

    fn with(id: ChunkId, element_type: ElementType, rule: Arc<Prepared>, bytes: u32, content: Content) -> Self {
        Self {
            id,
            bytes,
            element_type,
            rule,
            group: None,
            version: Version(0),
            updates_beyond: 0,
            heard: SmallVec::new(),
            round: OpenRound::default(),
            waiters: Waiters::default(),
            noted: None,
            decided: 0,
            deferred_set: None,
            of_step: None,
            states: Vec::new(),
            on_device: None,
            restored: None,
            content,
        }
    }

    /// Its rows, if it is a bucket.
    pub(super) fn bucket(&self) -> Option<&Bucket> {
        match &self.content {
            Content::Dense(_) => None,
            Content::Rows(bucket) => Some(bucket),
        }
    }

    /// Its rows, to change.
    pub(super) fn bucket_mut(&mut self) -> Option<&mut Bucket> {
        match &mut self.content {
            Content::Dense(_) => None,
            Content::Rows(bucket) => Some(bucket),
        }
    }

    fn dense(&self) -> &Arc<Value> {
        self.content.dense()
    }

    /// The current value; a holder of the `Arc` keeps this version.
    pub(super) fn value(&self) -> Arc<Value> {
        Arc::clone(self.dense())
    }

    /// The value's bytes.
    pub(super) fn value_bytes(&self) -> &[u8] {
        self.dense().bytes()
    }

    /// Keeps the value, which a set is about to replace, for trainers that have not fetched it yet.
    pub(super) fn keep_of_step(&mut self) {
        let value = self.value();
        self.of_step.get_or_insert(value);
    }

    /// Takes the value that an update made, which a set has replaced, from its record.
    pub(super) fn recall_of_step(&mut self, round: Round, value: Lease) {
        // An update behind the record has cleared it.
        if self.version.0 == round.0 {
            self.of_step = Some(Arc::new(Value::new(value, self.bytes)));
        }
    }

    /// Replaces the value and drops its half-precision copies. The version counts updates and stays.
    pub(super) fn set_value(&mut self, pool: &mut Pool, value: Lease) {
        pool.halves.forget(self.id);
        self.put_value(value);
    }

    /// Sets a value that no reader can have seen before.
    pub(super) fn put_value(&mut self, value: Lease) {
        self.content = Content::Dense(Arc::new(Value::new(value, self.bytes)));
    }

    /// Updates that the optimizer's state has seen.
    pub(super) fn updates(&self) -> u64 {
        self.version.0.wrapping_add_signed(self.updates_beyond)
    }

    /// Replaces the count of updates that the optimizer's state has seen, which the check keeps below 2^62.
    pub(super) fn set_updates(&mut self, updates: u64) {
        self.updates_beyond = updates.wrapping_sub(self.version.0).cast_signed();
    }

    /// Entry of an answer without a value.
    pub(super) fn version_entry(&self) -> Entry {
        Entry::bare(self.id, Round(self.version.0), self.element_type)
    }

    /// Entry that acknowledges a gradient in the open round.
    pub(super) fn open_entry(&self) -> Entry {
        Entry::bare(self.id, Round(self.version.0 + 1), self.element_type)
    }

    /// Entry for the value, in half precision if requested.
    pub(super) fn value_entry(&self, half: Option<Half>) -> Entry {
        as_half(Entry { bytes: self.bytes, ..self.version_entry() }, half)
    }

    /// Whether its value lacks nothing that has arrived: no contribution is open, and no set waits.
    pub(super) fn lacks_nothing(&self) -> bool {
        self.round.is_bare() && self.deferred_set.is_none() && self.bucket().is_none_or(Bucket::is_whole)
    }

    /// Whether it may have a step that is no update.
    #[inline]
    pub(super) fn may_step_aside(&self) -> bool {
        self.deferred_set.is_some() || self.on_device.is_some()
    }

    /// Whether the open round, or the next one, is decided.
    pub(super) fn has_decided(&self, is_next: bool) -> bool {
        u8::from(is_next) < self.decided
    }

    /// Whether the open round, or the next one, is decided and has no record.
    pub(super) fn lacks_record(&self, is_next: bool) -> bool {
        self.has_decided(is_next) && !self.round.is_recorded(is_next)
    }

    /// Whether the record of the open round, or of the next one, has the merged gradient.
    pub(super) fn is_recorded_whole(&self, is_next: bool) -> bool {
        self.round.is_recorded_whole(is_next, self.bucket().is_some())
    }

    /// Start of the oldest wait on this chunk: a request, a gradient, a set or a partial contribution.
    pub(super) fn waits_since(&self) -> Option<Now> {
        let gathered = self.bucket().and_then(Bucket::waits_since);
        let deferred_set = self.deferred_set.as_ref().and_then(|deferred_set| deferred_set.since);
        self.waiters.first_since().into_iter().chain(self.round.waits_since()).chain(deferred_set).chain(gathered).min()
    }

    /// Closes the round of an updated chunk: records each contribution, and calls `send` for each trainer that waits
    /// for the value, with `None` where its half-precision copy could not be made.
    pub(super) fn close_round(
        &mut self,
        halves: &RoundHalves,
        mut send: impl FnMut(&Contribution, Now, Option<Arc<Value>>),
    ) {
        for one in self.round.contributions() {
            let heard = heard_of(&mut self.heard, one.trainer);
            heard.push = one.sending.call;
            heard.clock += 1;
            if let Some(since) = one.since {
                let value = match one.half {
                    None => Some(Arc::clone(self.content.dense())),
                    Some(half) => halves.get(half),
                };
                send(one, since, value);
            }
        }
        self.round.close();
        self.decided = self.decided.saturating_sub(1);
    }

    /// The state of a trainer, to change.
    pub(super) fn heard_mut(&mut self, trainer: TrainerId) -> &mut TrainerMarks {
        heard_of(&mut self.heard, trainer)
    }

    /// The state of a trainer, without allocating.
    pub(super) fn heard(&self, trainer: TrainerId) -> TrainerMarks {
        self.heard.get(trainer.0 as usize).copied().unwrap_or_default()
    }

    /// Whether the value contains this push. A trainer without an entry has pushed nothing.
    #[inline]
    pub(super) fn has_heard(&self, trainer: TrainerId, call: CallId) -> bool {
        match self.heard.get(trainer.0 as usize) {
            Some(heard) => heard.push.covers(call),
            None => CallId::default().covers(call),
        }
    }
}

fn heard_of(heard: &mut SmallVec<[TrainerMarks; 1]>, trainer: TrainerId) -> &mut TrainerMarks {
    let index = trainer.0 as usize;
    if heard.len() <= index {
        heard.resize(index + 1, TrainerMarks::default());
    }
    &mut heard[index]
}

/// The entry of a float32 value, in half precision if requested.
pub(super) fn as_half(entry: Entry, half: Option<Half>) -> Entry {
    half.map_or(entry, |half| Entry { bytes: entry.bytes / 2, element_type: half.element_type(), ..entry })
}

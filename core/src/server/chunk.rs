//! A chunk in a shard: value, optimizer state, version, and the last call of each trainer.

use std::sync::Arc;

use smallvec::SmallVec;

use super::bucket::{Bucket, RowsRequest};
use super::device::DeviceChunk;
use super::half_precision::RoundHalves;
use super::pool::Pool;
use super::replay::RestoredState;
use super::round::{Contribution, OpenRound};
use super::sets::DeferredSet;
use super::update::GroupIndex;
use super::waiters::Waiters;
use crate::dtype::{ElementType, Half};
use crate::ids::{ChunkId, Incarnation, PeerId, Sequence, TrainerId, Version};
use crate::memory::{Lease, Value};
use crate::optim::Prepared;
use crate::time::Now;
use crate::wire::Head;

/// Id of a trainer's call. A call whose id is not greater than the last applied one is a duplicate.
///
/// The derived order is the order of calls: incarnation first, then sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CallId {
    pub(super) incarnation: Incarnation,
    pub(super) sequence: Sequence,
}

impl CallId {
    /// The call of a frame.
    pub(super) fn of(head: &Head) -> Self {
        Self { incarnation: head.incarnation, sequence: head.sequence }
    }

    /// Whether a call is applied already.
    pub(super) fn covers(self, call: Self) -> bool {
        call <= self
    }
}

/// Per-trainer state of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TrainerMarks {
    /// The last push in the value.
    pub(super) push: CallId,
    /// The last set that replaced the value.
    pub(super) set: CallId,
    /// Count of the trainer's gradients in the value: its clock.
    pub(super) clock: u64,
}

/// A request that waits for a version: a pull, or a push whose round is open.
pub(super) struct Waiter {
    pub(super) peer: PeerId,
    pub(super) head: Head,
    pub(super) version: Version,
    pub(super) since: Now,
    /// Half-precision type of the answer, where requested.
    pub(super) half: Option<Half>,
    /// Request for rows; `None` for a dense value.
    pub(super) wish: Option<RowsRequest>,
}

impl Waiter {
    /// A waiter for an acknowledgement without a value.
    pub(super) fn new(peer: PeerId, head: Head, version: Version, since: Now) -> Self {
        Self { peer, head, version, since, half: None, wish: None }
    }
}

/// A contribution or a set that is not in the value, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpenContribution {
    pub(super) trainer: TrainerId,
    pub(super) call: CallId,
    pub(super) stage: ContributionStage,
}

/// Progress of a contribution that is not in the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContributionStage {
    /// Some parts are missing.
    GatherOutcome,
    /// It waits for its round.
    Ahead,
    /// It is in the open round.
    Entered,
    /// A set that waits for the update that makes this version.
    Set(Version),
}

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
            Self::Rows(_) => panic!("a bucket has no one value: who asks for it looks at that first"),
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
    /// Per trainer; a single entry is stored inline.
    pub(super) heard: SmallVec<[TrainerMarks; 1]>,
    pub(super) round: OpenRound,
    pub(super) waiters: Waiters,
    /// Time of the chunk's entry in the shard's list of waits.
    pub(super) noted: Option<Now>,
    /// Count of complete rounds, from the open one on, whose close is delayed by an accelerator or a missing lease:
    /// later changes of membership do not affect them. At most two.
    pub(super) sealed: u8,
    /// A set that waits for earlier updates.
    pub(super) deferred_set: Option<Box<DeferredSet>>,
    /// Optimizer state; of a chunk on an accelerator the last stored copy, and empty while a transfer has it.
    pub(super) states: Vec<Lease>,
    /// State on an accelerator, if the chunk lives on one.
    pub(super) on_device: Option<Box<DeviceChunk>>,
    /// During replay: the contributions that were open when the checkpoint wrote this chunk.
    pub(super) restored: Option<Box<RestoredState>>,
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
            heard: SmallVec::new(),
            round: OpenRound::default(),
            waiters: Waiters::default(),
            noted: None,
            sealed: 0,
            deferred_set: None,
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

    /// Replaces the value and drops its half-precision copies. The version counts updates and stays.
    pub(super) fn set_value(&mut self, pool: &mut Pool, value: Lease) {
        pool.halves.forget(self.id);
        self.put_value(value);
    }

    /// Sets a value that no reader can have seen before.
    pub(super) fn put_value(&mut self, value: Lease) {
        self.content = Content::Dense(Arc::new(Value::new(value, self.bytes)));
    }

    /// Contributions and sets that are not in the value yet.
    pub(super) fn open(&self) -> impl Iterator<Item = OpenContribution> {
        let deferred_set = |deferred_set: &DeferredSet| OpenContribution {
            trainer: deferred_set.head.trainer,
            call: deferred_set.call,
            stage: ContributionStage::Set(deferred_set.after),
        };
        let sets = self.deferred_set.iter().map(move |one| deferred_set(one));
        self.round.open().chain(sets).chain(self.bucket().into_iter().flat_map(Bucket::open))
    }

    /// The oldest journal position that is not yet in the value.
    pub(super) fn oldest_position(&self) -> Option<u64> {
        let deferred_set = self.deferred_set.iter().map(|deferred_set| deferred_set.position);
        self.round
            .oldest_position()
            .into_iter()
            .chain(deferred_set)
            .chain(self.bucket().and_then(Bucket::oldest_position))
            .min()
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
        self.sealed = self.sealed.saturating_sub(1);
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

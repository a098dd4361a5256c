//! A chunk as a shard keeps it: its value, the optimizer's state, its version, and who was already heard.

use std::sync::Arc;

use smallvec::SmallVec;

use super::bucket::{Bucket, Wish};
use super::device::Seat;
use super::halves::MadeHalves;
use super::pool::Pool;
use super::round::{Contribution, Round};
use crate::dtype::{ElementType, Half};
use crate::error::Failure;
use crate::ids::{ChunkId, Incarnation, PeerId, Sequence, TrainerId, Version};
use crate::limits::STATES_MAX;
use crate::memory::{Lease, Value};
use crate::optim::{Algorithm, Numbers, Prepared, Step};
use crate::port::{Kernels, Update};
use crate::time::Now;
use crate::wire::Head;

/// What was last applied of one trainer's. Anything not newer is a duplicate.
///
/// The order of the fields is the order of calls: by life, and then by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    pub(super) incarnation: Incarnation,
    pub(super) sequence: Sequence,
}

impl Mark {
    /// The call that a frame is of.
    pub(super) fn of(head: &Head) -> Self {
        Self { incarnation: head.incarnation, sequence: head.sequence }
    }

    /// Whether a call was already applied.
    pub(super) fn covers(self, call: Self) -> bool {
        call <= self
    }
}

/// What a chunk remembers of one trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Heard {
    /// The last gradient or delta that is in the value.
    pub(super) push: Mark,
    /// The last value that replaced the chunk's.
    pub(super) set: Mark,
    /// How many of its gradients are in the value: its clock.
    pub(super) clock: u64,
}

/// Somebody who waits for a version: to see it, or to be told that its gradient's round was closed.
pub(super) struct Waiter {
    pub(super) peer: PeerId,
    pub(super) head: Head,
    pub(super) version: Version,
    pub(super) since: Now,
    /// What it wants the value as, where that is not the parameter's type.
    pub(super) half: Option<Half>,
    /// The ids of the rows that it wants, or what it wants to know of ids; nothing where it wants a whole value.
    pub(super) wish: Option<Wish>,
}

impl Waiter {
    /// One that wants to be told, and no value.
    pub(super) fn new(peer: PeerId, head: Head, version: Version, since: Now) -> Self {
        Self { peer, head, version, since, half: None, wish: None }
    }
}

/// A value that replaces the chunk's, and waits for updates that had arrived before it.
pub(super) struct LateSet {
    pub(super) lease: Lease,
    pub(super) call: Mark,
    pub(super) peer: PeerId,
    pub(super) head: Head,
    /// The version that comes first.
    pub(super) after: Version,
    /// Where in the journal it is.
    pub(super) position: u64,
    /// Since when its sender waits for an answer. Nothing when it was told that it takes long.
    pub(super) since: Option<Now>,
}

/// What a checkpoint says of a chunk's contributions that were not yet in the value. Their payloads are in the
/// journal, among much that is in the value already or came to nothing.
pub(super) struct Restoring {
    /// Where the journal was when the chunk was written; what comes from there on is new to it.
    pub(super) position: u64,
    pub(super) open: Vec<Open>,
}

/// A contribution to a chunk, or a value that replaces it, without the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) trainer: TrainerId,
    pub(super) call: Mark,
    pub(super) stage: Stage,
}

/// How far a contribution is that is not in the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Some of its parts are missing.
    Gathered,
    /// It waits for its round.
    Ahead,
    /// It is in the open round.
    Entered,
    /// It is a value that waits for the update that makes this version.
    Set(Version),
}

/// What a chunk holds.
pub(super) enum Content {
    /// A piece of a tensor.
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

/// A piece of a parameter.
pub(super) struct Chunk {
    pub(super) id: ChunkId,
    /// The length of its value; zero for a bucket, which has as many rows as came to be.
    pub(super) bytes: u32,
    pub(super) element_type: ElementType,
    /// Its parameter's.
    pub(super) rule: Arc<Prepared>,
    pub(super) version: Version,
    /// By trainer; of a lone one without memory of its own.
    pub(super) heard: SmallVec<[Heard; 1]>,
    pub(super) round: Round,
    pub(super) waiters: Vec<Waiter>,
    /// Since when the shard's list of waits says that somebody waits for it.
    pub(super) noted: Option<Now>,
    /// Whether it is about to run in step with others.
    pub(super) is_joined: bool,
    /// How many rounds, from the open one on, are known to be complete and are not closed, because an accelerator was
    /// not done or there was no lease: who takes part now does not change who took part then. At most two, the open one
    /// and the one ahead.
    pub(super) sealed: u8,
    /// A value that waits for its turn.
    pub(super) late: Option<Box<LateSet>>,
    /// The optimizer's state; of a chunk on an accelerator as it was when it was last stored, and none while it is
    /// under way.
    pub(super) states: Vec<Lease>,
    /// What it has on an accelerator, if it lives on one.
    pub(super) seat: Option<Box<Seat>>,
    /// While the journal is replayed: what was open when the checkpoint wrote this chunk.
    pub(super) restored: Option<Box<Restoring>>,
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
            version: Version(0),
            heard: SmallVec::new(),
            round: Round::default(),
            waiters: Vec::new(),
            noted: None,
            is_joined: false,
            sealed: 0,
            late: None,
            states: Vec::new(),
            seat: None,
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

    /// The value as it is now; whoever holds it keeps this version.
    pub(super) fn value(&self) -> Arc<Value> {
        Arc::clone(self.dense())
    }

    /// The value's bytes.
    pub(super) fn value_bytes(&self) -> &[u8] {
        self.dense().bytes()
    }

    /// Replaces the value, and gives up its halves. The version counts updates and stays.
    pub(super) fn set_value(&mut self, pool: &mut Pool, value: Lease) {
        pool.halves.forget(self.id);
        self.put_value(value);
    }

    /// Puts a value where there was none that anybody could have read.
    pub(super) fn put_value(&mut self, value: Lease) {
        self.content = Content::Dense(Arc::new(Value::new(value, self.bytes)));
    }

    /// Contributions that are not in the value yet, and a value that is not in its place.
    pub(super) fn open(&self) -> impl Iterator<Item = Open> {
        let late = |late: &LateSet| Open { trainer: late.head.trainer, call: late.call, stage: Stage::Set(late.after) };
        let sets = self.late.iter().map(move |one| late(one));
        self.round.open().chain(sets).chain(self.bucket().into_iter().flat_map(Bucket::open))
    }

    /// The oldest journal position that is not yet in the value.
    pub(super) fn oldest_position(&self) -> Option<u64> {
        let late = self.late.iter().map(|late| late.position);
        self.round
            .oldest_position()
            .into_iter()
            .chain(late)
            .chain(self.bucket().and_then(Bucket::oldest_position))
            .min()
    }

    /// Since when somebody waits for a version, or with a gradient or a value for its turn, or for the rest of a
    /// gradient.
    pub(super) fn waits_since(&self) -> Option<Now> {
        let gathered = self.bucket().and_then(Bucket::waits_since);
        let late = self.late.as_ref().and_then(|late| late.since);
        self.waiters.iter().map(|waiter| waiter.since).chain(self.round.waits_since()).chain(late).chain(gathered).min()
    }

    /// Ends the round, whose pieces are in the value: notes that they are, and gives the value to `send` for each of
    /// those who wait for it, or nothing to who wants it as halves that were not made.
    pub(super) fn close_round(
        &mut self,
        halves: &MadeHalves,
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

    /// What this chunk remembers of `trainer`.
    pub(super) fn heard_mut(&mut self, trainer: TrainerId) -> &mut Heard {
        heard_of(&mut self.heard, trainer)
    }

    /// What this chunk remembers of `trainer`, without making room for it.
    pub(super) fn heard(&self, trainer: TrainerId) -> Heard {
        self.heard.get(trainer.0 as usize).copied().unwrap_or_default()
    }

    /// Whether a push of `trainer` is in the value already. What was never heard of is older than every call.
    #[inline]
    pub(super) fn has_heard(&self, trainer: TrainerId, call: Mark) -> bool {
        match self.heard.get(trainer.0 as usize) {
            Some(heard) => heard.push.covers(call),
            None => Mark::default().covers(call),
        }
    }

    /// Leaves the value to those who read it and goes on with a copy, or, for a rule that overwrites every byte,
    /// with an empty place; without readers does nothing. It is about to be written: its halves are given up.
    pub(super) fn make_writable(&mut self, pool: &mut Pool) -> Result<(), Failure> {
        let (bytes, copies) = (self.bytes, self.rule.rule().algorithm != Algorithm::Sum);
        let Content::Dense(value) = &mut self.content else { panic!("a bucket is updated by rows") };
        // Who reads it holds a count; a count of one is ours, and nobody else can make it more.
        if 1 < Arc::strong_count(value) {
            let mut fresh = Value::new(pool.take(bytes)?, bytes);
            if copies {
                fresh.bytes_mut().copy_from_slice(value.bytes());
            }
            *value = Arc::new(fresh);
        }
        pool.halves.forget(self.id);
        Ok(())
    }

    /// Whether a frame at `position` of the journal is older than this chunk's restored state.
    pub(super) fn is_before_restored(&self, position: u64) -> bool {
        self.restored.as_ref().is_some_and(|restored| position < restored.position)
    }

    /// How many rounds were complete when a checkpoint wrote it, as far as the journal still has what was in them. A
    /// round without a contribution that was in it is not closed: whose are missing is said.
    pub(super) fn sealed_and_found(&self) -> (u8, Vec<TrainerId>) {
        let Some(restored) = &self.restored else { return (self.sealed, Vec::new()) };
        let missing = |stage| {
            let of_stage = restored.open.iter().filter(move |one| one.stage == stage);
            of_stage.filter(|one| !self.round.open().any(|found| found == **one)).map(|one| one.trainer)
        };
        let entered: Vec<TrainerId> = missing(Stage::Entered).collect();
        let ahead: Vec<TrainerId> = missing(Stage::Ahead).collect();
        match self.sealed {
            0 => (0, Vec::new()),
            _ if !entered.is_empty() => (0, entered),
            2 if !ahead.is_empty() => (1, ahead),
            sealed => (sealed, Vec::new()),
        }
    }

    /// What a checkpoint said of a contribution, while its chunk is restored.
    pub(super) fn open_in_checkpoint(&self, head: &Head) -> Option<Open> {
        let call = Mark::of(head);
        let open = self.restored.iter().flat_map(|restored| &restored.open);
        open.copied().find(|one| one.trainer == head.trainer && one.call == call)
    }

    /// Makes a gradient that is the next version as it stands just that, without a copy.
    pub(super) fn take_over(&mut self, pool: &mut Pool, gradient: Lease) {
        self.set_value(pool, gradient);
        self.version.0 += 1;
    }

    /// Turns the gradients of the round into the next version: in place when nobody reads the value, else into a fresh
    /// lease. The version of `step` is set here; `numbers` has those of the update before.
    pub(super) fn update(
        &mut self,
        kernels: &mut dyn Kernels,
        pool: &mut Pool,
        numbers: &mut Numbers,
        step: &Step,
    ) -> Result<(), Failure> {
        self.make_writable(pool)?;
        let bytes = self.bytes as usize;
        let Content::Dense(value) = &mut self.content else { panic!("a bucket is updated by rows") };
        let value = Arc::get_mut(value).expect("nobody else holds it");
        let count = self.states.len();
        let mut states: [&mut [u8]; STATES_MAX] = Default::default();
        for (state, lease) in states.iter_mut().zip(&mut self.states) {
            *state = &mut lease.bytes_mut()[..bytes];
        }
        let step = Step { version: Version(self.version.0 + 1), ..*step };
        kernels.update(Update {
            formula: numbers.formula(&self.rule, &step),
            element_type: self.element_type,
            parameter: value.bytes_mut(),
            states: &mut states[..count],
            gradients: &self.round.gradients(self.element_type, self.bytes),
        });
        self.version.0 += 1;
        Ok(())
    }
}

fn heard_of(heard: &mut SmallVec<[Heard; 1]>, trainer: TrainerId) -> &mut Heard {
    let index = trainer.0 as usize;
    if heard.len() <= index {
        heard.resize(index + 1, Heard::default());
    }
    &mut heard[index]
}

//! One shard of a server: its chunks, connections, journal and checkpoint, and the context of its work.
//!
//! Not here: what happens to them (`session` and the files that it calls).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::checkpointing::Checkpointing;
use super::chunk_table::ChunkTable;
use super::context::{Context, Origin};
use super::counters::ShardCounters;
use super::decided::RecordedRounds;
use super::device::Device;
use super::frames::{DeferredHeads, FrameCheck, ReceivingFrame};
use super::journal::ShardJournal;
use super::options::{NoRoom, ShardOptions};
use super::output::{CheckpointRequest, ServerOutput};
use super::pool::Pool;
use super::presence::{Presence, TrainerLife};
use super::reply::Replies;
use super::serving::Serving;
use crate::checkpoint::{Folder, Journal};
use crate::ids::{Generation, PeerId};
use crate::limits::ROWS_REPLAYED_BYTES;
use crate::port::{Accelerator, Kernels};
use crate::time::Now;

/// One shard of a server: a thread's chunks and connections.
// tidy: allow fields: the parts of a session, most of them types with methods of their own
pub struct Shard {
    pub(super) options: ShardOptions,
    pub(super) phase: Phase,
    pub(super) pool: Pool,
    pub(super) journal: ShardJournal,
    /// While the journal of the last process is replayed: the part of a decision that it has read.
    pub(super) replaying: Option<RecordedRounds>,
    /// Where its files are; none before [`Shard::restore`].
    pub(super) folder: Option<Folder>,
    /// Bytes of missed row updates that one turn replays, see [`ROWS_REPLAYED_BYTES`].
    pub(super) replays: u64,
    pub(super) kernels: Box<dyn Kernels>,
    pub(super) counters: Arc<ShardCounters>,
    /// Time of the turn in nanoseconds since the start of the loop; zero before the first one.
    pub(super) nanos: u64,
    /// Gradients replaced by zeros since start.
    pub(super) skipped: u64,
    pub(super) device: Option<Device>,
    pub(super) peers: BTreeMap<PeerId, ShardPeer>,
    pub(super) trainers: Presence,
    pub(super) deferred: DeferredHeads,
    /// Count of changes to state that checks read.
    pub(super) changes: u64,
    pub(super) checkpointing: Option<Checkpointing>,
    /// Requests for a checkpoint that the caller has not taken.
    pub(super) asked: Vec<CheckpointRequest>,
}

/// Progress of initialisation.
pub(super) enum Phase {
    /// No generation has begun.
    Empty,
    /// A generation is filling the table.
    Filling(ChunkTable),
    /// Initialised.
    Serving(Box<Serving>),
}

/// An accepted connection.
pub(super) struct ShardPeer {
    pub(super) origin: String,
    /// The transport and the reason for it.
    pub(super) transport: String,
    pub(super) life: Option<TrainerLife>,
    /// Frames whose payloads are being received, in the order of their heads.
    pub(super) receiving: VecDeque<ReceivingFrame>,
    /// Reusable allocations for the checks of later frames.
    pub(super) spare: Vec<FrameCheck>,
}

impl Shard {
    /// A shard without parameters.
    #[must_use]
    pub fn new(options: ShardOptions, kernels: Box<dyn Kernels>) -> Self {
        Self {
            phase: Phase::Empty,
            pool: Pool::new(options.shares_memory, options.memory_limit.clone()),
            trainers: Presence::new(options.grace),
            options,
            journal: ShardJournal::default(),
            replaying: None,
            folder: None,
            replays: ROWS_REPLAYED_BYTES,
            kernels,
            counters: Arc::default(),
            nanos: 0,
            skipped: 0,
            device: None,
            peers: BTreeMap::new(),
            deferred: DeferredHeads::default(),
            changes: 0,
            checkpointing: None,
            asked: Vec::new(),
        }
    }

    /// Adds an accelerator, to which the shard offers its chunks at initialisation or at the end of [`Shard::restore`].
    #[must_use]
    pub fn with_accelerator(mut self, accelerator: Box<dyn Accelerator>, no_room: NoRoom) -> Self {
        self.device = Some(Device::new(accelerator, no_room));
        self
    }

    /// Its counters, for readers on other threads.
    #[must_use]
    pub fn counters(&self) -> &Arc<ShardCounters> {
        &self.counters
    }

    /// Sets the time that rounds are measured with: nanoseconds since the start of the loop, above zero. Call it once
    /// a turn, before its events.
    #[inline]
    pub fn begin_turn(&mut self, nanos: u64) {
        self.nanos = nanos;
    }

    /// The generation that is served; zero before initialisation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        match &self.phase {
            Phase::Serving(serving) => serving.table.generation,
            Phase::Empty | Phase::Filling(_) => Generation(0),
        }
    }

    /// Runs `work` on a serving shard and flushes its replies.
    pub(super) fn turn(
        &mut self,
        now: Now,
        out: &mut Vec<ServerOutput>,
        work: impl FnOnce(&mut Serving, &mut Context<'_>),
    ) {
        let mut replies = Replies::default();
        if let Phase::Serving(serving) = &self.phase {
            self.changes += u64::from(serving.stalls.is_any());
        }
        if let Some((serving, mut cx)) = self.serving(now, None, Origin::Unlogged, &mut replies) {
            work(serving, &mut cx);
        }
        replies.flush(|peer| self.peers.contains_key(&peer), out);
    }

    /// The serving state, and the resources for a frame of this origin or, without a peer, for the shard's
    /// own work. None before the parameters are initialised.
    pub(super) fn serving<'a>(
        &'a mut self,
        now: Now,
        peer: Option<PeerId>,
        origin: Origin,
        replies: &'a mut Replies,
    ) -> Option<(&'a mut Serving, Context<'a>)> {
        let Phase::Serving(serving) = &mut self.phase else { return None };
        let (kernels, pool, trainers) = (self.kernels.as_mut(), &mut self.pool, &self.trainers);
        let (device, replay_left) = (self.device.as_mut(), self.replays);
        let (nanos, counters) = (self.nanos, self.counters.as_ref());
        let journal = &mut self.journal;
        Some((
            serving,
            Context {
                now,
                nanos,
                counters,
                kernels,
                pool,
                device,
                replies,
                trainers,
                peer,
                origin,
                journal,
                replay_left,
            },
        ))
    }

    /// Whether there is a checkpoint directory.
    pub(super) fn has_folder(&self) -> bool {
        self.folder.is_some()
    }

    /// Whether acknowledged frames are journalled.
    #[must_use]
    pub fn has_journal(&self) -> bool {
        self.journal.open.is_some()
    }

    /// Whether the last frame was refused because its record would have left too little of the disk free.
    #[must_use]
    pub fn is_short_of_disk(&self) -> bool {
        self.journal.open.as_ref().is_some_and(Journal::is_short)
    }
}

impl ShardPeer {
    pub(super) fn new(origin: String, transport: String) -> Self {
        Self { origin, transport, life: None, receiving: VecDeque::new(), spare: Vec::new() }
    }
}

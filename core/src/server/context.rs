//! The surroundings of a frame: where it comes from, and the resources that it is handled with.

use super::chunk::Chunk;
use super::contribution::{Contribution, PushHeader};
use super::counters::ShardCounters;
use super::device::Device;
use super::journal::ShardJournal;
use super::pool::Pool;
use super::presence::Presence;
use super::reply::Replies;
use crate::ids::PeerId;
use crate::port::Kernels;
use crate::time::Now;
use crate::wire::{Entry, Flags};

/// Where a frame comes from, and its journal record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A connection. It is a record, if a journal is kept.
    Live,
    /// A connection, or the shard's own turn. It is no record: its gradients come with those of their rounds.
    Unlogged,
    /// The journal, which a restart replays: the position of the record.
    Journal(u64),
}

impl Origin {
    pub(super) fn is_replay(self) -> bool {
        matches!(self, Self::Journal(_))
    }

    /// Whether a frame is older than the restored state of a chunk.
    #[inline]
    pub(super) fn is_before_restored(self, chunk: &Chunk) -> bool {
        matches!((self, chunk.restored), (Self::Journal(position), Some(restored)) if position < restored)
    }
}

/// Resources for handling one frame.
pub(super) struct Context<'a> {
    pub(super) now: Now,
    /// Time of the turn in nanoseconds since the start of the loop; zero in replay.
    pub(super) nanos: u64,
    pub(super) counters: &'a ShardCounters,
    pub(super) kernels: &'a mut dyn Kernels,
    pub(super) pool: &'a mut Pool,
    pub(super) device: Option<&'a mut Device>,
    pub(super) replies: &'a mut Replies,
    /// Connected trainers.
    pub(super) trainers: &'a Presence,
    /// The connection that sent the frame and gets its answers; none in replay and in the shard's own turns.
    pub(super) peer: Option<PeerId>,
    pub(super) origin: Origin,
    pub(super) journal: &'a mut ShardJournal,
    /// Remaining budget for replaying missed row updates, in bytes of weights.
    pub(super) replay_left: u64,
}

impl Context<'_> {
    /// The accelerator that holds chunks.
    pub(super) fn device(&mut self) -> &mut Device {
        self.device.as_deref_mut().expect("a chunk lives on it")
    }

    /// Whether decided rounds are recorded.
    #[inline]
    pub(super) fn keeps_journal(&self) -> bool {
        self.journal.open.is_some()
    }

    /// Acknowledges a gradient in the open round. A push that asks for the value is answered when the round closes, and
    /// one that the journal does not have when it has the round's record.
    #[inline]
    pub(super) fn acknowledge(&mut self, one: &mut Contribution, entry: Entry) {
        let PushHeader { peer, head, is_logged, .. } = &*one.sending;
        let waits = (head.flags.contains(Flags::WANT_VALUE) || !is_logged) && peer.is_some();
        one.since = waits.then_some(self.now);
        if !waits {
            self.replies.done(*peer, head, entry);
        }
    }

    /// Whether the frame is older than the restored state of a chunk.
    #[inline]
    pub(super) fn is_before_restored(&self, chunk: &Chunk) -> bool {
        self.origin.is_before_restored(chunk)
    }
}

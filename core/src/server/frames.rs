//! Frames on their way through a shard: deferred heads, posted receives, results of checks, and whole frames.

use std::collections::BTreeMap;

use super::group::SlotIndex;
use smallvec::SmallVec;

use super::context::Origin;
use super::reply::Refusal;
use crate::ids::PeerId;
use crate::memory::Lease;
use crate::time::Now;
use crate::wire::Frame;

/// Heads without an answer: work in progress at their arrival may remove the reason of their refusal.
#[derive(Default)]
pub(super) struct DeferredHeads {
    pub(super) heads: BTreeMap<PeerId, Frame>,
    /// The change count at the last check of the heads; `None` when an earlier frame was received since.
    looked_at: Option<u64>,
}

/// A frame whose receive is posted.
pub(super) struct ReceivingFrame {
    /// The refusal that answers the frame after its payload is discarded.
    pub(super) refusal: Option<Refusal>,
    pub(super) found: FrameCheck,
}

/// The payloads of a received frame.
pub(super) type Leases = SmallVec<[Lease; 1]>;

/// A checked frame with its payload.
#[derive(Clone, Copy)]
pub(super) struct ReceivedFrame<'a> {
    pub(super) now: Now,
    pub(super) peer: Option<PeerId>,
    pub(super) origin: Origin,
    pub(super) frame: &'a Frame,
    /// The entries of a push.
    pub(super) admitted: &'a [Admitted],
}

/// The result of a frame's check.
#[derive(Default)]
pub(super) struct FrameCheck {
    /// The change count at which the check passed.
    pub(super) right_at: Option<u64>,
    /// The entries of a push.
    pub(super) admitted: Vec<Admitted>,
}

/// An entry of a push that passed its check.
#[derive(Clone, Copy)]
pub(super) struct Admitted {
    pub(super) slot_index: SlotIndex,
    /// Whether the gradient is new; otherwise it is a duplicate, or older than the chunk's checkpoint.
    pub(super) is_new: bool,
}

impl DeferredHeads {
    /// Checks the heads again if the connection has one: an earlier frame of it was received.
    #[inline]
    pub(super) fn look_again_at(&mut self, peer: PeerId) {
        self.looked_at = self.looked_at.filter(|_| !self.heads.contains_key(&peer));
    }

    /// The heads to check, if anything has changed.
    pub(super) fn take_changed(&mut self, changes: u64) -> BTreeMap<PeerId, Frame> {
        if self.looked_at.replace(changes) == Some(changes) { BTreeMap::new() } else { std::mem::take(&mut self.heads) }
    }
}

impl Admitted {
    /// The entry of a gradient that is known to be new.
    pub(super) fn as_new(self) -> Self {
        Self { is_new: true, ..self }
    }
}

impl FrameCheck {
    /// The allocation, emptied for another frame.
    pub(super) fn cleared(self) -> Self {
        Self { right_at: None, ..self }
    }
}

/// The control message of a frame.
pub(super) fn decode<M: prost::Message + Default>(bytes: &[u8]) -> Result<M, Refusal> {
    M::decode(bytes).map_err(|error| Refusal::invalid(format!("the control message does not parse: {error}")))
}

//! Contributions that the value of a chunk does not contain yet: gradients of trainers, with the frame that brought
//! them, values that replace the chunk's, and the records of both in a checkpoint.
//!
//! Not here: where a contribution waits (`round`, `bucket`), and how it enters (`flow`).

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use super::call::CallId;
use super::group::SlotIndices;
use super::pool::Pool;
use super::waiters::Waiter;
use crate::accumulator::Sent;
use crate::dtype::{ElementType, Half};
use crate::error::Failure;
use crate::ids::{PeerId, Round, TrainerId, Version};
use crate::memory::Lease;
use crate::optim::Gradient;
use crate::rows::{RateChanges, RowLayout, RowsView};
use crate::time::Now;
use crate::wire::{Entry, Head, RowsPart, SettingMessage};

/// State shared by all gradients of one frame.
#[derive(Clone)]
pub(super) struct PushHeader {
    pub(super) call: CallId,
    pub(super) rate: Option<f64>,
    /// Numbers of the rule that replace the configured ones.
    pub(super) settings: Vec<SettingMessage>,
    /// Whether its rounds end without an update.
    pub(super) is_void: bool,
    /// Whether its sender has no gradient for the frame's parameters.
    pub(super) is_pass: bool,
    /// Whether it is a journal record. If not, its trainer has no answer, and sends it again after a restart.
    pub(super) is_logged: bool,
    /// Time of its arrival, as in `Context::nanos`.
    pub(super) nanos: u64,
    /// Count of earlier pushes.
    pub(super) arrival: u64,
    /// The connection to answer on admission or application; none for a replayed frame.
    pub(super) peer: Option<PeerId>,
    pub(super) head: Head,
}

/// The pushes of a shard.
#[derive(Default)]
pub(super) struct ShardPushes {
    /// How many there have been.
    pub(super) count: u64,
    /// Chunks that have a new gradient of the current one.
    pub(super) received: SlotIndices,
    /// Headers of earlier ones, whose memory is used again when no contribution has them.
    kept: VecDeque<Arc<PushHeader>>,
}

impl ShardPushes {
    /// Shares a header, in the memory of the oldest if that is free. `live` headers are in use at once in most rounds.
    pub(super) fn share(&mut self, header: PushHeader, live: usize) -> Arc<PushHeader> {
        let mut shared = None;
        if self.kept.len() > live {
            shared = self.kept.pop_front();
        }
        let shared = match shared.as_mut().and_then(Arc::get_mut) {
            Some(free) => {
                *free = header;
                shared.expect("it was just looked at")
            }
            None => Arc::new(header),
        };
        self.kept.push_back(Arc::clone(&shared));
        shared
    }
}

/// One trainer's gradient for one round of one chunk.
pub(super) struct Contribution {
    pub(super) trainer: TrainerId,
    /// Its round, in modes that count rounds.
    pub(super) round: Round,
    pub(super) element_type: ElementType,
    pub(super) bytes: u32,
    /// The gradient; `None` once it is folded into the sum, and where the trainer has none (then `bytes` is zero).
    pub(super) gradient: Option<Lease>,
    /// The rows of a bucket, in parts; empty when there are none.
    pub(super) rows: Vec<RowsLease>,
    /// Whether the frame brings a part that is not the last: such a frame does not wait for a round.
    pub(super) is_early_part: bool,
    /// Half-precision type of the answer, where requested.
    pub(super) half: Option<Half>,
    /// Start of the sender's wait: for the round to open, if it is one ahead, or for the value that it asked for.
    /// `None` once it was answered, also by a deadline error.
    pub(super) since: Option<Now>,
    pub(super) sending: Arc<PushHeader>,
}

// Larger values are moved by calls of memcpy on the hot path.
const _: () = assert!(size_of::<Contribution>() <= 128, "a contribution is moved by a few instructions");

/// Received rows, after the header of their part.
pub(super) struct RowsLease {
    pub(super) lease: Lease,
    pub(super) bytes: u32,
    pub(super) element_type: ElementType,
}

/// The part of a chunk that a set replaces.
pub(super) enum Replacement {
    /// The value.
    Value(Lease),
    /// The optimizer's state tensor of this index.
    State(usize, Lease),
    /// The updates that the optimizer's state has seen.
    Updates(u64),
    /// Rows of a tensor of a bucket: 0 is the weights, then each state.
    Rows(usize, RowsLease),
    /// The updates that a bucket has seen, and their rates.
    Progress(u64, RateChanges),
}

impl Replacement {
    /// The payload that it was made of.
    pub(super) fn payload(&self, bytes: u32) -> Option<Cow<'_, [u8]>> {
        let lease = match self {
            Self::Value(lease) | Self::State(_, lease) => lease,
            Self::Rows(_, rows) => &rows.lease,
            Self::Updates(_) => return None,
            Self::Progress(_, rates) => {
                let rates: Vec<u8> = rates.changes().iter().copied().flat_map(RateChanges::encode).collect();
                return (!rates.is_empty()).then_some(Cow::Owned(rates));
            }
        };
        Some(Cow::Borrowed(&lease.bytes()[..bytes as usize]))
    }
}

/// A set that waits for updates which arrived before it.
pub(super) struct DeferredSet {
    pub(super) replacement: Replacement,
    pub(super) call: CallId,
    pub(super) peer: Option<PeerId>,
    pub(super) head: Head,
    /// The version after which the set is applied.
    pub(super) after: Version,
    /// The entry and the control message of its frame, which a checkpoint carries over.
    pub(super) entry: Entry,
    pub(super) control: Vec<u8>,
    /// Start of the sender's wait; `None` after it was answered with a deadline error.
    pub(super) since: Option<Now>,
}

impl Contribution {
    /// A gradient that a decided round counts, without its payload.
    pub(super) fn recorded(header: PushHeader, entry: &Entry, bytes: u32) -> Self {
        Self {
            trainer: header.head.trainer,
            round: entry.round,
            element_type: entry.element_type,
            bytes,
            gradient: None,
            rows: Vec::new(),
            is_early_part: false,
            half: None,
            since: None,
            sending: Arc::new(header),
        }
    }

    #[inline]
    pub(super) fn gradient(&self) -> Option<Gradient<'_>> {
        let lease = self.gradient.as_ref()?;
        Some(Gradient { bytes: &lease.bytes()[..self.bytes as usize], element_type: self.element_type })
    }

    /// Copies a gradient out of its sender's memory.
    ///
    /// # Errors
    /// Without a free lease the view stays.
    pub(super) fn copy_out(&mut self, pool: &mut Pool) -> Result<(), Failure> {
        if let Some(gradient) = self.gradient.as_mut().filter(|lease| lease.is_foreign()) {
            let mut own = pool.take(gradient.len())?;
            gradient.copy_to(&mut own.bytes_mut()[..gradient.len() as usize]);
            *gradient = own;
        }
        Ok(())
    }

    /// Whether the journal has no record of its frame.
    #[inline]
    pub(super) fn is_unlogged(&self) -> bool {
        !self.sending.is_logged
    }

    pub(super) fn is_same_call(&self, head: &Head) -> bool {
        self.sending.call == CallId::of(head)
    }

    /// The sender as a waiter for a version, if the gradient was not replayed.
    pub(super) fn waiter(&self, version: Version, since: Now) -> Option<Waiter> {
        let PushHeader { peer, head, .. } = *self.sending;
        Some(Waiter { half: self.half, ..Waiter::new(peer?, head, version, since) })
    }

    /// The contribution with what the record of its round says of its push.
    pub(super) fn counted_as(mut self, header: PushHeader) -> Self {
        let PushHeader { rate, settings, is_void, is_pass, .. } = header;
        let sending = Arc::make_mut(&mut self.sending);
        (sending.rate, sending.settings, sending.is_void, sending.is_pass) = (rate, settings, is_void, is_pass);
        self
    }

    /// Leaves the contribution without its gradient, which does not count.
    pub(super) fn drop_gradient(&mut self) {
        (self.gradient, self.bytes) = (None, 0);
        self.rows.clear();
    }

    /// Redirects the answer to the resend.
    pub(super) fn answer_to(&mut self, again: &Self) {
        let sending = Arc::make_mut(&mut self.sending);
        (sending.peer, sending.head) = (again.sending.peer, again.sending.head);
        self.half = again.half;
    }
}

impl Sent for Contribution {
    type Sender = TrainerId;

    fn sender(&self) -> TrainerId {
        self.trainer
    }
}

impl RowsLease {
    /// The rows.
    pub(super) fn view(&self, layout: RowLayout) -> Result<RowsView<'_>, Failure> {
        let (_, rows) = RowsPart::decode(&self.lease.bytes()[..self.bytes as usize])?;
        RowsView::parse(layout.of(self.element_type)?, rows)
    }

    /// Whether both have equal ids and element types, with any values.
    pub(super) fn has_rows_of(&self, other: &Self, layout: RowLayout) -> bool {
        let (Ok(own), Ok(others)) = (self.view(layout), other.view(layout)) else { return false };
        self.element_type == other.element_type && own.ids().iter().eq(others.ids().iter())
    }
}

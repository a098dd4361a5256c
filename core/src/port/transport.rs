//! What moves frames.
//!
//! A frame arrives in two steps. Its head comes first, checked, as [`Event::Head`]; the session answers with
//! [`Submit::Land`], one place for each entry's payload; then the payload is there, checked, as
//! [`Event::Landed`]. A frame without payload is landed at once and has no first step. So a payload is read
//! straight into the place where it will live, and a transport that receives into memory of its own may give
//! back another lease than the one it was handed.
//!
//! Once a frame's places are there, the head of the next may come before its payload does: up to
//! [`Capabilities::landings`] frames of one connection land at once, in the order of their heads. What lies behind a
//! frame without payload is not read before that has landed, and it lands when all before it have. So whoever is told
//! of a head knows every frame before it, but for the payloads of those that it has given places to.
//!
//! A frame has left when its memory may be sent from again, or, where the receiver reads it in place, when the next
//! one may follow ([`Event::Left`]).
//!
//! A parcel in flight belongs to the transport. Every parcel comes back, by value, also on failure: with
//! [`Event::Sent`], [`Event::Landed`], or in [`Event::Gone`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::checksum::checksum;
use crate::error::Failure;
use crate::ids::{PeerId, Ticket};
use crate::memory::{Lease, LoanIn, LoanOut, SharedPlace, Stretch, Value};
use crate::wire::{Address, Frame};

/// A payload on its way out.
pub enum Outgoing {
    /// A chunk that others may be reading too.
    Value(Arc<Value>),
    /// The caller's own memory.
    Loan(LoanOut),
}

impl Outgoing {
    /// The payload.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Value(value) => value.bytes(),
            Self::Loan(loan) => loan.bytes(),
        }
    }

    /// The payload's length.
    #[must_use]
    pub fn len(&self) -> u32 {
        match self {
            Self::Value(value) => value.len(),
            Self::Loan(loan) => loan.len(),
        }
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The payload as something that the next one may go on, if it is a chunk.
    #[must_use]
    #[inline]
    pub fn stretch(&self) -> Option<Stretch<'_>> {
        match self {
            Self::Value(value) => Stretch::of(value.lease(), value.len()),
            Self::Loan(_) => None,
        }
    }

    /// Adds the payload to one that it lies behind; false when it does not.
    #[must_use]
    #[inline]
    pub fn goes_on<'a>(&'a self, stretch: &mut Stretch<'a>) -> bool {
        match self {
            Self::Value(value) => stretch.goes_on(value.lease(), value.len()),
            Self::Loan(_) => false,
        }
    }

    /// Where another process finds the payload, if it can.
    #[must_use]
    pub fn shared(&self) -> Option<SharedPlace<'_>> {
        match self {
            Self::Value(value) => value.lease().shared(),
            Self::Loan(loan) => loan.shared(),
        }
    }

    /// The payload's checksum; of a chunk it is reckoned once, however often it is sent.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        match self {
            Self::Value(value) => value.checksum(),
            Self::Loan(loan) => checksum(loan.bytes()),
        }
    }
}

/// A place for a payload on its way in. The places of a frame are in the order of its entries and have their
/// entries' lengths.
pub enum Incoming {
    /// The first `bytes` of a lease.
    Chunk {
        /// The lease.
        lease: Lease,
        /// How many of its bytes.
        bytes: u32,
    },
    /// The caller's own memory.
    Loan(LoanIn),
    /// Nowhere: the payload is read, not checked, and forgotten.
    Discard {
        /// Its length.
        bytes: u32,
    },
}

impl Incoming {
    /// The places that forget a frame's payloads, one for every entry that has one.
    #[must_use]
    pub fn nowhere(frame: &Frame) -> Vec<Self> {
        let lengths = frame.entries.iter().map(|entry| entry.bytes);
        lengths.filter(|bytes| *bytes > 0).map(|bytes| Self::Discard { bytes }).collect()
    }

    /// How many bytes it takes.
    #[must_use]
    pub fn len(&self) -> u32 {
        match self {
            Self::Chunk { bytes, .. } | Self::Discard { bytes } => *bytes,
            Self::Loan(loan) => loan.len(),
        }
    }

    /// Whether it takes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes to fill or that were filled; none for a payload that is discarded.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Chunk { lease, bytes } => &lease.bytes()[..*bytes as usize],
            Self::Loan(loan) => loan.bytes(),
            Self::Discard { .. } => &[],
        }
    }

    /// As [`Incoming::bytes`], to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Chunk { lease, bytes } => &mut lease.bytes_mut()[..*bytes as usize],
            Self::Loan(loan) => loan.bytes_mut(),
            Self::Discard { .. } => &mut [],
        }
    }
}

/// Work for a transport.
pub enum Submit {
    /// Send a frame. Frames to one peer leave in the order submitted.
    Send {
        /// To whom.
        peer: PeerId,
        /// Returned in [`Event::Sent`].
        ticket: Ticket,
        /// The frame; its entries' lengths are those of `body`.
        frame: Frame,
        /// The payloads, in the order of the entries that have one.
        body: Vec<Outgoing>,
    },
    /// Answer the [`Event::Head`] of this peer that has no answer yet: where the payloads of the entries go, one place
    /// for every entry with a payload.
    Land {
        /// From whom.
        peer: PeerId,
        /// The places.
        into: Vec<Incoming>,
    },
}

impl Submit {
    /// The peer it concerns.
    #[must_use]
    pub fn peer(&self) -> PeerId {
        match self {
            Self::Send { peer, .. } | Self::Land { peer, .. } => *peer,
        }
    }
}

/// What happened.
pub enum Event {
    /// A connection that we asked for is there; frames submitted before it leave now.
    Connected {
        /// The connection.
        peer: PeerId,
    },
    /// Somebody connected to us; their hello follows as a landed frame.
    Accepted {
        /// The connection.
        peer: PeerId,
        /// Where from, for error texts.
        origin: String,
    },
    /// A frame with a payload has begun to arrive; nothing more of this peer is read before [`Submit::Land`].
    Head {
        /// From whom.
        peer: PeerId,
        /// The frame.
        frame: Frame,
    },
    /// A frame is here, payload and all, and its checksums hold.
    Landed {
        /// From whom.
        peer: PeerId,
        /// The frame.
        frame: Frame,
        /// The places handed over in [`Submit::Land`], filled.
        body: Vec<Incoming>,
    },
    /// A frame has left, but its payload is still read where it is: [`Event::Sent`] follows when it is not.
    Left {
        /// To whom.
        peer: PeerId,
        /// As submitted.
        ticket: Ticket,
    },
    /// A frame has left: its payload's memory is not read any more.
    Sent {
        /// To whom.
        peer: PeerId,
        /// As submitted.
        ticket: Ticket,
        /// The parcels, back.
        body: Vec<Outgoing>,
    },
    /// The connection is over, or was never made. Nothing more comes from it.
    Gone {
        /// The connection.
        peer: PeerId,
        /// Why.
        reason: String,
        /// Frames that may not have left, with their parcels.
        unsent: Vec<(Ticket, Vec<Outgoing>)>,
        /// Places that were not filled: all those of each frame that was landing, in the order of the heads.
        unfilled: Vec<Incoming>,
    },
}

/// What a transport can do, asked once and true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name: `network`, `loopback`.
    pub name: &'static str,
    /// Whether payload checksums are computed and checked.
    pub checks_payload: bool,
    /// Frames of one connection that land at once, at most: 1 to [`LANDINGS_MAX`](crate::limits::LANDINGS_MAX).
    pub landings: usize,
}

/// Wakes a transport that waits, from any thread.
#[derive(Clone)]
pub struct Doorbell(Arc<dyn Fn() + Send + Sync>);

impl Doorbell {
    /// A doorbell that calls `ring`.
    pub fn new(ring: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(ring))
    }

    /// Wakes the transport; its next or current wait returns.
    pub fn ring(&self) {
        (self.0)();
    }
}

/// A way to move frames, owned by one thread.
pub trait Transport: Send {
    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Begins to connect; [`Event::Connected`] or [`Event::Gone`] follows. Never blocks.
    ///
    /// # Errors
    /// When the address cannot be used with this transport at all.
    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure>;

    /// Takes what fits, in order; what it leaves in the queue is back-pressure. Work for a peer that is gone is
    /// taken, and its parcels come back in an [`Event::Gone`] of that peer.
    ///
    /// # Errors
    /// When the device itself failed.
    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure>;

    /// Moves what can be moved without waiting, and says what happened.
    ///
    /// # Errors
    /// When the device itself failed.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure>;

    /// Ends a connection once everything submitted to it has left, or at once when the peer does not read;
    /// [`Event::Gone`] follows.
    fn close(&mut self, peer: PeerId);

    /// Waits until [`Transport::poll`] may have something to do, the doorbell rings, or `limit` has passed.
    fn wait(&mut self, limit: Duration);

    /// A doorbell for other threads.
    fn doorbell(&self) -> Doorbell;
}

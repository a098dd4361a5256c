//! Interface of a transport, which moves frames.
//!
//! A frame arrives in two steps. Its checked head comes first ([`Event::Head`]); the session posts one receive buffer
//! for each payload ([`Submit::PostReceive`]); then the payload is there, checked ([`Event::Received`]). A frame
//! without payload is received at once. So a payload is read straight into its final memory; a transport that receives
//! into its own memory may return another lease.
//!
//! After a receive is posted the next head may come before the payload: up to [`Capabilities::receives`] frames of one
//! connection are received at once, in the order of their heads. Bytes after a frame without payload are read only
//! after it is received, which happens after all earlier frames. So a session that gets a head has every earlier frame,
//! except the payloads of posted receives.
//!
//! A frame is transmitted when its memory may be sent from again, or, where the receiver reads it in place, when the
//! next one may follow ([`Event::Transmitted`]).
//!
//! A connection that takes answers ([`Event::TakesAnswers`]) gets the receive buffers of an answer with the request
//! ([`Submit::PostAnswer`]), and reports no head of it: a peer's device may write them before the answer is announced.
//!
//! A buffer in flight belongs to the transport. Every buffer is returned by value, also on failure: with
//! [`Event::Sent`], [`Event::Received`], [`Event::AnswerReturned`], or [`Event::Gone`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::checksum::checksum;
use crate::error::Failure;
use crate::ids::{PeerId, Ticket};
use crate::memory::shared::ForeignBytes;
use crate::memory::{Lease, LoanIn, LoanOut, SharedRange, Stretch, Value};
use crate::wire::{Address, Frame};

/// The payloads of a frame, in the order of its entries that have one. Most frames have one entry.
pub type Payloads = SmallVec<[Outgoing; 1]>;
/// The receive buffers of a frame, in the order of its entries that have a payload.
pub type ReceiveBuffers = SmallVec<[Incoming; 1]>;

/// A payload to send.
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

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The payload as the beginning of a run of adjacent chunks, if it is a chunk.
    #[must_use]
    #[inline]
    pub fn stretch(&self) -> Option<Stretch<'_>> {
        match self {
            Self::Value(value) => Stretch::of(value.lease(), value.len()),
            Self::Loan(_) => None,
        }
    }

    /// Appends the payload to a run that ends where it begins; false when it lies elsewhere.
    #[must_use]
    #[inline]
    pub fn goes_on<'a>(&'a self, stretch: &mut Stretch<'a>) -> bool {
        match self {
            Self::Value(value) => stretch.goes_on(value.lease(), value.len()),
            Self::Loan(_) => false,
        }
    }

    /// The payload's range in shared memory, if it has one.
    #[must_use]
    pub fn shared(&self) -> Option<SharedRange<'_>> {
        match self {
            Self::Value(value) => value.lease().shared(),
            Self::Loan(loan) => loan.shared(),
        }
    }

    /// The payload's checksum; of a chunk it is computed once.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        match self {
            Self::Value(value) => value.checksum(),
            Self::Loan(loan) => checksum(loan.bytes()),
        }
    }
}

/// A receive buffer. The buffers of a frame have the order and lengths of its entries' payloads.
pub enum Incoming {
    /// The first `bytes` of a lease.
    Chunk {
        /// The lease.
        lease: Lease,
        /// The number of its bytes that are used.
        bytes: u32,
    },
    /// The caller's own memory.
    Loan(LoanIn),
    /// None: the payload is read, not checked, and discarded.
    Discard {
        /// Its length.
        bytes: u32,
    },
}

impl Incoming {
    /// Buffers that discard a frame's payloads, one for each.
    #[must_use]
    pub fn discard_all(frame: &Frame) -> ReceiveBuffers {
        let lengths = frame.entries.iter().map(|entry| entry.bytes);
        lengths.filter(|bytes| *bytes > 0).map(|bytes| Self::Discard { bytes }).collect()
    }

    /// Whether it is memory that a device can be told of.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        matches!(self, Self::Loan(loan) if loan.mapped().is_some())
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

    /// Copies bytes of another process into it; none of a payload that is discarded.
    ///
    /// # Panics
    /// When they have another length.
    pub fn fill(&mut self, source: ForeignBytes<'_>) {
        match self {
            Self::Chunk { .. } => source.copy_to(self.bytes_mut()),
            Self::Loan(loan) => loan.fill(source),
            Self::Discard { .. } => {}
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
        /// The connection.
        peer: PeerId,
        /// Returned in [`Event::Sent`].
        ticket: Ticket,
        /// The frame; its entries' lengths are those of `body`.
        frame: Frame,
        /// The payloads, in the order of the entries that have one.
        body: Payloads,
    },
    /// Answer the pending [`Event::Head`] of this peer with one receive buffer for each payload.
    PostReceive {
        /// The connection.
        peer: PeerId,
        /// The buffers.
        into: ReceiveBuffers,
    },
    /// Receive the values of the answer to a request here, of which no head is reported. The request is submitted next
    /// to this peer. Only for a connection that takes answers.
    PostAnswer {
        /// The connection.
        peer: PeerId,
        /// The request, as its head says.
        request: Ticket,
        /// One buffer for each entry of the request.
        into: ReceiveBuffers,
    },
}

impl Submit {
    /// The peer it concerns.
    #[must_use]
    pub fn peer(&self) -> PeerId {
        match self {
            Self::Send { peer, .. } | Self::PostReceive { peer, .. } | Self::PostAnswer { peer, .. } => *peer,
        }
    }

    /// The event that returns its buffers, of a connection that is over.
    #[must_use]
    pub fn into_returned(self) -> Event {
        let (peer, unsent, unfilled) = match self {
            Self::Send { peer, ticket, body, .. } => (peer, vec![(ticket, body)], ReceiveBuffers::new()),
            Self::PostReceive { peer, into } => (peer, Vec::new(), into),
            Self::PostAnswer { peer, request, into } => return Event::AnswerReturned { peer, request, into },
        };
        Event::Gone { peer, reason: "the connection is over".to_owned(), unsent, unfilled }
    }
}

/// An event of a transport.
pub enum Event {
    /// A requested connection is established; frames submitted before are sent now.
    Connected {
        /// The connection.
        peer: PeerId,
    },
    /// A peer connected; its hello follows as a received frame.
    Accepted {
        /// The connection.
        peer: PeerId,
        /// The peer's address, for error texts.
        origin: String,
        /// The transport of the connection and the reason for it, for people: `shm: ...`.
        transport: String,
    },
    /// From now on the connection takes the receive buffers of answers with the requests ([`Submit::PostAnswer`]).
    TakesAnswers {
        /// The connection.
        peer: PeerId,
    },
    /// The transport of an accepted connection has changed.
    Moved {
        /// The connection.
        peer: PeerId,
        /// The transport and the reason for it, for people.
        transport: String,
    },
    /// A frame with a payload has begun to arrive; nothing more of this peer is read before [`Submit::PostReceive`].
    Head {
        /// The connection.
        peer: PeerId,
        /// The frame.
        frame: Frame,
    },
    /// A frame is received with its payload, and its checksums hold.
    Received {
        /// The connection.
        peer: PeerId,
        /// The frame.
        frame: Frame,
        /// The buffers of [`Submit::PostReceive`], or those of [`Submit::PostAnswer`] for these values, filled.
        body: ReceiveBuffers,
    },
    /// The buffers of [`Submit::PostAnswer`] that no value has filled, in order. The request is answered whole, or the
    /// connection is closing.
    AnswerReturned {
        /// The connection.
        peer: PeerId,
        /// The request.
        request: Ticket,
        /// The buffers.
        into: ReceiveBuffers,
    },
    /// A frame is transmitted, and its payload is still read in place; [`Event::Sent`] follows.
    Transmitted {
        /// The connection.
        peer: PeerId,
        /// As submitted.
        ticket: Ticket,
    },
    /// A send completed: its payload's memory is no longer read.
    Sent {
        /// The connection.
        peer: PeerId,
        /// As submitted.
        ticket: Ticket,
        /// The payloads.
        body: Payloads,
    },
    /// The connection is closed, or was never established. No further event names it, except returned buffers.
    Gone {
        /// The connection.
        peer: PeerId,
        /// The reason.
        reason: String,
        /// Frames that may not have been sent, with their payloads.
        unsent: Vec<(Ticket, Payloads)>,
        /// Unfilled receive buffers, in the order of the heads.
        unfilled: ReceiveBuffers,
    },
}

impl Event {
    /// The peer it concerns.
    #[must_use]
    #[inline]
    pub fn peer(&self) -> PeerId {
        match self {
            Self::Connected { peer }
            | Self::Accepted { peer, .. }
            | Self::TakesAnswers { peer }
            | Self::Moved { peer, .. }
            | Self::Head { peer, .. }
            | Self::Received { peer, .. }
            | Self::AnswerReturned { peer, .. }
            | Self::Transmitted { peer, .. }
            | Self::Sent { peer, .. }
            | Self::Gone { peer, .. } => *peer,
        }
    }
}

/// Capabilities of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name: `network`, `loopback`.
    pub name: &'static str,
    /// Whether payload checksums are computed and checked.
    pub checks_payload: bool,
    /// Most receives posted at once for one connection: 1 to [`RECEIVES_MAX`](crate::limits::RECEIVES_MAX).
    pub receives: usize,
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
    /// Its capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Begins to connect; [`Event::Connected`] or [`Event::Gone`] follows. Never blocks.
    ///
    /// # Errors
    /// When the address cannot be used with this transport at all.
    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure>;

    /// Takes work in order; the rest stays in the queue, which is back-pressure. Work for a closed peer is taken, and
    /// its buffers return in an [`Event::Gone`] of that peer.
    ///
    /// # Errors
    /// When the device itself failed.
    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure>;

    /// Makes progress without waiting and reports events.
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

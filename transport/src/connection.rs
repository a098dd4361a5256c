//! Interface of a connection, which TCP, shared memory and verbs implement.
//!
//! Not here: making a connection (`network::setup`), and closing it (`network::peer`).

use std::io;
use std::task::Waker;
use std::time::{Duration, Instant};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Payloads, ReceiveBuffers};
use pserver_core::wire::{Frame, WireError};
use thiserror::Error;
use tokio::net::TcpStream;

use crate::verbs::status::CompletionStatus;

/// The ticket and the body of a submitted frame.
pub(crate) type TicketedBody = (Ticket, Payloads);

/// The buffers of a connection that ended.
#[derive(Default)]
pub(crate) struct ReturnedBuffers {
    /// Frames that may be unsent.
    pub(crate) frames: Vec<TicketedBody>,
    /// Receive buffers that were not filled.
    pub(crate) unfilled: ReceiveBuffers,
    /// Receive buffers of answers that have not arrived.
    pub(crate) answers: Vec<(Ticket, ReceiveBuffers)>,
}

/// An established connection. One call serves many frames, so dynamic dispatch costs nothing per chunk.
pub(crate) trait Connection: Send {
    /// Frames that were not returned to the caller.
    fn len(&self) -> usize;

    /// Whether the last turn read nothing because the peer leaves its answers unread.
    fn is_paused(&self) -> bool;

    /// Queues a frame. A refusal, which the transport itself sends, has no ticket.
    fn send(&mut self, ticket: Option<Ticket>, frame: Frame, body: Payloads);

    /// Posts the receive buffers for the reported head.
    ///
    /// # Panics
    /// Without a waiting head, or with buffers of other lengths: the session counts them.
    fn post_receive(&mut self, buffers: ReceiveBuffers);

    /// Whether the receive buffers of answers are taken with the requests.
    fn takes_answers(&self) -> bool {
        false
    }

    /// Posts the receive buffers of the answer to the request that is sent next, one for each of its entries.
    ///
    /// # Panics
    /// Unless the connection takes answers: the session knows.
    fn post_answer(&mut self, request: Ticket, _into: ReceiveBuffers) {
        panic!("buffers for the answer to request {request} were posted; expected none on this connection");
    }

    /// Returns the frames of which nothing was sent.
    fn take_unbegun(&mut self) -> Vec<TicketedBody>;

    /// Ends the connection and returns its buffers. Memory that a device may still access is not returned.
    fn into_buffers(self: Box<Self>) -> ReturnedBuffers;

    /// Sends queued frames right after a submission, without reading. Returns whether more can be sent at once, or
    /// the waker must be registered by a turn.
    fn flush(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, ConnectionError>;

    /// Sends, and reads unless the peer has left too many answers unread, without blocking. Returns whether more can
    /// be done at once; otherwise `waker` is registered.
    fn turn(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        unread: Option<UnreadLimit>,
        events: &mut Vec<Event>,
    ) -> Result<bool, ConnectionError>;

    /// A turn of a connection that is closing: sends queued frames, then shuts the socket down. Returns whether the
    /// peer has closed, and whether more can be done at once.
    fn turn_closing(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> Result<(bool, bool), ConnectionError>;

    /// Records that the waker was called.
    fn socket_woken(&mut self) {}

    /// Whether the system must be asked often for news of the connection.
    fn needs_readiness(&self) -> bool {
        true
    }

    /// Whether memory must be polled, because the system does not report its changes.
    fn is_polled(&self) -> bool {
        false
    }

    /// Whether polling finds work.
    fn has_work(&mut self) -> bool {
        false
    }

    /// Requests a wake-up for later changes of polled memory, before this side sleeps.
    fn request_wakeup(&mut self) {}

    /// Cancels the request for a wake-up.
    fn cancel_wakeup(&mut self) {}

    /// Whether the peer reads payloads in place, whose return causes no wake-up.
    fn has_borrowed(&self) -> bool {
        false
    }

    /// The stream of a connection over TCP.
    fn tcp_stream(&self) -> Option<&TcpStream> {
        None
    }

    /// Takes the message of an [`Offer`](pserver_core::wire::Kind::Offer) frame that arrived over TCP.
    fn take_offer(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Takes the bytes that were read from the stream behind a switch to verbs.
    fn take_unread(&mut self) -> Vec<u8> {
        Vec::new()
    }

    /// Whether work that the connection has given to a device has not completed for longer than `limit`.
    fn is_stalled(&mut self, _now: Instant, _limit: Duration) -> bool {
        false
    }

    /// Whether anything arrived, where that is not certain once the connection is made.
    fn has_received(&self) -> bool {
        true
    }
}

/// The role of a side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionSide {
    /// The side that connected. Over verbs it names the addresses of payloads.
    Connecting = 0,
    /// The side that accepted. Over verbs its card moves the payloads.
    Accepting = 1,
}

/// The reason why sending stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendProgress {
    /// Everything was sent.
    All,
    /// The ring, the credits or the staging are exhausted until the peer answers.
    Full,
    /// The turn's budget is spent.
    BudgetSpent,
}

/// The amount of answers that a client may leave unread before nothing more is read from it.
#[derive(Clone, Copy)]
pub(crate) struct UnreadLimit {
    pub(crate) frames: usize,
    pub(crate) bytes: u64,
}

impl UnreadLimit {
    /// Whether queued answers reach the limit.
    pub(crate) fn is_reached(self, frames: usize, bytes: u64) -> bool {
        self.frames <= frames || self.bytes <= bytes
    }
}

/// The reason why a connection ended.
#[derive(Debug, Error)]
pub(crate) enum ConnectionError {
    #[error("closed by the peer")]
    Closed,
    #[error("closed by the peer in the middle of a frame")]
    Cut,
    #[error("reading: {0}")]
    Read(#[from] io::Error),
    #[error("writing: {0}")]
    Write(io::Error),
    #[error("{0}")]
    Wire(#[from] WireError),
    /// The peer violated the protocol.
    #[error("{0}")]
    Broken(String),
    /// The TCP connection, which signals the end of one over verbs, failed; or the device did.
    #[error("{0}")]
    Lost(String),
    /// The device failed, or reported something impossible.
    #[error("{0}")]
    Device(String),
    #[error("verbs: {0}")]
    Failed(CompletionStatus),
}

impl ConnectionError {
    /// Whether the peer violated the protocol.
    pub(crate) fn is_peers_fault(&self) -> bool {
        match self {
            Self::Wire(_) | Self::Broken(_) => true,
            Self::Failed(status) => status.is_peers_fault(),
            Self::Closed | Self::Cut | Self::Read(_) | Self::Write(_) | Self::Lost(_) | Self::Device(_) => false,
        }
    }

    /// Whether this side's device failed, independent of the peer.
    pub(crate) fn is_devices_fault(&self) -> bool {
        matches!(self, Self::Device(_))
    }
}

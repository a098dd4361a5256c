//! Handoff of an accepted connection from the listener's thread to a lane's.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};
use pserver_core::memory::shared::Board;
use pserver_core::wire::{ErrorCode, Frame, Scheme};

use super::wakeups::Wakeups;
use crate::tls::DetachedChannel;
use crate::verbs::{DeviceContext, OfferAnswer};

/// Connections that wait for a lane; further ones are refused as busy.
const ACCEPTED_MAX: usize = 64;

/// Sends accepted connections to one transport, from any thread.
#[derive(Clone)]
pub struct ConnectionSender {
    sender: Sender<AcceptedConnection>,
    wakeups: Arc<Wakeups>,
    device_context: DeviceContext,
}

/// An accepted connection of which exactly the hello was read.
pub(super) struct AcceptedConnection {
    pub(super) stream: AcceptedStream,
    pub(super) hello: Frame,
    pub(super) origin: String,
    /// The scheme of the listener, which decides what the connection may become.
    pub(super) scheme: Scheme,
}

/// The socket, between two runtimes.
pub(super) enum AcceptedStream {
    /// A TCP connection, with the answer to its offer of verbs if it made one.
    Tcp(DetachedChannel, Option<OfferAnswer>),
    Shm(UnixStream, Board),
}

impl AcceptedStream {
    /// The transport that carries the connection at a listener of `scheme`, and the reason for it. Where the server
    /// encrypts, it says so of each.
    pub(super) fn transport(&self, scheme: Scheme, encrypts: bool) -> String {
        let not_encrypted = if encrypts { "; not encrypted" } else { "" };
        let (channel, reason) = match self {
            Self::Shm(..) => return format!("shm: the peer is on this machine{not_encrypted}"),
            Self::Tcp(_, Some(Ok(_))) => return format!("verbs: the peer offers them{not_encrypted}"),
            Self::Tcp(channel, Some(Err(reason))) => (channel, format!("no verbs: {reason}")),
            Self::Tcp(channel, None) if scheme == Scheme::Tcp => {
                (channel, "the server listens on tcp:// alone".to_owned())
            }
            Self::Tcp(channel, None) => (channel, "the peer offers nothing else".to_owned()),
        };
        channel.suite().map_or_else(|| format!("tcp: {reason}"), |suite| format!("tls: {suite}; {reason}"))
    }
}

impl ConnectionSender {
    pub(super) fn new(wakeups: &Arc<Wakeups>, device_context: DeviceContext) -> (Self, Receiver<AcceptedConnection>) {
        let (sender, receiver) = bounded(ACCEPTED_MAX);
        (Self { sender, wakeups: Arc::clone(wakeups), device_context }, receiver)
    }

    /// The transport's device context, for threads that make its queue pairs.
    pub(super) fn device_context(&self) -> &DeviceContext {
        &self.device_context
    }

    /// Hands the connection over, or returns it with the reason for the refusal.
    pub(super) fn accept(&self, accepted: AcceptedConnection) -> Option<(AcceptedConnection, ErrorCode, &'static str)> {
        let refused = match self.sender.try_send(accepted) {
            Ok(()) => None,
            Err(TrySendError::Full(accepted)) => {
                Some((accepted, ErrorCode::Busy, "too many connections arrive at once"))
            }
            Err(TrySendError::Disconnected(accepted)) => Some((accepted, ErrorCode::Invalid, "this lane has stopped")),
        };
        self.wakeups.notify_wait();
        refused
    }
}

//! How an accepted connection comes from the listener's thread to a lane's.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};
use pserver_core::memory::shared::Board;
use pserver_core::wire::{ErrorCode, Frame, Scheme};

use super::wakeups::Wakeups;
use crate::verbs::{Answer, Hall};

/// Accepted connections that wait for a lane to look; more are refused as busy.
const ADOPTED_MAX: usize = 64;

/// Hands accepted connections to one transport, from any thread.
#[derive(Clone)]
pub struct Adopter {
    sender: Sender<Adopted>,
    wakeups: Arc<Wakeups>,
    hall: Hall,
}

/// A connection whose hello has been read, and not one byte more.
pub(super) struct Adopted {
    pub(super) caller: Caller,
    pub(super) hello: Frame,
    pub(super) origin: String,
    /// The scheme that the listener was bound with: it says what a connection may become.
    pub(super) scheme: Scheme,
}

/// The connection, on its way from one runtime to another.
pub(super) enum Caller {
    /// With the answer to its offer of verbs, if it made one.
    Tcp(TcpStream, Option<Answer>),
    Shm(UnixStream, Board),
}

impl Adopter {
    pub(super) fn new(wakeups: &Arc<Wakeups>, hall: Hall) -> (Self, Receiver<Adopted>) {
        let (sender, receiver) = bounded(ADOPTED_MAX);
        (Self { sender, wakeups: Arc::clone(wakeups), hall }, receiver)
    }

    /// Where the transport's ends of pairs are made, by others than itself.
    pub(super) fn hall(&self) -> &Hall {
        &self.hall
    }

    /// Hands the connection over, or gives it back with the reason why not.
    pub(super) fn adopt(&self, adopted: Adopted) -> Option<(Adopted, ErrorCode, &'static str)> {
        let refused = match self.sender.try_send(adopted) {
            Ok(()) => None,
            Err(TrySendError::Full(adopted)) => Some((adopted, ErrorCode::Busy, "too many connections arrive at once")),
            Err(TrySendError::Disconnected(adopted)) => Some((adopted, ErrorCode::Invalid, "this lane has stopped")),
        };
        self.wakeups.ring();
        refused
    }
}

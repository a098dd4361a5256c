//! Control socket of a shared-memory connection: wake-ups, descriptors of arenas, and the end. Before the handoff to a
//! lane it also carries the hello, and a refusal.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use pserver_core::wire::{Frame, HEADER_BYTES, Kind, Prefix};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::ConnectionError;
use super::rings::{ShmRings, ShmSignals, WAKE};

/// Announces an arena, with its descriptor. Arenas are numbered in order of arrival; no number is reused.
pub(super) const ARENA: u8 = b'a';
/// Announces an arena in which payloads live, so that no payload is copied into it to be sent.
pub(super) const PAYLOAD_ARENA: u8 = b'h';
/// Announces that the arena of the following four-byte number is gone.
pub(super) const GONE: u8 = b'g';
/// Descriptors accepted with one message.
const DESCRIPTORS_MAX: usize = 4;
/// The longest refusal after its header.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// State of the receive side of the socket.
#[derive(Default)]
pub(super) struct ControlReceiver {
    /// Whether the peer has closed.
    pub(super) is_closed: bool,
    descriptors: VecDeque<OwnedFd>,
    /// The part of a refusal that has arrived.
    refusal: Vec<u8>,
    /// The part of a `GONE` message that has arrived.
    gone_bytes: Vec<u8>,
    /// Counted messages that were read.
    read: u64,
}

/// The send side of the socket.
pub(super) struct ControlSender<'a> {
    stream: &'a UnixStream,
    signals: &'a ShmSignals,
}

/// A message on the socket.
pub(super) enum ControlMessage {
    /// An arena of the peer, and whether payloads live in it.
    Arena { descriptor: OwnedFd, holds_payloads: bool },
    /// The arena of this number is gone.
    Gone(u32),
    /// The listener's refusal.
    Refused(Frame),
}

impl<'a> ControlSender<'a> {
    pub(super) fn new(stream: &'a UnixStream, rings: &'a ShmRings) -> Self {
        Self { stream, signals: rings.signals() }
    }

    /// Sends a message, with a descriptor if it has one. It is counted first, so that a peer that is woken by it reads
    /// it.
    pub(super) fn send(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.signals.count_message();
        send(self.stream.as_fd(), bytes, descriptor)
    }
}

impl ControlReceiver {
    /// Registers `waker`. The socket is read if `reads` is set, if a counted message is unread, or if the peer has
    /// closed; otherwise it holds wake-ups only, which need no reading.
    pub(super) fn poll_socket(
        &mut self,
        stream: &UnixStream,
        waker: &Waker,
        (reads, count_message): (bool, u64),
        messages: &mut Vec<ControlMessage>,
    ) -> Result<(), ConnectionError> {
        let mut context = Context::from_waker(waker);
        while !self.is_closed && stream.poll_read_ready(&mut context).is_ready() {
            if !reads && self.read == count_message && !is_closed_there(stream) {
                // Clears the runtime's readiness, so that it reports new bytes.
                let _ = stream.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
                continue;
            }
            let received = stream.try_io(Interest::READABLE, || self.receive(stream.as_fd()));
            self.handle_received(received, messages)?;
        }
        Ok(())
    }

    /// Reads all available messages, whatever the runtime reports.
    pub(super) fn read_socket_now(
        &mut self,
        stream: &UnixStream,
        messages: &mut Vec<ControlMessage>,
    ) -> Result<(), ConnectionError> {
        loop {
            match self.receive(stream.as_fd()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                received => self.handle_received(received, messages)?,
            }
            if self.is_closed {
                return Ok(());
            }
        }
    }

    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<([u8; 64], usize)> {
        let mut bytes = [0; 64];
        let received = receive(socket, &mut bytes, &mut self.descriptors)?;
        Ok((bytes, received))
    }

    fn handle_received(
        &mut self,
        received: io::Result<([u8; 64], usize)>,
        messages: &mut Vec<ControlMessage>,
    ) -> Result<(), ConnectionError> {
        match received {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // After any error nothing more comes; the ring holds what was written before.
            Err(_) | Ok((_, 0)) => self.is_closed = true,
            Ok((bytes, count)) => {
                for byte in &bytes[..count] {
                    let message = self.handle_byte(*byte)?;
                    self.read +=
                        u64::from(matches!(message, Some(ControlMessage::Arena { .. } | ControlMessage::Gone(_))));
                    messages.extend(message);
                }
            }
        }
        Ok(())
    }

    fn handle_byte(&mut self, byte: u8) -> Result<Option<ControlMessage>, ConnectionError> {
        match byte {
            _ if !self.gone_bytes.is_empty() || self.refusal.is_empty() && byte == GONE => {
                self.gone_bytes.push(byte);
                Ok(self.gone())
            }
            _ if !self.refusal.is_empty() || byte == b'P' => {
                self.refusal.push(byte);
                self.refused()
            }
            WAKE => Ok(None),
            ARENA | PAYLOAD_ARENA => {
                let arena = self.descriptors.pop_front();
                let missing = || ConnectionError::Broken("an arena was announced without its descriptor".to_owned());
                let holds_payloads = byte == PAYLOAD_ARENA;
                arena.map(|descriptor| Some(ControlMessage::Arena { descriptor, holds_payloads })).ok_or_else(missing)
            }
            other => Err(ConnectionError::Broken(format!("byte {other:#04x} on the socket has no meaning"))),
        }
    }

    fn gone(&mut self) -> Option<ControlMessage> {
        let [_, number @ ..] = <[u8; 5]>::try_from(self.gone_bytes.as_slice()).ok()?;
        self.gone_bytes.clear();
        Some(ControlMessage::Gone(u32::from_le_bytes(number)))
    }

    fn refused(&self) -> Result<Option<ControlMessage>, ConnectionError> {
        let Some(header) = self.refusal.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let prefix = Prefix::decode(header)?;
        if prefix.head().kind != Kind::Refused || prefix.rest_bytes() > REFUSAL_BYTES_MAX {
            return Err(ConnectionError::Broken("a frame on the socket is not a refusal".to_owned()));
        }
        let rest = &self.refusal[HEADER_BYTES..];
        if rest.len() < prefix.rest_bytes() {
            return Ok(None);
        }
        Ok(Some(ControlMessage::Refused(prefix.finish(rest)?)))
    }
}

/// Whether the runtime has seen the peer's close.
fn is_closed_there(stream: &UnixStream) -> bool {
    let ready = pin!(stream.ready(Interest::READABLE)).poll(&mut Context::from_waker(Waker::noop()));
    // A socket in an error state is read, to get the error.
    !matches!(ready, Poll::Ready(Ok(ready)) if !ready.is_read_closed())
}

/// Sends `bytes` whole, with a descriptor at their first byte, or fails.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "there is space for one descriptor");
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives into `bytes`; appends the descriptors that came with them to `descriptors`.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    descriptors: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(received.bytes)
}

//! The socket of a connection: wake-ups, descriptors, and its end. Before a lane has taken the connection it also
//! carries the hello one way, and a refusal the other.

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

use super::Ended;
use super::rings::{Rings, Shore, WAKE};

/// What comes before an arena's descriptor; arenas are numbered in the order in which they
/// come, and no number is used again.
pub(super) const ARENA: u8 = b'a';
/// The same for memory in which payloads are at home, and into which none are put to be sent.
pub(super) const HOME: u8 = b'h';
/// What comes before the number of an arena that is gone, in four bytes.
pub(super) const GONE: u8 = b'g';
/// Descriptors in one message.
const DESCRIPTORS_MAX: usize = 4;
/// A refusal is short.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// What has come over the socket and was not understood yet.
#[derive(Default)]
pub(super) struct Post {
    /// Whether the other side has closed.
    pub(super) is_over: bool,
    descriptors: VecDeque<OwnedFd>,
    /// The beginning of a refusal.
    refusal: Vec<u8>,
    /// What came of the word that an arena is gone.
    going: Vec<u8>,
    /// Letters that were read and that the other side counts.
    read: u64,
}

/// Where this side's letters leave.
pub(super) struct Desk<'a> {
    stream: &'a UnixStream,
    shore: &'a Shore,
}

/// What the socket brought.
pub(super) enum Letter {
    /// An arena of the other side, and whether payloads are at home there.
    Arena { descriptor: OwnedFd, is_home: bool },
    /// The arena of this number is gone.
    Gone(u32),
    /// The listener's last word.
    Refused(Frame),
}

impl<'a> Desk<'a> {
    pub(super) fn new(stream: &'a UnixStream, rings: &'a Rings) -> Self {
        Self { stream, shore: rings.shore() }
    }

    /// Sends a letter, with a descriptor if it brings one. It is counted first, so that who is woken by it reads it.
    pub(super) fn send(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        self.shore.posted();
        send(self.stream.as_fd(), bytes, descriptor)
    }
}

impl Post {
    /// Leaves `waker` to be called when something comes. What is there is read if `reads`, if a letter of `posted` is
    /// not read yet, or if the other side has closed; else it is wake-ups, which have done what they are for.
    pub(super) fn look(
        &mut self,
        stream: &UnixStream,
        waker: &Waker,
        (reads, posted): (bool, u64),
        letters: &mut Vec<Letter>,
    ) -> Result<(), Ended> {
        let mut context = Context::from_waker(waker);
        while !self.is_over && stream.poll_read_ready(&mut context).is_ready() {
            if !reads && self.read == posted && !is_closed_there(stream) {
                // The runtime is told that nothing is there, and tells of what comes.
                let _ = stream.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
                continue;
            }
            let received = stream.try_io(Interest::READABLE, || self.receive(stream.as_fd()));
            self.sort(received, letters)?;
        }
        Ok(())
    }

    /// Reads all there is, whatever the runtime knows of it.
    pub(super) fn look_at_once(&mut self, stream: &UnixStream, letters: &mut Vec<Letter>) -> Result<(), Ended> {
        loop {
            match self.receive(stream.as_fd()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                received => self.sort(received, letters)?,
            }
            if self.is_over {
                return Ok(());
            }
        }
    }

    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<([u8; 64], usize)> {
        let mut bytes = [0; 64];
        let received = receive(socket, &mut bytes, &mut self.descriptors)?;
        Ok((bytes, received))
    }

    fn sort(&mut self, received: io::Result<([u8; 64], usize)>, letters: &mut Vec<Letter>) -> Result<(), Ended> {
        match received {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Whatever it says, nothing more comes; what is in the ring was written before.
            Err(_) | Ok((_, 0)) => self.is_over = true,
            Ok((bytes, count)) => {
                for byte in &bytes[..count] {
                    let letter = self.understand(*byte)?;
                    self.read += u64::from(matches!(letter, Some(Letter::Arena { .. } | Letter::Gone(_))));
                    letters.extend(letter);
                }
            }
        }
        Ok(())
    }

    fn understand(&mut self, byte: u8) -> Result<Option<Letter>, Ended> {
        match byte {
            _ if !self.going.is_empty() || self.refusal.is_empty() && byte == GONE => {
                self.going.push(byte);
                Ok(self.gone())
            }
            _ if !self.refusal.is_empty() || byte == b'P' => {
                self.refusal.push(byte);
                self.refused()
            }
            WAKE => Ok(None),
            ARENA | HOME => {
                let arena = self.descriptors.pop_front();
                let missing = || Ended::Broken("an arena was announced without its descriptor".to_owned());
                let is_home = byte == HOME;
                arena.map(|descriptor| Some(Letter::Arena { descriptor, is_home })).ok_or_else(missing)
            }
            other => Err(Ended::Broken(format!("byte {other:#04x} on the socket has no meaning"))),
        }
    }

    fn gone(&mut self) -> Option<Letter> {
        let [_, number @ ..] = <[u8; 5]>::try_from(self.going.as_slice()).ok()?;
        self.going.clear();
        Some(Letter::Gone(u32::from_le_bytes(number)))
    }

    fn refused(&self) -> Result<Option<Letter>, Ended> {
        let Some(header) = self.refusal.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let prefix = Prefix::decode(header)?;
        if prefix.head().kind != Kind::Refused || prefix.rest_bytes() > REFUSAL_BYTES_MAX {
            return Err(Ended::Broken("a frame on the socket is not a refusal".to_owned()));
        }
        let rest = &self.refusal[HEADER_BYTES..];
        if rest.len() < prefix.rest_bytes() {
            return Ok(None);
        }
        Ok(Some(Letter::Refused(prefix.finish(rest)?)))
    }
}

/// Whether the runtime has heard that nothing more comes.
fn is_closed_there(stream: &UnixStream) -> bool {
    let ready = pin!(stream.ready(Interest::READABLE)).poll(&mut Context::from_waker(Waker::noop()));
    // A socket that cannot be asked is read, and says why.
    !matches!(ready, Poll::Ready(Ok(ready)) if !ready.is_read_closed())
}

/// Sends `bytes`, with a descriptor on the first of them; all or an error.
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

/// Receives into `bytes`, and puts the descriptors that came with it at the end of `descriptors`.
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

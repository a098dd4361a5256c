//! Chunks on a socket of the baseline server.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg};
use smallvec::SmallVec;

use crate::job::Poll;

/// Linux accepts no more slices in one call.
const SLICES_MAX: usize = 1024;
/// The header of a chunk: index, length and round.
pub(super) const HEAD_BYTES: usize = 16;

/// A blocking socket that can be asked not to block, call by call.
pub(super) struct Socket {
    stream: TcpStream,
    poll: Poll,
    /// A longer body is of pieces of this length, each of which the system is told of.
    piece_bytes: usize,
}

/// How far one direction of a round is.
pub(super) struct RoundCursor {
    pub(super) chunk: usize,
    /// Bytes of this chunk, its head with them, that are done, and that there are.
    done: usize,
    bytes: usize,
}

pub(super) fn head(chunk: usize, bytes: usize, round: u64) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&u32::try_from(chunk).expect("chunks are few").to_le_bytes());
    head[4..8].copy_from_slice(&u32::try_from(bytes).expect("chunks are short").to_le_bytes());
    head[8..].copy_from_slice(&round.to_le_bytes());
    head
}

impl RoundCursor {
    /// At the begin of the first chunk, which has so many bytes with its head.
    pub(super) fn new(bytes: usize) -> Self {
        Self { chunk: 0, done: 0, bytes }
    }

    /// The remaining bytes of header and body.
    pub(super) fn rest<'a>(&self, head: &'a [u8], body: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        (&head[self.done.min(HEAD_BYTES)..], &body[self.done.saturating_sub(HEAD_BYTES)..])
    }

    /// As [`rest`](Self::rest), to write.
    pub(super) fn rest_mut<'a>(&self, head: &'a mut [u8], body: &'a mut [u8]) -> (&'a mut [u8], &'a mut [u8]) {
        (&mut head[self.done.min(HEAD_BYTES)..], &mut body[self.done.saturating_sub(HEAD_BYTES)..])
    }

    /// Goes on by `count` bytes, perhaps to the next chunk, whose length `next` tells.
    pub(super) fn advance(&mut self, count: usize, next: impl Fn(usize) -> usize) {
        self.done += count;
        if self.done == self.bytes {
            let chunk = self.chunk + 1;
            *self = Self { chunk, done: 0, bytes: next(chunk) };
        }
    }
}

impl Socket {
    pub(super) fn new(stream: TcpStream, poll: Poll, piece_bytes: usize) -> Result<Self> {
        stream.set_nodelay(true).context("the socket refuses TCP_NODELAY")?;
        Ok(Self { stream, poll, piece_bytes })
    }

    /// Sends what the socket takes now of a head and a body.
    pub(super) fn send_now(&self, head: &[u8], body: &[u8]) -> io::Result<usize> {
        self.send(head, body, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    fn send(&self, head: &[u8], body: &[u8], flags: SendFlags) -> io::Result<usize> {
        let body = body.chunks(self.piece_bytes).take(SLICES_MAX - 1).map(IoSlice::new);
        let pieces: SmallVec<[IoSlice<'_>; 2]> = std::iter::once(IoSlice::new(head)).chain(body).collect();
        Ok(sendmsg(&self.stream, &pieces, &mut SendAncillaryBuffer::default(), flags)?)
    }

    /// Receives what is there of a head and a body, or with `may_block` everything.
    pub(super) fn receive(&self, head: &mut [u8], body: &mut [u8], may_block: bool) -> io::Result<usize> {
        let flags = if may_block { RecvFlags::WAITALL } else { RecvFlags::DONTWAIT };
        let body = body.chunks_mut(self.piece_bytes).take(SLICES_MAX - 1).map(IoSliceMut::new);
        let mut pieces: SmallVec<[IoSliceMut<'_>; 2]> = std::iter::once(IoSliceMut::new(head)).chain(body).collect();
        Ok(recvmsg(&self.stream, &mut pieces, &mut RecvAncillaryBuffer::default(), flags)?.bytes)
    }

    /// Waits until the socket has something, or with `to_write` takes something.
    pub(super) fn ready(&self, to_write: bool) -> Result<()> {
        let flags = if to_write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        poll(&mut [PollFd::new(&self.stream, flags)], None).context("waiting for a socket")?;
        Ok(())
    }

    /// Reads the chunk that must come next; false when the other end has hung up before it.
    pub(super) fn read_chunk(&self, chunk: usize, body: &mut [u8]) -> Result<bool> {
        let mut found = [0; HEAD_BYTES];
        let whole = HEAD_BYTES + body.len();
        let mut cursor = RoundCursor::new(whole);
        while cursor.chunk == 0 {
            let (first, second) = cursor.rest_mut(&mut found, body);
            let received = if self.poll == Poll::Block {
                self.receive(first, second, true)
            } else {
                let mut received = Err(ErrorKind::WouldBlock.into());
                let is_there = super::turns::look(self.poll, || {
                    received = self.receive(first, second, false);
                    !matches!(&received, Err(error) if error.kind() == ErrorKind::WouldBlock)
                });
                if is_there { received } else { self.receive(first, second, true) }
            };
            match received {
                Ok(0) => return Ok(false),
                Ok(count) => cursor.advance(count, |_| whole),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(error) => return Err(error).context("reading from a trainer"),
            }
        }
        let expected = head(chunk, body.len(), 0);
        ensure!(found[..8] == expected[..8], "a head of {found:?}; expected one that begins {:?}", &expected[..8]);
        Ok(true)
    }

    /// Writes a head and a body.
    pub(super) fn write_all(&self, head: &[u8], body: &[u8]) -> Result<()> {
        let whole = HEAD_BYTES + body.len();
        let mut cursor = RoundCursor::new(whole);
        while cursor.chunk == 0 {
            let (first, second) = cursor.rest(head, body);
            match self.send(first, second, SendFlags::NOSIGNAL) {
                Ok(count) => cursor.advance(count, |_| whole),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("writing to a trainer"),
            }
        }
        Ok(())
    }
}

//! Frames on their way in from one connection.

use std::io::{self, IoSliceMut, Read};

use pserver_core::ids::PeerId;
use pserver_core::port::{Event, Incoming};
use pserver_core::wire::{Flags, Frame, HEADER_BYTES, Prefix, WireError};
use socket2::SockRef;
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::checks::Checks;
use super::{Pause, SLICES_MAX, TURN_BYTES, TURN_FRAMES};
use crate::payload::Landing;

/// Heads and small payloads are read through a buffer of this size, so that many cost one call.
const BUFFER_BYTES: usize = 64 * 1024;
/// A payload with more than this to come is read straight into its places; below it one call more costs more
/// than the copy.
const DIRECT_BYTES: u64 = 16 * 1024;
/// Read beyond a large payload: enough for the next head, and little of the next payload, which would be copied.
const AHEAD_BYTES: usize = 4 * 1024;
/// One call reads at most this much straight into places: it is still in cache when its checksum is reckoned.
const CALL_BYTES: usize = 256 * 1024;
/// A buffer for long entry tables and control messages is kept up to this size.
const REST_BYTES_KEPT: usize = 256 * 1024;

/// What has arrived and what is expected next.
pub(super) struct Reader {
    buffer: Box<[u8]>,
    /// The bytes in the buffer that were not looked at yet are `start..end`.
    start: usize,
    end: usize,
    /// The part of a rest that is longer than the buffer.
    rest: Vec<u8>,
    /// How much of the buffer a read may fill; little while payloads are large.
    ahead: usize,
    /// Who sends says whether a payload is checked: a proxy may hide from us that it is on our host. This side only
    /// insists.
    insists: bool,
    state: State,
}

enum State {
    Header,
    Rest(Prefix),
    /// The head was reported; its places have not come yet.
    Held(Frame),
    Payload(Landing),
}

/// Why nothing more comes from a connection.
#[derive(Debug, Error)]
pub(super) enum Ended {
    #[error("closed by the peer")]
    Closed,
    #[error("closed by the peer in the middle of a frame")]
    Cut,
    #[error("reading: {0}")]
    Read(#[from] io::Error),
    #[error("{0}")]
    Wire(#[from] WireError),
}

impl Reader {
    pub(super) const BUFFER_BYTES: usize = BUFFER_BYTES;

    pub(super) fn new(checks: Checks) -> Self {
        Self {
            insists: checks == Checks::Always,
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            rest: Vec::new(),
            ahead: BUFFER_BYTES,
            state: State::Header,
        }
    }

    /// Begins with bytes that were read before.
    pub(super) fn preload(&mut self, bytes: &[u8]) {
        assert!(self.end == 0, "nothing was read yet");
        self.buffer[..bytes.len()].copy_from_slice(bytes);
        self.end = bytes.len();
    }

    /// Reads until nothing is there, a head waits for its places, or the turn is over.
    pub(super) fn turn(&mut self, peer: PeerId, stream: &TcpStream, events: &mut Vec<Event>) -> Result<Pause, Ended> {
        let (mut bytes, before, mut drained) = (0, events.len(), false);
        loop {
            while self.advance(peer, events)? {}
            if matches!(self.state, State::Held(_)) {
                return Ok(Pause::Idle);
            }
            if drained {
                return Ok(Pause::Blocked);
            }
            if bytes >= TURN_BYTES || events.len() - before >= TURN_FRAMES {
                return Ok(Pause::Turn);
            }
            match self.read(stream) {
                Err(Ended::Read(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Pause::Blocked);
                }
                Err(error) => return Err(error),
                Ok((read, short)) => (bytes, drained) = (bytes + read, short),
            }
        }
    }

    /// The places for the frame whose head was reported.
    ///
    /// # Panics
    /// When no head waits, or the places do not fit: the session counts.
    pub(super) fn land(&mut self, places: Vec<Incoming>) {
        match std::mem::replace(&mut self.state, State::Header) {
            State::Held(frame) => self.state = State::Payload(Landing::new(frame, places)),
            _ => panic!("places were handed over, but no head waits for them"),
        }
    }

    /// Gives back the places that were not filled.
    pub(super) fn take_unfilled(&mut self) -> Vec<Incoming> {
        match std::mem::replace(&mut self.state, State::Header) {
            State::Payload(landing) => landing.into_parts().1,
            _ => Vec::new(),
        }
    }

    /// Reads and forgets; for a connection that is ending. Returns whether the peer has closed too.
    pub(super) fn discard(&mut self, stream: &TcpStream) -> io::Result<bool> {
        let (bytes, _) = receive(stream, &mut [IoSliceMut::new(&mut self.buffer)])?;
        Ok(bytes == 0)
    }

    /// One step with what is in the buffer; false when more must be read first, or places must come.
    fn advance(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, Ended> {
        match &mut self.state {
            State::Header => {
                let Some(header) = self.buffer[self.start..self.end].first_chunk::<HEADER_BYTES>() else {
                    return Ok(false);
                };
                let prefix = Prefix::decode(header)?;
                if self.insists && prefix.head().flags.contains(Flags::UNCHECKED) {
                    return Err(WireError::Unchecked.into());
                }
                self.state = State::Rest(prefix);
                self.start += HEADER_BYTES;
                Ok(true)
            }
            State::Rest(_) => self.finish_head(peer, events),
            State::Held(_) => Ok(false),
            State::Payload(landing) => {
                self.start += landing.copy(&self.buffer[self.start..self.end])?;
                if landing.remaining() > 0 {
                    return Ok(false);
                }
                self.finish_payload(peer, events);
                Ok(true)
            }
        }
    }

    fn finish_head(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, Ended> {
        let State::Rest(prefix) = &self.state else {
            unreachable!("only called while the rest is expected");
        };
        let length = prefix.rest_bytes();
        let there = &self.buffer[self.start..self.end];
        let frame = if length <= self.buffer.len() {
            let Some(rest) = there.get(..length) else {
                return Ok(false);
            };
            let frame = prefix.finish(rest)?;
            self.start += length;
            frame
        } else {
            let step = there.len().min(length - self.rest.len());
            self.rest.extend_from_slice(&there[..step]);
            self.start += step;
            if self.rest.len() < length {
                return Ok(false);
            }
            let frame = prefix.finish(&self.rest)?;
            self.rest.clear();
            self.rest.shrink_to(REST_BYTES_KEPT);
            frame
        };
        let payload = frame.payload_bytes();
        self.ahead = if payload > DIRECT_BYTES { AHEAD_BYTES } else { BUFFER_BYTES };
        if payload > 0 {
            events.push(Event::Head { peer, frame: frame.clone() });
            self.state = State::Held(frame);
        } else {
            events.push(Event::Landed { peer, frame, body: Vec::new() });
            self.state = State::Header;
        }
        Ok(true)
    }

    fn finish_payload(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        if let State::Payload(landing) = std::mem::replace(&mut self.state, State::Header) {
            let (frame, body) = landing.into_parts();
            events.push(Event::Landed { peer, frame, body });
        }
    }

    /// One read. Returns the bytes, and whether the socket is empty now.
    fn read(&mut self, stream: &TcpStream) -> Result<(usize, bool), Ended> {
        let Self { buffer, start, end, state, ahead, .. } = self;
        if let State::Payload(landing) = state
            && landing.remaining() > DIRECT_BYTES
        {
            // Everything in the buffer was payload, so it is empty.
            (*start, *end) = (0, 0);
            let remaining = landing.remaining();
            let (mut slices, mut direct) = (Vec::new(), 0);
            for slice in landing.unfilled(SLICES_MAX - 1) {
                let step = slice.len().min(CALL_BYTES - direct);
                slices.push(IoSliceMut::new(&mut slice[..step]));
                direct += step;
                if direct == CALL_BYTES {
                    break;
                }
            }
            if direct as u64 == remaining {
                slices.push(IoSliceMut::new(&mut buffer[..*ahead]));
            }
            if direct > 0 {
                let (bytes, short) = receive(stream, &mut slices)?;
                if bytes == 0 {
                    return Err(Ended::Cut);
                }
                *end = bytes.saturating_sub(direct);
                landing.fill(bytes - *end)?;
                return Ok((bytes, short));
            }
        }
        self.read_buffered(stream)
    }

    fn read_buffered(&mut self, stream: &TcpStream) -> Result<(usize, bool), Ended> {
        let there = self.end - self.start;
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, there);
        let wanted = match &self.state {
            State::Rest(prefix) => prefix.rest_bytes() - self.rest.len(),
            _ => 0,
        };
        let limit = (there + self.ahead).max(wanted).min(self.buffer.len());
        let (bytes, short) = receive(stream, &mut [IoSliceMut::new(&mut self.buffer[there..limit])])?;
        self.end += bytes;
        match bytes {
            0 if there == 0 && matches!(self.state, State::Header) => Err(Ended::Closed),
            0 => Err(Ended::Cut),
            _ => Ok((bytes, short)),
        }
    }
}

/// Reads into `slices`. Returns the bytes, and whether the socket is empty now.
fn receive(stream: &TcpStream, slices: &mut [IoSliceMut<'_>]) -> io::Result<(usize, bool)> {
    let asked: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut read = None;
    let outcome = stream.try_io(Interest::READABLE, || {
        let bytes = (&*SockRef::from(stream)).read_vectored(slices)?;
        read = Some(bytes);
        // A short read found the socket empty: saying so here spares the call that would only learn it.
        if 0 < bytes && bytes < asked { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    });
    match read {
        Some(bytes) => Ok((bytes, bytes < asked)),
        None => outcome.map(|()| (0, true)),
    }
}

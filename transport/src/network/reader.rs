//! Receive side of a TCP connection.

use std::io::{self, IoSliceMut};

use pserver_core::ids::PeerId;
use pserver_core::port::{Event, ReceiveBuffers};
use pserver_core::wire::{Flags, Frame, HEADER_BYTES, Kind, Prefix, WireError};

use super::checks::ChecksumPolicy;
use super::{IoProgress, SLICES_MAX};
use crate::connection::ConnectionError;
use crate::payload::PostedReceive;
use crate::tls::TcpChannel;
use crate::turn_budget::{TURN_BYTES, TURN_FRAMES};

/// Heads and small payloads are read through a buffer of this size, so that one call reads many.
const BUFFER_BYTES: usize = 64 * 1024;
/// A longer remaining payload is read straight into its buffers; below this the extra call costs more than the copy.
const DIRECT_BYTES: u64 = 16 * 1024;
/// Bytes read beyond a large payload: enough for the next head, and little of the next payload, which would be copied.
const AHEAD_BYTES: usize = 4 * 1024;
/// Bytes that one call reads straight into buffers, so that they are in cache for the checksum.
const CALL_BYTES: usize = 256 * 1024;
/// A longer buffer for entry tables and control messages is not kept.
const REST_BYTES_KEPT: usize = 256 * 1024;

/// State of the receive side.
pub(super) struct TcpReader {
    buffer: Box<[u8]>,
    /// The unread bytes of the buffer are `start..end`.
    start: usize,
    end: usize,
    /// The entries and the control message when they are longer than the buffer.
    rest: Vec<u8>,
    /// Bytes of the buffer that a read may fill; few while payloads are large.
    ahead: usize,
    /// Whether checksums are required. The sender decides otherwise, because a proxy may hide that both ends are on one
    /// host.
    insists: bool,
    /// Whether the peer has said that it requires checksums.
    peer_insists: bool,
    /// The message of an offer that was not taken.
    offer: Option<Vec<u8>>,
    state: TcpReadState,
}

enum TcpReadState {
    Header,
    Rest(Prefix),
    /// The head was reported; its receive buffers are not posted.
    AwaitingBuffers(Frame),
    Payload(PostedReceive),
    /// The peer goes on over verbs.
    Switched,
}

impl TcpReader {
    pub(super) const BUFFER_BYTES: usize = BUFFER_BYTES;

    pub(super) fn new(checks: ChecksumPolicy) -> Self {
        Self {
            insists: checks == ChecksumPolicy::Always,
            peer_insists: false,
            offer: None,
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            rest: Vec::new(),
            ahead: BUFFER_BYTES,
            state: TcpReadState::Header,
        }
    }

    /// Whether the peer requires checksums in what this side sends.
    pub(super) fn peer_insists(&self) -> bool {
        self.peer_insists
    }

    /// Starts with bytes that were read before.
    pub(super) fn preload(&mut self, bytes: &[u8]) {
        assert!(self.end == 0, "nothing was read yet");
        self.buffer[..bytes.len()].copy_from_slice(bytes);
        self.end = bytes.len();
    }

    /// Reads until the socket is empty, a head waits for its buffers, or the budget is spent.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        channel: &mut TcpChannel,
        events: &mut Vec<Event>,
    ) -> Result<IoProgress, ConnectionError> {
        let (mut bytes, before, mut drained) = (0, events.len(), false);
        loop {
            while self.advance(peer, events)? {}
            if matches!(self.state, TcpReadState::AwaitingBuffers(_) | TcpReadState::Switched) {
                return Ok(IoProgress::Idle);
            }
            if drained {
                return Ok(IoProgress::Blocked);
            }
            if bytes >= TURN_BYTES || events.len() - before >= TURN_FRAMES {
                return Ok(IoProgress::BudgetSpent);
            }
            match self.read(channel) {
                Err(ConnectionError::Read(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(IoProgress::Blocked);
                }
                Err(error) => return Err(error),
                Ok((read, short)) => (bytes, drained) = (bytes + read, short),
            }
        }
    }

    /// Posts the receive buffers for the reported head.
    ///
    /// # Panics
    /// Without a waiting head, or with buffers of other lengths: the session counts them.
    pub(super) fn post_receive(&mut self, buffers: ReceiveBuffers) {
        match std::mem::replace(&mut self.state, TcpReadState::Header) {
            TcpReadState::AwaitingBuffers(frame) => {
                self.state = TcpReadState::Payload(PostedReceive::new(frame, buffers))
            }
            _ => panic!("buffers were handed over, but no head waits for them"),
        }
    }

    /// Returns the buffers that were not filled.
    pub(super) fn take_unfilled(&mut self) -> ReceiveBuffers {
        match std::mem::replace(&mut self.state, TcpReadState::Header) {
            TcpReadState::Payload(posted) => posted.into_parts().1,
            _ => ReceiveBuffers::new(),
        }
    }

    /// Takes the message of an offer.
    pub(super) fn take_offer(&mut self) -> Option<Vec<u8>> {
        self.offer.take()
    }

    /// Takes the bytes behind a switch to verbs.
    pub(super) fn take_unread(&mut self) -> Vec<u8> {
        let unread = self.buffer[self.start..self.end].to_vec();
        self.start = self.end;
        unread
    }

    /// Discards input of a closing connection; whether the peer has closed too.
    pub(super) fn discard(&mut self, channel: &mut TcpChannel) -> io::Result<bool> {
        let (bytes, _) = channel.receive(&mut [IoSliceMut::new(&mut self.buffer)])?;
        Ok(bytes == 0)
    }

    /// One step with the bytes in the buffer; false when more bytes or receive buffers are needed.
    fn advance(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, ConnectionError> {
        match &mut self.state {
            TcpReadState::Header => {
                let Some(header) = self.buffer[self.start..self.end].first_chunk::<HEADER_BYTES>() else {
                    return Ok(false);
                };
                let prefix = Prefix::decode_plain(header)?;
                if self.insists && prefix.head().flags.contains(Flags::UNCHECKED) {
                    return Err(WireError::Unchecked.into());
                }
                self.peer_insists |= prefix.head().flags.contains(Flags::WANT_CHECKS);
                self.state = TcpReadState::Rest(prefix);
                self.start += HEADER_BYTES;
                Ok(true)
            }
            TcpReadState::Rest(_) => self.finish_head(peer, events),
            TcpReadState::AwaitingBuffers(_) | TcpReadState::Switched => Ok(false),
            TcpReadState::Payload(posted) => {
                self.start += posted.copy(&self.buffer[self.start..self.end])?;
                if posted.remaining() > 0 {
                    return Ok(false);
                }
                self.finish_payload(peer, events);
                Ok(true)
            }
        }
    }

    fn finish_head(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, ConnectionError> {
        let TcpReadState::Rest(prefix) = &self.state else {
            unreachable!("only called while the rest is expected");
        };
        let length = prefix.rest_bytes();
        let there = &self.buffer[self.start..self.end];
        let mut frame = if length <= self.buffer.len() {
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
        frame.head.flags = frame.head.flags.without(Flags::WANT_CHECKS);
        if frame.head.kind == Kind::Offer {
            return self.receive_offer(frame.control);
        }
        let payload = frame.payload_bytes();
        self.ahead = if payload > DIRECT_BYTES { AHEAD_BYTES } else { BUFFER_BYTES };
        if payload > 0 {
            events.push(Event::Head { peer, frame: frame.clone() });
            self.state = TcpReadState::AwaitingBuffers(frame);
        } else {
            events.push(Event::Received { peer, frame, body: ReceiveBuffers::new() });
            self.state = TcpReadState::Header;
        }
        Ok(true)
    }

    fn receive_offer(&mut self, message: Vec<u8>) -> Result<bool, ConnectionError> {
        self.state = if message.is_empty() { TcpReadState::Switched } else { TcpReadState::Header };
        match self.offer.replace(message) {
            None => Ok(true),
            Some(_) => Err(ConnectionError::Broken("two offers of verbs at once".to_owned())),
        }
    }

    fn finish_payload(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        if let TcpReadState::Payload(posted) = std::mem::replace(&mut self.state, TcpReadState::Header) {
            let (frame, body) = posted.into_parts();
            events.push(Event::Received { peer, frame, body });
        }
    }

    /// One read; its bytes, and whether the socket is empty.
    fn read(&mut self, channel: &mut TcpChannel) -> Result<(usize, bool), ConnectionError> {
        let Self { buffer, start, end, state, ahead, .. } = self;
        if let TcpReadState::Payload(posted) = state
            && posted.remaining() > DIRECT_BYTES
        {
            // The buffer held payload only, so it is empty.
            (*start, *end) = (0, 0);
            let remaining = posted.remaining();
            let (mut slices, mut direct) = (Vec::new(), 0);
            for slice in posted.unfilled(SLICES_MAX - 1) {
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
                let (bytes, short) = channel.receive(&mut slices)?;
                if bytes == 0 {
                    return Err(ConnectionError::Cut);
                }
                *end = bytes.saturating_sub(direct);
                posted.fill(bytes - *end)?;
                return Ok((bytes, short));
            }
        }
        self.read_buffered(channel)
    }

    fn read_buffered(&mut self, channel: &mut TcpChannel) -> Result<(usize, bool), ConnectionError> {
        let there = self.end - self.start;
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, there);
        let wanted = match &self.state {
            TcpReadState::Rest(prefix) => prefix.rest_bytes() - self.rest.len(),
            _ => 0,
        };
        let limit = (there + self.ahead).max(wanted).min(self.buffer.len());
        let (bytes, short) = channel.receive(&mut [IoSliceMut::new(&mut self.buffer[there..limit])])?;
        self.end += bytes;
        match bytes {
            0 if there == 0 && matches!(self.state, TcpReadState::Header) => Err(ConnectionError::Closed),
            0 => Err(ConnectionError::Cut),
            _ => Ok((bytes, short)),
        }
    }
}

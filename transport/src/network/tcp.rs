//! A TCP connection: reader, writer and their socket.

use std::io;
use std::task::{Context, Waker};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Payloads, ReceiveBuffers};
use pserver_core::wire::Frame;
use tokio::net::TcpStream;

use super::IoProgress;
use super::checks::{ChecksumDecision, ChecksumPolicy};
use super::reader::TcpReader;
use super::writer::{TcpQueuedFrame, TcpWriter};
use crate::connection::{Connection, ConnectionError, ReturnedBuffers, TicketedBody, UnreadLimit};
use crate::tls::TcpChannel;
use crate::turn_budget::TURN_BYTES;

/// A TCP connection.
pub(super) struct TcpConnection {
    channel: TcpChannel,
    reader: TcpReader,
    writer: TcpWriter,
    /// Whether the last turn read nothing because the peer leaves its answers unread.
    is_paused: bool,
    /// Whether sending was shut down.
    is_shut: bool,
    /// Whether a frame has arrived.
    has_received: bool,
}

impl TcpConnection {
    /// A connection over an established stream.
    pub(super) fn new(channel: TcpChannel, checks: ChecksumPolicy) -> Self {
        let checks = ChecksumDecision::policy(checks, &channel);
        let (reader, writer) = (TcpReader::new(checks), TcpWriter::new(checks));
        Self { channel, reader, writer, is_paused: false, is_shut: false, has_received: false }
    }

    /// A connection over a stream from which these bytes were read already.
    pub(super) fn with_read_bytes(channel: TcpChannel, checks: ChecksumPolicy, bytes: &[u8]) -> Self {
        let mut connection = Self::new(channel, checks);
        connection.reader.preload(bytes);
        connection
    }
}

impl Connection for TcpConnection {
    fn len(&self) -> usize {
        self.writer.queue.len()
    }

    fn is_paused(&self) -> bool {
        self.is_paused
    }

    fn send(&mut self, ticket: Option<Ticket>, frame: Frame, body: Payloads) {
        self.writer.queue.push_back(TcpQueuedFrame::new(ticket, frame, body));
    }

    fn post_receive(&mut self, buffers: ReceiveBuffers) {
        self.reader.post_receive(buffers);
    }

    fn take_unbegun(&mut self) -> Vec<TicketedBody> {
        self.writer.take_unbegun()
    }

    fn into_buffers(mut self: Box<Self>) -> ReturnedBuffers {
        let (frames, unfilled) = (self.writer.take_all(), self.reader.take_unfilled());
        ReturnedBuffers { frames, unfilled, ..ReturnedBuffers::default() }
    }

    fn flush(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, ConnectionError> {
        let written = self.writer.turn(peer, &mut self.channel, events).map_err(ConnectionError::Write)?;
        Ok(written != IoProgress::Idle)
    }

    fn turn(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        unread: Option<UnreadLimit>,
        events: &mut Vec<Event>,
    ) -> Result<bool, ConnectionError> {
        let Self { channel, reader, writer, is_paused, has_received, .. } = self;
        let written = writer.turn(peer, channel, events);
        let before = events.len();
        *is_paused = unread.is_some_and(|unread| unread.is_reached(writer.queue.len(), writer.held()));
        let read = if *is_paused { Ok(IoProgress::Idle) } else { reader.turn(peer, channel, events) };
        *has_received |= events.len() > before;
        let read = read.inspect_err(|error| {
            if unread.is_none()
                && !*has_received
                && let Some(frame) = channel.refusal("the server", error)
            {
                events.push(Event::Received { peer, frame, body: ReceiveBuffers::new() });
            }
        })?;
        if reader.peer_insists() {
            writer.follow_peer();
        }
        let written = match (written, &read) {
            (Ok(written), _) => written,
            // Input that arrived before the error, perhaps a refusal, is read first.
            (Err(_), IoProgress::BudgetSpent) => return Ok(true),
            (Err(error), _) => return Err(ConnectionError::Write(error)),
        };
        let mut context = Context::from_waker(waker);
        let reads = read == IoProgress::BudgetSpent
            || read == IoProgress::Blocked && channel.socket().poll_read_ready(&mut context).is_ready();
        // Reading may have made the record layer answer.
        let writes = written == IoProgress::BudgetSpent
            || written == IoProgress::Idle && channel.has_unsent()
            || written == IoProgress::Blocked && channel.socket().poll_write_ready(&mut context).is_ready();
        Ok(reads || writes)
    }

    fn tcp_stream(&self) -> Option<&TcpStream> {
        self.channel.plain_socket()
    }

    fn take_offer(&mut self) -> Option<Vec<u8>> {
        self.reader.take_offer()
    }

    fn take_unread(&mut self) -> Vec<u8> {
        self.reader.take_unread()
    }

    fn turn_closing(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> Result<(bool, bool), ConnectionError> {
        let Self { channel, reader, writer, is_shut, .. } = self;
        let mut context = Context::from_waker(waker);
        match writer.turn(peer, channel, events).map_err(ConnectionError::Write)? {
            IoProgress::BudgetSpent => return Ok((false, true)),
            IoProgress::Blocked if channel.socket().poll_write_ready(&mut context).is_ready() => {
                return Ok((false, true));
            }
            IoProgress::Idle if !*is_shut => match channel.end() {
                Ok(()) => *is_shut = true,
                // The end of the records waits for the socket, as a record of the queue would.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if channel.socket().poll_write_ready(&mut context).is_ready() {
                        return Ok((false, true));
                    }
                }
                Err(error) => return Err(ConnectionError::Write(error)),
            },
            IoProgress::Blocked | IoProgress::Idle => {}
        }
        for _ in 0..TURN_BYTES / TcpReader::BUFFER_BYTES {
            match reader.discard(channel) {
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(true) | Err(_) => return Ok((true, false)),
            }
        }
        Ok((false, channel.has_received() || channel.socket().poll_read_ready(&mut context).is_ready()))
    }
}

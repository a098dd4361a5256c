//! One connection: what it does when it may go on.

use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Incoming, Outgoing};
use pserver_core::wire::{ErrorCode, Frame};
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::checks::Checks;
use super::reader::{Ended, Reader};
use super::wakeups::{PeerWake, Wakeups};
use super::writer::Writer;
use super::{Pause, TURN_BYTES};
use crate::refusal::refusal;

/// One connection.
pub(super) struct Peer {
    id: PeerId,
    line: Line,
    reader: Reader,
    writer: Writer,
    ending: Option<Ending>,
    /// Frames that were given up when the connection began to end.
    unsent: Vec<(Ticket, Vec<Outgoing>)>,
    wake: Arc<PeerWake>,
    waker: Waker,
    /// Whether it stands in the transport's list of peers that may go on.
    listed: bool,
}

enum Line {
    Connecting(JoinHandle<Result<TcpStream, String>>),
    Open(TcpStream),
}

/// A connection that ends: what is queued leaves, the socket says so, and what still arrives is forgotten until
/// the peer closes too, because closing over unread bytes would destroy what the peer has not read yet.
struct Ending {
    reason: String,
    shut: bool,
}

/// What a turn came to.
pub(super) enum Turn {
    /// There is nothing to do before the peer's waker is called.
    Rest,
    /// There is more to do at once.
    Again,
    /// The connection is over.
    Over(String),
}

impl Peer {
    /// A connection that is being made.
    pub(super) fn connecting(
        id: PeerId,
        task: JoinHandle<Result<TcpStream, String>>,
        checks: Checks,
        wakeups: &Arc<Wakeups>,
    ) -> Self {
        Self::new(id, Line::Connecting(task), checks, wakeups)
    }

    /// A connection that is there.
    pub(super) fn open(id: PeerId, stream: TcpStream, checks: Checks, wakeups: &Arc<Wakeups>) -> Self {
        Self::new(id, Line::Open(stream), checks, wakeups)
    }

    fn new(id: PeerId, line: Line, checks: Checks, wakeups: &Arc<Wakeups>) -> Self {
        let wake = PeerWake::new(id, wakeups);
        Self {
            id,
            line,
            reader: Reader::new(checks),
            writer: Writer::new(checks),
            ending: None,
            unsent: Vec::new(),
            waker: wake.waker(),
            wake,
            listed: false,
        }
    }

    /// Puts it on the list, unless it is there; returns whether it was not.
    pub(super) fn list(&mut self) -> bool {
        !std::mem::replace(&mut self.listed, true)
    }

    /// Takes it off the list.
    pub(super) fn unlist(&mut self) {
        self.listed = false;
    }

    /// Its waker's call has been seen.
    pub(super) fn woken(&self) {
        self.wake.taken();
    }

    /// Whether one more frame fits the queue of at most `queued_max`.
    pub(super) fn has_room(&self, queued_max: usize) -> bool {
        self.writer.len() < queued_max
    }

    /// Queues a frame; one for a connection that is ending comes back with its end.
    pub(super) fn send(&mut self, ticket: Ticket, frame: Frame, body: Vec<Outgoing>) {
        if self.ending.is_some() {
            self.unsent.push((ticket, body));
        } else {
            self.writer.push(Some(ticket), frame, body);
        }
    }

    /// The places for the head that was reported; those for a connection that is ending come back with its end.
    pub(super) fn land(&mut self, places: Vec<Incoming>) {
        self.reader.land(places);
    }

    /// Begins to end the connection; false when it is ending already.
    pub(super) fn end(&mut self, reason: impl Into<String>) -> bool {
        if self.ending.is_some() {
            return false;
        }
        self.ending = Some(Ending { reason: reason.into(), shut: false });
        true
    }

    /// The parcels it still holds, for its last event.
    pub(super) fn into_gone(mut self, reason: String) -> Event {
        let mut unsent = self.writer.take_all();
        unsent.append(&mut self.unsent);
        if let Line::Connecting(task) = &self.line {
            task.abort();
        }
        Event::Gone { peer: self.id, reason, unsent, unfilled: self.reader.take_unfilled() }
    }

    /// Whether it is ending.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Why it is ending, when its time is up.
    pub(super) fn reason(&self) -> String {
        self.ending.as_ref().map_or_else(String::new, |ending| ending.reason.clone())
    }

    /// Does what can be done without waiting, within bounds, so that the other peers get their turn.
    pub(super) fn turn(&mut self, events: &mut Vec<Event>) -> Turn {
        if let Line::Connecting(task) = &mut self.line {
            let stream = match Pin::new(task).poll(&mut Context::from_waker(&self.waker)) {
                Poll::Pending => return Turn::Rest,
                Poll::Ready(Err(error)) => return Turn::Over(format!("connecting: {error}")),
                Poll::Ready(Ok(Err(reason))) => return Turn::Over(reason),
                Poll::Ready(Ok(Ok(stream))) => stream,
            };
            self.line = Line::Open(stream);
            events.push(Event::Connected { peer: self.id });
        }
        if self.ending.is_some() {
            return self.turn_ending(events).unwrap_or_else(|error| Turn::Over(format!("{}: {error}", self.reason())));
        }
        self.turn_open(events)
    }

    /// Writes only: for a frame that was just submitted.
    pub(super) fn flush(&mut self, events: &mut Vec<Event>) -> Turn {
        match &self.line {
            Line::Open(stream) if self.ending.is_none() => {
                match self.writer.turn(self.id, stream, events) {
                    Ok(Pause::Idle) => Turn::Rest,
                    // The next turn arms the waker, or meets the error again with the reader's help.
                    _ => Turn::Again,
                }
            }
            _ => Turn::Again,
        }
    }

    fn turn_open(&mut self, events: &mut Vec<Event>) -> Turn {
        let Line::Open(stream) = &self.line else {
            return Turn::Rest;
        };
        let wrote = self.writer.turn(self.id, stream, events);
        let read = match self.reader.turn(self.id, stream, events) {
            Ok(pause) => pause,
            Err(Ended::Wire(error)) => return self.refuse(&error.to_string()),
            Err(ended) => return Turn::Over(ended.to_string()),
        };
        let wrote = match (wrote, &read) {
            (Ok(pause), _) => pause,
            // What the peer said before it went, a refusal perhaps, is read first.
            (Err(_), Pause::Turn) => return Turn::Again,
            (Err(error), _) => return Turn::Over(format!("writing: {error}")),
        };
        let mut context = Context::from_waker(&self.waker);
        let reads = read == Pause::Turn || read == Pause::Blocked && stream.poll_read_ready(&mut context).is_ready();
        let writes =
            wrote == Pause::Turn || wrote == Pause::Blocked && stream.poll_write_ready(&mut context).is_ready();
        if reads || writes { Turn::Again } else { Turn::Rest }
    }

    /// Tells the peer what was wrong with what it sent, and ends the connection.
    fn refuse(&mut self, reason: &str) -> Turn {
        tracing::warn!(peer = self.id.0, reason, "connection refused");
        self.unsent = self.writer.take_unbegun();
        self.writer.push(None, refusal(ErrorCode::Invalid, reason), Vec::new());
        self.end(reason);
        Turn::Again
    }

    fn turn_ending(&mut self, events: &mut Vec<Event>) -> io::Result<Turn> {
        let (Line::Open(stream), Some(ending)) = (&self.line, &mut self.ending) else {
            return Ok(Turn::Rest);
        };
        let mut context = Context::from_waker(&self.waker);
        match self.writer.turn(self.id, stream, events)? {
            Pause::Turn => return Ok(Turn::Again),
            Pause::Blocked if stream.poll_write_ready(&mut context).is_ready() => {
                return Ok(Turn::Again);
            }
            Pause::Blocked => {}
            Pause::Idle if !ending.shut => {
                SockRef::from(stream).shutdown(Shutdown::Write)?;
                ending.shut = true;
            }
            Pause::Idle => {}
        }
        for _ in 0..TURN_BYTES / Reader::BUFFER_BYTES {
            match self.reader.discard(stream) {
                Ok(true) => return Ok(Turn::Over(ending.reason.clone())),
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Ok(Turn::Over(ending.reason.clone())),
            }
        }
        let more = stream.poll_read_ready(&mut context).is_ready();
        Ok(if more { Turn::Again } else { Turn::Rest })
    }
}

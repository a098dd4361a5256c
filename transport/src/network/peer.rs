//! One connection: what it does when it may go on.

use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Incoming, Outgoing};
use pserver_core::wire::{Address, ErrorCode, Frame, Scheme};
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::checks::Checks;
use super::reader::{Ended, Reader};
use super::socket::{Made, Unmade};
use super::wakeups::{PeerWake, Wakeups};
use super::writer::Writer;
use super::{Pause, TURN_BYTES, TURN_FRAMES};
use crate::refusal::refusal;
use crate::share::Share;
use crate::shm::{self, Side};
use crate::verbs::{self, Became, Hall, Meeting};

/// What a turn on shared memory may do.
const SHARE: Share = Share { bytes: TURN_BYTES, frames: TURN_FRAMES };

/// One connection.
pub(super) struct Peer {
    id: PeerId,
    line: Line,
    /// Where it connects to and offers verbs, when it need not be verbs.
    offers: Option<Address>,
    ending: Option<Ending>,
    /// Frames that were given up when the connection began to end.
    unsent: Vec<(Ticket, Vec<Outgoing>)>,
    wake: Arc<PeerWake>,
    waker: Waker,
    /// Whether it stands in the transport's list of peers that may go on.
    listed: bool,
}

/// What the frames go through.
pub(super) enum Line {
    /// Nothing yet.
    Connecting(Connecting),
    /// A TCP connection.
    Tcp(Box<TcpLine>),
    /// A TCP connection that offers to become one over verbs.
    Meeting(Box<Meeting>),
    /// Shared memory.
    Shm(Box<shm::Line>),
    /// Verbs.
    Verbs(Box<verbs::Line>),
}

/// A connection that is being made, and the frames for it.
pub(super) struct Connecting {
    task: JoinHandle<Result<Made, Unmade>>,
    checks: Checks,
    waiting: Vec<(Ticket, Frame, Vec<Outgoing>)>,
}

/// A TCP connection.
pub(super) struct TcpLine {
    stream: TcpStream,
    reader: Reader,
    writer: Writer,
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

impl Line {
    /// A connection that is there.
    pub(super) fn tcp(stream: TcpStream, checks: Checks) -> Self {
        Self::Tcp(Box::new(TcpLine { stream, reader: Reader::new(checks), writer: Writer::new(checks) }))
    }

    fn made(made: Made, checks: Checks) -> Result<Self, String> {
        match made {
            Made::Tcp(stream) => Ok(Self::tcp(stream, checks)),
            Made::Shm(met) => {
                let line = shm::Line::new(met.stream, met.board, Side::Connecting);
                Ok(Self::Shm(Box::new(line.map_err(|error| format!("connecting: {error}"))?)))
            }
            Made::Rising(stream, address, offer) => match offer {
                Ok(half) => Ok(Self::Meeting(Box::new(Meeting::new(stream, half, address.scheme, checks)))),
                Err(reason) if address.scheme == Scheme::Verbs => Err(format!("connecting to {address}: {reason}")),
                Err(reason) => {
                    tracing::info!(%address, carried_by = "tcp", "connected over TCP; {reason}");
                    Ok(Self::tcp(stream, checks))
                }
            },
        }
    }

    fn send(&mut self, ticket: Option<Ticket>, frame: Frame, body: Vec<Outgoing>) {
        match self {
            Self::Connecting(connecting) => connecting.waiting.extend(ticket.map(|ticket| (ticket, frame, body))),
            Self::Tcp(line) => line.writer.push(ticket, frame, body),
            Self::Meeting(meeting) => meeting.send(ticket, frame, body),
            Self::Shm(line) => line.send(ticket, &frame, body),
            Self::Verbs(line) => line.send(ticket, frame, body),
        }
    }

    fn take_unbegun(&mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        match self {
            Self::Connecting(connecting) => connecting.take_waiting(),
            Self::Tcp(line) => line.writer.take_unbegun(),
            Self::Meeting(meeting) => meeting.take_waiting(),
            Self::Shm(line) => line.take_unbegun(),
            Self::Verbs(line) => line.take_unbegun(),
        }
    }
}

impl Connecting {
    fn take_waiting(&mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        self.waiting.drain(..).map(|(ticket, _, body)| (ticket, body)).collect()
    }
}

impl TcpLine {
    /// Writes and reads what can be without waiting.
    fn turn(&mut self, id: PeerId, waker: &Waker, events: &mut Vec<Event>) -> Result<Turn, Ended> {
        let Self { stream, reader, writer } = self;
        let wrote = writer.turn(id, stream, events);
        let read = reader.turn(id, stream, events)?;
        let wrote = match (wrote, &read) {
            (Ok(pause), _) => pause,
            // What the peer said before it went, a refusal perhaps, is read first.
            (Err(_), Pause::Turn) => return Ok(Turn::Again),
            (Err(error), _) => return Ok(Turn::Over(format!("writing: {error}"))),
        };
        let mut context = Context::from_waker(waker);
        let reads = read == Pause::Turn || read == Pause::Blocked && stream.poll_read_ready(&mut context).is_ready();
        let writes =
            wrote == Pause::Turn || wrote == Pause::Blocked && stream.poll_write_ready(&mut context).is_ready();
        Ok(if reads || writes { Turn::Again } else { Turn::Rest })
    }

    fn turn_ending(
        &mut self,
        id: PeerId,
        ending: &mut Ending,
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> io::Result<Turn> {
        let Self { stream, reader, writer } = self;
        let mut context = Context::from_waker(waker);
        match writer.turn(id, stream, events)? {
            Pause::Turn => return Ok(Turn::Again),
            Pause::Blocked if stream.poll_write_ready(&mut context).is_ready() => {
                return Ok(Turn::Again);
            }
            Pause::Blocked => {}
            Pause::Idle if !ending.shut => {
                SockRef::from(&*stream).shutdown(Shutdown::Write)?;
                ending.shut = true;
            }
            Pause::Idle => {}
        }
        for _ in 0..TURN_BYTES / Reader::BUFFER_BYTES {
            match reader.discard(stream) {
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

impl Peer {
    /// A connection that is being made.
    pub(super) fn connecting(
        id: PeerId,
        task: JoinHandle<Result<Made, Unmade>>,
        checks: Checks,
        wakeups: &Arc<Wakeups>,
    ) -> Self {
        Self::new(id, Line::Connecting(Connecting { task, checks, waiting: Vec::new() }), wakeups)
    }

    /// A connection by `line`.
    pub(super) fn new(id: PeerId, line: Line, wakeups: &Arc<Wakeups>) -> Self {
        let wake = PeerWake::new(id, wakeups);
        let (offers, ending, unsent) = (None, None, Vec::new());
        Self { id, line, offers, ending, unsent, waker: wake.waker(), wake, listed: false }
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
    pub(super) fn woken(&mut self) {
        self.wake.taken();
        match &mut self.line {
            Line::Meeting(meeting) => meeting.woken(),
            Line::Shm(line) => line.woken(),
            Line::Verbs(line) => line.woken(),
            Line::Connecting(_) | Line::Tcp(_) => {}
        }
    }

    /// Whether what it has is memory, which must be looked at: the system does not tell of it.
    pub(super) fn is_looked_at(&self) -> bool {
        matches!(self.line, Line::Shm(_) | Line::Verbs(_))
    }

    /// Whether its memory has news.
    pub(super) fn has_news(&mut self) -> bool {
        match &mut self.line {
            Line::Shm(line) => line.has_news(),
            Line::Verbs(line) => line.has_news(),
            Line::Connecting(_) | Line::Meeting(_) | Line::Tcp(_) => false,
        }
    }

    /// This side is about to sleep, and wants to be woken when its memory has news.
    pub(super) fn fall_asleep(&mut self) {
        match &mut self.line {
            Line::Shm(line) => line.fall_asleep(),
            Line::Verbs(line) => line.fall_asleep(),
            Line::Connecting(_) | Line::Meeting(_) | Line::Tcp(_) => {}
        }
    }

    /// This side is awake again.
    pub(super) fn awake(&mut self) {
        if let Line::Shm(line) = &mut self.line {
            line.awake();
        }
    }

    /// Whether parcels come back without a wake-up.
    pub(super) fn lends(&self) -> bool {
        matches!(&self.line, Line::Shm(line) if line.lends())
    }

    /// Whether one more frame fits the queue of at most `queued_max`.
    pub(super) fn has_room(&self, queued_max: usize) -> bool {
        let queued = match &self.line {
            Line::Connecting(connecting) => connecting.waiting.len(),
            Line::Tcp(line) => line.writer.len(),
            Line::Meeting(meeting) => meeting.len(),
            Line::Shm(line) => line.len(),
            Line::Verbs(line) => line.len(),
        };
        queued < queued_max
    }

    /// Queues a frame; one for a connection that is ending comes back with its end.
    pub(super) fn send(&mut self, ticket: Ticket, frame: Frame, body: Vec<Outgoing>) {
        if self.ending.is_some() {
            self.unsent.push((ticket, body));
        } else {
            self.line.send(Some(ticket), frame, body);
        }
    }

    /// The places for the head that was reported; those for a connection that is ending come back with its end.
    ///
    /// # Panics
    /// When there is no connection yet: nothing was reported.
    pub(super) fn land(&mut self, places: Vec<Incoming>) {
        match &mut self.line {
            Line::Connecting(_) | Line::Meeting(_) => panic!("places were handed over, but no head waits for them"),
            Line::Tcp(line) => line.reader.land(places),
            Line::Shm(line) => line.land(places),
            Line::Verbs(line) => line.land(places),
        }
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
    pub(super) fn into_gone(self, reason: String) -> Event {
        let Self { id: peer, line, unsent: mut given_up, .. } = self;
        let (mut unsent, unfilled) = match line {
            Line::Connecting(mut connecting) => {
                connecting.task.abort();
                (connecting.take_waiting(), Vec::new())
            }
            Line::Tcp(mut line) => (line.writer.take_all(), line.reader.take_unfilled()),
            Line::Meeting(meeting) => (meeting.into_parcels(), Vec::new()),
            Line::Shm(line) => line.into_parcels(),
            Line::Verbs(line) => line.into_parcels(),
        };
        unsent.append(&mut given_up);
        Event::Gone { peer, reason, unsent, unfilled }
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
    pub(super) fn turn(&mut self, hall: &Hall, events: &mut Vec<Event>) -> Turn {
        if let Some(turn) = self.turn_connecting(events) {
            return turn;
        }
        if let Some(turn) = self.turn_meeting(hall, events) {
            return turn;
        }
        if self.ending.is_some() {
            return self.turn_ending(events).unwrap_or_else(|error| Turn::Over(format!("{}: {error}", self.reason())));
        }
        self.turn_open(hall, events)
    }

    /// Writes only: for a frame that was just submitted.
    pub(super) fn flush(&mut self, events: &mut Vec<Event>) -> Turn {
        if self.ending.is_some() {
            return Turn::Again;
        }
        // The next turn arms the waker, or meets an error again with the reader's help.
        let is_flushed = match &mut self.line {
            Line::Connecting(_) | Line::Meeting(_) => false,
            Line::Tcp(line) => matches!(line.writer.turn(self.id, &line.stream, events), Ok(Pause::Idle)),
            Line::Shm(line) => matches!(line.flush(self.id, SHARE, events), Ok(false)),
            Line::Verbs(line) => matches!(line.flush(self.id, SHARE, events), Ok(false)),
        };
        if is_flushed { Turn::Rest } else { Turn::Again }
    }

    /// Looks whether the connection was made; nothing once it is there.
    fn turn_connecting(&mut self, events: &mut Vec<Event>) -> Option<Turn> {
        let Line::Connecting(connecting) = &mut self.line else { return None };
        let made = match Pin::new(&mut connecting.task).poll(&mut Context::from_waker(&self.waker)) {
            Poll::Pending => return Some(Turn::Rest),
            Poll::Ready(Err(error)) => return Some(Turn::Over(format!("connecting: {error}"))),
            Poll::Ready(Ok(Err(Unmade::Lost(reason)))) => return Some(Turn::Over(reason)),
            Poll::Ready(Ok(Err(Unmade::Refused(frame)))) => {
                let peer = self.id;
                events.extend([Event::Connected { peer }, Event::Landed { peer, frame, body: Vec::new() }]);
                return Some(Turn::Over("refused before the hello".to_owned()));
            }
            Poll::Ready(Ok(Ok(made))) => made,
        };
        let waiting = std::mem::take(&mut connecting.waiting);
        if let Made::Rising(_, address, _) = &made {
            self.offers = (address.scheme == Scheme::Auto).then(|| address.clone());
        }
        match Line::made(made, connecting.checks) {
            Ok(line) => self.line = line,
            Err(reason) => {
                connecting.waiting = waiting;
                return Some(Turn::Over(reason));
            }
        }
        for (ticket, frame, body) in waiting {
            self.line.send(Some(ticket), frame, body);
        }
        events.push(Event::Connected { peer: self.id });
        None
    }

    /// Looks whether the other side has answered the offer; nothing once it has.
    fn turn_meeting(&mut self, hall: &Hall, events: &mut Vec<Event>) -> Option<Turn> {
        let Line::Meeting(meeting) = &mut self.line else { return None };
        let checks = meeting.checks();
        let (became, waiting) = match meeting.turn((self.id, hall), &self.waker, events) {
            Ok(Some(met)) => met,
            Ok(None) => return Some(Turn::Rest),
            Err(ended) => {
                // The other side has made its end by then, and would make it again.
                if let (Some(address), verbs::Ended::Device(_) | verbs::Ended::Broken(_)) = (&self.offers, &ended) {
                    hall.deny(Some(address), &ended.to_string());
                }
                return Some(Turn::Over(ended.to_string()));
            }
        };
        self.line = match became {
            Became::Line(line) => {
                tracing::info!(peer = self.id.0, carried_by = "verbs", "connected over verbs");
                Line::Verbs(line)
            }
            Became::Tcp(stream, bytes, reason) => {
                tracing::info!(peer = self.id.0, carried_by = "tcp", "connected over TCP; no verbs: {reason}");
                let mut line = Line::tcp(stream, checks);
                if let Line::Tcp(line) = &mut line {
                    line.reader.preload(&bytes);
                }
                line
            }
        };
        for (ticket, frame, body) in waiting {
            self.line.send(Some(ticket), frame, body);
        }
        None
    }

    fn turn_open(&mut self, hall: &Hall, events: &mut Vec<Event>) -> Turn {
        match &mut self.line {
            Line::Connecting(_) | Line::Meeting(_) => Turn::Rest,
            Line::Verbs(line) => match line.turn(self.id, &self.waker, SHARE, events) {
                Ok(true) => Turn::Again,
                Ok(false) => Turn::Rest,
                Err(ended) => {
                    deny(hall, self.offers.as_ref(), line, &ended);
                    // What this side's device does not do, the other side learns here or never.
                    let is_told = ended.is_peers_fault() || line.is_accepted() && ended.is_devices_fault();
                    if is_told { self.refuse(&ended.to_string()) } else { Turn::Over(ended.to_string()) }
                }
            },
            Line::Tcp(line) => match line.turn(self.id, &self.waker, events) {
                Ok(turn) => turn,
                Err(Ended::Wire(error)) => self.refuse(&error.to_string()),
                Err(ended) => Turn::Over(ended.to_string()),
            },
            Line::Shm(line) => match line.turn(self.id, &self.waker, SHARE, events) {
                Ok(true) => Turn::Again,
                Ok(false) => Turn::Rest,
                Err(ended) if ended.is_peers_fault() => self.refuse(&ended.to_string()),
                Err(ended) => Turn::Over(ended.to_string()),
            },
        }
    }

    /// Tells the peer what was wrong with what it sent, and ends the connection.
    fn refuse(&mut self, reason: &str) -> Turn {
        tracing::warn!(peer = self.id.0, reason, "connection refused");
        self.unsent = self.line.take_unbegun();
        self.line.send(None, refusal(ErrorCode::Invalid, reason), Vec::new());
        self.end(reason);
        Turn::Again
    }

    fn turn_ending(&mut self, events: &mut Vec<Event>) -> io::Result<Turn> {
        let Some(ending) = &mut self.ending else { return Ok(Turn::Rest) };
        match &mut self.line {
            Line::Connecting(_) | Line::Meeting(_) => Ok(Turn::Rest),
            Line::Verbs(line) => match line.turn_ending(self.id, &self.waker, SHARE, events) {
                Ok((true, _)) => Ok(Turn::Over(ending.reason.clone())),
                Ok((false, true)) => Ok(Turn::Again),
                Ok((false, false)) => Ok(Turn::Rest),
                Err(ended) => Err(io::Error::other(ended)),
            },
            Line::Tcp(line) => line.turn_ending(self.id, ending, &self.waker, events),
            Line::Shm(line) => match line.turn_ending(self.id, &self.waker, SHARE, events) {
                Ok((true, _)) => Ok(Turn::Over(ending.reason.clone())),
                Ok((false, true)) => Ok(Turn::Again),
                Ok((false, false)) => Ok(Turn::Rest),
                Err(ended) => Err(io::Error::other(ended)),
            },
        }
    }
}

/// What verbs did not do for a connection that ends, they would not do for the next one either: a device that fails,
/// and a pair that nothing came over. `address` is where it connected to, when it need not have been verbs.
fn deny(hall: &Hall, address: Option<&Address>, line: &verbs::Line, ended: &verbs::Ended) {
    match address {
        Some(_) if ended.is_devices_fault() || !line.has_heard() => hall.deny(address, &ended.to_string()),
        None if ended.is_devices_fault() && line.is_accepted() => hall.deny(None, &ended.to_string()),
        _ => {}
    }
}

//! One connection over verbs.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::task::{Context, Waker};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Incoming, Outgoing};
use pserver_core::wire::{Frame, HEADER_BYTES, Kind, Prefix};
use rustix::net::{SendFlags, send};
use socket2::SockRef;
use tokio::net::TcpStream;

use super::flights::{Flight, Outcome};
use super::hall::Health;
use super::inward::{Inward, Read};
use super::letters::{Matter, PREFIX_BYTES};
use super::mail::Mail;
use super::outward::{Outward, Written};
use super::registry::{Counters, Registry};
use super::staging::Staging;
use super::{Ended, Side};
use crate::share::Share;

/// The longest refusal that is read from the socket, behind its header.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// A connection over verbs.
pub(crate) struct Line {
    /// Before everything that it has memory of: its pair is closed first.
    mail: Mail,
    outward: Outward,
    inward: Inward,
    /// Keeps the slots registered.
    _near: Registry,
    side: Side,
    /// Whether the other side has said that it is ready.
    is_up: bool,
    /// Whether it has said anything at all.
    has_heard: bool,
    health: Arc<Health>,
    socket: Socket,
    outcomes: Vec<Outcome>,
}

/// The TCP connection, which says when it is over, and why.
pub(super) struct Socket {
    stream: TcpStream,
    /// Whether the runtime may have something to say about it.
    must_look: bool,
    is_over: bool,
    bytes: Vec<u8>,
}

/// What a connection is made of, once both sides know each other.
pub(super) struct Parts {
    pub(super) mail: Mail,
    pub(super) near: Registry,
    pub(super) side: Side,
    pub(super) outward: Staging,
    pub(super) inward: Staging,
    pub(super) counters: Arc<Counters>,
    pub(super) health: Arc<Health>,
    /// Whether payloads carry checksums.
    pub(super) is_checked: bool,
}

impl Line {
    pub(super) fn new(socket: Socket, parts: Parts) -> Self {
        let Parts { mail, near, side, outward, inward, counters, health, is_checked } = parts;
        Self {
            mail,
            outward: Outward::new(side, is_checked, outward, &counters),
            inward: Inward::new(side, is_checked, inward, &counters),
            _near: near,
            side,
            is_up: side == Side::Connecting,
            has_heard: false,
            health,
            socket,
            outcomes: Vec::new(),
        }
    }

    /// Whether this side accepted it.
    pub(crate) fn is_accepted(&self) -> bool {
        self.side == Side::Accepting
    }

    /// Whether anything came over it.
    pub(crate) fn has_heard(&self) -> bool {
        self.has_heard
    }

    /// Frames that the caller has not got back.
    pub(crate) fn len(&self) -> usize {
        self.outward.len()
    }

    /// Queues a frame. A refusal, which nobody submitted, goes over the socket: the pair may have no room, or be
    /// broken.
    pub(crate) fn send(&mut self, ticket: Option<Ticket>, frame: Frame, body: Vec<Outgoing>) {
        match ticket {
            Some(ticket) => self.outward.push(ticket, frame, body),
            // Nothing depends on it.
            None => drop(self.socket.send(&frame.encode())),
        }
    }

    /// The places for the head that was reported.
    pub(crate) fn land(&mut self, places: Vec<Incoming>) {
        self.inward.land(places);
    }

    /// Gives back the frames that have not begun to leave.
    pub(crate) fn take_unbegun(&mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        self.outward.take_unbegun()
    }

    /// What it still holds: frames that may not have left, and places that were not filled. No device touches them any
    /// more; what one may still touch does not come back.
    pub(crate) fn into_parcels(mut self) -> (Vec<(Ticket, Vec<Outgoing>)>, Vec<Incoming>) {
        let is_closed = self.close();
        let parcels = self.outward.take_all();
        let unfilled = self.inward.take_unfilled();
        // The other side may read and write what it was told of as long as it is registered.
        let is_open = !is_closed && self.side == Side::Connecting;
        if is_open && !self.outward.end_memory() {
            for parcel in parcels.iter().flat_map(|(_, body)| body) {
                if let Outgoing::Loan(loan) = parcel {
                    loan.tear();
                }
            }
        }
        if is_open && !self.inward.end_memory() {
            for place in &unfilled {
                if let Incoming::Loan(loan) = place {
                    loan.tear();
                }
            }
        }
        (parcels, unfilled)
    }

    /// Whether the device says that it touches nothing any more.
    fn close(&mut self) -> bool {
        let closed = self.mail.flights.close();
        let is_closed = closed.is_ok();
        for flight in closed.unwrap_or_default() {
            if let Flight::Read { spot, place, staged } = flight {
                self.inward.back(spot, place, staged, false);
            }
        }
        is_closed
    }

    /// The socket may have something to say.
    pub(crate) fn woken(&mut self) {
        self.socket.must_look = true;
    }

    /// Whether a turn may do something.
    pub(crate) fn has_news(&mut self) -> bool {
        self.socket.must_look || self.mail.flights.has_news() || self.health.trouble().is_some()
    }

    /// Says that this side is about to sleep: what is done from here on wakes it.
    pub(crate) fn fall_asleep(&mut self) {
        // A device that cannot be asked for that is asked by the next turn what is wrong.
        if self.mail.flights.pair().arm().is_err() {
            self.socket.must_look = true;
        }
    }

    /// Writes only: for a frame that was just submitted. Whether there is more to write at once.
    pub(crate) fn flush(&mut self, peer: PeerId, share: Share, events: &mut Vec<Event>) -> Result<bool, Ended> {
        if !self.is_up {
            return Ok(false);
        }
        let written = self.outward.turn(peer, &mut self.mail, share.bytes, events)?;
        self.mail.settle()?;
        Ok(written == Written::Turn)
    }

    /// Writes and reads what can be without waiting; whether there is more at once.
    pub(crate) fn turn(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        share: Share,
        events: &mut Vec<Event>,
    ) -> Result<bool, Ended> {
        self.look(peer, waker, events)?;
        if let Some(trouble) = self.health.trouble() {
            return Err(Ended::Lost(format!("verbs: {trouble}")));
        }
        let is_over = self.socket.is_over;
        self.collect(peer, events).map_err(|ended| self.explained(ended))?;
        let read = self.inward.turn(peer, &mut self.mail, (share.bytes, share.frames), events)?;
        let more = self.flush(peer, share, events)?;
        // What came before the end was there before the end was seen.
        if is_over && read == Read::Empty && !self.mail.flights.has_news() {
            return Err(if self.inward.is_between(&self.mail) { Ended::Closed } else { Ended::Cut });
        }
        Ok(more || read == Read::Turn)
    }

    /// The same for a connection that is ending: what is queued leaves, the socket says so, and the rest is the other
    /// side's to read until it closes too. True when it has.
    pub(crate) fn turn_ending(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        share: Share,
        events: &mut Vec<Event>,
    ) -> Result<(bool, bool), Ended> {
        self.look(peer, waker, events)?;
        if self.socket.is_over {
            return Ok((true, false));
        }
        self.collect(peer, events)?;
        let more = self.flush(peer, share, events)?;
        if self.outward.len() == 0 && self.mail.flights.is_empty() {
            // It may be closed already, by either side.
            let _ = SockRef::from(&self.socket.stream).shutdown(Shutdown::Write);
        }
        Ok((false, more))
    }

    /// A pair fails when the other side ends it; the socket knows that better.
    fn explained(&mut self, ended: Ended) -> Ended {
        match ended {
            Ended::Failed(status) if !status.is_peers_fault() && self.socket.is_over => Ended::Cut,
            other => other,
        }
    }

    /// Takes in what the device has done.
    fn collect(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<(), Ended> {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        // What completed before a failure completed.
        let collected = self.mail.flights.collect(&mut outcomes);
        let mut noted = Ok(());
        for outcome in outcomes.drain(..) {
            // Behind what ends the connection, memory still comes back.
            if noted.is_ok() || matches!(outcome, Outcome::Retired(_)) {
                noted = noted.and(self.note(peer, outcome, events));
            }
        }
        self.outcomes = outcomes;
        noted.and(collected)
    }

    fn note(&mut self, peer: PeerId, outcome: Outcome, events: &mut Vec<Event>) -> Result<(), Ended> {
        match outcome {
            Outcome::Message(message) => {
                (self.is_up, self.has_heard) = (true, true);
                let (prefix, note) = self.mail.arrive(message)?;
                self.outward.taken(peer, prefix.taken, events)?;
                if let Some(note) = note {
                    if prefix.matter == Matter::Grant {
                        self.outward.granted(&note.slot.bytes()[PREFIX_BYTES..note.bytes])?;
                    }
                    self.mail.read_note(note.slot)?;
                }
            }
            Outcome::Number(number, slot) => {
                if self.side == Side::Accepting {
                    return Err(Ended::Broken(format!("number {number} came with a write, which nobody asked for")));
                }
                self.mail.read_note(slot)?;
                self.inward.written(number)?;
            }
            Outcome::Retired(Flight::Message(slot)) => self.mail.sent_from(slot),
            Outcome::Retired(Flight::Read { spot, place, staged }) => self.inward.back(spot, place, staged, true),
            Outcome::Retired(Flight::Write { is_last, .. }) => {
                if is_last {
                    self.outward.arrived(peer, events);
                }
            }
        }
        Ok(())
    }

    fn look(&mut self, peer: PeerId, waker: &Waker, events: &mut Vec<Event>) -> Result<(), Ended> {
        self.socket.look(waker).map_err(|error| Ended::Lost(format!("reading: {error}")))?;
        if let Some(frame) = self.socket.refusal()? {
            self.has_heard = true;
            events.push(Event::Landed { peer, frame, body: Vec::new() });
        }
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.close();
    }
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, must_look: true, is_over: false, bytes: Vec::new() }
    }

    pub(super) fn into_stream(self) -> TcpStream {
        self.stream
    }

    pub(super) fn woken(&mut self) {
        self.must_look = true;
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// What came over it and was not read.
    pub(super) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Sends a little, all of it or an error.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let sent = send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Reads what came over it, and arms `waker` for more.
    pub(super) fn look(&mut self, waker: &Waker) -> io::Result<()> {
        self.look_for(waker, HEADER_BYTES + REFUSAL_BYTES_MAX)
    }

    /// As [`Socket::look`], until so many bytes are there: what follows them is somebody else's.
    pub(super) fn look_for(&mut self, waker: &Waker, bytes_max: usize) -> io::Result<()> {
        if !std::mem::take(&mut self.must_look) {
            return Ok(());
        }
        let mut context = Context::from_waker(waker);
        while !self.is_over && self.bytes.len() < bytes_max {
            if self.stream.poll_read_ready(&mut context)?.is_pending() {
                return Ok(());
            }
            let mut some = [0; 1024];
            let room = some.len().min(bytes_max - self.bytes.len());
            match self.stream.try_read(&mut some[..room]) {
                Ok(0) => self.is_over = true,
                Ok(read) => self.bytes.extend_from_slice(&some[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // A connection that was reset is over, too.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.is_over = true,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The refusal that came over it, once it is there.
    fn refusal(&mut self) -> Result<Option<Frame>, Ended> {
        let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let prefix = Prefix::decode(header)?;
        if prefix.head().kind != Kind::Refused || prefix.rest_bytes() > REFUSAL_BYTES_MAX {
            return Err(Ended::Broken("a frame on the socket is not a refusal".to_owned()));
        }
        let Some(rest) = self.bytes[HEADER_BYTES..].get(..prefix.rest_bytes()) else { return Ok(None) };
        let frame = prefix.finish(rest)?;
        self.bytes.clear();
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use pserver_core::memory::{Arena, Budget};

    use super::super::flights::Flights;
    use super::super::mail::slots;
    use super::super::plain::Plain;
    use super::super::provider::{Access, Provider};
    use super::super::{INLINE_BYTES_MAX, SLOT_BYTES};
    use super::*;
    use crate::conformance::world::push;
    use crate::verbs::flights::{Message, Spot};
    use crate::verbs::letters::Prefix as Before;

    #[test]
    fn a_place_that_was_filled_behind_a_failure_comes_back() {
        let bytes = INLINE_BYTES_MAX + 1;
        let mut budget = Budget::new();
        budget.line("places and messages", bytes.max(SLOT_BYTES), 4);
        let arena = Arena::new(&budget).expect("an arena");
        let domain = Plain::new().station().expect("a station").domain().expect("a domain");
        let counters = Arc::default();
        let near = Registry::new(&domain, Access::Near, &counters);
        let pair = domain.pair(&Flights::plan(false)).expect("a pair");
        let mut mail = Mail::new(Flights::new(pair, 0), &Arena::new(&slots()).expect("an arena")).expect("slots");
        let mut slot = arena.take(SLOT_BYTES).expect("a slot");
        let frame = push(0, &[&vec![0; bytes as usize]]).encode();
        Before { matter: Matter::Bulk, taken: 0, number: 0, bulk: 0, note: 0 }.encode(slot.bytes_mut());
        slot.bytes_mut()[PREFIX_BYTES..PREFIX_BYTES + frame.len()].copy_from_slice(&frame);
        mail.arrive(Message { slot, bytes: PREFIX_BYTES + frame.len() }).expect("there is room");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
        let _inside = runtime.enter();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let stream = std::net::TcpStream::connect(listener.local_addr().expect("a port")).expect("it listens");
        stream.set_nonblocking(true).expect("a socket");
        let socket = Socket::new(TcpStream::from_std(stream).expect("a socket"));
        let (outward, inward) = (Staging::new(near.clone()), Staging::new(near.clone()));
        let (side, health) = (Side::Accepting, Arc::default());
        let parts = Parts { mail, near, side, outward, inward, counters, health, is_checked: false };
        let mut line = Line::new(socket, parts);
        let (peer, mut events) = (PeerId(1), Vec::new());
        assert!(line.inward.turn(peer, &mut line.mail, (1 << 20, 8), &mut events).expect("a head") == Read::Held);
        line.land(vec![Incoming::Discard { bytes }]);
        let place = Incoming::Chunk { lease: arena.take(bytes).expect("a slot"), bytes };
        let number = Outcome::Number(0, arena.take(SLOT_BYTES).expect("a slot"));
        let spot = Spot { landing: 0, place: 0 };
        line.outcomes = vec![number, Outcome::Retired(Flight::Read { spot, place, staged: None })];
        line.collect(peer, &mut events).expect_err("nobody asked for a number");
        let (_, places) = line.into_parcels();
        assert!(matches!(places[..], [Incoming::Chunk { .. }]), "the place itself, and not what stands for it");
    }
}

use std::sync::{Arc, Mutex};

use pserver_core::ids::Sequence;
use pserver_core::port::{Doorbell, ReceiveBuffers};
use pserver_core::server::ShardReport;
use pserver_core::wire::{Frame, Head, Kind};

use super::*;
use crate::telemetry::SessionReport;

/// A session that records its events.
#[derive(Clone, Default)]
struct NotingSession {
    noted: Arc<Mutex<Vec<(&'static str, PeerId)>>>,
    turns: Arc<Mutex<Vec<u64>>>,
}

impl NodeSession for NotingSession {
    fn begin_turn(&mut self, nanos: u64) {
        self.turns.lock().unwrap().push(nanos);
    }

    fn report(&self, _: Now) -> SessionReport {
        SessionReport::Shard(ShardReport::default(), None)
    }

    fn handle(&mut self, _: Now, event: Event, _: &mut Vec<ServerOutput>) -> Result<(), Failure> {
        let what = match &event {
            Event::Accepted { .. } => "accepted",
            Event::Received { .. } => "received",
            Event::Gone { .. } => "gone",
            _ => "another",
        };
        self.noted.lock().unwrap().push((what, event.peer()));
        Ok(())
    }

    fn work(&mut self, _: Now, _: &mut Vec<ServerOutput>) -> Result<bool, Failure> {
        Ok(false)
    }

    fn deadline(&self) -> Option<Now> {
        None
    }

    fn finish(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

fn accepted(peer: u64) -> Event {
    Event::Accepted { peer: PeerId(peer), origin: "a test".to_owned(), transport: String::new() }
}

fn received(peer: u64, lane: u64) -> Event {
    let frame = Frame::bare(Head { sequence: Sequence(lane), ..Head::new(Kind::Hello) });
    Event::Received { peer: PeerId(peer), frame, body: ReceiveBuffers::new() }
}

fn gone(peer: u64) -> Event {
    Event::Gone { peer: PeerId(peer), reason: String::new(), unsent: Vec::new(), unfilled: ReceiveBuffers::new() }
}

/// Gives the sessions an event; returns the connection that must be closed, if any.
fn give(seats: &mut Seats<NotingSession>, nanos: u64, event: Event) -> Option<PeerId> {
    let closed = match seats.place(&event) {
        Some(place) => {
            seats.at(place).give(event);
            None
        }
        None => seats.greet(event),
    };
    for seat in seats.iter_mut() {
        seat.handle_given(nanos).unwrap();
    }
    closed
}

fn enter(seats: &mut Seats<NotingSession>, lane: u64) -> NotingSession {
    let session = NotingSession::default();
    seats.enter(lane, Seat::new(session.clone(), SessionControl::new(Doorbell::new(|| {}))));
    session
}

#[test]
fn each_session_gets_the_events_of_its_lane() {
    let mut seats = Seats::shared();
    let (one, two) = (enter(&mut seats, 1), enter(&mut seats, 257));
    for event in [accepted(7), accepted(8), received(8, 1), received(7, 257), received(7, 9), received(8, 9)] {
        assert_eq!(give(&mut seats, 1, event), None);
    }
    give(&mut seats, 2, gone(7));
    // An event of a closed connection reaches no session.
    assert_eq!(give(&mut seats, 2, received(7, 257)), None);
    let of = |peer| ["accepted", "received", "received"].map(|what| (what, PeerId(peer))).to_vec();
    assert_eq!(*one.noted.lock().unwrap(), of(8));
    assert_eq!(*two.noted.lock().unwrap(), [of(7), vec![("gone", PeerId(7))]].concat());
    assert_eq!((*one.turns.lock().unwrap()).clone(), [1], "a session begins a turn once");
    assert_eq!((*two.turns.lock().unwrap()).clone(), [1, 2]);
}

#[test]
fn connections_of_a_session_that_leaves_are_returned_and_reach_no_other_session() {
    let mut seats = Seats::shared();
    let (one, two) = (enter(&mut seats, 1), enter(&mut seats, 257));
    for event in [accepted(7), received(7, 257), accepted(8), received(8, 1)] {
        give(&mut seats, 1, event);
    }
    let (_, peers) = seats.leave(257).expect("it is there");
    assert_eq!(peers, [PeerId(7)]);
    assert!(seats.leave(257).is_none());
    assert_eq!(give(&mut seats, 2, received(7, 1)), None);
    assert_eq!(give(&mut seats, 2, gone(7)), None);
    // A new connection to the lane of the former session is closed.
    assert_eq!(give(&mut seats, 2, accepted(9)), None);
    assert_eq!(give(&mut seats, 2, received(9, 257)), Some(PeerId(9)));
    assert_eq!(one.noted.lock().unwrap().len(), 2);
    assert_eq!(two.noted.lock().unwrap().len(), 2);
    assert_eq!(seats.len(), 1);
}

#[test]
fn a_connection_without_a_hello_is_forgotten_when_it_ends() {
    let mut seats = Seats::shared();
    enter(&mut seats, 1);
    give(&mut seats, 1, accepted(7));
    give(&mut seats, 1, gone(7));
    // A connection whose first frame is not a hello is closed.
    give(&mut seats, 1, accepted(8));
    let Event::Received { peer, mut frame, body } = received(8, 1) else { unreachable!("it was just made") };
    frame.head.kind = Kind::Push;
    assert_eq!(give(&mut seats, 1, Event::Received { peer, frame, body }), Some(PeerId(8)));
    assert!(seats.routes.as_ref().is_some_and(|routes| routes.announced.is_empty() && routes.lanes.is_empty()));
}

#[test]
fn a_session_has_work_after_an_event_a_doorbell_or_its_deadline() {
    let mut seats = Seats::shared();
    enter(&mut seats, 1);
    let seat = seats.at(0);
    assert!(seat.has_work(1), "a new one looks around");
    seat.work(1).unwrap();
    assert!(!seat.has_work(2));
    seat.give(received(7, 1));
    assert!(seat.handle_given(3).unwrap() && !seat.handle_given(3).unwrap());
    seat.work(3).unwrap();
    assert!(seat.was_busy && !seat.has_work(3));
    seat.control.ring();
    assert!(seat.has_work(4) && !seat.has_work(4));
    seat.due = Some(Now(2));
    assert!(!seat.has_work(1_999_999) && seat.has_work(2_000_000));
}

//! Sessions that share a thread and its transport, each with the connections to its lane.

use pserver_core::error::Failure;
use pserver_core::ids::PeerId;
use pserver_core::port::Event;
use pserver_core::server::ServerOutput;
use pserver_core::time::Now;
use pserver_core::wire::Kind;
use rustc_hash::FxHashMap;

use super::session::{NodeSession, SessionControl, now_of};

/// A session on a thread.
pub(super) struct Seat<S> {
    pub(super) session: S,
    control: SessionControl,
    /// Events of this turn that it has not handled.
    given: Vec<Event>,
    out: Vec<ServerOutput>,
    /// Time of its last turn.
    begun: u64,
    /// Whether it had something to do in its last turn.
    pub(super) was_busy: bool,
    /// Whether more work is ready at once.
    is_ready: bool,
    /// When its work is due.
    due: Option<Now>,
}

/// The sessions of a thread.
pub(super) struct Seats<S> {
    /// Each with its lane. A lone session has all of them.
    seats: Vec<(u64, Seat<S>)>,
    /// The connections of sessions that share the thread; none for a lone one.
    routes: Option<Routes>,
}

#[derive(Default)]
struct Routes {
    /// The lane of each connection.
    lanes: FxHashMap<PeerId, u64>,
    /// Connections whose hello has not come, as they were announced.
    announced: FxHashMap<PeerId, Event>,
}

impl<S: NodeSession> Seat<S> {
    pub(super) fn new(session: S, control: SessionControl) -> Self {
        Self {
            session,
            control,
            given: Vec::new(),
            out: Vec::new(),
            begun: 0,
            was_busy: false,
            is_ready: true,
            due: None,
        }
    }

    /// Measures the last turn, and answers whoever asks for a report. It comes first in each turn of the thread.
    #[inline]
    pub(super) fn observe(&mut self, nanos: u64, before: u64) {
        if std::mem::take(&mut self.was_busy) {
            self.control.counters().turns.observe(nanos - before);
        }
        self.control.answer(|| self.session.report(now_of(nanos)));
    }

    #[inline]
    fn begin_turn(&mut self, nanos: u64) {
        if self.begun != nanos {
            self.begun = nanos;
            self.session.begin_turn(nanos);
        }
    }

    #[inline]
    pub(super) fn give(&mut self, event: Event) {
        self.given.push(event);
    }

    /// Handles the events that it was given, if there are any.
    #[inline]
    pub(super) fn handle_given(&mut self, nanos: u64) -> Result<bool, Failure> {
        if self.given.is_empty() {
            return Ok(false);
        }
        self.begin_turn(nanos);
        self.was_busy = true;
        for event in self.given.drain(..) {
            self.control.counters().received(&event);
            self.session.handle(now_of(nanos), event, &mut self.out)?;
        }
        Ok(true)
    }

    /// Whether it has work in this turn.
    #[inline]
    pub(super) fn has_work(&self, nanos: u64) -> bool {
        let is_due = || self.due.is_some_and(|due| due <= now_of(nanos));
        self.is_ready || is_due() || self.session.is_under_way() || self.control.take_ring()
    }

    /// Does due work, and keeps what the turn has decided.
    #[inline]
    pub(super) fn work(&mut self, nanos: u64) -> Result<(), Failure> {
        self.begin_turn(nanos);
        self.is_ready = self.session.work(now_of(nanos), &mut self.out)?;
        self.was_busy |= self.is_ready;
        self.session.commit()?;
        self.due = self.session.deadline();
        Ok(())
    }

    /// When its work is due.
    pub(super) fn due(&self) -> Option<Now> {
        self.due
    }

    /// The outputs of the turn, which its work has committed.
    pub(super) fn outputs(&mut self) -> impl Iterator<Item = ServerOutput> {
        let counters = self.control.counters();
        self.out.drain(..).inspect(|output| {
            if let ServerOutput::Submit(submit) = output {
                counters.sent(submit);
            }
        })
    }
}

impl<S: NodeSession> Seats<S> {
    /// One session, to which every event goes.
    pub(super) fn lone(session: S, control: SessionControl) -> Self {
        Self { seats: vec![(0, Seat::new(session, control))], routes: None }
    }

    /// Sessions that enter and leave; none yet.
    pub(super) fn shared() -> Self {
        Self { seats: Vec::new(), routes: Some(Routes::default()) }
    }

    pub(super) fn len(&self) -> usize {
        self.seats.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Seat<S>> {
        self.seats.iter().map(|(_, seat)| seat)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Seat<S>> {
        self.seats.iter_mut().map(|(_, seat)| seat)
    }

    pub(super) fn enter(&mut self, lane: u64, seat: Seat<S>) {
        self.seats.push((lane, seat));
    }

    /// Takes a session out, with its connections.
    pub(super) fn leave(&mut self, lane: u64) -> Option<(S, Vec<PeerId>)> {
        let (_, seat) = self.seats.remove(self.place_of(lane)?);
        let lanes = self.routes.iter_mut().flat_map(|routes| routes.lanes.extract_if(|_, one| *one == lane));
        Some((seat.session, lanes.map(|(peer, _)| peer).collect()))
    }

    /// The place of the session that an event is for; none where its connection is new.
    #[inline]
    pub(super) fn place(&mut self, event: &Event) -> Option<usize> {
        let Some(routes) = &mut self.routes else { return Some(0) };
        let peer = event.peer();
        let lane = *routes.lanes.get(&peer)?;
        if matches!(event, Event::Gone { .. }) {
            routes.lanes.remove(&peer);
        }
        self.place_of(lane)
    }

    /// The session at a place.
    #[inline]
    pub(super) fn at(&mut self, place: usize) -> &mut Seat<S> {
        &mut self.seats[place].1
    }

    /// Takes an event of a connection that has no session: its hello names the lane. Returns the peer that is to be
    /// closed: its lane has gone, or it begins with another frame.
    #[cold]
    pub(super) fn greet(&mut self, event: Event) -> Option<PeerId> {
        let routes = self.routes.as_mut()?;
        let peer = event.peer();
        if matches!(event, Event::Accepted { .. }) {
            routes.announced.insert(peer, event);
            return None;
        }
        // Others are buffers that a session which has left gets back.
        let accepted = routes.announced.remove(&peer)?;
        let lane = match &event {
            Event::Gone { .. } => return None,
            Event::Received { frame, .. } if frame.head.kind == Kind::Hello => frame.head.sequence.0,
            _ => return Some(peer),
        };
        let Some((_, seat)) = self.seats.iter_mut().find(|(one, _)| *one == lane) else { return Some(peer) };
        routes.lanes.insert(peer, lane);
        seat.give(accepted);
        seat.give(event);
        None
    }

    fn place_of(&self, lane: u64) -> Option<usize> {
        self.seats.iter().position(|(one, _)| *one == lane)
    }
}

#[cfg(test)]
mod tests;

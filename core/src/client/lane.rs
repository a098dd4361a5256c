//! A lane: the connection to one shard or the coordinator, with its requests.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use smallvec::SmallVec;

use super::request::{Finished, PendingRequest, Refused};
use super::{AwaitedAnswer, ClientOutput, PAUSE_FIRST, PAUSE_LONGEST, PAUSE_MOVED};
use crate::ids::{PeerId, Term, Ticket};
use crate::port::{Incoming, Payloads, ReceiveBuffers, Submit};
use crate::time::Now;
use crate::wire::{Address, Frame};

/// Payload bytes in flight per lane: enough to keep the transport busy, few enough for urgent requests to leave soon.
const IN_FLIGHT_BYTES_MAX: u64 = 2 * 1024 * 1024;
/// Frames in flight per lane; a transport queues 64.
const IN_FLIGHT_FRAMES_MAX: usize = 32;

/// After this many failed attempts the server may have moved.
const ADDRESS_ATTEMPTS: u32 = 3;

/// A lane, named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub(super) usize);

pub(super) enum LaneState {
    /// Disconnected; reconnects at `again`.
    Down { again: Now },
    /// The transport is asked to connect.
    Opening,
    /// The hello is sent.
    Greeting { peer: PeerId },
    /// Requests go out.
    Up { peer: PeerId },
}

impl LaneState {
    pub(super) fn peer(&self) -> Option<PeerId> {
        match self {
            Self::Greeting { peer } | Self::Up { peer } => Some(*peer),
            Self::Down { .. } | Self::Opening => None,
        }
    }
}

/// The connection to one shard, or to the coordinator.
pub(super) struct Lane {
    pub(super) address: Address,
    pub(super) number: u64,
    pub(super) state: LaneState,
    /// The server's name in errors.
    name: String,
    /// The previous connection, which may still return buffers.
    former: Option<PeerId>,
    pub(super) history: ConnectHistory,
    /// Whether the connection takes the receive buffers of answers with the requests.
    pub(super) takes_answers: bool,
    /// Whether it reconnects without waiting requests.
    pub(super) is_kept: bool,
    /// The server's description of what requests wait for.
    pub(super) awaited: Option<AwaitedAnswer>,
    /// Unanswered requests, in ticket order.
    requests: VecDeque<PendingRequest>,
    window: SendWindow,
    /// Answers being received, in the order of their heads.
    receives: VecDeque<PendingReceive>,
}

/// The attempts to connect a lane, and why the last connection ended.
pub(super) struct ConnectHistory {
    /// Whether the transport has established the current connection.
    pub(super) is_made: bool,
    /// First and last failed attempt since the last established connection.
    unmade: Option<(Now, Now)>,
    /// Attempts since the last welcome.
    attempts: u32,
    /// Delay before the next attempt.
    pause: Duration,
    /// Why the last connection ended.
    pub(super) reason: Option<String>,
    /// When the server refused the current connection.
    pub(super) refused_at: Option<Now>,
    /// Whether the last server that was reached does not lead the shard.
    pub(super) has_moved: bool,
    /// The highest term of the shard's leader that is known.
    term: Term,
    /// The term of the leader that has welcomed the client last.
    welcomed: Term,
}

/// The requests of a lane that wait to be sent, and those in flight.
#[derive(Default)]
struct SendWindow {
    /// Requests ready to send, most urgent first.
    waiting: BinaryHeap<Reverse<(u32, Ticket)>>,
    /// Requests that the server refused as busy, and when each is resent.
    paused: Vec<(Now, Ticket)>,
    /// Frames in flight.
    frames: usize,
    /// Payload bytes in flight.
    bytes: u64,
}

/// The request's entry for each payload of an answer; `None` for a discarded one.
pub(super) type AnsweredEntries = SmallVec<[Option<usize>; 1]>;

/// An answer being received.
struct PendingReceive {
    /// Its connection.
    peer: PeerId,
    /// Its request.
    ticket: Ticket,
    destinations: AnsweredEntries,
}

impl Lane {
    pub(super) fn new(address: Address, number: u64, name: String) -> Self {
        Self {
            address,
            number,
            state: LaneState::Down { again: Now(0) },
            name,
            former: None,
            history: ConnectHistory::new(),
            takes_answers: false,
            is_kept: false,
            awaited: None,
            requests: VecDeque::new(),
            window: SendWindow::default(),
            receives: VecDeque::new(),
        }
    }

    /// Describes a shard that has no parameters, of a job that is initialised.
    pub(super) fn describe_emptiness(&self) -> String {
        format!(
            "{} at {} was started anew and has none of the job's parameters, which were lost with its earlier \
             process; expected that all servers are started anew, with a checkpoint_dir to go on after such a loss, \
             and then new clients",
            self.name, self.address
        )
    }

    /// Describes the lane's unanswered requests.
    pub(super) fn describe(&self, requests: usize) -> String {
        if let (LaneState::Up { .. }, Some(awaited)) = (&self.state, &self.awaited) {
            return format!("{} at {}: {}", self.name, self.address, awaited.text);
        }
        let state = match self.state {
            LaneState::Down { .. } | LaneState::Opening => "not connected",
            LaneState::Greeting { .. } => "connecting",
            LaneState::Up { .. } => "connected",
        };
        let reason = self.history.reason.as_ref().map_or(String::new(), |reason| format!(", {reason}"));
        format!("{} at {}: {requests} requests without an answer ({state}{reason})", self.name, self.address)
    }

    /// Whether no connection could be made for `limit`.
    pub(super) fn is_absent(&self, now: Now, limit: Duration) -> bool {
        self.history.unmade.is_some_and(|(first, _)| first + limit <= now)
    }

    /// Whether the last attempt was made after `begun`, and failed.
    pub(super) fn has_failed_since(&self, begun: Now) -> bool {
        self.history.unmade.is_some_and(|(_, last)| begun < last)
    }

    /// Since when no connection could be made, and why, in words.
    pub(super) fn describe_absence(&self, now: Now) -> String {
        let seconds = self.history.unmade.map_or(0.0, |(first, _)| first.until(now).as_secs_f64());
        let reason = self.history.reason.as_deref().unwrap_or("no reason is known");
        format!("{} at {} has refused connections for {seconds:.1} s ({reason})", self.name, self.address)
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether it is to be connected.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_kept || self.is_busy()
    }

    /// Whether something waits for a server that does not answer at this address, or does not lead the shard.
    pub(super) fn needs_address(&self) -> bool {
        self.has_moved() || (self.is_busy() && self.history.attempts >= ADDRESS_ATTEMPTS)
    }

    /// Whether the server at this address does not lead the shard.
    pub(super) fn has_moved(&self) -> bool {
        self.is_wanted() && self.history.has_moved
    }

    /// The highest term of the shard's leader that is known.
    pub(super) fn term(&self) -> Term {
        self.history.term
    }

    /// From the next attempt on, which is made at once, the shard is at this address, where its leader has this term.
    pub(super) fn move_to(&mut self, address: Address, term: Term) {
        // The answer of a coordinator that knew less, and came late.
        if term < self.history.term {
            return;
        }
        self.history.term = term;
        if address == self.address {
            return;
        }
        self.address = address;
        let history = &mut self.history;
        (history.attempts, history.pause, history.unmade, history.has_moved) = (0, PAUSE_FIRST, None, false);
        if let LaneState::Down { again } = &mut self.state {
            *again = Now(0);
        }
    }

    /// How many of these requests, in order, are not answered.
    pub(super) fn count(&self, tickets: &[Ticket]) -> usize {
        self.requests.iter().filter(|request| tickets.binary_search(&request.ticket()).is_ok()).count()
    }

    /// Adds a request, whose ticket is larger than those before.
    pub(super) fn ask(&mut self, request: PendingRequest, out: &mut ClientOutput) {
        self.window.waiting.push(Reverse((request.priority, request.ticket())));
        self.requests.push_back(request);
        self.dispatch(out);
    }

    /// Sends the most urgent requests, until enough are in flight to keep the transport busy.
    pub(super) fn dispatch(&mut self, out: &mut ClientOutput) {
        let LaneState::Up { peer } = self.state else { return };
        while self.window.is_open() {
            let Some(Reverse((_, ticket))) = self.window.waiting.pop() else { return };
            let (takes_answers, term) = (self.takes_answers, self.history.welcomed);
            let Some(request) = self.request(ticket).filter(|request| request.may_leave()) else { continue };
            let body = request.payload.take().expect("the payload of a request that may leave is here");
            request.is_in_flight = true;
            let (bytes, mut frame) = (request.bytes, request.frame.clone());
            frame.head.term = term;
            let posted = request.post_answer(takes_answers);
            out.work.extend(posted.map(|into| Submit::PostAnswer { peer, request: ticket, into }));
            out.work.push_back(Submit::Send { peer, ticket, frame, body });
            self.window.frames += 1;
            self.window.bytes += bytes;
        }
    }

    /// Sends what was paused until now.
    pub(super) fn resume(&mut self, now: Now, out: &mut ClientOutput) {
        if self.window.paused.is_empty() {
            return;
        }
        let due: Vec<_> = self.window.paused.extract_if(.., |(again, _)| *again <= now).collect();
        for (_, ticket) in due {
            match self.request(ticket).map(|request| request.may_leave()) {
                Some(true) => self.enqueue(ticket),
                // The refusal was faster than the rest of the payload.
                Some(false) => self.window.paused.push((now + PAUSE_FIRST, ticket)),
                None => {}
            }
        }
        self.dispatch(out);
    }

    /// The next time at which a paused request is resent.
    pub(super) fn resumes(&self) -> Option<Now> {
        self.window.paused.iter().map(|(again, _)| *again).min()
    }

    /// Pauses a request that the server refused as busy.
    pub(super) fn pause(&mut self, ticket: Ticket, again: Now) {
        if let Some(request) = self.request(ticket) {
            request.was_busy = true;
            self.window.paused.push((again, ticket));
        }
    }

    /// Handles a completed send.
    pub(super) fn sent(&mut self, ticket: Ticket, body: Payloads, out: &mut ClientOutput) {
        if let Some(request) = self.request(ticket) {
            request.return_payload(body);
        }
        self.transmitted(ticket, out);
    }

    /// Handles a transmitted frame whose payload may still be read: the next frame may follow.
    pub(super) fn transmitted(&mut self, ticket: Ticket, out: &mut ClientOutput) {
        if let Some(request) = self.request(ticket)
            && request.note_transmitted()
        {
            let bytes = request.bytes;
            self.window.frames -= 1;
            self.window.bytes -= bytes;
        }
        self.dispatch(out);
    }

    /// Handles an accepted connection, to a leader of this term: every unanswered request is resent in order.
    pub(super) fn welcome(&mut self, peer: PeerId, term: Term, out: &mut ClientOutput) {
        self.state = LaneState::Up { peer };
        self.history.welcomed(term);
        self.window.waiting = self.requests.iter().map(|one| Reverse((one.priority, one.ticket()))).collect();
        self.dispatch(out);
    }

    /// Whether `peer` is the connection before this one.
    pub(super) fn had_peer(&self, peer: PeerId) -> bool {
        self.former == Some(peer)
    }

    /// Handles a lost connection; the next attempt follows after a pause.
    pub(super) fn lost(&mut self, now: Now, reason: String) {
        (self.former, self.takes_answers) = (self.state.peer(), false);
        let was_up = matches!(self.state, LaneState::Up { .. });
        self.state = LaneState::Down { again: now + self.history.pause };
        // Every unanswered request is resent on the next connection.
        self.requests.iter_mut().for_each(|request| request.was_busy = false);
        self.window = SendWindow::default();
        self.history.lost(now, was_up, reason);
    }

    /// Fails a request, if it is here.
    pub(super) fn refuse(&mut self, ticket: Ticket, refused: Refused) {
        if let Some(request) = self.request(ticket) {
            request.refuse(refused);
        }
    }

    /// The tickets of its requests, in order.
    pub(super) fn tickets(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.requests.iter().map(PendingRequest::ticket)
    }

    /// Fails every request.
    pub(super) fn refuse_all(&mut self, refused: &Refused) {
        self.requests.iter_mut().for_each(|request| request.refuse(refused.clone()));
    }

    /// Fails requests; true when the transport holds buffers of one.
    pub(super) fn cancel(&mut self, tickets: &[Ticket], refused: &Refused) -> bool {
        let mut is_away = false;
        for request in &mut self.requests {
            if tickets.binary_search(&request.ticket()).is_ok() {
                request.refuse(refused.clone());
                is_away |= !request.is_returned();
            }
        }
        is_away
    }

    /// Removes a request if it is finished.
    pub(super) fn take_over(&mut self, ticket: Ticket) -> Option<PendingRequest> {
        let at = self.position(ticket)?;
        if self.requests[at].is_over() { self.requests.remove(at) } else { None }
    }

    /// Removes every finished request, with its result.
    pub(super) fn take_all_over(&mut self) -> Vec<(Ticket, Result<Finished, Refused>)> {
        let is_over = |request: &PendingRequest| request.is_over();
        if !self.requests.iter().any(is_over) {
            return Vec::new();
        }
        let (over, rest): (Vec<_>, _) = std::mem::take(&mut self.requests).into_iter().partition(is_over);
        self.requests = rest.into();
        over.into_iter().map(|request| (request.ticket(), request.finish())).collect()
    }

    /// Chooses the receive buffers of an answer.
    pub(super) fn post_receive(&mut self, peer: PeerId, frame: &Frame) -> ReceiveBuffers {
        let ticket = frame.head.request;
        let mut request = self.request(ticket);
        let (mut destinations, mut into) = (AnsweredEntries::new(), ReceiveBuffers::new());
        for entry in frame.entries.iter().filter(|entry| entry.bytes > 0) {
            let place = request.as_mut().and_then(|request| request.borrow_buffer(entry));
            let (index, incoming) = match place {
                Some((index, place)) => (Some(index), place),
                None => (None, Incoming::Discard { bytes: entry.bytes }),
            };
            destinations.push(index);
            into.push(incoming);
        }
        self.receives.push_back(PendingReceive { peer, ticket, destinations });
        into
    }

    /// Whether the receive of an answer was posted after its head.
    pub(super) fn has_receive(&self, peer: PeerId, ticket: Ticket) -> bool {
        self.receives.iter().any(|receive| (receive.peer, receive.ticket) == (peer, ticket))
    }

    /// Returns the buffers that an answer has filled to its request; gives for each payload the entry of its buffer.
    pub(super) fn return_answer(&mut self, frame: &Frame, body: ReceiveBuffers) -> AnsweredEntries {
        let Some(request) = self.request(frame.head.request) else { return AnsweredEntries::new() };
        let entries = frame.entries.iter().filter(|entry| entry.bytes > 0);
        entries.zip(body).map(|(entry, place)| request.return_answer(entry, place)).collect()
    }

    /// Returns the buffers of an answer that no value has filled, if its request is here.
    pub(super) fn return_unused(&mut self, ticket: Ticket, into: ReceiveBuffers) -> Option<ReceiveBuffers> {
        match self.request(ticket) {
            Some(request) => request.return_unused(into),
            None => return Some(into),
        }
        None
    }

    /// Handles a received answer; `kept` has for each payload the entry whose buffer holds it.
    pub(super) fn answered(&mut self, frame: &Frame, kept: AnsweredEntries) {
        let ticket = frame.head.request;
        let mut kept = kept.into_iter();
        let Some(request) = self.request(ticket) else { return };
        if frame.entries.is_empty() {
            request.answer_whole(frame);
        }
        for entry in &frame.entries {
            let place = if entry.bytes > 0 { kept.next().flatten() } else { None };
            match place {
                Some(index) => request.answer_at(index, entry),
                None => request.answer_entry(entry),
            }
        }
    }

    /// Takes back an unsent payload, if its request is here.
    pub(super) fn return_payload(&mut self, ticket: Ticket, body: Payloads) -> Option<Payloads> {
        match self.request(ticket) {
            Some(request) => request.return_payload(body),
            None => return Some(body),
        }
        self.enqueue(ticket);
        None
    }

    /// Returns the buffers of the connection's first receive to their request; gives for each payload the entry of its
    /// buffer.
    pub(super) fn return_buffers(
        &mut self,
        peer: PeerId,
        places: &mut dyn Iterator<Item = Incoming>,
    ) -> AnsweredEntries {
        let Some(at) = self.receives.iter().position(|landing| landing.peer == peer) else {
            return AnsweredEntries::new();
        };
        let PendingReceive { ticket, destinations, .. } = self.receives.remove(at).expect("it was just found");
        let mut request = self.request(ticket);
        for (index, place) in destinations.iter().zip(places) {
            if let (Some(index), Some(request)) = (*index, &mut request) {
                request.return_buffer(index, place);
            }
        }
        destinations
    }

    /// Returns unfilled receive buffers of a closed connection, in order.
    pub(super) fn return_all_buffers(&mut self, peer: PeerId, unfilled: ReceiveBuffers) {
        let mut places = unfilled.into_iter().peekable();
        while places.peek().is_some() {
            if self.return_buffers(peer, &mut places).is_empty() {
                return;
            }
        }
    }

    /// Fails every request after the loss of the transport.
    pub(super) fn drop_all(&mut self, refused: &Refused) -> Vec<(Ticket, Result<Finished, Refused>)> {
        self.receives.clear();
        self.requests.drain(..).map(|request| (request.ticket(), Err(refused.clone()))).collect()
    }

    fn enqueue(&mut self, ticket: Ticket) {
        if let Some(at) = self.position(ticket) {
            self.window.waiting.push(Reverse((self.requests[at].priority, ticket)));
        }
    }

    fn request(&mut self, ticket: Ticket) -> Option<&mut PendingRequest> {
        let at = self.position(ticket)?;
        Some(&mut self.requests[at])
    }

    fn position(&self, ticket: Ticket) -> Option<usize> {
        self.requests.binary_search_by_key(&ticket, PendingRequest::ticket).ok()
    }
}

impl ConnectHistory {
    fn new() -> Self {
        Self {
            is_made: false,
            unmade: None,
            attempts: 0,
            pause: PAUSE_FIRST,
            reason: None,
            refused_at: None,
            has_moved: false,
            term: Term(0),
            welcomed: Term(0),
        }
    }

    /// Records a connection that a leader of this term has accepted.
    fn welcomed(&mut self, term: Term) {
        (self.term, self.welcomed) = (term, term);
        (self.is_made, self.unmade, self.attempts, self.pause) = (true, None, 0, PAUSE_FIRST);
        self.has_moved = false;
    }

    /// Records the end of a connection, which was accepted or not.
    fn lost(&mut self, now: Now, was_up: bool, reason: String) {
        // A server that is slow or refuses the hello is present.
        let first = self.unmade.map_or(now, |(first, _)| first);
        self.unmade = (!self.is_made).then_some((first, now));
        self.is_made = false;
        self.attempts = self.attempts.saturating_add(u32::from(!was_up));
        self.pause = (self.pause * 2).min(if self.has_moved { PAUSE_MOVED } else { PAUSE_LONGEST });
        // The refusal explains more than the close that follows it.
        if self.refused_at.take().is_none() {
            self.reason = Some(reason);
        }
    }
}

impl SendWindow {
    /// Whether another request may be sent. One may be of any size.
    fn is_open(&self) -> bool {
        self.frames == 0 || self.frames < IN_FLIGHT_FRAMES_MAX && self.bytes < IN_FLIGHT_BYTES_MAX
    }
}

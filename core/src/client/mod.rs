//! Client side of the protocol: requests over lanes, kept until they are answered.
//!
//! A lane is the connection to one shard or to the coordinator. A request is a frame with its payloads and the receive
//! buffers of its answer. After a lost connection the lane reconnects and resends every unanswered request in order;
//! servers recognise duplicates.
//!
//! Not here: sockets, threads, clocks, and calls: the owner of a [`Client`] composes them from requests.

mod lane;
mod request;

#[cfg(test)]
mod tests;

pub use lane::LaneId;
pub use request::{Finished, Refused, RequestBody, ValueSum};

use std::collections::VecDeque;
use std::time::Duration;

use prost::Message;

use crate::error::Failure;
use crate::ids::{
    Epoch, Generation, Incarnation, JobRun, NO_TRAINER, PeerId, RunNumber, Sequence, Term, Ticket, TrainerId,
};
use crate::port::{Event, Incoming, Payloads, ReceiveBuffers, Submit};
use crate::time::Now;
use crate::wire::{Address, ErrorCode, ErrorMessage, Frame, Head, HelloMessage, Joined, Kind, Role};
use lane::{AnsweredEntries, Lane, LaneState};
use request::PendingRequest;

/// First delay before a reconnect; it doubles up to the longest.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_LONGEST: Duration = Duration::from_millis(1000);
/// The longest to a server that does not lead the shard yet.
const PAUSE_MOVED: Duration = Duration::from_millis(100);

/// Identity of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Kind of process.
    pub role: Role,
    /// The rank; [`NO_TRAINER`] before it has joined.
    pub trainer: TrainerId,
    /// Incarnation of that rank.
    pub incarnation: Incarnation,
    /// The run that it takes part in; zero before it has joined.
    pub run: JobRun,
    /// Epoch of the job; zero before it is known.
    pub epoch: Epoch,
    /// Generation of the initialisation it knows.
    pub generation: Generation,
    /// The host's name, for the other side's error texts.
    pub host: String,
    /// The process number, for the same.
    pub process: u32,
    /// Longest wait of a call for an absent server; `None` means its deadline.
    pub absence: Option<Duration>,
}

impl Identity {
    /// The identity of a process before it has joined.
    #[must_use]
    pub fn stranger(role: Role, host: String, process: u32) -> Self {
        Self {
            role,
            trainer: NO_TRAINER,
            incarnation: Incarnation(0),
            run: JobRun::default(),
            epoch: Epoch(0),
            generation: Generation(0),
            host,
            process,
            absence: None,
        }
    }

    /// Takes the rank and the run that the coordinator gave it.
    pub fn join(&mut self, joined: &Joined) {
        self.trainer = TrainerId(joined.trainer);
        self.incarnation = Incarnation(joined.incarnation);
        let trainers = joined.job.map_or(0, |job| job.trainers);
        self.run = JobRun { number: RunNumber(joined.run), trainers };
        self.epoch = Epoch(joined.epoch);
    }

    /// A head of this client.
    fn sign(&self, head: Head) -> Head {
        let Self { epoch, trainer, incarnation, generation, .. } = *self;
        Head { epoch, trainer, incarnation, generation, ..head }
    }
}

/// The actions that a client asks of its owner: first the changes of connections, then the work.
#[derive(Default)]
pub struct ClientOutput {
    /// Connections to begin and to end, in order.
    pub connections: Vec<ConnectionChange>,
    /// Work for the transport, in order: the argument of [`Transport::submit`](crate::port::Transport::submit).
    pub work: VecDeque<Submit>,
}

impl ClientOutput {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty() && self.work.is_empty()
    }
}

/// A connection to begin or to end.
pub enum ConnectionChange {
    /// Begin to connect this lane, then call [`Client::connecting`] or [`Client::unreachable`].
    Connect {
        /// The lane.
        lane: LaneId,
        /// Where to.
        address: Address,
    },
    /// End this connection.
    Close(PeerId),
}

/// A server's answer about what requests wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwaitedAnswer {
    /// Its text.
    pub text: String,
    /// Whether the server itself ends the wait.
    pub ends_by_itself: bool,
}

/// The requests and lanes of one trainer.
pub struct Client {
    identity: Identity,
    lanes: Vec<Lane>,
    /// Finished requests, in order of completion.
    finished: Vec<(Ticket, Result<Finished, Refused>)>,
    next_ticket: u64,
}

impl Client {
    /// A client without lanes.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self { identity, lanes: Vec::new(), finished: Vec::new(), next_ticket: 1 }
    }

    /// Identity of a client.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Changes the identity; open connections keep the old one.
    pub fn identify(&mut self, change: impl FnOnce(&mut Identity)) {
        change(&mut self.identity);
    }

    /// Adds a lane to `address`; `number` is the lane's number at the server. It connects when it is first used.
    pub fn add_lane(&mut self, address: Address, number: u64, name: String) -> LaneId {
        self.lanes.push(Lane::new(address, number, name));
        LaneId(self.lanes.len() - 1)
    }

    /// Whether a request waits for a shard that failed several attempts to connect: the coordinator may know a newer
    /// address.
    #[must_use]
    pub fn needs_address(&self) -> bool {
        self.lanes.iter().any(|lane| lane.number > 0 && lane.needs_address())
    }

    /// Whether a lane's connection is accepted.
    #[must_use]
    pub fn is_connected(&self, lane: LaneId) -> bool {
        matches!(self.lanes[lane.0].state, LaneState::Up { .. })
    }

    /// The lanes that are connected and have not answered some of these requests, whose tickets are in order.
    pub fn connected_lanes<'a>(&'a self, tickets: &'a [Ticket]) -> impl Iterator<Item = LaneId> + 'a {
        let lanes = self.lanes.iter().enumerate();
        let is_waiting = |lane: &Lane| matches!(lane.state, LaneState::Up { .. }) && lane.count(tickets) > 0;
        lanes.filter(move |(_, lane)| is_waiting(lane)).map(|(index, _)| LaneId(index))
    }

    /// Records the server's description of what a lane's requests wait for.
    pub fn note_awaited(&mut self, lane: LaneId, awaited: Option<AwaitedAnswer>) {
        self.lanes[lane.0].awaited = awaited;
    }

    /// Describes the wait of these requests, whose tickets are in order, if every server that has not answered them is
    /// connected and ends the wait itself.
    #[must_use]
    pub fn ends_by_itself(&self, tickets: &[Ticket]) -> Option<&str> {
        let mut first = None;
        for lane in self.lanes.iter().filter(|lane| lane.count(tickets) > 0) {
            let is_up = matches!(lane.state, LaneState::Up { .. });
            let awaited = lane.awaited.as_ref().filter(|awaited| is_up && awaited.ends_by_itself)?;
            first = first.or(Some(awaited.text.as_str()));
        }
        first
    }

    /// Describes a server that has refused connections for `limit`, and since `begun`, among the lanes of these
    /// requests, whose tickets are sorted.
    #[must_use]
    pub fn absent(&self, now: Now, limit: Duration, begun: Now, tickets: &[Ticket]) -> Option<String> {
        let is_gone =
            |lane: &&Lane| lane.is_absent(now, limit) && lane.has_failed_since(begun) && lane.count(tickets) > 0;
        self.lanes.iter().find(is_gone).map(|lane| lane.describe_absence(now))
    }

    /// Whether some server refuses connections for `limit`.
    #[must_use]
    pub fn has_absent(&self, now: Now, limit: Duration) -> bool {
        self.lanes.iter().any(|lane| lane.is_absent(now, limit))
    }

    /// Whether a request waits for a shard that the server at the lane's address does not lead.
    #[must_use]
    pub fn has_moved(&self) -> bool {
        self.lanes.iter().any(Lane::has_moved)
    }

    /// Changes the address of a lane's next connection, and the term of the shard's leader there; an open one stays.
    pub fn move_lane(&mut self, lane: LaneId, address: Address, term: Term) {
        self.lanes[lane.0].move_to(address, term);
    }

    /// Sends a request over a lane as soon as its connection allows. The head's identity is filled in here.
    pub fn ask(&mut self, lane: LaneId, mut frame: Frame, body: RequestBody, out: &mut ClientOutput) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let generation = frame.head.generation;
        frame.head = Head { request: ticket, ..self.identity.sign(frame.head) };
        if generation != Generation(0) {
            frame.head.generation = generation;
        }
        self.lanes[lane.0].ask(PendingRequest::new(frame, body), out);
        ticket
    }

    /// Takes the result of a request, if it is finished.
    pub fn take(&mut self, ticket: Ticket) -> Option<Result<Finished, Refused>> {
        let at = self.finished.iter().position(|(one, _)| *one == ticket)?;
        Some(self.finished.remove(at).1)
    }

    /// Whether any request is over and was not taken.
    #[must_use]
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Takes every request that is over.
    pub fn take_finished(&mut self) -> impl Iterator<Item = (Ticket, Result<Finished, Refused>)> {
        self.finished.drain(..)
    }

    /// Whether any request is not finished.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.lanes.iter().any(Lane::is_busy)
    }

    /// Opens the lanes that have something to send and whose pause is over. Call after [`Client::ask`] and when
    /// [`Client::deadline`] has passed.
    pub fn drive(&mut self, now: Now, out: &mut ClientOutput) {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            lane.resume(now, out);
            if !lane.is_wanted() {
                continue;
            }
            if let LaneState::Down { again } = lane.state
                && again <= now
            {
                lane.state = LaneState::Opening;
                let address = lane.address.of_lane(lane.number);
                out.connections.push(ConnectionChange::Connect { lane: LaneId(index), address });
            }
        }
    }

    /// The next time at which [`Client::drive`] has work.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        let next = |lane: &Lane| match lane.state {
            LaneState::Down { again } => Some(again),
            LaneState::Opening | LaneState::Greeting { .. } => None,
            LaneState::Up { .. } => lane.resumes(),
        };
        self.lanes.iter().filter(|lane| lane.is_wanted()).filter_map(next).min()
    }

    /// Records that a lane is connecting, and sends the hello first.
    pub fn connecting(&mut self, lane: LaneId, peer: PeerId, out: &mut ClientOutput) {
        let identity = &self.identity;
        let lane = &mut self.lanes[lane.0];
        lane.state = LaneState::Greeting { peer };
        lane.history.is_made = false;
        let (sequence, term) = (Sequence(lane.number), lane.term());
        let head = Head { sequence, term, ..identity.sign(Head::new(Kind::Hello)) };
        let role = identity.role.into();
        let absence_millis = identity.absence.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let (host, process) = (identity.host.clone(), identity.process);
        let message = HelloMessage {
            role,
            host,
            process,
            absence_millis,
            run: identity.run.number.0,
            run_trainers: identity.run.trainers,
        };
        let frame = Frame::with_control(head, &message);
        out.work.push_back(Submit::Send { peer, ticket: Ticket(0), frame, body: Payloads::new() });
    }

    /// Records that a lane cannot be connected.
    pub fn unreachable(&mut self, now: Now, lane: LaneId, failure: &Failure) {
        self.lanes[lane.0].lost(now, failure.to_string());
    }

    /// Handles one event and appends the resulting actions to `out`.
    pub fn handle(&mut self, now: Now, event: Event, out: &mut ClientOutput) {
        match event {
            Event::Head { peer, frame } => {
                let into = match self.lane_of(peer) {
                    Some(lane) => lane.post_receive(peer, &frame),
                    None => Incoming::discard_all(&frame),
                };
                out.work.push_back(Submit::PostReceive { peer, into });
            }
            Event::Received { peer, frame, body } => self.received(now, peer, &frame, body, out),
            Event::Sent { peer, ticket, body } => {
                let Some(lane) = self.lane_of(peer) else { return };
                lane.sent(ticket, body, out);
                self.settle(peer, ticket);
            }
            Event::AnswerReturned { request, into, .. } => self.answer_returned(request, into),
            Event::TakesAnswers { peer } => {
                if let Some(lane) = self.lane_of(peer) {
                    lane.takes_answers = true;
                }
            }
            Event::Gone { peer, reason, unsent, unfilled } => {
                self.return_unsent(unsent);
                self.gone(now, peer, reason, unfilled, out);
            }
            Event::Transmitted { peer, ticket } => {
                if let Some(lane) = self.lane_of(peer) {
                    lane.transmitted(ticket, out);
                }
            }
            Event::Connected { peer } => {
                if let Some(lane) = self.lane_of(peer) {
                    lane.history.is_made = true;
                }
            }
            Event::Accepted { .. } | Event::Moved { .. } => {}
        }
    }

    /// Cancels requests, whose tickets are sorted. A connection whose transport holds buffers of one is closed, which
    /// returns them; other requests on it are resent. A request finishes, and drops its buffers, when all of them are
    /// returned.
    pub fn cancel(&mut self, tickets: &[Ticket], refused: &Refused, out: &mut ClientOutput) {
        for lane in &mut self.lanes {
            if lane.cancel(tickets, refused) {
                out.connections.extend(lane.state.peer().map(ConnectionChange::Close));
            }
            self.finished.extend(lane.take_all_over());
        }
    }

    /// Fails every request: each is finished once the transport has returned its buffers.
    pub fn refuse_all(&mut self, refused: &Refused, out: &mut ClientOutput) {
        let mut all: Vec<Ticket> = self.lanes.iter().flat_map(Lane::tickets).collect();
        all.sort_unstable();
        self.cancel(&all, refused, out);
    }

    /// Ends every request after the transport failed, with all buffers it held.
    pub fn break_off(&mut self, now: Now, refused: &Refused) {
        for lane in &mut self.lanes {
            lane.lost(now, refused.text.clone());
            self.finished.extend(lane.drop_all(refused));
        }
    }

    /// Describes the lanes with unanswered requests, and why, for the text of a deadline.
    #[must_use]
    pub fn outstanding(&self, tickets: &[Ticket]) -> String {
        let counts = self.lanes.iter().map(|lane| (lane, lane.count(tickets)));
        let texts: Vec<String> =
            counts.filter(|(_, count)| *count > 0).map(|(lane, count)| lane.describe(count)).collect();
        texts.join("; ")
    }

    fn lane_of(&mut self, peer: PeerId) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| lane.state.peer() == Some(peer))
    }

    fn received(&mut self, now: Now, peer: PeerId, frame: &Frame, body: ReceiveBuffers, out: &mut ClientOutput) {
        let is_trainer = self.identity.role == Role::Trainer;
        let Some(lane) = self.lane_of(peer) else { return };
        // An answer without payload has no posted receive.
        let kept = if body.is_empty() {
            AnsweredEntries::new()
        } else if lane.has_receive(peer, frame.head.request) {
            lane.return_buffers(peer, &mut body.into_iter())
        } else {
            lane.return_answer(frame, body)
        };
        match frame.head.kind {
            // The wire format refuses payloads of these kinds.
            Kind::Welcome if frame.head.term < lane.term() => {
                out.connections.push(ConnectionChange::Close(peer));
                lane.history.has_moved = true;
            }
            Kind::Welcome => {
                // The server treats the open connection as a sign of life.
                lane.is_kept = is_trainer;
                lane.welcome(peer, frame.head.term, out);
            }
            Kind::Refused => self.refused(now, peer, frame, out),
            Kind::Error => self.error(now, peer, frame),
            _ => lane.answered(frame, kept),
        }
        self.settle(peer, frame.head.request);
    }

    /// Handles a refused connection. `Fenced` and `Unauthenticated` are permanent; other errors are retried.
    fn refused(&mut self, now: Now, peer: PeerId, frame: &Frame, out: &mut ClientOutput) {
        let refused = Refused::of(frame);
        let Some(lane) = self.lane_of(peer) else { return };
        out.connections.push(ConnectionChange::Close(peer));
        if matches!(refused.code, ErrorCode::Fenced | ErrorCode::Unauthenticated) {
            lane.refuse_all(&refused);
            lane.is_kept = false;
        }
        lane.history.has_moved = refused.code == ErrorCode::Moved;
        lane.history.reason = Some(refused.text);
        lane.history.refused_at = Some(now);
    }

    fn error(&mut self, now: Now, peer: PeerId, frame: &Frame) {
        let mut refused = Refused::of(frame);
        let is_initialised = self.identity.generation > Generation(0);
        let Some(lane) = self.lane_of(peer) else { return };
        if refused.code == ErrorCode::NotInitialised && is_initialised && lane.number > 0 {
            refused.text = lane.describe_emptiness();
        }
        if refused.code == ErrorCode::Busy {
            lane.history.reason = Some(refused.text);
            lane.pause(frame.head.request, now + PAUSE_FIRST);
        } else {
            lane.refuse(frame.head.request, refused);
        }
    }

    /// Returns the payloads of a closed connection to their requests, on whichever lane these are: the transport also
    /// returns work that was submitted after the end of its connection.
    fn return_unsent(&mut self, unsent: Vec<(Ticket, Payloads)>) {
        for (ticket, body) in unsent {
            self.lanes.iter_mut().try_fold(body, |body, lane| lane.return_payload(ticket, body));
        }
    }

    /// Returns the buffers of an answer that no value has filled, to the request on whichever lane it is.
    fn answer_returned(&mut self, request: Ticket, into: ReceiveBuffers) {
        self.lanes.iter_mut().try_fold(into, |into, lane| lane.return_unused(request, into));
        let over = self.lanes.iter_mut().find_map(|lane| lane.take_over(request));
        self.finished.extend(over.map(|over| (request, over.finish())));
    }

    /// Handles a closed connection: every receive buffer is returned.
    fn gone(&mut self, now: Now, peer: PeerId, reason: String, unfilled: ReceiveBuffers, out: &mut ClientOutput) {
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.state.peer() == Some(peer) || lane.had_peer(peer)) {
            // Buffers posted while the connection closed are returned later.
            lane.return_all_buffers(peer, unfilled);
            if !lane.had_peer(peer) {
                lane.lost(now, reason);
            }
        }
        for lane in &mut self.lanes {
            lane.dispatch(out);
            self.finished.extend(lane.take_all_over());
        }
    }

    /// Moves a finished request from its lane to `finished`.
    fn settle(&mut self, peer: PeerId, ticket: Ticket) {
        if let Some(request) = self.lane_of(peer).and_then(|lane| lane.take_over(ticket)) {
            self.finished.push((ticket, request.finish()));
        }
    }
}

impl Refused {
    fn of(frame: &Frame) -> Self {
        let message = ErrorMessage::decode(frame.control.as_slice()).unwrap_or_default();
        Self { code: message.code(), text: message.text, trainers: message.trainers }
    }
}

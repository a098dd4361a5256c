//! The trainer's side: requests over lanes, kept until they are answered.
//!
//! A lane is the connection to one shard, or to the coordinator. A request is a frame with its payload's parcels
//! and the places for its answer. When a connection is lost the lane connects again and sends every request that
//! is not answered once more, in order; servers recognise what they have applied already.
//!
//! Not here: sockets, threads, clocks, and what a call means: whoever owns a [`Client`] puts calls together from
//! requests.

mod lane;
mod request;

#[cfg(test)]
mod tests;

pub use lane::LaneId;
pub use request::{Finished, Refused, RequestBody};

use std::time::Duration;

use prost::Message;

use crate::error::Failure;
use crate::ids::{Epoch, Generation, Incarnation, NO_TRAINER, PeerId, Sequence, Ticket, TrainerId};
use crate::port::{Event, Incoming, Outgoing, Submit};
use crate::time::Now;
use crate::wire::{Address, ErrorCode, ErrorMessage, Frame, Head, HelloMessage, Kind, Role};
use lane::{Lane, LaneState};
use request::Request;

/// The first pause before a lost connection is tried again; it doubles up to the longest.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_LONGEST: Duration = Duration::from_millis(1000);

/// Who this client is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// What kind of process.
    pub role: Role,
    /// The rank, or [`NO_TRAINER`] before it has joined.
    pub trainer: TrainerId,
    /// Which life of that rank.
    pub incarnation: Incarnation,
    /// The job's life; zero before it is known.
    pub epoch: Epoch,
    /// The initialisation it believes in.
    pub generation: Generation,
    /// The host's name, for the other side's error texts.
    pub host: String,
    /// The process number, for the same.
    pub process: u32,
}

impl Identity {
    /// Somebody whom the coordinator does not know yet.
    #[must_use]
    pub fn stranger(role: Role, host: String, process: u32) -> Self {
        Self {
            role,
            trainer: NO_TRAINER,
            incarnation: Incarnation(0),
            epoch: Epoch(0),
            generation: Generation(0),
            host,
            process,
        }
    }
}

/// What a client wants done.
pub enum Output {
    /// Hand this to the transport.
    Submit(Submit),
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

/// The requests and lanes of one trainer.
pub struct Client {
    identity: Identity,
    lanes: Vec<Lane>,
    /// Requests that are over, in the order in which that happened.
    finished: Vec<(Ticket, Result<Finished, Refused>)>,
    next_ticket: u64,
}

impl Client {
    /// A client without lanes.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self { identity, lanes: Vec::new(), finished: Vec::new(), next_ticket: 1 }
    }

    /// Who this client is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Changes who this client is; connections that are open keep what they were told.
    pub fn identify(&mut self, change: impl FnOnce(&mut Identity)) {
        change(&mut self.identity);
    }

    /// Adds a lane to `address`; `number` is the lane's number at the server. It connects when it is first used.
    pub fn add_lane(&mut self, address: Address, number: u64, name: String) -> LaneId {
        self.lanes.push(Lane::new(address, number, name));
        LaneId(self.lanes.len() - 1)
    }

    /// Whether something waits for a shard that did not answer several attempts to connect: it may be at another
    /// address now, which the coordinator knows.
    #[must_use]
    pub fn is_astray(&self) -> bool {
        self.lanes.iter().any(|lane| lane.number > 0 && lane.is_astray())
    }

    /// Changes where a lane connects to next. What is connected stays.
    pub fn move_lane(&mut self, lane: LaneId, address: Address) {
        self.lanes[lane.0].move_to(address);
    }

    /// Sends a request over a lane as soon as its connection allows. The head's identity is filled in here.
    pub fn ask(&mut self, lane: LaneId, mut frame: Frame, body: RequestBody, out: &mut Vec<Output>) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let identity = &self.identity;
        frame.head = Head {
            epoch: identity.epoch,
            trainer: identity.trainer,
            incarnation: identity.incarnation,
            generation: if frame.head.generation == Generation(0) {
                identity.generation
            } else {
                frame.head.generation
            },
            request: ticket,
            ..frame.head
        };
        self.lanes[lane.0].ask(Request::new(frame, body), out);
        ticket
    }

    /// Takes the end of a request, if it has come.
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
    pub fn drive(&mut self, now: Now, out: &mut Vec<Output>) {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            lane.resume(now, out);
            if !lane.is_busy() {
                continue;
            }
            if let LaneState::Down { again } = lane.state
                && again <= now
            {
                lane.state = LaneState::Opening;
                out.push(Output::Connect { lane: LaneId(index), address: lane.address.of_lane(lane.number) });
            }
        }
    }

    /// When [`Client::drive`] has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        let next = |lane: &Lane| match lane.state {
            LaneState::Down { again } => Some(again),
            LaneState::Opening | LaneState::Greeting { .. } => None,
            LaneState::Up { .. } => lane.resumes(),
        };
        self.lanes.iter().filter(|lane| lane.is_busy()).filter_map(next).min()
    }

    /// The transport began to connect a lane: the hello goes first.
    pub fn connecting(&mut self, lane: LaneId, peer: PeerId, out: &mut Vec<Output>) {
        let identity = &self.identity;
        let lane = &mut self.lanes[lane.0];
        lane.state = LaneState::Greeting { peer };
        let head = Head {
            epoch: identity.epoch,
            trainer: identity.trainer,
            incarnation: identity.incarnation,
            generation: identity.generation,
            sequence: Sequence(lane.number),
            ..Head::new(Kind::Hello)
        };
        let role = identity.role.into();
        let message = HelloMessage { role, host: identity.host.clone(), process: identity.process };
        let frame = Frame::with_control(head, &message);
        out.push(Output::Submit(Submit::Send { peer, ticket: Ticket(0), frame, body: Vec::new() }));
    }

    /// The transport cannot even begin to connect a lane.
    pub fn unreachable(&mut self, now: Now, lane: LaneId, failure: &Failure) {
        self.lanes[lane.0].lost(now, failure.to_string());
    }

    /// Takes an event in, and gives everything out that follows from it.
    pub fn handle(&mut self, now: Now, event: Event, out: &mut Vec<Output>) {
        match event {
            Event::Head { peer, frame } => {
                let into = match self.lane_of(peer) {
                    Some(lane) => lane.land(peer, &frame),
                    None => Incoming::nowhere(&frame),
                };
                out.push(Output::Submit(Submit::Land { peer, into }));
            }
            Event::Landed { peer, frame, body } => self.landed(now, peer, &frame, body, out),
            Event::Sent { peer, ticket, body } => {
                let Some(lane) = self.lane_of(peer) else { return };
                lane.sent(ticket, body, out);
                self.settle(peer, ticket);
            }
            Event::Gone { peer, reason, unsent, unfilled } => self.gone(now, peer, reason, unsent, unfilled, out),
            Event::Left { peer, ticket } => {
                if let Some(lane) = self.lane_of(peer) {
                    lane.left(ticket, out);
                }
            }
            Event::Accepted { .. } | Event::Connected { .. } => {}
        }
    }

    /// Ends requests, whose tickets are in order, without an answer. Where the transport has something of one, its
    /// connection is ended, which brings it back; requests of others are sent again. Each is finished, and what it
    /// was given is dropped, once everything of it is back.
    pub fn cancel(&mut self, tickets: &[Ticket], refused: &Refused, out: &mut Vec<Output>) {
        for lane in &mut self.lanes {
            if lane.cancel(tickets, refused) {
                out.extend(lane.state.peer().map(Output::Close));
            }
            self.finished.extend(lane.take_all_over());
        }
    }

    /// The transport is broken and gone, and with it everything it had: every request ends without an answer.
    pub fn break_off(&mut self, now: Now, refused: &Refused) {
        for lane in &mut self.lanes {
            lane.lost(now, refused.text.clone());
            self.finished.extend(lane.drop_all(refused));
        }
    }

    /// Who does not answer these requests, whose tickets are in order, and why, for the text of a deadline.
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

    fn landed(&mut self, now: Now, peer: PeerId, frame: &Frame, body: Vec<Incoming>, out: &mut Vec<Output>) {
        let Some(lane) = self.lane_of(peer) else { return };
        // What has no payload has no places, and lands between those that have.
        let kept = if body.is_empty() { Vec::new() } else { lane.put_back(peer, &mut body.into_iter()) };
        match frame.head.kind {
            // The wire refuses payloads of these kinds; what lands with one all the same is nobody's value.
            Kind::Welcome => lane.welcome(peer, out),
            Kind::Refused => self.refused(now, peer, frame, out),
            Kind::Error => self.error(now, peer, frame),
            _ => lane.answered(frame, kept),
        }
        self.settle(peer, frame.head.request);
    }

    /// A connection was refused. Who was superseded is so for good; anything else may pass.
    fn refused(&mut self, now: Now, peer: PeerId, frame: &Frame, out: &mut Vec<Output>) {
        let refused = Refused::of(frame);
        let Some(lane) = self.lane_of(peer) else { return };
        out.push(Output::Close(peer));
        if matches!(refused.code, ErrorCode::Fenced | ErrorCode::Unauthenticated) {
            lane.refuse_all(&refused);
        }
        lane.reason = Some(refused.text);
        lane.refused_at = Some(now);
    }

    fn error(&mut self, now: Now, peer: PeerId, frame: &Frame) {
        let refused = Refused::of(frame);
        let Some(lane) = self.lane_of(peer) else { return };
        if refused.code == ErrorCode::Busy {
            lane.reason = Some(refused.text);
            lane.pause(frame.head.request, now + PAUSE_FIRST);
        } else {
            lane.refuse(frame.head.request, refused);
        }
    }

    /// A connection is over: everything of it that the transport had is back.
    fn gone(
        &mut self,
        now: Now,
        peer: PeerId,
        reason: String,
        unsent: Vec<(Ticket, Vec<Outgoing>)>,
        unfilled: Vec<Incoming>,
        out: &mut Vec<Output>,
    ) {
        for (ticket, body) in unsent {
            // The transport says so once more when it finds work for a connection that it has said goodbye to.
            self.lanes.iter_mut().try_fold(body, |body, lane| lane.came_home(ticket, body));
        }
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.state.peer() == Some(peer) || lane.was(peer)) {
            // Places that were named in the moment in which the connection ended come back later.
            lane.put_all_back(peer, unfilled);
            if !lane.was(peer) {
                lane.lost(now, reason);
            }
        }
        for lane in &mut self.lanes {
            lane.dispatch(out);
            self.finished.extend(lane.take_all_over());
        }
    }

    /// Moves a request that is over from its lane to the finished.
    fn settle(&mut self, peer: PeerId, ticket: Ticket) {
        if let Some(request) = self.lane_of(peer).and_then(|lane| lane.take_over(ticket)) {
            self.finished.push((ticket, request.finish()));
        }
    }
}

impl Refused {
    fn of(frame: &Frame) -> Self {
        let message = ErrorMessage::decode(frame.control.as_slice()).unwrap_or_default();
        Self { code: message.code(), text: message.text }
    }
}

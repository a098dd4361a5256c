//! One connection, as its requests see it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::request::{Finished, Refused, Request};
use super::{Output, PAUSE_FIRST, PAUSE_LONGEST};
use crate::ids::{PeerId, Ticket};
use crate::port::{Incoming, Outgoing};
use crate::time::Now;
use crate::wire::{Address, Frame};

/// Payload bytes that a transport is given of one lane before it has sent the first of them: enough that it always has
/// more to send, and little enough that what is more urgent soon leaves.
const FLYING_BYTES_MAX: u64 = 2 * 1024 * 1024;
/// The same for frames, of which a transport queues 64.
const FLYING_FRAMES_MAX: usize = 32;

/// After so many attempts to connect that failed, the server may be somewhere else.
const ASTRAY_ATTEMPTS: u32 = 3;

/// A lane, named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub(super) usize);

pub(super) enum LaneState {
    /// Not connected; not before `again`.
    Down { again: Now },
    /// The transport is asked to connect.
    Opening,
    /// The hello is on its way.
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
    /// The last connection, which may still bring back what was handed over when it had ended already.
    former: Option<PeerId>,
    /// Why the last connection ended.
    pub(super) reason: Option<String>,
    pub(super) refused_at: Option<Now>,
    /// Attempts to connect since a server last said welcome.
    attempts: u32,
    /// What is not answered, in the order of asking and so of tickets.
    requests: VecDeque<Request>,
    /// What may leave, the most urgent first.
    waiting: BinaryHeap<Reverse<(u32, Ticket)>>,
    /// What the server had no room for, and when it is sent again.
    paused: Vec<(Now, Ticket)>,
    /// Frames that the transport has and has not sent, and the bytes of their payloads.
    flying: usize,
    flying_bytes: u64,
    name: String,
    pause: Duration,
    /// The answers that are landing, in the order of their heads.
    landings: VecDeque<Landing>,
}

/// An answer that is landing.
struct Landing {
    /// Over which connection.
    peer: PeerId,
    /// Its request.
    ticket: Ticket,
    /// The entry of that request for each payload that is wanted.
    wanted: Vec<Option<usize>>,
}

impl Lane {
    pub(super) fn new(address: Address, number: u64, name: String) -> Self {
        Self {
            address,
            number,
            state: LaneState::Down { again: Now(0) },
            former: None,
            reason: None,
            refused_at: None,
            attempts: 0,
            requests: VecDeque::new(),
            waiting: BinaryHeap::new(),
            paused: Vec::new(),
            flying: 0,
            flying_bytes: 0,
            name,
            pause: PAUSE_FIRST,
            landings: VecDeque::new(),
        }
    }

    /// Who does not answer how many requests, in words.
    pub(super) fn describe(&self, requests: usize) -> String {
        let state = match self.state {
            LaneState::Down { .. } | LaneState::Opening => "not connected",
            LaneState::Greeting { .. } => "connecting",
            LaneState::Up { .. } => "connected",
        };
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(", {reason}"));
        format!("{} at {}: {requests} requests without an answer ({state}{reason})", self.name, self.address)
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether something waits for a server that does not answer at this address.
    pub(super) fn is_astray(&self) -> bool {
        self.is_busy() && self.attempts >= ASTRAY_ATTEMPTS
    }

    /// From the next attempt on, which is made at once, the server is at another address.
    pub(super) fn move_to(&mut self, address: Address) {
        if address == self.address {
            return;
        }
        self.address = address;
        (self.attempts, self.pause) = (0, PAUSE_FIRST);
        if let LaneState::Down { again } = &mut self.state {
            *again = Now(0);
        }
    }

    /// How many of these requests, in order, are not answered.
    pub(super) fn count(&self, tickets: &[Ticket]) -> usize {
        self.requests.iter().filter(|request| tickets.binary_search(&request.ticket()).is_ok()).count()
    }

    /// Adds a request, whose ticket is larger than those before.
    pub(super) fn ask(&mut self, request: Request, out: &mut Vec<Output>) {
        self.waiting.push(Reverse((request.priority, request.ticket())));
        self.requests.push_back(request);
        self.dispatch(out);
    }

    /// Sends what may leave, as far as the transport has not enough to do.
    pub(super) fn dispatch(&mut self, out: &mut Vec<Output>) {
        let LaneState::Up { peer } = self.state else { return };
        while self.flying == 0 || self.flying < FLYING_FRAMES_MAX && self.flying_bytes < FLYING_BYTES_MAX {
            let Some(Reverse((_, ticket))) = self.waiting.pop() else { return };
            let Some(request) = self.request(ticket).filter(|request| request.may_leave()) else { continue };
            out.push(Output::Submit(request.send(peer)));
            let bytes = request.bytes;
            self.flying += 1;
            self.flying_bytes += bytes;
        }
    }

    /// Sends what was paused until now.
    pub(super) fn resume(&mut self, now: Now, out: &mut Vec<Output>) {
        if self.paused.is_empty() {
            return;
        }
        let due: Vec<_> = self.paused.extract_if(.., |(again, _)| *again <= now).collect();
        for (_, ticket) in due {
            match self.request(ticket).map(|request| request.may_leave()) {
                Some(true) => self.put_in_line(ticket),
                // The refusal was faster than the rest of the payload.
                Some(false) => self.paused.push((now + PAUSE_FIRST, ticket)),
                None => {}
            }
        }
        self.dispatch(out);
    }

    /// When something that was paused is sent again.
    pub(super) fn resumes(&self) -> Option<Now> {
        self.paused.iter().map(|(again, _)| *again).min()
    }

    /// The server has no room for a request now.
    pub(super) fn pause(&mut self, ticket: Ticket, again: Now) {
        if self.request(ticket).is_some() {
            self.paused.push((again, ticket));
        }
    }

    /// A frame has left.
    pub(super) fn sent(&mut self, ticket: Ticket, body: Vec<Outgoing>, out: &mut Vec<Output>) {
        if let Some(request) = self.request(ticket) {
            request.came_home(body);
        }
        self.left(ticket, out);
    }

    /// A frame has left, and may still be read where it is: the next one may follow.
    pub(super) fn left(&mut self, ticket: Ticket, out: &mut Vec<Output>) {
        if let Some(request) = self.request(ticket)
            && request.has_left()
        {
            let bytes = request.bytes;
            self.flying -= 1;
            self.flying_bytes -= bytes;
        }
        self.dispatch(out);
    }

    /// The connection is accepted: everything that is not answered goes out, in order.
    pub(super) fn welcome(&mut self, peer: PeerId, out: &mut Vec<Output>) {
        self.state = LaneState::Up { peer };
        self.attempts = 0;
        self.pause = PAUSE_FIRST;
        self.waiting = self.requests.iter().map(|request| Reverse((request.priority, request.ticket()))).collect();
        self.dispatch(out);
    }

    /// Whether `peer` is the connection before this one.
    pub(super) fn was(&self, peer: PeerId) -> bool {
        self.former == Some(peer)
    }

    /// The connection is over; the next one is tried after a pause.
    pub(super) fn lost(&mut self, now: Now, reason: String) {
        self.former = self.state.peer();
        self.attempts = self.attempts.saturating_add(u32::from(!matches!(self.state, LaneState::Up { .. })));
        self.state = LaneState::Down { again: now + self.pause };
        // All that is not answered goes out again with the next connection anyway.
        self.waiting.clear();
        self.paused.clear();
        (self.flying, self.flying_bytes) = (0, 0);
        self.pause = (self.pause * 2).min(PAUSE_LONGEST);
        // A refusal says more than the end of the connection that followed it.
        if self.refused_at.take().is_none() {
            self.reason = Some(reason);
        }
    }

    /// Ends a request without an answer, if it is here.
    pub(super) fn refuse(&mut self, ticket: Ticket, refused: Refused) {
        if let Some(request) = self.request(ticket) {
            request.refuse(refused);
        }
    }

    /// Ends every request without an answer.
    pub(super) fn refuse_all(&mut self, refused: &Refused) {
        self.requests.iter_mut().for_each(|request| request.refuse(refused.clone()));
    }

    /// Ends requests without an answer; true when the transport has something of one.
    pub(super) fn cancel(&mut self, tickets: &[Ticket], refused: &Refused) -> bool {
        let mut is_away = false;
        for request in &mut self.requests {
            if tickets.binary_search(&request.ticket()).is_ok() {
                request.refuse(refused.clone());
                is_away |= !request.is_home();
            }
        }
        is_away
    }

    /// Takes a request out if it is over.
    pub(super) fn take_over(&mut self, ticket: Ticket) -> Option<Request> {
        let at = self.position(ticket)?;
        if self.requests[at].is_over() { self.requests.remove(at) } else { None }
    }

    /// Takes out every request that is over, with its end.
    pub(super) fn take_all_over(&mut self) -> Vec<(Ticket, Result<Finished, Refused>)> {
        let is_over = |request: &Request| request.is_over();
        if !self.requests.iter().any(is_over) {
            return Vec::new();
        }
        let (over, rest): (Vec<_>, _) = std::mem::take(&mut self.requests).into_iter().partition(is_over);
        self.requests = rest.into();
        over.into_iter().map(|request| (request.ticket(), request.finish())).collect()
    }

    /// Where the payloads of an answer go.
    pub(super) fn land(&mut self, peer: PeerId, frame: &Frame) -> Vec<Incoming> {
        let ticket = frame.head.request;
        let mut request = self.request(ticket);
        let mut wanted = Vec::new();
        let mut into = Vec::new();
        for entry in frame.entries.iter().filter(|entry| entry.bytes > 0) {
            let place = request.as_mut().and_then(|request| request.take_place(entry));
            let (index, incoming) = match place {
                Some((index, place)) => (Some(index), place),
                None => (None, Incoming::Discard { bytes: entry.bytes }),
            };
            wanted.push(index);
            into.push(incoming);
        }
        self.landings.push_back(Landing { peer, ticket, wanted });
        into
    }

    /// An answer is here. `kept` says for each payload which entry's place it is in.
    pub(super) fn answered(&mut self, frame: &Frame, kept: Vec<Option<usize>>) {
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

    /// Takes back a payload that did not leave, if its request is here.
    pub(super) fn came_home(&mut self, ticket: Ticket, body: Vec<Outgoing>) -> Option<Vec<Outgoing>> {
        match self.request(ticket) {
            Some(request) => request.came_home(body),
            None => return Some(body),
        }
        self.put_in_line(ticket);
        None
    }

    /// Gives the places of the first landing of a connection back to their request; says for each payload which
    /// entry's place it had.
    pub(super) fn put_back(&mut self, peer: PeerId, places: &mut dyn Iterator<Item = Incoming>) -> Vec<Option<usize>> {
        let Some(at) = self.landings.iter().position(|landing| landing.peer == peer) else { return Vec::new() };
        let Landing { ticket, wanted, .. } = self.landings.remove(at).expect("it was just found");
        let mut request = self.request(ticket);
        for (index, place) in wanted.iter().zip(places) {
            if let (Some(index), Some(request)) = (*index, &mut request) {
                request.return_place(index, place);
            }
        }
        wanted
    }

    /// A connection ended with places that were not filled, of some landings and in their order.
    pub(super) fn put_all_back(&mut self, peer: PeerId, unfilled: Vec<Incoming>) {
        let mut places = unfilled.into_iter().peekable();
        while places.peek().is_some() {
            if self.put_back(peer, &mut places).is_empty() {
                return;
            }
        }
    }

    /// Drops every request, wherever its parcels are.
    pub(super) fn drop_all(&mut self, refused: &Refused) -> Vec<(Ticket, Result<Finished, Refused>)> {
        self.landings.clear();
        self.requests.drain(..).map(|request| (request.ticket(), Err(refused.clone()))).collect()
    }

    fn put_in_line(&mut self, ticket: Ticket) {
        if let Some(at) = self.position(ticket) {
            self.waiting.push(Reverse((self.requests[at].priority, ticket)));
        }
    }

    fn request(&mut self, ticket: Ticket) -> Option<&mut Request> {
        let at = self.position(ticket)?;
        Some(&mut self.requests[at])
    }

    fn position(&self, ticket: Ticket) -> Option<usize> {
        self.requests.binary_search_by_key(&ticket, Request::ticket).ok()
    }
}

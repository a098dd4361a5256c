//! One connection, as its requests see it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::request::{Finished, Refused, Request};
use super::{Output, PAUSE_FIRST, PAUSE_LONGEST};
use crate::ids::{PeerId, Ticket};
use crate::port::{Incoming, Outgoing};
use crate::time::Now;
use crate::wire::{Address, Frame};

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
    /// What is not answered, in the order of asking.
    pub(super) requests: BTreeMap<Ticket, Request>,
    /// The last connection, which may still bring back what was handed over when it had ended already.
    former: Option<PeerId>,
    /// Why the last connection ended.
    pub(super) reason: Option<String>,
    pub(super) refused_at: Option<Now>,
    name: String,
    pause: Duration,
    /// The answer that is landing: its request, and the entry of that request for each payload.
    landing: Option<(Ticket, Vec<Option<usize>>)>,
}

impl Lane {
    pub(super) fn new(address: Address, number: u64, name: String) -> Self {
        Self {
            address,
            number,
            state: LaneState::Down { again: Now(0) },
            requests: BTreeMap::new(),
            former: None,
            reason: None,
            refused_at: None,
            name,
            pause: PAUSE_FIRST,
            landing: None,
        }
    }

    /// Who does not answer, in words.
    pub(super) fn describe(&self) -> String {
        let state = match self.state {
            LaneState::Down { .. } | LaneState::Opening => "not connected",
            LaneState::Greeting { .. } => "connecting",
            LaneState::Up { .. } => "connected",
        };
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(", {reason}"));
        format!(
            "{} at {}: {} requests without an answer ({state}{reason})",
            self.name,
            self.address,
            self.requests.len()
        )
    }

    /// The connection is accepted: everything that is not answered goes out, in order.
    pub(super) fn welcome(&mut self, peer: PeerId, out: &mut Vec<Output>) {
        self.state = LaneState::Up { peer };
        self.pause = PAUSE_FIRST;
        self.send_waiting(out);
    }

    /// Whether `peer` is the connection before this one.
    pub(super) fn was(&self, peer: PeerId) -> bool {
        self.former == Some(peer)
    }

    /// Sends what is not answered and not on its way, when there is a connection.
    pub(super) fn send_waiting(&mut self, out: &mut Vec<Output>) {
        let LaneState::Up { peer } = self.state else { return };
        let waiting = self.requests.values_mut().filter(|request| request.is_home() && !request.is_over());
        out.extend(waiting.map(|request| Output::Submit(request.send(peer))));
    }

    /// The connection is over; the next one is tried after a pause.
    pub(super) fn lost(&mut self, now: Now, reason: String) {
        self.former = self.state.peer();
        self.state = LaneState::Down { again: now + self.pause };
        // All that is not answered goes out again with the next connection anyway.
        self.requests.values_mut().for_each(|request| request.again = None);
        self.pause = (self.pause * 2).min(PAUSE_LONGEST);
        // A refusal says more than the end of the connection that followed it.
        if self.refused_at.take().is_none() {
            self.reason = Some(reason);
        }
    }

    /// Takes out what was refused for good when the connection was.
    pub(super) fn take_refused(&mut self) -> Vec<(Ticket, Result<Finished, Refused>)> {
        let over = self.requests.iter().filter(|(_, request)| request.is_over()).map(|(ticket, _)| *ticket);
        let over: Vec<Ticket> = over.collect();
        over.into_iter().filter_map(|ticket| Some((ticket, self.requests.remove(&ticket)?.finish()))).collect()
    }

    /// Where the payloads of an answer go.
    pub(super) fn land(&mut self, frame: &Frame) -> Vec<Incoming> {
        let ticket = frame.head.request;
        let mut request = self.requests.get_mut(&ticket);
        let mut wanted = Vec::new();
        let mut into = Vec::new();
        for entry in frame.entries.iter().filter(|entry| entry.bytes > 0) {
            let place = request.as_mut().and_then(|request| request.take_place(entry));
            let (index, incoming) = match place {
                Some((index, loan)) => (Some(index), Incoming::Loan(loan)),
                None => (None, Incoming::Discard { bytes: entry.bytes }),
            };
            wanted.push(index);
            into.push(incoming);
        }
        self.landing = Some((ticket, wanted));
        into
    }

    /// An answer is here.
    pub(super) fn answered(&mut self, frame: &Frame, body: Vec<Incoming>) {
        let ticket = frame.head.request;
        let mut kept = self.put_back(body).into_iter();
        let Some(request) = self.requests.get_mut(&ticket) else { return };
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

    /// Takes back the parcels of a connection that ended.
    pub(super) fn recover(&mut self, unsent: Vec<(Ticket, Vec<Outgoing>)>, unfilled: Vec<Incoming>) {
        for (ticket, body) in unsent {
            if let Some(request) = self.requests.get_mut(&ticket) {
                request.came_home(body);
            }
        }
        // Places that were named in the moment in which the connection ended come back later.
        if !unfilled.is_empty() {
            self.put_back(unfilled);
        }
    }

    /// Gives the places of a landing back to their request; says for each payload which entry's place it had.
    fn put_back(&mut self, body: Vec<Incoming>) -> Vec<Option<usize>> {
        let Some((ticket, wanted)) = self.landing.take() else { return Vec::new() };
        let Some(request) = self.requests.get_mut(&ticket) else { return wanted };
        for (index, incoming) in wanted.iter().zip(body) {
            if let (Some(index), Incoming::Loan(loan)) = (*index, incoming) {
                request.return_place(index, loan);
            }
        }
        wanted
    }
}

//! A client of the simulated job: `core`'s client over a simulated transport, with one call at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use pserver_core::client::{Client, ClientOutput, ConnectionChange, Finished, Identity, LaneId, Refused, RequestBody};
use pserver_core::ids::Ticket;
use pserver_core::port::{Event, Transport};
use pserver_core::time::Now;
use pserver_core::wire::request::Request;
use pserver_core::wire::{Address, ControlRequest, ErrorCode, Frame, Head, Kind, Role};

use crate::job::SimJob;
use crate::network::{EndpointId, SimTransport};

/// A request of a call, and its result when it is over.
pub(crate) type RequestResult = (Ticket, Result<Finished, Refused>);

/// A client with its transport.
pub(crate) struct SimClient {
    pub(crate) client: Client,
    transport: SimTransport,
    out: ClientOutput,
    events: Vec<Event>,
    control: LaneId,
    /// The requests of the call in progress that have no result.
    open: Vec<Ticket>,
    results: Vec<RequestResult>,
    /// Texts of refusals that nobody has looked at.
    refusals: Vec<String>,
    /// Requests beside the call.
    beside: BTreeMap<Ticket, Option<RequestResult>>,
}

impl SimClient {
    pub(crate) fn new(role: Role, process: u32, transport: SimTransport) -> Self {
        let mut identity = Identity::stranger(role, format!("simulated-{process}"), process);
        identity.absence = Some(Duration::from_secs(10));
        let mut client = Client::new(identity);
        let control = client.add_lane(SimJob::address(0), 0, "the coordinator (server 0)".to_owned());
        Self {
            client,
            transport,
            out: ClientOutput::default(),
            events: Vec::new(),
            control,
            open: Vec::new(),
            results: Vec::new(),
            refusals: Vec::new(),
            beside: BTreeMap::new(),
        }
    }

    pub(crate) fn endpoint(&self) -> EndpointId {
        self.transport.endpoint()
    }

    pub(crate) fn add_lane(&mut self, address: Address, number: u64, name: String) -> LaneId {
        self.client.add_lane(address, number, name)
    }

    /// Adds a request to the call in progress.
    pub(crate) fn ask(&mut self, lane: LaneId, frame: Frame, body: RequestBody) -> Ticket {
        let ticket = self.client.ask(lane, frame, body, &mut self.out);
        self.open.push(ticket);
        ticket
    }

    /// Adds a request to the coordinator to the call in progress.
    pub(crate) fn ask_control(&mut self, request: Request) -> Ticket {
        self.ask(self.control, control_frame(request), RequestBody::default())
    }

    /// Asks the coordinator beside the call in progress.
    pub(crate) fn ask_beside(&mut self, request: Request) {
        let ticket = self.client.ask(self.control, control_frame(request), RequestBody::default(), &mut self.out);
        self.beside.insert(ticket, None);
    }

    pub(crate) fn is_asked_beside(&self) -> bool {
        !self.beside.is_empty()
    }

    /// The answers to what was asked beside calls.
    pub(crate) fn take_beside(&mut self) -> Vec<RequestResult> {
        let over: Vec<_> = self.beside.iter().filter(|(_, result)| result.is_some()).map(|(one, _)| *one).collect();
        over.into_iter().filter_map(|ticket| self.beside.remove(&ticket).flatten()).collect()
    }

    /// Cancels the call in progress.
    pub(crate) fn cancel(&mut self) {
        let refused = Refused::new(ErrorCode::Deadline, "cancelled");
        self.open.sort_unstable();
        self.client.cancel(&self.open, &refused, &mut self.out);
    }

    /// Moves everything on. The next turn is due at this time.
    pub(crate) fn turn(&mut self, now: Now) -> Result<Option<Now>> {
        let mut events = std::mem::take(&mut self.events);
        self.transport.poll(&mut events)?;
        for event in events.drain(..) {
            self.client.handle(now, event, &mut self.out);
        }
        self.events = events;
        self.client.drive(now, &mut self.out);
        while !self.out.is_empty() {
            for change in std::mem::take(&mut self.out.connections) {
                match change {
                    ConnectionChange::Close(peer) => self.transport.close(peer),
                    ConnectionChange::Connect { lane, address } => {
                        let peer = self.transport.connect(&address)?;
                        self.client.connecting(lane, peer, &mut self.out);
                    }
                }
            }
            self.transport.submit(&mut self.out.work)?;
        }
        for (ticket, result) in self.client.take_finished() {
            if let Some(place) = self.beside.get_mut(&ticket) {
                *place = Some((ticket, result));
                continue;
            }
            self.open.retain(|open| *open != ticket);
            self.refusals.extend(result.as_ref().err().map(|refused| refused.text.clone()));
            self.results.push((ticket, result));
        }
        Ok(self.client.deadline())
    }

    /// How many requests have no result, for a simulation that does not end.
    pub(crate) fn describe(&self) -> String {
        let outstanding = self.client.outstanding(&self.open);
        format!("{} answered, {:?}, {outstanding}", self.results.len(), self.client.identity())
    }

    /// The texts of refusals that have come since the last look, maybe long before their call is over.
    pub(crate) fn take_refusals(&mut self) -> Vec<String> {
        std::mem::take(&mut self.refusals)
    }

    /// The results of the call, once it is over.
    pub(crate) fn take_call(&mut self) -> Option<Vec<RequestResult>> {
        let is_over = self.open.is_empty() && !self.results.is_empty();
        is_over.then(|| std::mem::take(&mut self.results))
    }
}

fn control_frame(request: Request) -> Frame {
    Frame::with_control(Head::new(Kind::Control), &ControlRequest { request: Some(request) })
}

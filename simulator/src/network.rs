//! The network between simulated processes: connections that delay, end, and carry nothing while a host is cut off.
//!
//! A connection is a pipe for each direction. A frame is in its pipe until the receiver takes it; a frame, or the end
//! of the connection, has a time before which the receiver does not see it. The two sides see the end of a cut
//! connection at different times, and a new connection of the same pair carries frames while the old one still
//! delivers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Capabilities, Doorbell, Event, Incoming, Payloads, ReceiveBuffers, Submit, Transport};
use pserver_core::prng::Prng;
use pserver_core::wire::{Address, Frame};

use crate::machine::ProcessFate;
use crate::time::{SimClock, SimTime};

/// Frames that one poll takes of a connection.
const POLL_FRAMES: usize = 16;
/// Longest time until a process sees that the host of its peer was lost.
pub(crate) const UNNOTICED_MAX: Duration = Duration::from_secs(5);

/// A host, for faults of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HostId(pub(crate) u16);

/// A transport of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EndpointId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ConnectionId(u64);

/// The network. A clone is the same network.
#[derive(Clone)]
pub(crate) struct SimNetwork {
    state: Arc<Mutex<NetworkState>>,
}

struct NetworkState {
    clock: SimClock,
    prng: Prng,
    endpoints: BTreeMap<EndpointId, Endpoint>,
    listeners: BTreeMap<(String, u16), EndpointId>,
    connections: BTreeMap<ConnectionId, SimConnection>,
    /// Pairs of hosts of which the first one's frames do not reach the second one.
    blocked: BTreeSet<(HostId, HostId)>,
    /// Endpoints to give a turn, and when.
    wakes: Vec<(SimTime, EndpointId)>,
    next_number: u64,
}

struct Endpoint {
    host: HostId,
    events: Vec<Event>,
    peers: BTreeMap<PeerId, (ConnectionId, usize)>,
    next_peer: u64,
}

/// A connection; the side that connected is 0.
struct SimConnection {
    sides: [SimSide; 2],
    /// By sender.
    pipes: [SimPipe; 2],
    /// Delay of a frame without payload, in nanoseconds.
    latency: u64,
    /// Whether payloads stay in the sender's memory until the receiver copies them.
    reads_in_place: bool,
    receives: usize,
}

struct SimSide {
    endpoint: EndpointId,
    host: HostId,
    peer: PeerId,
    is_closed: bool,
}

#[derive(Default)]
struct SimPipe {
    flights: VecDeque<Flight>,
    /// The frame whose head the receiver has, and for which it has posted no memory.
    announced: Option<Flight>,
    posted: VecDeque<(Flight, ReceiveBuffers)>,
    last: SimTime,
    end: Option<PipeEnd>,
}

/// The end of a connection as the receiver of a pipe sees it.
struct PipeEnd {
    at: SimTime,
    reason: &'static str,
    /// Whether the receiver's own host notices it, and not a packet of the other one.
    is_local: bool,
}

struct Flight {
    at: SimTime,
    payload_at: SimTime,
    /// None at the begin of a connection.
    frame: Option<Frame>,
    ticket: Ticket,
    body: FlightBody,
}

enum FlightBody {
    Copied(Vec<Vec<u8>>),
    InPlace(Payloads),
}

impl SimNetwork {
    pub(crate) fn new(clock: SimClock, seed: u64) -> Self {
        let state = NetworkState {
            clock,
            prng: Prng(seed),
            endpoints: BTreeMap::new(),
            listeners: BTreeMap::new(),
            connections: BTreeMap::new(),
            blocked: BTreeSet::new(),
            wakes: Vec::new(),
            next_number: 0,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// A transport of a process on a host; with an address it takes connections.
    pub(crate) fn transport(&self, host: HostId, fate: Arc<ProcessFate>, address: Option<&Address>) -> SimTransport {
        let mut state = self.lock();
        let id = EndpointId(state.number());
        state.endpoints.insert(id, Endpoint { host, events: Vec::new(), peers: BTreeMap::new(), next_peer: 1 });
        if let Some(address) = address {
            state.listeners.insert((address.host.clone(), address.port), id);
        }
        SimTransport { network: self.clone(), endpoint: id, fate }
    }

    /// The endpoints to give a turn, each with its time.
    pub(crate) fn take_wakes(&self) -> Vec<(SimTime, EndpointId)> {
        std::mem::take(&mut self.lock().wakes)
    }

    /// Ends an endpoint with its process. The host of a lost one says nothing; the others notice after a while.
    pub(crate) fn remove(&self, id: EndpointId, is_host_lost: bool) {
        let mut state = self.lock();
        let now = state.clock.now();
        state.listeners.retain(|_, listener| *listener != id);
        let Some(endpoint) = state.endpoints.remove(&id) else { return };
        for (number, side) in endpoint.peers.into_values() {
            let at = match is_host_lost {
                true => now + Duration::from_millis(1000 + state.prng.below(4000)),
                false => now + Duration::from_micros(50 + state.prng.below(2000)),
            };
            let Some(connection) = state.connections.get_mut(&number) else { continue };
            connection.sides[side].is_closed = true;
            drop(connection.pipes[1 - side].take_buffers());
            let pipe = &mut connection.pipes[side];
            pipe.copy_payloads();
            let at = if is_host_lost { at } else { at.max(pipe.last) };
            pipe.end_at(at, "the peer's process ended", is_host_lost);
            let other = connection.sides[1 - side].endpoint;
            state.wakes.push((at, other));
            state.forget_closed(number);
        }
    }

    /// Cuts one of the connections, chosen by `choice`. Returns how much later a side notices, if there was one.
    pub(crate) fn cut(&self, choice: u64) -> Option<Duration> {
        let mut state = self.lock();
        let nth = choice.checked_rem(state.connections.len() as u64)?;
        let number = *state.connections.keys().nth(usize::try_from(nth).expect("it is small")).expect("it is below");
        Some(state.cut(number))
    }

    /// Blocks or opens the way from one host to another.
    pub(crate) fn block(&self, from: HostId, to: HostId, is_blocked: bool) {
        let mut state = self.lock();
        if is_blocked {
            state.blocked.insert((from, to));
            return;
        }
        state.blocked.remove(&(from, to));
        let now = state.clock.now() + Duration::from_millis(1);
        let all: Vec<_> = state.endpoints.keys().map(|endpoint| (now, *endpoint)).collect();
        state.wakes.extend(all);
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NetworkState {
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn connect(&mut self, id: EndpointId, address: &Address) -> PeerId {
        let now = self.clock.now();
        let listener = self.listeners.get(&(address.host.clone(), address.port)).copied();
        let peer = self.add_peer(id);
        let own = self.endpoints[&id].host;
        let target = listener.map(|listener| (listener, self.endpoints[&listener].host));
        let reachable = target.filter(|(_, host)| !self.blocked.contains(&(own, *host)));
        let Some((listener, host)) = reachable else {
            let reason = format!("connecting to {address}: no process listens there");
            let event = Event::Gone { peer, reason, unsent: Vec::new(), unfilled: ReceiveBuffers::new() };
            self.endpoints.get_mut(&id).expect("it is alive").events.push(event);
            self.wakes.push((now + Duration::from_micros(100), id));
            return peer;
        };
        let far = self.add_peer(listener);
        let number = ConnectionId(self.number());
        let side = |endpoint, host, peer| SimSide { endpoint, host, peer, is_closed: false };
        let latency = 20_000 + self.prng.below(180_000);
        let (there, back) = (now + Duration::from_nanos(latency), now + Duration::from_nanos(2 * latency));
        let pipe = |at| SimPipe { flights: [Flight::opening(at)].into(), last: at, ..SimPipe::default() };
        let connection = SimConnection {
            sides: [side(id, own, peer), side(listener, host, far)],
            pipes: [pipe(there), pipe(back)],
            latency,
            reads_in_place: self.prng.below(3) == 0,
            receives: 1 + self.prng.index(4),
        };
        self.connections.insert(number, connection);
        self.endpoints.get_mut(&id).expect("it is alive").peers.insert(peer, (number, 0));
        self.endpoints.get_mut(&listener).expect("it is alive").peers.insert(far, (number, 1));
        self.wakes.extend([(there, listener), (back, id)]);
        peer
    }

    fn add_peer(&mut self, id: EndpointId) -> PeerId {
        let endpoint = self.endpoints.get_mut(&id).expect("it is alive");
        endpoint.next_peer += 1;
        PeerId(endpoint.next_peer)
    }

    fn submit(&mut self, id: EndpointId, work: Submit, lag: Duration) {
        let peer = work.peer();
        let now = self.clock.now() + lag;
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
        let Some((number, side)) = endpoint.peers.get(&peer).copied() else {
            endpoint.events.push(work.into_returned());
            self.wakes.push((now, id));
            return;
        };
        let connection = self.connections.get_mut(&number).expect("its peers are known");
        match work {
            Submit::Send { ticket, frame, body, .. } => {
                let bytes: u64 = frame.payload_bytes() + 200;
                let spike = if self.prng.below(200) == 0 { self.prng.below(20_000_000) } else { 0 };
                let jitter = self.prng.below(connection.latency) + spike;
                let pipe = &mut connection.pipes[side];
                let at = (now + Duration::from_nanos(connection.latency + jitter)).max(pipe.last);
                let payload_at = at + Duration::from_nanos(bytes + self.prng.below(1 + bytes * 4));
                pipe.last = payload_at;
                let body = if connection.reads_in_place {
                    FlightBody::InPlace(body)
                } else {
                    let copied = body.iter().map(|payload| payload.bytes().to_vec()).collect();
                    let sent = Event::Sent { peer, ticket, body };
                    self.endpoints.get_mut(&id).expect("it is alive").events.push(sent);
                    self.wakes.push((now, id));
                    FlightBody::Copied(copied)
                };
                pipe.flights.push_back(Flight { at, payload_at, frame: Some(frame), ticket, body });
                self.wakes.push((at, connection.sides[1 - side].endpoint));
            }
            Submit::PostReceive { into, .. } => {
                let pipe = &mut connection.pipes[1 - side];
                let flight = pipe.announced.take().expect("a head came before");
                self.wakes.push((flight.payload_at.max(now), id));
                pipe.posted.push_back((flight, into));
            }
            Submit::PostAnswer { .. } => panic!("no connection of a simulation takes answers"),
        }
    }

    fn poll(&mut self, id: EndpointId, events: &mut Vec<Event>) {
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
        events.append(&mut endpoint.events);
        let peers: Vec<_> = endpoint.peers.iter().map(|(peer, place)| (*peer, *place)).collect();
        for (peer, (number, side)) in peers {
            let begin = events.len();
            while events.len() < begin + POLL_FRAMES && self.receive(number, side, peer, events) {}
            if events.len() > begin {
                self.wakes.push((self.clock.now(), id));
            }
        }
    }

    /// Takes one frame, or one payload, or the end; false when nothing is there.
    fn receive(&mut self, number: ConnectionId, side: usize, peer: PeerId, events: &mut Vec<Event>) -> bool {
        let now = self.clock.now();
        let Some(connection) = self.connections.get_mut(&number) else { return false };
        let is_blocked = self.blocked.contains(&(connection.sides[1 - side].host, connection.sides[side].host));
        let pipe = &mut connection.pipes[1 - side];
        let end = pipe.end.as_ref().map(|end| (end.at, end.is_local));
        let is_before_end = |at: SimTime| end.is_none_or(|(end, _)| at <= end);
        let due = |at: SimTime| at <= now && is_before_end(at) && !is_blocked;
        if pipe.posted.front().is_some_and(|(flight, _)| due(flight.payload_at)) {
            let (flight, buffers) = pipe.posted.pop_front().expect("it is there");
            let (frame, body) = self.finish(number, 1 - side, flight, buffers);
            events.push(Event::Received { peer, frame, body });
            return true;
        }
        let may_announce = pipe.announced.is_none() && pipe.posted.len() < connection.receives;
        if let Some(flight) = pipe.flights.front().filter(|flight| may_announce && due(flight.at)) {
            let Some(frame) = &flight.frame else {
                pipe.flights.pop_front();
                let origin = format!("simulated host {}", connection.sides[1 - side].host.0);
                events.push(match side {
                    0 => Event::Connected { peer },
                    _ => Event::Accepted { peer, origin, transport: "simulated".to_owned() },
                });
                return true;
            };
            if frame.payload_bytes() > 0 {
                events.push(Event::Head { peer, frame: frame.clone() });
                pipe.announced = pipe.flights.pop_front();
                return true;
            }
            if pipe.posted.is_empty() {
                let flight = pipe.flights.pop_front().expect("it is there");
                let (frame, body) = self.finish(number, 1 - side, flight, ReceiveBuffers::new());
                events.push(Event::Received { peer, frame, body });
                return true;
            }
        }
        if end.is_some_and(|(at, is_local)| at <= now && (is_local || !is_blocked)) {
            events.push(self.end_side(number, side));
            return true;
        }
        if let Some((at, _)) = end {
            let endpoint = self.connections[&number].sides[side].endpoint;
            self.wakes.push((at.max(now + Duration::from_millis(1)), endpoint));
        }
        false
    }

    /// Copies a payload to the receiver's memory, and returns the sender's.
    fn finish(
        &mut self,
        number: ConnectionId,
        sender: usize,
        flight: Flight,
        mut buffers: ReceiveBuffers,
    ) -> (Frame, ReceiveBuffers) {
        let at = |index: usize| match &flight.body {
            FlightBody::Copied(copied) => copied[index].as_slice(),
            FlightBody::InPlace(payloads) => payloads[index].bytes(),
        };
        for (index, buffer) in buffers.iter_mut().enumerate() {
            if !matches!(buffer, Incoming::Discard { .. }) {
                buffer.bytes_mut().copy_from_slice(at(index));
            }
        }
        if let FlightBody::InPlace(body) = flight.body {
            let side = &self.connections[&number].sides[sender];
            let (id, peer) = (side.endpoint, side.peer);
            if let Some(endpoint) = self.endpoints.get_mut(&id).filter(|_| !side.is_closed) {
                endpoint.events.push(Event::Sent { peer, ticket: flight.ticket, body });
                self.wakes.push((self.clock.now(), id));
            }
        }
        (flight.frame.expect("it is a frame"), buffers)
    }

    /// Ends a connection for one side.
    fn end_side(&mut self, number: ConnectionId, side: usize) -> Event {
        let connection = self.connections.get_mut(&number).expect("it is known");
        connection.sides[side].is_closed = true;
        let (id, peer) = (connection.sides[side].endpoint, connection.sides[side].peer);
        let unsent = connection.pipes[side].copy_payloads();
        let incoming = &mut connection.pipes[1 - side];
        let reason = incoming.end.as_ref().map_or("closed by this side", |end| end.reason).to_owned();
        let unfilled = incoming.take_buffers();
        self.endpoints.get_mut(&id).expect("it is alive").peers.remove(&peer);
        self.forget_closed(number);
        Event::Gone { peer, reason, unsent, unfilled }
    }

    fn close(&mut self, id: EndpointId, peer: PeerId) {
        let Some(endpoint) = self.endpoints.get(&id) else { return };
        let Some((number, side)) = endpoint.peers.get(&peer).copied() else { return };
        let now = self.clock.now();
        let connection = self.connections.get_mut(&number).expect("its peers are known");
        let pipe = &mut connection.pipes[side];
        let at = pipe.last.max(now + Duration::from_nanos(connection.latency));
        pipe.end_at(at, "closed by the peer", false);
        self.wakes.extend([(at, connection.sides[1 - side].endpoint), (now, id)]);
        let gone = self.end_side(number, side);
        self.endpoints.get_mut(&id).expect("it is alive").events.push(gone);
    }

    fn cut(&mut self, number: ConnectionId) -> Duration {
        let now = self.clock.now();
        let mut latest = Duration::ZERO;
        for side in 0..2 {
            // One side may notice much later, and send until then.
            let late = if self.prng.below(4) == 0 { 2_000_000_000 } else { 2_000_000 };
            let later = Duration::from_nanos(self.prng.below(late));
            let at = now + later;
            latest = latest.max(later);
            let connection = self.connections.get_mut(&number).expect("it is known");
            connection.pipes[1 - side].end_at(at, "simulated loss of the connection", true);
            self.wakes.push((at, connection.sides[side].endpoint));
        }
        latest
    }

    fn forget_closed(&mut self, number: ConnectionId) {
        if self.connections.get(&number).is_some_and(|one| one.sides.iter().all(|side| side.is_closed)) {
            self.connections.remove(&number);
        }
    }
}

impl SimPipe {
    /// Ends the pipe at this time, or at an earlier one that is set.
    fn end_at(&mut self, at: SimTime, reason: &'static str, is_local: bool) {
        if self.end.as_ref().is_none_or(|end| at < end.at) {
            self.end = Some(PipeEnd { at, reason, is_local });
        }
    }

    /// Takes the receiver's memory; the frames stay, as their payloads are the sender's.
    fn take_buffers(&mut self) -> ReceiveBuffers {
        let (posted, buffers): (Vec<_>, Vec<_>) = std::mem::take(&mut self.posted).into_iter().unzip();
        let received: Vec<_> = posted.into_iter().chain(self.announced.take()).collect();
        received.into_iter().rev().for_each(|flight| self.flights.push_front(flight));
        buffers.into_iter().flatten().collect()
    }

    /// Takes payloads that are in the sender's memory out of it; the frames stay.
    fn copy_payloads(&mut self) -> Vec<(Ticket, Payloads)> {
        let flights = self.posted.iter_mut().map(|(flight, _)| flight);
        let flights = flights.chain(&mut self.announced).chain(&mut self.flights);
        flights.filter_map(|flight| flight.body.copy().map(|payloads| (flight.ticket, payloads))).collect()
    }
}

impl Flight {
    fn opening(at: SimTime) -> Self {
        Self { at, payload_at: at, frame: None, ticket: Ticket(0), body: FlightBody::Copied(Vec::new()) }
    }
}

impl FlightBody {
    fn copy(&mut self) -> Option<Payloads> {
        let Self::InPlace(payloads) = self else { return None };
        let copied = payloads.iter().map(|payload| payload.bytes().to_vec()).collect();
        let payloads = std::mem::take(payloads);
        *self = Self::Copied(copied);
        Some(payloads)
    }
}

/// The transport of a session or client.
pub(crate) struct SimTransport {
    network: SimNetwork,
    endpoint: EndpointId,
    fate: Arc<ProcessFate>,
}

impl SimTransport {
    pub(crate) fn endpoint(&self) -> EndpointId {
        self.endpoint
    }
}

impl Transport for SimTransport {
    fn capabilities(&self) -> Capabilities {
        Capabilities { name: "simulated", checks_payload: false, receives: 4 }
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        Ok(self.network.lock().connect(self.endpoint, address))
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        if self.fate.is_dead() {
            queue.clear();
            return Ok(());
        }
        let lag = self.fate.lag();
        let mut state = self.network.lock();
        queue.drain(..).for_each(|work| state.submit(self.endpoint, work, lag));
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        self.network.lock().poll(self.endpoint, events);
        Ok(())
    }

    fn close(&mut self, peer: PeerId) {
        if !self.fate.is_dead() {
            self.network.lock().close(self.endpoint, peer);
        }
    }

    fn wait(&mut self, _limit: Duration) {}

    fn doorbell(&self) -> Doorbell {
        Doorbell::new(|| {})
    }
}

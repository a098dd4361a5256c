//! Frames in process, for tests and measurements: the same promises as over a network, between threads or within one.
//!
//! A payload stays in its sender's memory until its frame lands; it is copied once, on the receiver's thread. It
//! carries a checksum, which finds mistakes of ours in tests, unless [`LoopbackTransport::with`] says otherwise.

mod bell;
mod link;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pserver_core::error::Failure;
use pserver_core::ids::PeerId;
use pserver_core::limits::LANDINGS_MAX;
use pserver_core::port::{Capabilities, Doorbell, Event, Incoming, Submit, Transport};
use pserver_core::wire::{Address, ErrorCode, Flags, Scheme};

use bell::Bell;
use link::{End, Shipment};

use crate::network::{Checks, Poll};
use crate::payload::{Landing, assert_body, gone, returned, seal};
use crate::refusal::refusal;

/// How long a connection that is being closed waits for what was sent to land.
const LINGER: Duration = Duration::from_secs(1);
/// A peer that has delivered this many frames lets the others go on.
const TURN_FRAMES: usize = 16;

/// The addresses of one little world; clones are the same world.
#[derive(Clone, Default)]
pub struct Hub(Arc<Mutex<BTreeMap<(String, u16), Door>>>);

/// Where somebody listens.
#[derive(Clone)]
struct Door {
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    bell: Arc<Bell>,
}

/// A connection that its listener has not seen yet.
struct Arrival {
    end: End,
    origin: String,
}

/// Connections within one process, owned by one thread.
pub struct LoopbackTransport {
    hub: Hub,
    door: Door,
    address: Option<Address>,
    peers: BTreeMap<PeerId, Peer>,
    peers_made: u64,
    events: Vec<Event>,
    checks: Checks,
    poll: Poll,
}

struct Peer {
    end: End,
    /// What to say first.
    greeting: Option<Event>,
    /// Whether a head was reported whose places have not come yet.
    is_held: bool,
    /// The places of the frames before it, in order.
    landings: VecDeque<Vec<Incoming>>,
    /// Why it is being closed, and when at the latest.
    ending: Option<(String, Instant)>,
}

/// Two transports that share a hub, and the address at which the second listens.
#[must_use]
pub fn pair() -> (LoopbackTransport, LoopbackTransport, Address) {
    let hub = Hub::default();
    let address = Address { scheme: Scheme::Loopback, host: "far".to_owned(), port: 0 };
    let far = hub.listen(&address).expect("nobody else listens in a new hub");
    (hub.transport(), far, address)
}

impl Hub {
    /// A transport that listens at `loopback://name:lane`.
    ///
    /// # Errors
    /// [`Failure::Node`] when the address is of another transport, or somebody listens there.
    pub fn listen(&self, address: &Address) -> Result<LoopbackTransport, Failure> {
        let refused = |why: &str| Failure::Node(format!("listening on {address}: {why}"));
        if address.scheme != Scheme::Loopback {
            return Err(refused("this transport takes loopback:// only"));
        }
        let mut transport = self.transport();
        let mut doors = self.lock();
        let key = (address.host.clone(), address.port);
        if doors.contains_key(&key) {
            drop(doors);
            return Err(refused("another transport listens there"));
        }
        doors.insert(key, transport.door.clone());
        drop(doors);
        transport.address = Some(address.clone());
        Ok(transport)
    }

    /// A transport that only connects.
    #[must_use]
    pub fn transport(&self) -> LoopbackTransport {
        LoopbackTransport {
            hub: self.clone(),
            door: Door { arrivals: Arc::default(), bell: Arc::default() },
            address: None,
            peers: BTreeMap::new(),
            peers_made: 0,
            events: Vec::new(),
            checks: Checks::Always,
            poll: Poll::Block,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, u16), Door>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LoopbackTransport {
    /// The same, but for what it sends and how it waits: payloads that stay within a process are checked with
    /// [`Checks::Always`] only; with [`Poll::Busy`] a wait is over at once, and else it sleeps until something comes.
    #[must_use]
    pub fn with(mut self, checks: Checks, poll: Poll) -> Self {
        (self.checks, self.poll) = (checks, poll);
        self
    }

    fn add(&mut self, end: End, greet: impl FnOnce(PeerId) -> Event) -> PeerId {
        let id = self.next_peer();
        let greeting = Some(greet(id));
        let peer = Peer { end, greeting, is_held: false, landings: VecDeque::new(), ending: None };
        self.peers.insert(id, peer);
        id
    }

    fn next_peer(&mut self) -> PeerId {
        self.peers_made += 1;
        PeerId(self.peers_made)
    }

    fn adopt(&mut self) {
        let arrivals = std::mem::take(&mut *lock(&self.door.arrivals));
        for Arrival { end, origin } in arrivals {
            self.add(end, |peer| Event::Accepted { peer, origin });
        }
    }

    /// Takes one piece of work, or gives it back when the pipe is full.
    fn take(&mut self, work: Submit) -> Option<Submit> {
        let id = work.peer();
        let Some(peer) = self.peers.get_mut(&id) else {
            self.events.push(returned(work));
            self.door.bell.ring();
            return None;
        };
        match work {
            Submit::Send { peer: id, ticket, mut frame, body } => {
                assert_body(&frame, &body);
                if self.checks == Checks::Always {
                    seal(&mut frame, &body);
                } else if !body.is_empty() {
                    frame.head.flags = frame.head.flags.with(Flags::UNCHECKED);
                }
                let shipment = Shipment { ticket: Some(ticket), frame, body };
                let left = peer.end.send(shipment)?;
                Some(Submit::Send { peer: id, ticket, frame: left.frame, body: left.body })
            }
            Submit::Land { into, .. } => {
                assert!(peer.is_held, "places were handed over, but no head waits for them");
                peer.is_held = false;
                peer.landings.push_back(into);
                self.door.bell.ring();
                None
            }
        }
    }
}

impl Transport for LoopbackTransport {
    fn capabilities(&self) -> Capabilities {
        let checks_payload = self.checks == Checks::Always;
        Capabilities { name: "loopback", checks_payload, landings: LANDINGS_MAX }
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        if address.scheme != Scheme::Loopback {
            return Err(Failure::call(format!("address \"{address}\": this transport connects to loopback:// only")));
        }
        let hub = self.hub.clone();
        let doors = hub.lock();
        self.door.bell.ring();
        let Some(door) = doors.get(&(address.host.clone(), address.port)) else {
            let id = self.next_peer();
            self.events.push(gone(id, format!("connecting to {address}: nobody listens there")));
            return Ok(id);
        };
        let (near, far) = End::pair(&self.door.bell, &door.bell);
        let id = self.add(near, |peer| Event::Connected { peer });
        lock(&door.arrivals).push(Arrival { end: far, origin: format!("loopback peer {id}") });
        door.bell.ring();
        Ok(id)
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        let mut full = Vec::new();
        for _ in 0..queue.len() {
            let Some(work) = queue.pop_front() else { break };
            let id = work.peer();
            // Frames stay in order; places are taken always, because the peer may wait for us to read.
            let left = match work {
                Submit::Send { .. } if full.contains(&id) => Some(work),
                work => self.take(work),
            };
            if let Some(work) = left {
                queue.push_back(work);
                full.push(id);
            }
        }
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        self.adopt();
        events.append(&mut self.events);
        let mut again = false;
        self.peers.retain(|id, peer| {
            let before = events.len();
            let lives = peer.turn(*id, events);
            again |= events.len() > before;
            lives
        });
        if again {
            // Whoever did something may have more to do; the next wait looks.
            self.door.bell.ring();
        }
        Ok(())
    }

    fn close(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.end_with("closed by this side");
            self.door.bell.ring();
        }
    }

    fn wait(&mut self, limit: Duration) {
        if self.poll == Poll::Busy {
            return;
        }
        let now = Instant::now();
        let endings = self.peers.values().filter_map(|peer| peer.ending.as_ref());
        let until = endings.map(|(_, until)| until.saturating_duration_since(now)).min();
        self.door.bell.wait(until.map_or(limit, |until| limit.min(until)));
    }

    fn doorbell(&self) -> Doorbell {
        let bell = Arc::clone(&self.door.bell);
        Doorbell::new(move || bell.ring())
    }
}

impl Drop for LoopbackTransport {
    fn drop(&mut self) {
        if let Some(address) = self.address.take() {
            self.hub.lock().remove(&(address.host, address.port));
        }
        let arrivals = std::mem::take(&mut *lock(&self.door.arrivals));
        let arrived = arrivals.iter().map(|arrival| &arrival.end);
        for end in arrived.chain(self.peers.values().map(|peer| &peer.end)) {
            end.finish("the peer's transport is gone");
            // Nobody asks for what was sent from here any more.
            drop((end.give_up(), end.sent()));
        }
    }
}

impl Peer {
    /// Does what can be done without waiting; false when the connection is over.
    fn turn(&mut self, id: PeerId, events: &mut Vec<Event>) -> bool {
        events.extend(self.greeting.take());
        if let Some((reason, until)) = &self.ending
            && (self.end.is_drained() || *until <= Instant::now())
        {
            self.end.finish(reason);
        }
        let over = self.end.over();
        let sent = self.end.sent().into_iter();
        events.extend(sent.map(|(ticket, body)| Event::Sent { peer: id, ticket, body }));
        if let Some((reason, unsent)) = over {
            let unfilled = self.landings.drain(..).flatten().collect();
            events.push(Event::Gone { peer: id, reason, unsent, unfilled });
            return false;
        }
        for _ in 0..TURN_FRAMES {
            let Some(event) = self.receive(id) else { break };
            // Who lands a frame at once sees the next head before the payload: as many land at once as may.
            let is_head = matches!(event, Event::Head { .. });
            events.push(event);
            if is_head {
                break;
            }
        }
        true
    }

    fn receive(&mut self, peer: PeerId) -> Option<Event> {
        if self.ending.is_some() {
            return None;
        }
        let before = self.landings.len();
        if !self.is_held
            && before < LANDINGS_MAX
            && let Some(frame) = self.end.peek(before)
        {
            if frame.payload_bytes() > 0 {
                self.is_held = true;
                return Some(Event::Head { peer, frame });
            }
            if before == 0 {
                self.end.put_back(self.end.take()?);
                return Some(Event::Landed { peer, frame, body: Vec::new() });
            }
        }
        let places = self.landings.pop_front()?;
        self.land(peer, places)
    }

    fn land(&mut self, peer: PeerId, places: Vec<Incoming>) -> Option<Event> {
        let Some(shipment) = self.end.take() else {
            // The sender gave up meanwhile, and the connection's end is on its way.
            self.landings.push_front(places);
            return None;
        };
        let mut landing = Landing::new(shipment.frame.clone(), places);
        let copied = shipment.body.iter().try_for_each(|parcel| landing.copy(parcel.bytes()).map(drop));
        self.end.put_back(shipment);
        let (frame, body) = landing.into_parts();
        match copied {
            Ok(()) => Some(Event::Landed { peer, frame, body }),
            Err(error) => {
                self.landings.push_front(body);
                self.refuse(&error.to_string());
                None
            }
        }
    }

    fn refuse(&mut self, reason: &str) {
        let frame = refusal(ErrorCode::Invalid, reason);
        // A refusal has no ticket, so the pipe always takes it.
        let _ = self.end.send(Shipment { ticket: None, frame, body: Vec::new() });
        self.end_with(reason);
    }

    fn end_with(&mut self, reason: &str) {
        self.ending.get_or_insert_with(|| (reason.to_owned(), Instant::now() + LINGER));
    }
}

fn lock(arrivals: &Mutex<Vec<Arrival>>) -> MutexGuard<'_, Vec<Arrival>> {
    // A list is whole after every operation, so a panic elsewhere does not spoil it.
    arrivals.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Transport within a process, for tests and measurements, between threads or within one.
//!
//! A payload stays in the sender's memory until it is copied once, on the receiver's thread. It carries a checksum,
//! which finds errors in tests, unless [`LoopbackTransport::with`] disables it.

mod link;
mod signal;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pserver_core::error::Failure;
use pserver_core::ids::PeerId;
use pserver_core::limits::RECEIVES_MAX;
use pserver_core::port::{Capabilities, Doorbell, Event, Payloads, ReceiveBuffers, Submit, Transport};
use pserver_core::wire::{Address, ErrorCode, Flags, Scheme};

use link::{LinkEnd, PipeFrame};
use signal::Signal;

use crate::network::{ChecksumPolicy, PollPolicy};
use crate::payload::{PostedReceive, assert_body, gone_event, write_checksums};
use crate::refusal::refusal;

/// Time for a closing connection to deliver its frames.
const LINGER: Duration = Duration::from_secs(1);
/// Frames that one peer reports in a turn.
const TURN_FRAMES: usize = 16;

/// A set of addresses; clones share it.
#[derive(Clone, Default)]
pub struct Hub(Arc<Mutex<BTreeMap<(String, u16), LoopbackListener>>>);

/// The way of new connections to a transport.
#[derive(Clone)]
pub struct LoopbackListener {
    arrivals: Arc<Mutex<Vec<LoopbackArrival>>>,
    signal: Arc<Signal>,
}

/// A connection that its listener has not seen.
struct LoopbackArrival {
    end: LinkEnd,
    origin: String,
}

/// A transport within a process, owned by one thread.
pub struct LoopbackTransport {
    hub: Hub,
    listener: LoopbackListener,
    peers: BTreeMap<PeerId, LoopbackPeer>,
    peers_made: u64,
    events: Vec<Event>,
    checks: ChecksumPolicy,
    poll: PollPolicy,
}

struct LoopbackPeer {
    end: LinkEnd,
    /// The first event to report.
    first_event: Option<Event>,
    /// Whether a head waits for its receive buffers.
    awaits_buffers: bool,
    /// Buffers of the posted receives, in order.
    landings: VecDeque<ReceiveBuffers>,
    /// The reason and the deadline of a closing.
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
    /// As [`Hub::open`].
    pub fn listen(&self, address: &Address) -> Result<LoopbackTransport, Failure> {
        let transport = self.transport();
        self.open(address, &transport.listener)?;
        Ok(transport)
    }

    /// From now on a transport gets the connections to `loopback://name:lane`, also beside those to other addresses.
    ///
    /// # Errors
    /// [`Failure::Node`] when the address is of another transport or in use.
    pub fn open(&self, address: &Address, listener: &LoopbackListener) -> Result<(), Failure> {
        let refused = |why: &str| Err(Failure::Node(format!("listening on {address}: {why}")));
        if address.scheme != Scheme::Loopback {
            return refused("this transport takes loopback:// only");
        }
        match self.lock().entry((address.host.clone(), address.port)) {
            Entry::Occupied(_) => refused("another transport listens there"),
            Entry::Vacant(place) => {
                place.insert(listener.clone());
                Ok(())
            }
        }
    }

    /// From now on connections to `loopback://name:lane` are refused.
    pub fn close(&self, address: &Address) {
        self.lock().remove(&(address.host.clone(), address.port));
    }

    /// A transport that only connects.
    #[must_use]
    pub fn transport(&self) -> LoopbackTransport {
        LoopbackTransport {
            hub: self.clone(),
            listener: LoopbackListener { arrivals: Arc::default(), signal: Arc::default() },
            peers: BTreeMap::new(),
            peers_made: 0,
            events: Vec::new(),
            checks: ChecksumPolicy::Always,
            poll: PollPolicy::Block,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, u16), LoopbackListener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LoopbackTransport {
    /// Sets the checksum policy, under which only [`ChecksumPolicy::Always`] checks payloads, and the wait policy,
    /// under which [`PollPolicy::Busy`] returns at once and the others sleep.
    #[must_use]
    pub fn with(mut self, checks: ChecksumPolicy, poll: PollPolicy) -> Self {
        (self.checks, self.poll) = (checks, poll);
        self
    }

    /// The way of new connections to it.
    #[must_use]
    pub fn listener(&self) -> LoopbackListener {
        self.listener.clone()
    }

    fn add(&mut self, end: LinkEnd, greet: impl FnOnce(PeerId) -> Event) -> PeerId {
        let id = self.next_peer();
        let first_event = Some(greet(id));
        let peer = LoopbackPeer { end, first_event, awaits_buffers: false, landings: VecDeque::new(), ending: None };
        self.peers.insert(id, peer);
        id
    }

    fn next_peer(&mut self) -> PeerId {
        self.peers_made += 1;
        PeerId(self.peers_made)
    }

    fn adopt(&mut self) {
        let arrivals = std::mem::take(&mut *lock(&self.listener.arrivals));
        for LoopbackArrival { end, origin } in arrivals {
            let transport = "loopback: both ends are in this process".to_owned();
            self.add(end, |peer| Event::Accepted { peer, origin, transport });
        }
    }

    /// Accepts one submission, or returns it when the pipe is full.
    fn take(&mut self, work: Submit) -> Option<Submit> {
        let id = work.peer();
        let Some(peer) = self.peers.get_mut(&id) else {
            self.events.push(work.into_returned());
            self.listener.signal.set();
            return None;
        };
        match work {
            Submit::Send { peer: id, ticket, mut frame, body } => {
                assert_body(&frame, &body);
                if self.checks == ChecksumPolicy::Always {
                    write_checksums(&mut frame, &body);
                } else if !body.is_empty() {
                    frame.head.flags = frame.head.flags.with(Flags::UNCHECKED);
                }
                let frame = PipeFrame { ticket: Some(ticket), frame, body };
                let left = peer.end.send(frame)?;
                Some(Submit::Send { peer: id, ticket, frame: left.frame, body: left.body })
            }
            Submit::PostReceive { into, .. } => {
                assert!(peer.awaits_buffers, "buffers were handed over, but no head waits for them");
                peer.awaits_buffers = false;
                peer.landings.push_back(into);
                self.listener.signal.set();
                None
            }
            Submit::PostAnswer { .. } => panic!("buffers for an answer were posted; loopback takes none"),
        }
    }
}

impl Transport for LoopbackTransport {
    fn capabilities(&self) -> Capabilities {
        let checks_payload = self.checks == ChecksumPolicy::Always;
        Capabilities { name: "loopback", checks_payload, receives: RECEIVES_MAX }
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        if address.scheme != Scheme::Loopback {
            return Err(Failure::call(format!("address \"{address}\": this transport connects to loopback:// only")));
        }
        let hub = self.hub.clone();
        let listeners = hub.lock();
        self.listener.signal.set();
        let Some(listener) = listeners.get(&(address.host.clone(), address.port)) else {
            let id = self.next_peer();
            self.events.push(gone_event(id, format!("connecting to {address}: no transport listens there")));
            return Ok(id);
        };
        let (near, far) = LinkEnd::pair(&self.listener.signal, &listener.signal);
        let id = self.add(near, |peer| Event::Connected { peer });
        lock(&listener.arrivals).push(LoopbackArrival { end: far, origin: format!("loopback peer {id}") });
        listener.signal.set();
        Ok(id)
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        let mut full = Vec::new();
        for _ in 0..queue.len() {
            let Some(work) = queue.pop_front() else { break };
            let id = work.peer();
            // Sends stay in order. Receive buffers are always accepted, because the peer may depend on this side
            // reading.
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
            // Peers with events may have more; the next wait returns at once.
            self.listener.signal.set();
        }
        Ok(())
    }

    fn close(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.end_with("closed by this side");
            self.listener.signal.set();
        }
    }

    fn wait(&mut self, limit: Duration) {
        if self.poll == PollPolicy::Busy {
            return;
        }
        let now = Instant::now();
        let endings = self.peers.values().filter_map(|peer| peer.ending.as_ref());
        let until = endings.map(|(_, until)| until.saturating_duration_since(now)).min();
        self.listener.signal.wait(until.map_or(limit, |until| limit.min(until)));
    }

    fn doorbell(&self) -> Doorbell {
        let signal = Arc::clone(&self.listener.signal);
        Doorbell::new(move || signal.set())
    }
}

impl Drop for LoopbackTransport {
    fn drop(&mut self) {
        self.hub.lock().retain(|_, other| !Arc::ptr_eq(&other.arrivals, &self.listener.arrivals));
        let arrivals = std::mem::take(&mut *lock(&self.listener.arrivals));
        let arrived = arrivals.iter().map(|arrival| &arrival.end);
        for end in arrived.chain(self.peers.values().map(|peer| &peer.end)) {
            end.finish("the peer's transport is gone");
            // No transport is left that could report these.
            drop((end.give_up(), end.sent()));
        }
    }
}

impl LoopbackPeer {
    /// Makes progress without blocking; false when the connection has ended.
    fn turn(&mut self, id: PeerId, events: &mut Vec<Event>) -> bool {
        events.extend(self.first_event.take());
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
            if self.end.is_unread() {
                break;
            }
            let Some(event) = self.receive(id) else { break };
            // A session that answers heads at once sees the next head before the payload, so that receives overlap as
            // far as allowed.
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
        if !self.awaits_buffers
            && before < RECEIVES_MAX
            && let Some(frame) = self.end.peek(before)
        {
            if frame.payload_bytes() > 0 {
                self.awaits_buffers = true;
                return Some(Event::Head { peer, frame });
            }
            if before == 0 {
                self.end.put_back(self.end.take()?);
                return Some(Event::Received { peer, frame, body: ReceiveBuffers::new() });
            }
        }
        let buffers = self.landings.pop_front()?;
        self.receive_payload(peer, buffers)
    }

    fn receive_payload(&mut self, peer: PeerId, buffers: ReceiveBuffers) -> Option<Event> {
        let Some(frame) = self.end.take() else {
            // The sender has withdrawn the frame, and the connection is about to end.
            self.landings.push_front(buffers);
            return None;
        };
        let mut posted = PostedReceive::new(frame.frame.clone(), buffers);
        let copied = frame.body.iter().try_for_each(|parcel| posted.copy(parcel.bytes()).map(drop));
        self.end.put_back(frame);
        let (frame, body) = posted.into_parts();
        match copied {
            Ok(()) => Some(Event::Received { peer, frame, body }),
            Err(error) => {
                self.landings.push_front(body);
                self.refuse(&error.to_string());
                None
            }
        }
    }

    fn refuse(&mut self, reason: &str) {
        let frame = refusal(ErrorCode::Invalid, reason);
        // A refusal has no ticket, so the pipe accepts it.
        let _ = self.end.send(PipeFrame { ticket: None, frame, body: Payloads::new() });
        self.end_with(reason);
    }

    fn end_with(&mut self, reason: &str) {
        self.ending.get_or_insert_with(|| (reason.to_owned(), Instant::now() + LINGER));
    }
}

fn lock(arrivals: &Mutex<Vec<LoopbackArrival>>) -> MutexGuard<'_, Vec<LoopbackArrival>> {
    // Every operation leaves the list consistent, so a panic elsewhere does no harm.
    arrivals.lock().unwrap_or_else(PoisonError::into_inner)
}

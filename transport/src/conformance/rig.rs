//! Test rig: two transports driven by one thread, and a record of their events.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pserver_core::checksum::checksum;
use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, PeerId, Round, Sequence, Ticket};
use pserver_core::memory::{Arena, Budget, Value};
use pserver_core::port::{Event, Incoming, Payloads, ReceiveBuffers, Submit, Transport};
use pserver_core::wire::{Address, Entry, Flags, Frame, Head, HelloMessage, Kind};

use super::TransportPair;

/// The deadline of a promise. Kept promises take milliseconds, except on an emulated machine.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct ConformanceRig {
    pub(crate) near: RigSide,
    pub(crate) far: RigSide,
    pub(crate) address: Address,
    pub(crate) landings: usize,
    pub(crate) looks: bool,
    /// Polls of both sides.
    pub(crate) steps: u64,
    _keep: Box<dyn Any>,
}

/// A transport with a session that receives and records everything.
pub(crate) struct RigSide {
    /// None after its death.
    pub(crate) transport: Option<Box<dyn Transport>>,
    pub(crate) queue: VecDeque<Submit>,
    pub(crate) seen: Vec<SeenEvent>,
    /// Peers whose heads are not answered.
    pub(crate) held: BTreeSet<PeerId>,
    pub(crate) holds_all: bool,
    /// Whether a head is answered only when no receive is posted.
    pub(crate) lands_singly: bool,
    pub(crate) discards: bool,
    pub(crate) arena: Arena,
    /// Payloads to send, and receive buffers, that were submitted and are not back.
    pub(crate) sends_out: usize,
    pub(crate) receives_out: usize,
    /// Unanswered heads.
    pub(crate) waiting: BTreeMap<PeerId, Frame>,
    /// Posted receives of each connection, and the most of any.
    pub(crate) landing: BTreeMap<PeerId, usize>,
    pub(crate) most_landing: usize,
    /// Frames that were transmitted before their buffers came back.
    pub(crate) left: usize,
    /// Received frames with the flag that they are finite.
    pub(crate) finite: usize,
    tickets: u64,
}

/// A recorded event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SeenEvent {
    Connected(PeerId),
    Accepted(PeerId),
    TakesAnswers(PeerId),
    Head(PeerId, Frame),
    Landed(PeerId, Frame, Vec<Vec<u8>>),
    AnswerReturned(PeerId, Ticket, Vec<u32>),
    Sent(PeerId, Ticket),
    Gone(PeerId, String),
}

impl ConformanceRig {
    pub(crate) fn new(ends: TransportPair) -> Self {
        let TransportPair { near, far, address, landings, looks, keep } = ends;
        Self { near: RigSide::new(near), far: RigSide::new(far), address, landings, looks, steps: 0, _keep: keep }
    }

    /// Connects and sends a hello; the two ends.
    pub(crate) fn connect(&mut self) -> (PeerId, PeerId) {
        let known = self.far.accepted();
        let address = self.address.clone();
        let near = self.near.transport().connect(&address).expect("the address is of this transport");
        self.near.send(near, &hello(0), Payloads::new());
        self.until("a hello lands", |rig| {
            let hellos = rig.far.landed().filter(|(_, frame, _)| frame.head.kind == Kind::Hello);
            hellos.count() > known.len()
        });
        let far = self.far.accepted().into_iter().find(|peer| !known.contains(peer));
        (near, far.expect("a hello lands after its connection was reported"))
    }

    /// Polls both sides until `done`.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            self.steps += 1;
            let near = self.near.step();
            let far = self.far.step();
            if !near && !far {
                self.near.wait(Duration::from_millis(1));
                self.far.wait(Duration::from_millis(1));
            }
            let (near, far) = (&self.near, &self.far);
            assert!(Instant::now() < deadline, "until {what}\nnear: {near:?}\nfar: {far:?}");
        }
    }

    /// Polls both sides until neither has had an event for a while.
    pub(crate) fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 20 {
            let near = self.near.step();
            let far = self.far.step();
            quiet = if near || far { 0 } else { quiet + 1 };
            self.near.wait(Duration::from_millis(1));
            self.far.wait(Duration::from_millis(1));
        }
    }
}

impl RigSide {
    fn new(transport: Box<dyn Transport>) -> Self {
        let mut budget = Budget::new();
        budget.line("small payloads", 64, 16 * 1024);
        budget.line("chunks", 64 * 1024, 2048);
        budget.line("large chunks", 4 * 1024 * 1024, 64);
        Self {
            transport: Some(transport),
            queue: VecDeque::new(),
            seen: Vec::new(),
            held: BTreeSet::new(),
            holds_all: false,
            lands_singly: false,
            discards: false,
            arena: Arena::new(&budget).expect("the pages are not touched before use"),
            sends_out: 0,
            receives_out: 0,
            waiting: BTreeMap::new(),
            landing: BTreeMap::new(),
            most_landing: 0,
            left: 0,
            finite: 0,
            tickets: 0,
        }
    }

    pub(crate) fn transport(&mut self) -> &mut dyn Transport {
        self.transport.as_deref_mut().expect("it has not died")
    }

    /// Submits a frame; its ticket.
    pub(crate) fn send(&mut self, peer: PeerId, frame: &Frame, body: Payloads) -> Ticket {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.sends_out += body.len();
        self.queue.push_back(Submit::Send { peer, ticket, frame: frame.clone(), body });
        ticket
    }

    /// Answers a head.
    pub(crate) fn land(&mut self, peer: PeerId, into: ReceiveBuffers) {
        self.receives_out += into.len();
        self.waiting.remove(&peer);
        let landing = self.landing.entry(peer).or_default();
        *landing += 1;
        self.most_landing = self.most_landing.max(*landing);
        self.queue.push_back(Submit::PostReceive { peer, into });
    }

    /// Answers every waiting head, and later ones as they come.
    pub(crate) fn release(&mut self) {
        self.holds_all = false;
        for (peer, frame) in std::mem::take(&mut self.waiting) {
            let places = self.places(&frame);
            self.land(peer, places);
        }
    }

    /// Receive buffers for a frame.
    pub(crate) fn places(&self, frame: &Frame) -> ReceiveBuffers {
        let lengths = frame.entries.iter().map(|entry| entry.bytes).filter(|bytes| *bytes > 0);
        let place = |bytes| match self.discards {
            true => Incoming::Discard { bytes },
            false => Incoming::Chunk { lease: self.arena.take(bytes).expect("the suite's budget"), bytes },
        };
        lengths.map(place).collect()
    }

    pub(crate) fn lease(&self, bytes: &[u8]) -> Arc<Value> {
        let length = u32::try_from(bytes.len()).expect("a chunk");
        let mut lease = self.arena.take(length).expect("the suite's budget");
        lease.bytes_mut().copy_from_slice(bytes);
        Arc::new(Value::new(lease, length))
    }

    pub(crate) fn accepted(&self) -> BTreeSet<PeerId> {
        self.seen
            .iter()
            .filter_map(|seen| if let SeenEvent::Accepted(peer) = seen { Some(*peer) } else { None })
            .collect()
    }

    pub(crate) fn landed(&self) -> impl Iterator<Item = (PeerId, &Frame, &Vec<Vec<u8>>)> {
        self.seen.iter().filter_map(|seen| match seen {
            SeenEvent::Landed(peer, frame, body) => Some((*peer, frame, body)),
            _ => None,
        })
    }

    /// The reason why a connection ended, if it has.
    pub(crate) fn gone(&self, of: PeerId) -> Option<&str> {
        self.seen.iter().find_map(|seen| match seen {
            SeenEvent::Gone(peer, reason) if *peer == of => Some(reason.as_str()),
            _ => None,
        })
    }

    /// One submit and one poll; whether an event occurred.
    pub(crate) fn step(&mut self) -> bool {
        let Some(transport) = &mut self.transport else {
            return false;
        };
        let mut events = Vec::new();
        transport.submit(&mut self.queue).expect("the device works");
        transport.poll(&mut events).expect("the device works");
        let any = !events.is_empty();
        for event in events {
            self.note(event);
        }
        any
    }

    pub(crate) fn wait(&mut self, limit: Duration) {
        if let Some(transport) = &mut self.transport {
            transport.wait(limit);
        }
    }

    fn note(&mut self, event: Event) {
        let seen = match event {
            Event::Connected { peer } => SeenEvent::Connected(peer),
            Event::Accepted { peer, origin, transport } => {
                assert!(!origin.is_empty(), "an origin is named");
                assert!(transport.contains(": "), "a transport and its reason are named");
                SeenEvent::Accepted(peer)
            }
            Event::Head { peer, frame } => {
                let waits = self.lands_singly && self.landing.get(&peer).is_some_and(|landing| *landing > 0);
                if self.holds_all || waits || self.held.contains(&peer) {
                    self.waiting.insert(peer, frame.clone());
                } else {
                    let places = self.places(&frame);
                    self.land(peer, places);
                }
                SeenEvent::Head(peer, as_sent(frame))
            }
            Event::Received { peer, frame, body } => {
                // For a value without a posted buffer the transport gives one that discards it.
                let is_own =
                    |place: &&Incoming| frame.head.kind != Kind::Value || !matches!(place, Incoming::Discard { .. });
                self.receives_out -= body.iter().filter(is_own).count();
                if let Some(landing) = self.landing.get_mut(&peer).filter(|_| !body.is_empty()) {
                    *landing -= 1;
                }
                if self.lands_singly {
                    self.release();
                }
                self.check_sums(&frame, &body);
                self.check_finite(&frame, &body);
                SeenEvent::Landed(peer, as_sent(frame), body.iter().map(|place| place.bytes().to_vec()).collect())
            }
            Event::Moved { transport, .. } => {
                assert!(transport.contains(": "), "a transport and its reason are named");
                return;
            }
            Event::TakesAnswers { peer } => SeenEvent::TakesAnswers(peer),
            Event::AnswerReturned { peer, request, into } => {
                self.receives_out -= into.len();
                SeenEvent::AnswerReturned(peer, request, into.iter().map(Incoming::len).collect())
            }
            // Its buffers are still out.
            Event::Transmitted { .. } => {
                self.left += 1;
                return;
            }
            Event::Sent { peer, ticket, body } => {
                self.sends_out -= body.len();
                SeenEvent::Sent(peer, ticket)
            }
            Event::Gone { peer, reason, unsent, unfilled } => {
                self.waiting.remove(&peer);
                self.sends_out -= unsent.iter().map(|(_, body)| body.len()).sum::<usize>();
                self.receives_out -= unfilled.len();
                SeenEvent::Gone(peer, reason)
            }
        };
        self.seen.push(seen);
    }

    pub(crate) fn checks_payload(&self) -> bool {
        self.transport.as_ref().is_some_and(|transport| transport.capabilities().checks_payload)
    }

    /// A transport that checks payloads has written their checksums into the entries.
    fn check_sums(&self, frame: &Frame, body: &[Incoming]) {
        let entries = frame.entries.iter().filter(|entry| self.checks_payload() && entry.bytes > 0);
        for (entry, place) in entries.zip(body).filter(|(_, place)| !place.bytes().is_empty()) {
            assert_eq!(entry.checksum, checksum(place.bytes()), "the checksum of {:?}", entry.id);
        }
    }

    /// A frame that is said to be finite is, element by element.
    fn check_finite(&mut self, frame: &Frame, body: &[Incoming]) {
        if !frame.head.flags.contains(Flags::FINITE) {
            return;
        }
        assert_eq!(frame.head.kind, Kind::Push, "only gradients are looked at");
        self.finite += 1;
        for place in body {
            let elements = place.bytes().as_chunks().0.iter().map(|element| f32::from_le_bytes(*element));
            assert!(elements.into_iter().all(f32::is_finite), "{:?}: an element is not finite", frame.head);
        }
    }
}

/// A frame as it was handed over: without what the transport adds for itself.
fn as_sent(mut frame: Frame) -> Frame {
    frame.entries.iter_mut().for_each(|entry| entry.checksum = 0);
    frame.head.flags = frame.head.flags.without(Flags::UNCHECKED).without(Flags::FINITE);
    frame
}

impl std::fmt::Debug for RigSide {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { queue, seen, sends_out, receives_out, .. } = self;
        writeln!(formatter, "{} queued, {sends_out} parcels and {receives_out} places out, seen:", queue.len())?;
        for seen in seen.iter().rev().take(20).rev() {
            writeln!(formatter, "  {}", format!("{seen:?}").chars().take(160).collect::<String>())?;
        }
        Ok(())
    }
}

/// A hello for a lane.
pub(crate) fn hello(lane: u64) -> Frame {
    let mut head = Head::new(Kind::Hello);
    head.sequence = Sequence(lane);
    Frame::with_control(
        head,
        &HelloMessage { role: 0, host: "here".to_owned(), process: 1, absence_millis: None, run: 0, run_trainers: 0 },
    )
}

/// A push with these payloads; an empty one is an entry without payload.
pub(crate) fn push(number: u64, payloads: &[&[u8]]) -> Frame {
    let mut head = Head::new(Kind::Push);
    head.sequence = Sequence(number);
    let mut frame = Frame::bare(head);
    for (index, payload) in payloads.iter().enumerate() {
        let id = ChunkId { parameter: ParameterIndex(7), chunk: ChunkIndex(index as u64) };
        frame.entries.push(match payload.is_empty() {
            true => Entry::bare(id, Round(1), ElementType::Float32),
            false => Entry::with_payload(id, Round(1), ElementType::Float32, payload),
        });
    }
    frame
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut word = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes()
    };
    std::iter::repeat_with(&mut word).flatten().take(length).collect()
}

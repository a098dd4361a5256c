//! Receive side of a shared-memory connection.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pserver_core::checksum::checksum;
use pserver_core::ids::PeerId;
use pserver_core::memory::Lease;
use pserver_core::memory::shared::ReadOnly;
use pserver_core::optim::is_finite;
use pserver_core::port::{Event, Incoming, ReceiveBuffers};
use pserver_core::wire::{Flags, Frame, HEADER_BYTES, Kind, Prefix};

use super::rings::{ArenaBorrows, ShmRings};
use super::send::REFERENCE_BYTES;
use super::{ARENAS_MAX, ConnectionError, FINITE, INLINE_BYTES_MAX, TOKENS};
use crate::payload::next_with_payload;

/// State of the receive side.
pub(super) struct ShmReceiver {
    state: ShmReceiveState,
    /// The part of the entries and the control message that has arrived.
    rest: Vec<u8>,
    /// The other side's arenas, by number.
    arenas: PeerArenas,
    /// References of the peer that are read in place.
    held_references: Arc<AtomicU64>,
}

/// Arenas that the peer has announced and not withdrawn.
#[derive(Default)]
struct PeerArenas {
    by_number: BTreeMap<u32, PeerArena>,
    /// The next arena's number.
    next: u32,
}

enum ShmReceiveState {
    Header,
    Rest(Prefix),
    /// The head was reported; its receive buffers are not posted.
    AwaitingBuffers(Frame),
    Payload(ShmPostedReceive),
}

/// A frame with posted receive buffers.
struct ShmPostedReceive {
    frame: Frame,
    buffers: ReceiveBuffers,
    /// The next entry and the next buffer.
    entry: usize,
    place: usize,
    /// Posted leases that views replace, by buffer index, until the frame is complete.
    displaced: Vec<(usize, Lease)>,
    /// Whether all gradients so far are known to be finite, checked by either side.
    is_finite: bool,
}

struct PeerArena {
    memory: Arc<ReadOnly>,
    borrowed: Arc<ArenaBorrows>,
    /// Bytes of it that may be held.
    held_max: u64,
}

/// A reference to a payload in an arena of the peer.
#[derive(Clone, Copy)]
struct PayloadReference {
    arena: u32,
    token: u32,
    offset: u64,
    /// Whether the peer has checked that all elements are finite.
    is_finite: bool,
}

/// The reason why reading stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ShmReceiveProgress {
    /// A head waits for its receive buffers.
    AwaitingBuffers,
    /// The ring is empty.
    Empty,
    /// The turn's budget is spent.
    BudgetSpent,
    /// The arena of a reference must arrive on the socket first.
    MissingArena,
}

/// The outcome of one step.
enum ReceiveStep {
    Done(usize),
    Short,
    MissingArena,
}

impl ShmReceiver {
    pub(super) fn new() -> Self {
        Self {
            state: ShmReceiveState::Header,
            rest: Vec::new(),
            arenas: PeerArenas::default(),
            held_references: Arc::default(),
        }
    }

    /// Reads until the ring is empty, a head waits for its buffers, or the budget is spent.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        rings: &mut ShmRings,
        (bytes_max, frames_max): (usize, usize),
        events: &mut Vec<Event>,
    ) -> Result<ShmReceiveProgress, ConnectionError> {
        let (before, mut moved) = (events.len(), 0);
        let read = loop {
            if matches!(self.state, ShmReceiveState::AwaitingBuffers(_)) {
                break ShmReceiveProgress::AwaitingBuffers;
            }
            if moved >= bytes_max || events.len() - before >= frames_max {
                break ShmReceiveProgress::BudgetSpent;
            }
            match self.advance(peer, rings, events)? {
                ReceiveStep::Done(bytes) => moved += bytes,
                ReceiveStep::Short => break ShmReceiveProgress::Empty,
                ReceiveStep::MissingArena => break ShmReceiveProgress::MissingArena,
            }
        };
        rings.publish_read();
        Ok(read)
    }

    /// Posts the receive buffers for the reported head.
    ///
    /// # Panics
    /// Without a waiting head, or with buffers of other lengths: the session counts them.
    pub(super) fn post_receive(&mut self, buffers: ReceiveBuffers) {
        let ShmReceiveState::AwaitingBuffers(frame) = std::mem::replace(&mut self.state, ShmReceiveState::Header)
        else {
            panic!("buffers were handed over, but no head waits for them");
        };
        let expected = frame.entries.iter().map(|entry| entry.bytes).filter(|bytes| *bytes > 0);
        assert!(expected.eq(buffers.iter().map(Incoming::len)), "land: one place for each entry with a payload");
        let (is_finite, displaced) = (frame.head.kind == Kind::Push, Vec::new());
        self.state =
            ShmReceiveState::Payload(ShmPostedReceive { frame, buffers, entry: 0, place: 0, displaced, is_finite });
    }

    /// Returns the buffers that were not filled.
    pub(super) fn take_unfilled(&mut self) -> ReceiveBuffers {
        match std::mem::replace(&mut self.state, ShmReceiveState::Header) {
            ShmReceiveState::Payload(count_message) => count_message.into_buffers(),
            _ => ReceiveBuffers::new(),
        }
    }

    /// Maps an arena of the peer. Half of it may be held, so that a sender that copies payloads into it always has
    /// room; all of it where payloads live in it.
    pub(super) fn add_arena(
        &mut self,
        descriptor: &OwnedFd,
        holds_payloads: bool,
        rings: &ShmRings,
    ) -> Result<(), ConnectionError> {
        if self.arenas.by_number.len() == ARENAS_MAX {
            return Err(ConnectionError::Broken(format!("more than {ARENAS_MAX} arenas on one connection")));
        }
        let memory = ReadOnly::open(descriptor).map_err(|failure| ConnectionError::Broken(failure.to_string()))?;
        let borrowed = Arc::new(ArenaBorrows::new(rings.signals(), &self.held_references));
        let held_max = if holds_payloads { u64::MAX } else { memory.len() / 2 };
        self.arenas.by_number.insert(self.arenas.next, PeerArena { memory: Arc::new(memory), borrowed, held_max });
        self.arenas.next += 1;
        Ok(())
    }

    /// Removes an arena of the peer; views keep it mapped until they are dropped.
    pub(super) fn drop_arena(&mut self, number: u32) {
        self.arenas.by_number.remove(&number);
    }

    /// The reason for the end, when the peer has closed and the ring is read.
    pub(super) fn end(&self, rings: &mut ShmRings) -> ConnectionError {
        let between = matches!(self.state, ShmReceiveState::Header) && rings.available(1).is_ok_and(|bytes| bytes == 0);
        if between { ConnectionError::Closed } else { ConnectionError::Cut }
    }

    fn advance(
        &mut self,
        peer: PeerId,
        rings: &mut ShmRings,
        events: &mut Vec<Event>,
    ) -> Result<ReceiveStep, ConnectionError> {
        match &mut self.state {
            ShmReceiveState::Header => {
                if rings.available(HEADER_BYTES)? < HEADER_BYTES {
                    return Ok(ReceiveStep::Short);
                }
                let mut header = [0; HEADER_BYTES];
                rings.read_into(&mut header);
                self.state = ShmReceiveState::Rest(Prefix::decode_plain(&header)?);
                Ok(ReceiveStep::Done(HEADER_BYTES))
            }
            ShmReceiveState::Rest(prefix) => {
                let wanted = prefix.rest_bytes() - self.rest.len();
                let step = rings.available(wanted)?.min(wanted);
                let begin = self.rest.len();
                self.rest.resize(begin + step, 0);
                rings.read_into(&mut self.rest[begin..]);
                if step < wanted {
                    return Ok(if step > 0 { ReceiveStep::Done(step) } else { ReceiveStep::Short });
                }
                let frame = prefix.finish(&self.rest)?;
                self.rest.clear();
                self.rest.shrink_to(REST_BYTES_KEPT);
                self.report(peer, frame, events);
                Ok(ReceiveStep::Done(step))
            }
            ShmReceiveState::AwaitingBuffers(_) => Ok(ReceiveStep::Short),
            ShmReceiveState::Payload(count_message) => {
                let step = count_message.step(rings, &self.arenas)?;
                if count_message.place == count_message.buffers.len()
                    && let ShmReceiveState::Payload(mut count_message) =
                        std::mem::replace(&mut self.state, ShmReceiveState::Header)
                {
                    if count_message.is_finite {
                        count_message.frame.head.flags = count_message.frame.head.flags.with(Flags::FINITE);
                    }
                    events.push(Event::Received { peer, frame: count_message.frame, body: count_message.buffers });
                }
                Ok(step)
            }
        }
    }

    fn report(&mut self, peer: PeerId, frame: Frame, events: &mut Vec<Event>) {
        if frame.payload_bytes() > 0 {
            events.push(Event::Head { peer, frame: frame.clone() });
            self.state = ShmReceiveState::AwaitingBuffers(frame);
        } else {
            events.push(Event::Received { peer, frame, body: ReceiveBuffers::new() });
            self.state = ShmReceiveState::Header;
        }
    }
}

/// A longer buffer for entry tables and control messages is not kept.
const REST_BYTES_KEPT: usize = 256 * 1024;

impl ShmPostedReceive {
    /// The buffers as they were posted, which are writable.
    fn into_buffers(mut self) -> ReceiveBuffers {
        for (place, own) in self.displaced {
            if let Incoming::Chunk { lease, .. } = &mut self.buffers[place] {
                *lease = own;
            }
        }
        self.buffers
    }

    /// Receives the next payload, if it is complete.
    fn step(&mut self, rings: &mut ShmRings, arenas: &PeerArenas) -> Result<ReceiveStep, ConnectionError> {
        self.entry = next_with_payload(&self.frame, self.entry);
        let bytes = self.frame.entries[self.entry].bytes;
        let moved = if bytes <= INLINE_BYTES_MAX {
            let length = bytes as usize;
            if rings.available(length)? < length {
                return Ok(ReceiveStep::Short);
            }
            match &mut self.buffers[self.place] {
                Incoming::Discard { .. } => {
                    rings.skip(length);
                    self.is_finite = false;
                }
                place => {
                    rings.read_into(place.bytes_mut());
                    let element_type = self.frame.entries[self.entry].element_type;
                    self.is_finite = self.is_finite && is_finite(element_type, place.bytes());
                }
            }
            length
        } else {
            if rings.available(REFERENCE_BYTES)? < REFERENCE_BYTES {
                return Ok(ReceiveStep::Short);
            }
            match self.take_referenced(rings, arenas)? {
                Some(moved) => moved,
                None => return Ok(ReceiveStep::MissingArena),
            }
        };
        let place = &self.buffers[self.place];
        // Shared memory needs no checksum; one that the sender wrote is compared.
        if self.frame.entries[self.entry].checksum != 0 && !matches!(place, Incoming::Discard { .. }) {
            self.frame.check_payload(self.entry, checksum(place.bytes()))?;
        }
        (self.entry, self.place) = (self.entry + 1, self.place + 1);
        Ok(ReceiveStep::Done(moved))
    }

    /// Replaces a buffer by a view of a referenced payload, or copies the payload; the bytes moved, or nothing when the
    /// arena is missing.
    fn take_referenced(&mut self, rings: &mut ShmRings, arenas: &PeerArenas) -> Result<Option<usize>, ConnectionError> {
        let reference = PayloadReference::peek(rings);
        let PayloadReference { arena, token, offset, is_finite } = reference;
        self.is_finite &= is_finite;
        let Some(peer_arena) = arenas.by_number.get(&arena) else { return Ok(None) };
        rings.skip(REFERENCE_BYTES);
        if token >= TOKENS {
            return Err(ConnectionError::Broken(format!("token {token}; expected one below {TOKENS}")));
        }
        let place = &mut self.buffers[self.place];
        let bytes = place.len();
        let outside = || {
            let length = peer_arena.memory.len();
            ConnectionError::Broken(format!("{bytes} bytes at {offset} of arena {arena}, which has {length}"))
        };
        let source = peer_arena.memory.bytes(offset, bytes).ok_or_else(outside)?;
        if let Incoming::Chunk { lease, .. } = place
            // Gradients and pulled values are only read. A payload that becomes a value is written later, so it is
            // copied.
            && matches!(self.frame.head.kind, Kind::Push | Kind::Value)
            && peer_arena.borrowed.may_hold(bytes, peer_arena.held_max)
        {
            let owner = Arc::clone(&peer_arena.borrowed);
            let view = Lease::view(&peer_arena.memory, offset, bytes, owner, token).ok_or_else(outside)?;
            peer_arena.borrowed.hold(bytes);
            self.displaced.push((self.place, std::mem::replace(lease, view)));
            if rings.signals().has_peer_ended() {
                return Err(ConnectionError::Cut);
            }
            return Ok(Some(REFERENCE_BYTES));
        }
        if !matches!(place, Incoming::Discard { .. }) {
            place.fill(source);
            if rings.signals().has_peer_ended() {
                return Err(ConnectionError::Cut);
            }
        }
        rings.signals().give_back(token);
        Ok(Some(bytes as usize))
    }
}

impl PayloadReference {
    /// The next reference in the ring.
    fn peek(rings: &mut ShmRings) -> Self {
        let mut bytes = [0; REFERENCE_BYTES];
        rings.peek(&mut bytes);
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let offset = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
        let (token, is_finite) = (number(4) & !FINITE, number(4) & FINITE != 0);
        Self { arena: number(0), token, offset, is_finite }
    }
}

//! Frames on their way in from one connection.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pserver_core::checksum::checksum;
use pserver_core::ids::PeerId;
use pserver_core::memory::Lease;
use pserver_core::memory::shared::ReadOnly;
use pserver_core::port::{Event, Incoming};
use pserver_core::wire::{Frame, HEADER_BYTES, Kind, Prefix};

use super::outward::REFERENCE_BYTES;
use super::rings::{Borrowed, Rings};
use super::{ARENAS_MAX, Ended, INLINE_BYTES_MAX, TOKENS};

/// What has arrived and what is expected next.
pub(super) struct Inward {
    state: State,
    /// Entries and control message, as far as they are there.
    rest: Vec<u8>,
    /// The other side's arenas, by number.
    arenas: Arenas,
    /// References of the other side that are used in place.
    held: Arc<AtomicU64>,
}

/// What the other side has handed over and not taken back.
#[derive(Default)]
struct Arenas {
    known: BTreeMap<u32, Foreign>,
    /// The number of the next one.
    next: u32,
}

enum State {
    Header,
    Rest(Prefix),
    /// The head was reported; its places have not come yet.
    Held(Frame),
    Payload(Landing),
}

/// A frame whose payload is on its way into its places.
struct Landing {
    frame: Frame,
    places: Vec<Incoming>,
    /// The entry and the place that come next.
    entry: usize,
    place: usize,
    /// The leases that views stand for, by place, until the whole frame is there.
    displaced: Vec<(usize, Lease)>,
}

struct Foreign {
    memory: Arc<ReadOnly>,
    borrowed: Arc<Borrowed>,
    /// How much of it may be held.
    held_max: u64,
}

/// Where a payload is, as the other side says.
#[derive(Clone, Copy)]
struct Reference {
    arena: u32,
    token: u32,
    offset: u64,
}

/// How far reading came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// A head waits for its places.
    Held,
    /// Until the other side writes.
    Empty,
    /// There is more, but others wait.
    Turn,
    /// An arena must come over the socket first.
    Arena,
}

/// What one step came to.
enum Step {
    Done(usize),
    Short,
    Arena,
}

impl Inward {
    pub(super) fn new() -> Self {
        Self { state: State::Header, rest: Vec::new(), arenas: Arenas::default(), held: Arc::default() }
    }

    /// Reads until nothing is there, a head waits for its places, or so much was moved or reported.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        rings: &mut Rings,
        (bytes_max, frames_max): (usize, usize),
        events: &mut Vec<Event>,
    ) -> Result<Read, Ended> {
        let (before, mut moved) = (events.len(), 0);
        let read = loop {
            if matches!(self.state, State::Held(_)) {
                break Read::Held;
            }
            if moved >= bytes_max || events.len() - before >= frames_max {
                break Read::Turn;
            }
            match self.advance(peer, rings, events)? {
                Step::Done(bytes) => moved += bytes,
                Step::Short => break Read::Empty,
                Step::Arena => break Read::Arena,
            }
        };
        rings.give_room();
        Ok(read)
    }

    /// The places for the frame whose head was reported.
    ///
    /// # Panics
    /// When no head waits, or the places do not fit: the session counts.
    pub(super) fn land(&mut self, places: Vec<Incoming>) {
        let State::Held(frame) = std::mem::replace(&mut self.state, State::Header) else {
            panic!("places were handed over, but no head waits for them");
        };
        let expected = frame.entries.iter().map(|entry| entry.bytes).filter(|bytes| *bytes > 0);
        assert!(expected.eq(places.iter().map(Incoming::len)), "land: one place for each entry with a payload");
        self.state = State::Payload(Landing { frame, places, entry: 0, place: 0, displaced: Vec::new() });
    }

    /// Gives back the places that were not filled.
    pub(super) fn take_unfilled(&mut self) -> Vec<Incoming> {
        match std::mem::replace(&mut self.state, State::Header) {
            State::Payload(landing) => landing.into_places(),
            _ => Vec::new(),
        }
    }

    /// Takes an arena of the other side in. Half of it may be held, so that whoever puts payloads into it can go on
    /// whatever we hold; and all of it where payloads are at home and nothing is put.
    pub(super) fn add_arena(&mut self, descriptor: &OwnedFd, is_home: bool, rings: &Rings) -> Result<(), Ended> {
        if self.arenas.known.len() == ARENAS_MAX {
            return Err(Ended::Broken(format!("more than {ARENAS_MAX} arenas on one connection")));
        }
        let memory = ReadOnly::open(descriptor).map_err(|failure| Ended::Broken(failure.to_string()))?;
        let borrowed = Arc::new(Borrowed::new(rings.shore(), &self.held));
        let held_max = if is_home { u64::MAX } else { memory.len() / 2 };
        self.arenas.known.insert(self.arenas.next, Foreign { memory: Arc::new(memory), borrowed, held_max });
        self.arenas.next += 1;
        Ok(())
    }

    /// Lets go of an arena of the other side; what is still read of it stays until it is not.
    pub(super) fn drop_arena(&mut self, number: u32) {
        self.arenas.known.remove(&number);
    }

    /// Why nothing more comes, when the other side has closed and everything it wrote was read.
    pub(super) fn end(&self, rings: &mut Rings) -> Ended {
        let between = matches!(self.state, State::Header) && rings.available(1).is_ok_and(|bytes| bytes == 0);
        if between { Ended::Closed } else { Ended::Cut }
    }

    fn advance(&mut self, peer: PeerId, rings: &mut Rings, events: &mut Vec<Event>) -> Result<Step, Ended> {
        match &mut self.state {
            State::Header => {
                if rings.available(HEADER_BYTES)? < HEADER_BYTES {
                    return Ok(Step::Short);
                }
                let mut header = [0; HEADER_BYTES];
                rings.take(&mut header);
                self.state = State::Rest(Prefix::decode(&header)?);
                Ok(Step::Done(HEADER_BYTES))
            }
            State::Rest(prefix) => {
                let wanted = prefix.rest_bytes() - self.rest.len();
                let step = rings.available(wanted)?.min(wanted);
                let begin = self.rest.len();
                self.rest.resize(begin + step, 0);
                rings.take(&mut self.rest[begin..]);
                if step < wanted {
                    return Ok(if step > 0 { Step::Done(step) } else { Step::Short });
                }
                let frame = prefix.finish(&self.rest)?;
                self.rest.clear();
                self.rest.shrink_to(REST_BYTES_KEPT);
                self.report(peer, frame, events);
                Ok(Step::Done(step))
            }
            State::Held(_) => Ok(Step::Short),
            State::Payload(landing) => {
                let step = landing.step(rings, &self.arenas)?;
                if landing.place == landing.places.len()
                    && let State::Payload(landing) = std::mem::replace(&mut self.state, State::Header)
                {
                    events.push(Event::Landed { peer, frame: landing.frame, body: landing.places });
                }
                Ok(step)
            }
        }
    }

    fn report(&mut self, peer: PeerId, frame: Frame, events: &mut Vec<Event>) {
        if frame.payload_bytes() > 0 {
            events.push(Event::Head { peer, frame: frame.clone() });
            self.state = State::Held(frame);
        } else {
            events.push(Event::Landed { peer, frame, body: Vec::new() });
            self.state = State::Header;
        }
    }
}

/// A buffer for long entry tables and control messages is kept up to this size.
const REST_BYTES_KEPT: usize = 256 * 1024;

impl Landing {
    /// The places as they were handed over, which can be written.
    fn into_places(mut self) -> Vec<Incoming> {
        for (place, own) in self.displaced {
            if let Incoming::Chunk { lease, .. } = &mut self.places[place] {
                *lease = own;
            }
        }
        self.places
    }

    /// The next payload, once all of it is there.
    fn step(&mut self, rings: &mut Rings, arenas: &Arenas) -> Result<Step, Ended> {
        while self.frame.entries[self.entry].bytes == 0 {
            self.entry += 1;
        }
        let bytes = self.frame.entries[self.entry].bytes;
        let moved = if bytes <= INLINE_BYTES_MAX {
            let length = bytes as usize;
            if rings.available(length)? < length {
                return Ok(Step::Short);
            }
            match &mut self.places[self.place] {
                Incoming::Discard { .. } => rings.skip(length),
                place => rings.take(place.bytes_mut()),
            }
            length
        } else {
            if rings.available(REFERENCE_BYTES)? < REFERENCE_BYTES {
                return Ok(Step::Short);
            }
            match self.fetch(rings, arenas)? {
                Some(moved) => moved,
                None => return Ok(Step::Arena),
            }
        };
        let place = &self.places[self.place];
        // Memory of one machine needs no checksum; one that was sent is compared.
        if self.frame.entries[self.entry].checksum != 0 && !matches!(place, Incoming::Discard { .. }) {
            self.frame.check_payload(self.entry, checksum(place.bytes()))?;
        }
        (self.entry, self.place) = (self.entry + 1, self.place + 1);
        Ok(Step::Done(moved))
    }

    /// Uses a referenced payload in place, or copies it; the bytes moved, or nothing when its arena is not here yet.
    fn fetch(&mut self, rings: &mut Rings, arenas: &Arenas) -> Result<Option<usize>, Ended> {
        let reference = Reference::peek(rings);
        let Reference { arena, token, offset } = reference;
        let Some(foreign) = arenas.known.get(&arena) else { return Ok(None) };
        rings.skip(REFERENCE_BYTES);
        if token >= TOKENS {
            return Err(Ended::Broken(format!("token {token} of {TOKENS}")));
        }
        let place = &mut self.places[self.place];
        let bytes = place.len();
        let outside = || {
            let length = foreign.memory.len();
            Ended::Broken(format!("{bytes} bytes at {offset} of arena {arena}, which has {length}"))
        };
        let source = foreign.memory.bytes(offset, bytes).ok_or_else(outside)?;
        if let Incoming::Chunk { lease, .. } = place
            // A gradient is read and forgotten, and so is a value. What becomes a value is written, so it is copied.
            && matches!(self.frame.head.kind, Kind::Push | Kind::Value)
            && foreign.borrowed.may_hold(bytes, foreign.held_max)
        {
            let owner = Arc::clone(&foreign.borrowed);
            let view = Lease::view(&foreign.memory, offset, bytes, owner, token).ok_or_else(outside)?;
            foreign.borrowed.hold(bytes);
            self.displaced.push((self.place, std::mem::replace(lease, view)));
            if rings.shore().is_over_there() {
                return Err(Ended::Cut);
            }
            return Ok(Some(REFERENCE_BYTES));
        }
        if !matches!(place, Incoming::Discard { .. }) {
            place.bytes_mut().copy_from_slice(source);
            if rings.shore().is_over_there() {
                return Err(Ended::Cut);
            }
        }
        rings.shore().give_back(token);
        Ok(Some(bytes as usize))
    }
}

impl Reference {
    /// The reference that stands next in the ring.
    fn peek(rings: &mut Rings) -> Self {
        let mut bytes = [0; REFERENCE_BYTES];
        rings.look(&mut bytes);
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let offset = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
        Self { arena: number(0), token: number(4), offset }
    }
}

//! Frames on their way in to one connection.
//!
//! The accepting side reads long payloads from where the other side says that they are. The connecting side says where
//! they go, and the other side writes them. While long payloads of a frame are on their way, the next one is read: a
//! landing is left behind when nothing more of it comes in messages, and everything has been asked for. Several land at
//! once, and are reported in the order in which they began.

use std::collections::VecDeque;
use std::sync::Arc;

use pserver_core::checksum::checksum;
use pserver_core::ids::PeerId;
use pserver_core::limits::LANDINGS_MAX;
use pserver_core::memory::Lease;
use pserver_core::port::{Event, Incoming};
use pserver_core::wire::{Flags, Frame, HEADER_BYTES, Prefix, WireError};

use super::flights::Spot;
use super::letters::{Matter, PLACE_BYTES, PREFIX_BYTES, Place};
use super::mail::Mail;
use super::provider::{Act, FarPlace};
use super::registry::Counters;
use super::staging::Staging;
use super::{Ended, INLINE_BYTES_MAX, MESSAGES, SLOT_BYTES, Side};

/// A buffer for long entry tables and control messages is kept up to this size.
const REST_BYTES_KEPT: usize = 256 * 1024;
/// Places that one note holds.
const PLACES_PER_NOTE: usize = (SLOT_BYTES as usize - PREFIX_BYTES) / PLACE_BYTES;

/// What has arrived and what is expected next.
pub(super) struct Inward {
    side: Side,
    insists: bool,
    state: State,
    /// Entries and control message, as far as they are there.
    rest: Vec<u8>,
    /// Frames whose places are there, in the order of their heads, and the number of the first.
    landings: VecDeque<Landing>,
    first: u64,
    /// The number that the other side's next writes end with.
    number: u32,
    staging: Staging,
    counters: Arc<Counters>,
    /// Places on their way into a message, and lists of frames that have landed: kept for their memory.
    note: Vec<u8>,
    spare: Vec<Vec<(usize, Lease)>>,
}

enum State {
    Header,
    Rest(Prefix),
    /// A frame without payload, which waits for those before it.
    Bare(Frame),
    /// The head was reported; its places have not come yet.
    Held(Frame),
    /// More of the last landing comes in messages, or the other side was not told all of its places.
    Payload,
}

/// A frame whose payload is on its way into its places.
struct Landing {
    number: u64,
    frame: Frame,
    places: Vec<Incoming>,
    /// The entry and the place that come next.
    entry: usize,
    place: usize,
    /// Bytes of that place that are there.
    filled: usize,
    /// Long payloads that are not there yet.
    missing: usize,
    /// How many there are in all.
    long: usize,
    /// The connecting side's copies, by place, and places that the other side was not told of yet: of these, how many
    /// it was.
    staged: Vec<(usize, Lease)>,
    granted: usize,
}

/// How far reading came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// A head waits for its places, and frames before it perhaps for the device.
    Held,
    /// Until the other side, or the device, says something.
    Empty,
    /// There is more, but others wait.
    Turn,
}

impl Inward {
    pub(super) fn new(side: Side, insists: bool, staging: Staging, counters: &Arc<Counters>) -> Self {
        Self {
            side,
            insists,
            state: State::Header,
            rest: Vec::new(),
            landings: VecDeque::with_capacity(LANDINGS_MAX),
            first: 0,
            number: 0,
            staging,
            counters: Arc::clone(counters),
            note: Vec::with_capacity(PLACES_PER_NOTE * PLACE_BYTES),
            spare: Vec::with_capacity(LANDINGS_MAX),
        }
    }

    /// Reads until nothing is there, a head waits for its places, or so much was moved or reported.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        mail: &mut Mail,
        (bytes_max, frames_max): (usize, usize),
        events: &mut Vec<Event>,
    ) -> Result<Read, Ended> {
        let (before, mut moved) = (events.len(), 0);
        loop {
            if moved >= bytes_max || events.len() - before >= frames_max {
                return Ok(Read::Turn);
            }
            if self.finish_first(peer, mail, events)? {
                continue;
            }
            match self.advance(peer, mail, events)? {
                Some(bytes) => moved += bytes,
                None if matches!(self.state, State::Held(_)) => return Ok(Read::Held),
                None => return Ok(Read::Empty),
            }
        }
    }

    /// The places for the frame whose head was reported.
    ///
    /// # Panics
    /// When no head waits, or the places do not fit: the session counts.
    pub(super) fn land(&mut self, places: Vec<Incoming>) {
        let State::Held(frame) = std::mem::replace(&mut self.state, State::Payload) else {
            panic!("places were handed over, but no head waits for them");
        };
        let expected = frame.entries.iter().map(|entry| entry.bytes).filter(|bytes| *bytes > 0);
        assert!(expected.eq(places.iter().map(Incoming::len)), "land: one place for each entry with a payload");
        let long = places.iter().filter(|place| place.len() > INLINE_BYTES_MAX).count();
        self.landings.push_back(Landing {
            number: self.first + self.landings.len() as u64,
            frame,
            places,
            entry: 0,
            place: 0,
            filled: 0,
            missing: long,
            long,
            staged: self.spare.pop().unwrap_or_default(),
            granted: 0,
        });
    }

    /// Gives back the places that were not filled. The pair is closed, and what it had is back.
    pub(super) fn take_unfilled(&mut self) -> Vec<Incoming> {
        self.landings.drain(..).flat_map(|landing| landing.places).collect()
    }

    /// Deregisters what the other side was told of; whether it cannot write it any more.
    pub(super) fn end_memory(&self) -> bool {
        self.staging.registry().end()
    }

    /// Whether nothing is expected to come.
    pub(super) fn is_between(&self, mail: &Mail) -> bool {
        matches!(self.state, State::Header) && self.landings.is_empty() && mail.available() == 0
    }

    /// A place that was being filled is back; whether it is filled.
    pub(super) fn back(&mut self, spot: Spot, mut place: Incoming, staged: Option<Lease>, is_filled: bool) {
        let behind = usize::try_from(spot.landing - self.first).expect("few land at once");
        let landing = self.landings.get_mut(behind).expect("a frame whose payload is being read has not landed");
        if is_filled {
            landing.missing -= 1;
            if let Some(lease) = staged {
                self.counters.copied(lease.bytes().len());
                place.bytes_mut().copy_from_slice(lease.bytes());
            }
        }
        landing.places[spot.place] = place;
    }

    /// The other side has written everything that it was asked to, as it says with this number.
    pub(super) fn written(&mut self, number: u32) -> Result<(), Ended> {
        let expected = self.number;
        let mut waiting = self.landings.iter_mut().filter(|landing| landing.missing > 0);
        let asked = waiting.next().filter(|landing| number == expected && landing.granted == landing.long);
        let Some(landing) = asked else {
            let text = format!("payloads were written as number {number}, expected {expected} once places are there");
            return Err(Ended::Broken(text));
        };
        self.number = self.number.wrapping_add(1);
        landing.missing = 0;
        for (index, lease) in landing.staged.drain(..) {
            self.counters.copied(lease.bytes().len());
            landing.places[index].bytes_mut().copy_from_slice(lease.bytes());
        }
        Ok(())
    }

    /// One step; the bytes moved, or nothing when something must come first.
    fn advance(&mut self, peer: PeerId, mail: &mut Mail, events: &mut Vec<Event>) -> Result<Option<usize>, Ended> {
        match &mut self.state {
            State::Header => {
                if mail.available() < HEADER_BYTES || self.landings.len() == LANDINGS_MAX {
                    return Ok(None);
                }
                let mut header = [0; HEADER_BYTES];
                mail.take(&mut header);
                let prefix = Prefix::decode(&header)?;
                if self.insists && prefix.head().flags.contains(Flags::UNCHECKED) {
                    return Err(WireError::Unchecked.into());
                }
                self.state = State::Rest(prefix);
                Ok(Some(HEADER_BYTES))
            }
            State::Rest(prefix) => {
                let wanted = prefix.rest_bytes() - self.rest.len();
                let step = mail.available().min(wanted);
                let begin = self.rest.len();
                self.rest.resize(begin + step, 0);
                mail.take(&mut self.rest[begin..]);
                if step < wanted {
                    return Ok((step > 0).then_some(step));
                }
                let frame = prefix.finish(&self.rest)?;
                self.rest.clear();
                self.rest.shrink_to(REST_BYTES_KEPT);
                self.report(peer, frame, events);
                Ok(Some(step))
            }
            State::Bare(_) if !self.landings.is_empty() => Ok(None),
            State::Bare(_) => {
                if let State::Bare(frame) = std::mem::replace(&mut self.state, State::Header) {
                    events.push(Event::Landed { peer, frame, body: Vec::new() });
                }
                Ok(Some(0))
            }
            State::Held(_) => Ok(None),
            State::Payload => {
                let landing = self.landings.back_mut().expect("its places are there");
                if landing.place < landing.places.len() {
                    return landing.step(self.side, mail, &mut self.staging, &self.counters);
                }
                // The other side has offered a frame once all of it that travels in messages has left.
                if self.side == Side::Connecting && landing.granted < landing.long {
                    landing.grant(mail, &mut self.staging, &mut self.note)?;
                    if landing.granted < landing.long {
                        return Ok(None);
                    }
                }
                self.state = State::Header;
                Ok(Some(0))
            }
        }
    }

    /// Reports the first landing, if all of it is there; whether it was.
    fn finish_first(&mut self, peer: PeerId, mail: &mut Mail, events: &mut Vec<Event>) -> Result<bool, Ended> {
        let is_read = |behind: usize| behind > 0 || !matches!(self.state, State::Payload);
        match self.landings.front() {
            Some(first) if first.missing == 0 && is_read(self.landings.len() - 1) => first.check()?,
            _ => return Ok(false),
        }
        let landed = self.landings.pop_front().expect("it was just looked at");
        let Landing { frame, places: body, long, staged, .. } = landed;
        self.first += 1;
        self.spare.push(staged);
        if self.side == Side::Accepting && long > 0 {
            mail.owe_taken();
        }
        events.push(Event::Landed { peer, frame, body });
        Ok(true)
    }

    fn report(&mut self, peer: PeerId, frame: Frame, events: &mut Vec<Event>) {
        self.state = if frame.payload_bytes() > 0 {
            events.push(Event::Head { peer, frame: frame.clone() });
            State::Held(frame)
        } else {
            State::Bare(frame)
        };
    }
}

impl Landing {
    /// The next payload, or as much of it as is there.
    fn step(
        &mut self,
        side: Side,
        mail: &mut Mail,
        staging: &mut Staging,
        counters: &Counters,
    ) -> Result<Option<usize>, Ended> {
        while self.frame.entries[self.entry].bytes == 0 {
            self.entry += 1;
        }
        let bytes = self.frame.entries[self.entry].bytes;
        let moved = if bytes <= INLINE_BYTES_MAX {
            let step = mail.available().min(bytes as usize - self.filled);
            match &mut self.places[self.place] {
                Incoming::Discard { .. } => mail.skip(step),
                place => mail.take(&mut place.bytes_mut()[self.filled..self.filled + step]),
            }
            counters.copied(step);
            self.filled += step;
            if self.filled < bytes as usize {
                return Ok((step > 0).then_some(step));
            }
            step
        } else if side == Side::Accepting {
            match self.fetch(bytes, mail, staging, counters)? {
                Some(moved) => moved,
                None => return Ok(None),
            }
        } else {
            0
        };
        (self.entry, self.place, self.filled) = (self.entry + 1, self.place + 1, 0);
        Ok(Some(moved))
    }

    /// Begins to read a long payload; its length, or nothing when it cannot begin yet.
    fn fetch(
        &mut self,
        bytes: u32,
        mail: &mut Mail,
        staging: &mut Staging,
        counters: &Counters,
    ) -> Result<Option<usize>, Ended> {
        if mail.available() < PLACE_BYTES || mail.flights.room() <= MESSAGES as usize {
            return Ok(None);
        }
        let place = &self.places[self.place];
        let (key, staged) = match place {
            Incoming::Discard { .. } => (None, None),
            Incoming::Chunk { lease, .. } => (staging.registry().key_of(lease)?, None),
            Incoming::Loan(_) => {
                let Some(lease) = staging.take(bytes)? else { return Ok(None) };
                (Some(staging.registry().own_key_of(&lease)?), Some(lease))
            }
        };
        let mut there = [0; PLACE_BYTES];
        mail.take(&mut there);
        let there = Place::decode(&there);
        if there.bytes != bytes {
            return Err(Ended::Broken(format!("a payload of {bytes} bytes is said to be {} bytes long", there.bytes)));
        }
        let Some(key) = key else {
            // It is forgotten, and need not be read for that.
            assert!(matches!(place, Incoming::Discard { .. }), "nothing lands in another process's memory");
            self.missing -= 1;
            return Ok(Some(0));
        };
        let place = std::mem::replace(&mut self.places[self.place], Incoming::Discard { bytes });
        let spot = Spot { landing: self.number, place: self.place };
        mail.flights.read(Act::Read(there.far), spot, place, staged, key);
        counters.moved(bytes as usize);
        Ok(Some(bytes as usize))
    }

    /// Says where long payloads go, as far as there is room for saying it.
    fn grant(&mut self, mail: &mut Mail, staging: &mut Staging, note: &mut Vec<u8>) -> Result<(), Ended> {
        note.clear();
        let staged = self.staged.len();
        let long = self.places.iter_mut().enumerate().filter(|(_, place)| place.len() > INLINE_BYTES_MAX);
        for (index, place) in long.skip(self.granted).take(PLACES_PER_NOTE) {
            let bytes = place.len();
            if matches!(place, Incoming::Discard { .. }) {
                note.extend(Place::NOWHERE.encode());
                continue;
            }
            let (address, key) = match in_place(place, staging)? {
                Some(key) => (place.bytes_mut().as_mut_ptr().expose_provenance(), key),
                None => {
                    let Some(mut lease) = staging.take(bytes)? else { break };
                    let key = staging.registry().far_key_of(&lease)?;
                    let address = lease.bytes_mut().as_mut_ptr().expose_provenance();
                    self.staged.push((index, lease));
                    (address, key)
                }
            };
            note.extend(Place { far: FarPlace { address: address as u64, key }, bytes }.encode());
        }
        if !note.is_empty() && mail.note(Matter::Grant, note) {
            self.granted += note.len() / PLACE_BYTES;
        } else {
            self.staged.truncate(staged);
        }
        Ok(())
    }

    /// Compares the payloads with their checksums, where they have some.
    fn check(&self) -> Result<(), WireError> {
        if self.frame.head.flags.contains(Flags::UNCHECKED) {
            return Ok(());
        }
        let entries = (0..).zip(&self.frame.entries).filter(|(_, entry)| entry.bytes > 0);
        for ((entry, _), place) in entries.zip(&self.places) {
            if !matches!(place, Incoming::Discard { .. }) {
                self.frame.check_payload(entry, checksum(place.bytes()))?;
            }
        }
        Ok(())
    }
}

/// The other side's key for a place that it can write itself; nothing when there must be a copy.
fn in_place(place: &Incoming, staging: &Staging) -> Result<Option<u32>, Ended> {
    let Incoming::Loan(loan) = place else { return Ok(None) };
    let Some((memory, offset)) = loan.mapped() else { return Ok(None) };
    Ok(staging.registry().far_key_within(memory, offset)?)
}

//! Payloads and the entries they belong to.

use pserver_core::checksum::append;
use pserver_core::ids::PeerId;
use pserver_core::memory::{Stretch, StretchMut};
use pserver_core::port::{Event, Incoming, Outgoing, Submit};
use pserver_core::wire::{Entry, Flags, Frame, WireError};

/// A frame whose payload is on its way into its places.
pub(crate) struct Landing {
    frame: Frame,
    places: Vec<Incoming>,
    /// The entry of the place that is being filled.
    entry: usize,
    /// The place that is being filled.
    place: usize,
    /// Bytes of it that are there.
    filled: usize,
    /// Their checksum, where payloads are checked.
    sum: u32,
    remaining: u64,
}

impl Landing {
    /// The payload of `frame` goes into `places`.
    ///
    /// # Panics
    /// When there is not one place of the right length for each entry with a payload: the session counts.
    pub(crate) fn new(frame: Frame, places: Vec<Incoming>) -> Self {
        assert_lengths(&frame, places.iter().map(Incoming::len), "land");
        let remaining = frame.payload_bytes();
        Self { frame, places, entry: 0, place: 0, filled: 0, sum: 0, remaining }
    }

    /// Payload bytes that are not there yet.
    pub(crate) fn remaining(&self) -> u64 {
        self.remaining
    }

    /// The memory to fill next, in order: up to the end, `slices_max` slices, or a payload that is discarded. Places
    /// that lie side by side are one slice: the system takes as long over a slice as over some hundred bytes.
    pub(crate) fn unfilled(&mut self, slices_max: usize) -> impl Iterator<Item = &mut [u8]> {
        let (mut filled, mut rest) = (self.filled, &mut self.places[self.place..]);
        let slices = std::iter::from_fn(move || {
            let count = side_by_side(rest);
            let (run, behind) = std::mem::take(&mut rest).split_at_mut(count);
            rest = behind;
            joined(run).map(|all| &mut all[std::mem::take(&mut filled)..])
        });
        slices.take(slices_max)
    }

    /// Copies from the front of `bytes` what still belongs to the payload; returns how much that was.
    ///
    /// # Errors
    /// A payload's checksum that does not hold.
    pub(crate) fn copy(&mut self, bytes: &[u8]) -> Result<usize, WireError> {
        let mut taken = 0;
        while taken < bytes.len() && self.remaining > 0 {
            let place = &mut self.places[self.place];
            let step = (place.len() as usize - self.filled).min(bytes.len() - taken);
            if !matches!(place, Incoming::Discard { .. }) {
                place.bytes_mut()[self.filled..self.filled + step].copy_from_slice(&bytes[taken..taken + step]);
            }
            self.fill(step)?;
            taken += step;
        }
        Ok(taken)
    }

    /// The next `bytes` of the payload are in their places, or were discarded.
    ///
    /// # Errors
    /// A payload's checksum that does not hold.
    pub(crate) fn fill(&mut self, mut bytes: usize) -> Result<(), WireError> {
        self.remaining -= bytes as u64;
        while bytes > 0 {
            let place = &self.places[self.place];
            let room = place.len() as usize - self.filled;
            let step = room.min(bytes);
            if self.is_checked() {
                // What has just arrived is still in cache.
                self.sum = append(self.sum, &place.bytes()[self.filled..self.filled + step]);
            }
            self.filled += step;
            bytes -= step;
            if step == room {
                self.finish_place()?;
            }
        }
        Ok(())
    }

    /// The frame and its places.
    pub(crate) fn into_parts(self) -> (Frame, Vec<Incoming>) {
        (self.frame, self.places)
    }

    /// Whether the payload of the current place is compared with its checksum.
    fn is_checked(&self) -> bool {
        let is_kept = !matches!(self.places[self.place], Incoming::Discard { .. });
        is_kept && !self.frame.head.flags.contains(Flags::UNCHECKED)
    }

    /// Checks the place that was filled, and goes on to the next.
    fn finish_place(&mut self) -> Result<(), WireError> {
        while self.frame.entries[self.entry].bytes == 0 {
            self.entry += 1;
        }
        if self.is_checked() {
            self.frame.check_payload(self.entry, self.sum)?;
        }
        self.entry += 1;
        self.place += 1;
        (self.filled, self.sum) = (0, 0);
        Ok(())
    }
}

/// How many places, from the first on, are one slice of memory: none when the first is nowhere or not there.
fn side_by_side(places: &[Incoming]) -> usize {
    let mut stretch = match places.first() {
        None | Some(Incoming::Discard { .. }) => return 0,
        Some(Incoming::Loan(_)) => return 1,
        Some(Incoming::Chunk { lease, bytes }) => Stretch::of(lease, *bytes),
    };
    let Some(stretch) = &mut stretch else { return 1 };
    let mut count = 1;
    for place in &places[1..] {
        match place {
            Incoming::Chunk { lease, bytes } if stretch.goes_on(lease, *bytes) => count += 1,
            _ => break,
        }
    }
    count
}

/// The memory of places that are one slice of it.
fn joined(places: &mut [Incoming]) -> Option<&mut [u8]> {
    let (first, others) = places.split_first_mut()?;
    if others.is_empty() {
        return Some(first.bytes_mut());
    }
    let Incoming::Chunk { lease, bytes } = first else { panic!("only leases lie side by side") };
    let mut stretch = StretchMut::of(lease, *bytes)?;
    for place in others {
        let Incoming::Chunk { lease, bytes } = place else { panic!("only leases lie side by side") };
        stretch.go_on(lease, *bytes);
    }
    Some(stretch.into_bytes())
}

/// Stops when `body` is not what the entries of `frame` say: the session counts.
pub(crate) fn assert_body(frame: &Frame, body: &[Outgoing]) {
    assert_lengths(frame, body.iter().map(Outgoing::len), "send");
}

/// Writes the checksums of the payloads into their entries, but for those that are there already.
pub(crate) fn seal(frame: &mut Frame, body: &[Outgoing]) {
    let entries = frame.entries.iter_mut().filter(|entry| entry.bytes > 0);
    for (entry, parcel) in entries.zip(body).filter(|(entry, _)| entry.checksum == 0) {
        entry.checksum = parcel.checksum();
    }
}

/// The end of a connection that holds no parcels.
pub(crate) fn gone(peer: PeerId, reason: String) -> Event {
    Event::Gone { peer, reason, unsent: Vec::new(), unfilled: Vec::new() }
}

/// The parcels of work for a connection that is over.
pub(crate) fn returned(work: Submit) -> Event {
    let (peer, unsent, unfilled) = match work {
        Submit::Send { peer, ticket, body, .. } => (peer, vec![(ticket, body)], Vec::new()),
        Submit::Land { peer, into } => (peer, Vec::new(), into),
    };
    Event::Gone { peer, reason: "the connection is over".to_owned(), unsent, unfilled }
}

fn assert_lengths(frame: &Frame, found: impl Iterator<Item = u32>, what: &str) {
    let expected = frame.entries.iter().map(|entry: &Entry| entry.bytes).filter(|bytes| *bytes > 0);
    assert!(expected.eq(found), "{what}: one parcel of its length for each entry with a payload");
}

#[cfg(test)]
mod tests {
    use pserver_core::dtype::ElementType;
    use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round};
    use pserver_core::memory::{Arena, Budget, Lease};
    use pserver_core::wire::{Head, Kind};

    use super::*;

    /// Places of these lengths in the slots of 64 bytes that are named, `-` for nowhere; the lengths of the slices that
    /// are filled when `filled` bytes are there already.
    fn check(places: &str, filled: usize, slices_max: usize, expected: &[usize]) {
        let mut budget = Budget::new();
        budget.line("test", 64, 8);
        let mut slots: Vec<Option<Lease>> = Vec::new();
        let arena = Arena::new(&budget).expect("it is small");
        arena.take_many(64, 8, &mut |lease| slots.push(Some(lease))).expect("there are eight");
        let place = |text: &str| match text.split_once(':').expect("a slot and a length") {
            ("-", bytes) => Incoming::Discard { bytes: bytes.parse().expect("a length") },
            (slot, bytes) => {
                let slot: usize = slot.parse().expect("a slot");
                let lease = slots[slot].take().expect("it is named once");
                Incoming::Chunk { lease, bytes: bytes.parse().expect("a length") }
            }
        };
        let places: Vec<Incoming> = places.split(' ').map(place).collect();
        let head = Head { flags: Flags::default().with(Flags::UNCHECKED), ..Head::new(Kind::Push) };
        let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
        let entry = |place: &Incoming| Entry { bytes: place.len(), ..Entry::bare(id, Round(0), ElementType::Float32) };
        let frame = Frame { entries: places.iter().map(entry).collect(), ..Frame::bare(head) };
        let mut landing = Landing::new(frame, places);
        landing.fill(filled).expect("nothing is checked");
        let (mut found, mut byte) = (Vec::new(), 0);
        for slice in landing.unfilled(slices_max) {
            found.push(slice.len());
            slice.iter_mut().for_each(|at| (*at, byte) = (byte, byte + 1));
        }
        assert_eq!(found, expected);
        let (_, places) = landing.into_parts();
        let here = places.iter().take_while(|place| !matches!(place, Incoming::Discard { .. }));
        let bytes: Vec<u8> = here.flat_map(|place| place.bytes().to_vec()).skip(filled).collect();
        let count = usize::from(byte);
        assert!(bytes[..count].iter().copied().eq(0..byte), "each byte is in its place: {bytes:?}");
        assert!(bytes[count..].iter().all(|rest| *rest == 0), "and nowhere else");
    }

    #[test]
    fn places_that_lie_side_by_side_are_filled_as_one() {
        check("0:64 1:64 2:64", 0, 9, &[192]);
        check("0:64 1:64 2:64", 70, 9, &[122]);
        check("0:64 1:32 2:64 3:8", 0, 9, &[96, 72]);
        check("0:64 1:32 2:64 3:8", 64, 9, &[32, 72]);
        check("1:64 0:64 2:64", 0, 9, &[64, 64, 64]);
        check("1:64 0:64 2:64", 10, 2, &[54, 64]);
        check("0:64 1:64 -:64 2:64", 0, 9, &[128]);
        check("-:64 0:64", 0, 9, &[]);
    }
}

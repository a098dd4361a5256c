//! Payloads and the entries they belong to.

use pserver_core::checksum::append;
use pserver_core::ids::PeerId;
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

    /// The memory to fill next, in order: up to the end, `slices_max` places, or a payload that is discarded.
    pub(crate) fn unfilled(&mut self, slices_max: usize) -> impl Iterator<Item = &mut [u8]> {
        let first = self.filled;
        self.places[self.place..]
            .iter_mut()
            .take(slices_max)
            .take_while(|place| !matches!(place, Incoming::Discard { .. }))
            .enumerate()
            .map(move |(index, place)| &mut place.bytes_mut()[if index == 0 { first } else { 0 }..])
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

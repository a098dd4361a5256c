//! Payloads of frames and their entries.

use pserver_core::checksum::append;
use pserver_core::ids::PeerId;
use pserver_core::memory::{Stretch, StretchMut};
use pserver_core::optim::is_finite;
use pserver_core::port::{Event, Incoming, Outgoing, ReceiveBuffers};
use pserver_core::wire::{Entry, Flags, Frame, Kind, WireError};

/// The bytes of the longest element.
const ELEMENT_BYTES_MAX: usize = 8;

/// A frame with posted receive buffers.
pub(crate) struct PostedReceive {
    frame: Frame,
    buffers: ReceiveBuffers,
    /// The entry of the current buffer.
    entry: usize,
    /// The buffer that is being filled.
    buffer_index: usize,
    /// Bytes in the current buffer.
    filled: usize,
    /// Their checksum, where payloads are checked.
    sum: u32,
    /// Bytes that were checked for non-finite elements.
    checked: usize,
    /// Whether all checked elements are finite; false where nothing is checked.
    is_finite: bool,
    remaining: u64,
}

impl PostedReceive {
    /// The receive of `frame` into `buffers`.
    ///
    /// # Panics
    /// Unless there is one buffer of the right length for each entry with a payload: the session counts them.
    pub(crate) fn new(frame: Frame, buffers: ReceiveBuffers) -> Self {
        assert_lengths(&frame, buffers.iter().map(Incoming::len), "land");
        let remaining = frame.payload_bytes();
        let is_finite = frame.head.kind == Kind::Push;
        Self { frame, buffers, entry: 0, buffer_index: 0, filled: 0, sum: 0, checked: 0, is_finite, remaining }
    }

    /// Payload bytes that have not arrived.
    pub(crate) fn remaining(&self) -> u64 {
        self.remaining
    }

    /// The memory to fill next, in order: to the end, to `slices_max` slices, or to a discarded payload. Adjacent
    /// buffers form one slice: a slice costs the system as much as copying some hundred bytes.
    pub(crate) fn unfilled(&mut self, slices_max: usize) -> impl Iterator<Item = &mut [u8]> {
        let (mut filled, mut rest) = (self.filled, &mut self.buffers[self.buffer_index..]);
        let slices = std::iter::from_fn(move || {
            let count = adjacent(rest);
            let (run, behind) = std::mem::take(&mut rest).split_at_mut(count);
            rest = behind;
            joined(run).map(|all| &mut all[std::mem::take(&mut filled)..])
        });
        slices.take(slices_max)
    }

    /// Copies the part of `bytes` that belongs to the payload; its length.
    ///
    /// # Errors
    /// A wrong checksum.
    pub(crate) fn copy(&mut self, bytes: &[u8]) -> Result<usize, WireError> {
        let mut taken = 0;
        while taken < bytes.len() && self.remaining > 0 {
            let buffer = &mut self.buffers[self.buffer_index];
            let step = (buffer.len() as usize - self.filled).min(bytes.len() - taken);
            if !matches!(buffer, Incoming::Discard { .. }) {
                buffer.bytes_mut()[self.filled..self.filled + step].copy_from_slice(&bytes[taken..taken + step]);
            }
            self.fill(step)?;
            taken += step;
        }
        Ok(taken)
    }

    /// Accounts for the next `bytes` of the payload, which were written to the buffers or discarded.
    ///
    /// # Errors
    /// A wrong checksum.
    pub(crate) fn fill(&mut self, mut bytes: usize) -> Result<(), WireError> {
        self.remaining -= bytes as u64;
        while bytes > 0 {
            let buffer = &self.buffers[self.buffer_index];
            let room = buffer.len() as usize - self.filled;
            let step = room.min(bytes);
            if self.is_checked() {
                // The bytes have just arrived, so they are in cache.
                self.sum = append(self.sum, &buffer.bytes()[self.filled..self.filled + step]);
            }
            self.filled += step;
            self.check_finite();
            bytes -= step;
            if step == room {
                self.finish_buffer()?;
            }
        }
        Ok(())
    }

    /// The frame and its buffers. A flag of the frame tells whether its gradients are finite.
    pub(crate) fn into_parts(mut self) -> (Frame, ReceiveBuffers) {
        if self.is_finite {
            self.frame.head.flags = self.frame.head.flags.with(Flags::FINITE);
        }
        (self.frame, self.buffers)
    }

    /// Checks the whole elements that have just arrived, while they are in cache.
    fn check_finite(&mut self) {
        if !self.is_finite {
            return;
        }
        self.skip_empty_entries();
        let buffer = &self.buffers[self.buffer_index];
        let is_whole = self.filled == buffer.len() as usize;
        let until = if is_whole { self.filled } else { self.filled - self.filled % ELEMENT_BYTES_MAX };
        let element_type = self.frame.entries[self.entry].element_type;
        let is_kept = !matches!(buffer, Incoming::Discard { .. });
        self.is_finite = is_kept && is_finite(element_type, &buffer.bytes()[self.checked..until]);
        self.checked = until;
    }

    /// Advances to the entry of the current buffer.
    fn skip_empty_entries(&mut self) {
        self.entry = next_with_payload(&self.frame, self.entry);
    }

    /// Whether the current payload is compared with its checksum.
    fn is_checked(&self) -> bool {
        let is_kept = !matches!(self.buffers[self.buffer_index], Incoming::Discard { .. });
        is_kept && !self.frame.head.flags.contains(Flags::UNCHECKED)
    }

    /// Checks the filled buffer, and advances to the next.
    fn finish_buffer(&mut self) -> Result<(), WireError> {
        self.skip_empty_entries();
        if self.is_checked() {
            self.frame.check_payload(self.entry, self.sum)?;
        }
        self.entry += 1;
        self.buffer_index += 1;
        (self.filled, self.sum, self.checked) = (0, 0, 0);
        Ok(())
    }
}

/// The first entry with a payload, from `entry` on. There is one for every buffer.
pub(crate) fn next_with_payload(frame: &Frame, mut entry: usize) -> usize {
    while frame.entries[entry].bytes == 0 {
        entry += 1;
    }
    entry
}

/// Bytes that a queued frame holds: its payloads, even if shared with other frames, its entries and its control
/// message.
pub(crate) fn held_bytes(frame: &Frame, body: &[Outgoing]) -> u64 {
    let payloads = body.iter().map(|parcel| u64::from(parcel.len())).sum::<u64>();
    let entries = size_of_val(frame.entries.as_slice()) + frame.control.len();
    payloads + u64::try_from(entries).unwrap_or(u64::MAX)
}

/// The number of leading buffers that are one slice of memory; zero for a discarded payload or none.
fn adjacent(buffers: &[Incoming]) -> usize {
    let mut stretch = match buffers.first() {
        None | Some(Incoming::Discard { .. }) => return 0,
        Some(Incoming::Loan(_)) => return 1,
        Some(Incoming::Chunk { lease, bytes }) => Stretch::of(lease, *bytes),
    };
    let Some(stretch) = &mut stretch else { return 1 };
    let mut count = 1;
    for buffer in &buffers[1..] {
        match buffer {
            Incoming::Chunk { lease, bytes } if stretch.goes_on(lease, *bytes) => count += 1,
            _ => break,
        }
    }
    count
}

/// The slice of adjacent buffers.
fn joined(buffers: &mut [Incoming]) -> Option<&mut [u8]> {
    let (first, others) = buffers.split_first_mut()?;
    if others.is_empty() {
        return Some(first.bytes_mut());
    }
    let Incoming::Chunk { lease, bytes } = first else { panic!("only leases lie side by side") };
    let mut stretch = StretchMut::of(lease, *bytes)?;
    for buffer in others {
        let Incoming::Chunk { lease, bytes } = buffer else { panic!("only leases lie side by side") };
        stretch.extend_by(lease, *bytes);
    }
    Some(stretch.into_bytes())
}

/// Panics unless `body` has the lengths of the frame's entries: the session counts them.
pub(crate) fn assert_body(frame: &Frame, body: &[Outgoing]) {
    assert_lengths(frame, body.iter().map(Outgoing::len), "send");
}

/// Writes the payloads' checksums into entries that have none.
pub(crate) fn write_checksums(frame: &mut Frame, body: &[Outgoing]) {
    let entries = frame.entries.iter_mut().filter(|entry| entry.bytes > 0);
    for (entry, parcel) in entries.zip(body).filter(|(entry, _)| entry.checksum == 0) {
        entry.checksum = parcel.checksum();
    }
}

/// The end of a connection that holds no buffers.
pub(crate) fn gone_event(peer: PeerId, reason: String) -> Event {
    Event::Gone { peer, reason, unsent: Vec::new(), unfilled: ReceiveBuffers::new() }
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

    /// Checks the slices to fill after `filled` bytes, for buffers of these lengths in the named slots of 64 bytes; `-`
    /// is a discarded payload.
    fn check(buffers: &str, filled: usize, slices_max: usize, expected: &[usize]) {
        let mut budget = Budget::new();
        budget.line("test", 64, 8);
        let mut slots: Vec<Option<Lease>> = Vec::new();
        let arena = Arena::new(&budget).expect("it is small");
        arena.take_many(64, 8, &mut |lease| slots.push(Some(lease))).expect("there are eight");
        let buffer = |text: &str| match text.split_once(':').expect("a slot and a length") {
            ("-", bytes) => Incoming::Discard { bytes: bytes.parse().expect("a length") },
            (slot, bytes) => {
                let slot: usize = slot.parse().expect("a slot");
                let lease = slots[slot].take().expect("it is named once");
                Incoming::Chunk { lease, bytes: bytes.parse().expect("a length") }
            }
        };
        let buffers: ReceiveBuffers = buffers.split(' ').map(buffer).collect();
        let head = Head { flags: Flags::default().with(Flags::UNCHECKED), ..Head::new(Kind::Push) };
        let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
        let entry =
            |buffer: &Incoming| Entry { bytes: buffer.len(), ..Entry::bare(id, Round(0), ElementType::Float32) };
        let frame = Frame { entries: buffers.iter().map(entry).collect(), ..Frame::bare(head) };
        let mut posted = PostedReceive::new(frame, buffers);
        posted.fill(filled).expect("nothing is checked");
        let (mut found, mut byte) = (Vec::new(), 0);
        for slice in posted.unfilled(slices_max) {
            found.push(slice.len());
            slice.iter_mut().for_each(|at| (*at, byte) = (byte, byte + 1));
        }
        assert_eq!(found, expected);
        let (_, buffers) = posted.into_parts();
        let here = buffers.iter().take_while(|buffer| !matches!(buffer, Incoming::Discard { .. }));
        let bytes: Vec<u8> = here.flat_map(|buffer| buffer.bytes().to_vec()).skip(filled).collect();
        let count = usize::from(byte);
        assert!(bytes[..count].iter().copied().eq(0..byte), "each byte is in its buffer: {bytes:?}");
        assert!(bytes[count..].iter().all(|rest| *rest == 0), "and nowhere else");
    }

    #[test]
    fn adjacent_receive_buffers_are_filled_as_one() {
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

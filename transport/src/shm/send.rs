//! Send side of a shared-memory connection.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::Lease;
use pserver_core::memory::shared::File;
use pserver_core::optim::is_finite;
use pserver_core::port::{Event, Outgoing, Payloads};
use pserver_core::wire::{Flags, Frame, Kind};
use tokio::net::UnixStream;

use super::control_socket::ControlSender;
use super::rings::ShmRings;
use super::staging::ShmStaging;
use super::{ARENAS_MAX, ConnectionError, FINITE, INLINE_BYTES_MAX, TOKENS, control_socket};
use crate::connection::{SendProgress, TicketedBody};
use crate::payload::held_bytes;

/// Queued frames, and sent frames that the peer still reads in place.
pub(super) struct ShmSender {
    queue: VecDeque<ShmQueuedFrame>,
    /// Bytes of the queue, as [`held_bytes`] counts.
    held: u64,
    /// The number of the first queued frame.
    front: u64,
    /// Sent frames whose payloads are read in place.
    borrowed: BTreeMap<u64, ShmBorrowedFrame>,
    /// The use of each token.
    tokens: Vec<ReferenceState>,
    free: Vec<u32>,
    staging: ShmStaging,
    arenas: SentArenas,
    /// Whether the hello is still to be sent on the socket: the listener has no ring.
    must_greet: bool,
}

struct ShmQueuedFrame {
    /// None for a refusal, which the transport itself sends.
    ticket: Option<Ticket>,
    held: u64,
    may_refer: bool,
    head: Vec<u8>,
    body: Payloads,
    /// The element types of a push with referenced payloads, by payload; else empty.
    types: Vec<ElementType>,
    /// The next slice: zero is the head, `k` is payload `k - 1`.
    slice: usize,
    /// Bytes of that slice that were sent.
    offset: usize,
    /// By payload, whether it is referenced and not returned; empty without references.
    referred: Vec<bool>,
}

/// Arena numbers reserved for staging.
const ARENAS_FOR_COPIES: usize = 64;

/// Arenas that the peer has mapped, with their numbers.
#[derive(Default)]
struct SentArenas {
    sent: Vec<SentArena>,
    /// Arenas announced so far: the number of the next one.
    numbers_used: u32,
    /// Files of this process that were gone at the last check.
    gone: u64,
}

struct SentArena {
    number: u32,
    /// The number among all files of this process.
    file_number: u64,
    file: Weak<File>,
}

struct ShmBorrowedFrame {
    parcels: TicketedBody,
    referred: Vec<bool>,
}

enum ReferenceState {
    Free,
    /// A copy in staging.
    Staged(#[expect(dead_code, reason = "it is held, and dropped when it comes back")] Lease),
    /// This payload of the frame of this number.
    Parcel(u64, usize),
}

impl ShmSender {
    pub(super) fn new(must_greet: bool) -> Self {
        Self {
            queue: VecDeque::new(),
            held: 0,
            front: 0,
            borrowed: BTreeMap::new(),
            tokens: (0..TOKENS).map(|_| ReferenceState::Free).collect(),
            free: (0..TOKENS).rev().collect(),
            staging: ShmStaging::default(),
            arenas: SentArenas::default(),
            must_greet,
        }
    }

    /// Queued frames. Tokens bound the frames that are read in place.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Bytes that they hold.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// Whether the queue is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether the peer reads payloads in place.
    pub(super) fn has_borrowed(&self) -> bool {
        !self.borrowed.is_empty()
    }

    /// Whether an announced arena may be gone.
    pub(super) fn must_report_gone(&self) -> bool {
        self.arenas.gone != File::gone()
    }

    /// Appends a frame to the queue.
    pub(super) fn push(&mut self, ticket: Option<Ticket>, frame: &Frame, body: Payloads) {
        // A push that is acknowledged on entering its round may be read long after, so it is copied. A push that is
        // answered by the round's value is not read after its answer.
        let may_refer = frame.head.kind != Kind::Push || frame.head.flags.contains(Flags::WANT_VALUE);
        let (head, referred, held) = (frame.encode(), Vec::new(), held_bytes(frame, &body));
        self.held += held;
        // The receiver checks the payloads that are in the ring.
        let is_looked_at =
            frame.head.kind == Kind::Push && frame.entries.iter().any(|entry| entry.bytes > INLINE_BYTES_MAX);
        let with_payload = frame.entries.iter().filter(|entry| is_looked_at && entry.bytes > 0);
        let types = with_payload.map(|entry| entry.element_type).collect();
        self.queue.push_back(ShmQueuedFrame {
            ticket,
            held,
            may_refer,
            head,
            body,
            types,
            slice: 0,
            offset: 0,
            referred,
        });
    }

    /// Sends until the queue is empty, nothing fits, or `bytes_max` bytes were moved.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        rings: &mut ShmRings,
        stream: &UnixStream,
        bytes_max: usize,
        events: &mut Vec<Event>,
    ) -> Result<SendProgress, ConnectionError> {
        self.arenas.report_gone(&ControlSender::new(stream, rings))?;
        let mut moved = 0;
        let written = loop {
            let Some(first) = self.queue.front() else { break SendProgress::All };
            if moved >= bytes_max {
                break SendProgress::BudgetSpent;
            }
            if self.must_greet {
                greet(stream, &first.head)?;
                self.must_greet = false;
                self.finish(peer, events);
                continue;
            }
            match self.step(rings, stream)? {
                Some(bytes) => moved += bytes,
                None => break SendProgress::Full,
            }
            if self.queue.front().is_some_and(|first| first.slice > first.body.len()) {
                self.finish(peer, events);
            }
        };
        rings.publish();
        Ok(written)
    }

    /// Takes back returned tokens.
    pub(super) fn collect_returned(
        &mut self,
        peer: PeerId,
        rings: &ShmRings,
        events: &mut Vec<Event>,
    ) -> Result<(), ConnectionError> {
        for (first, mut bits) in rings.signals().returned() {
            while bits != 0 {
                let token = first + bits.trailing_zeros();
                bits &= bits - 1;
                self.return_token(peer, token, events)?;
            }
        }
        Ok(())
    }

    /// Returns the frames of which nothing was sent.
    pub(super) fn take_unbegun(&mut self) -> Vec<TicketedBody> {
        let begun = self.queue.front().is_some_and(|first| first.slice > 0 || first.offset > 0);
        self.held = self.queue.iter().take(usize::from(begun)).map(|first| first.held).sum();
        returned(self.queue.drain(usize::from(begun)..))
    }

    /// Returns every frame that was not sent whole, or is still read in place.
    pub(super) fn take_all(&mut self) -> Vec<TicketedBody> {
        for first in &self.queue {
            tear(&first.body, &first.referred);
        }
        let borrowed =
            std::mem::take(&mut self.borrowed).into_values().map(|ShmBorrowedFrame { parcels, referred }| {
                tear(&parcels.1, &referred);
                parcels
            });
        self.held = 0;
        borrowed.chain(returned(self.queue.drain(..))).collect()
    }

    /// Sends the next slice of the first frame, or a part of it; the bytes moved, or nothing when the ring is full.
    fn step(&mut self, rings: &mut ShmRings, stream: &UnixStream) -> Result<Option<usize>, ConnectionError> {
        let first = self.queue.front_mut().expect("the caller looked");
        let bytes = match first.slice {
            0 => &first.head,
            payload => first.body[payload - 1].bytes(),
        };
        if first.slice > 0 && bytes.len() > INLINE_BYTES_MAX as usize {
            return self.put_reference(rings, stream);
        }
        let whole = bytes.len();
        let moved = rings.put(&bytes[first.offset..])?;
        first.offset += moved;
        if first.offset == whole {
            (first.slice, first.offset) = (first.slice + 1, 0);
            return Ok(Some(moved));
        }
        Ok((moved > 0).then_some(moved))
    }

    /// Sends a reference to a long payload: in place if it lies in a shared arena, else to a copy in staging.
    fn put_reference(&mut self, rings: &mut ShmRings, stream: &UnixStream) -> Result<Option<usize>, ConnectionError> {
        if self.free.is_empty() || rings.room(REFERENCE_BYTES)? < REFERENCE_BYTES {
            return Ok(None);
        }
        let first = self.queue.front_mut().expect("the caller looked");
        let parcel = &first.body[first.slice - 1];
        let element_type = first.types.get(first.slice - 1).copied();
        let mut is_known_finite = element_type.is_some();
        let mut check =
            |bytes: &[u8]| is_known_finite = is_known_finite && element_type.is_some_and(|one| is_finite(one, bytes));
        let in_place = parcel.shared().filter(|location| first.may_refer && self.arenas.may_add(location.file));
        let (token, arena, offset, moved) = match in_place {
            Some(location) => {
                let arena = self.arenas.number(
                    &ControlSender::new(stream, rings),
                    location.file,
                    control_socket::PAYLOAD_ARENA,
                )?;
                check(parcel.bytes());
                first.referred.resize(first.body.len(), false);
                first.referred[first.slice - 1] = true;
                (ReferenceState::Parcel(self.front, first.slice - 1), arena, location.offset, REFERENCE_BYTES)
            }
            None => {
                let bytes = parcel.bytes();
                let length = u32::try_from(bytes.len()).expect("a payload's length is 32 bits");
                let Some(mut lease) = self.staging.take(length).map_err(broken)? else { return Ok(None) };
                // A piece that was just copied is in the first-level cache.
                for (piece, into) in bytes.chunks(PIECE_BYTES).zip(lease.bytes_mut().chunks_mut(PIECE_BYTES)) {
                    into.copy_from_slice(piece);
                    check(piece);
                }
                let location = lease.shared().expect("staging is shared");
                let (arena, offset) = (
                    self.arenas.number(&ControlSender::new(stream, rings), location.file, control_socket::ARENA)?,
                    location.offset,
                );
                (ReferenceState::Staged(lease), arena, offset, bytes.len())
            }
        };
        first.slice += 1;
        let free = self.free.pop().expect("one is free");
        self.tokens[free as usize] = token;
        let mark = if is_known_finite { FINITE } else { 0 };
        let written = rings.put(&reference(arena, free | mark, offset))?;
        assert_eq!(written, REFERENCE_BYTES, "there was room for it");
        Ok(Some(moved))
    }

    /// The first frame was sent.
    fn finish(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        let ShmQueuedFrame { ticket, held, body, referred, .. } = self.queue.pop_front().expect("the caller looked");
        self.held -= held;
        self.front += 1;
        let Some(ticket) = ticket else { return };
        if referred.contains(&true) {
            events.push(Event::Transmitted { peer, ticket });
            self.borrowed.insert(self.front - 1, ShmBorrowedFrame { parcels: (ticket, body), referred });
        } else {
            events.push(Event::Sent { peer, ticket, body });
        }
    }

    fn return_token(&mut self, peer: PeerId, token: u32, events: &mut Vec<Event>) -> Result<(), ConnectionError> {
        let parcel = match std::mem::replace(&mut self.tokens[token as usize], ReferenceState::Free) {
            ReferenceState::Free => {
                return Err(ConnectionError::Broken(format!("token {token} was returned, which was not in use")));
            }
            ReferenceState::Staged(_) => None,
            ReferenceState::Parcel(frame, payload) => Some((frame, payload)),
        };
        self.free.push(token);
        let Some((frame, payload)) = parcel else { return Ok(()) };
        if let Some(borrowed) = self.borrowed.get_mut(&frame) {
            borrowed.referred[payload] = false;
            if !borrowed.referred.contains(&true) {
                let ShmBorrowedFrame { parcels: (ticket, body), .. } =
                    self.borrowed.remove(&frame).expect("it was just there");
                events.push(Event::Sent { peer, ticket, body });
            }
        } else if let Some(first) = self.queue.front_mut() {
            // The frame is not sent whole, and only the first one can be partly sent.
            first.referred[payload] = false;
        }
        Ok(())
    }
}

impl Drop for ShmSender {
    fn drop(&mut self) {
        // On every path to the end, referenced memory is marked as possibly still read.
        drop(self.take_all());
    }
}

/// Bytes of a payload that are checked and copied at a time.
const PIECE_BYTES: usize = 16 * 1024;
/// Bytes of a reference in the ring.
pub(super) const REFERENCE_BYTES: usize = 16;

fn reference(arena: u32, token: u32, offset: u64) -> [u8; REFERENCE_BYTES] {
    let mut bytes = [0; REFERENCE_BYTES];
    bytes[..4].copy_from_slice(&arena.to_le_bytes());
    bytes[4..8].copy_from_slice(&token.to_le_bytes());
    bytes[8..].copy_from_slice(&offset.to_le_bytes());
    bytes
}

impl SentArenas {
    /// The peer's number of a file, which is announced if it is new.
    fn number(&mut self, control: &ControlSender<'_>, file: &Arc<File>, kind: u8) -> Result<u32, ConnectionError> {
        match self.sent.iter().find(|sent| sent.file_number == file.number()) {
            Some(sent) => Ok(sent.number),
            None => self.hand_over(control, file, kind),
        }
    }

    /// Whether a file is announced or may be: the last numbers are reserved for staging, without which nothing can be
    /// sent.
    fn may_add(&self, file: &File) -> bool {
        self.sent.len() < ARENAS_MAX - ARENAS_FOR_COPIES
            || self.sent.iter().any(|sent| sent.file_number == file.number())
    }

    fn hand_over(&mut self, control: &ControlSender<'_>, file: &Arc<File>, kind: u8) -> Result<u32, ConnectionError> {
        if self.sent.len() == ARENAS_MAX {
            return Err(ConnectionError::Broken(format!("more than {ARENAS_MAX} arenas on one connection")));
        }
        let sent = control.send(&[kind], Some(file.descriptor()));
        sent.map_err(|error| ConnectionError::Broken(format!("handing an arena over: {error}")))?;
        let number = self.numbers_used;
        self.numbers_used += 1;
        self.sent.push(SentArena { number, file_number: file.number(), file: Arc::downgrade(file) });
        Ok(number)
    }

    /// Tells the peer of arenas that are gone, so that it unmaps them. Nothing refers to them, because a referenced
    /// payload is held until it is returned.
    fn report_gone(&mut self, control: &ControlSender<'_>) -> Result<(), ConnectionError> {
        let gone = File::gone();
        if std::mem::replace(&mut self.gone, gone) == gone {
            return Ok(());
        }
        for sent in self.sent.extract_if(.., |sent| sent.file.strong_count() == 0) {
            let [a, b, c, d] = sent.number.to_le_bytes();
            let sent = control.send(&[control_socket::GONE, a, b, c, d], None);
            sent.map_err(|error| ConnectionError::Broken(format!("taking an arena back: {error}")))?;
        }
        Ok(())
    }
}

/// Marks loans as torn: the peer may still read them after the connection has ended.
fn tear(body: &[Outgoing], referred: &[bool]) {
    for (parcel, _) in body.iter().zip(referred).filter(|(_, referred)| **referred) {
        if let Outgoing::Loan(loan) = parcel {
            loan.tear();
        }
    }
}

fn greet(stream: &UnixStream, hello: &[u8]) -> Result<(), ConnectionError> {
    let sent = control_socket::send(stream.as_fd(), hello, None);
    sent.map_err(|error| ConnectionError::Broken(format!("saying hello: {error}")))
}

fn broken(failure: Failure) -> ConnectionError {
    ConnectionError::Broken(failure.to_string())
}

fn returned(shipments: impl Iterator<Item = ShmQueuedFrame>) -> Vec<TicketedBody> {
    shipments.filter_map(|frame| frame.ticket.map(|ticket| (ticket, frame.body))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pserver_core::memory::{Buffer, lend};

    #[test]
    fn buffers_leave_files_for_copies() {
        let buffer = Buffer::new(4096).expect("this system shares memory");
        lend(|book| {
            let loan = book.read(&buffer).within(buffer.mapping());
            let file = loan.shared().expect("it is in place").file;
            let mut arenas = SentArenas::default();
            let other = |number: usize| SentArena {
                number: u32::try_from(number).expect("there are few"),
                file_number: u64::MAX,
                file: Weak::new(),
            };
            arenas.sent.extend((1..ARENAS_MAX - ARENAS_FOR_COPIES).map(other));
            assert!(arenas.may_add(file), "there is room for one");
            arenas.sent.push(other(0));
            assert!(!arenas.may_add(file), "the rest is for copies");
            arenas.sent[7].file_number = file.number();
            assert!(arenas.may_add(file), "it is known");
        });
    }
}

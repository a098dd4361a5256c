//! Frames on their way out of one connection.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use pserver_core::error::Failure;
use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::Lease;
use pserver_core::memory::shared::File;
use pserver_core::port::{Event, Outgoing};
use pserver_core::wire::{Flags, Frame, Kind};
use tokio::net::UnixStream;

use super::post::Desk;
use super::rings::Rings;
use super::staging::Staging;
use super::{ARENAS_MAX, Ended, INLINE_BYTES_MAX, TOKENS, post};

/// A frame's parcels, for whoever submitted it.
type Parcels = (Ticket, Vec<Outgoing>);

/// The frames that have not left yet, and what of those that have is still read by the other side.
pub(super) struct Outward {
    queue: VecDeque<Shipment>,
    /// The number of the frame at the front.
    front: u64,
    /// Frames that have left, whose parcels are still read.
    lent: BTreeMap<u64, Lent>,
    /// By token: what it stands for.
    tokens: Vec<Token>,
    free: Vec<u32>,
    staging: Staging,
    arenas: Arenas,
    /// Whether the hello still has to go, over the socket: the listener reads it, and has no ring.
    must_greet: bool,
}

struct Shipment {
    /// None for a refusal, which nobody submitted.
    ticket: Option<Ticket>,
    may_refer: bool,
    head: Vec<u8>,
    body: Vec<Outgoing>,
    /// What goes next: zero is the head, `k` is payload `k - 1`.
    slice: usize,
    /// Bytes of it that have left.
    offset: usize,
    /// By payload, whether it is referred to and has not come back; empty when none was.
    referred: Vec<bool>,
}

/// Files of a connection that only copies may take.
const ARENAS_FOR_COPIES: usize = 64;

/// The files that the other side has mapped, with their numbers there.
#[derive(Default)]
struct Arenas {
    known: Vec<Known>,
    /// How many were handed over: the number of the next one.
    handed: u32,
    /// How many files of this process were gone when it was last looked.
    gone: u64,
}

struct Known {
    number: u32,
    /// Of all files of this process.
    file_number: u64,
    file: Weak<File>,
}

struct Lent {
    parcels: Parcels,
    referred: Vec<bool>,
}

enum Token {
    Free,
    /// A copy, which is nobody's but ours.
    Staged(#[expect(dead_code, reason = "it is held, and dropped when it comes back")] Lease),
    /// This payload of the frame of this number.
    Parcel(u64, usize),
}

/// How far writing came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// Everything.
    All,
    /// Until the other side reads, or gives something back.
    Full,
    /// There is more, but others wait.
    Turn,
}

impl Outward {
    pub(super) fn new(must_greet: bool) -> Self {
        Self {
            queue: VecDeque::new(),
            front: 0,
            lent: BTreeMap::new(),
            tokens: (0..TOKENS).map(|_| Token::Free).collect(),
            free: (0..TOKENS).rev().collect(),
            staging: Staging::default(),
            arenas: Arenas::default(),
            must_greet,
        }
    }

    /// Frames that have not left. Of those that are read where they are, tokens are the bound.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether nothing waits to leave.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether the other side still reads parcels.
    pub(super) fn lends(&self) -> bool {
        !self.lent.is_empty()
    }

    /// Whether something that the other side has mapped may be gone.
    pub(super) fn must_sweep(&self) -> bool {
        self.arenas.gone != File::gone()
    }

    /// Adds a frame to the end.
    pub(super) fn push(&mut self, ticket: Option<Ticket>, frame: &Frame, body: Vec<Outgoing>) {
        // A push that is answered when it has entered its round may be read long after: it is copied, and its sender
        // goes on. One that is answered by its round's value is not read after the answer.
        let may_refer = frame.head.kind != Kind::Push || frame.head.flags.contains(Flags::WANT_VALUE);
        let (head, referred) = (frame.encode(), Vec::new());
        self.queue.push_back(Shipment { ticket, may_refer, head, body, slice: 0, offset: 0, referred });
    }

    /// Writes until nothing is left, nothing more fits, or `bytes_max` bytes were moved.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        rings: &mut Rings,
        stream: &UnixStream,
        bytes_max: usize,
        events: &mut Vec<Event>,
    ) -> Result<Written, Ended> {
        self.arenas.sweep(&Desk::new(stream, rings))?;
        let mut moved = 0;
        let written = loop {
            let Some(first) = self.queue.front() else { break Written::All };
            if moved >= bytes_max {
                break Written::Turn;
            }
            if self.must_greet {
                greet(stream, &first.head)?;
                self.must_greet = false;
                self.finish(peer, events);
                continue;
            }
            match self.step(rings, stream)? {
                Some(bytes) => moved += bytes,
                None => break Written::Full,
            }
            if self.queue.front().is_some_and(|first| first.slice > first.body.len()) {
                self.finish(peer, events);
            }
        };
        rings.tell();
        Ok(written)
    }

    /// Takes back what the other side does not read any more.
    pub(super) fn collect(&mut self, peer: PeerId, rings: &Rings, events: &mut Vec<Event>) -> Result<(), Ended> {
        for (first, mut bits) in rings.shore().returned() {
            while bits != 0 {
                let token = first + bits.trailing_zeros();
                bits &= bits - 1;
                self.take_back(peer, token, events)?;
            }
        }
        Ok(())
    }

    /// Gives back the frames that have not begun to leave.
    pub(super) fn take_unbegun(&mut self) -> Vec<Parcels> {
        let begun = self.queue.front().is_some_and(|first| first.slice > 0 || first.offset > 0);
        returned(self.queue.drain(usize::from(begun)..))
    }

    /// Gives back every frame that has not left whole, or is still read.
    pub(super) fn take_all(&mut self) -> Vec<Parcels> {
        for first in &self.queue {
            tear(&first.body, &first.referred);
        }
        let lent = std::mem::take(&mut self.lent).into_values().map(|Lent { parcels, referred }| {
            tear(&parcels.1, &referred);
            parcels
        });
        lent.chain(returned(self.queue.drain(..))).collect()
    }

    /// One slice of the first frame, or as much of it as fits; the bytes moved, or nothing when nothing fits.
    fn step(&mut self, rings: &mut Rings, stream: &UnixStream) -> Result<Option<usize>, Ended> {
        let first = self.queue.front_mut().expect("the caller looked");
        let bytes = match first.slice {
            0 => &first.head,
            payload => first.body[payload - 1].bytes(),
        };
        if first.slice > 0 && bytes.len() > INLINE_BYTES_MAX as usize {
            return self.refer(rings, stream);
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

    /// A payload that is not in the ring: one that lies in a shared arena stays there, any other is copied.
    fn refer(&mut self, rings: &mut Rings, stream: &UnixStream) -> Result<Option<usize>, Ended> {
        if self.free.is_empty() || rings.room(REFERENCE_BYTES)? < REFERENCE_BYTES {
            return Ok(None);
        }
        let first = self.queue.front_mut().expect("the caller looked");
        let parcel = &first.body[first.slice - 1];
        let in_place = parcel.shared().filter(|place| first.may_refer && self.arenas.may_add(place.file));
        let (token, arena, offset, moved) = match in_place {
            Some(place) => {
                let arena = self.arenas.number(&Desk::new(stream, rings), place.file, post::HOME)?;
                first.referred.resize(first.body.len(), false);
                first.referred[first.slice - 1] = true;
                (Token::Parcel(self.front, first.slice - 1), arena, place.offset, REFERENCE_BYTES)
            }
            None => {
                let bytes = parcel.bytes();
                let length = u32::try_from(bytes.len()).expect("a payload's length is 32 bits");
                let Some(mut lease) = self.staging.take(length).map_err(broken)? else { return Ok(None) };
                lease.bytes_mut().copy_from_slice(bytes);
                let place = lease.shared().expect("staging is shared");
                let (arena, offset) =
                    (self.arenas.number(&Desk::new(stream, rings), place.file, post::ARENA)?, place.offset);
                (Token::Staged(lease), arena, offset, bytes.len())
            }
        };
        first.slice += 1;
        let free = self.free.pop().expect("one is free");
        self.tokens[free as usize] = token;
        let written = rings.put(&reference(arena, free, offset))?;
        assert_eq!(written, REFERENCE_BYTES, "there was room for it");
        Ok(Some(moved))
    }

    /// The first frame has left.
    fn finish(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        let Shipment { ticket, body, referred, .. } = self.queue.pop_front().expect("the caller looked");
        self.front += 1;
        let Some(ticket) = ticket else { return };
        if referred.contains(&true) {
            events.push(Event::Left { peer, ticket });
            self.lent.insert(self.front - 1, Lent { parcels: (ticket, body), referred });
        } else {
            events.push(Event::Sent { peer, ticket, body });
        }
    }

    fn take_back(&mut self, peer: PeerId, token: u32, events: &mut Vec<Event>) -> Result<(), Ended> {
        let parcel = match std::mem::replace(&mut self.tokens[token as usize], Token::Free) {
            Token::Free => return Err(Ended::Broken(format!("token {token} came back, which was not given"))),
            Token::Staged(_) => None,
            Token::Parcel(frame, payload) => Some((frame, payload)),
        };
        self.free.push(token);
        let Some((frame, payload)) = parcel else { return Ok(()) };
        if let Some(lent) = self.lent.get_mut(&frame) {
            lent.referred[payload] = false;
            if !lent.referred.contains(&true) {
                let Lent { parcels: (ticket, body), .. } = self.lent.remove(&frame).expect("it was just there");
                events.push(Event::Sent { peer, ticket, body });
            }
        } else if let Some(first) = self.queue.front_mut() {
            // It is still on its way out, and only the first one can be.
            first.referred[payload] = false;
        }
        Ok(())
    }
}

impl Drop for Outward {
    fn drop(&mut self) {
        // Whatever ends the connection, what is referred to is known to be.
        drop(self.take_all());
    }
}

/// Bytes of a reference in the ring.
pub(super) const REFERENCE_BYTES: usize = 16;

fn reference(arena: u32, token: u32, offset: u64) -> [u8; REFERENCE_BYTES] {
    let mut bytes = [0; REFERENCE_BYTES];
    bytes[..4].copy_from_slice(&arena.to_le_bytes());
    bytes[4..8].copy_from_slice(&token.to_le_bytes());
    bytes[8..].copy_from_slice(&offset.to_le_bytes());
    bytes
}

impl Arenas {
    /// The number by which the other side knows a file, which is handed to it when it is new.
    fn number(&mut self, desk: &Desk<'_>, file: &Arc<File>, letter: u8) -> Result<u32, Ended> {
        match self.known.iter().find(|known| known.file_number == file.number()) {
            Some(known) => Ok(known.number),
            None => self.hand_over(desk, file, letter),
        }
    }

    /// Whether a file is known there, or may become so: the last numbers are for copies, without which nothing leaves.
    fn may_add(&self, file: &File) -> bool {
        self.known.len() < ARENAS_MAX - ARENAS_FOR_COPIES
            || self.known.iter().any(|known| known.file_number == file.number())
    }

    fn hand_over(&mut self, desk: &Desk<'_>, file: &Arc<File>, letter: u8) -> Result<u32, Ended> {
        if self.known.len() == ARENAS_MAX {
            return Err(Ended::Broken(format!("more than {ARENAS_MAX} arenas on one connection")));
        }
        let sent = desk.send(&[letter], Some(file.descriptor()));
        sent.map_err(|error| Ended::Broken(format!("handing an arena over: {error}")))?;
        let number = self.handed;
        self.handed += 1;
        self.known.push(Known { number, file_number: file.number(), file: Arc::downgrade(file) });
        Ok(number)
    }

    /// Tells the other side of files that are gone, so that it does not keep their memory. Nothing refers to them: what
    /// is referred to is held until it comes back.
    fn sweep(&mut self, desk: &Desk<'_>) -> Result<(), Ended> {
        let gone = File::gone();
        if std::mem::replace(&mut self.gone, gone) == gone {
            return Ok(());
        }
        for known in self.known.extract_if(.., |known| known.file.strong_count() == 0) {
            let [a, b, c, d] = known.number.to_le_bytes();
            let sent = desk.send(&[post::GONE, a, b, c, d], None);
            sent.map_err(|error| Ended::Broken(format!("taking an arena back: {error}")))?;
        }
        Ok(())
    }
}

/// The connection is over: what is referred to may still be read.
fn tear(body: &[Outgoing], referred: &[bool]) {
    for (parcel, _) in body.iter().zip(referred).filter(|(_, referred)| **referred) {
        if let Outgoing::Loan(loan) = parcel {
            loan.tear();
        }
    }
}

fn greet(stream: &UnixStream, hello: &[u8]) -> Result<(), Ended> {
    let sent = post::send(stream.as_fd(), hello, None);
    sent.map_err(|error| Ended::Broken(format!("saying hello: {error}")))
}

fn broken(failure: Failure) -> Ended {
    Ended::Broken(failure.to_string())
}

fn returned(shipments: impl Iterator<Item = Shipment>) -> Vec<Parcels> {
    shipments.filter_map(|shipment| shipment.ticket.map(|ticket| (ticket, shipment.body))).collect()
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
            let mut arenas = Arenas::default();
            let other = |number: usize| Known {
                number: u32::try_from(number).expect("there are few"),
                file_number: u64::MAX,
                file: Weak::new(),
            };
            arenas.known.extend((1..ARENAS_MAX - ARENAS_FOR_COPIES).map(other));
            assert!(arenas.may_add(file), "there is room for one");
            arenas.known.push(other(0));
            assert!(!arenas.may_add(file), "the rest is for copies");
            arenas.known[7].file_number = file.number();
            assert!(arenas.may_add(file), "it is known");
        });
    }
}

//! What a device has: memory by value, until its work has completed or its pair is closed.

use std::collections::VecDeque;
use std::sync::Arc;

use pserver_core::memory::{Lease, Value};
use pserver_core::port::Incoming;

use super::provider::{Act, Done, Fault, Pair, Plan, Receive, What, Work};
use super::{Ended, POSTED_MAX, RECEIVES, SLOT_BYTES};

/// Bytes of this process that a device is told of, with the key of their region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    address: u64,
    bytes: u32,
    key: u32,
}

impl Span {
    pub(super) fn of(bytes: &[u8], key: u32) -> Self {
        let length = u32::try_from(bytes.len()).expect("a chunk or a slot");
        Self { address: bytes.as_ptr().expose_provenance() as u64, bytes: length, key }
    }

    pub(super) fn of_mut(bytes: &mut [u8], key: u32) -> Self {
        let length = u32::try_from(bytes.len()).expect("a chunk or a slot");
        Self { address: bytes.as_mut_ptr().expose_provenance() as u64, bytes: length, key }
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(self) -> u32 {
        self.bytes
    }

    pub(crate) fn key(self) -> u32 {
        self.key
    }
}

/// What is under way, with its memory.
pub(super) enum Flight {
    /// A message in a slot.
    Message(Lease),
    /// This place is being filled; through staging where it cannot be itself.
    Read { spot: Spot, place: Incoming, staged: Option<Lease> },
    /// A payload is being written to where the other side wants it; the last one of its frame, or not.
    Write {
        #[expect(dead_code, reason = "it is held, and dropped when it was written")]
        source: Source,
        is_last: bool,
    },
}

/// Which place of which frame that lands.
#[derive(Clone, Copy)]
pub(super) struct Spot {
    /// The landing's number on this connection, from 0.
    pub(super) landing: u64,
    pub(super) place: usize,
}

/// Where a payload is written from.
pub(super) enum Source {
    Nothing,
    Value(Arc<Value>),
    Staged(Lease),
}

/// A message that arrived.
pub(super) struct Message {
    pub(super) slot: Lease,
    pub(super) bytes: usize,
}

/// What a completion means, and the memory it gives back.
pub(super) enum Outcome {
    Message(Message),
    /// The other side's writes are here, as it says by this number; the slot that it took.
    Number(u32, Lease),
    Retired(Flight),
}

/// A pair and the memory that it was given.
pub(super) struct Flights {
    pair: Box<dyn Pair>,
    /// Work that was posted, oldest first; the number of the first, and of the next.
    posted: VecDeque<Flight>,
    first: u64,
    next: u64,
    /// Work that waits for the doorbell.
    batch: Vec<Work>,
    /// Slots that messages come into, in order, and the number of the first.
    receiving: VecDeque<Lease>,
    received: u64,
    /// Slots that wait for the doorbell.
    room: Vec<Receive>,
    done: Vec<Done>,
    /// The key of the slots' region.
    key: u32,
    /// Why the device takes nothing more: how much it took of the last batch is not known.
    lost: Option<Fault>,
    is_closed: bool,
}

/// The number of a receive has this bit; that of other work has not.
const RECEIVE: u64 = 1 << 63;

impl Flights {
    /// What a connection's pair is made for.
    pub(super) fn plan(is_open: bool) -> Plan {
        Plan { posted_max: POSTED_MAX, receives_max: RECEIVES, is_open }
    }

    pub(super) fn new(pair: Box<dyn Pair>, key: u32) -> Self {
        Self {
            pair,
            posted: VecDeque::with_capacity(POSTED_MAX as usize),
            first: 0,
            next: 0,
            batch: Vec::with_capacity(POSTED_MAX as usize),
            receiving: VecDeque::with_capacity(RECEIVES as usize),
            received: 0,
            room: Vec::with_capacity(RECEIVES as usize),
            done: Vec::with_capacity((POSTED_MAX + RECEIVES) as usize),
            key,
            lost: None,
            is_closed: false,
        }
    }

    pub(super) fn pair(&mut self) -> &mut dyn Pair {
        self.pair.as_mut()
    }

    /// How much more work may be posted.
    pub(super) fn room(&self) -> usize {
        POSTED_MAX as usize - self.posted.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.posted.is_empty()
    }

    /// A slot for a message that will come.
    pub(super) fn receive(&mut self, mut slot: Lease) {
        let id = RECEIVE | (self.received + self.receiving.len() as u64);
        self.room.push(Receive { id, near: Span::of_mut(slot.bytes_mut(), self.key) });
        self.receiving.push_back(slot);
    }

    /// Sends the first `bytes` of a slot.
    pub(super) fn send(&mut self, slot: Lease, bytes: usize) {
        let near = Span::of(&slot.bytes()[..bytes], self.key);
        self.add(Act::Send, near, Flight::Message(slot));
    }

    /// Fills a place, or the staging for it, from the other side's memory.
    pub(super) fn read(&mut self, act: Act, spot: Spot, mut place: Incoming, mut staged: Option<Lease>, key: u32) {
        let near = match &mut staged {
            Some(lease) => Span::of_mut(lease.bytes_mut(), key),
            None => Span::of_mut(place.bytes_mut(), key),
        };
        self.add(act, near, Flight::Read { spot, place, staged });
    }

    /// Writes a payload into the other side's memory.
    pub(super) fn write(&mut self, act: Act, source: Source, key: u32, is_last: bool) {
        let near = match &source {
            Source::Nothing => Span { address: 0, bytes: 0, key: 0 },
            Source::Value(value) => Span::of(value.bytes(), key),
            Source::Staged(lease) => Span::of(lease.bytes(), key),
        };
        self.add(act, near, Flight::Write { source, is_last });
    }

    fn add(&mut self, act: Act, near: Span, flight: Flight) {
        assert!(self.room() > 0, "who adds work looks for room");
        self.batch.push(Work { id: self.next, act, near, is_told: false });
        self.next += 1;
        self.posted.push_back(flight);
    }

    /// Hands everything that was added to the device: one call for messages that may come, one for work. The last of
    /// each batch is told, and with it all before it.
    pub(super) fn ring(&mut self) -> Result<(), Ended> {
        if self.lost.is_none() {
            self.lost = self.hand_over().err();
        }
        self.lost.clone().map_or(Ok(()), |fault| Err(fault.into()))
    }

    fn hand_over(&mut self) -> Result<(), Fault> {
        if !self.room.is_empty() {
            self.pair.receive(&self.room)?;
            self.room.clear();
        }
        if let Some(last) = self.batch.last_mut() {
            last.is_told = true;
            self.pair.post(&self.batch)?;
            self.batch.clear();
        }
        Ok(())
    }

    /// Whether the device has something to say.
    pub(super) fn has_news(&mut self) -> bool {
        // A device that cannot be asked has news: the next turn asks it again, and reports.
        self.done.is_empty() && self.pair.poll(&mut self.done).is_err() || !self.done.is_empty()
    }

    /// What completed since the last time.
    pub(super) fn collect(&mut self, outcomes: &mut Vec<Outcome>) -> Result<(), Ended> {
        self.pair.poll(&mut self.done)?;
        let mut done = std::mem::take(&mut self.done);
        let outcome = done.drain(..).try_for_each(|done| self.note(done, outcomes));
        self.done = done;
        outcome
    }

    fn note(&mut self, done: Done, outcomes: &mut Vec<Outcome>) -> Result<(), Ended> {
        let what = done.what.map_err(Ended::Failed)?;
        if done.id & RECEIVE == 0 {
            return self.retire(done.id, what, outcomes);
        }
        let expected = RECEIVE | self.received;
        if done.id != expected || self.receiving.is_empty() {
            return Err(odd(format!("receive {} completed, expected {}", done.id & !RECEIVE, self.received)));
        }
        let slot = self.receiving.pop_front().expect("one is there");
        self.received += 1;
        outcomes.push(match what {
            What::Message(bytes) if bytes as usize <= SLOT_BYTES as usize => {
                Outcome::Message(Message { slot, bytes: bytes as usize })
            }
            What::Number(number) => Outcome::Number(number, slot),
            What::Message(_) | What::Posted => return Err(odd(format!("a receive completed as {what:?}"))),
        });
        Ok(())
    }

    fn retire(&mut self, id: u64, what: What, outcomes: &mut Vec<Outcome>) -> Result<(), Ended> {
        // Work that waits for the doorbell is not there yet.
        let posted = self.next - self.batch.len() as u64;
        if what != What::Posted || id < self.first || id >= posted {
            let expected = format!("one of {} to {posted}", self.first);
            return Err(odd(format!("work {id} completed as {what:?}, expected {expected}, as posted")));
        }
        for _ in self.first..=id {
            outcomes.push(Outcome::Retired(self.posted.pop_front().expect("it was posted")));
        }
        self.first = id + 1;
        Ok(())
    }

    /// Ends the pair. Afterwards nothing is written or read that it was given, and it all comes back, but for slots.
    ///
    /// # Errors
    /// When the device does not say so: what it was given is then given to nobody any more.
    pub(super) fn close(&mut self) -> Result<Vec<Flight>, Fault> {
        self.batch.clear();
        let closed = if self.is_closed { Ok(()) } else { self.pair.close() };
        self.is_closed = true;
        let (posted, receiving) = (self.posted.drain(..), self.receiving.drain(..));
        match closed {
            Ok(()) => {
                drop(receiving);
                Ok(posted.collect())
            }
            Err(fault) => {
                tracing::error!(%fault, "a queue pair could not be destroyed; what it was given is not used again");
                posted.for_each(quarantine);
                receiving.for_each(std::mem::forget);
                Err(fault)
            }
        }
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        // Its result is in the log; the memory of work that was under way goes with the connection.
        drop(self.close());
    }
}

/// Keeps from everybody what a device may still touch. A place that was to be filled from staging was not shown to it.
fn quarantine(flight: Flight) {
    match flight {
        Flight::Read { staged: Some(lease), place, .. } => {
            std::mem::forget(lease);
            drop(place);
        }
        other => std::mem::forget(other),
    }
}

fn odd(text: String) -> Ended {
    Ended::Device(format!("the device: {text}"))
}

//! Messages of one connection: slots, and the credits that say how many the other side has room for.
//!
//! Bulk messages carry the bytes of frames, and are read when the session is ready for them. Notes are read at once,
//! and have slots of their own, so that they pass frames that wait. Every message says what its sender has made free
//! since the one before. Two notes are kept back for messages that say nothing else, and such a message gives back half
//! of the notes at least; so two sides never wait for each other.

use std::collections::VecDeque;

use pserver_core::limits::LANDINGS_MAX;
use pserver_core::memory::{Arena, Budget, Lease};

use super::flights::{Flights, Message};
use super::letters::{Matter, PREFIX_BYTES, Prefix};
use super::{BULK_SLOTS, Ended, MESSAGES, NOTE_SLOTS, RECEIVES, SLOT_BYTES};

/// Notes that are kept back for messages that only give slots back.
const NOTES_KEPT: u16 = 2;
/// So many slots are given back by a message of their own.
const BULK_OWED: u16 = BULK_SLOTS / 2;
const NOTE_OWED: u16 = NOTE_SLOTS / 2;

const _: () = assert!(NOTE_OWED <= NOTE_SLOTS - NOTES_KEPT, "who has used what is not kept back is given back");
const _: () = assert!(LANDINGS_MAX <= (NOTE_SLOTS - NOTES_KEPT) as usize, "each frame that lands takes one note");

/// Both directions of messages.
pub(super) struct Mail {
    pub(super) flights: Flights,
    /// Slots to send from.
    free: Vec<Lease>,
    /// A bulk message that is not full, and how much is in it.
    open: Option<(Lease, usize)>,
    /// Room that the other side has.
    bulk: u16,
    note: u16,
    /// What it has to be told.
    bulk_owed: u16,
    note_owed: u16,
    taken_owed: u16,
    sent: u32,
    received: u32,
    /// Bulk messages that were not read to their end.
    arrived: VecDeque<Arrived>,
    arrived_bytes: usize,
}

struct Arrived {
    slot: Lease,
    start: usize,
    end: usize,
}

/// The slots of a connection's messages.
pub(super) fn slots() -> Budget {
    let mut budget = Budget::new();
    budget.line("messages that come and go over verbs", SLOT_BYTES, (RECEIVES + MESSAGES).into());
    budget
}

impl Mail {
    /// Messages over a pair, with room for those of the other side.
    pub(super) fn new(mut flights: Flights, arena: &Arena) -> Result<Self, Ended> {
        let take = || arena.take(SLOT_BYTES).map_err(|failure| Ended::Device(failure.to_string()));
        for _ in 0..RECEIVES {
            flights.receive(take()?);
        }
        flights.ring()?;
        let free = (0..MESSAGES).map(|_| take()).collect::<Result<_, _>>()?;
        Ok(Self {
            flights,
            free,
            open: None,
            bulk: BULK_SLOTS,
            note: NOTE_SLOTS,
            bulk_owed: 0,
            note_owed: 0,
            taken_owed: 0,
            sent: 0,
            received: 0,
            arrived: VecDeque::with_capacity(usize::from(BULK_SLOTS)),
            arrived_bytes: 0,
        })
    }

    /// Puts as much of `bytes` into messages as there is room for; says how much that was.
    pub(super) fn put(&mut self, bytes: &[u8]) -> usize {
        let mut put = 0;
        while put < bytes.len() {
            if self.open.is_none() && !self.open() {
                break;
            }
            let (slot, filled) = self.open.as_mut().expect("it was just opened");
            let step = (bytes.len() - put).min(SLOT_BYTES as usize - *filled);
            slot.bytes_mut()[*filled..*filled + step].copy_from_slice(&bytes[put..put + step]);
            *filled += step;
            put += step;
            if *filled == SLOT_BYTES as usize {
                self.close_open();
            }
        }
        put
    }

    /// Whether so many bytes can be put at once.
    pub(super) fn has_room(&mut self, bytes: usize) -> bool {
        let open = self.open.as_ref().map_or(0, |(_, filled)| SLOT_BYTES as usize - filled);
        let slots = usize::from(self.bulk).min(self.free.len());
        open + slots * (SLOT_BYTES as usize - PREFIX_BYTES) >= bytes
    }

    fn open(&mut self) -> bool {
        if self.bulk == 0 {
            return false;
        }
        let Some(slot) = self.free.pop() else { return false };
        self.bulk -= 1;
        self.open = Some((slot, PREFIX_BYTES));
        true
    }

    /// Sends the message that is not full.
    pub(super) fn close_open(&mut self) {
        if let Some((slot, filled)) = self.open.take() {
            self.send(Matter::Bulk, slot, filled);
        }
    }

    /// Sends a note with `body`, if the other side has room; whether it did.
    pub(super) fn note(&mut self, matter: Matter, body: &[u8]) -> bool {
        if self.note <= NOTES_KEPT {
            return false;
        }
        self.send_note(matter, body)
    }

    /// Takes room for a number that comes with a write, if there is some; whether there was.
    pub(super) fn take_note(&mut self) -> bool {
        let has_room = self.note > NOTES_KEPT;
        self.note -= u16::from(has_room);
        has_room
    }

    fn send_note(&mut self, matter: Matter, body: &[u8]) -> bool {
        let Some(mut slot) = self.free.pop() else { return false };
        slot.bytes_mut()[PREFIX_BYTES..PREFIX_BYTES + body.len()].copy_from_slice(body);
        self.note -= 1;
        self.send(matter, slot, PREFIX_BYTES + body.len());
        true
    }

    fn send(&mut self, matter: Matter, mut slot: Lease, bytes: usize) {
        let taken = std::mem::take(&mut self.taken_owed);
        let (bulk, note) = (std::mem::take(&mut self.bulk_owed), std::mem::take(&mut self.note_owed));
        Prefix { matter, taken, number: self.sent, bulk, note }.encode(slot.bytes_mut());
        self.sent = self.sent.wrapping_add(1);
        self.flights.send(slot, bytes);
    }

    /// The other side is told at once that the payload of one of its frames was read.
    pub(super) fn owe_taken(&mut self) {
        self.taken_owed += 1;
    }

    /// Sends what the other side waits for and no other message said, and rings the doorbell.
    pub(super) fn settle(&mut self) -> Result<(), Ended> {
        self.close_open();
        let must = self.note_owed >= NOTE_OWED && self.note > 0;
        let should = (self.taken_owed > 0 || self.bulk_owed >= BULK_OWED) && self.note > NOTES_KEPT;
        if must || should {
            self.send_note(Matter::Bare, &[]);
        }
        self.flights.ring()
    }

    /// The first message, which says that this side is ready.
    pub(super) fn greet(&mut self) -> Result<(), Ended> {
        self.send_note(Matter::Bare, &[]);
        self.flights.ring()
    }

    /// A slot that was sent from is free.
    pub(super) fn sent_from(&mut self, slot: Lease) {
        self.free.push(slot);
    }

    /// Reads a message's prefix, and keeps it if it is bulk. Gives others back, to be read at once.
    pub(super) fn arrive(&mut self, message: Message) -> Result<(Prefix, Option<Message>), Ended> {
        let Message { slot, bytes } = message;
        let prefix = Prefix::decode(&slot.bytes()[..bytes], self.received)?;
        self.received = self.received.wrapping_add(1);
        (self.bulk, self.note) = (self.bulk.saturating_add(prefix.bulk), self.note.saturating_add(prefix.note));
        if self.bulk > BULK_SLOTS || self.note > NOTE_SLOTS {
            let (bulk, note) = (prefix.bulk, prefix.note);
            return Err(Ended::Broken(format!("{bulk} and {note} slots were given back, which were not all in use")));
        }
        if prefix.matter != Matter::Bulk {
            return Ok((prefix, Some(Message { slot, bytes })));
        }
        // Of what was read, the other side has room for no more before it is given back.
        if usize::from(self.bulk_owed) + self.arrived.len() == usize::from(BULK_SLOTS) {
            return Err(Ended::Broken(format!("more than {BULK_SLOTS} messages that were not asked for")));
        }
        self.arrived_bytes += bytes - PREFIX_BYTES;
        self.arrived.push_back(Arrived { slot, start: PREFIX_BYTES, end: bytes });
        Ok((prefix, None))
    }

    /// A note was read, or a number: its slot takes another message.
    pub(super) fn read_note(&mut self, slot: Lease) -> Result<(), Ended> {
        if self.note_owed == NOTE_SLOTS {
            return Err(Ended::Broken(format!("more than {NOTE_SLOTS} notes that were not asked for")));
        }
        self.flights.receive(slot);
        self.note_owed += 1;
        Ok(())
    }

    /// Bytes of frames that are there.
    pub(super) fn available(&self) -> usize {
        self.arrived_bytes
    }

    /// Reads bytes that are there.
    pub(super) fn take(&mut self, into: &mut [u8]) {
        let mut taken = 0;
        self.pass(into.len(), |bytes| {
            into[taken..taken + bytes.len()].copy_from_slice(bytes);
            taken += bytes.len();
        });
    }

    /// Passes over bytes that are there.
    pub(super) fn skip(&mut self, bytes: usize) {
        self.pass(bytes, |_| {});
    }

    fn pass(&mut self, mut bytes: usize, mut use_them: impl FnMut(&[u8])) {
        assert!(bytes <= self.arrived_bytes, "only what is there is read");
        self.arrived_bytes -= bytes;
        while let Some(first) = self.arrived.front_mut() {
            let step = bytes.min(first.end - first.start);
            use_them(&first.slot.bytes()[first.start..first.start + step]);
            (first.start, bytes) = (first.start + step, bytes - step);
            if first.start < first.end {
                break;
            }
            let Arrived { slot, .. } = self.arrived.pop_front().expect("it was just looked at");
            self.flights.receive(slot);
            self.bulk_owed += 1;
        }
    }
}

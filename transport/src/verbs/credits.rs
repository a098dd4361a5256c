//! Messages of a connection, with credit-based flow control.
//!
//! Bulk messages carry the bytes of frames and wait until the session reads them. Control messages are handled at once
//! and have slots of their own, so that they pass waiting frames. Every message returns the credits that its sender
//! freed since the message before. Two control credits are reserved for messages that only return credits, and such a
//! message returns at least half of the control credits. So the two sides cannot deadlock.

use std::collections::VecDeque;

use pserver_core::limits::RECEIVES_MAX;
use pserver_core::memory::{Arena, Budget, Lease};

use super::wire_format::{MessageKind, MessagePrefix, PREFIX_BYTES};
use super::work_requests::{InFlightRequests, ReceivedMessage};
use super::{BULK_SLOTS, CONTROL_SLOTS, ConnectionError, MESSAGES, RECEIVES, SLOT_BYTES};

/// Control credits reserved for messages that only return credits.
const CONTROL_KEPT: u16 = 2;
/// Owed credits from which on a message is sent only to return them.
const BULK_OWED: u16 = BULK_SLOTS / 2;
const CONTROL_OWED: u16 = CONTROL_SLOTS / 2;

const _: () = assert!(
    CONTROL_OWED <= CONTROL_SLOTS - CONTROL_KEPT,
    "credits are returned before the sender runs out of unreserved ones"
);
const _: () = assert!(RECEIVES_MAX <= (CONTROL_SLOTS - CONTROL_KEPT) as usize, "each frame that lands takes one note");

/// The messages of both directions.
pub(super) struct CreditedMessages {
    pub(super) work_requests: InFlightRequests,
    /// Free slots to send from.
    free: Vec<Lease>,
    /// A bulk message that is not full, and its length in bytes.
    open: Option<(Lease, usize)>,
    /// The peer's credits: receive slots that it has posted.
    bulk: u16,
    note: u16,
    /// Credits to return with the next message.
    bulk_owed: u16,
    control_owed: u16,
    read_reports: ReadReports,
    sent: u32,
    received: u32,
    /// Bulk messages that were not read to their end.
    arrived: VecDeque<UnreadMessage>,
    arrived_bytes: usize,
}

/// Frames whose payloads were read, which the peer was not told.
#[derive(Default)]
struct ReadReports {
    frames: u16,
    /// Whether the report waits a turn for an answer to carry it, and whether a turn must follow.
    is_fresh: bool,
    must_turn: bool,
}

struct UnreadMessage {
    slot: Lease,
    start: usize,
    end: usize,
}

/// The memory budget of a connection's message slots.
pub(super) fn slots() -> Budget {
    let mut budget = Budget::new();
    budget.line("messages that come and go over verbs", SLOT_BYTES, (RECEIVES + MESSAGES).into());
    budget
}

impl CreditedMessages {
    /// Posts the receives and sets both sides' credits.
    pub(super) fn new(mut work_requests: InFlightRequests, arena: &Arena) -> Result<Self, ConnectionError> {
        let take = || arena.take(SLOT_BYTES).map_err(|failure| ConnectionError::Device(failure.to_string()));
        for _ in 0..RECEIVES {
            work_requests.receive(take()?);
        }
        work_requests.ring_doorbell()?;
        let free = (0..MESSAGES).map(|_| take()).collect::<Result<_, _>>()?;
        Ok(Self {
            work_requests,
            free,
            open: None,
            bulk: BULK_SLOTS,
            note: CONTROL_SLOTS,
            bulk_owed: 0,
            control_owed: 0,
            read_reports: ReadReports::default(),
            sent: 0,
            received: 0,
            arrived: VecDeque::with_capacity(usize::from(BULK_SLOTS)),
            arrived_bytes: 0,
        })
    }

    /// Copies as much of `bytes` into messages as the credits allow, and returns that length.
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

    /// Whether credits for so many bytes are available.
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

    /// Sends the bulk message that is not full.
    pub(super) fn close_open(&mut self) {
        if let Some((slot, filled)) = self.open.take() {
            self.send(MessageKind::Bulk, slot, filled);
        }
    }

    /// Sends a control message with `body`; false without a credit.
    pub(super) fn note(&mut self, kind: MessageKind, body: &[u8]) -> bool {
        if self.note <= CONTROL_KEPT {
            return false;
        }
        self.send_control(kind, body)
    }

    /// Takes the credit for a write with immediate data; false without one.
    pub(super) fn reserve_control(&mut self) -> bool {
        let has_room = self.note > CONTROL_KEPT;
        self.note -= u16::from(has_room);
        has_room
    }

    fn send_control(&mut self, kind: MessageKind, body: &[u8]) -> bool {
        let Some(mut slot) = self.free.pop() else { return false };
        slot.bytes_mut()[PREFIX_BYTES..PREFIX_BYTES + body.len()].copy_from_slice(body);
        self.note -= 1;
        self.send(kind, slot, PREFIX_BYTES + body.len());
        true
    }

    fn send(&mut self, kind: MessageKind, mut slot: Lease, bytes: usize) {
        let taken = std::mem::take(&mut self.read_reports.frames);
        let (bulk, note) = (std::mem::take(&mut self.bulk_owed), std::mem::take(&mut self.control_owed));
        MessagePrefix { kind, taken, number: self.sent, bulk, note }.encode(slot.bytes_mut());
        self.sent = self.sent.wrapping_add(1);
        self.work_requests.send(slot, bytes);
    }

    /// The next message reports that the payload of one more frame was read.
    pub(super) fn owe_borrowed(&mut self) {
        self.read_reports.frames += 1;
        self.read_reports.is_fresh = true;
    }

    /// Whether a turn must follow, because a report waits.
    pub(super) fn must_turn(&self) -> bool {
        self.read_reports.must_turn
    }

    /// Sends owed credits and reports that no other message carried, and posts the batch.
    pub(super) fn send_owed(&mut self) -> Result<(), ConnectionError> {
        self.close_open();
        let must = self.control_owed >= CONTROL_OWED && self.note > 0;
        let reports = &mut self.read_reports;
        reports.must_turn = std::mem::take(&mut reports.is_fresh) && reports.frames > 0;
        let is_due = reports.frames > 0 && !reports.must_turn || self.bulk_owed >= BULK_OWED;
        let should = is_due && self.note > CONTROL_KEPT;
        if must || should {
            self.send_control(MessageKind::CreditsOnly, &[]);
        }
        self.work_requests.ring_doorbell()
    }

    /// Sends the first message, which reports that this side is ready.
    pub(super) fn greet(&mut self) -> Result<(), ConnectionError> {
        self.send_control(MessageKind::CreditsOnly, &[]);
        self.work_requests.ring_doorbell()
    }

    /// Returns a slot whose message was sent.
    pub(super) fn reclaim_slot(&mut self, slot: Lease) {
        self.free.push(slot);
    }

    /// Decodes a message's prefix and takes its credits. Keeps a bulk message; returns a control message for its
    /// handler.
    pub(super) fn accept_message(
        &mut self,
        message: ReceivedMessage,
    ) -> Result<(MessagePrefix, Option<ReceivedMessage>), ConnectionError> {
        let ReceivedMessage { slot, bytes } = message;
        let prefix = MessagePrefix::decode(&slot.bytes()[..bytes], self.received)?;
        self.received = self.received.wrapping_add(1);
        (self.bulk, self.note) = (self.bulk.saturating_add(prefix.bulk), self.note.saturating_add(prefix.note));
        if self.bulk > BULK_SLOTS || self.note > CONTROL_SLOTS {
            let (bulk, note) = (prefix.bulk, prefix.note);
            return Err(ConnectionError::Broken(format!(
                "{bulk} bulk and {note} control credits were returned, more than were in use"
            )));
        }
        if prefix.kind != MessageKind::Bulk {
            return Ok((prefix, Some(ReceivedMessage { slot, bytes })));
        }
        // The peer has no credit for more before these slots are returned.
        if usize::from(self.bulk_owed) + self.arrived.len() == usize::from(BULK_SLOTS) {
            return Err(ConnectionError::Broken(format!("more than {BULK_SLOTS} bulk messages without credit")));
        }
        self.arrived_bytes += bytes - PREFIX_BYTES;
        self.arrived.push_back(UnreadMessage { slot, start: PREFIX_BYTES, end: bytes });
        Ok((prefix, None))
    }

    /// Reposts the slot of a control message, or of immediate data, that was handled.
    pub(super) fn control_read(&mut self, slot: Lease) -> Result<(), ConnectionError> {
        if self.control_owed == CONTROL_SLOTS {
            return Err(ConnectionError::Broken(format!("more than {CONTROL_SLOTS} control messages without credit")));
        }
        self.work_requests.receive(slot);
        self.control_owed += 1;
        Ok(())
    }

    /// Bytes of frames that can be read.
    pub(super) fn available(&self) -> usize {
        self.arrived_bytes
    }

    /// Reads available bytes.
    pub(super) fn take(&mut self, into: &mut [u8]) {
        let mut taken = 0;
        self.pass(into.len(), |bytes| {
            into[taken..taken + bytes.len()].copy_from_slice(bytes);
            taken += bytes.len();
        });
    }

    /// Skips available bytes.
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
            let UnreadMessage { slot, .. } = self.arrived.pop_front().expect("it was just looked at");
            self.work_requests.receive(slot);
            self.bulk_owed += 1;
        }
    }
}

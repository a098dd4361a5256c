//! Send side of a verbs connection.
//!
//! The connecting side puts a long payload's address, in a buffer or in staging, in the frame's place; the frame is
//! returned when the peer reports that it has read it. The accepting side puts nothing there: the frame waits, behind
//! earlier ones, until the peer sends addresses, and the payloads are then written to them. Payloads of an answer whose
//! request has named their [addresses](super::answers) are written before the frame.

use std::collections::VecDeque;
use std::sync::Arc;

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::Lease;
use pserver_core::port::{Event, Outgoing, Payloads};
use pserver_core::wire::{Flags, Frame};

use super::answers::PayloadDestinations;
use super::credits::CreditedMessages;
use super::provider::{Operation, RemoteAddress};
use super::registry::VerbsCounters;
use super::staging::VerbsStaging;
use super::wire_format::{REMOTE_BUFFER_BYTES, RemoteBuffer};
use super::work_requests::WriteSource;
use super::{ConnectionError, ConnectionSide, INLINE_BYTES_MAX, MESSAGES};
use crate::connection::{SendProgress, TicketedBody};
use crate::payload::write_checksums;

/// A longer head's memory is not kept for the next one.
const HEAD_BYTES_KEPT: usize = 256 * 1024;

/// Queued frames, and sent frames whose payloads are in flight.
pub(super) struct VerbsSender {
    side: ConnectionSide,
    is_checked: bool,
    queue: VecDeque<VerbsQueuedFrame>,
    /// Payload bytes of the frames that were not returned to the caller.
    held: u64,
    /// Connecting side: frames whose payloads the peer reads, in order.
    borrowed: VecDeque<VerbsBorrowedFrame>,
    /// Accepting side: frames that wait for addresses, in order; then those whose last write is posted, in the order of
    /// these writes. None stands for the first frame of the queue, whose head is sent behind its payloads.
    offered: VecDeque<OfferedFrame>,
    written: VecDeque<Option<TicketedBody>>,
    /// The immediate data of the next last write: the frames written so far.
    numbers: u32,
    staging: VerbsStaging,
    counters: Arc<VerbsCounters>,
    recycled: RecycledMemory,
}

/// Memory of returned frames, for reuse: a frame of a known shape allocates nothing.
#[derive(Default)]
struct RecycledMemory {
    heads: Vec<Vec<u8>>,
    copied_to_staging: Vec<Vec<Lease>>,
    offers: Vec<(Vec<usize>, VecDeque<RemoteBuffer>)>,
}

struct VerbsQueuedFrame {
    ticket: Ticket,
    head: Vec<u8>,
    body: Payloads,
    /// The writes of its long payloads before its head, where the peer has named their destinations.
    writes: Option<NamedWrites>,
    /// The next slice: zero is the head, `k` is payload `k - 1`.
    slice: usize,
    /// Bytes of that slice that were sent.
    offset: usize,
    /// Long payloads, and the staging of those that were copied.
    long: usize,
    copied_to_staging: Vec<Lease>,
}

/// Writes of long payloads before the head of their frame.
#[derive(Default)]
struct NamedWrites {
    destinations: PayloadDestinations,
    /// Long payloads that were looked at.
    next: usize,
    /// Whether any was posted, and whether the last one was just now.
    is_begun: bool,
    is_last_new: bool,
}

struct VerbsBorrowedFrame {
    /// None when every payload was copied and the body was returned.
    parcels: Option<TicketedBody>,
    /// Staging that is freed when the peer has read it.
    copied_to_staging: Vec<Lease>,
}

struct OfferedFrame {
    parcels: TicketedBody,
    /// Body indices of the long payloads.
    long: Vec<usize>,
    destinations: VecDeque<RemoteBuffer>,
    /// Destinations received, and payloads written.
    granted: usize,
    written: usize,
}

impl VerbsSender {
    pub(super) fn new(
        side: ConnectionSide,
        is_checked: bool,
        staging: VerbsStaging,
        counters: &Arc<VerbsCounters>,
    ) -> Self {
        Self {
            side,
            is_checked,
            queue: VecDeque::new(),
            held: 0,
            borrowed: VecDeque::new(),
            offered: VecDeque::new(),
            written: VecDeque::new(),
            numbers: 0,
            staging,
            counters: Arc::clone(counters),
            recycled: RecycledMemory::default(),
        }
    }

    /// Frames that were not returned to the caller.
    pub(super) fn len(&self) -> usize {
        self.queue.len() + self.borrowed.len() + self.offered.len() + self.written.len()
    }

    /// Memory for payloads that a card cannot reach where they lie.
    pub(super) fn staging(&self) -> &VerbsStaging {
        &self.staging
    }

    /// Payload bytes of the frames that were not returned to the caller.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// Appends a frame to the queue. `named` follows the head of a request: where the long values of its answer go.
    /// `destinations` are what the peer has named so for this answer.
    pub(super) fn push(
        &mut self,
        ticket: Ticket,
        mut frame: Frame,
        body: Payloads,
        (named, destinations): (&[u8], Option<PayloadDestinations>),
    ) {
        if self.is_checked {
            write_checksums(&mut frame, &body);
        } else if !body.is_empty() {
            // The card checks every packet, so payloads need no checksum.
            frame.head.flags = frame.head.flags.with(Flags::UNCHECKED);
        }
        let (mut head, copied_to_staging) =
            (self.recycled.heads.pop().unwrap_or_default(), self.recycled.copied_to_staging.pop().unwrap_or_default());
        frame.encode_into(&mut head);
        head.extend_from_slice(named);
        self.held += body_bytes(&body);
        let writes = destinations.map(|destinations| NamedWrites { destinations, ..NamedWrites::default() });
        self.queue.push_back(VerbsQueuedFrame {
            ticket,
            head,
            body,
            writes,
            slice: 0,
            offset: 0,
            long: 0,
            copied_to_staging,
        });
    }

    /// Sends until the queue is empty, credits are exhausted, or `bytes_max` bytes were moved.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        messages: &mut CreditedMessages,
        bytes_max: usize,
        events: &mut Vec<Event>,
    ) -> Result<SendProgress, ConnectionError> {
        let mut moved = 0;
        self.write_granted(messages)?;
        while let Some(first) = self.queue.front_mut() {
            if moved >= bytes_max {
                return Ok(SendProgress::BudgetSpent);
            }
            let stepped = first.step(self.side, messages, &mut self.staging, &self.counters)?;
            if first.writes.as_mut().is_some_and(NamedWrites::has_posted_last) {
                self.written.push_back(None);
            }
            let Some(bytes) = stepped else { return Ok(SendProgress::Full) };
            moved += bytes;
            if first.slice > first.body.len() {
                self.finish(peer, events);
            }
        }
        Ok(SendProgress::All)
    }

    /// The messages of the first frame were sent; its long payloads may be outstanding.
    fn finish(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        let VerbsQueuedFrame { ticket, head, body, writes, long, copied_to_staging, .. } =
            self.queue.pop_front().expect("the caller looked");
        if head.capacity() <= HEAD_BYTES_KEPT {
            self.recycled.heads.push(head);
        }
        if writes.is_some() {
            self.recycled.copied_to_staging.push(copied_to_staging);
            match self.written.iter_mut().find(|frame| frame.is_none()) {
                Some(frame) => *frame = Some((ticket, body)),
                None => self.report_sent(peer, (ticket, body), events),
            }
        } else if long == 0 {
            self.report_sent(peer, (ticket, body), events);
            self.recycled.copied_to_staging.push(copied_to_staging);
        } else if self.side == ConnectionSide::Accepting {
            let (mut long, destinations) = self.recycled.offers.pop().unwrap_or_default();
            long.extend((0..body.len()).filter(|index| body[*index].len() > INLINE_BYTES_MAX));
            self.offered.push_back(OfferedFrame {
                parcels: (ticket, body),
                long,
                destinations,
                granted: 0,
                written: 0,
            });
            self.recycled.copied_to_staging.push(copied_to_staging);
        } else if long == copied_to_staging.len() {
            self.report_sent(peer, (ticket, body), events);
            self.borrowed.push_back(VerbsBorrowedFrame { parcels: None, copied_to_staging });
        } else {
            events.push(Event::Transmitted { peer, ticket });
            self.borrowed.push_back(VerbsBorrowedFrame { parcels: Some((ticket, body)), copied_to_staging });
        }
    }

    /// The peer has read the payloads of so many frames.
    pub(super) fn borrowed_returned(
        &mut self,
        peer: PeerId,
        frames: u16,
        events: &mut Vec<Event>,
    ) -> Result<(), ConnectionError> {
        for _ in 0..frames {
            let borrowed = self.borrowed.pop_front();
            let borrowed = borrowed.ok_or_else(|| {
                ConnectionError::Broken("the peer reports reading a payload that was not sent".to_owned())
            })?;
            self.held -= borrowed.parcels.as_ref().map_or(0, |(_, body)| body_bytes(body));
            events.extend(borrowed.parcels.map(|(ticket, body)| Event::Sent { peer, ticket, body }));
            let mut copied_to_staging = borrowed.copied_to_staging;
            copied_to_staging.clear();
            self.recycled.copied_to_staging.push(copied_to_staging);
        }
        Ok(())
    }

    /// The peer sent the destinations of payloads.
    pub(super) fn granted(&mut self, bytes: &[u8]) -> Result<(), ConnectionError> {
        let (destinations, rest) = bytes.as_chunks::<REMOTE_BUFFER_BYTES>();
        if !rest.is_empty() || self.side == ConnectionSide::Connecting {
            return Err(ConnectionError::Broken(format!(
                "{} bytes of destinations; expected whole ones, from the connecting side",
                bytes.len()
            )));
        }
        for place in destinations.iter().map(RemoteBuffer::decode) {
            let waits = self.offered.iter_mut().find(|offered| offered.granted < offered.long.len());
            let Some(offered) = waits else {
                return Err(ConnectionError::Broken("a destination for a payload that was not offered".to_owned()));
            };
            let expected = offered.parcels.1[offered.long[offered.granted]].len();
            if place.bytes != 0 && place.bytes != expected {
                return Err(ConnectionError::Broken(format!(
                    "a destination of {} bytes for a payload of {expected}",
                    place.bytes
                )));
            }
            offered.granted += 1;
            offered.destinations.push_back(place);
        }
        Ok(())
    }

    /// Posts the writes of payloads with a destination, as far as the send queue has room.
    fn write_granted(&mut self, messages: &mut CreditedMessages) -> Result<(), ConnectionError> {
        while let Some(first) = self.offered.front_mut() {
            while let Some(place) = first.destinations.front().copied() {
                let is_last = first.written + 1 == first.long.len();
                if place.bytes == 0 && !is_last {
                    first.destinations.pop_front();
                    first.written += 1;
                    continue;
                }
                if messages.work_requests.room() <= MESSAGES as usize {
                    return Ok(());
                }
                let payload = &first.parcels.1[first.long[first.written]];
                let (write_source, key) = if place.bytes == 0 {
                    (WriteSource::Nothing, 0)
                } else {
                    match write_source(payload, &mut self.staging, &self.counters)? {
                        Some(write_source) => write_source,
                        None => return Ok(()),
                    }
                };
                if is_last && !messages.reserve_control() {
                    return Ok(());
                }
                let number = is_last.then_some(self.numbers);
                let remote = if place.bytes == 0 { RemoteAddress { address: 0, key: 0 } } else { place.remote };
                messages.work_requests.write(Operation::Write(remote, number), write_source, key, is_last);
                self.counters.moved(place.bytes as usize);
                first.destinations.pop_front();
                first.written += 1;
            }
            if first.written < first.long.len() {
                return Ok(());
            }
            self.numbers = self.numbers.wrapping_add(1);
            let OfferedFrame { parcels, mut long, destinations, .. } =
                self.offered.pop_front().expect("it was just looked at");
            self.written.push_back(Some(parcels));
            long.clear();
            self.recycled.offers.push((long, destinations));
        }
        Ok(())
    }

    /// The last write of the oldest written frame has completed.
    pub(super) fn write_completed(&mut self, peer: PeerId, events: &mut Vec<Event>) {
        let written = self.written.pop_front().expect("one last write of each frame was posted");
        // A frame whose head was not sent yet is reported then.
        written.into_iter().for_each(|frame| self.report_sent(peer, frame, events));
    }

    fn report_sent(&mut self, peer: PeerId, (ticket, body): TicketedBody, events: &mut Vec<Event>) {
        self.held -= body_bytes(&body);
        events.push(Event::Sent { peer, ticket, body });
    }

    /// Returns the frames of which nothing was sent.
    pub(super) fn take_unbegun(&mut self) -> Vec<TicketedBody> {
        let begun = self.queue.front().is_some_and(VerbsQueuedFrame::is_begun);
        let unbegun: Vec<TicketedBody> =
            self.queue.drain(usize::from(begun)..).map(|shipment| (shipment.ticket, shipment.body)).collect();
        self.held -= unbegun.iter().map(|(_, body)| body_bytes(body)).sum::<u64>();
        unbegun
    }

    /// Deregisters the memory that peers were told of, also for sending to it; whether they can access it no more.
    pub(super) fn end_memory(&self) -> bool {
        self.staging.registry().end()
    }

    /// Returns every frame that is queued or in flight. The queue pair is closed.
    pub(super) fn take_all(&mut self) -> Vec<TicketedBody> {
        self.held = 0;
        let borrowed = self.borrowed.drain(..).filter_map(|borrowed| borrowed.parcels);
        let offered = self.offered.drain(..).map(|offered| offered.parcels);
        let queued = self.queue.drain(..).map(|shipment| (shipment.ticket, shipment.body));
        borrowed.chain(self.written.drain(..).flatten()).chain(offered).chain(queued).collect()
    }
}

fn body_bytes(body: &[Outgoing]) -> u64 {
    body.iter().map(|parcel| u64::from(parcel.len())).sum()
}

/// The memory a payload is written from: its own where it can be registered, else a copy in staging.
fn write_source(
    payload: &Outgoing,
    staging: &mut VerbsStaging,
    counters: &VerbsCounters,
) -> Result<Option<(WriteSource, u32)>, ConnectionError> {
    if let Outgoing::Value(value) = payload
        && let Some(key) = staging.registry().local_key_of(value.lease())?
    {
        return Ok(Some((WriteSource::Value(Arc::clone(value)), key)));
    }
    let Some(lease) = copied_to_staging(payload, staging, counters)? else { return Ok(None) };
    let key = staging.registry().local_key_of_own(&lease)?;
    Ok(Some((WriteSource::Staged(lease), key)))
}

/// The remote key of a payload that the peer can read directly; nothing when it needs staging.
fn remote_key_in_place(payload: &Outgoing, staging: &VerbsStaging) -> Result<Option<u32>, ConnectionError> {
    let Outgoing::Loan(loan) = payload else { return Ok(None) };
    let Some((memory, offset)) = loan.mapped() else { return Ok(None) };
    Ok(staging.registry().remote_key_within(memory, offset)?)
}

fn copied_to_staging(
    payload: &Outgoing,
    staging: &mut VerbsStaging,
    counters: &VerbsCounters,
) -> Result<Option<Lease>, ConnectionError> {
    let Some(mut lease) = staging.take(payload.len())? else { return Ok(None) };
    lease.bytes_mut().copy_from_slice(payload.bytes());
    counters.copied(payload.len() as usize);
    Ok(Some(lease))
}

impl NamedWrites {
    /// Whether the last write was posted since the last call.
    fn has_posted_last(&mut self) -> bool {
        std::mem::take(&mut self.is_last_new)
    }

    /// Posts the writes, as far as the send queue has room; the bytes moved, or nothing when it has none.
    fn step(
        &mut self,
        body: &[Outgoing],
        messages: &mut CreditedMessages,
        staging: &mut VerbsStaging,
        counters: &VerbsCounters,
    ) -> Result<Option<usize>, ConnectionError> {
        let mut moved = None;
        let long = body.iter().filter(|payload| payload.len() > INLINE_BYTES_MAX);
        for (payload, place) in long.zip(&self.destinations).skip(self.next) {
            if let Some(place) = place {
                if messages.work_requests.room() <= MESSAGES as usize {
                    return Ok(moved);
                }
                let Some((source, key)) = write_source(payload, staging, counters)? else { return Ok(moved) };
                let is_last = self.destinations[self.next + 1..].iter().all(Option::is_none);
                messages.work_requests.write(Operation::Write(place.remote, None), source, key, is_last);
                counters.moved(place.bytes as usize);
                (self.is_begun, self.is_last_new) = (true, is_last);
            }
            self.next += 1;
            moved = Some(moved.unwrap_or(0) + place.map_or(0, |place| place.bytes as usize));
        }
        Ok(moved)
    }
}

impl VerbsQueuedFrame {
    /// Whether a part of it was sent.
    fn is_begun(&self) -> bool {
        self.slice > 0 || self.offset > 0 || self.writes.as_ref().is_some_and(|writes| writes.is_begun)
    }

    /// Sends the next slice, or a part of it; the bytes moved, or nothing when credits are exhausted.
    fn step(
        &mut self,
        side: ConnectionSide,
        messages: &mut CreditedMessages,
        staging: &mut VerbsStaging,
        counters: &VerbsCounters,
    ) -> Result<Option<usize>, ConnectionError> {
        if let Some(writes) = self.writes.as_mut().filter(|writes| writes.next < writes.destinations.len()) {
            return writes.step(&self.body, messages, staging, counters);
        }
        if self.slice > 0 && self.body[self.slice - 1].len() > INLINE_BYTES_MAX {
            return self.put_reference(messages, staging, counters);
        }
        let bytes = match self.slice {
            0 => &self.head,
            payload => self.body[payload - 1].bytes(),
        };
        let (whole, moved) = (bytes.len(), messages.put(&bytes[self.offset..]));
        self.offset += moved;
        if self.slice > 0 {
            counters.copied(moved);
        }
        if self.offset == whole {
            (self.slice, self.offset) = (self.slice + 1, 0);
            if side == ConnectionSide::Accepting {
                self.skip_long();
            }
            return Ok(Some(moved));
        }
        Ok((moved > 0).then_some(moved))
    }

    /// The accepting side sends nothing in the place of long payloads. The last message of a frame tells the peer that
    /// the frame is offered.
    fn skip_long(&mut self) {
        while self.body.get(self.slice - 1).is_some_and(|payload| payload.len() > INLINE_BYTES_MAX) {
            (self.long, self.slice) = (self.long + 1, self.slice + 1);
        }
    }

    /// Sends the address of a long payload of the connecting side.
    fn put_reference(
        &mut self,
        messages: &mut CreditedMessages,
        staging: &mut VerbsStaging,
        counters: &VerbsCounters,
    ) -> Result<Option<usize>, ConnectionError> {
        let mut moved = 0;
        if !messages.has_room(REMOTE_BUFFER_BYTES) {
            return Ok(None);
        }
        let payload = &self.body[self.slice - 1];
        let (address, key) = match remote_key_in_place(payload, staging)? {
            Some(key) => (payload.bytes().as_ptr().expose_provenance(), key),
            None => {
                let Some(lease) = copied_to_staging(payload, staging, counters)? else { return Ok(None) };
                moved = payload.len() as usize;
                let key = staging.registry().remote_key_of(&lease)?;
                let address = lease.bytes().as_ptr().expose_provenance();
                self.copied_to_staging.push(lease);
                (address, key)
            }
        };
        let place = RemoteBuffer { remote: RemoteAddress { address: address as u64, key }, bytes: payload.len() };
        let put = messages.put(&place.encode());
        assert_eq!(put, REMOTE_BUFFER_BYTES, "there was room for it");
        self.long += 1;
        self.slice += 1;
        Ok(Some(moved))
    }
}

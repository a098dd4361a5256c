//! Receive side of a verbs connection.
//!
//! The accepting side reads long payloads from the addresses that the frame names. The connecting side sends the
//! addresses of its buffers, and the accepting side writes them. The next frame is read while long payloads of earlier
//! ones are in flight: several receives are posted at once and complete in the order of their heads.

use std::collections::VecDeque;
use std::sync::Arc;

use pserver_core::checksum::checksum;
use pserver_core::ids::PeerId;
use pserver_core::limits::RECEIVES_MAX;
use pserver_core::memory::Lease;
use pserver_core::port::{Event, Incoming, ReceiveBuffers};
use pserver_core::wire::{Flags, Frame, HEADER_BYTES, Prefix, WireError};
use smallvec::SmallVec;

use super::answers::{AnswerBuffers, AnswerReceive};
use super::credits::CreditedMessages;
use super::provider::Operation;
use super::registry::VerbsCounters;
use super::staging::VerbsStaging;
use super::wire_format::{MessageKind, PREFIX_BYTES, REMOTE_BUFFER_BYTES, RemoteBuffer};
use super::work_requests::ReceiveIndex;
use super::{ConnectionError, ConnectionSide, INLINE_BYTES_MAX, MESSAGES, SLOT_BYTES};
use crate::payload::next_with_payload;

/// A longer buffer for entry tables and control messages is not kept.
const REST_BYTES_KEPT: usize = 256 * 1024;
/// Buffer addresses that one control message holds.
const BUFFERS_PER_MESSAGE: usize = (SLOT_BYTES as usize - PREFIX_BYTES) / REMOTE_BUFFER_BYTES;

/// State of the receive side.
pub(super) struct VerbsReceiver {
    side: ConnectionSide,
    insists: bool,
    state: VerbsReceiveState,
    /// The part of the entries, the control message and the named destinations that has arrived.
    rest: Vec<u8>,
    pub(super) answers: AnswerBuffers,
    /// Posted receives in the order of their heads, and the number of the first.
    posted_receives: VecDeque<VerbsPostedReceive>,
    first_number: u64,
    /// The immediate data that the peer's next last write carries.
    write_number: u32,
    staging: VerbsStaging,
    counters: Arc<VerbsCounters>,
    /// The body of a control message, and empty staging lists: kept so that nothing is allocated per frame.
    control_body: Vec<u8>,
    recycled: Vec<Vec<(usize, Lease)>>,
}

enum VerbsReceiveState {
    Header,
    Rest(Prefix),
    /// A frame without payload, which completes after those before it.
    CreditsOnly(Frame),
    /// The head was reported; its receive buffers are not posted.
    AwaitingBuffers(Frame),
    /// More messages of the last posted receive are expected, or the peer was not told all addresses.
    Payload,
}

/// A frame with posted receive buffers.
struct VerbsPostedReceive {
    write_number: u64,
    frame: Frame,
    buffers: ReceiveBuffers,
    /// Of an answer whose buffers were posted with the request: the request's entry of each buffer.
    entries: SmallVec<[Option<usize>; 1]>,
    /// The next entry and the next buffer.
    entry: usize,
    place: usize,
    /// Bytes that the next buffer has received.
    filled: usize,
    /// Long payloads that have not arrived.
    missing: usize,
    /// Long payloads in all.
    long: usize,
    /// Staging of the connecting side, by buffer index.
    staged: Vec<(usize, Lease)>,
    /// Long payloads whose buffers the peer was told, or that are being read from it.
    granted: usize,
}

/// The reason why reading stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum VerbsReceiveProgress {
    /// A head waits for its receive buffers.
    AwaitingBuffers,
    /// Nothing can be read until a message or a completion arrives.
    Empty,
    /// The turn's budget is spent.
    BudgetSpent,
}

impl VerbsReceiver {
    pub(super) fn new(
        side: ConnectionSide,
        insists: bool,
        staging: VerbsStaging,
        counters: &Arc<VerbsCounters>,
    ) -> Self {
        Self {
            side,
            insists,
            state: VerbsReceiveState::Header,
            rest: Vec::new(),
            answers: AnswerBuffers::default(),
            posted_receives: VecDeque::with_capacity(RECEIVES_MAX),
            first_number: 0,
            write_number: 0,
            staging,
            counters: Arc::clone(counters),
            control_body: Vec::with_capacity(BUFFERS_PER_MESSAGE * REMOTE_BUFFER_BYTES),
            recycled: Vec::with_capacity(RECEIVES_MAX),
        }
    }

    /// Reads until nothing is available, a head waits for its buffers, or the budget is spent.
    pub(super) fn turn(
        &mut self,
        peer: PeerId,
        messages: &mut CreditedMessages,
        (bytes_max, frames_max): (usize, usize),
        events: &mut Vec<Event>,
    ) -> Result<VerbsReceiveProgress, ConnectionError> {
        let (before, mut moved) = (events.len(), 0);
        loop {
            if moved >= bytes_max || events.len() - before >= frames_max {
                return Ok(VerbsReceiveProgress::BudgetSpent);
            }
            if self.finish_oldest(peer, messages, events)? {
                continue;
            }
            match self.advance(peer, messages, events)? {
                Some(bytes) => moved += bytes,
                None if matches!(self.state, VerbsReceiveState::AwaitingBuffers(_)) => {
                    return Ok(VerbsReceiveProgress::AwaitingBuffers);
                }
                None => return Ok(VerbsReceiveProgress::Empty),
            }
        }
    }

    /// Posts the receive buffers for the reported head.
    ///
    /// # Panics
    /// Without a waiting head, or with buffers of other lengths: the session counts them.
    pub(super) fn post_receive(&mut self, buffers: ReceiveBuffers) {
        let VerbsReceiveState::AwaitingBuffers(frame) = std::mem::replace(&mut self.state, VerbsReceiveState::Payload)
        else {
            panic!("buffers were handed over, but no head waits for them");
        };
        let expected = frame.entries.iter().map(|entry| entry.bytes).filter(|bytes| *bytes > 0);
        assert!(expected.eq(buffers.iter().map(Incoming::len)), "land: one place for each entry with a payload");
        self.add_receive(frame, AnswerReceive { buffers, ..AnswerReceive::default() });
    }

    /// Adds the receive of a frame.
    fn add_receive(&mut self, frame: Frame, receive: AnswerReceive) {
        let AnswerReceive { buffers, entries, are_written } = receive;
        let long = buffers.iter().filter(|place| place.len() > INLINE_BYTES_MAX).count();
        self.posted_receives.push_back(VerbsPostedReceive {
            write_number: self.first_number + self.posted_receives.len() as u64,
            frame,
            buffers,
            entries,
            entry: 0,
            place: 0,
            filled: 0,
            missing: if are_written { 0 } else { long },
            long,
            staged: self.recycled.pop().unwrap_or_default(),
            granted: if are_written { long } else { 0 },
        });
    }

    /// Returns the buffers that were not filled, but for those of answers, which are with their requests again. The
    /// queue pair is closed, and its buffers are back.
    pub(super) fn take_unfilled(&mut self) -> ReceiveBuffers {
        let mut unfilled = ReceiveBuffers::new();
        for VerbsPostedReceive { frame, buffers, entries, .. } in self.posted_receives.drain(..) {
            if entries.is_empty() {
                unfilled.extend(buffers);
            } else {
                self.answers.posted.take_back(frame.head.request, buffers, &entries);
            }
        }
        unfilled
    }

    /// Whether the stream is between two frames.
    pub(super) fn is_between(&self, messages: &CreditedMessages) -> bool {
        matches!(self.state, VerbsReceiveState::Header) && self.posted_receives.is_empty() && messages.available() == 0
    }

    /// Takes back a buffer that a read was filling; `is_filled` says whether the read succeeded.
    pub(super) fn read_completed(
        &mut self,
        index: ReceiveIndex,
        mut place: Incoming,
        staged: Option<Lease>,
        is_filled: bool,
    ) {
        let behind = usize::try_from(index.posted - self.first_number).expect("few land at once");
        let posted = self.posted_receives.get_mut(behind).expect("a frame whose payload is being read has not landed");
        if is_filled {
            posted.missing -= 1;
            if let Some(lease) = staged {
                self.counters.copied(lease.bytes().len());
                place.bytes_mut().copy_from_slice(lease.bytes());
            }
        }
        posted.buffers[index.place] = place;
    }

    /// The peer's immediate data reports that it has written a frame's payloads.
    pub(super) fn writes_arrived(&mut self, write_number: u32) -> Result<(), ConnectionError> {
        let expected = self.write_number;
        let mut waiting = self.posted_receives.iter_mut().filter(|posted| posted.missing > 0);
        let asked = waiting.next().filter(|posted| write_number == expected && posted.granted == posted.long);
        let Some(posted) = asked else {
            let text = format!(
                "payloads were written as number {write_number}; expected {expected}, after buffers were posted"
            );
            return Err(ConnectionError::Broken(text));
        };
        self.write_number = self.write_number.wrapping_add(1);
        posted.missing = 0;
        for (index, lease) in posted.staged.drain(..) {
            self.counters.copied(lease.bytes().len());
            posted.buffers[index].bytes_mut().copy_from_slice(lease.bytes());
        }
        Ok(())
    }

    /// One step; the bytes moved, or nothing when it must wait.
    fn advance(
        &mut self,
        peer: PeerId,
        messages: &mut CreditedMessages,
        events: &mut Vec<Event>,
    ) -> Result<Option<usize>, ConnectionError> {
        match &mut self.state {
            VerbsReceiveState::Header => {
                if messages.available() < HEADER_BYTES || self.posted_receives.len() == RECEIVES_MAX {
                    return Ok(None);
                }
                let mut header = [0; HEADER_BYTES];
                messages.take(&mut header);
                let prefix = Prefix::decode(&header)?;
                if self.insists && prefix.head().flags.contains(Flags::UNCHECKED) {
                    return Err(WireError::Unchecked.into());
                }
                self.state = VerbsReceiveState::Rest(prefix);
                Ok(Some(HEADER_BYTES))
            }
            VerbsReceiveState::Rest(prefix) => {
                let named = named_bytes(prefix);
                let wanted = prefix.rest_bytes() + named - self.rest.len();
                let step = messages.available().min(wanted);
                let begin = self.rest.len();
                self.rest.resize(begin + step, 0);
                messages.take(&mut self.rest[begin..]);
                if step < wanted {
                    return Ok((step > 0).then_some(step));
                }
                let (rest, destinations) = self.rest.split_at(self.rest.len() - named);
                let mut frame = prefix.finish(rest)?;
                if frame.head.flags.contains(Flags::NAMED) {
                    if self.side == ConnectionSide::Connecting {
                        return Err(ConnectionError::Broken("destinations from the accepting side".to_owned()));
                    }
                    frame.head.flags = frame.head.flags.without(Flags::NAMED);
                    self.answers.named.add(&frame, destinations)?;
                }
                self.rest.clear();
                self.rest.shrink_to(REST_BYTES_KEPT);
                self.report(peer, frame, events);
                Ok(Some(step))
            }
            VerbsReceiveState::CreditsOnly(_) if !self.posted_receives.is_empty() => Ok(None),
            VerbsReceiveState::CreditsOnly(_) => {
                if let VerbsReceiveState::CreditsOnly(frame) =
                    std::mem::replace(&mut self.state, VerbsReceiveState::Header)
                {
                    self.report_received(peer, frame, ReceiveBuffers::new(), events);
                }
                Ok(Some(0))
            }
            VerbsReceiveState::AwaitingBuffers(_) => Ok(None),
            VerbsReceiveState::Payload => {
                let posted = self.posted_receives.back_mut().expect("its buffers are there");
                if posted.place < posted.buffers.len() {
                    return posted.step(self.side, messages, &mut self.staging, &self.counters);
                }
                // All messages of the frame have arrived, so the peer has offered it.
                if self.side == ConnectionSide::Connecting && posted.granted < posted.long {
                    posted.send_destinations(messages, &mut self.staging, &mut self.control_body)?;
                    if posted.granted < posted.long {
                        return Ok(None);
                    }
                }
                self.state = VerbsReceiveState::Header;
                Ok(Some(0))
            }
        }
    }

    /// Reports the oldest posted receive if it is complete; whether it was.
    fn finish_oldest(
        &mut self,
        peer: PeerId,
        messages: &mut CreditedMessages,
        events: &mut Vec<Event>,
    ) -> Result<bool, ConnectionError> {
        let is_read = |behind: usize| behind > 0 || !matches!(self.state, VerbsReceiveState::Payload);
        match self.posted_receives.front() {
            Some(first_number) if first_number.missing == 0 && is_read(self.posted_receives.len() - 1) => {
                first_number.check()?
            }
            _ => return Ok(false),
        }
        let landed = self.posted_receives.pop_front().expect("it was just looked at");
        let VerbsPostedReceive { frame, buffers: body, long, staged, .. } = landed;
        self.first_number += 1;
        self.recycled.push(staged);
        if self.side == ConnectionSide::Accepting && long > 0 {
            messages.owe_borrowed();
        }
        self.report_received(peer, frame, body, events);
        Ok(true)
    }

    fn report_received(&mut self, peer: PeerId, frame: Frame, body: ReceiveBuffers, events: &mut Vec<Event>) {
        let (request, unused) = (frame.head.request, self.answers.posted.conclude(&frame));
        events.push(Event::Received { peer, frame, body });
        events.extend(unused.map(|into| Event::AnswerReturned { peer, request, into }));
    }

    fn report(&mut self, peer: PeerId, frame: Frame, events: &mut Vec<Event>) {
        self.state = if frame.payload_bytes() == 0 {
            VerbsReceiveState::CreditsOnly(frame)
        } else if let Some(receive) = self.answers.posted.take(&frame) {
            self.add_receive(frame, receive);
            VerbsReceiveState::Payload
        } else {
            events.push(Event::Head { peer, frame: frame.clone() });
            VerbsReceiveState::AwaitingBuffers(frame)
        };
    }
}

impl VerbsPostedReceive {
    /// Receives the next payload, or the part of it that is available.
    fn step(
        &mut self,
        side: ConnectionSide,
        messages: &mut CreditedMessages,
        staging: &mut VerbsStaging,
        counters: &VerbsCounters,
    ) -> Result<Option<usize>, ConnectionError> {
        self.entry = next_with_payload(&self.frame, self.entry);
        let bytes = self.frame.entries[self.entry].bytes;
        let moved = if bytes <= INLINE_BYTES_MAX {
            let step = messages.available().min(bytes as usize - self.filled);
            match &mut self.buffers[self.place] {
                Incoming::Discard { .. } => messages.skip(step),
                place => messages.take(&mut place.bytes_mut()[self.filled..self.filled + step]),
            }
            counters.copied(step);
            self.filled += step;
            if self.filled < bytes as usize {
                return Ok((step > 0).then_some(step));
            }
            step
        } else if side == ConnectionSide::Accepting {
            match self.read_remote(bytes, messages, staging, counters)? {
                Some(moved) => moved,
                None => return Ok(None),
            }
        } else {
            0
        };
        (self.entry, self.place, self.filled) = (self.entry + 1, self.place + 1, 0);
        Ok(Some(moved))
    }

    /// Posts the read of a long payload; its length, or nothing when it must wait.
    fn read_remote(
        &mut self,
        bytes: u32,
        messages: &mut CreditedMessages,
        staging: &mut VerbsStaging,
        counters: &VerbsCounters,
    ) -> Result<Option<usize>, ConnectionError> {
        if messages.available() < REMOTE_BUFFER_BYTES || messages.work_requests.room() <= MESSAGES as usize {
            return Ok(None);
        }
        let place = &self.buffers[self.place];
        let (key, staged) = match place {
            Incoming::Discard { .. } => (None, None),
            Incoming::Chunk { lease, .. } => (staging.registry().local_key_of(lease)?, None),
            Incoming::Loan(_) => {
                let Some(lease) = staging.take(bytes)? else { return Ok(None) };
                (Some(staging.registry().local_key_of_own(&lease)?), Some(lease))
            }
        };
        let mut there = [0; REMOTE_BUFFER_BYTES];
        messages.take(&mut there);
        let there = RemoteBuffer::decode(&there);
        if there.bytes != bytes {
            return Err(ConnectionError::Broken(format!(
                "a payload of {bytes} bytes was announced with {} bytes",
                there.bytes
            )));
        }
        self.granted += 1;
        let Some(key) = key else {
            // A discarded payload is not read.
            assert!(matches!(place, Incoming::Discard { .. }), "nothing lands in another process's memory");
            self.missing -= 1;
            return Ok(Some(0));
        };
        let place = std::mem::replace(&mut self.buffers[self.place], Incoming::Discard { bytes });
        let index = ReceiveIndex { posted: self.write_number, place: self.place };
        let index = (index, self.granted == self.long);
        messages.work_requests.read(Operation::Read(there.remote), index, place, staged, key);
        counters.moved(bytes as usize);
        Ok(Some(bytes as usize))
    }

    /// Sends the addresses of the long buffers, as far as credits allow.
    fn send_destinations(
        &mut self,
        messages: &mut CreditedMessages,
        staging: &mut VerbsStaging,
        control_body: &mut Vec<u8>,
    ) -> Result<(), ConnectionError> {
        control_body.clear();
        let staged = self.staged.len();
        let long = self.buffers.iter_mut().enumerate().filter(|(_, place)| place.len() > INLINE_BYTES_MAX);
        for (index, place) in long.skip(self.granted).take(BUFFERS_PER_MESSAGE) {
            if matches!(place, Incoming::Discard { .. }) {
                control_body.extend(RemoteBuffer::DISCARDED.encode());
                continue;
            }
            let buffer = match staging.in_place(place)? {
                Some(buffer) => buffer,
                None => {
                    let Some(mut lease) = staging.take(place.len())? else { break };
                    let key = staging.registry().remote_key_of(&lease)?;
                    let buffer = RemoteBuffer::of(lease.bytes_mut(), key);
                    self.staged.push((index, lease));
                    buffer
                }
            };
            control_body.extend(buffer.encode());
        }
        if !control_body.is_empty() && messages.note(MessageKind::Destinations, control_body) {
            self.granted += control_body.len() / REMOTE_BUFFER_BYTES;
        } else {
            self.staged.truncate(staged);
        }
        Ok(())
    }

    /// Compares the payloads with their checksums, where the frame has them.
    fn check(&self) -> Result<(), WireError> {
        if self.frame.head.flags.contains(Flags::UNCHECKED) {
            return Ok(());
        }
        let entries = (0..).zip(&self.frame.entries).filter(|(_, entry)| entry.bytes > 0);
        for ((entry, _), place) in entries.zip(&self.buffers) {
            if !matches!(place, Incoming::Discard { .. }) {
                self.frame.check_payload(entry, checksum(place.bytes()))?;
            }
        }
        Ok(())
    }
}

/// Bytes of the destinations that follow a head.
fn named_bytes(prefix: &Prefix) -> usize {
    if prefix.head().flags.contains(Flags::NAMED) { prefix.entries() * REMOTE_BUFFER_BYTES } else { 0 }
}

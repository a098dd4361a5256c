//! Answers whose receive buffers are posted with the requests.
//!
//! The connecting side knows where the values of an answer go when it sends the request. If all long buffers are
//! registered where they lie, the request names them: one destination for each of its entries. The accepting side then
//! writes the long values and sends the answer's head behind them, without asking. Both sides count the entries that
//! answers bring, and forget a request at the same frame.

use std::collections::BTreeMap;

use pserver_core::ids::{ChunkId, Ticket};
use pserver_core::port::{Incoming, ReceiveBuffers};
use pserver_core::wire::{Flags, Frame, Kind};
use smallvec::SmallVec;

use super::staging::VerbsStaging;
use super::wire_format::{REMOTE_BUFFER_BYTES, RemoteBuffer};
use super::{ConnectionError, INLINE_BYTES_MAX};

/// Destinations that a connection has named at once, at most: the accepting side keeps them. Later requests name none.
pub(super) const NAMED_MAX: usize = if cfg!(test) { 64 } else { 65_536 };

/// Where the accepting side writes the long payloads of a frame, in order; nothing for one that is discarded.
pub(super) type PayloadDestinations = SmallVec<[Option<RemoteBuffer>; 1]>;

/// The answers that a connection awaits or owes.
#[derive(Default)]
pub(super) struct AnswerBuffers {
    /// Of the connecting side.
    pub(super) posted: PostedAnswers,
    /// Of the accepting side.
    pub(super) named: NamedDestinations,
}

/// Receive buffers of answers, on the connecting side.
#[derive(Default)]
pub(super) struct PostedAnswers {
    by_request: BTreeMap<Ticket, PostedAnswer>,
    /// Destinations that were named and not forgotten.
    named: usize,
    /// The destinations of the last request, encoded.
    encoded: Vec<u8>,
}

/// Buffers for the values of an answer.
#[derive(Default)]
pub(super) struct AnswerReceive {
    pub(super) buffers: ReceiveBuffers,
    /// The request's entry of each buffer; nothing for one that discards.
    pub(super) entries: SmallVec<[Option<usize>; 1]>,
    /// Whether the peer has written the long ones before the head.
    pub(super) are_written: bool,
}

#[derive(Default)]
struct PostedAnswer {
    into: SmallVec<[Option<Incoming>; 1]>,
    /// The chunks of the entries, from when the request is sent.
    entries: RequestEntries,
    is_named: bool,
}

/// Destinations of answers, on the accepting side.
#[derive(Default)]
pub(super) struct NamedDestinations {
    by_request: BTreeMap<Ticket, NamedAnswer>,
    /// Destinations in all.
    named: usize,
}

struct NamedAnswer {
    destinations: SmallVec<[RemoteBuffer; 1]>,
    entries: RequestEntries,
}

/// The entries of a request.
#[derive(Default)]
struct RequestEntries {
    ids: SmallVec<[ChunkId; 1]>,
    /// Entries that no answer has brought.
    missing: usize,
    /// Every entry before this one was found, and so taken: answers mostly come in order.
    taken: usize,
}

impl PostedAnswers {
    /// Adds the buffers of a request's answer, one for each entry.
    pub(super) fn post(&mut self, request: Ticket, into: ReceiveBuffers) {
        let into = into.into_iter().map(Some).collect();
        let answer = PostedAnswer { into, entries: RequestEntries::default(), is_named: false };
        assert!(self.by_request.insert(request, answer).is_none(), "a request has one answer");
    }

    /// Prepares a request whose answer has buffers: what follows its head is returned, the destinations if they are
    /// named.
    pub(super) fn name(&mut self, frame: &mut Frame, staging: &VerbsStaging) -> &[u8] {
        self.encoded.clear();
        if let Some(answer) = self.by_request.get_mut(&frame.head.request) {
            assert_eq!(answer.into.len(), frame.entries.len(), "one buffer for each entry of the request");
            answer.entries = RequestEntries::of(frame);
            let may = self.named + frame.entries.len() <= NAMED_MAX;
            if may && encode(&mut answer.into, staging, &mut self.encoded) {
                answer.is_named = true;
                self.named += frame.entries.len();
                frame.head.flags = frame.head.flags.with(Flags::NAMED);
            } else {
                self.encoded.clear();
            }
        }
        &self.encoded
    }

    /// Takes the buffers for the values of an answer.
    pub(super) fn take(&mut self, frame: &Frame) -> Option<AnswerReceive> {
        let answer = self.sent(frame).filter(|_| frame.head.kind == Kind::Value)?;
        let PostedAnswer { into, entries, is_named } = answer;
        let mut taken = AnswerReceive { are_written: *is_named, ..AnswerReceive::default() };
        for entry in frame.entries.iter().filter(|entry| entry.bytes > 0) {
            let fits = |at: usize| into[at].as_ref().is_some_and(|place| place.len() == entry.bytes);
            let at = entries.find(entry.id, fits);
            let place = at.and_then(|at| into[at].take());
            taken.buffers.push(place.unwrap_or(Incoming::Discard { bytes: entry.bytes }));
            taken.entries.push(at);
        }
        Some(taken)
    }

    /// Counts what an answer has brought; the buffers that no value has filled, after the last one.
    pub(super) fn conclude(&mut self, frame: &Frame) -> Option<ReceiveBuffers> {
        let answer = self.sent(frame)?;
        if !answer.entries.conclude(frame) {
            return None;
        }
        let answer = self.by_request.remove(&frame.head.request)?;
        self.named -= if answer.is_named { answer.into.len() } else { 0 };
        let unused: ReceiveBuffers = answer.into.into_iter().flatten().collect();
        (!unused.is_empty()).then_some(unused)
    }

    /// The buffers for an answer to a request that was sent.
    fn sent(&mut self, answer: &Frame) -> Option<&mut PostedAnswer> {
        let posted = self.by_request.get_mut(&answer.head.request);
        posted.filter(|posted| posted.entries.missing > 0)
    }

    /// Takes back the buffers of an answer that was not received whole.
    pub(super) fn take_back(&mut self, request: Ticket, buffers: ReceiveBuffers, entries: &[Option<usize>]) {
        // A peer that answers more than was asked may have had the request forgotten: its buffers are returned alone.
        let answer = self.by_request.entry(request).or_default();
        for (buffer, at) in buffers.into_iter().zip(entries) {
            match at.map(|at| answer.into.get_mut(at)) {
                Some(Some(place)) => *place = Some(buffer),
                Some(None) => answer.into.push(Some(buffer)),
                None => {}
            }
        }
    }

    /// Returns all buffers. The queue pair is closed.
    pub(super) fn take_all(&mut self) -> Vec<(Ticket, ReceiveBuffers)> {
        self.named = 0;
        let all = std::mem::take(&mut self.by_request).into_iter();
        all.map(|(request, answer)| (request, answer.into.into_iter().flatten().collect())).collect()
    }
}

impl NamedDestinations {
    /// Adds the destinations that follow the head of a request.
    ///
    /// # Errors
    /// More than the connecting side may name.
    pub(super) fn add(&mut self, frame: &Frame, bytes: &[u8]) -> Result<(), ConnectionError> {
        let (destinations, rest) = bytes.as_chunks::<REMOTE_BUFFER_BYTES>();
        assert!(
            rest.is_empty() && destinations.len() == frame.entries.len(),
            "one destination for each entry was read"
        );
        let destinations: SmallVec<_> = destinations.iter().map(RemoteBuffer::decode).collect();
        self.named += destinations.len();
        let answer = NamedAnswer { destinations, entries: RequestEntries::of(frame) };
        if let Some(before) = self.by_request.insert(frame.head.request, answer) {
            self.named -= before.destinations.len();
        }
        if self.named > NAMED_MAX {
            return Err(ConnectionError::Broken(format!(
                "{} destinations of answers were named at once; expected at most {NAMED_MAX}",
                self.named
            )));
        }
        Ok(())
    }

    /// Takes the destinations of an answer's long payloads, and counts what it brings; nothing if none were named.
    pub(super) fn take(&mut self, frame: &Frame) -> Option<PayloadDestinations> {
        let answer = self.by_request.get_mut(&frame.head.request)?;
        let NamedAnswer { destinations, entries } = answer;
        let mut taken = None;
        if frame.head.kind == Kind::Value {
            let long = frame.entries.iter().filter(|entry| entry.bytes > INLINE_BYTES_MAX);
            let mut destination = |id, bytes| {
                let at = entries.find(id, |at| destinations[at].bytes == bytes)?;
                Some(std::mem::replace(&mut destinations[at], RemoteBuffer::DISCARDED))
            };
            taken = Some(long.map(|entry| destination(entry.id, entry.bytes)).collect());
        }
        if entries.conclude(frame) {
            let ended = self.by_request.remove(&frame.head.request);
            self.named -= ended.map_or(0, |answer| answer.destinations.len());
        }
        taken
    }
}

impl RequestEntries {
    fn of(frame: &Frame) -> Self {
        Self { ids: frame.entries.iter().map(|entry| entry.id).collect(), missing: frame.entries.len(), taken: 0 }
    }

    /// Finds the first matching entry of that chunk, for the caller to take. A request may have a chunk twice, and both
    /// sides must find the same entry.
    fn find(&mut self, id: ChunkId, is_match: impl Fn(usize) -> bool) -> Option<usize> {
        let at = (self.taken..self.ids.len()).find(|at| self.ids[*at] == id && is_match(*at))?;
        self.taken += usize::from(at == self.taken);
        Some(at)
    }

    /// Counts an answer; whether the request is answered whole. A frame without entries answers all that is left, and
    /// an acknowledgement is not the value.
    fn conclude(&mut self, frame: &Frame) -> bool {
        match frame.head.kind {
            _ if frame.entries.is_empty() => self.missing = 0,
            Kind::Value => self.missing = self.missing.saturating_sub(frame.entries.len()),
            _ => {}
        }
        self.missing == 0
    }
}

/// Appends the destinations of the buffers, with length zero for a short one; whether there is a long one, and each is
/// registered where it lies.
fn encode(into: &mut [Option<Incoming>], staging: &VerbsStaging, encoded: &mut Vec<u8>) -> bool {
    let mut has_long = false;
    for place in into.iter_mut().flatten() {
        if place.len() <= INLINE_BYTES_MAX {
            encoded.extend(RemoteBuffer::DISCARDED.encode());
            continue;
        }
        // A failure of the device ends the connection in its next turn.
        let Ok(Some(buffer)) = staging.in_place(place) else { return false };
        encoded.extend(buffer.encode());
        has_long = true;
    }
    has_long
}

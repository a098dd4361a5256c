//! In-flight work requests and the memory that they own.
//!
//! A request owns its memory by value until it completes or the queue pair is closed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pserver_core::memory::{Lease, Value};
use pserver_core::port::Incoming;

use super::memory_span::MemorySpan;
use super::provider::{
    CompletionKind, Operation, PairCapacity, QueuePair, ReceiveRequest, WorkCompletion, WorkRequest,
};
use super::reasons::VerbsError;
use super::{ConnectionError, POSTED_MAX, RECEIVES, SLOT_BYTES};

/// A posted request with its memory.
pub(super) enum InFlightRequest {
    /// A message in a slot.
    Message(Lease),
    /// A buffer that a read fills, through staging where the card cannot write it directly.
    Read { index: ReceiveIndex, place: Incoming, staged: Option<Lease> },
    /// A write of a payload to the peer; `is_last` marks the last one of its frame.
    Write {
        #[expect(dead_code, reason = "it is held, and dropped when it was written")]
        source: WriteSource,
        is_last: bool,
    },
}

/// The buffer of a posted receive.
#[derive(Clone, Copy)]
pub(super) struct ReceiveIndex {
    /// The posted receive's number on this connection, from 0.
    pub(super) posted: u64,
    pub(super) place: usize,
}

/// The memory a payload is written from.
pub(super) enum WriteSource {
    Nothing,
    Value(Arc<Value>),
    Staged(Lease),
}

/// A message that arrived.
pub(super) struct ReceivedMessage {
    pub(super) slot: Lease,
    pub(super) bytes: usize,
}

/// The meaning of a completion, with the memory that it returns.
pub(super) enum RequestOutcome {
    Message(ReceivedMessage),
    /// The peer's writes have arrived, as this immediate data reports; and the slot that it took.
    Immediate(u32, Lease),
    Completed(InFlightRequest),
}

impl RequestOutcome {
    /// Whether a message of this side was sent, and acknowledged by the peer's card.
    pub(super) fn is_sent(&self) -> bool {
        matches!(self, Self::Completed(InFlightRequest::Message(_)))
    }
}

// tidy: allow fields: sends and receives have four each, of which a function reads one side
/// A queue pair and the memory of its requests.
pub(super) struct InFlightRequests {
    pair: Box<dyn QueuePair>,
    /// Posted requests, oldest first; the number of the first, and of the next.
    posted: VecDeque<InFlightRequest>,
    first: u64,
    next: u64,
    /// The first one at the last look, and since when it is the first.
    oldest: Option<(u64, Instant)>,
    /// Requests that the next doorbell posts.
    batch: Vec<WorkRequest>,
    /// Posted receive slots in order, and the number of the first.
    receiving: VecDeque<Lease>,
    received: u64,
    /// Receive slots that the next doorbell posts.
    room: Vec<ReceiveRequest>,
    done: Vec<WorkCompletion>,
    /// The key of the slots' region.
    key: u32,
    /// The error after which the device takes nothing more: how much of the last batch it took is unknown.
    lost: Option<VerbsError>,
    is_closed: bool,
}

/// This bit marks the number of a receive.
const RECEIVE: u64 = 1 << 63;

impl InFlightRequests {
    /// The capacity of a connection's queue pair.
    pub(super) fn capacity(is_open: bool) -> PairCapacity {
        PairCapacity { posted_max: POSTED_MAX, receives_max: RECEIVES, is_open }
    }

    pub(super) fn new(pair: Box<dyn QueuePair>, key: u32) -> Self {
        Self {
            pair,
            posted: VecDeque::with_capacity(POSTED_MAX as usize),
            first: 0,
            next: 0,
            oldest: None,
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

    pub(super) fn pair(&mut self) -> &mut dyn QueuePair {
        self.pair.as_mut()
    }

    /// Requests that can still be posted.
    pub(super) fn room(&self) -> usize {
        POSTED_MAX as usize - self.posted.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.posted.is_empty()
    }

    /// Whether one request has been the oldest for longer than `limit`.
    pub(super) fn is_stalled(&mut self, now: Instant, limit: Duration) -> bool {
        match self.oldest {
            _ if self.posted.is_empty() => self.oldest = None,
            Some((known, since)) if known == self.first => return since + limit < now,
            _ => self.oldest = Some((self.first, now)),
        }
        false
    }

    /// Posts a slot for a message.
    pub(super) fn receive(&mut self, mut slot: Lease) {
        let id = RECEIVE | (self.received + self.receiving.len() as u64);
        self.room.push(ReceiveRequest { id, span: MemorySpan::of_mut(slot.bytes_mut(), self.key) });
        self.receiving.push_back(slot);
    }

    /// Sends the first `bytes` of a slot.
    pub(super) fn send(&mut self, slot: Lease, bytes: usize) {
        let span = MemorySpan::of(&slot.bytes()[..bytes], self.key);
        self.add(Operation::Send, span, InFlightRequest::Message(slot));
    }

    /// Reads the peer's memory into a buffer, or into its staging. The last read of a frame is signaled, so that the
    /// frame is complete before later ones of its batch are.
    pub(super) fn read(
        &mut self,
        operation: Operation,
        (index, is_last): (ReceiveIndex, bool),
        mut place: Incoming,
        mut staged: Option<Lease>,
        key: u32,
    ) {
        let span = match &mut staged {
            Some(lease) => MemorySpan::of_mut(lease.bytes_mut(), key),
            None => MemorySpan::of_mut(place.bytes_mut(), key),
        };
        self.add(operation, span, InFlightRequest::Read { index, place, staged });
        if let Some(read) = self.batch.last_mut() {
            read.is_signaled = is_last;
        }
    }

    /// Writes a payload to the peer's memory.
    pub(super) fn write(&mut self, operation: Operation, source: WriteSource, key: u32, is_last: bool) {
        let span = match &source {
            WriteSource::Nothing => MemorySpan::EMPTY,
            WriteSource::Value(value) => MemorySpan::of(value.bytes(), key),
            WriteSource::Staged(lease) => MemorySpan::of(lease.bytes(), key),
        };
        self.add(operation, span, InFlightRequest::Write { source, is_last });
    }

    fn add(&mut self, operation: Operation, span: MemorySpan, flight: InFlightRequest) {
        assert!(self.room() > 0, "callers check for room before they add work");
        self.batch.push(WorkRequest { id: self.next, operation, span, is_signaled: false });
        self.next += 1;
        self.posted.push_back(flight);
    }

    /// Posts all added receives and requests, each with one call. The last request of a batch is signaled: a completion
    /// covers the requests before it.
    pub(super) fn ring_doorbell(&mut self) -> Result<(), ConnectionError> {
        if self.lost.is_none() {
            self.lost = self.post_batch().err();
        }
        self.lost.clone().map_or(Ok(()), |fault| Err(fault.into()))
    }

    fn post_batch(&mut self) -> Result<(), VerbsError> {
        if !self.room.is_empty() {
            self.pair.receive(&self.room)?;
            self.room.clear();
        }
        if let Some(last) = self.batch.last_mut() {
            last.is_signaled = true;
            self.pair.post(&self.batch)?;
            self.batch.clear();
        }
        Ok(())
    }

    /// Whether completions are available.
    pub(super) fn has_news(&mut self) -> bool {
        // A failed poll counts as news, so that the next turn polls again and reports the error.
        self.done.is_empty() && self.pair.poll(&mut self.done).is_err() || !self.done.is_empty()
    }

    /// Collects the completions since the last call.
    pub(super) fn collect(&mut self, outcomes: &mut Vec<RequestOutcome>) -> Result<(), ConnectionError> {
        self.pair.poll(&mut self.done)?;
        let mut done = std::mem::take(&mut self.done);
        let outcome = done.drain(..).try_for_each(|done| self.note(done, outcomes));
        self.done = done;
        outcome
    }

    fn note(&mut self, done: WorkCompletion, outcomes: &mut Vec<RequestOutcome>) -> Result<(), ConnectionError> {
        let result = done.result.map_err(ConnectionError::Failed)?;
        if done.id & RECEIVE == 0 {
            return self.complete_posted(done.id, result, outcomes);
        }
        let expected = RECEIVE | self.received;
        if done.id != expected || self.receiving.is_empty() {
            return Err(odd(format!("receive {} completed, expected {}", done.id & !RECEIVE, self.received)));
        }
        let slot = self.receiving.pop_front().expect("one is there");
        self.received += 1;
        outcomes.push(match result {
            CompletionKind::Message(bytes) if bytes as usize <= SLOT_BYTES as usize => {
                RequestOutcome::Message(ReceivedMessage { slot, bytes: bytes as usize })
            }
            CompletionKind::Immediate(number) => RequestOutcome::Immediate(number, slot),
            CompletionKind::Message(_) | CompletionKind::Posted => {
                return Err(odd(format!("a receive completed as {result:?}")));
            }
        });
        Ok(())
    }

    fn complete_posted(
        &mut self,
        id: u64,
        result: CompletionKind,
        outcomes: &mut Vec<RequestOutcome>,
    ) -> Result<(), ConnectionError> {
        // Requests of the current batch are not posted yet.
        let posted = self.next - self.batch.len() as u64;
        if result != CompletionKind::Posted || id < self.first || id >= posted {
            let expected = format!("one of {} to {posted}", self.first);
            return Err(odd(format!("work {id} completed as {result:?}, expected {expected}, as posted")));
        }
        for _ in self.first..=id {
            outcomes.push(RequestOutcome::Completed(self.posted.pop_front().expect("it was posted")));
        }
        self.first = id + 1;
        Ok(())
    }

    /// Closes the queue pair and returns the memory of its requests, except slots.
    ///
    /// # Errors
    /// The device does not confirm: the memory is then quarantined.
    pub(super) fn close(&mut self) -> Result<Vec<InFlightRequest>, VerbsError> {
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
                tracing::error!(%fault, "a queue pair could not be destroyed; its memory is not used again");
                posted.for_each(quarantine);
                receiving.for_each(std::mem::forget);
                Err(fault)
            }
        }
    }
}

impl Drop for InFlightRequests {
    fn drop(&mut self) {
        // `close` has logged an error; the memory goes with the connection.
        drop(self.close());
    }
}

/// Leaks memory that a device may still access. A buffer behind staging was not shown to the device.
fn quarantine(flight: InFlightRequest) {
    match flight {
        InFlightRequest::Read { staged: Some(lease), place, .. } => {
            std::mem::forget(lease);
            drop(place);
        }
        other => std::mem::forget(other),
    }
}

fn odd(text: String) -> ConnectionError {
    ConnectionError::Device(format!("the device: {text}"))
}

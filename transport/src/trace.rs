//! Wrapper that counts and logs the frames of any transport.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::ids::PeerId;
use pserver_core::port::{Capabilities, Doorbell, Event, Submit, Transport};
use pserver_core::wire::{Address, Frame, Kind};

use crate::network::Network;
use crate::verbs;

/// Kinds are numbered from one to fourteen.
const KINDS: usize = 15;

/// Counters of a transport. Any thread may read them.
#[derive(Debug, Default)]
pub struct TraceCounters {
    /// Frames accepted for sending.
    pub out: TraceFlow,
    /// Frames received.
    pub inward: TraceFlow,
    /// Connections made by either side.
    pub connections: AtomicU64,
    /// Connections that have ended.
    pub gone: AtomicU64,
    /// Counters of verbs traffic, where the transport has verbs.
    pub verbs: Arc<verbs::VerbsCounters>,
}

/// Counters of one direction.
#[derive(Debug, Default)]
pub struct TraceFlow {
    /// Payload bytes.
    pub payload_bytes: AtomicU64,
    kinds: [AtomicU64; KINDS],
}

impl TraceFlow {
    /// Frames of all kinds.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.load(Relaxed)).sum()
    }

    /// Frames of one kind.
    #[must_use]
    pub fn frames_of(&self, kind: Kind) -> u64 {
        self.kinds[number(kind)].load(Relaxed)
    }

    fn count(&self, frame: &Frame) {
        self.kinds[number(frame.head.kind)].fetch_add(1, Relaxed);
        self.payload_bytes.fetch_add(frame.payload_bytes(), Relaxed);
    }

    /// Counts the frames that have left a queue.
    fn count_taken(&self, before: &QueueTally, after: &QueueTally) {
        for (kind, (before, after)) in self.kinds.iter().zip(before.kinds.iter().zip(after.kinds)) {
            kind.fetch_add(before - after, Relaxed);
        }
        self.payload_bytes.fetch_add(before.payload_bytes - after.payload_bytes, Relaxed);
    }
}

/// The frames of a queue.
#[derive(Default)]
struct QueueTally {
    payload_bytes: u64,
    kinds: [u64; KINDS],
}

impl QueueTally {
    fn of(queue: &VecDeque<Submit>) -> Self {
        let mut tally = Self::default();
        for work in queue {
            if let Submit::Send { frame, .. } = work {
                tally.kinds[number(frame.head.kind)] += 1;
                tally.payload_bytes += frame.payload_bytes();
            }
        }
        tally
    }
}

fn number(kind: Kind) -> usize {
    usize::from(kind as u8)
}

/// A transport whose frames are counted, and logged at trace level.
pub struct Trace {
    inner: Box<dyn Transport>,
    counters: Arc<TraceCounters>,
}

impl Trace {
    /// `inner`, counted from zero.
    #[must_use]
    pub fn new(inner: Box<dyn Transport>) -> Self {
        Self { inner, counters: Arc::default() }
    }

    /// Wraps a network transport, with its counters of verbs traffic.
    #[must_use]
    pub fn over(network: Network) -> Self {
        let counters = TraceCounters { verbs: network.verbs(), ..TraceCounters::default() };
        Self { inner: Box::new(network), counters: Arc::new(counters) }
    }

    /// The live counters.
    #[must_use]
    pub fn counters(&self) -> Arc<TraceCounters> {
        Arc::clone(&self.counters)
    }

    fn note(&self, event: &Event) {
        match event {
            Event::Connected { peer } => {
                self.counters.connections.fetch_add(1, Relaxed);
                tracing::trace!(peer = peer.0, "connected");
            }
            Event::Accepted { peer, origin, .. } => {
                self.counters.connections.fetch_add(1, Relaxed);
                tracing::trace!(peer = peer.0, origin, "accepted");
            }
            Event::Moved { peer, transport } => tracing::trace!(peer = peer.0, transport, "moved"),
            Event::Head { peer, frame } => {
                tracing::trace!(peer = peer.0, kind = ?frame.head.kind, "head")
            }
            Event::Received { peer, frame, .. } => {
                self.counters.inward.count(frame);
                let bytes = frame.payload_bytes();
                tracing::trace!(peer = peer.0, kind = ?frame.head.kind, bytes, "landed");
            }
            Event::TakesAnswers { peer } => tracing::trace!(peer = peer.0, "takes answers"),
            Event::AnswerReturned { peer, request, .. } => {
                tracing::trace!(peer = peer.0, request = request.0, "answer buffers returned")
            }
            Event::Transmitted { peer, ticket } => {
                tracing::trace!(peer = peer.0, ticket = ticket.0, "left")
            }
            Event::Sent { peer, ticket, .. } => {
                tracing::trace!(peer = peer.0, ticket = ticket.0, "sent")
            }
            Event::Gone { peer, reason, .. } => {
                self.counters.gone.fetch_add(1, Relaxed);
                tracing::trace!(peer = peer.0, reason, "gone");
            }
        }
    }
}

impl Transport for Trace {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        let peer = self.inner.connect(address)?;
        tracing::trace!(peer = peer.0, %address, "connecting");
        Ok(peer)
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        let before = QueueTally::of(queue);
        let outcome = self.inner.submit(queue);
        self.counters.out.count_taken(&before, &QueueTally::of(queue));
        outcome
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        let before = events.len();
        let outcome = self.inner.poll(events);
        for event in &events[before..] {
            self.note(event);
        }
        outcome
    }

    fn close(&mut self, peer: PeerId) {
        tracing::trace!(peer = peer.0, "close");
        self.inner.close(peer);
    }

    fn wait(&mut self, limit: Duration) {
        self.inner.wait(limit);
    }

    fn doorbell(&self) -> Doorbell {
        self.inner.doorbell()
    }
}

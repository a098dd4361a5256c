//! A transport that counts and tells.

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

/// What went through a transport. Any thread may read it.
#[derive(Debug, Default)]
pub struct Counters {
    /// Frames taken to be sent.
    pub out: Flow,
    /// Frames that landed.
    pub inward: Flow,
    /// Connections that were made, by either side.
    pub connections: AtomicU64,
    /// Connections that are over.
    pub gone: AtomicU64,
    /// What went over verbs, where the transport has them.
    pub verbs: Arc<verbs::Counters>,
}

/// What went one way.
#[derive(Debug, Default)]
pub struct Flow {
    /// Payload bytes.
    pub payload_bytes: AtomicU64,
    kinds: [AtomicU64; KINDS],
}

impl Flow {
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

    /// Counts what was in a queue and is not any more.
    fn count_taken(&self, before: &Tally, after: &Tally) {
        for (kind, (before, after)) in self.kinds.iter().zip(before.kinds.iter().zip(after.kinds)) {
            kind.fetch_add(before - after, Relaxed);
        }
        self.payload_bytes.fetch_add(before.payload_bytes - after.payload_bytes, Relaxed);
    }
}

/// The frames in a queue.
#[derive(Default)]
struct Tally {
    payload_bytes: u64,
    kinds: [u64; KINDS],
}

impl Tally {
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

/// Any transport, counted, with a line at trace level for every frame.
pub struct Trace {
    inner: Box<dyn Transport>,
    counters: Arc<Counters>,
}

impl Trace {
    /// `inner`, counted from zero.
    #[must_use]
    pub fn new(inner: Box<dyn Transport>) -> Self {
        Self { inner, counters: Arc::default() }
    }

    /// Connections to other processes, counted; what goes over verbs from when they were made.
    #[must_use]
    pub fn over(network: Network) -> Self {
        let counters = Counters { verbs: network.verbs(), ..Counters::default() };
        Self { inner: Box::new(network), counters: Arc::new(counters) }
    }

    /// The counters, which go on counting.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    fn note(&self, event: &Event) {
        match event {
            Event::Connected { peer } => {
                self.counters.connections.fetch_add(1, Relaxed);
                tracing::trace!(peer = peer.0, "connected");
            }
            Event::Accepted { peer, origin } => {
                self.counters.connections.fetch_add(1, Relaxed);
                tracing::trace!(peer = peer.0, origin, "accepted");
            }
            Event::Head { peer, frame } => {
                tracing::trace!(peer = peer.0, kind = ?frame.head.kind, "head")
            }
            Event::Landed { peer, frame, .. } => {
                self.counters.inward.count(frame);
                let bytes = frame.payload_bytes();
                tracing::trace!(peer = peer.0, kind = ?frame.head.kind, bytes, "landed");
            }
            Event::Left { peer, ticket } => {
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
        let before = Tally::of(queue);
        let outcome = self.inner.submit(queue);
        self.counters.out.count_taken(&before, &Tally::of(queue));
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

//! Wrapper that injects faults into any transport, by a plan and a seed, so that runs are repeatable.
//!
//! Every fault is one that a network can have and that returns all buffers: a connection that ends, a late frame, an
//! unreachable address, changed bytes. A frame is never repeated or lost alone, because no transport may do that.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::ids::PeerId;
use pserver_core::port::{Capabilities, Doorbell, Event, Submit, Transport};
use pserver_core::prng::Prng;
use pserver_core::wire::Address;

use crate::payload::gone_event;

/// Frames delayed at once; further ones stay with the caller.
const DELAYED_MAX: usize = 64;

/// The probability of each fault, from 0.0 (never) to 1.0 (always).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FaultPlan {
    /// A frame about to be sent ends its connection instead, and comes back unsent.
    pub cut_before_frame: f64,
    /// A frame is sent, and then its connection ends.
    pub cut_after_frame: f64,
    /// A frame is held back, and those to the same peer behind it.
    pub delay_frame: f64,
    /// How many polls a frame is held back.
    pub delay_polls: u32,
    /// A connection is never made.
    pub refuse_connect: f64,
    /// A payload's checksum is changed, so that the receiver refuses the frame.
    pub change_checksum: f64,
}

/// A transport with faults.
pub struct FaultyTransport {
    inner: Box<dyn Transport>,
    plan: FaultPlan,
    seed: u64,
    prng: Prng,
    /// Delayed frames in order, each with the poll at which it may go.
    delayed: VecDeque<(u64, Submit)>,
    polls: u64,
    /// Refused connections get numbers from the top, which the inner transport never reaches.
    refused: u64,
    events: Vec<Event>,
    /// Connections that a fault has cut; submissions for them come back.
    cut: BTreeSet<PeerId>,
}

impl FaultyTransport {
    /// Wraps `inner`. The same seed and the same work give the same faults; the seed is printed, so that a failed test
    /// can be repeated.
    #[must_use]
    pub fn new(inner: Box<dyn Transport>, plan: FaultPlan, seed: u64) -> Self {
        println!("faults: seed {seed}, {plan:?}");
        Self {
            inner,
            plan,
            seed,
            prng: Prng(seed),
            delayed: VecDeque::new(),
            polls: 0,
            refused: 0,
            events: Vec::new(),
            cut: BTreeSet::new(),
        }
    }

    /// The seed of the faults.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether a fault of this probability strikes. A number is drawn even where the probability is zero, so that plans
    /// can be compared.
    fn strikes(&mut self, probability: f64) -> bool {
        const STEPS: f64 = (1_u64 << 32) as f64;
        f64::from(self.prng.number()) < probability * STEPS
    }

    fn is_delayed(&self, peer: PeerId) -> bool {
        self.delayed.iter().any(|(_, work)| work.peer() == peer)
    }

    /// Submits one piece of work to the inner transport; returns it if that has no room.
    fn pass(&mut self, work: Submit) -> Result<Option<Submit>, Failure> {
        let mut one = VecDeque::from([work]);
        self.inner.submit(&mut one)?;
        Ok(one.pop_front())
    }

    /// Applies the plan to one frame; returns it if the inner transport has no room.
    fn send(&mut self, mut work: Submit) -> Result<Option<Submit>, Failure> {
        let peer = work.peer();
        if self.cut.contains(&peer) {
            self.events.push(work.into_returned());
            return Ok(None);
        }
        if self.strikes(self.plan.cut_before_frame) {
            self.cut_now(peer);
            self.events.push(work.into_returned());
            return Ok(None);
        }
        if self.strikes(self.plan.delay_frame) || self.is_delayed(peer) {
            if self.delayed.len() >= DELAYED_MAX {
                return Ok(Some(work));
            }
            self.delayed.push_back((self.polls + u64::from(self.plan.delay_polls), work));
            return Ok(None);
        }
        if self.strikes(self.plan.change_checksum)
            && let Submit::Send { frame, .. } = &mut work
            && let Some(entry) = frame.entries.iter_mut().find(|entry| entry.bytes > 0)
        {
            // A wrong checksum, but for a chance of one in 2^32.
            entry.checksum = 0x0bad_5eed;
        }
        let left = self.pass(work)?;
        if left.is_none() && self.strikes(self.plan.cut_after_frame) {
            self.cut_now(peer);
        }
        Ok(left)
    }

    fn cut_now(&mut self, peer: PeerId) {
        tracing::debug!(peer = peer.0, "fault: connection cut");
        self.cut.insert(peer);
        self.inner.close(peer);
    }

    /// Submits the delayed frames that are due, in order.
    fn release(&mut self) -> Result<(), Failure> {
        while let Some((due, work)) = self.delayed.pop_front() {
            if due > self.polls {
                self.delayed.push_front((due, work));
                return Ok(());
            }
            if let Some(left) = self.pass(work)? {
                self.delayed.push_front((due, left));
                return Ok(());
            }
        }
        Ok(())
    }
}

impl Transport for FaultyTransport {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn connect(&mut self, address: &Address) -> Result<PeerId, Failure> {
        if !self.strikes(self.plan.refuse_connect) {
            return self.inner.connect(address);
        }
        let peer = PeerId(u64::MAX - self.refused);
        self.refused += 1;
        self.events.push(gone_event(peer, format!("connecting to {address}: refused by fault")));
        Ok(peer)
    }

    fn submit(&mut self, queue: &mut VecDeque<Submit>) -> Result<(), Failure> {
        let mut full = BTreeSet::new();
        for _ in 0..queue.len() {
            let Some(work) = queue.pop_front() else { break };
            let peer = work.peer();
            let left = match work {
                Submit::PostReceive { .. } | Submit::PostAnswer { .. } => self.pass(work)?,
                work if full.contains(&peer) => Some(work),
                work => self.send(work)?,
            };
            if let Some(work) = left {
                full.insert(peer);
                queue.push_back(work);
            }
        }
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Failure> {
        self.polls += 1;
        self.release()?;
        events.append(&mut self.events);
        self.inner.poll(events)
    }

    fn close(&mut self, peer: PeerId) {
        self.inner.close(peer);
    }

    fn wait(&mut self, limit: Duration) {
        // Delays are counted in polls, so polling must go on.
        if self.events.is_empty() && self.delayed.is_empty() {
            self.inner.wait(limit);
        }
    }

    fn doorbell(&self) -> Doorbell {
        self.inner.doorbell()
    }
}

//! A session on a server's thread: what the thread's loop asks of it, and its handle for other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::channel::Receiver;
use pserver_core::error::Failure;
use pserver_core::port::{Doorbell, Event};
use pserver_core::server::ServerOutput;
use pserver_core::time::Now;

use super::telemetry::{ReportRequests, SessionCounters, SessionReport};

/// A session as the loop sees it.
pub(super) trait NodeSession: Send + 'static {
    /// Begins a turn, `nanos` after the start of the clock.
    fn begin_turn(&mut self, _nanos: u64) {}

    /// A report for monitoring.
    fn report(&self, now: Now) -> SessionReport;

    /// Handles an event.
    fn handle(&mut self, now: Now, event: Event, out: &mut Vec<ServerOutput>) -> Result<(), Failure>;

    /// Does due work; true when more work is ready at once.
    fn work(&mut self, now: Now, out: &mut Vec<ServerOutput>) -> Result<bool, Failure>;

    /// Keeps what the turn has decided. A failure keeps the turn's outputs back.
    fn commit(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    /// When [`NodeSession::work`] is due.
    fn deadline(&self) -> Option<Now>;

    /// Whether an accelerator has work in flight and must be polled soon.
    fn is_under_way(&self) -> bool {
        false
    }

    /// Whether finishing would wait for work that another thread does.
    fn awaits_work(&self) -> bool {
        false
    }

    /// Finishes the session after the loop has ended.
    fn finish(&mut self) -> Result<(), Failure>;
}

/// A session's handle for other threads.
#[derive(Clone)]
pub(super) struct SessionControl {
    doorbell: Doorbell,
    /// Whether the doorbell has rung for this session.
    is_rung: Arc<AtomicBool>,
    requests: ReportRequests,
    counters: Arc<SessionCounters>,
}

impl SessionControl {
    pub(super) fn new(doorbell: Doorbell) -> Self {
        let (requests, counters) = (ReportRequests::default(), Arc::default());
        Self { doorbell, is_rung: Arc::default(), requests, counters }
    }

    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    pub(super) fn ring(&self) {
        self.is_rung.store(true, Ordering::Release);
        self.doorbell.ring();
    }

    /// Whether the doorbell has rung for this session since the last look.
    #[inline]
    pub(super) fn take_ring(&self) -> bool {
        self.is_rung.load(Ordering::Relaxed) && self.is_rung.swap(false, Ordering::Acquire)
    }

    /// Asks the session for a report.
    pub(super) fn ask(&self) -> Receiver<SessionReport> {
        let answered = self.requests.ask();
        self.ring();
        answered
    }

    /// Answers whoever has asked for a report.
    #[inline]
    pub(super) fn answer(&self, report: impl Fn() -> SessionReport) {
        self.requests.answer(report);
    }

    /// The session's counters.
    pub(super) fn counters(&self) -> &Arc<SessionCounters> {
        &self.counters
    }
}

/// The time of a turn, from nanoseconds since the start of the clock.
pub(super) fn now_of(nanos: u64) -> Now {
    Now(nanos / 1_000_000)
}

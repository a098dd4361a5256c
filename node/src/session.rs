//! The event loop of a server's threads, over one session and one transport.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::Receiver;
use pserver_core::error::Failure;
use pserver_core::port::{Doorbell, Event, Submit, Transport};
use pserver_core::server::ServerOutput;
use pserver_core::time::Now;

use super::machine::ProcessMachine;
use super::telemetry::{ReportRequests, SessionCounters, SessionReport};

/// Longest wait, which bounds the cost of a missed wake-up.
const WAIT_LONGEST: Duration = Duration::from_millis(500);
/// After a stop request, a session without events for this long has applied all received frames.
const QUIET: Duration = Duration::from_millis(50);
/// Interval at which a busy accelerator is polled: a fraction of a chunk's round trip to it.
const DEVICE_LOOK: Duration = Duration::from_micros(20);
/// Longest drain, also with busy trainers.
const DRAIN_LONGEST: Duration = Duration::from_secs(2);

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

/// Tells a session's thread to stop, from any thread.
#[derive(Clone)]
pub(super) struct SessionControl {
    /// Whether it is to stop, once it has handled everything that arrived.
    stop: Arc<AtomicBool>,
    /// Whether it is to stop at once.
    release: Arc<AtomicBool>,
    doorbell: Doorbell,
    requests: ReportRequests,
    counters: Arc<SessionCounters>,
}

impl SessionControl {
    pub(super) fn new(doorbell: Doorbell) -> Self {
        let (requests, counters) = (ReportRequests::default(), Arc::default());
        Self { stop: Arc::default(), release: Arc::default(), doorbell, requests, counters }
    }

    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    pub(super) fn ring(&self) {
        self.doorbell.ring();
    }

    /// Asks the session for a report.
    pub(super) fn ask(&self) -> Receiver<SessionReport> {
        let answered = self.requests.ask();
        self.ring();
        answered
    }

    /// The counters of the session's thread.
    pub(super) fn counters(&self) -> &Arc<SessionCounters> {
        &self.counters
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.doorbell.ring();
    }

    fn release(&self) {
        self.release.store(true, Ordering::Release);
        self.doorbell.ring();
    }
}

/// A session with a thread of its own.
pub(super) struct SessionThread {
    control: SessionControl,
    thread: JoinHandle<Result<(), Failure>>,
}

impl SessionThread {
    pub(super) fn spawn(
        name: &str,
        session: impl NodeSession,
        transport: impl Transport + 'static,
        control: SessionControl,
        machine: Arc<dyn ProcessMachine>,
    ) -> Result<Self, Failure> {
        let drive = SessionLoop::new(session, transport, control.clone(), machine);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || drive.run())
            .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        Ok(Self { control, thread })
    }

    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Asks the session to stop; [`SessionThread::join`] waits until it has.
    pub(super) fn stop(&self) {
        self.control.stop();
    }

    /// The same, without waiting for frames that are on their way: their senders repeat them elsewhere.
    pub(super) fn release(&self) {
        self.control.release();
    }

    pub(super) fn join(self) -> Result<(), Failure> {
        join(self.thread)
    }
}

/// Waits for a thread; one that panicked is a failure of the node.
pub(super) fn join(thread: JoinHandle<Result<(), Failure>>) -> Result<(), Failure> {
    let name = thread.thread().name().unwrap_or("a thread").to_owned();
    thread.join().unwrap_or_else(|_| Err(Failure::Node(format!("{name} panicked"))))
}

/// The loop's next action after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnEnd {
    /// Another turn at once.
    Again,
    /// Another turn after an event of the transport, or after this time.
    Wait(Duration),
    /// None: the session was asked to stop and has handled everything that arrived.
    Over,
}

/// A session, its transport, and the state between two turns.
pub(super) struct SessionLoop<S, T> {
    session: S,
    transport: T,
    control: SessionControl,
    machine: Arc<dyn ProcessMachine>,
    queue: VecDeque<Submit>,
    events: Vec<Event>,
    out: Vec<ServerOutput>,
    /// Time of the last turn.
    nanos: u64,
    /// Whether the last turn had something to do.
    is_busy: bool,
    last_event: Now,
    asked_to_stop: Option<Now>,
}

impl<S: NodeSession, T: Transport> SessionLoop<S, T> {
    pub(super) fn new(session: S, transport: T, control: SessionControl, machine: Arc<dyn ProcessMachine>) -> Self {
        let nanos = machine.nanos();
        Self {
            session,
            transport,
            control,
            machine,
            queue: VecDeque::new(),
            events: Vec::new(),
            out: Vec::new(),
            nanos,
            is_busy: false,
            last_event: now_of(nanos),
            asked_to_stop: None,
        }
    }

    fn run(mut self) -> Result<(), Failure> {
        let ended = self.serve();
        if let Err(failure) = &ended {
            tracing::error!("a session failed: {failure}");
        }
        let finished = self.session.finish();
        ended.and(finished)
    }

    /// Whether finishing would wait for work that another thread does.
    pub(super) fn awaits_work(&self) -> bool {
        self.session.awaits_work()
    }

    /// Finishes the session without another turn.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        self.session.finish()
    }

    fn serve(&mut self) -> Result<(), Failure> {
        loop {
            match self.turn()? {
                TurnEnd::Again => {}
                TurnEnd::Wait(pause) => self.transport.wait(pause),
                TurnEnd::Over => return Ok(()),
            }
        }
    }

    /// Handles the events that have arrived, and does due work.
    pub(super) fn turn(&mut self) -> Result<TurnEnd, Failure> {
        self.transport.poll(&mut self.events)?;
        let before = std::mem::replace(&mut self.nanos, self.machine.nanos());
        if self.is_busy {
            self.control.counters.turns.observe(self.nanos - before);
        }
        let now = now_of(self.nanos);
        self.session.begin_turn(self.nanos);
        self.control.requests.answer(|| self.session.report(now));
        self.is_busy = !self.events.is_empty();
        for event in self.events.drain(..) {
            self.control.counters.received(&event);
            self.session.handle(now, event, &mut self.out)?;
        }
        if self.is_busy {
            self.last_event = now;
        }
        self.is_busy |= self.session.work(now, &mut self.out)?;
        self.session.commit()?;
        self.carry_out()?;
        if self.control.release.load(Ordering::Acquire) {
            return Ok(TurnEnd::Over);
        }
        if self.control.stop.load(Ordering::Acquire) {
            let since = *self.asked_to_stop.get_or_insert(now);
            let is_quiet = self.queue.is_empty() && !self.session.is_under_way() && now >= self.last_event + QUIET;
            if is_quiet || now >= since + DRAIN_LONGEST {
                return Ok(TurnEnd::Over);
            }
        }
        Ok(if self.is_busy { TurnEnd::Again } else { TurnEnd::Wait(self.pause(now)) })
    }

    fn pause(&self, now: Now) -> Duration {
        let longest = match self.asked_to_stop {
            _ if self.session.is_under_way() => DEVICE_LOOK,
            Some(_) => QUIET / 2,
            None => WAIT_LONGEST,
        };
        self.session.deadline().map_or(longest, |deadline| now.until(deadline).min(longest))
    }

    fn carry_out(&mut self) -> Result<(), Failure> {
        for output in self.out.drain(..) {
            match output {
                ServerOutput::Submit(submit) => {
                    self.control.counters.sent(&submit);
                    self.queue.push_back(submit);
                }
                ServerOutput::Close(peer) => {
                    // Frames queued before the close are sent first.
                    self.transport.submit(&mut self.queue)?;
                    self.transport.close(peer);
                }
            }
        }
        self.transport.submit(&mut self.queue)
    }
}

fn now_of(nanos: u64) -> Now {
    Now(nanos / 1_000_000)
}

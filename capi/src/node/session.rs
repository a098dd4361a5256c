//! The loop that every thread of a server runs: a session, a transport, and nothing else.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pserver_core::error::Failure;
use pserver_core::port::{Doorbell, Event, Submit, Transport};
use pserver_core::server::Output;
use pserver_core::time::Now;

/// The longest wait, so that a missed wake-up costs no more.
const WAIT_LONGEST: Duration = Duration::from_millis(500);
/// After a stop was asked for, a session that has been quiet for this long has applied what had arrived.
const QUIET: Duration = Duration::from_millis(50);
/// How long a device that works is not asked: a fraction of what a chunk takes to get there and back.
const DEVICE_LOOK: Duration = Duration::from_micros(20);
/// However busy the trainers are, draining ends.
const DRAIN_LONGEST: Duration = Duration::from_secs(2);

/// A session as the loop sees it.
pub(super) trait Session: Send + 'static {
    /// Takes an event in.
    fn handle(&mut self, now: Now, event: Event, out: &mut Vec<Output>) -> Result<(), Failure>;

    /// Does what time and other threads ask for; true when there is more to do at once.
    fn work(&mut self, now: Now, out: &mut Vec<Output>) -> Result<bool, Failure>;

    /// When [`Session::work`] has something to do.
    fn deadline(&self) -> Option<Now>;

    /// Whether a device works for it, and is to be asked soon.
    fn is_under_way(&self) -> bool {
        false
    }

    /// The last act.
    fn finish(&mut self) -> Result<(), Failure>;
}

/// Tells a session's thread to stop, from any thread.
#[derive(Clone)]
pub(super) struct Control {
    stop: Arc<AtomicBool>,
    doorbell: Doorbell,
}

impl Control {
    pub(super) fn new(doorbell: Doorbell) -> Self {
        Self { stop: Arc::default(), doorbell }
    }

    pub(super) fn ring(&self) {
        self.doorbell.ring();
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.doorbell.ring();
    }
}

/// A session with a thread of its own.
pub(super) struct Running {
    control: Control,
    thread: JoinHandle<Result<(), Failure>>,
}

impl Running {
    pub(super) fn spawn(
        name: &str,
        session: impl Session,
        transport: impl Transport + 'static,
        control: Control,
        clock: Instant,
    ) -> Result<Self, Failure> {
        let stop = Arc::clone(&control.stop);
        let drive = Drive { session, transport, stop, clock, queue: VecDeque::new() };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || drive.run())
            .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        Ok(Self { control, thread })
    }

    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Asks the session to stop; [`Running::join`] waits until it has.
    pub(super) fn stop(&self) {
        self.control.stop();
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

struct Drive<S, T> {
    session: S,
    transport: T,
    stop: Arc<AtomicBool>,
    clock: Instant,
    queue: VecDeque<Submit>,
}

impl<S: Session, T: Transport> Drive<S, T> {
    fn run(mut self) -> Result<(), Failure> {
        let ended = self.serve();
        if let Err(failure) = &ended {
            tracing::error!("a session ends: {failure}");
        }
        let finished = self.session.finish();
        ended.and(finished)
    }

    fn serve(&mut self) -> Result<(), Failure> {
        let (mut events, mut out) = (Vec::new(), Vec::new());
        let mut asked_to_stop: Option<Now> = None;
        let mut last_event = self.now();
        loop {
            self.transport.poll(&mut events)?;
            let now = self.now();
            let mut busy = !events.is_empty();
            for event in events.drain(..) {
                self.session.handle(now, event, &mut out)?;
            }
            if busy {
                last_event = now;
            }
            busy |= self.session.work(now, &mut out)?;
            self.carry_out(&mut out)?;
            if self.stop.load(Ordering::Acquire) {
                let since = *asked_to_stop.get_or_insert(now);
                let quiet = self.queue.is_empty() && !self.session.is_under_way() && now >= last_event + QUIET;
                if quiet || now >= since + DRAIN_LONGEST {
                    return Ok(());
                }
            }
            if !busy {
                self.transport.wait(self.pause(now, asked_to_stop.is_some()));
            }
        }
    }

    fn pause(&self, now: Now, stopping: bool) -> Duration {
        let longest = match stopping {
            _ if self.session.is_under_way() => DEVICE_LOOK,
            true => QUIET / 2,
            false => WAIT_LONGEST,
        };
        self.session.deadline().map_or(longest, |deadline| now.until(deadline).min(longest))
    }

    fn carry_out(&mut self, out: &mut Vec<Output>) -> Result<(), Failure> {
        for output in out.drain(..) {
            match output {
                Output::Submit(submit) => self.queue.push_back(submit),
                Output::Close(peer) => {
                    // What was said before the close goes first.
                    self.transport.submit(&mut self.queue)?;
                    self.transport.close(peer);
                }
            }
        }
        self.transport.submit(&mut self.queue)
    }

    fn now(&self) -> Now {
        Now(u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX))
    }
}

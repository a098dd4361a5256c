//! The event loop of a server's threads, over one transport and the sessions that share it.
//!
//! A lone session gets every event. Of several, each gets those of the connections to its lane, which their hello
//! names.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use pserver_core::error::Failure;
use pserver_core::port::{Doorbell, Event, Submit, Transport};
use pserver_core::server::ServerOutput;
use pserver_core::time::Now;

use super::machine::ProcessMachine;
use super::seats::{Seat, Seats};
use super::session::{NodeSession, SessionControl, now_of};

/// Longest wait, which bounds the cost of a missed wake-up.
const WAIT_LONGEST: Duration = Duration::from_millis(500);
/// After a stop request, a session without events for this long has applied all received frames.
const QUIET: Duration = Duration::from_millis(50);
/// Interval at which a busy accelerator is polled: a fraction of a chunk's round trip to it.
const DEVICE_LOOK: Duration = Duration::from_micros(20);
/// Of sessions that share a thread, each has a turn at least so often, also when nothing seems to be due.
const LOOK_AROUND_NANOS: u64 = 1_000_000;
/// Longest drain, also with busy trainers.
const DRAIN_LONGEST: Duration = Duration::from_secs(2);

/// A change of the sessions that share a thread.
enum SeatChange<S> {
    Enter { lane: u64, session: S, control: SessionControl },
    Leave { lane: u64, left: Sender<S> },
}

/// A thread of sessions.
pub(super) struct SessionThread<S> {
    stop: Arc<AtomicBool>,
    entry: SessionEntry<S>,
    thread: Option<JoinHandle<Result<(), Failure>>>,
}

/// The way of sessions to a thread and from it.
pub(super) struct SessionEntry<S> {
    doorbell: Doorbell,
    changes: Sender<SeatChange<S>>,
}

impl<S: NodeSession> SessionThread<S> {
    /// A thread for one session, which gets every event of its transport.
    pub(super) fn lone(
        name: String,
        (session, control): (S, SessionControl),
        transport: impl Transport + 'static,
        machine: Arc<dyn ProcessMachine>,
    ) -> Result<Self, Failure> {
        Self::spawn(name, Seats::lone(session, control), transport, machine)
    }

    /// A thread for sessions that enter and leave.
    pub(super) fn shared(
        name: String,
        transport: impl Transport + 'static,
        machine: Arc<dyn ProcessMachine>,
    ) -> Result<Self, Failure> {
        Self::spawn(name, Seats::shared(), transport, machine)
    }

    fn spawn(
        name: String,
        seats: Seats<S>,
        transport: impl Transport + 'static,
        machine: Arc<dyn ProcessMachine>,
    ) -> Result<Self, Failure> {
        let (stop, doorbell) = (Arc::<AtomicBool>::default(), transport.doorbell());
        // Bounded in effect: each shard enters and leaves once for each of its moves.
        let (changes, changed) = unbounded();
        let mut drive = SessionLoop::new(seats, transport, machine);
        (drive.stop, drive.changed) = (Arc::clone(&stop), changed);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || drive.run())
            .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        Ok(Self { stop, entry: SessionEntry { doorbell, changes }, thread: Some(thread) })
    }

    /// The way of sessions to it and from it, for another thread.
    pub(super) fn entry(&self) -> SessionEntry<S> {
        let SessionEntry { doorbell, changes } = &self.entry;
        SessionEntry { doorbell: doorbell.clone(), changes: changes.clone() }
    }
}

impl<S: NodeSession> SessionEntry<S> {
    /// The doorbell of the thread's transport.
    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// From now on the session gets the events of the connections to `lane`.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(super) fn enter(&self, lane: u64, session: S, control: SessionControl) -> Result<(), Failure> {
        let entered = self.changes.send(SeatChange::Enter { lane, session, control });
        self.doorbell.ring();
        entered.map_err(|_| Failure::Node("the thread of the shard has ended".to_owned()))
    }

    /// Takes the session of a lane out, without waiting for frames that are on their way: their senders repeat them
    /// elsewhere. None where the thread has ended.
    pub(super) fn leave(&self, lane: u64) -> Option<S> {
        let (left, leaving) = bounded(1);
        self.changes.send(SeatChange::Leave { lane, left }).ok()?;
        self.doorbell.ring();
        leaving.recv().ok()
    }
}

impl<S> SessionThread<S> {
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Asks the thread to stop, once it has handled everything that arrived; [`SessionThread::join`] waits until it
    /// has.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.entry.doorbell.ring();
    }

    /// Waits until the thread has ended; at once where that was waited for.
    ///
    /// # Errors
    /// The failure with which it has ended.
    pub(super) fn join(&mut self) -> Result<(), Failure> {
        self.thread.take().map_or(Ok(()), join)
    }
}

impl<S> Drop for SessionThread<S> {
    /// A start that has failed leaves no thread behind.
    fn drop(&mut self) {
        self.stop();
        if let Err(failure) = self.join() {
            tracing::error!("stopping a thread: {failure}");
        }
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
    /// None: the thread was asked to stop and has handled everything that arrived.
    Over,
}

/// Sessions, their transport, and the state between two turns.
pub(super) struct SessionLoop<S, T> {
    seats: Seats<S>,
    transport: T,
    machine: Arc<dyn ProcessMachine>,
    stop: Arc<AtomicBool>,
    changed: Receiver<SeatChange<S>>,
    queue: VecDeque<Submit>,
    events: Vec<Event>,
    /// Time of the last turn.
    nanos: u64,
    last_event: Now,
    asked_to_stop: Option<Now>,
    /// When every session was last given a turn.
    looked_around: u64,
    /// The place of the session that has its turn. Behind a panic it is that of the session which panicked.
    at_work: Option<usize>,
}

impl<S: NodeSession, T: Transport> SessionLoop<S, T> {
    pub(super) fn new(seats: Seats<S>, transport: T, machine: Arc<dyn ProcessMachine>) -> Self {
        let nanos = machine.nanos();
        Self {
            seats,
            transport,
            machine,
            stop: Arc::default(),
            changed: crossbeam::channel::never(),
            queue: VecDeque::new(),
            events: Vec::new(),
            nanos,
            last_event: now_of(nanos),
            asked_to_stop: None,
            looked_around: 0,
            at_work: None,
        }
    }

    fn run(mut self) -> Result<(), Failure> {
        let panicked = |_| Err(Failure::Node("a session panicked".to_owned()));
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve())).unwrap_or_else(panicked);
        if let Err(failure) = &ended {
            tracing::error!("a session failed: {failure}");
        }
        ended.and(self.finish())
    }

    /// Whether finishing would wait for work that another thread does.
    pub(super) fn awaits_work(&self) -> bool {
        self.seats.iter().any(|seat| seat.session.awaits_work())
    }

    /// Finishes the sessions without another turn, all but one that has panicked. Several finish at once, as each
    /// writes its last checkpoint.
    ///
    /// # Errors
    /// The first failure of any of them.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        if self.seats.len() == 1 && self.at_work.is_none() {
            return self.seats.at(0).session.finish();
        }
        let at_work = self.at_work;
        let panicked = || Err(Failure::Node("a session panicked while it finished".to_owned()));
        std::thread::scope(|scope| {
            let whole = self.seats.iter_mut().enumerate().filter(|(place, _)| Some(*place) != at_work);
            let sessions = whole.map(|(_, seat)| &mut seat.session);
            let finishing: Vec<_> = sessions.map(|session| scope.spawn(|| session.finish())).collect();
            finishing.into_iter().map(|one| one.join().unwrap_or_else(|_| panicked())).fold(Ok(()), Result::and)
        })
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
        // A session enters before its lane is opened, so before its first event.
        while let Ok(change) = self.changed.try_recv() {
            self.change(change);
        }
        let before = std::mem::replace(&mut self.nanos, self.machine.nanos());
        let (nanos, now) = (self.nanos, now_of(self.nanos));
        self.seats.iter_mut().for_each(|seat| seat.observe(nanos, before));
        if !self.events.is_empty() {
            self.last_event = now;
        }
        self.give_events();
        let all_have_turns = self.seats.len() == 1 || self.looked_around + LOOK_AROUND_NANOS <= nanos;
        if all_have_turns {
            self.looked_around = nanos;
        }
        let (mut is_busy, mut is_under_way) = (false, false);
        for place in 0..self.seats.len() {
            // One session after the other handles its events and does its work, so that its answers leave before the
            // next one begins.
            self.at_work = Some(place);
            let turned = self.turn_of(place, all_have_turns);
            self.at_work = None;
            turned?;
            let seat = self.seats.at(place);
            is_busy |= seat.was_busy;
            is_under_way |= seat.session.is_under_way();
        }
        self.transport.submit(&mut self.queue)?;
        if self.stop.load(Ordering::Acquire) {
            let since = *self.asked_to_stop.get_or_insert(now);
            let is_quiet = self.queue.is_empty() && !is_under_way && now >= self.last_event + QUIET;
            if is_quiet || now >= since + DRAIN_LONGEST {
                return Ok(TurnEnd::Over);
            }
        }
        Ok(if is_busy { TurnEnd::Again } else { TurnEnd::Wait(self.pause(now, is_under_way)) })
    }

    /// Gives the events of a poll to their sessions.
    fn give_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            match self.seats.place(&event) {
                Some(place) => self.seats.at(place).give(event),
                None => {
                    if let Some(stranger) = self.seats.greet(event) {
                        self.transport.close(stranger);
                    }
                    // Buffers of a connection that has ended may be what a session waits for.
                    self.looked_around = 0;
                }
            }
        }
        self.events = events;
    }

    fn turn_of(&mut self, place: usize, is_due: bool) -> Result<(), Failure> {
        let (seat, nanos) = (self.seats.at(place), self.nanos);
        if seat.handle_given(nanos)? || is_due || seat.has_work(nanos) { self.work(place) } else { Ok(()) }
    }

    /// Does the work of a session, and lets its answers leave.
    fn work(&mut self, place: usize) -> Result<(), Failure> {
        let seat = self.seats.at(place);
        seat.work(self.nanos)?;
        for output in seat.outputs() {
            match output {
                ServerOutput::Submit(submit) => self.queue.push_back(submit),
                ServerOutput::Close(peer) => {
                    // Frames queued before the close are sent first.
                    self.transport.submit(&mut self.queue)?;
                    self.transport.close(peer);
                }
            }
        }
        self.transport.submit(&mut self.queue)
    }

    fn change(&mut self, change: SeatChange<S>) {
        match change {
            SeatChange::Enter { lane, session, control } => self.seats.enter(lane, Seat::new(session, control)),
            SeatChange::Leave { lane, left } => {
                let Some((session, peers)) = self.seats.leave(lane) else { return };
                peers.into_iter().for_each(|peer| self.transport.close(peer));
                // The receiver waits for it.
                let _ = left.send(session);
            }
        }
    }

    fn pause(&self, now: Now, is_under_way: bool) -> Duration {
        let longest = match self.asked_to_stop {
            _ if is_under_way => DEVICE_LOOK,
            Some(_) => QUIET / 2,
            None => WAIT_LONGEST,
        };
        let deadlines = self.seats.iter().filter_map(Seat::due);
        deadlines.min().map_or(longest, |deadline| now.until(deadline).min(longest))
    }
}

#[cfg(test)]
mod tests;

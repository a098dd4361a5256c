//! Whose turn it is. One thread at a time is inside a client and moves everybody's calls; whoever wants to enter
//! knocks, and whoever is inside and waits for servers steps outside.
//!
//! Who has stepped outside sleeps until its call is over, or nobody else moves it: whoever leaves wakes one of those
//! who wait, or else the client's own thread.
//!
//! A panic ends every call and the transport, and brings everything home that was lent: the client goes on with
//! another transport.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::memory::{LoanBook, lend};
use pserver_core::port::Doorbell;
use pserver_core::time::Now;

use super::State;
use super::calls::CallNumber;

/// The longest that a thread sleeps outside before it looks whether anybody moves its call.
const OUTSIDE_LONGEST: Duration = Duration::from_millis(500);

/// A client as its threads share it.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Threads that want to enter.
    knocking: AtomicUsize,
    /// Wakes the client's own thread where it waits for work, or for its turn.
    work: Condvar,
    /// Wakes whoever is inside where it waits for the network.
    doorbell: Doorbell,
    mover: Mutex<Mover>,
}

/// The client's own thread.
#[derive(Default)]
enum Mover {
    #[default]
    None,
    Runs(JoinHandle<()>),
    Stops,
}

/// A turn inside the client.
pub(super) struct Entered<'a> {
    shared: &'a Shared,
    /// Gone only while it is outside.
    state: Option<MutexGuard<'a, State>>,
    /// When the call that entered must be over, as far as it is not about parameters.
    pub(super) until: Now,
    was_panicking: bool,
}

impl Shared {
    pub(super) fn new(state: State) -> Self {
        Self {
            doorbell: state.engine.doorbell(),
            state: Mutex::new(state),
            knocking: AtomicUsize::new(0),
            work: Condvar::new(),
            mover: Mutex::default(),
        }
    }

    /// Waits for its turn.
    pub(super) fn enter(&self) -> Entered<'_> {
        self.entered(self.lock_in_turn())
    }

    /// A turn, when nobody is inside.
    pub(super) fn try_enter(&self) -> Option<Entered<'_>> {
        match self.state.try_lock() {
            Ok(state) => Some(self.entered(state)),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.entered(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn entered<'a>(&'a self, state: MutexGuard<'a, State>) -> Entered<'a> {
        let until = state.engine.now() + state.options.deadline;
        Entered { shared: self, state: Some(state), until, was_panicking: std::thread::panicking() }
    }

    /// Sees to it that calls move on while nobody is inside.
    pub(super) fn move_on(self: &Arc<Self>) -> Result<(), Failure> {
        let mut mover = self.mover();
        let is_there = match &*mover {
            Mover::None => false,
            Mover::Runs(thread) => !thread.is_finished(),
            Mover::Stops => true,
        };
        if !is_there {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("pserver-calls".to_owned()).spawn(move || shared.run());
            let failed = |error| Failure::call(format!("starting the thread that moves calls: {error}"));
            *mover = Mover::Runs(thread.map_err(failed)?);
        }
        Ok(())
    }

    /// Gives every call up and stops the client's own thread.
    pub(super) fn stop(&self) {
        let mut entered = self.enter();
        entered.abort_all("the client was released");
        let mover = std::mem::replace(&mut *self.mover(), Mover::Stops);
        drop(entered);
        self.work.notify_all();
        if let Mover::Runs(thread) = mover {
            // It has nothing left to do but to see that.
            let _ = thread.join();
        }
    }

    /// The life of the client's own thread.
    fn run(&self) {
        let mut state = self.lock();
        while !matches!(*self.mover(), Mover::Stops) {
            if self.is_knocked() || !state.is_running() {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                state.advance(Duration::MAX);
            }
        }
    }

    /// Whether the client's own thread ended before its time: whoever asks moves the calls then.
    fn mover_is_gone(&self) -> bool {
        matches!(&*self.mover(), Mover::Runs(thread) if thread.is_finished())
    }

    fn mover(&self) -> MutexGuard<'_, Mover> {
        self.mover.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_knocked(&self) -> bool {
        self.knocking.load(SeqCst) > 0
    }

    fn lock_in_turn(&self) -> MutexGuard<'_, State> {
        match self.state.try_lock() {
            Ok(state) => return state,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {}
        }
        self.knocking.fetch_add(1, SeqCst);
        self.doorbell.ring();
        let state = self.lock();
        self.knocking.fetch_sub(1, SeqCst);
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A turn that panicked was brought to an end before the lock was given back.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a turn. When nobody wants to enter, somebody goes on with the calls.
    fn leave(&self, mut state: MutexGuard<'_, State>) {
        let next = if self.is_knocked() { None } else { state.next_waiter() };
        drop(state);
        match next {
            Some(thread) => thread.unpark(),
            None => self.work.notify_one(),
        }
    }
}

impl Entered<'_> {
    /// Waits until a call is over, true also when nobody knows it. Meanwhile this thread moves everybody's calls, or
    /// another does.
    pub(super) fn wait_over(&mut self, call: CallNumber) {
        while !self.is_over(call) {
            if self.shared.is_knocked() {
                self.step_out(call);
            } else {
                self.advance(Duration::MAX);
            }
        }
    }

    /// Waits until a call is over and takes its result; nothing when nobody knows the call.
    pub(super) fn wait(&mut self, call: CallNumber) -> Option<Result<(), Failure>> {
        self.wait_over(call);
        self.take(call)
    }

    /// Whether a call is over; it moves on although nobody waits for it.
    pub(super) fn look_at(&mut self, call: CallNumber) -> bool {
        if !self.is_over(call) && self.shared.mover_is_gone() {
            self.advance(Duration::ZERO);
        }
        self.is_over(call)
    }

    /// Lends for the length of `body`. Whatever panics in it, everything that was lent is back afterwards.
    pub(super) fn lend<'env, R>(
        &mut self,
        body: impl FnOnce(&mut Self, &LoanBook<'env>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        lend(|book| self.contain(|state| body(state, book)))
    }

    /// Whatever panics in `body` becomes a failure.
    pub(super) fn contain<R>(&mut self, body: impl FnOnce(&mut Self) -> Result<R, Failure>) -> Result<R, Failure> {
        let outcome = catch_unwind(AssertUnwindSafe(|| body(self)));
        outcome.unwrap_or_else(|panic| Err(self.collapse(panic.as_ref())))
    }

    /// Lets others enter; comes back when the call is over, or nobody moves it.
    fn step_out(&mut self, call: CallNumber) {
        let thread = std::thread::current();
        let id = thread.id();
        self.waits(call, thread);
        self.shared.leave(self.state.take().expect("it is inside"));
        std::thread::park_timeout(OUTSIDE_LONGEST);
        self.state = Some(self.shared.lock_in_turn());
        self.waits_no_more(call, id);
    }
}

impl Deref for Entered<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect("it is inside")
    }
}

impl DerefMut for Entered<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("it is inside")
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let Some(mut state) = self.state.take() else { return };
        if std::thread::panicking() && !self.was_panicking {
            state.collapse(&"a panic within a call");
        }
        self.shared.leave(state);
    }
}

/// What somebody panicked with, in words.
pub(crate) fn reason(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it gave no reason")
}

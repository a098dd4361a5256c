//! The lock of a client. The thread that holds it drives all calls in progress, and yields the lock on request.
//!
//! A thread that contends for the lock raises a count and rings the doorbell of the transport. The holder then releases
//! the lock and parks until its own call is over. A thread that releases the lock unparks one waiting thread, or wakes
//! the client's driver thread when no call has a waiting thread.
//!
//! A panic under the lock fails every call and drops the transport, which returns all borrowed memory. The client
//! then makes another transport.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::memory::{LoanBook, lend};
use pserver_core::port::Doorbell;
use pserver_core::time::Now;

use super::ClientState;
use super::call::CallNumber;
use super::cancels::{CallStart, Cancellations};
use super::interrupts::{INTERRUPTS_ASKED, asked};

/// Longest park of a waiting thread, in case no other thread drives its call.
const PARK_LONGEST: Duration = Duration::from_millis(500);

/// Interval at which an idle client drives its connections: several times within the grace time of a server for a
/// reconnecting trainer.
const KEEP_ALIVE: Duration = Duration::from_millis(250);

/// The client's state behind its lock, shared by its threads.
pub(super) struct ClientLock {
    state: Mutex<ClientState>,
    /// Threads that contend for the lock.
    contenders: AtomicUsize,
    /// Wakes the driver thread where it waits for calls, or for the end of contention.
    work: Condvar,
    /// Whether it waits. Changed under the lock: waking a thread that does not wait is a system call too.
    driver_waits: AtomicBool,
    /// Wakes the lock's holder where it waits for the network.
    doorbell: Doorbell,
    cancels: Arc<Cancellations>,
    driver: Mutex<DriverThread>,
}

/// The thread that drives calls started by [`Client::scope`](super::Client::scope) while no caller does.
#[derive(Default)]
enum DriverThread {
    #[default]
    NotStarted,
    Running(JoinHandle<()>),
    Stopping,
}

/// Holds the client lock for one call.
pub(super) struct ClientGuard<'a> {
    lock: &'a ClientLock,
    /// None only while the thread is parked.
    state: Option<MutexGuard<'a, ClientState>>,
    /// Deadline of control requests that this call makes.
    pub(super) until: Now,
    /// When the program is next asked whether the call is to end.
    ask_at: Now,
    was_panicking: bool,
    began: CallStart,
}

impl ClientLock {
    pub(super) fn new(state: ClientState) -> Self {
        Self {
            doorbell: state.engine.doorbell(),
            cancels: Arc::clone(&state.cancels),
            state: Mutex::new(state),
            contenders: AtomicUsize::new(0),
            work: Condvar::new(),
            driver_waits: AtomicBool::new(false),
            driver: Mutex::default(),
        }
    }

    /// Takes the lock.
    pub(super) fn lock(&self) -> ClientGuard<'_> {
        let began = CallStart::now();
        self.guard(self.contend(), began)
    }

    /// Takes the lock when no other thread holds it.
    pub(super) fn try_lock(&self) -> Option<ClientGuard<'_>> {
        let began = CallStart::now();
        match self.state.try_lock() {
            Ok(state) => Some(self.guard(state, began)),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.guard(poisoned.into_inner(), began)),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn guard<'a>(&'a self, mut state: MutexGuard<'a, ClientState>, began: CallStart) -> ClientGuard<'a> {
        state.engine.tick();
        if state.engine.is_closed() {
            state.memory.caller.hide_closed();
            state.engine.drop_closed();
        }
        let now = state.engine.now();
        let (until, ask_at) = (now + state.options.deadline, now + INTERRUPTS_ASKED);
        ClientGuard { lock: self, state: Some(state), until, ask_at, was_panicking: std::thread::panicking(), began }
    }

    pub(super) fn cancels(&self) -> &Cancellations {
        &self.cancels
    }

    /// Starts the driver thread, unless it is running.
    pub(super) fn start_driver(self: &Arc<Self>) -> Result<(), Failure> {
        let mut driver = self.driver();
        let is_started = match &*driver {
            DriverThread::NotStarted => false,
            DriverThread::Running(thread) => !thread.is_finished(),
            DriverThread::Stopping => true,
        };
        if !is_started {
            let lock = Arc::clone(self);
            let thread = std::thread::Builder::new().name("pserver-calls".to_owned()).spawn(move || lock.drive());
            let failed = |error| Failure::call(format!("starting the thread that drives calls: {error}"));
            *driver = DriverThread::Running(thread.map_err(failed)?);
        }
        Ok(())
    }

    /// Aborts every call and stops the driver thread.
    pub(super) fn stop(&self) {
        let mut guard = self.lock();
        guard.abort_all("the client was released");
        let driver = std::mem::replace(&mut *self.driver(), DriverThread::Stopping);
        drop(guard);
        self.work.notify_all();
        if let DriverThread::Running(thread) = driver {
            let _ = thread.join();
        }
    }

    /// Drives the connections of a trainer, and the lease of an initialiser, while the trainer computes between its
    /// calls. Servers regard a trainer with an open connection as alive.
    pub(super) fn keep_alive(self: &Arc<Self>) {
        let lock = Arc::downgrade(self);
        let keep = move || {
            while let Some(lock) = lock.upgrade() {
                if let Some(mut state) = lock.try_lock().filter(|state| state.has_joined()) {
                    state.advance(Duration::ZERO);
                }
                drop(lock);
                std::thread::sleep(KEEP_ALIVE);
            }
        };
        // Without this thread, calls alone keep the connections alive.
        let _ = std::thread::Builder::new().name("pserver-alive".to_owned()).spawn(keep);
    }

    /// Drives calls until the client stops, and yields the lock under contention.
    fn drive(&self) {
        let mut state = self.lock_state();
        while !matches!(*self.driver(), DriverThread::Stopping) {
            if self.is_contended() || !state.is_running() {
                self.driver_waits.store(true, SeqCst);
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                self.driver_waits.store(false, SeqCst);
            } else {
                state.advance(Duration::MAX);
            }
        }
    }

    /// Whether the driver thread ended early. The calls are then driven by the threads that poll them.
    fn driver_has_ended(&self) -> bool {
        matches!(&*self.driver(), DriverThread::Running(thread) if thread.is_finished())
    }

    fn driver(&self) -> MutexGuard<'_, DriverThread> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_contended(&self) -> bool {
        self.contenders.load(SeqCst) > 0
    }

    /// Takes the lock, and asks its holder to yield it where there is one.
    fn contend(&self) -> MutexGuard<'_, ClientState> {
        match self.state.try_lock() {
            Ok(state) => return state,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {}
        }
        self.contenders.fetch_add(1, SeqCst);
        self.doorbell.ring();
        let state = self.lock_state();
        self.contenders.fetch_sub(1, SeqCst);
        state
    }

    fn lock_state(&self) -> MutexGuard<'_, ClientState> {
        // A panicking holder has failed all calls before it releases the lock, so the state is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the lock. Without contention, a waiting thread or the driver thread takes over the calls.
    fn release(&self, mut state: MutexGuard<'_, ClientState>) {
        let next = if self.is_contended() { None } else { state.next_waiter() };
        let driver_waits = self.driver_waits.load(SeqCst);
        drop(state);
        match next {
            Some(thread) => thread.unpark(),
            None if driver_waits => self.work.notify_one(),
            None => {}
        }
    }
}

impl ClientGuard<'_> {
    /// Waits until a call is over, or is unknown. Meanwhile this thread or another drives all calls.
    pub(super) fn wait_over(&mut self, call: CallNumber) {
        while !self.is_over(call) {
            if self.lock.cancels.reach(self.began) {
                // The call may have been started by this API call after its cancellation.
                self.cancel_call(call);
            }
            if self.is_interrupted() {
                self.cancel_call(call);
            }
            if self.lock.is_contended() {
                self.park(call);
            } else {
                self.advance(Duration::MAX);
            }
        }
    }

    /// Asks the program, without the lock and at intervals, whether this call is to end.
    fn is_interrupted(&mut self) -> bool {
        let Some(ask) = asked() else { return false };
        let now = self.engine.now();
        if now < self.ask_at {
            return false;
        }
        self.lock.release(self.state.take().expect("the lock is held"));
        let is_interrupted = ask();
        self.state = Some(self.lock.contend());
        self.ask_at = self.engine.tick() + INTERRUPTS_ASKED;
        is_interrupted
    }

    /// Fails when this API call was cancelled.
    pub(super) fn check_cancelled(&self) -> Result<(), Failure> {
        self.lock.cancels.check(self.began)
    }

    /// Waits until a call is over and takes its result; none for an unknown call.
    pub(super) fn wait(&mut self, call: CallNumber) -> Option<Result<(), Failure>> {
        self.wait_over(call);
        self.take(call)
    }

    /// Whether a call is over. Drives it when the driver thread has ended.
    pub(super) fn poll(&mut self, call: CallNumber) -> bool {
        if !self.is_over(call) && self.lock.driver_has_ended() {
            self.advance(Duration::ZERO);
        }
        self.is_over(call)
    }

    /// Lends memory for the length of `body`. All borrowed memory is returned afterwards, also after a panic.
    pub(super) fn lend<'env, R>(
        &mut self,
        body: impl FnOnce(&mut Self, &LoanBook<'env>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        lend(|book| self.contain(|state| body(state, book)))
    }

    /// Turns a panic of `body` into a failure.
    pub(super) fn contain<R>(&mut self, body: impl FnOnce(&mut Self) -> Result<R, Failure>) -> Result<R, Failure> {
        let outcome = catch_unwind(AssertUnwindSafe(|| body(self)));
        outcome.unwrap_or_else(|panic| Err(self.fail_all(panic.as_ref())))
    }

    /// Releases the lock and parks until the call is over, or no other thread drives it.
    fn park(&mut self, call: CallNumber) {
        let thread = std::thread::current();
        let id = thread.id();
        self.add_waiter(call, thread);
        self.lock.release(self.state.take().expect("the lock is held"));
        std::thread::park_timeout(if asked().is_some() { INTERRUPTS_ASKED } else { PARK_LONGEST });
        self.state = Some(self.lock.contend());
        self.remove_waiter(call, id);
    }
}

impl Deref for ClientGuard<'_> {
    type Target = ClientState;

    fn deref(&self) -> &ClientState {
        self.state.as_ref().expect("the lock is held")
    }
}

impl DerefMut for ClientGuard<'_> {
    fn deref_mut(&mut self) -> &mut ClientState {
        self.state.as_mut().expect("the lock is held")
    }
}

impl Drop for ClientGuard<'_> {
    fn drop(&mut self) {
        let Some(mut state) = self.state.take() else { return };
        if std::thread::panicking() && !self.was_panicking {
            state.fail_all(&"a panic within a call");
        }
        self.lock.release(state);
    }
}

/// The text of a panic's payload.
pub fn reason(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason was given")
}

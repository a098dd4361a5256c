//! Whose turn it is. One thread at a time is inside a client; whoever wants to enter knocks, and the client's own
//! thread, which moves calls that nobody waits for, steps outside.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::port::Doorbell;

use super::State;
use super::calls::CallNumber;

/// The longest that one wait for a call's end lasts before it is looked whether anybody moves it.
const NEWS_LONGEST: Duration = Duration::from_millis(500);

/// A client as its threads share it.
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Threads that want to enter.
    knocking: AtomicUsize,
    /// Wakes the client's own thread where it waits for work, or for its turn.
    work: Condvar,
    /// Wakes those who wait for a call's end.
    news: Condvar,
    /// Wakes the client's own thread where it waits for the network.
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
    /// Gone only while it is given back.
    state: Option<MutexGuard<'a, State>>,
}

impl Shared {
    pub(super) fn new(state: State) -> Self {
        Self {
            doorbell: state.engine.doorbell(),
            state: Mutex::new(state),
            knocking: AtomicUsize::new(0),
            work: Condvar::new(),
            news: Condvar::new(),
            mover: Mutex::default(),
        }
    }

    /// Waits for its turn.
    pub(super) fn enter(&self) -> Entered<'_> {
        if let Ok(state) = self.state.try_lock() {
            return Entered { shared: self, state: Some(state) };
        }
        self.knocking.fetch_add(1, SeqCst);
        self.doorbell.ring();
        let state = self.lock();
        self.knocking.fetch_sub(1, SeqCst);
        Entered { shared: self, state: Some(state) }
    }

    /// Sees to it that calls move on while nobody is inside.
    pub(super) fn move_on(self: &Arc<Self>) -> Result<(), Failure> {
        let mut mover = self.mover();
        if matches!(*mover, Mover::None) {
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
            if self.knocking.load(SeqCst) > 0 || !state.is_running() {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.advance();
            if std::mem::take(&mut state.has_news) {
                self.news.notify_all();
            }
        }
    }

    /// Whether the client's own thread ended by a panic: whoever waits moves the calls then.
    fn mover_is_gone(&self) -> bool {
        matches!(&*self.mover(), Mover::Runs(thread) if thread.is_finished())
    }

    fn mover(&self) -> MutexGuard<'_, Mover> {
        self.mover.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A call that panicked has left nothing half done that the next one trips over.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the others what happened during a turn.
    fn tell(&self, has_news: bool) {
        if has_news {
            self.news.notify_all();
        }
        self.work.notify_one();
    }
}

impl Entered<'_> {
    /// Waits until a call is over that the client's own thread moves, and takes its result; nothing when nobody knows
    /// the call.
    pub(super) fn wait(&mut self, call: CallNumber) -> Option<Result<(), Failure>> {
        while !self.is_over(call) {
            let has_news = std::mem::take(&mut self.has_news);
            self.shared.tell(has_news);
            if self.shared.mover_is_gone() {
                self.advance();
                continue;
            }
            let state = self.state.take().expect("it is inside");
            let waited = self.shared.news.wait_timeout(state, NEWS_LONGEST);
            self.state = Some(waited.unwrap_or_else(PoisonError::into_inner).0);
        }
        self.take(call)
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
        let has_news = std::mem::take(&mut state.has_news);
        drop(state);
        self.shared.tell(has_news);
    }
}

//! Cancelling the calls of a client, from any thread and from a signal handler.
//!
//! A cancellation is a time on a clock that counts cancellations: it ends the client's calls that began before it, and
//! no later one. The holder of the client lock checks it in each turn, at least every
//! [`WAIT_LONGEST`](super::engine::WAIT_LONGEST).
//!
//! Functions for signal handlers only read and write atomics: they take no lock, allocate nothing,
//! and follow pointers only to memory that is never freed. Slots are reused, and still no cancellation reaches the
//! wrong client: the time of a cancellation is drawn before the slot's name is compared, so the calls of a client that
//! gets the slot after that began later.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

use pserver_core::error::{CallEnd, Failure};

/// Error of a cancelled call.
const CANCELLED: &str = "cancelled by the program";

/// The failure of a cancelled call.
pub(super) fn cancelled() -> Failure {
    Failure::ended(CallEnd::Cancelled, CANCELLED)
}

/// Cancellations so far, and one.
static CLOCK: AtomicU64 = AtomicU64::new(1);
/// The slot that was made last.
static SLOTS: AtomicPtr<CancelSlot> = AtomicPtr::new(ptr::null_mut());

/// The name of a slot that has no client.
const FREE: u64 = 0;
/// The name of a slot whose client has no handle.
const UNNAMED: u64 = 1;

thread_local! {
    /// When the function that C called began; zero outside of one.
    static BEGAN: Cell<u64> = const { Cell::new(0) };
}

/// Where the cancellations of one client are noted.
struct CancelSlot {
    /// The handle under which C knows the client.
    name: AtomicU64,
    /// The process that named it: a child process inherits the slots of its parent's clients.
    process: AtomicU32,
    /// When its calls were cancelled last.
    cancelled: AtomicU64,
    /// The slot that was made before.
    before: *const CancelSlot,
}

// SAFETY: `before` is written before the slot is shared and points to a slot that lives as long as the process; the
// rest is atomic.
unsafe impl Sync for CancelSlot {}

/// A client's slot, until it is dropped.
pub(super) struct Cancellations(&'static CancelSlot);

/// The time at which a call begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CallStart(u64);

/// Everything that this thread does in a client meanwhile began when this value was made.
pub struct CallScope(u64);

impl Cancellations {
    pub(super) fn new() -> Self {
        let take = |slot: &&CancelSlot| slot.name.compare_exchange(FREE, UNNAMED, SeqCst, SeqCst).is_ok();
        Self(slots().find(take).unwrap_or_else(CancelSlot::add))
    }

    /// Gives the client the handle that [`cancel`] finds it by; none takes it away.
    pub(super) fn name(&self, handle: Option<u64>) {
        self.0.process.store(std::process::id(), SeqCst);
        self.0.name.store(handle.unwrap_or(UNNAMED), SeqCst);
    }

    pub(super) fn cancel(&self) {
        self.0.cancelled.fetch_max(now(), SeqCst);
    }

    /// Whether what began then was cancelled since.
    pub(super) fn reach(&self, began: CallStart) -> bool {
        self.0.cancelled.load(SeqCst) > began.0
    }

    /// The failure of what began then, if it was cancelled since.
    pub(super) fn check(&self, began: CallStart) -> Result<(), Failure> {
        if self.reach(began) { Err(cancelled()) } else { Ok(()) }
    }
}

impl Drop for Cancellations {
    fn drop(&mut self) {
        self.0.name.store(FREE, SeqCst);
    }
}

impl CancelSlot {
    fn add() -> &'static Self {
        let mut slot = Box::new(Self {
            name: AtomicU64::new(UNNAMED),
            process: AtomicU32::new(0),
            cancelled: AtomicU64::new(0),
            before: ptr::null(),
        });
        let mut last = SLOTS.load(SeqCst);
        loop {
            slot.before = last;
            let added = Box::into_raw(slot);
            match SLOTS.compare_exchange(last, added, SeqCst, SeqCst) {
                // SAFETY: the slot was leaked a moment ago, and nothing frees it.
                Ok(_) => return unsafe { &*added },
                Err(newer) => {
                    last = newer;
                    // SAFETY: it was not added, so no other thread has seen it.
                    slot = unsafe { Box::from_raw(added) };
                }
            }
        }
    }
}

impl CallStart {
    /// Now, or when the function began that C has called.
    pub(super) fn now() -> Self {
        let began = BEGAN.get();
        Self(if began == 0 { CLOCK.load(SeqCst) } else { began })
    }
}

impl CallScope {
    /// Begins a call of this thread.
    #[must_use]
    pub fn begin() -> Self {
        Self(BEGAN.replace(CallStart::now().0))
    }
}

impl Drop for CallScope {
    fn drop(&mut self) {
        BEGAN.set(self.0);
    }
}

/// Cancellations what is under way in the client with this handle; true if there is one. A signal handler may call it.
pub fn cancel(handle: u64) -> bool {
    if handle <= UNNAMED {
        return false;
    }
    let time = now();
    let process = std::process::id();
    let is_match = |slot: &&CancelSlot| slot.name.load(SeqCst) == handle && slot.process.load(SeqCst) == process;
    let found = slots().find(is_match);
    found.inspect(|slot| {
        slot.cancelled.fetch_max(time, SeqCst);
    });
    found.is_some()
}

/// The time of a new cancellation: later than that of every call that has begun.
fn now() -> u64 {
    CLOCK.fetch_add(1, SeqCst) + 1
}

fn slots() -> impl Iterator<Item = &'static CancelSlot> {
    // SAFETY: slots are leaked when they are made, so what either pointer points to lives until the process ends.
    let at = |slot: *const CancelSlot| unsafe { slot.as_ref() };
    std::iter::successors(at(SLOTS.load(SeqCst)), move |slot| at(slot.before))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancellation_ends_earlier_calls_and_not_later_ones() {
        let (one, other) = (Cancellations::new(), Cancellations::new());
        one.name(Some(1 << 40));
        other.name(Some((1 << 40) + 1));
        let before = CallStart::now();
        assert!(cancel(1 << 40));
        let after = CallStart::now();
        assert_eq!((one.reach(before), one.reach(after), other.reach(before)), (true, false, false));
        assert!(one.check(before).is_err() && one.check(after).is_ok());
        other.cancel();
        assert_eq!((other.reach(after), other.reach(CallStart::now())), (true, false));
    }

    #[test]
    fn a_client_without_a_handle_is_not_found_and_one_that_gets_its_slot_is_not_cancelled() {
        let handle = 1 << 41;
        let one = Cancellations::new();
        assert!(!cancel(handle) && !cancel(FREE) && !cancel(UNNAMED), "nothing has these names");
        one.name(Some(handle));
        assert!(cancel(handle));
        let slot = ptr::from_ref(one.0);
        drop(one);
        assert!(!cancel(handle), "it is gone");
        // Other tests of this process take slots at the same time.
        let all: Vec<_> = std::iter::repeat_with(Cancellations::new).take(64).collect();
        let again = all.iter().find(|other| ptr::eq(other.0, slot));
        assert!(
            again.is_none_or(|other| !other.reach(CallStart::now())),
            "an earlier client was cancelled, not this one"
        );
    }

    #[test]
    fn calls_within_one_scope_are_cancelled_as_of_its_begin() {
        let client = Cancellations::new();
        let call = CallScope::begin();
        client.cancel();
        assert!(client.reach(CallStart::now()), "the second part of a function began when the function did");
        drop(call);
        assert!(!client.reach(CallStart::now()));
    }

    #[test]
    fn threads_that_take_slots_at_once_get_different_ones() {
        let taken: Vec<_> = std::thread::scope(|threads| {
            let take = || std::iter::repeat_with(Cancellations::new).take(50).collect::<Vec<_>>();
            let all: Vec<_> = (0..8).map(|_| threads.spawn(take)).collect();
            all.into_iter().flat_map(|one| one.join().expect("it does not panic")).collect()
        });
        let places: std::collections::BTreeSet<_> = taken.iter().map(|one| ptr::from_ref(one.0).addr()).collect();
        assert_eq!(places.len(), 400);
    }
}

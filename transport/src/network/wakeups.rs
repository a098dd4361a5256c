//! Who has something to do: what the peers' wakers and the doorbell leave behind, and what a wait looks at.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

use pserver_core::ids::PeerId;
use tokio::sync::Notify;

/// Peers that may go on, and whether somebody rang.
#[derive(Default)]
pub(super) struct Wakeups {
    rung: AtomicBool,
    /// Each peer at most once.
    woken: Mutex<Vec<PeerId>>,
    /// Only a hint to look again; the two above are the truth.
    notify: Notify,
}

impl Wakeups {
    /// Makes the next or current wait return.
    pub(super) fn ring(&self) {
        self.rung.store(true, Release);
        self.notify.notify_one();
    }

    /// Returns once somebody rang or a peer was woken.
    pub(super) async fn wait(&self) {
        while !self.has_rung() && !self.has_woken() {
            self.notify.notified().await;
        }
    }

    /// Whether somebody rang; the ring is then over.
    pub(super) fn has_rung(&self) -> bool {
        self.rung.load(Acquire) && self.rung.swap(false, AcqRel)
    }

    /// Whether a peer was woken.
    pub(super) fn has_woken(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Moves the peers that were woken to the end of `into`.
    pub(super) fn take(&self, into: &mut Vec<PeerId>) {
        into.append(&mut self.lock());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<PeerId>> {
        // A list of numbers is whole after every operation, so a panic elsewhere does not spoil it.
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The waker of one peer.
pub(super) struct PeerWake {
    peer: PeerId,
    listed: AtomicBool,
    wakeups: Arc<Wakeups>,
}

impl PeerWake {
    /// The waker of `peer`, which reports to `wakeups`.
    pub(super) fn new(peer: PeerId, wakeups: &Arc<Wakeups>) -> Arc<Self> {
        Arc::new(Self { peer, listed: AtomicBool::new(false), wakeups: Arc::clone(wakeups) })
    }

    /// Says that the peer left the list, so that the next wake lists it again.
    pub(super) fn taken(&self) {
        self.listed.store(false, Release);
    }

    /// As the standard library's waker.
    pub(super) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }
}

impl Wake for PeerWake {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.listed.load(Acquire) || self.listed.swap(true, AcqRel) {
            return;
        }
        self.wakeups.lock().push(self.peer);
        self.wakeups.notify.notify_one();
    }
}

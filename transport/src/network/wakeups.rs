//! Wake-ups of a transport: peers whose wakers were called, and rings of the doorbell.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

use pserver_core::ids::PeerId;
use tokio::sync::Notify;

/// Woken peers, and whether the doorbell rang.
#[derive(Default)]
pub(super) struct Wakeups {
    is_notified: AtomicBool,
    /// Each peer at most once.
    woken: Mutex<Vec<PeerId>>,
    /// A hint to check again; the two fields above are the state.
    wait_hint: Notify,
}

impl Wakeups {
    /// Makes the next or current wait return.
    pub(super) fn notify_wait(&self) {
        self.is_notified.store(true, Release);
        self.wait_hint.notify_one();
    }

    /// Returns once the doorbell rang or a peer was woken.
    pub(super) async fn wait(&self) {
        while !self.take_notification() && !self.has_woken() {
            self.wait_hint.notified().await;
        }
    }

    /// Whether the doorbell rang; clears it.
    pub(super) fn take_notification(&self) -> bool {
        self.is_notified.load(Acquire) && self.is_notified.swap(false, AcqRel)
    }

    /// Whether a peer was woken.
    pub(super) fn has_woken(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Moves the woken peers to the end of `into`.
    pub(super) fn take(&self, into: &mut Vec<PeerId>) {
        into.append(&mut self.lock());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<PeerId>> {
        // Every operation leaves the list consistent, so a panic elsewhere does no harm.
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The waker of one peer.
pub(super) struct PeerWaker {
    peer: PeerId,
    is_queued: AtomicBool,
    wakeups: Arc<Wakeups>,
}

impl PeerWaker {
    /// The waker of `peer`, which reports to `wakeups`.
    pub(super) fn new(peer: PeerId, wakeups: &Arc<Wakeups>) -> Arc<Self> {
        Arc::new(Self { peer, is_queued: AtomicBool::new(false), wakeups: Arc::clone(wakeups) })
    }

    /// Records that the peer left the list, so that the next wake lists it again.
    pub(super) fn taken(&self) {
        self.is_queued.store(false, Release);
    }

    /// The standard library's waker.
    pub(super) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }
}

impl Wake for PeerWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_queued.load(Acquire) || self.is_queued.swap(true, AcqRel) {
            return;
        }
        self.wakeups.lock().push(self.peer);
        self.wakeups.wait_hint.notify_one();
    }
}

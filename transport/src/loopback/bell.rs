//! What a loopback transport waits on.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A bell that remembers one ring.
#[derive(Default)]
pub(super) struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// Makes the current or next wait return.
    pub(super) fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    /// Waits for a ring, and for no longer than `limit`.
    pub(super) fn wait(&self, limit: Duration) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.changed.wait_timeout_while(rung, limit, |rung| !*rung);
        let (mut rung, _) = outcome.unwrap_or_else(PoisonError::into_inner);
        *rung = false;
    }
}

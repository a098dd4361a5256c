//! The signal that wakes a loopback transport.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A signal that stays set until a wait.
#[derive(Default)]
pub(super) struct Signal {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    /// Makes the current or next wait return.
    pub(super) fn set(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    /// Waits until the signal is set, at most for `limit`.
    pub(super) fn wait(&self, limit: Duration) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.changed.wait_timeout_while(rung, limit, |rung| !*rung);
        let (mut rung, _) = outcome.unwrap_or_else(PoisonError::into_inner);
        *rung = false;
    }
}

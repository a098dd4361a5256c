//! Health of a device, which its watcher reports to all its connections.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The failure that ended a device's connections, if any, and whether its ports may have changed.
#[derive(Default)]
pub(super) struct DeviceHealth {
    failure: OnceLock<String>,
    has_changed: AtomicBool,
}

impl DeviceHealth {
    /// The failure of the device or its port, after which its queue pairs do not recover.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Records a failure. Only the first one is kept.
    pub(super) fn fail(&self, failure: String) {
        let _ = self.failure.set(failure);
    }

    /// Records that a port's state or addresses may be others.
    pub(super) fn change(&self) {
        self.has_changed.store(true, Ordering::Release);
    }

    /// Whether they may be others since the last call.
    pub(super) fn take_change(&self) -> bool {
        self.has_changed.swap(false, Ordering::AcqRel)
    }
}

//! Health of a device, which its watcher reports to all its connections.

use std::sync::OnceLock;

/// The failure that ended a device's connections, if any.
#[derive(Default)]
pub(super) struct DeviceHealth(OnceLock<String>);

impl DeviceHealth {
    /// The failure of the device or its port, after which its queue pairs do not recover.
    pub(super) fn failure(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
    /// Records a failure. Only the first one is kept.
    pub(super) fn fail(&self, failure: String) {
        let _ = self.0.set(failure);
    }
}

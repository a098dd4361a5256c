//! Service manager of this process, such as systemd, where one started it (`NOTIFY_SOCKET`).
//!
//! A restart reads a checkpoint and a journal, and a stop writes a checkpoint. Either may take longer than the manager
//! waits by default. While bytes are counted the manager is asked for more time; a process that hangs is not.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use pserver_core::metrics::WorkMeter;
use sd_notify::NotifyState;

/// Time between two looks at the counts.
const PERIOD: Duration = Duration::from_secs(10);
/// The time that is asked for, from each look on.
const EXTENSION: Duration = Duration::from_secs(60);

/// Tells the manager.
pub(crate) fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!("the service manager cannot be told (NOTIFY_SOCKET): {error}");
    }
}

/// Work for which the manager is asked for more time, until it is dropped.
pub(crate) struct ManagedWork(Option<(Sender<()>, JoinHandle<()>)>);

impl ManagedWork {
    /// Work that `meter` counts, such as `restoring`.
    pub(crate) fn start(label: &'static str, meter: &Arc<WorkMeter>) -> Self {
        if std::env::var_os("NOTIFY_SOCKET").is_none() {
            return Self(None);
        }
        let (stop, stopped) = channel();
        let meter = Arc::clone(meter);
        let ask = move || {
            let mut before = meter.counts();
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let now = meter.counts();
                if let Some(status) = progress(label, before, now) {
                    let micros = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
                    tell(&[NotifyState::ExtendTimeoutUsec(micros), NotifyState::Status(&status)]);
                }
                before = now;
            }
        };
        // Without a thread the manager waits as long as it does by default.
        let thread = std::thread::Builder::new().name("pserver-manager".to_owned()).spawn(ask);
        Self(thread.ok().map(|thread| (stop, thread)))
    }
}

impl Drop for ManagedWork {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// The status of work that has gone on between two looks, at counts of expected and done bytes.
fn progress(label: &str, before: (u64, u64), (expected, done): (u64, u64)) -> Option<String> {
    (before != (expected, done)).then(|| format!("{label}: {done} of {expected} bytes"))
}

#[cfg(test)]
mod tests {
    use super::progress;

    #[test]
    fn a_stage_that_makes_progress_extends_the_service_managers_timeout() {
        assert_eq!(progress("restoring", (0, 0), (90, 30)).as_deref(), Some("restoring: 30 of 90 bytes"));
        assert_eq!(progress("restoring", (90, 30), (90, 31)).as_deref(), Some("restoring: 31 of 90 bytes"));
        assert_eq!(progress("restoring", (90, 31), (90, 31)), None, "it hangs");
    }
}

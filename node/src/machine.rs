//! The machine that a server's sessions run on: its clocks and its threads.
//!
//! A process has [`OsMachine`]. A simulation has machines of its own, whose time passes as the simulation says.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pserver_core::error::Failure;
use pserver_core::time::Now;

/// Work that a session leaves to another thread.
pub type BackgroundWork = Box<dyn FnOnce() + Send>;

/// Clocks and threads for the sessions of a process.
pub trait ProcessMachine: Send + Sync {
    /// Nanoseconds since the start of the server. They never decrease.
    fn nanos(&self) -> u64;

    /// The time since 1970 by the machine's clock, which may be set back.
    fn unix_time(&self) -> Duration;

    /// Runs `work` on a thread of this name.
    ///
    /// # Errors
    /// When no thread can be started; the work is dropped.
    fn spawn(&self, name: &'static str, work: BackgroundWork) -> Result<(), Failure>;
}

impl dyn ProcessMachine + '_ {
    /// Milliseconds since the start of the server.
    pub(super) fn now(&self) -> Now {
        Now(self.nanos() / 1_000_000)
    }
}

/// The machine of this process.
#[derive(Debug)]
pub(super) struct OsMachine {
    origin: Instant,
}

impl OsMachine {
    /// The machine, whose clock starts now.
    #[must_use]
    pub(super) fn start() -> Self {
        Self { origin: Instant::now() }
    }
}

impl ProcessMachine for OsMachine {
    fn nanos(&self) -> u64 {
        let elapsed = self.origin.elapsed();
        elapsed.as_secs() * 1_000_000_000 + u64::from(elapsed.subsec_nanos())
    }

    fn unix_time(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }

    fn spawn(&self, name: &'static str, work: BackgroundWork) -> Result<(), Failure> {
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        spawned.map(drop).map_err(|error| Failure::call(format!("starting the thread {name}: {error}")))
    }
}

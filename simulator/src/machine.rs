//! The machine of a simulated process: its clocks, its background work, and its end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_node::{BackgroundWork, ProcessMachine};

use crate::time::{SimClock, SimTime};

/// The time since 1970 at which every simulation begins.
const BEGIN: Duration = Duration::from_secs(1_800_000_000);

/// The state of a process that its disk, its transports and its machine share.
#[derive(Default)]
pub(crate) struct ProcessFate {
    /// Whether it was killed: it writes and sends nothing more.
    is_dead: AtomicBool,
    /// Nanoseconds that its disk has taken in the current turn.
    lag: AtomicU64,
}

impl ProcessFate {
    pub(crate) fn kill(&self) {
        self.is_dead.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Relaxed)
    }

    /// Lets the current turn take longer.
    pub(crate) fn delay(&self, time: Duration) {
        self.lag.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn lag(&self) -> Duration {
        Duration::from_nanos(self.lag.load(Ordering::Relaxed))
    }

    /// How long the turn that ends has taken.
    pub(crate) fn take_lag(&self) -> Duration {
        Duration::from_nanos(self.lag.swap(0, Ordering::Relaxed))
    }
}

/// The machine of one process.
pub(crate) struct SimMachine {
    clock: SimClock,
    origin: SimTime,
    /// By how much its clock has jumped ahead.
    ahead: AtomicU64,
    work: Mutex<Vec<BackgroundWork>>,
}

impl SimMachine {
    pub(crate) fn start(clock: SimClock) -> Arc<Self> {
        let origin = clock.now();
        Arc::new(Self { clock, origin, ahead: AtomicU64::new(0), work: Mutex::default() })
    }

    /// Lets its clocks jump ahead, as after the suspension of a virtual machine.
    pub(crate) fn jump(&self, time: Duration) {
        self.ahead.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Takes the work that was left to threads.
    pub(crate) fn take_work(&self) -> Vec<BackgroundWork> {
        std::mem::take(&mut *self.work.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ProcessMachine for SimMachine {
    fn nanos(&self) -> u64 {
        self.clock.now().0 - self.origin.0 + self.ahead.load(Ordering::Relaxed)
    }

    fn unix_time(&self) -> Duration {
        BEGIN + Duration::from_nanos(self.clock.now().0)
    }

    fn spawn(&self, _name: &'static str, work: BackgroundWork) -> Result<(), Failure> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).push(work);
        Ok(())
    }
}

//! Time of a simulation, which passes from event to event.

use std::fmt;
use std::ops::Add;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nanoseconds since the start of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SimTime(pub(crate) u64);

impl Add<Duration> for SimTime {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for SimTime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.6} s", Duration::from_nanos(self.0).as_secs_f64())
    }
}

/// The clock of a simulation. A clone is the same clock.
#[derive(Clone, Default)]
pub(crate) struct SimClock(Arc<AtomicU64>);

impl SimClock {
    pub(crate) fn now(&self) -> SimTime {
        SimTime(self.0.load(Ordering::Relaxed))
    }

    pub(crate) fn advance(&self, to: SimTime) {
        self.0.store(to.0, Ordering::Relaxed);
    }
}

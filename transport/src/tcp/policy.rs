//! How a wait waits: in the system, or looking again and again.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How a wait waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Poll {
    /// In the system, from the beginning.
    Block,
    /// Looking for a short while when that has paid lately and a core is free for it, and then in the system.
    #[default]
    Adaptive,
    /// Looking until the limit: the shortest latency, and a whole core.
    Busy,
}

/// A wait is expected to be worth looking through when it is shorter than this: sleeping and being woken costs about
/// as much.
const SPIN: Duration = Duration::from_micros(50);
/// How much trust a short wait gives, a long one takes, and there can be.
const TRUST_GAIN: u8 = 2;
const TRUST_MAX: u8 = 16;

/// Threads of this process that look at the moment.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// What one transport has learnt of its waits.
pub(super) struct Spin {
    trust: u8,
    cores: usize,
}

/// Leave to look for a while; dropping it lets another thread.
pub(super) struct Permit(Duration);

impl Spin {
    pub(super) fn new() -> Self {
        Self { trust: TRUST_MAX, cores: std::thread::available_parallelism().map_or(1, usize::from) }
    }

    /// Leave to look, if `poll` and the past say so.
    pub(super) fn begin(&self, poll: Poll) -> Option<Permit> {
        let limit = match poll {
            Poll::Block => return None,
            Poll::Adaptive if self.trust == 0 => return None,
            Poll::Adaptive => SPIN,
            Poll::Busy => Duration::MAX,
        };
        let others = SPINNING.fetch_add(1, Relaxed);
        let permit = Permit(limit);
        (poll == Poll::Busy || others < self.cores).then_some(permit)
    }

    /// A wait took so long.
    pub(super) fn learn(&mut self, waited: Duration) {
        self.trust = match waited < SPIN {
            true => (self.trust + TRUST_GAIN).min(TRUST_MAX),
            false => self.trust.saturating_sub(1),
        };
    }
}

impl Permit {
    /// For how long at most.
    pub(super) fn limit(&self) -> Duration {
        self.0
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Relaxed);
    }
}

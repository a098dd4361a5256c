//! How a wait waits: in the system, or looking again and again.

use std::str::FromStr;
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

/// The words for it, for error texts.
pub const POLL_EXPECTED: &str = "one of block, adaptive, busy";

impl FromStr for Poll {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "block" => Ok(Self::Block),
            "adaptive" => Ok(Self::Adaptive),
            "busy" => Ok(Self::Busy),
            _ => Err(()),
        }
    }
}

/// For how long a wait looks before it sleeps: sleeping and being woken costs about as much.
const SPIN: Duration = Duration::from_micros(40);
/// After looking in vain, so many waits sleep at once; twice as many each time, up to this. So a process that shares
/// its core with the one it waits for, or waits for long, looks hardly ever.
const PAUSE_MAX: u32 = 64;

/// Threads of this process that look at the moment.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// What one transport has learnt of its waits.
pub(super) struct Spin {
    cores: usize,
    /// Waits that will sleep at once.
    pause: u32,
    /// How many they were the last time that looking was in vain.
    last_pause: u32,
}

/// Leave to look for a while; dropping it lets another thread.
pub(super) struct Permit(Duration);

impl Spin {
    pub(super) fn new() -> Self {
        Self { cores: std::thread::available_parallelism().map_or(1, usize::from), pause: 0, last_pause: 0 }
    }

    /// Leave to look, if `poll` and the past say so.
    pub(super) fn begin(&mut self, poll: Poll) -> Option<Permit> {
        let limit = match poll {
            Poll::Block => return None,
            Poll::Adaptive if self.pause > 0 => {
                self.pause -= 1;
                return None;
            }
            Poll::Adaptive => SPIN,
            Poll::Busy => Duration::MAX,
        };
        let others = SPINNING.fetch_add(1, Relaxed);
        let permit = Permit(limit);
        (poll == Poll::Busy || others < self.cores).then_some(permit)
    }

    /// Whether looking found something.
    pub(super) fn learn(&mut self, has_found: bool) {
        self.last_pause = if has_found { self.last_pause / 2 } else { (self.last_pause * 2).clamp(1, PAUSE_MAX) };
        self.pause = if has_found { 0 } else { self.last_pause };
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

//! Waiting: sleeping in the kernel, or polling for a while first.

use std::str::FromStr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The policy of waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollPolicy {
    /// Sleep at once.
    Block,
    /// Poll for a short time if that succeeded lately and a core is free, then sleep.
    #[default]
    Adaptive,
    /// Poll until the limit: the lowest latency, for a whole core.
    Busy,
}

/// The accepted values, for error texts.
pub const POLL_EXPECTED: &str = "one of block, adaptive, busy";

impl FromStr for PollPolicy {
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

/// Time to poll before sleeping: about the cost of a sleep and a wake-up.
const SPIN: Duration = Duration::from_micros(40);
/// After polling in vain, so many waits sleep at once, doubled each time up to this. So a process that shares its core
/// with its peer, or waits long, hardly polls.
const PAUSE_MAX: u32 = 64;

/// Threads of this process that poll now.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// The history of one transport's waits.
pub(super) struct SpinHistory {
    cores: usize,
    /// Waits that will sleep at once.
    pause: u32,
    /// The pause after the last vain polling.
    last_pause: u32,
}

/// Permission to poll; dropping it frees the slot for another thread.
pub(super) struct SpinPermit(Duration);

impl SpinHistory {
    pub(super) fn new() -> Self {
        Self { cores: std::thread::available_parallelism().map_or(1, usize::from), pause: 0, last_pause: 0 }
    }

    /// Permission to poll, if the policy and the history allow it.
    pub(super) fn begin(&mut self, poll: PollPolicy) -> Option<SpinPermit> {
        let limit = match poll {
            PollPolicy::Block => return None,
            PollPolicy::Adaptive if self.pause > 0 => {
                self.pause -= 1;
                return None;
            }
            PollPolicy::Adaptive => SPIN,
            PollPolicy::Busy => Duration::MAX,
        };
        let others = SPINNING.fetch_add(1, Relaxed);
        let permit = SpinPermit(limit);
        (poll == PollPolicy::Busy || others < self.cores).then_some(permit)
    }

    /// Records whether polling found work.
    pub(super) fn learn(&mut self, has_found: bool) {
        self.last_pause = if has_found { self.last_pause / 2 } else { (self.last_pause * 2).clamp(1, PAUSE_MAX) };
        self.pause = if has_found { 0 } else { self.last_pause };
    }
}

impl SpinPermit {
    /// The longest time to poll.
    pub(super) fn limit(&self) -> Duration {
        self.0
    }
}

impl Drop for SpinPermit {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Relaxed);
    }
}

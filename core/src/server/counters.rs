//! Counters of a shard: its thread counts, other threads read.
//!
//! Not here: frames and bytes, which the thread's loop counts for all sessions, and what is only asked for (`report`).

use std::sync::OnceLock;

use crate::ids::{TrainerId, Version};
use crate::metrics::{Histogram, MetricCounter};

/// Counts of a shard since its start.
#[derive(Debug, Default)]
pub struct ShardCounters {
    /// The greatest version of any chunk of the generation: completed rounds, or updates in modes without rounds.
    pub rounds: MetricCounter,
    /// Updates of chunks.
    pub updates: MetricCounter,
    /// Gradients of chunks that were taken in, duplicates among them.
    pub gradients: MetricCounter,
    /// Gradients of chunks that came again and were answered only.
    pub duplicates: MetricCounter,
    /// Frames that were refused.
    pub refused: MetricCounter,
    /// Gradients with NaN or infinity that were replaced by zeros.
    pub zeroed: MetricCounter,
    /// Time from the first gradient of a round to the update, of the first chunk that ends each round.
    pub round_time: Histogram,
    /// By rank: time from the first gradient of a round to that of this trainer, in nanoseconds, of the same chunks.
    late: OnceLock<Box<[MetricCounter]>>,
}

impl ShardCounters {
    /// Makes room for trainers; the first call counts, as a job's trainers are fixed.
    pub fn expect_trainers(&self, trainers: u32) {
        self.late.get_or_init(|| (0..trainers).map(|_| MetricCounter::default()).collect());
    }

    /// Counts an update to `version`. When it is the first of its round, `arrivals` are the times at which the
    /// gradients of the round came, and `now` is the time of the update, in nanoseconds.
    #[inline]
    pub fn updated(&self, version: Version, now: u64, arrivals: impl Iterator<Item = (TrainerId, u64)> + Clone) {
        self.updates.add(1);
        if version.0 <= self.rounds.get() {
            return;
        }
        self.rounds.set(version.0);
        let Some(first) = arrivals.clone().map(|(_, at)| at).min() else { return };
        // Before the first turn there is no clock: replay counts no times.
        if first == 0 {
            return;
        }
        self.round_time.observe(now - first);
        for (trainer, at) in arrivals {
            if let Some(late) = self.late.get().and_then(|late| late.get(trainer.0 as usize)) {
                late.add(at - first);
            }
        }
    }

    /// Seconds that each trainer came after the first, by rank; empty before initialisation.
    #[expect(clippy::cast_precision_loss, reason = "a sum of seconds for people")]
    pub fn late_seconds(&self) -> impl Iterator<Item = f64> + '_ {
        self.late.get().into_iter().flatten().map(|late| late.get() as f64 / 1e9)
    }
}

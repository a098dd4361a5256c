//! Counters and histograms of one thread, which other threads read at any time.
//!
//! The owning thread adds with a plain load and store, so that a count costs what an addition in memory costs. A reader
//! may see one counter before and another after an event. Two threads that add to one counter lose additions.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that one thread changes and others read.
#[derive(Debug, Default)]
pub struct MetricCounter(AtomicU64);

impl MetricCounter {
    /// Adds `more`; for the owning thread alone.
    #[inline]
    pub fn add(&self, more: u64) {
        self.set(self.get().wrapping_add(more));
    }

    /// Replaces the number; for the owning thread alone.
    #[inline]
    pub fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }

    /// The number as this thread sees it.
    #[must_use]
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Amount of work that takes long, such as bytes to be read, and what is done of it; any thread counts.
#[derive(Debug, Default)]
pub struct WorkMeter {
    expected: AtomicU64,
    done: AtomicU64,
}

impl WorkMeter {
    /// Announces more work.
    pub fn expect(&self, more: u64) {
        self.expected.fetch_add(more, Ordering::Relaxed);
    }

    /// Counts work that was done.
    pub fn add(&self, more: u64) {
        self.done.fetch_add(more, Ordering::Relaxed);
    }

    /// The announced work and what is done of it, in this order. Work that was not announced is counted too, so the
    /// second may exceed the first.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.expected.load(Ordering::Relaxed), self.done.load(Ordering::Relaxed))
    }
}

/// How many buckets a histogram has, with the one for all that is longer.
pub const BUCKETS: usize = 14;

/// Durations by size. Bucket `i` holds those below 4 to the power `i` microseconds that are in no lower bucket, from 1
/// us to 16.8 s; the last bucket has the rest.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [MetricCounter; BUCKETS],
    sum_nanos: MetricCounter,
}

impl Histogram {
    /// Counts a duration in nanoseconds; for the owning thread alone.
    #[inline]
    pub fn observe(&self, nanos: u64) {
        self.buckets[Self::bucket_of(nanos)].add(1);
        self.sum_nanos.add(nanos);
    }

    #[inline]
    fn bucket_of(nanos: u64) -> usize {
        // 1,024 ns for 1 us would need no division, and bounds that nobody can read.
        let micros = nanos / 1000;
        ((64 - micros.leading_zeros()).div_ceil(2) as usize).min(BUCKETS - 1)
    }

    /// The exclusive upper bound of a bucket in seconds; infinity for the last one.
    #[must_use]
    pub fn bound_seconds(bucket: usize) -> f64 {
        if bucket + 1 < BUCKETS { 4_f64.powi(i32::try_from(bucket).unwrap_or(0)) / 1e6 } else { f64::INFINITY }
    }

    /// The counts of all buckets, not cumulated.
    #[must_use]
    pub fn counts(&self) -> [u64; BUCKETS] {
        std::array::from_fn(|bucket| self.buckets[bucket].get())
    }

    /// The sum of all durations in seconds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a sum of seconds for people")]
    pub fn sum_seconds(&self) -> f64 {
        self.sum_nanos.get() as f64 / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_counted_in_the_bucket_with_the_next_bound() {
        let check = |nanos, bucket| {
            let histogram = Histogram::default();
            histogram.observe(nanos);
            let mut expected = [0; BUCKETS];
            expected[bucket] = 1;
            assert_eq!(histogram.counts(), expected, "{nanos} ns");
        };
        check(0, 0);
        check(999, 0);
        for bucket in 0..BUCKETS - 1 {
            let bound = 1000 * 4_u64.pow(u32::try_from(bucket).expect("few"));
            check(bound - 1, bucket);
            check(bound, bucket + 1);
            #[expect(clippy::cast_precision_loss, reason = "it is small")]
            let seconds = bound as f64 / 1e9;
            assert!((Histogram::bound_seconds(bucket) - seconds).abs() < 1e-12, "bucket {bucket}");
        }
        check(u64::MAX, BUCKETS - 1);
        assert_eq!(Histogram::bound_seconds(BUCKETS - 1), f64::INFINITY);
    }

    #[test]
    fn durations_are_added() {
        let histogram = Histogram::default();
        [1_500, 2_000_000_000].into_iter().for_each(|nanos| histogram.observe(nanos));
        assert!((histogram.sum_seconds() - 2.000_001_5).abs() < 1e-12);
    }
}

//! Random numbers that can be repeated: a test prints its seed, and `PSERVER_SEED` sets it.

use pserver_core::prng;

/// A generator of numbers that depend on the seed alone.
#[derive(Clone, Debug)]
pub(crate) struct SeededPrng(prng::Prng);

impl SeededPrng {
    /// The generator of one test; the seed is printed, so that a failure can be repeated.
    pub(crate) fn of(test: &str) -> Self {
        let given = std::env::var("PSERVER_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(fresh);
        println!("{test}: PSERVER_SEED={seed}");
        Self(prng::Prng(seed))
    }

    pub(crate) fn new(seed: u64) -> Self {
        Self(prng::Prng(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// A number below `end`, which is above zero.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0.index(end)
    }

    pub(crate) fn shuffle<T>(&mut self, all: &mut [T]) {
        for index in (1..all.len()).rev() {
            all.swap(index, self.below(index + 1));
        }
    }
}

/// A seed that no earlier run had.
fn fresh() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::from(since.subsec_nanos()) ^ (u64::from(std::process::id()) << 32)
}

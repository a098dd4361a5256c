//! Luck that can be repeated: a test prints its seed, and `PSERVER_SEED` sets it.

/// A generator of numbers that depend on the seed alone (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Luck(u64);

impl Luck {
    /// The luck of one test; the seed is printed, so that a failure can be repeated.
    pub(crate) fn of(test: &str) -> Self {
        let given = std::env::var("PSERVER_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(fresh);
        println!("{test}: PSERVER_SEED={seed}");
        Self(seed)
    }

    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is above zero.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).expect("a length has 64 bits");
        usize::try_from(self.next() % end).expect("it is below a length")
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

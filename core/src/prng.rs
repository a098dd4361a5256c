//! Pseudo-random numbers. The seed is an argument, so results are reproducible.

/// State of a generator: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
/// The same seed gives the same numbers on every machine. Not for secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prng(pub u64);

impl Prng {
    /// The next number; all its 64 bits are equally random.
    #[expect(clippy::should_implement_trait, reason = "it has no end, and nobody iterates over it")]
    pub fn next(&mut self) -> u64 {
        let number = mix(self.0);
        self.0 = self.0.wrapping_add(STEP);
        number
    }

    /// Its upper half.
    pub fn number(&mut self) -> u32 {
        u32::try_from(self.next() >> 32).expect("the upper half has 32 bits")
    }

    /// A number below `end`; for ends of less than 2^32 the bias is below one in 2^32.
    ///
    /// # Panics
    /// When `end` is zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// An index into so many items; as [`below`](Self::below).
    ///
    /// # Panics
    /// When there are none.
    pub fn index(&mut self, items: usize) -> usize {
        usize::try_from(self.below(items as u64)).expect("it is below a length")
    }

    /// One of several.
    ///
    /// # Panics
    /// When there are none.
    pub fn choose<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A one-to-one hash of 64 bits: the step and the finalizer of SplitMix64.
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(STEP);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::Prng;

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        let mut prng = Prng(1_234_567);
        let known = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        assert_eq!([prng.next(), prng.next()], known);
    }

    #[test]
    fn every_choice_in_range_is_drawn_and_no_other() {
        let mut prng = Prng(1);
        let mut seen = [0; 3];
        (0..300).for_each(|_| seen[prng.index(3)] += 1);
        assert!(seen.iter().all(|times| (70..130).contains(times)), "{seen:?}");
        assert_eq!((prng.below(1), prng.choose(&["only"])), (0, "only"));
    }
}

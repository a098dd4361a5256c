//! Random numbers from a seed: the same on every machine, so that a run can be repeated.

/// A splitmix64 generator. Not for secrets.
pub(super) struct Luck(u64);

impl Luck {
    /// A generator whose numbers follow from `seed` alone.
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator for one purpose among many: the same parts, in the same order, give the same numbers.
    pub(super) fn of(parts: &[u64]) -> Self {
        Self(parts.iter().fold(0, |state, &part| Self(state ^ part).next()))
    }

    /// A number in `0.0 .. 1.0`, in steps of 2^-32.
    pub(super) fn share(&mut self) -> f64 {
        f64::from(self.high()) / (f64::from(u32::MAX) + 1.0)
    }

    /// Puts `items` in an order that depends on nothing but the generator.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// An index below `bound`; the bias for the few thousand items here is under one in a million.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).expect("a length fits in 64 bits");
        usize::try_from((u64::from(self.high()) * bound) >> 32).expect("it is below a length")
    }

    fn high(&mut self) -> u32 {
        u32::try_from(self.next() >> 32).expect("32 bits are left")
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::Luck;

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        let mut luck = Luck::new(1_234_567);
        let known = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        assert_eq!([luck.next(), luck.next()], known);
    }

    #[test]
    fn a_shuffle_loses_nothing_and_depends_on_the_seed() {
        let order = |seed| {
            let mut items: Vec<u32> = (0..100).collect();
            Luck::new(seed).shuffle(&mut items);
            items
        };
        let mut sorted = order(1);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }
}

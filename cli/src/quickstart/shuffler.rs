//! Seeded shuffles and draws of the quickstart and of examples: the same on every machine, so that runs can be
//! repeated.

use pserver_core::prng;

/// A generator for one purpose.
pub struct Shuffler(prng::Prng);

impl Shuffler {
    /// A generator whose numbers follow from `seed` alone.
    pub fn new(seed: u64) -> Self {
        Self(prng::Prng(seed))
    }

    /// A generator for one purpose among many: the same parts, in the same order, give the same numbers.
    pub fn of(parts: &[u64]) -> Self {
        Self::new(parts.iter().fold(0, |state, &part| prng::mix(state ^ part)))
    }

    /// A number in `0.0 .. 1.0`, in steps of 2^-32.
    pub fn share(&mut self) -> f64 {
        f64::from(self.0.number()) / (f64::from(u32::MAX) + 1.0)
    }

    /// Puts `items` in an order that depends on nothing but the generator.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// An index below `bound`; the bias for the few thousand items here is under one in a million.
    pub fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).expect("a length fits in 64 bits");
        usize::try_from((u64::from(self.0.number()) * bound) >> 32).expect("it is below a length")
    }
}

#[cfg(test)]
mod tests {
    use super::Shuffler;

    #[test]
    fn a_shuffle_loses_nothing_and_depends_on_the_seed() {
        let order = |seed| {
            let mut items: Vec<u32> = (0..100).collect();
            Shuffler::new(seed).shuffle(&mut items);
            items
        };
        let mut sorted = order(1);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }
}

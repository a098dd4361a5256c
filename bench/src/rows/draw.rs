//! Which rows a batch asks for.

use clap::ValueEnum;
use pserver_core::prng::Prng;

/// How often rows are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Distribution {
    /// The k-th most wanted row in proportion to `k^-exponent`, as words and users are.
    Zipf,
    /// All rows alike.
    Uniform,
}

/// Draws rows.
pub(crate) struct Draw {
    rows: u64,
    /// The share of all draws up to a rank; empty when all are alike.
    shares: Vec<f64>,
    prng: Prng,
}

impl Draw {
    pub(crate) fn new(distribution: Distribution, exponent: f64, rows: u64, seed: u64) -> Self {
        let mut shares = Vec::new();
        if distribution == Distribution::Zipf {
            let mut sum = 0.0;
            shares.extend((1..=rows).map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            }));
            shares.iter_mut().for_each(|share| *share /= sum);
        }
        Self { rows, shares, prng: Prng(seed) }
    }

    /// Some rows.
    pub(crate) fn batch(&mut self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.row()).collect()
    }

    fn row(&mut self) -> u64 {
        let share = self.fraction();
        if self.shares.is_empty() {
            return self.prng.below(self.rows);
        }
        let rank = self.shares.partition_point(|bound| *bound <= share) as u64;
        // Rows that are wanted alike often do not lie beside each other: the factor is a prime, and no divisor of any
        // number of rows that fits a memory.
        u64::try_from(u128::from(rank.min(self.rows - 1)) * 0xffff_ffff_ffc5 % u128::from(self.rows)).expect("a row")
    }

    /// From zero up to, but without, one.
    fn fraction(&mut self) -> f64 {
        (self.prng.next() >> 11) as f64 / 2.0_f64.powi(53)
    }

    /// As [`fraction`](Self::fraction), coarser.
    pub(crate) fn single(&mut self) -> f32 {
        f32::from(u16::try_from(self.prng.next() >> 48).expect("16 bits")) / 65_536.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_may_be_drawn_and_the_first_rank_as_often_as_it_should() {
        let mut zipf = Draw::new(Distribution::Zipf, 1.0, 10, 3);
        let drawn = zipf.batch(100_000);
        let first = drawn.iter().filter(|row| **row == 0).count() as f64;
        // 1 / (1 + 1/2 + ... + 1/10)
        assert!((first / 100_000.0 - 0.3414).abs() < 0.01, "{first}");
        let mut seen = drawn;
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
        let mut uniform = Draw::new(Distribution::Uniform, 1.0, 10, 3);
        let zeros = uniform.batch(100_000).iter().filter(|row| **row == 0).count();
        assert!((9_000..11_000).contains(&zeros), "{zeros}");
    }
}

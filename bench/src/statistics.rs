//! Numbers about samples.

/// The value in the middle; the mean of the two there when they are even in number.
///
/// # Panics
/// When there are no samples.
pub(crate) fn median(samples: &[f64]) -> f64 {
    let sorted = sorted(samples);
    let half = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[half - 1], sorted[half]) } else { sorted[half] }
}

/// The least sample that at least `share` of all samples do not exceed.
///
/// # Panics
/// When there are no samples.
pub(crate) fn percentile(samples: &[f64], share: f64) -> f64 {
    let sorted = sorted(samples);
    let rank = (0..sorted.len()).find(|rank| (*rank as f64 + 1.0) / sorted.len() as f64 >= share);
    sorted[rank.unwrap_or(sorted.len() - 1)]
}

/// An interval that holds the true median with a confidence of about 95 %, from the order of the samples alone: no
/// shape of their distribution is assumed.
///
/// # Panics
/// When there are no samples.
pub(crate) fn median_interval(samples: &[f64]) -> (f64, f64) {
    let sorted = sorted(samples);
    let count = sorted.len();
    // The largest k so that fewer than k of n fair coins show heads with a probability of at most 2.5 %.
    let mut below = 0.0;
    let mut chance = 0.5_f64.powi(i32::try_from(count.min(1000)).expect("it is at most 1000"));
    let mut rank = 0;
    for heads in 0..count / 2 {
        below += chance;
        if below > 0.025 || count > 1000 {
            break;
        }
        rank = heads + 1;
        chance *= (count - heads) as f64 / (heads + 1) as f64;
    }
    let rank = if count > 1000 { count / 2 - count / 25 } else { rank };
    let first = rank.saturating_sub(1);
    (sorted[first], sorted[count - 1 - first])
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    assert!(!samples.is_empty(), "there are samples");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn a_percentile_is_a_sample() {
        let samples: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&samples, 0.5), 50.0);
        assert_eq!(percentile(&samples, 0.99), 99.0);
        assert_eq!(percentile(&samples, 0.999), 100.0);
    }

    #[test]
    fn the_interval_of_nine_is_the_second_to_the_eighth() {
        // The table of the binomial: P(fewer than 2 of 9 heads) is 1.95 %, fewer than 3 is 9 %.
        let samples: Vec<f64> = (1..=9).map(f64::from).collect();
        assert_eq!(median_interval(&samples), (2.0, 8.0));
        assert_eq!(median_interval(&[5.0]), (5.0, 5.0));
    }
}

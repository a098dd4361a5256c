//! Ranges of a rule's numbers.

/// The numbers between two others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Minus infinity when there is no bound.
    pub low: f64,
    /// Infinity when there is no bound.
    pub high: f64,
    /// Whether `low` itself is one of them.
    pub has_low: bool,
    /// Whether `high` itself is one of them.
    pub has_high: bool,
}

impl Interval {
    /// Whether it contains a number. Infinities and NaN are in none.
    #[must_use]
    pub fn holds(&self, value: f64) -> bool {
        let above = self.low < value || (self.has_low && self.low == value);
        let below = value < self.high || (self.has_high && self.high == value);
        value.is_finite() && above && below
    }
}

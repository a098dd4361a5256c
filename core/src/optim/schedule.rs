//! Schedules of the learning rate.

use crate::error::Failure;

use super::range::Range;

/// The learning rate as a function of `n`, the number of the update, counted from one.
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// `rate`
    Const {
        /// The learning rate, zero or above.
        rate: f64,
    },
    /// `max(rate - a n, b)`
    Linear {
        /// The learning rate at `n = 0`, zero or above.
        rate: f64,
        /// The decrement of each update, zero or above.
        a: f64,
        /// The lowest learning rate, zero or above.
        b: f64,
    },
    /// `rate (1 + a n)^-b`
    Poly {
        /// The learning rate at `n = 0`, zero or above.
        rate: f64,
        /// The weight of `n`, zero or above.
        a: f64,
        /// The power, zero or above.
        b: f64,
    },
    /// `rate a^(n / b)`
    Exp {
        /// The learning rate at `n = 0`, zero or above.
        rate: f64,
        /// The factor every `b` updates, in (0, 1].
        a: f64,
        /// Number of updates per factor, above zero.
        b: f64,
    },
    /// `rate a^floor(n / b)`
    DiscExp {
        /// The learning rate at `n = 0`, zero or above.
        rate: f64,
        /// The factor every `b` updates, in (0, 1].
        a: f64,
        /// Number of updates per factor, above zero.
        b: f64,
    },
}

impl Schedule {
    /// The learning rate of update `n`, counted from one.
    #[must_use]
    pub fn rate(&self, n: u64) -> f64 {
        // A count beyond 2^53 is rounded, which no schedule depends on.
        let n = n as f64;
        match *self {
            Self::Const { rate } => rate,
            Self::Linear { rate, a, b } => (rate - a * n).max(b),
            Self::Poly { rate, a, b } => rate * (1.0 + a * n).powf(-b),
            Self::Exp { rate, a, b } => rate * a.powf(n / b),
            Self::DiscExp { rate, a, b } => rate * a.powf((n / b).floor()),
        }
    }

    /// The largest learning rate of any update: all schedules but one begin at it.
    pub(super) fn largest(&self) -> f64 {
        match *self {
            Self::Linear { rate, b, .. } => rate.max(b),
            Self::Const { rate } | Self::Poly { rate, .. } | Self::Exp { rate, .. } | Self::DiscExp { rate, .. } => {
                rate
            }
        }
    }

    /// Refuses a schedule that can give a negative or infinite rate, naming the setting as configuration spells it.
    pub(super) fn validate(&self) -> Result<(), Failure> {
        let (message, rate) = match *self {
            Self::Const { rate } => ("const_lr", rate),
            Self::Linear { rate, .. } => ("linear_lr", rate),
            Self::Poly { rate, .. } => ("poly_lr", rate),
            Self::Exp { rate, .. } => ("exp_lr", rate),
            Self::DiscExp { rate, .. } => ("disc_exp_lr", rate),
        };
        Range::NotNegative.check(&format!("{message}.learning_rate"), rate)?;
        let (a, a_range, b, b_range) = match *self {
            Self::Const { .. } => return Ok(()),
            Self::Linear { a, b, .. } | Self::Poly { a, b, .. } => (a, Range::NotNegative, b, Range::NotNegative),
            Self::Exp { a, b, .. } | Self::DiscExp { a, b, .. } => (a, Range::PositiveToOne, b, Range::Positive),
        };
        a_range.check(&format!("{message}.lr_decay_a"), a)?;
        b_range.check(&format!("{message}.lr_decay_b"), b)
    }
}

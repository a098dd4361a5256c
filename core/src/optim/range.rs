//! Ranges of settings.

use crate::error::Failure;

/// A set of finite numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Range {
    /// Zero and above.
    NotNegative,
    /// Zero and below.
    NotPositive,
    /// Above zero.
    Positive,
    /// At least zero and below one.
    Fraction,
    /// Above zero and below one.
    OpenFraction,
    /// Above zero and at most one.
    PositiveToOne,
}

impl Range {
    /// Refuses a value out of range, naming the setting, the found and the expected value.
    pub(crate) fn check(self, name: &str, value: f64) -> Result<(), Failure> {
        if value.is_finite() && self.holds(value) {
            return Ok(());
        }
        Err(Failure::call(format!("{name} is {value}; expected {}", self.words())))
    }

    fn holds(self, value: f64) -> bool {
        match self {
            Self::NotNegative => 0.0 <= value,
            Self::NotPositive => value <= 0.0,
            Self::Positive => 0.0 < value,
            Self::Fraction => (0.0..1.0).contains(&value),
            Self::OpenFraction => 0.0 < value && value < 1.0,
            Self::PositiveToOne => 0.0 < value && value <= 1.0,
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::NotNegative => "a finite number, zero or above",
            Self::NotPositive => "a finite number, zero or below",
            Self::Positive => "a finite number above zero",
            Self::Fraction => "a number of at least zero and below one",
            Self::OpenFraction => "a number above zero and below one",
            Self::PositiveToOne => "a number above zero and at most one",
        }
    }
}

//! Tunables: the numbers of a rule that a step may carry other values of, such as Adam's `beta_1`.
//!
//! The code is made for the configured values. Values that would make other code are refused, so a step
//! that carries some runs the same operations with other scalars.

use crate::error::Failure;
use crate::limits::TUNABLES_MAX;

use super::interval::Interval;

/// The tunable at this place in [`Lowered::tunables`](super::ssa::Lowered::tunables).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TunableId(pub u8);

/// A number of a rule that a step may carry another value of.
#[derive(Clone, Debug, PartialEq)]
pub struct Tunable {
    /// Its name: of a parameter of a rule's text as the text writes it, of an optimizer's constant as configuration
    /// does.
    pub name: String,
    /// The configured value.
    pub value: f64,
    /// Its range; none admits every finite number.
    pub interval: Option<Interval>,
}

/// Values of tunables that one step carries in place of the configured ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepSettings {
    /// A bit for each value that is carried.
    carried: u8,
    values: [f64; TUNABLES_MAX],
}

const _: () = assert!(TUNABLES_MAX <= u8::BITS as usize, "each has a bit");

/// Names of the parameters of a text that are tunable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TunableNames {
    /// Every parameter, by its own name.
    All,
    /// These: the name in the text, and the name in configuration.
    Some(&'static [(&'static str, &'static str)]),
}

impl StepSettings {
    /// The settings of a step that carries none.
    pub const NONE: Self = Self { carried: 0, values: [0.0; TUNABLES_MAX] };

    /// Whether the step carries none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.carried == 0
    }

    /// The value that is carried, if one is.
    #[must_use]
    pub fn of(&self, tunable: TunableId) -> Option<f64> {
        let place = usize::from(tunable.0);
        (self.carried & (1 << place) != 0).then(|| self.values[place])
    }

    /// Adds a value. A negative zero becomes a positive one, so that equal settings have equal bits.
    pub fn put(&mut self, tunable: TunableId, value: f64) {
        let place = usize::from(tunable.0);
        self.carried |= 1 << place;
        self.values[place] = value + 0.0;
    }
}

impl Tunable {
    /// Refuses a value that is not finite, or outside of the range.
    pub(crate) fn check(&self, value: f64) -> Result<(), Failure> {
        if self.interval.as_ref().map_or(value.is_finite(), |interval| interval.holds(value)) {
            return Ok(());
        }
        let expected = self.interval.as_ref().map_or("a finite number".to_owned(), |range| format!("one in {range}"));
        Err(Failure::call(format!("the step carries {:?} = {value}; expected {expected}", self.name)))
    }
}

impl TunableNames {
    /// No parameter.
    pub(crate) const NONE: Self = Self::Some(&[]);

    /// The name of a text's parameter as a tunable, if it is one.
    pub(super) fn of(self, parameter: &str) -> Option<&str> {
        match self {
            Self::All => Some(parameter),
            Self::Some(names) => names.iter().find(|(name, _)| *name == parameter).map(|(_, tunable)| *tunable),
        }
    }
}

//! Replay of the updates that a row has missed.
//!
//! A dense update of a parameter gives a gradient of zero to every row that was not sent. A table updates only the sent
//! rows, keeps the step of each row's last update, and replays the missed ones with a gradient of zero when the row is
//! next used. The dense update does the same by the same kernel, so the bits are equal; a missed update is replayed
//! once, so it is never more work than the dense one. This module knows when less work suffices.

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::Version;
use crate::optim::{Algorithm, Prepared, Regularizer, Rule, Schedule, Step};
use crate::rule::StepSettings;

use super::settings::CatchUp;

/// Condition under which a gradient of zero leaves a row unchanged, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleRows {
    /// Always: no update is missed, and no step is stored.
    Always,
    /// After one replay, when its states are zero and its weight is finite: the first gradient of zero turns a negative
    /// zero into a positive one, or reaches the algorithm's fixed point.
    AfterOne,
    /// Unknown: every missed update is replayed.
    Never,
}

impl IdleRows {
    /// The case for a rule; [`IdleRows::Never`] unless proven otherwise.
    pub(super) fn of(rule: &Rule, element_type: ElementType) -> Self {
        let is_regularized = rule.l1 != 0.0 || rule.l2 != 0.0;
        match &rule.algorithm {
            // The effect of a user's text is unknown.
            _ if rule.stage.as_ref().is_some_and(|stage| !stage.scales_by_total()) => Self::Never,
            Algorithm::Custom(_) => Self::Never,
            // Wrapping addition of zero; a float may be a negative zero, to which zero is added.
            Algorithm::Add if !element_type.is_float() => Self::Always,
            // The sum of no gradients is zero, whatever the value was.
            Algorithm::Add | Algorithm::Sum => Self::AfterOne,
            // In its own formula the regularizers wait for the first gradient.
            Algorithm::Ftrl { .. } if rule.regularizer == Regularizer::Proximal => Self::AfterOne,
            _ if is_regularized => Self::Never,
            // A weight minus a positive zero is that weight; a sum of squares plus zero is that sum.
            Algorithm::Sgd | Algorithm::Adagrad { .. } => Self::Always,
            Algorithm::Momentum { .. }
            | Algorithm::Adadelta { .. }
            | Algorithm::RmsProp { .. }
            | Algorithm::Adam { .. }
            | Algorithm::AdamW { .. }
            | Algorithm::Ftrl { .. } => Self::AfterOne,
        }
    }
}

/// Checks settings that a step carries for a parameter with this rule; `catch_up` is that of its table, if it has one.
///
/// # Errors
/// As [`Prepared::settings`]; and for a table that replays missed updates, whose history has learning rates only.
pub fn check_step_settings<'a>(
    rule: &Prepared,
    element_type: ElementType,
    catch_up: Option<CatchUp>,
    given: impl IntoIterator<Item = (&'a str, f64)>,
) -> Result<StepSettings, Failure> {
    let settings = rule.settings(given)?;
    match catch_up {
        Some(CatchUp::Exact) if !settings.is_empty() && IdleRows::of(rule.rule(), element_type) != IdleRows::Always => {
            Err(Failure::call(
                "the step carries settings for a table that replays missed updates, of which it keeps learning rates \
                 only; expected none, or lazy: true",
            ))
        }
        _ => Ok(settings),
    }
}

/// History of the learning rates that pushes specified. Each change takes 24 bytes permanently, because an absent row
/// may be read at any time and then replays every step: a trainer that sends another rate with each of a million steps
/// costs 24 MB for each table. Schedules are part of the rule and cost nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateChanges {
    changes: Vec<(Version, Option<f64>)>,
}

impl RateChanges {
    /// Bytes of a change in a payload: the version, whether a rate was specified, and the rate.
    pub const CHANGE_BYTES: usize = 3 * size_of::<u64>();

    /// A change as payloads have it.
    #[must_use]
    pub fn encode((since, rate): (Version, Option<f64>)) -> [u8; Self::CHANGE_BYTES] {
        bytemuck::cast([since.0, u64::from(rate.is_some()), rate.unwrap_or(0.0).to_bits()].map(u64::to_le))
    }

    /// The change in a part of a payload.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::CHANGE_BYTES]) -> (Version, Option<f64>) {
        let number = |at: usize| u64::from_le_bytes(bytes.as_chunks().0[at]);
        (Version(number(0)), (number(1) != 0).then_some(f64::from_bits(number(2))))
    }

    /// Each version at which the specified rate changed, ascending, and the new rate; none means the schedule's. Before
    /// the first there is none. Equal consecutive entries are merged.
    #[must_use]
    pub fn changes(&self) -> &[(Version, Option<f64>)] {
        &self.changes
    }

    /// Records the rate of an update, later than all before.
    pub fn note(&mut self, version: Version, rate: Option<f64>) {
        if self.at(version) != rate {
            self.changes.push((version, rate));
        }
    }

    /// The rate of the update that made this version.
    #[must_use]
    pub fn at(&self, version: Version) -> Option<f64> {
        let later = self.changes.partition_point(|(since, _)| *since <= version);
        later.checked_sub(1).and_then(|index| self.changes[index].1)
    }
}

/// The scalars of past updates.
#[derive(Clone, Copy, Debug)]
pub(super) struct Past<'a> {
    pub(super) rule: &'a Prepared,
    pub(super) element_type: ElementType,
    pub(super) rates: &'a RateChanges,
}

impl Past<'_> {
    /// The step of the update that made this version. The gradient is zero, so scale and norm do not matter.
    pub(super) fn step(&self, version: Version) -> Step {
        Step { version, rate: self.rates.at(version), ..Step::FIRST }
    }

    /// Whether all updates have the same scalars, so that a row that one of them left unchanged is unchanged by all.
    pub(super) fn is_steady(&self) -> bool {
        let rule = self.rule.rule();
        !self.rule.counts() && matches!(rule.schedule, Schedule::Const { .. }) && self.rates.changes.is_empty()
    }
}

//! What the updates that a row has missed would have done to it.
//!
//! A dense update of a parameter gives a gradient of zero to every row that nobody sent. A table updates only the rows
//! that were sent, keeps the step of each row's last update, and replays the missed ones, with a gradient of zero, when
//! the row is wanted next. That is what the dense update does, by the same kernel, so it gives the same bits; a missed
//! update is replayed once, so it is never more work than the dense one. Here is when less will do.

use crate::dtype::ElementType;
use crate::ids::Version;
use crate::optim::{Algorithm, Prepared, Regularizer, Rule, Schedule, Step};

/// When a gradient of zero leaves a row as it is, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// Always: nothing is missed, and no step is kept.
    Always,
    /// When its states are zero, its weight is finite, and a gradient of zero has gone over it once, which makes a
    /// positive zero of a negative one, or whatever the algorithm makes of it for good.
    AfterOne,
    /// Who knows.
    Never,
}

impl Rest {
    /// What is known of a rule. What is not known here is [`Rest::Never`].
    pub(super) fn of(rule: &Rule, element_type: ElementType) -> Self {
        let is_regularized = rule.l1 != 0.0 || rule.l2 != 0.0;
        match &rule.algorithm {
            // Wrapping addition of zero; a float may be a negative zero, to which zero is added.
            Algorithm::Add if !element_type.is_float() => Self::Always,
            // A sum of nothing is zero, whatever was there.
            Algorithm::Add | Algorithm::Sum => Self::AfterOne,
            // In its own formula the regularizers wait for the first gradient.
            Algorithm::Ftrl { .. } if rule.regularizer == Regularizer::Proximal => Self::AfterOne,
            // What a user's rule does is not known here.
            Algorithm::Written(_) => Self::Never,
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

/// The learning rates that steps brought with them: since when which, or none. Each change takes 24 bytes for good,
/// because a row that nobody has touched may be read at any time and then replays every step: who sends another rate
/// with each of a million steps pays 24 MB for each table. Schedules, which the rule knows, cost nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    changes: Vec<(Version, Option<f64>)>,
}

impl Rates {
    /// Each version since which steps brought another rate, ascending, and that rate; none is the schedule's. Before
    /// the first there is none. Of two changes at neighbouring versions alike the second says nothing new, and is not
    /// kept.
    #[must_use]
    pub fn changes(&self) -> &[(Version, Option<f64>)] {
        &self.changes
    }

    /// Notes what an update brought with it; later than all before.
    pub fn note(&mut self, version: Version, rate: Option<f64>) {
        if self.at(version) != rate {
            self.changes.push((version, rate));
        }
    }

    /// What the update brought that made this version.
    #[must_use]
    pub fn at(&self, version: Version) -> Option<f64> {
        let later = self.changes.partition_point(|(since, _)| *since <= version);
        later.checked_sub(1).and_then(|index| self.changes[index].1)
    }
}

/// The scalars of updates that are past.
#[derive(Clone, Copy, Debug)]
pub(super) struct Past<'a> {
    pub(super) rule: &'a Prepared,
    pub(super) element_type: ElementType,
    pub(super) rates: &'a Rates,
}

impl Past<'_> {
    /// Those of the update that made this version. The gradient is zero, so its scale and its norm do not matter.
    pub(super) fn step(&self, version: Version) -> Step {
        Step { version, rate: self.rates.at(version), norm: None, scale: 1.0 }
    }

    /// Whether all updates have the same scalars, so that a row that one of them left alone is left alone by all.
    pub(super) fn is_steady(&self) -> bool {
        let rule = self.rule.rule();
        !self.rule.counts() && matches!(rule.schedule, Schedule::Const { .. }) && self.rates.changes.is_empty()
    }
}

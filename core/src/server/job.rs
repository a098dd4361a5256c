//! The settings of a job, as every shard serves them.

use std::sync::Arc;

use super::reply::Refusal;
use crate::config::{Merge, Mode};
use crate::limits::TRAINERS_MAX;
use crate::optim::{Algorithm, Prepared, Rule};
use crate::wire::{FinishMessage, JobMessage};

/// The rule of delta mode, which adds differences, in place of every configured rule.
pub(super) fn rule_of_mode(mode: Mode) -> Option<Arc<Prepared>> {
    let add = || Prepared::new(Rule { algorithm: Algorithm::Add, ..Rule::default() }).expect("adding is a rule");
    (mode == Mode::Delta).then(|| Arc::new(add()))
}

/// Settings of the job, from the finish frame.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Job {
    pub(super) mode: Mode,
    pub(super) merge: Merge,
    pub(super) trainers: u32,
}

impl Job {
    /// Checks the job settings of a finish frame.
    pub(super) fn from_message(message: &FinishMessage) -> Result<Self, Refusal> {
        let job = message.job.ok_or_else(|| Refusal::invalid("a finish frame has no job settings"))?;
        let mode = Mode::from_numbers(job.mode, job.staleness)
            .ok_or_else(|| Refusal::invalid(format!("mode {} has no meaning", job.mode)))?;
        let merge = Merge::from_number(job.merge)
            .ok_or_else(|| Refusal::invalid(format!("merge {} has no meaning", job.merge)))?;
        if !(1..=TRAINERS_MAX).contains(&job.trainers) {
            return Err(Refusal::invalid(format!("{} trainers; expected 1 to {TRAINERS_MAX}", job.trainers)));
        }
        if mode == (Mode::Staleness { bound: 0 }) {
            return Err(Refusal::invalid(
                "a staleness bound of 0 steps, with which no trainer can begin; expected 1 or more, or mode sync",
            ));
        }
        Ok(Self { mode, merge, trainers: job.trainers })
    }

    /// The rule by which a parameter is updated.
    pub(super) fn rule_of(&self, configured: &Arc<Prepared>) -> Arc<Prepared> {
        rule_of_mode(self.mode).unwrap_or_else(|| Arc::clone(configured))
    }

    /// The settings as a message.
    pub(super) fn to_message(&self) -> JobMessage {
        let (mode, staleness) = self.mode.numbers();
        JobMessage { mode, staleness, merge: self.merge.number(), trainers: self.trainers, chunk_bytes: 0 }
    }
}

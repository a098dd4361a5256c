//! Sharing of parameters: mode, merge and trainers that the parts of a program need, compared with those of a job.

use std::fmt;

use pserver_core::config::{Merge, Mode, OptimizerSettings};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_program::VariableFacts;

use pserver_client::Client;

/// The reason that an error gives for an expected setting.
const DIVIDED: &str = "for which the program was divided";

/// The attributes of a gradient's accumulator, as settings of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProgramSharing {
    mode: Mode,
    /// Set where gradients of several trainers are merged and both merges are possible.
    merge: Option<Merge>,
    /// Set where an update needs a gradient of every trainer, or of as many of them as the program was divided for.
    trainers: Option<u32>,
}

impl ProgramSharing {
    /// The settings of a job of so many trainers that is equivalent to an accumulator, and the trainers that it does
    /// not wait for.
    pub(super) fn of(
        piece: &VariableFacts,
        (count, merge, staleness): (u32, Merge, Option<u32>),
        trainers: u32,
    ) -> Result<(Self, u32), String> {
        let is_float = piece.element_type().is_some_and(ElementType::is_float);
        let alone = |mode| Self { mode, merge: None, trainers: None };
        match (count, staleness) {
            (count, Some(0)) => {
                let merge = (is_float && count > 1).then_some(merge);
                let backup_trainers = trainers.checked_sub(count).ok_or_else(|| {
                    format!(
                        "found an accumulator of {count} gradients of {trainers} trainers; expected at most one each"
                    )
                })?;
                Ok((Self { mode: Mode::Sync, merge, trainers: Some(trainers) }, backup_trainers))
            }
            (1, None) => Ok((alone(Mode::Async), 0)),
            (1, Some(bound)) => Ok((alone(Mode::Staleness { bound }), 0)),
            (count, _) => Err(format!(
                "found an accumulator of any {count} gradients; expected one gradient of every trainer (staleness=0), \
                 or count=1"
            )),
        }
    }

    /// The settings of a job with queues, which have one sender each.
    pub(super) fn of_queue(trainers: u32) -> Self {
        Self { mode: Mode::Sync, merge: None, trainers: Some(trainers) }
    }

    /// The settings of a job with programs that the executor runs: the mode of their first accumulator, as far as it is
    /// of a mode.
    pub(super) fn of_program(staleness: Option<Option<u32>>, trainers: u32) -> Self {
        let mode = match staleness {
            None | Some(Some(0)) => Mode::Sync,
            Some(None) => Mode::Async,
            Some(Some(bound)) => Mode::Staleness { bound },
        };
        Self { mode, ..Self::of_queue(trainers) }
    }

    /// The mode.
    pub(super) fn mode(self) -> Mode {
        self.mode
    }

    /// The same with so many trainers.
    pub(super) fn of_trainers(self, trainers: u32) -> Self {
        Self { trainers: Some(trainers), ..self }
    }

    /// The sharing of all parameters; `all` has the name and the sharing of each.
    ///
    /// # Errors
    /// When two parameters differ, as one job has one sharing; the error names both.
    pub(super) fn common(all: &[(&str, Self)]) -> Result<Self, Failure> {
        let mut common = Self { mode: Mode::default(), merge: None, trainers: None };
        let mut merged_by: Option<(&str, Self)> = None;
        for &(name, found) in all {
            let first = all[0];
            let is_alike = (found.mode, found.trainers) == (first.1.mode, first.1.trainers);
            let differs = |by: &(&str, Self)| found.merge.is_some_and(|merge| by.1.merge != Some(merge));
            if let Some((like, expected)) = (!is_alike).then_some(first).or(merged_by.filter(differs)) {
                return Err(Failure::call(format!(
                    "parameter {name:?}: found {found}; expected {expected}, as {like:?} has"
                )));
            }
            merged_by = merged_by.or(Some((name, found)).filter(|_| found.merge.is_some()));
            common = Self { merge: merged_by.and_then(|(_, by)| by.merge), ..found };
        }
        Ok(common)
    }

    /// The settings that the initialiser gives the job.
    pub(super) fn settings(self) -> OptimizerSettings {
        OptimizerSettings { mode: Some(self.mode), merge: self.merge, ..OptimizerSettings::default() }
    }

    /// Refuses a job with another number of trainers, before the job is initialised.
    pub(super) fn check_trainers(self, client: &Client) -> Result<(), Failure> {
        let Some(expected) = self.trainers else { return Ok(()) };
        let found = client.trainers()?;
        if found == expected {
            return Ok(());
        }
        Err(Failure::call(format!("found a job of {found} trainers; expected {expected}, {DIVIDED}")))
    }

    /// Refuses a job with another sharing.
    pub(super) fn check(self, client: &Client) -> Result<(), Failure> {
        let found = client.sharing()?;
        let fits = self.mode == found.mode
            && self.merge.is_none_or(|merge| merge == found.merge)
            && self.trainers.is_none_or(|trainers| trainers == found.trainers);
        if fits {
            return Ok(());
        }
        let found = Self { mode: found.mode, merge: Some(found.merge), trainers: Some(found.trainers) };
        Err(Failure::call(format!("found a job in {found}; expected {self}, {DIVIDED}")))
    }
}

impl fmt::Display for ProgramSharing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mode {
            Mode::Sync => formatter.write_str("mode sync")?,
            Mode::Async => formatter.write_str("mode async")?,
            Mode::Staleness { bound } => write!(formatter, "mode bounded with a staleness of {bound}")?,
            Mode::Delta => formatter.write_str("mode delta")?,
        }
        match self.merge {
            Some(Merge::Mean) => formatter.write_str(", merge mean")?,
            Some(Merge::Sum) => formatter.write_str(", merge sum")?,
            None => {}
        }
        self.trainers.map_or(Ok(()), |trainers| write!(formatter, ", {trainers} trainers"))
    }
}

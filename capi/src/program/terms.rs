//! How trainers share what servers keep: what the parts of a program say, and what a job does.

use std::fmt;

use pserver_core::config::{Merge, Mode, OptimizerSettings};
use pserver_core::error::Failure;
use pserver_core::program::Facts;

use super::kept::Kept;
use crate::client::Client;

/// Why something is expected of a job.
const DIVIDED: &str = "for which the program was divided";

/// What the accumulator of a gradient is told, as settings of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    mode: Mode,
    /// Where pieces of several trainers become one, and either way is possible.
    merge: Option<Merge>,
    /// Where a piece of every trainer makes one.
    trainers: Option<u32>,
}

impl Terms {
    /// The settings of a job that does what an accumulator is told.
    pub(super) fn of(piece: &Facts, count: u32, merge: Merge, staleness: Option<u32>) -> Result<Self, String> {
        let is_float = match piece {
            Facts::Dense { element_type, .. } | Facts::SelectedRows { element_type, .. } => element_type.is_float(),
            Facts::Queue { .. } | Facts::Strings => false,
        };
        let alone = |mode| Self { mode, merge: None, trainers: None };
        match (count, staleness) {
            (count, Some(0)) => {
                let merge = (is_float && count > 1).then_some(merge);
                Ok(Self { mode: Mode::Sync, merge, trainers: Some(count) })
            }
            (1, None) => Ok(alone(Mode::Async)),
            (1, Some(bound)) => Ok(alone(Mode::Staleness { bound })),
            (count, _) => Err(format!(
                "found an accumulator of {count} pieces whoever sends them; expected one of every trainer \
                 (staleness=0), or count=1"
            )),
        }
    }

    /// Those of everything that is kept.
    ///
    /// # Errors
    /// When two parameters differ, which those of one job cannot; names both.
    pub(super) fn common(all: &[Kept]) -> Result<Self, Failure> {
        let mut common = Self { mode: Mode::default(), merge: None, trainers: None };
        let mut merged_by: Option<&Kept> = None;
        for one in all {
            let first = &all[0];
            let is_alike = (one.terms.mode, one.terms.trainers) == (first.terms.mode, first.terms.trainers);
            if let Some(other) = (!is_alike).then_some(first).or(merged_by.filter(|by| one.differs(by))) {
                let (found, expected) = (one.terms, other.terms);
                let (name, like) = (&one.name, &other.name);
                return Err(Failure::call(format!(
                    "parameter {name:?}: found {found}; expected {expected}, as {like:?} has"
                )));
            }
            merged_by = merged_by.or(Some(one).filter(|one| one.terms.merge.is_some()));
            common = Self { merge: merged_by.and_then(|by| by.terms.merge), ..one.terms };
        }
        Ok(common)
    }

    /// What the initialiser tells a job.
    pub(super) fn settings(self) -> OptimizerSettings {
        OptimizerSettings { mode: Some(self.mode), merge: self.merge, ..OptimizerSettings::default() }
    }

    /// Refuses a job of another number of trainers, before anything of it is set.
    pub(super) fn check_trainers(self, client: &Client) -> Result<(), Failure> {
        let Some(expected) = self.trainers else { return Ok(()) };
        let found = client.trainers()?;
        if found == expected {
            return Ok(());
        }
        Err(Failure::call(format!("found a job of {found} trainers; expected {expected}, {DIVIDED}")))
    }

    /// Refuses a job that does something else.
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

impl Kept {
    fn differs(&self, other: &Self) -> bool {
        self.terms.merge.is_some_and(|merge| other.terms.merge != Some(merge))
    }
}

impl fmt::Display for Terms {
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

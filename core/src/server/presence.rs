//! Incarnations and connection state of trainers, as one shard sees them.
//!
//! A trainer disconnected from this shard for the grace time is lost: calls that wait for it fail until a trainer with
//! its rank connects. A trainer that has not connected in this run, or since this shard started, is not lost: it is
//! still to come, and a restarted shard cannot distinguish it from one that computes.

use std::collections::BTreeMap;
use std::time::Duration;

use super::membership::PeerOrigin;
use super::reply::Refusal;
use super::report::TrainerConnection;
use crate::ids::{Incarnation, JobRun, TrainerId};
use crate::limits::TRAINERS_MAX;
use crate::time::Now;
use crate::wire::Head;

/// Trainers that have connected to the shard.
pub(super) struct Presence {
    /// The newest incarnation of each trainer, by rank; zero for one that is unknown.
    pub(super) incarnations: Vec<Incarnation>,
    /// The run of each of these incarnations.
    pub(super) runs: Vec<JobRun>,
    trainers: BTreeMap<TrainerId, KnownTrainer>,
    grace: Duration,
}

/// A trainer in one of its incarnations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TrainerLife {
    pub(super) trainer: TrainerId,
    pub(super) incarnation: Incarnation,
}

impl TrainerLife {
    pub(super) fn of(head: &Head) -> Self {
        Self { trainer: head.trainer, incarnation: head.incarnation }
    }
}

/// The last connected incarnation of a trainer.
struct KnownTrainer {
    run: JobRun,
    origin: PeerOrigin,
    /// The transport of its last connection and the reason for it.
    transport: String,
    /// Close time of its last connection.
    closed: Option<Now>,
}

impl Presence {
    pub(super) fn new(grace: Duration) -> Self {
        Self { incarnations: Vec::new(), runs: Vec::new(), trainers: BTreeMap::new(), grace }
    }

    /// The newest incarnation of a trainer.
    pub(super) fn incarnation(&self, trainer: TrainerId) -> Incarnation {
        self.incarnations.get(trainer.0 as usize).copied().unwrap_or_default()
    }

    /// Records a trainer's incarnation; refuses a superseded one.
    pub(super) fn note_incarnation(&mut self, trainer: TrainerId, incarnation: Incarnation) -> Result<(), Refusal> {
        if trainer.0 >= TRAINERS_MAX {
            return Err(Refusal::invalid(format!("trainer {trainer} is over the limit of {TRAINERS_MAX}")));
        }
        let index = trainer.0 as usize;
        if self.incarnations.len() <= index {
            self.incarnations.resize(index + 1, Incarnation(0));
        }
        let known = &mut self.incarnations[index];
        if incarnation < *known {
            return Err(Refusal::superseded(trainer, incarnation, *known));
        }
        *known = incarnation;
        Ok(())
    }

    /// The run that a trainer's process takes part in; before the first where it is unknown, or the process was
    /// superseded.
    pub(super) fn run_of(&self, life: TrainerLife) -> JobRun {
        let run = self.runs.get(life.trainer.0 as usize).copied().unwrap_or_default();
        if self.incarnation(life.trainer) == life.incarnation { run } else { JobRun::default() }
    }

    /// Records the run of a trainer's newest incarnation.
    pub(super) fn note_run(&mut self, trainer: TrainerId, run: JobRun) {
        let index = trainer.0 as usize;
        self.runs.resize(self.runs.len().max(index + 1), JobRun::default());
        self.runs[index] = self.runs[index].max(run);
    }

    /// The newest run that a trainer has connected for.
    fn run(&self) -> JobRun {
        self.runs.iter().copied().max().unwrap_or_default()
    }

    pub(super) fn connected(&mut self, trainer: TrainerId, origin: PeerOrigin, transport: String) {
        let run = self.runs.get(trainer.0 as usize).copied().unwrap_or_default();
        self.trainers.insert(trainer, KnownTrainer { run, origin, transport, closed: None });
    }

    /// Records the transport of a trainer's connection, which has changed.
    pub(super) fn moved(&mut self, trainer: TrainerId, transport: &str) {
        if let Some(seen) = self.trainers.get_mut(&trainer) {
            transport.clone_into(&mut seen.transport);
        }
    }

    /// Records that the last connection of a trainer closed.
    pub(super) fn closed(&mut self, now: Now, trainer: TrainerId) {
        if let Some(seen) = self.trainers.get_mut(&trainer) {
            seen.closed.get_or_insert(now);
        }
    }

    /// The disconnected trainers of this run, with the time at which each is lost.
    pub(super) fn losses(&self) -> impl Iterator<Item = (TrainerId, Now)> + '_ {
        let run = self.run();
        let of_run = self.trainers.iter().filter(move |(_, seen)| seen.run == run);
        of_run.filter_map(|(trainer, seen)| Some((*trainer, seen.closed? + self.grace)))
    }

    /// The trainers that have connected, by rank.
    pub(super) fn connections(&self) -> impl Iterator<Item = TrainerConnection> + '_ {
        self.trainers.iter().map(|(trainer, seen)| TrainerConnection {
            rank: trainer.0,
            transport: seen.transport.clone(),
            is_connected: seen.closed.is_none(),
        })
    }

    /// Describes a trainer: rank, process, and connection state.
    pub(super) fn describe(&self, now: Now, trainer: TrainerId) -> String {
        match self.trainers.get(&trainer) {
            None => format!("{trainer} (not connected since this server started)"),
            Some(KnownTrainer { origin, closed: None, .. }) => format!("{trainer} ({origin})"),
            Some(KnownTrainer { origin, run, .. }) if *run < self.run() => {
                format!("{trainer} (not connected in this run of the job; {origin} was its process in an earlier run)")
            }
            Some(KnownTrainer { origin, closed: Some(closed), .. }) => {
                format!("{trainer} ({origin}; connection closed {:.1} s ago)", closed.until(now).as_secs_f64())
            }
        }
    }
}

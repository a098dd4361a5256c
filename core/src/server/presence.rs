//! Incarnations and connection state of trainers, as one shard sees them.
//!
//! A trainer disconnected from this shard for the grace time is lost: calls that wait for it fail until a trainer with
//! its rank connects. A trainer that never connected since this shard started is not lost: a restarted shard cannot
//! distinguish it from one that computes.

use std::collections::BTreeMap;
use std::time::Duration;

use super::membership::PeerOrigin;
use super::reply::Refusal;
use super::report::TrainerConnection;
use crate::ids::{Incarnation, TrainerId};
use crate::limits::TRAINERS_MAX;
use crate::time::Now;

/// Trainers that have connected to the shard.
pub(super) struct Presence {
    /// The newest incarnation of each trainer, by rank; zero for one that is unknown.
    pub(super) incarnations: Vec<Incarnation>,
    trainers: BTreeMap<TrainerId, KnownTrainer>,
    grace: Duration,
}

/// A trainer in one of its incarnations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TrainerLife {
    pub(super) trainer: TrainerId,
    pub(super) incarnation: Incarnation,
}

/// The last connected incarnation of a trainer.
struct KnownTrainer {
    origin: PeerOrigin,
    /// The transport of its last connection and the reason for it.
    transport: String,
    /// Close time of its last connection.
    closed: Option<Now>,
}

impl Presence {
    pub(super) fn new(grace: Duration) -> Self {
        Self { incarnations: Vec::new(), trainers: BTreeMap::new(), grace }
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

    pub(super) fn connected(&mut self, trainer: TrainerId, origin: PeerOrigin, transport: String) {
        self.trainers.insert(trainer, KnownTrainer { origin, transport, closed: None });
    }

    /// Records that the last connection of a trainer closed.
    pub(super) fn closed(&mut self, now: Now, trainer: TrainerId) {
        if let Some(seen) = self.trainers.get_mut(&trainer) {
            seen.closed.get_or_insert(now);
        }
    }

    /// The disconnected trainers, with the time at which each is lost.
    pub(super) fn losses(&self) -> impl Iterator<Item = (TrainerId, Now)> + '_ {
        self.trainers.iter().filter_map(|(trainer, seen)| Some((*trainer, seen.closed? + self.grace)))
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
            Some(KnownTrainer { origin, closed: Some(closed), .. }) => {
                format!("{trainer} ({origin}; connection closed {:.1} s ago)", closed.until(now).as_secs_f64())
            }
        }
    }
}

//! Participants of a job's run, as one shard sees them: the trainers that rounds wait for, and those that departed.
//!
//! A departure counts for its run. The coordinator numbers runs ([`super::membership`]).
//!
//! Not here: when a run begins at a shard (`runs`), and what a departure or a return does to chunks (`departures`).

use crate::ids::{Incarnation, RunNumber, TrainerId};

/// A trainer's part in the current run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Participation {
    /// Rounds wait for it.
    #[default]
    Active,
    /// This incarnation has departed: rounds do not wait for the trainer.
    Departed(Incarnation),
    /// This incarnation departed from an earlier run: rounds wait for the trainer's next process.
    Expected(Incarnation),
}

impl Participation {
    /// Whether rounds wait for the trainer.
    pub(super) const fn is_active(self) -> bool {
        matches!(self, Self::Active | Self::Expected(_))
    }

    /// The incarnation that departed, while no newer one has pushed.
    pub(super) const fn left(self) -> Option<Incarnation> {
        match self {
            Self::Active => None,
            Self::Departed(left) | Self::Expected(left) => Some(left),
        }
    }
}

/// The trainers of a job and its current run.
pub(super) struct Participants {
    trainers: Vec<Participation>,
    run: RunNumber,
}

impl Participants {
    pub(super) fn new(trainers: u32) -> Self {
        Self { trainers: vec![Participation::Active; trainers as usize], run: RunNumber(0) }
    }

    pub(super) fn of(&self, trainer: TrainerId) -> Participation {
        self.trainers.get(trainer.0 as usize).copied().unwrap_or(Participation::Departed(Incarnation(0)))
    }

    /// The run that the shard is in.
    pub(super) fn run(&self) -> RunNumber {
        self.run
    }

    /// Whether every trainer has departed.
    pub(super) fn have_departed(&self) -> bool {
        self.trainers.iter().all(|one| matches!(one, Participation::Departed(_)))
    }

    /// Begins a newer run of so many trainers: rounds wait for each. Returns those that had departed.
    pub(super) fn begin(&mut self, run: RunNumber, trainers: u32) -> Vec<TrainerId> {
        self.run = run;
        self.trainers.resize(trainers as usize, Participation::Active);
        let mut returning = Vec::new();
        for (trainer, one) in (0..).map(TrainerId).zip(&mut self.trainers) {
            if let Participation::Departed(left) = *one {
                *one = Participation::Expected(left);
                returning.push(trainer);
            }
        }
        returning
    }

    /// Records a departure; false for a repeated one, which changes nothing.
    pub(super) fn depart(&mut self, trainer: TrainerId, incarnation: Incarnation) -> bool {
        let one = &mut self.trainers[trainer.0 as usize];
        let is_new = one.left().is_none_or(|left| left < incarnation);
        if is_new {
            *one = Participation::Departed(incarnation);
        }
        is_new
    }

    /// Records that a newer process of a departed trainer pushes.
    pub(super) fn join(&mut self, trainer: TrainerId) {
        self.trainers[trainer.0 as usize] = Participation::Active;
    }

    /// The incarnation with which each trainer departed from this run; zero for the others.
    pub(super) fn departed(&self) -> Vec<u32> {
        let left = |one: &Participation| if let Participation::Departed(left) = one { left.0 } else { 0 };
        self.trainers.iter().map(left).collect()
    }

    /// The incarnation with which each awaited trainer departed from an earlier run; zero for the others.
    pub(super) fn expected(&self) -> Vec<u32> {
        let left = |one: &Participation| if let Participation::Expected(left) = one { left.0 } else { 0 };
        self.trainers.iter().map(left).collect()
    }

    /// Restores what [`departed`](Self::departed) and [`expected`](Self::expected) gave.
    pub(super) fn restore(&mut self, run: RunNumber, departed: &[u32], expected: &[u32]) {
        self.run = run;
        let restored = |left: &u32, state: fn(Incarnation) -> Participation| match left {
            0 => None,
            left => Some(state(Incarnation(*left))),
        };
        for (one, left) in self.trainers.iter_mut().zip(departed) {
            *one = restored(left, Participation::Departed).unwrap_or(*one);
        }
        for (one, left) in self.trainers.iter_mut().zip(expected) {
            *one = restored(left, Participation::Expected).unwrap_or(*one);
        }
    }
}

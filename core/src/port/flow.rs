//! Interface between a shard and the compiler of programs. A server runs a program for each parameter; a shard gets it
//! compiled, as a [`Flow`].

use crate::accumulator::AccumulatorPace;
use crate::config::{Merge, Mode};
use crate::error::Failure;
use crate::optim::Prepared;
use crate::partition::Declaration;

/// A parameter and the settings of its job, of which its program is made.
#[derive(Clone, Copy, Debug)]
pub struct FlowSource<'a> {
    /// The mode of the job.
    pub mode: Mode,
    /// How the job merges gradients.
    pub merge: Merge,
    /// The number of trainers.
    pub trainers: u32,
    /// The trainers without whose gradients a round is complete.
    pub backup_trainers: u32,
    /// The parameter as it was declared.
    pub declaration: &'a Declaration,
    /// The rule of its updates: in delta mode the one that adds, otherwise the configured one.
    pub rule: &'a Prepared,
}

/// Compiles the program that a server runs for a parameter. A failure refuses the initialisation of the job.
pub type CompileFlow = fn(FlowSource<'_>) -> Result<Flow, Failure>;

/// A compiled program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// When a round receives a gradient.
    pub pace: AccumulatorPace,
    /// The gradients that complete a round, or as many as there are trainers.
    pub count: u32,
    /// The computation that makes an update of a complete round.
    pub stage: Stage,
}

/// The ops between the accumulator and `send`, compiled: a scale of the merged gradient, then an update by the
/// parameter's rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stage {
    /// How the gradients of a round are merged.
    pub merge: Merge,
    /// The factor on the merged gradient.
    pub factor: f64,
}

impl Stage {
    /// The factor on the sum of this many gradients.
    #[must_use]
    pub fn scale(&self, gradients: usize) -> f64 {
        let mean_over = match self.merge {
            Merge::Mean => u32::try_from(gradients).unwrap_or(u32::MAX),
            Merge::Sum => 1,
        };
        1.0 / f64::from(mean_over) * self.factor
    }
}

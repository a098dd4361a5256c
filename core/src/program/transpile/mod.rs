//! Transpilers: from a program that one process could run to the sub-programs of trainers and servers.
//!
//! Not here: running them ([`executor`](super::executor)), and writing them as text.
//!
//! A [`Transpiler`] takes a checked program, a [`Cluster`] and a [`CostModel`], and gives a [`Part`] for every process.
//! The order of names, ops and parts depends on nothing but these three, so whoever transpiles gets the same bytes.
//!
//! - [`ParameterServer`]: what the ops of the role [`Optimize`](super::Role::Optimize) write lives on servers, with
//!   these ops; everything else stays on trainers. [`Placement`] says how servers share it.
//! - [`Columns`]: one layer's weight is cut by columns over the trainers; there are no servers.
//!
//! Read in this order: [`Part`] and [`Transpiler`]; `outline` (where things are); `group` (which ops belong together,
//! and what may be cut); [`CostModel`]; `placement`; `parameter_server`, with `server` and `trainer`; `columns`;
//! `draw`.

mod columns;
mod cost;
mod draw;
mod group;
mod outline;
mod parameter_server;
mod placement;
mod server;
#[cfg(test)]
mod tests;
mod trainer;
mod write;

use crate::error::Failure;

use super::graph::Graph;
use super::op::Peer;

pub use columns::Columns;
pub use cost::{CostModel, Estimate, Machine, NodeEstimate, Work, estimate};
pub use draw::{dot, svg};
pub use parameter_server::ParameterServer;
pub use placement::Placement;

/// Who takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Processes that compute gradients; at least one.
    pub trainers: u32,
    /// Processes that hold parameters.
    pub servers: u32,
}

/// A sub-program, and everybody who runs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The processes, in order; none when nobody in particular runs it.
    pub peers: Vec<Peer>,
    /// What each of them runs.
    pub graph: Graph,
}

/// Makes sub-programs that together do what one program says.
pub trait Transpiler {
    /// The sub-programs: trainers first, each process in exactly one part.
    ///
    /// # Errors
    /// [`Failure::Call`] when the program cannot be divided in this way. It names the block, the op and the variable,
    /// what was found and what was expected.
    fn transpile(&self, graph: &Graph, cluster: Cluster, costs: &CostModel) -> Result<Vec<Part>, Failure>;
}

//! Transpilers: divide a program for one process into the sub-programs of trainers and servers.
//!
//! Not here: running them ([`executor`](super::executor)), and printing them as text.
//!
//! A [`Transpiler`] takes a checked program, a [`Cluster`] and a [`CostModel`], and returns a [`ProgramPart`] for every
//! process. The order of names, ops and parts depends on these three only, so every process that transpiles gets the
//! same bytes.
//!
//! - [`ParameterServer`]: the variables that ops of the role [`Optimize`](super::OpRole::Optimize) write are on
//!   servers, with these ops; everything else stays on trainers. [`Placement`] distributes them over servers.
//! - [`Columns`]: one layer's weight is cut by columns over the trainers; servers hold queues between them.
//!
//! Read in this order: [`ProgramPart`] and [`Transpiler`]; `outline` (an index of the program); `group` (which ops
//! belong together, and what may be cut); [`CostModel`], with `rates`; `step_time`; `division`; `step_loads`;
//! `placement`, with `given_placement`; `parameter_server`, with `server` and `trainer`; `columns`, with `queues`;
//! `draw`.

mod columns;
mod cost;
mod division;
mod draw;
mod given_placement;
mod group;
mod outline;
mod parameter_server;
mod part;
mod placement;
mod pulls;
mod queues;
mod rates;
mod server;
mod step_loads;
mod step_time;
#[cfg(test)]
mod tests;
mod ties;
pub(crate) mod totals;
mod trainer;
mod write;

use pserver_core::error::Failure;

use super::graph::Graph;

pub use columns::{ColumnShares, Columns};
pub use cost::{CostModel, Estimate, NodeEstimate, ProcessRates, StepWork, estimate};
pub use draw::{dot, html, svg};
pub use given_placement::GivenPlacement;
pub use parameter_server::ParameterServer;
pub use part::{Cluster, ProgramPart};
pub use placement::Placement;
pub use rates::MachineRates;

/// Divides a program into sub-programs that together compute the same.
pub trait Transpiler {
    /// The sub-programs: trainers first, each process in exactly one part.
    ///
    /// # Errors
    /// [`Failure::Call`] when the program cannot be divided in this way. It names the block, the op and the variable,
    /// the found and the expected form.
    fn transpile(&self, graph: &Graph, cluster: Cluster, costs: &CostModel) -> Result<Vec<ProgramPart>, Failure>;
}

//! Parts of a divided program, and the numbers of processes.

use crate::graph::Graph;
use crate::op::ProgramPeer;

/// The number of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Processes that compute gradients; at least one.
    pub trainers: u32,
    /// Processes that hold parameters.
    pub servers: u32,
}

/// A sub-program and the processes that run it.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramPart {
    /// The processes, in order; empty when none is assigned.
    pub peers: Vec<ProgramPeer>,
    /// The program of each of them.
    pub graph: Graph,
}

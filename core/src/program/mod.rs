//! Programs: one representation of what trainers and servers run.
//!
//! Not here: threads, sockets, clocks; fast arithmetic (`pserver-kernels` fills the port).
//!
//! A [`Program`] is a claim: blocks of ops over variables with names, as a file, a message or a person wrote them.
//! Whoever runs one makes a [`Graph`] of it first, which is known to fit and has the facts of every variable.
//!
//! Read in this order: [`Facts`] and [`Variable`]; [`OpKind`], which is the list of all operations with their
//! signatures; [`Block`] and [`Program`]; [`Graph`]; [`Value`];
//! [`executor`], which runs a graph.

mod attributes;
mod backward;
mod block;
mod builder;
pub mod executor;
mod graph;
mod infer;
mod message;
mod op;
mod optimizer;
mod plain;
#[cfg(test)]
mod tests;
mod text;
pub mod transpile;
mod turn;
mod value;
mod values;
mod variable;

pub use backward::{ParameterGradient, append_backward};
pub use block::{Block, Program};
pub use builder::{Builder, Symbol};
pub use graph::{Graph, Node, Scope, VariableIndex};
pub use op::{Destination, Op, OpKind, Peer, Role};
pub use optimizer::append_optimizer;
pub(crate) use optimizer::state_name;
pub use plain::{PlainArithmetic, PlainRun, apply_update};
pub(crate) use turn::{Arrival, Terms, turns};
pub use value::{Elements, Tensor, Value};
pub use variable::{Dim, Facts, Purpose, Variable};

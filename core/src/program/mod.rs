//! Programs: one representation of the computations of trainers and servers.
//!
//! Not here: threads, sockets, clocks; fast arithmetic (`pserver-kernels` implements [`Arithmetic`]).
//!
//! A [`Program`] is unchecked: blocks of ops over named variables, from a file, a message or a person. A [`Graph`] is
//! the checked form, in which the facts (type and shape) of every variable are known. Only a graph runs.
//!
//! Read in this order: [`VariableFacts`] and [`Variable`]; [`OpKind`], the list of all operations with their
//! signatures; [`Block`] and [`Program`]; [`Graph`]; [`VariableValue`]; [`executor`], which runs a graph.

mod arithmetic;
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
pub mod server_flow;
#[cfg(test)]
mod tests;
mod text;
pub mod transpile;
mod update_loop;
mod value;
mod values;
mod variable;

pub use arithmetic::Arithmetic;
pub use backward::{ParameterGradient, append_backward};
pub use block::{Block, Program};
pub use builder::{Builder, Symbol};
pub use graph::{Graph, Node, Scope, VariableIndex};
pub use op::{Destination, Op, OpKind, OpRole, ProgramPeer};
pub use optimizer::append_optimizer;
pub(crate) use optimizer::state_name;
pub use plain::{PlainArithmetic, PlainRun};
pub(crate) use update_loop::{GradientNames, loop_forever};
pub use value::{Elements, Tensor, VariableValue};
pub use variable::{Dim, Purpose, Variable, VariableFacts};

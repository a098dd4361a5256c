//! Programs: one representation of the computations of trainers and servers, their division among processes, and their
//! execution.
//!
//! Not here: threads, sockets, clocks; a trainer's part run against real servers (`pserver-trainer`); a server's flow,
//! which a shard carries out in plain code ([`pserver_core::server`]) around the stage that [`server_stage`]
//! writes and [`server_flow`] compiles.
//!
//! A [`Program`] is unchecked: blocks of ops over named variables, from a file, a message or a person. A [`Graph`] is
//! the checked form, in which the facts (type and shape) of every variable are known. Only a graph runs.
//!
//! Read in this order: [`VariableFacts`] and [`Variable`]; [`OpKind`], the list of all operations with their
//! signatures; [`Block`] and [`Program`]; [`Graph`]; [`VariableValue`]; [`Arithmetic`] with [`PlainArithmetic`]
//! (the oracle), [`cpu`] and [`conformance`]; [`executor`], which runs a graph; [`transpile`]; [`server_stage`];
//! [`server_flow`].

mod arithmetic;
mod attributes;
mod backward;
mod block;
mod builder;
pub mod conformance;
pub mod cpu;
pub mod executor;
mod given;
mod graph;
pub mod hosted;
mod infer;
mod message;
mod op;
mod optimizer;
mod paddle;
mod plain;
pub mod server_flow;
pub mod server_stage;
#[cfg(test)]
mod tests;
mod text;
pub mod transpile;
mod update_loop;
mod value;
mod values;
mod variable;
mod window;

pub use arithmetic::Arithmetic;
pub use backward::{ParameterGradient, append_backward};
pub use block::{Block, Program};
pub use builder::{Builder, Symbol};
pub use given::GivenValues;
pub use graph::{Graph, Node, Scope, VariableIndex};
pub use op::{Destination, Op, OpKind, OpRole, ProgramPeer};
pub use optimizer::append_optimizer;
pub(crate) use optimizer::state_name;
pub use paddle::{PaddleImport, import_paddle, import_paddle_given};
pub use plain::{PlainArithmetic, PlainRun};
pub use text::ProgramPositions;
pub(crate) use update_loop::{GradientNames, loop_forever};
pub use value::{Elements, Tensor, VariableValue};
pub use variable::{Dim, Purpose, Variable, VariableFacts};
pub use window::WindowSteps;

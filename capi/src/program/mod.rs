//! Programs against the servers of a job: what a trainer's part sends and receives are the calls of a client.
//!
//! The parts come from the transpiler of the parameter server. A trainer runs its own with the executor. What a server
//! does to a gradient is made by the server itself, from the job's settings and the rule that the parameter is declared
//! with; it is the same sub-program (receive, accumulate, update, send), so each server's part is read for what it
//! keeps, how that begins, which rule it has, and how trainers share it: a job is told the last when it is initialised,
//! and one that does something else is refused. So is a part that does more.
//!
//! A table whose gradient is selected rows lives on servers as a sparse parameter. Of such a table a trainer fetches
//! the rows that the step will look up, and no others.
//!
//! Not here: dividing a program ([`pserver_core::program::transpile`]), running one
//! ([`pserver_core::program::executor`]).
//!
//! Read in this order: `kept` with `terms` and `beginnings`, `lookups`, [`Trainer`].

mod beginnings;
mod kept;
mod lookups;
mod terms;
mod trainer;

pub(crate) use trainer::initialise_for_deltas;
pub use trainer::{Trainer, initialise};

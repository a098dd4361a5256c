//! `pserver quickstart`: two servers and four trainers on this machine learn handwritten digits, end to end.
//!
//! The parent starts child processes of its own executable, shows their progress, measures and saves the model, and
//! reaps every child on every path. Not here: child processes (`pserver_processes`) and the servers among
//! them (`local_servers`); the library that trainers use ([`pserver_client`], [`pserver_trainer`]).
//!
//! Read in this order: [`digits`], [`network`], [`trainer`]; then `runner` (the parent).

pub mod digits;
pub mod network;
mod plan;
mod rule;
mod runner;
mod shuffler;
pub mod trainer;

#[cfg(test)]
mod tests;

pub(crate) use plan::optimizer_text;
pub use plan::{Optimizer, Sharing, Way};
pub use rule::RuleArgs;
pub use runner::{Args, run};
pub use shuffler::Shuffler;

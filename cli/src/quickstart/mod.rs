//! `pserver quickstart`: two servers and four trainers on this machine learn handwritten digits, end to end.
//!
//! The parent starts child processes of its own executable, shows their progress, measures and saves the model, and
//! reaps every child on every path. Not here: the server itself; the library that trainers use
//! ([`pserver_client`], [`pserver_trainer`]).
//!
//! Read in this order: [`digits`], [`network`], [`trainer`]; then `runner` (the parent) and `children` (child
//! processes).

pub(crate) mod children;
pub mod digits;
pub mod network;
pub mod parent_death;
mod plan;
mod rule;
pub(crate) mod runner;
mod shuffler;
pub mod trainer;

#[cfg(test)]
mod tests;

pub(crate) use plan::optimizer_text;
pub use plan::{Optimizer, Sharing, Way};
pub use rule::RuleArgs;
pub(crate) use runner::CHILDREN_MAX;
pub use runner::{Args, run};
pub use shuffler::Shuffler;

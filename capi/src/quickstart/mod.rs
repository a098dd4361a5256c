//! `pserver quickstart`: two servers and four trainers on this machine learn handwritten digits, end to end.
//!
//! The parent starts children from its own executable, shows how they get on, measures and saves the model, and
//! leaves no process behind, however it ends. Not here: the server itself; the library that trainers use
//! ([`crate::client`], [`crate::program`]).
//!
//! `pserver quickstart words` is another example: [`words`], [`skip_gram`], [`word_trainer`], `word_conduct`.
//!
//! Read in this order: [`digits`], [`network`], [`trainer`]; then `conduct` (what the parent does when) and `family`
//! (the children as processes).

mod conduct;
pub mod digits;
mod family;
pub mod lifeline;
mod luck;
pub mod network;
mod plan;
mod rule;
pub mod skip_gram;
pub mod trainer;
mod word_conduct;
pub mod word_trainer;
pub mod words;

#[cfg(test)]
mod tests;

pub use conduct::{Args, run};
pub use plan::{Optimizer, Sharing, Way};
pub use rule::RuleArgs;
pub use word_conduct::{Args as WordArgs, run as run_words};

//! What ships: the C library, and what the `pserver` program is made of.
//!
//! Not here: how a chunk is summed (`pserver_kernels`), moved (`pserver_transport`) or decided upon
//! (`pserver_core`). This package assembles: it chooses a transport and kernels, and runs threads.
//!
//! Read in this order: [`client`] (a trainer's calls), [`api`] (their C faces), [`environment`] (how a trainer finds
//! its job), [`node`] (a server's threads), [`settings`] (what an
//! operator may say), [`program`] (a trainer that runs its part of one), [`quickstart`] (the main job), [`transpile`]
//! (programs divided).

pub mod api;
pub mod client;
pub mod environment;
pub mod node;
pub mod program;
pub mod quickstart;
mod rule_file;
pub mod settings;
pub mod transpile;

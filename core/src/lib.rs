//! Core of the parameter server: protocol, state and arithmetic rules without I/O.
//!
//! Not here: sockets, CUDA, verbs, clocks, threads, environment variables. The disk is reached through
//! [`checkpoint::storage`] alone. Transports implement [`port::Transport`] and kernels [`port::Kernels`]; both live in
//! packages of their own.
//!
//! Read in this order: [`ids`], [`dtype`], [`error`], [`text`] (values); [`partition`] (which chunk lives where);
//! [`wire`] (what a frame is); [`memory`] (who may touch a chunk); [`port`] (what a transport and a kernel must do);
//! [`rows`] (tables of which only some rows are touched); [`server`] and [`client`] (who talks to whom, and when).

pub mod accumulator;
pub mod checkpoint;
pub mod checksum;
pub mod client;
pub mod config;
pub mod dtype;
pub mod error;
pub mod ids;
pub mod limits;
pub mod memory;
pub mod narrowing;
pub mod optim;
pub mod partition;
pub mod port;
pub mod prng;
pub mod program;
pub mod rows;
pub mod rule;
pub mod server;
pub mod text;
pub mod time;
pub mod wire;

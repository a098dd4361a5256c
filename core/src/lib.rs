//! Core of the parameter server: protocol, state and arithmetic rules without I/O.
//!
//! Not here: sockets, CUDA, verbs, clocks, threads, environment variables. The disk is reached through
//! [`checkpoint::storage`] alone. Transports implement [`port::Transport`], kernels [`port::Kernels`], and the compiler
//! of programs is a [`port::CompileFlow`]; all live in packages of their own.
//!
//! Read in this order: [`ids`], [`dtype`], [`error`], [`text`] (values); [`partition`] (placement of chunks on shards);
//! [`wire`] (frames); [`memory`] (access to chunks); [`port`] (interfaces of transports, kernels and devices); [`rows`]
//! (tables of sparse parameters); [`server`] and [`client`] (the two ends of a connection).

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
pub mod metrics;
pub mod narrowing;
pub mod optim;
pub mod partition;
pub mod port;
pub mod prng;
pub mod rows;
pub mod rule;
pub mod server;
pub mod shares;
pub mod text;
pub mod time;
pub mod wire;

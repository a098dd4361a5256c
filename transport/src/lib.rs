//! What moves frames: each backend fills [`Transport`](pserver_core::port::Transport).
//!
//! Not here: what a frame means (`pserver_core::wire`), who talks to whom (`pserver_core::server` and `client`),
//! and any decision about placement. A transport neither copies a payload it need not copy nor looks into one.
//!
//! Read in this order: [`loopback`] (the simplest one, in process), [`network`] (what owns connections: over
//! TCP, through the memory of one machine, `shm`, or over [`verbs`]), [`fault`] and [`trace`] (wrappers that are
//! transports themselves), [`conformance`] (what all of them promise).

pub mod conformance;
pub mod fault;
pub mod loopback;
pub mod network;
mod payload;
mod refusal;
mod share;
mod shm;
pub mod trace;
pub mod verbs;

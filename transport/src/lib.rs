//! Transports of frames: implementations of [`Transport`](pserver_core::port::Transport).
//!
//! Not here: the meaning of a frame (`pserver_core::wire`), sessions (`pserver_core::server` and `client`), and
//! placement. A transport copies a payload only where it must, and looks into it only for checksums and non-finite
//! elements.
//!
//! Read in this order: [`loopback`] (the simplest transport, in process), [`network`] (connections over TCP, shared
//! memory (`shm`) and [`verbs`]), [`tls`] (encryption of TCP), [`fault`] and [`trace`] (wrappers of any transport),
//! [`conformance`] (the test suite of all).

pub mod conformance;
mod connection;
pub mod fault;
pub mod loopback;
pub mod network;
mod payload;
mod refusal;
mod shm;
pub mod tls;
pub mod trace;
mod turn_budget;
pub mod verbs;

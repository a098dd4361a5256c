//! The ports: what a transport and a kernel must do.
//!
//! Transports live in `pserver-transport`, kernels in `pserver-kernels`; both are chosen by value at start.
//! The disk's port is [`crate::checkpoint::storage::Storage`].

mod arithmetic;
mod kernels;
mod transport;

pub use crate::optim::Formula;
pub use arithmetic::Arithmetic;
pub use kernels::{Kernels, Plain, Update};
pub use transport::{Capabilities, Doorbell, Event, Incoming, Outgoing, Submit, Transport};

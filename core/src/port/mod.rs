//! Ports: the interfaces of transports, kernels and accelerators.
//!
//! Transports live in `pserver-transport`, kernels and accelerators in `pserver-kernels`; all are chosen by value at
//! start.
//! The disk's port is [`crate::checkpoint::storage::Storage`].

mod accelerator;
mod kernels;
mod transport;

pub use crate::optim::Formula;
pub use accelerator::{
    Accelerator, Code, DeviceFacts, DeviceSlot, Done, Fault, FaultyAccelerator, GradientLease, NotAdopted, Resident,
    Simulated, Work, squares_bytes,
};
pub use kernels::{Kernels, Plain, Update};
pub use transport::{Capabilities, Doorbell, Event, Incoming, Outgoing, Submit, Transport};

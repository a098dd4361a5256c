//! Ports: the interfaces of transports, kernels, accelerators, stores of coordination and the compiler of programs.
//!
//! Transports live in `pserver-transport`, kernels and accelerators in `pserver-kernels`, the compiler in
//! `pserver-program`; all are chosen by value at start.
//! The disk's port is [`crate::checkpoint::storage::Storage`].

mod accelerator;
mod coordination;
mod flow;
mod hosted_program;
mod kernels;
mod transport;

pub use crate::optim::Formula;
pub use accelerator::{
    Accelerator, DeviceCode, DeviceFacts, DeviceSlot, Done, Fault, FaultyAccelerator, GradientLease, NotAdopted,
    Resident, Simulated, Work, squares_bytes,
};
pub use coordination::{
    CoordinationStore, FailingStore, MemoryStore, StoreFailure, StoreFault, StoreFaults, StoreVersion, StoredValue,
};
pub use flow::{CompileFlow, Flow, FlowSource, Stage};
pub use hosted_program::{
    EndKind, HostedProgram, LoadProgram, ProgramEnd, enclose_program, enclosed_program, no_programs,
};
pub use kernels::{Kernels, Plain, Update};
pub use transport::{Capabilities, Doorbell, Event, Incoming, Outgoing, Payloads, ReceiveBuffers, Submit, Transport};

//! Driver objects, each owned by one value. No C type is visible above this module.
//!
//! All unsafe code of the driver side is here, in `checked` and in `sys`. Soundness: an object keeps its
//! [`CudaContext`]; a handle is destroyed once, by the value that owns it; host memory that a stream reads or writes is
//! owned by [`StreamSet`] until an event shows that the stream has finished with it, and is leaked when that can no
//! longer be determined.

mod compiler;
mod context;
mod foreign;
mod graph;
mod memory;
mod module;
mod region;
mod replicas;
mod streams;

pub(super) use compiler::Compiler;
pub(super) use context::CudaContext;
pub use foreign::{ForeignClaim, ForeignMemory, ForeignStream, MemoryOwner};
pub(super) use graph::CapturedGraph;
pub(super) use memory::{DeviceMemory, DeviceRange, HostMapping, PinnedMemory, PinnedRange, RegisteredRange};
pub(super) use module::{CudaModule, Grid, KernelFunction, grid, grid_of};
pub(super) use streams::{CudaEvent, Ring, StreamId, StreamSet, Ticket};

//! CUDA backend: kernel sources, their entry points and argument structures, and the driver API calls that load and run
//! them. `docs/CUDA.md` describes it.
//!
//! Not here: which chunks live on a device, and what happens to them when it fails ([`pserver_core::server`]); which
//! device a shard gets (`node/src/device.rs`); the reference for every bit ([`pserver_core::rule::reference`],
//! [`pserver_core::optim`], [`pserver_core::rows::RowMerge`]). No server calls the kernels for rows, norms, casts and
//! scalars.
//!
//! Building and starting need nothing of CUDA: the driver is loaded when a device is opened.
//!
//! Read [`arguments`] (the parameters of every entry point), [`emit`] (a rule becomes source code), [`source`] (sources
//! become a module), [`scalars`] (a rule's scalars on the device), [`shipped`] (the committed binaries).
//!
//! Then the driver side: `sys` (its functions), `checked` (their results), `safe` (its objects; all unsafe code is in
//! these three), `code` and `cache` (the choice of a kernel), [`CudaSettings`], `chunk_memory` and `pinned_arena`
//! (memory), [`GatherPlan`] (grouping of gradients), `slot` (a chunk on the device), `in_flight` (its work),
//! `submission` (work becomes copies and kernels), [`Cuda`] (the accelerator). [`CudaDevice`] is a device before memory
//! is taken from it, [`AcceleratorKernels`] adapts an accelerator to the kernels port, [`Probe`] is what `psbench`
//! times, [`KernelLauncher`] launches any kernel by name, [`compile_ahead`] fills a cache without a device,
//! [`ForeignMemory`] is a trainer's own memory.

use pserver_core::error::Failure;

mod accelerator;
mod accelerator_kernels;
pub mod arguments;
mod cache;
mod checked;
mod chunk_memory;
mod code;
mod device;
pub mod emit;
mod gathering;
mod in_flight;
mod launcher;
mod pinned_arena;
mod probe;
mod safe;
pub mod scalars;
mod settings;
pub mod shipped;
mod slot;
pub mod source;
mod submission;
mod sys;
#[cfg(test)]
mod tests;
mod together;

pub use accelerator::Cuda;
pub use accelerator_kernels::AcceleratorKernels;
pub use code::{ShippedImage, compile_ahead};
pub use device::CudaDevice;
pub use emit::Emitted;
pub use gathering::GatherPlan;
pub use launcher::{KernelLaunch, KernelLauncher, LaunchBuffer, LaunchGraph};
pub use probe::{CopyDirection, Probe, TimedUpdate};
pub use safe::{ForeignClaim, ForeignMemory, ForeignStream, MemoryOwner};
pub use settings::{CudaSettings, rules_folder};
pub use source::ModuleSource;

/// Opens a device with default settings.
///
/// # Errors
/// [`Failure::Call`] names what was missing: the driver, a device, this device, memory.
pub fn open(ordinal: u32) -> Result<Cuda, Failure> {
    Cuda::open(CudaSettings::of(ordinal))
}

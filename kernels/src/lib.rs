//! Compute kernels: sums of gradients and updates of parameters, as fast as memory allows, on the processor and on CUDA
//! devices.
//!
//! Not here:
//!
//! - the reference results: [`pserver_core::optim`] and [`pserver_core::rule`] compute one element after another;
//! - which chunk is updated and when, and which chunks live on a device ([`pserver_core::server`]); which rows of a
//!   table are updated ([`pserver_core::rows`] hands tiles of rows to kernels);
//! - the arithmetic of programs (`pserver-program`);
//! - the norm that a gradient is clipped to: the loop is in [`pserver_core::optim`];
//! - the choice of kernels and of a device for a shard, and threads (`pserver-node`). A kernel's buffers belong to one
//!   shard.
//!
//! Device kernels for rows, norms, casts and tables of tensors, and captured graphs, are launched by tests only
//! (`docs/CUDA.md`).
//!
//! Sums are loops. The crate `multiversion` compiles them for AVX-512, AVX2 and the plain target and picks one at run
//! time. Rules are code that `native` generates for the same instructions; `tiles` runs them where `native` cannot. All
//! variants give the same bits: nothing adds across elements, and no product and sum are contracted into one rounding.
//! Unsafe code is in `native::x86::raw`, which runs generated code, and in `cuda::{sys, checked, safe}`.
//!
//! Read in this order: [`cpu`]; `native` and `tiles` (how a rule runs); [`conformance`] (the properties of every kernel
//! and device, as tests); [`FaultyKernels`] (kernels that violate them); [`cuda`].

pub mod conformance;
pub mod cpu;
pub mod cuda;
mod faulty;
mod native;
mod tiles;

pub use faulty::FaultyKernels;

//! The arithmetic of a shard: sums of gradients and updates of parameters, as fast as memory allows, on the processor
//! and on devices of CUDA; and the arithmetic of programs.
//!
//! Not here:
//!
//! - what the right answer is: [`pserver_core::optim`] and [`pserver_core::rule`] are the oracles, one plain element
//!   after another;
//! - which chunk is updated and when, and what lives on a device ([`pserver_core::server`]); which rows of a table are
//!   ([`pserver_core::rows`], which hands kernels tiles of rows);
//! - the norm that a gradient is clipped to: [`pserver_core::optim`] has the one loop for it;
//! - which kernels and which device a shard gets, and threads: `pserver`, in `capi/src/node`, chooses; a shard is one
//!   core, and what a kernel keeps is its own.
//!
//! Nor does a server use all that is here: rows, norms, casts and tables of tensors have kernels for devices that only
//! tests launch (`docs/CUDA.md`), and nobody captures a graph.
//!
//! Sums are loops, and which vector instructions a machine has is found at run time by the crate `multiversion`: its
//! macro compiles the same loops once for AVX-512, once for AVX2 and once for the plain target. Rules are code that
//! `native` generates for the same instructions, or tiles where it cannot. The bits are the same on each, because
//! nothing adds across elements and no product and sum are contracted into one rounding. `unsafe` has two doors:
//! `native::x86::raw`, which runs generated code, and of `cuda` the modules `sys`, `checked` and `safe`.
//!
//! Read in this order: [`cpu`], then `native` and `tiles` (how a rule is run), then [`conformance`] (what every kernel
//! and every device must keep, and what tests of both share), then [`Faulty`] (one that does not); [`cuda`], devices;
//! and [`graph`], the arithmetic of programs, which stands by itself.

pub mod conformance;
pub mod cpu;
pub mod cuda;
mod faulty;
pub mod graph;
mod native;
mod tiles;

pub use faulty::Faulty;

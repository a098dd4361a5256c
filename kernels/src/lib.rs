//! The arithmetic of a shard: sums of gradients and updates of parameters, as fast as memory allows.
//!
//! Not here: what the right answer is ([`pserver_core::optim`] and [`pserver_core::rule`] are the oracles, one plain
//! element after another); threads (a shard is one core, and what a kernel keeps is its own).
//!
//! Sums are loops, and which vector instructions a machine has is found at run time by the crate `multiversion`: its
//! macro compiles the same loops once for AVX-512, once for AVX2 and once for the plain target. Rules are code that
//! `native` generates for the same instructions, or tiles where it cannot. The bits are the same on each, because
//! nothing adds across elements and no product and sum are contracted into one rounding. `unsafe` has one door,
//! `native::x86::raw`.
//!
//! Read in this order: [`cpu`], then `native` and `tiles` (how a rule is run), then [`conformance`] (what every kernel
//! must keep), then [`Faulty`] (one that does not); [`graph`], the arithmetic of programs, stands by
//! itself, and so does [`cuda`], the texts of kernels for devices.

pub mod conformance;
pub mod cpu;
pub mod cuda;
mod faulty;
pub mod graph;
mod native;
mod tiles;

pub use faulty::Faulty;

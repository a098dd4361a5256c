//! The arithmetic of a shard: sums of gradients and updates of parameters, as fast as memory allows.
//!
//! Not here: what the right answer is ([`pserver_core::optim`] is the oracle, one plain element after another);
//! CUDA; threads (a shard is one core, and every kernel is a pure function of the elements it is given);
//! `unsafe`. Which vector instructions a machine has is found at run time by the crate `multiversion`: its macro
//! compiles the same loops once for AVX-512, once for AVX2 and once for the plain target, and writes the guarded
//! call that would otherwise be unsafe code of ours. The bits are the same on each, because no loop adds across
//! elements and Rust never contracts a product and a sum into one rounding by itself.
//!
//! Read in this order: [`cpu`], then [`conformance`] (what every kernel must keep), then [`Faulty`] (one that does
//! not); [`graph`], the arithmetic of programs, stands by itself.

pub mod conformance;
pub mod cpu;
mod faulty;
pub mod graph;

pub use faulty::Faulty;

//! Update rules: what a server does to a gradient, as text that a user reads and writes.
//!
//! Not here: which rule a parameter has, and what stands around it ([`crate::optim`]); how a configuration names it
//! ([`crate::config`]); code that runs it fast (`kernels`).
//!
//! Read in this order: [`ssa`] (what a kernel is handed), [`reference`] (what its bits are), [`uses`] (what who
//! generates code asks).

pub mod reference;
pub mod ssa;
pub mod uses;

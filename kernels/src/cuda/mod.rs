//! CUDA: the texts of the kernels, their entry points and what they are handed. `docs/CUDA.md` has it at length.
//!
//! Not here: how rows, chunks and steps use the kernels; the reference for every bit
//! ([`pserver_core::rule::reference`], [`pserver_core::optim`], [`pserver_core::rows::Merge`]).
//!
//! Nothing of CUDA is needed to build this. Read [`arguments`] (what every entry point takes), [`emit`] (a rule becomes
//! a text), [`source`] (texts become a module), [`scalars`] (what a rule's scalars are on the device), [`shipped`]
//! (what is compiled and committed).

pub mod arguments;
pub mod emit;
pub mod scalars;
pub mod shipped;
pub mod source;

pub use emit::Emitted;
pub use source::Module;

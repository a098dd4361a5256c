//! CUDA: the texts of the kernels, their entry points and what they are handed (`docs/CUDA.md` has it at length), and
//! the driver that loads and runs them.
//!
//! Not here: which chunks live on a device, and what becomes of them when it fails ([`pserver_core::server`]); which
//! device a shard gets (`capi/src/node/device.rs`); the reference for every bit ([`pserver_core::rule::reference`],
//! [`pserver_core::optim`], [`pserver_core::rows::Merge`]). A server has no use for the kernels of rows, norms, casts
//! and scalars: there is nobody who would call them.
//!
//! Nothing of CUDA is needed to build this or to start: the driver is looked for when somebody opens a device.
//!
//! Read [`arguments`] (what every entry point takes), [`emit`] (a rule becomes a text), [`source`] (texts become a
//! module), [`scalars`] (what a rule's scalars are on the device), [`shipped`] (what is compiled and committed).
//!
//! Then the driver side: `sys` (its functions), `checked` (what they return), `safe` (its objects; all unsafe code is
//! in these three), `code` and `cache` (which kernel runs), [`Settings`], `room` and `locked` (memory), [`Gathering`]
//! (how gradients come together), `submission` (how a piece of work becomes copies and kernels), [`Cuda`] (the
//! accelerator). [`Found`] is a device that nobody has taken yet, [`Beside`] the accelerator as kernels, [`Probe`] what
//! `psbench` times, [`Direct`] any kernel by hand, [`Foreign`] a trainer's own memory.

use pserver_core::error::Failure;

mod accelerator;
pub mod arguments;
mod beside;
mod cache;
mod checked;
mod code;
mod direct;
pub mod emit;
mod found;
mod gathering;
mod locked;
mod probe;
mod room;
mod safe;
pub mod scalars;
mod settings;
pub mod shipped;
pub mod source;
mod submission;
mod sys;
#[cfg(test)]
mod tests;

pub use accelerator::Cuda;
pub use beside::Beside;
pub use direct::{Direct, DirectBuffer, DirectLaunch, DirectStep};
pub use emit::Emitted;
pub use found::Found;
pub use gathering::Gathering;
pub use probe::{Probe, Timed, Way};
pub use safe::{Claim, Foreign, Whose};
pub use settings::{Settings, rules_folder};
pub use source::Module;

/// Opens a device, with everything else as it is when nobody chooses.
///
/// # Errors
/// [`Failure::Call`] with what was missing: the driver, a device, this device, memory.
pub fn open(ordinal: u32) -> Result<Cuda, Failure> {
    Cuda::open(Settings::of(ordinal))
}

//! The CUDA kernels run on this machine's processor, through the shim, against the plain form.
//!
//! Read in this order: [`child`] (how a kernel is run), [`launches`] (kernels as whoever calls them sees them), then
//! the tests by what they are about.

mod child;
mod launches;
mod reductions;
mod rows;
mod updates;

//! The CUDA kernels against the plain form: on this machine's processor, through the shim; on a device, where there is
//! one; else on the driver that stands in for one.
//!
//! Read in this order: [`launcher`] (who runs a kernel), [`child`] and [`device`] (how), [`launches`] (kernels as
//! whoever calls them sees them), then the tests by what they are about.

mod barriers;
mod child;
mod device;
mod launcher;
mod launches;
mod reductions;
mod replicas;
mod rows;
mod steps;
mod updates;

//! Tests of CUDA kernels against the reference: on this machine's processor, through the shim; on a device, where there
//! is one; else on the simulated driver.
//!
//! Read in this order: [`launcher`], [`child`] and [`device`] (its implementations), [`launches`] (kernels from the
//! view of a caller), then the tests by topic.

mod barriers;
mod child;
mod device;
mod every_entry;
mod launcher;
mod launches;
mod reductions;
mod replicas;
mod rows;
mod steps;
mod updates;

//! A device that is there, before anybody takes some of it.

use std::sync::Arc;

use pserver_core::error::Failure;

use super::safe::Context;

/// A device, and its context as long as this is held: whoever opens it several times finds it made.
pub struct Found {
    context: Arc<Context>,
}

impl Found {
    /// Looks for the device of this number.
    ///
    /// # Errors
    /// [`Failure::Call`] with what is missing: the driver, a device, this device.
    pub fn look(ordinal: u32) -> Result<Self, Failure> {
        Ok(Self { context: Context::open(ordinal).map_err(Failure::call)? })
    }

    /// `NVIDIA H200, driver for CUDA 13.0`
    #[must_use]
    pub fn name(&self) -> String {
        let found = self.context.properties();
        let (major, minor) = found.driver;
        format!("{}, driver for CUDA {major}.{minor}", found.name)
    }

    /// Bytes of its memory that are free, and all.
    ///
    /// # Errors
    /// [`Failure::Device`] when the driver does not say.
    pub fn memory(&self) -> Result<(u64, u64), Failure> {
        self.context.memory().map_err(|refused| Failure::Device(refused.to_string()))
    }
}

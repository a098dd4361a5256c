//! A CUDA device and its context, before a shard takes memory from it.

use std::sync::Arc;

use pserver_core::error::Failure;

use super::safe::CudaContext;

/// A device and its retained context. While a `CudaDevice` exists, opening the device again reuses the context.
pub struct CudaDevice {
    context: Arc<CudaContext>,
}

impl CudaDevice {
    /// Looks for the device with this ordinal.
    ///
    /// # Errors
    /// [`Failure::Call`] names what is missing: the driver, a device, this device.
    pub fn look(ordinal: u32) -> Result<Self, Failure> {
        Ok(Self { context: CudaContext::open(ordinal).map_err(Failure::call)? })
    }

    /// `NVIDIA H200, driver for CUDA 13.0`
    #[must_use]
    pub fn name(&self) -> String {
        let found = self.context.properties();
        let (major, minor) = found.driver;
        format!("{}, driver for CUDA {major}.{minor}", found.name)
    }

    /// Free and total bytes of the device's memory.
    ///
    /// # Errors
    /// [`Failure::Device`] when the driver refuses the query.
    pub fn memory(&self) -> Result<(u64, u64), Failure> {
        self.context.memory().map_err(|refused| Failure::Device(refused.to_string()))
    }
}

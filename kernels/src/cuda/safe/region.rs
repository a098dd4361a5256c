//! A range of another library's device memory, and the context in which the driver reaches it.

use std::ptr;

use crate::cuda::checked::{DriverError, called};
use crate::cuda::sys::{CUcontext, CUdevice, CUdeviceptr, Driver};

/// A range of device memory, and its context.
pub(super) struct DeviceRegion {
    pub(super) driver: Driver,
    pub(super) context: CUcontext,
    /// The device whose primary context was retained for this, when the memory has no context of its own.
    retained: Option<CUdevice>,
    pub(super) ordinal: i32,
    pub(super) address: CUdeviceptr,
    pub(super) bytes: usize,
}

/// The allocation that contains a device address.
pub(super) struct DeviceAllocation {
    pub(super) context: CUcontext,
    pub(super) ordinal: i32,
    pub(super) end: CUdeviceptr,
}

/// Pushes a context on this thread's stack, and pops it when dropped.
pub(super) struct ContextGuard<'a>(&'a Driver);

impl DeviceRegion {
    pub(super) fn new(
        driver: Driver,
        found: &DeviceAllocation,
        address: CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, DriverError> {
        let mut new = Self { driver, context: found.context, retained: None, ordinal: found.ordinal, address, bytes };
        if new.context.is_null() {
            let mut device = 0;
            // SAFETY: `device` is there to be written.
            let code = unsafe { (new.driver.cuDeviceGet)(&raw mut device, found.ordinal) };
            called(&new.driver, "cuDeviceGet", code)?;
            // SAFETY: the context is there to be written, and the device is one that `cuDeviceGet` gave.
            let code = unsafe { (new.driver.cuDevicePrimaryCtxRetain)(&raw mut new.context, device) };
            called(&new.driver, "cuDevicePrimaryCtxRetain", code)?;
            new.retained = Some(device);
        }
        Ok(new)
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.address < other.address + other.bytes as u64 && other.address < self.address + self.bytes as u64
    }

    pub(super) fn enter(&self) -> Result<ContextGuard<'_>, DriverError> {
        // SAFETY: the context is the memory's own, which its owner keeps, or was retained by `new`.
        let code = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.context) };
        called(&self.driver, "cuCtxPushCurrent", code)?;
        Ok(ContextGuard(&self.driver))
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            // SAFETY: `new` retained it once, and this gives it back.
            let code = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(device) };
            warn(called(&self.driver, "cuDevicePrimaryCtxRelease", code));
        }
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: `context` is there to be written; what is popped was pushed when this was made.
        let code = unsafe { (self.0.cuCtxPopCurrent_v2)(&raw mut context) };
        warn(called(self.0, "cuCtxPopCurrent", code));
    }
}

/// Logs an error in a destructor.
pub(super) fn warn(outcome: Result<(), DriverError>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "an object of the CUDA driver was not released");
    }
}

//! Results of driver calls as `Result`s that name the call and the error.

use std::ffi::CStr;
use std::fmt;
use std::ptr;

use super::sys::{self, CUDA_SUCCESS, Driver, ResultCode};

/// An error of a driver call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverError {
    /// The call.
    pub(super) call: &'static str,
    /// The returned code.
    pub(super) code: ResultCode,
    /// The driver's name for the code.
    pub(super) name: String,
}

impl DriverError {
    /// Whether the error concerns this call alone: the request cannot be met, and the device works. All other errors
    /// make the context unusable: an illegal address, a failed launch, an uncorrectable memory error.
    pub(super) fn is_of_the_call(&self) -> bool {
        sys::ERRORS_OF_CALLS.contains(&self.code)
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {} ({})", self.call, self.name, self.code)
    }
}

/// Converts a returned code.
pub(super) fn called(driver: &Driver, call: &'static str, code: ResultCode) -> Result<(), DriverError> {
    if code == CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: `text` is there to be written; the function takes every number.
    let known = unsafe { (driver.cuGetErrorName)(code, &raw mut text) } == CUDA_SUCCESS && !text.is_null();
    let name = if known {
        // SAFETY: the driver says that the name is known, and its names are texts that are always there.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "an error that the driver has no name for".to_owned()
    };
    Err(DriverError { call, code, name })
}

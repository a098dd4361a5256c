//! What the driver's functions return, as `Result`s that name the call and what it said.

use std::ffi::CStr;
use std::fmt;
use std::ptr;

use super::sys::{self, CUDA_SUCCESS, Code, Driver};

/// A call that the driver refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// Which one.
    pub(super) call: &'static str,
    /// What it returned.
    pub(super) code: Code,
    /// The driver's name for that.
    pub(super) name: String,
}

impl Refused {
    /// Whether it is about this call alone: what was asked for cannot be had, and the device is well. All else is of
    /// the device, and stays: an illegal address, a launch that failed, memory that lost its bits.
    pub(super) fn is_of_the_call(&self) -> bool {
        sys::ERRORS_OF_CALLS.contains(&self.code)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {} ({})", self.call, self.name, self.code)
    }
}

/// A call's result: nothing, or what was refused.
pub(super) fn called(driver: &Driver, call: &'static str, code: Code) -> Result<(), Refused> {
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
    Err(Refused { call, code, name })
}

//! The driver's objects, each owned by one value; every call a `Result` that names the call and what it said.
//!
//! All unsafe code of the driver side is here and in `sys`. What makes it sound: an object knows its [`Context`] and
//! keeps it; a handle is destroyed once, by the value that owns it; memory of the host that a stream reads or writes
//! is owned by [`Lanes`] until an event has said that the stream is done with it, and is given up for good when that
//! cannot be learned any more.

mod compiler;
mod context;
mod lanes;
mod memory;
mod module;

use std::ffi::CStr;
use std::fmt;
use std::ptr;

pub(super) use compiler::Compiler;
pub(super) use context::{Context, Properties};
pub(super) use lanes::{Event, Lane, Lanes, Ticket};
pub(super) use memory::{Memory, Part, Piece, Pinned, Registered};
pub(super) use module::{Entry, Grid, Module};

use super::sys::{self, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Code, Driver};

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
    /// Whether it is about this call alone: what was asked for cannot be had, and the device is well. All else is of the
    /// device, and stays: an illegal address, a launch that failed, memory that lost its bits.
    pub(super) fn is_of_the_call(&self) -> bool {
        sys::ERRORS_OF_CALLS.contains(&self.code)
    }

    /// Whether there was not enough memory.
    pub(super) fn is_memory(&self) -> bool {
        self.code == CUDA_ERROR_OUT_OF_MEMORY
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {} ({})", self.call, self.name, self.code)
    }
}

/// A call's result: nothing, or what was refused.
fn called(driver: &Driver, call: &'static str, code: Code) -> Result<(), Refused> {
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

//! The library's buffers as objects with the buffer protocol.

use std::ffi::c_int;
use std::sync::{Arc, Weak};

use pserver_core::error::Failure;
use pserver_core::memory::Buffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::session::PythonSession;

/// A buffer of the library as bytes. Over shared memory servers read it in place.
#[pyclass(frozen, name = "Buffer", module = "pserver._pserver")]
pub(crate) struct RawBuffer {
    buffer: Option<Buffer>,
    bytes: usize,
    /// Does not keep the client alive: a closed client has used the buffer for the last time.
    session: Weak<PythonSession>,
}

impl RawBuffer {
    pub(crate) fn new(session: &Arc<PythonSession>, bytes: usize) -> Result<Self, Failure> {
        let buffer = Some(session.client().buffer(bytes)?);
        Ok(Self { buffer, bytes, session: Arc::downgrade(session) })
    }
}

#[pymethods]
impl RawBuffer {
    fn __len__(&self) -> usize {
        self.bytes
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let bytes = isize::try_from(this.bytes).map_err(|_| PyBufferError::new_err("a buffer beyond memory"))?;
        let start = this.buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::start);
        // SAFETY: the view is the interpreter's for this call; it holds this object, which holds the buffer.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), bytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl Drop for RawBuffer {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        let Some(session) = self.session.upgrade().filter(|session| !session.is_of_parent()) else { return };
        if let Err((used, _)) = session.client().free(buffer) {
            // A call holds the object whose memory it uses, so nothing else is left to give it back.
            std::mem::forget(used);
        }
    }
}

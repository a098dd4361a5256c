//! Memory of the library as objects with the buffer protocol and DLPack: buffers, values that are viewed, and contents
//! of a type that the buffer protocol lacks.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use pserver_client::View;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::memory::Buffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::dlpack::{self, DEVICE_HOST, DlDevice, DlTensor, DlType};

/// Elements in memory of the library. The memory stays while this object, or an array over it, does.
#[pyclass(frozen, name = "Tensor", module = "pserver._pserver")]
pub(crate) struct LibraryTensor {
    memory: Option<TensorMemory>,
    start: *mut u8,
    bytes: usize,
    /// None for bytes.
    element_type: Option<ElementType>,
    shape: Vec<i64>,
    process: u32,
}

// SAFETY: the memory is this object's, which holds it, and may be reached from every thread.
unsafe impl Send for LibraryTensor {}
// SAFETY: as above; shared references only read the fields.
unsafe impl Sync for LibraryTensor {}

/// Gives a buffer back to its client.
pub(crate) type ReturnBuffer = Box<dyn FnOnce(Buffer) + Send + Sync>;

/// The owner of a tensor's memory.
enum TensorMemory {
    /// A buffer that servers of this machine read in place.
    Buffer(Buffer, ReturnBuffer),
    /// A view, of which this is a piece; the last piece releases it.
    View(#[expect(dead_code, reason = "it is held, and dropped with the tensor")] Arc<View>),
    Bytes(#[expect(dead_code, reason = "it is held, and dropped with the tensor")] Vec<u8>),
}

impl LibraryTensor {
    /// Bytes of so many elements, or without a type of so many bytes.
    pub(crate) fn bytes_of(element_type: Option<ElementType>, shape: &[i64]) -> Result<usize, Failure> {
        let element_bytes = element_type.map_or(1, ElementType::bytes);
        let bytes = shape.iter().try_fold(element_bytes, |all, size| all.checked_mul(u64::try_from(*size).ok()?));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        bytes.ok_or_else(|| Failure::call(format!("a buffer of shape {shape:?}, which is beyond memory")))
    }

    /// A buffer of [`bytes_of`](Self::bytes_of) or more, its contents unspecified.
    pub(crate) fn buffer(
        buffer: Buffer,
        bytes: usize,
        element_type: Option<ElementType>,
        shape: Vec<i64>,
        give_back: ReturnBuffer,
    ) -> Self {
        let start = buffer.start();
        Self::new(TensorMemory::Buffer(buffer, give_back), (start, bytes), element_type, shape)
    }

    /// Contents that a call returned.
    pub(crate) fn contents(mut content: Vec<u8>, element_type: ElementType, shape: Vec<i64>) -> Self {
        let place = (content.as_mut_ptr(), content.len());
        Self::new(TensorMemory::Bytes(content), place, Some(element_type), shape)
    }

    /// The pieces of a parameter in a view; a single one has the parameter's shape.
    pub(crate) fn pieces(view: &Arc<View>, at: usize, element_type: ElementType, shape: &[u64]) -> Vec<Self> {
        let is_whole = view.pieces(at).len() == 1;
        let pieces = view.pieces(at).map(|piece| {
            let elements = piece.len() as u64 / element_type.bytes();
            let shape = if is_whole { shape.iter().map(|size| size.cast_signed()).collect() } else { Vec::new() };
            let shape = if shape.is_empty() { vec![elements.cast_signed()] } else { shape };
            let place = (piece.as_ptr().cast_mut(), piece.len());
            Self::new(TensorMemory::View(Arc::clone(view)), place, Some(element_type), shape)
        });
        pieces.collect()
    }

    fn new(
        memory: TensorMemory,
        (start, bytes): (*mut u8, usize),
        element_type: Option<ElementType>,
        shape: Vec<i64>,
    ) -> Self {
        Self { memory: Some(memory), start, bytes, element_type, shape, process: std::process::id() }
    }

    fn is_read_only(&self) -> bool {
        matches!(self.memory, Some(TensorMemory::View(_)))
    }
}

#[pymethods]
impl LibraryTensor {
    fn __len__(&self) -> usize {
        usize::try_from(self.shape.first().copied().unwrap_or(0)).unwrap_or(0)
    }

    /// The type of the elements, such as `bfloat16`.
    #[getter]
    fn dtype(&self) -> String {
        self.element_type.map_or_else(|| "uint8".to_owned(), |element_type| element_type.to_string())
    }

    /// The shape, slowest dimension first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (DEVICE_HOST, 0)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        if stream.is_some() {
            return Err(PyValueError::new_err("a stream for memory of the host; expected None"));
        }
        if dl_device.is_some_and(|(kind, _)| kind != DEVICE_HOST) || copy == Some(true) {
            return Err(PyBufferError::new_err("a copy, or memory of a device; expected memory of the host as it is"));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        if this.is_read_only() && !is_versioned {
            let text = "memory that may only be read needs DLPack 1.0; expected max_version=(1, 0), or a copy of it";
            return Err(PyBufferError::new_err(text));
        }
        let tensor = DlTensor {
            data: this.start.cast::<c_void>(),
            device: DlDevice { kind: DEVICE_HOST, index: 0 },
            dimensions: i32::try_from(this.shape.len()).expect("an array has few dimensions"),
            element: this.element_type.map_or(DlType { code: 1, bits: 8, lanes: 1 }, DlType::of),
            shape: std::ptr::null(),
            strides: std::ptr::null(),
            offset: 0,
        };
        let owner = slf.clone().unbind().into_any();
        dlpack::export(slf.py(), (tensor, this.is_read_only()), &this.shape, owner, is_versioned)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let bytes = isize::try_from(this.bytes).map_err(|_| PyBufferError::new_err("a buffer beyond memory"))?;
        let (start, is_read_only) = (this.start.cast(), c_int::from(this.is_read_only()));
        // SAFETY: the view is the interpreter's for this call; it holds this object, which holds the memory.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, is_read_only, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl Drop for LibraryTensor {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if std::process::id() != self.process {
            // The memory is the parent's: a forked process gives nothing back.
            std::mem::forget(memory);
            return;
        }
        if let TensorMemory::Buffer(buffer, give_back) = memory {
            give_back(buffer);
        }
    }
}

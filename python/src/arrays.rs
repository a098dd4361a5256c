//! Memory of Python objects: arrays by the buffer protocol and by DLPack.
//!
//! The package holds an object while a call uses its memory. Another thread of the program may change the contents
//! meanwhile, as with every library that lets other threads run; the lengths cannot change while the memory is held.

use std::ffi::CStr;
use std::ptr::NonNull;
use std::slice;

use pserver_core::dtype::ElementType;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{IntoPyDict, PyTuple};

use crate::dlpack::{DEVICE_HOST, DEVICE_PINNED, DlTensor, DlType, FLAG_READ_ONLY, HeldTensor, exported, tensor_of};
use crate::errors::refused;
use crate::tensors::LibraryTensor;

/// The use of an array by a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Contiguous memory of a Python object, held until this is dropped.
pub(crate) struct HeldArray {
    start: *mut u8,
    bytes: usize,
    element_type: ElementType,
    shape: Vec<u64>,
    #[expect(dead_code, reason = "it is held, and dropped with the array")]
    keeper: Keeper,
}

// SAFETY: the memory is the object's, which the keeper holds, and may be reached from every thread; the keeper itself
// is used only when it is dropped, with the interpreter attached.
unsafe impl Send for HeldArray {}
// SAFETY: as above; shared references only read the fields.
unsafe impl Sync for HeldArray {}

/// The name of a parameter in errors.
pub(crate) fn parameter(name: &str) -> String {
    format!("parameter \"{name}\"")
}

/// The arrays of a call, one for each name.
pub(crate) fn arrays(
    py: Python<'_>,
    names: &[PyBackedStr],
    objects: &[Bound<'_, PyAny>],
    access: Access,
) -> PyResult<Vec<HeldArray>> {
    if names.len() != objects.len() {
        let (found, expected) = (objects.len(), names.len());
        return Err(refused(py, format!("{found} arrays for {expected} parameters; expected one for each")));
    }
    names.iter().zip(objects).map(|(name, object)| HeldArray::of(object, &parameter(name), access)).collect()
}

/// Keeps the memory of an array alive.
enum Keeper {
    Buffer(#[expect(dead_code, reason = "it is held, and dropped with the array")] HeldBuffer),
    Capsule(#[expect(dead_code, reason = "it is held, and dropped with the array")] Py<PyAny>),
    Tensor(#[expect(dead_code, reason = "it is held, and dropped with the array")] HeldTensor),
}

/// A buffer that an object has exported. Its address stays, because exporters may point into it.
struct HeldBuffer(Box<ffi::Py_buffer>);

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        // Without an interpreter the process ends, and the memory with it.
        let release = |_: Python<'_>| {
            // SAFETY: the buffer was filled by `PyObject_GetBuffer` and is released once, here.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        };
        let _ = Python::try_attach(release);
    }
}

impl HeldArray {
    /// The memory of an object, for the parameter or argument `what`.
    pub(crate) fn of(object: &Bound<'_, PyAny>, what: &str, access: Access) -> PyResult<Self> {
        if object.is_instance_of::<LibraryTensor>() {
            // Its buffer is bytes, without the type.
            return Self::of_dlpack(object, what, access);
        }
        // SAFETY: the object is alive.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            return Self::of_buffer(object, what, access);
        }
        if object.hasattr(intern!(object.py(), "__dlpack__"))? {
            return Self::of_dlpack(object, what, access);
        }
        let found = object.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "{what}: found {found}; expected an array of numpy, a tensor of torch, or another object with the buffer \
             protocol or __dlpack__"
        )))
    }

    pub(crate) fn element_type(&self) -> ElementType {
        self.element_type
    }

    pub(crate) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The contents, to be read.
    pub(crate) fn contents(&self) -> &[u8] {
        // SAFETY: the keeper holds the memory, whose length was checked when it was exported.
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The contents, to be written.
    pub(crate) fn contents_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `of` with `Access::Write` has refused memory that may not be written.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// The contents for a started call, which holds this array until it is over.
    pub(crate) fn lasting(&self) -> &'static [u8] {
        // SAFETY: the session keeps the array until the call is over and its memory returned (`session`).
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The contents for a started call that writes them.
    pub(crate) fn lasting_mut(&mut self) -> &'static mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    fn of_buffer(object: &Bound<'_, PyAny>, what: &str, access: Access) -> PyResult<Self> {
        let py = object.py();
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the view is empty memory of the right type, and the object is alive.
        let got = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, ffi::PyBUF_RECORDS_RO) };
        if got != 0 {
            return Err(refused(py, format!("{what}: {}", PyErr::fetch(py))));
        }
        let held = HeldBuffer(view);
        let view = &held.0;
        let format = if view.format.is_null() {
            "B"
        } else {
            // SAFETY: the exporter gives a text with an end, which lives as long as the view.
            unsafe { CStr::from_ptr(view.format) }.to_str().unwrap_or("?")
        };
        let item_bytes = usize::try_from(view.itemsize).unwrap_or(0);
        let Some(element_type) = type_of_format(format, item_bytes) else {
            return Err(refused(py, unknown_type(what, &format!("elements of format {format:?}"))));
        };
        let dimensions = usize::try_from(view.ndim).unwrap_or(0);
        let shape = match dimensions {
            0 => Vec::new(),
            // SAFETY: `PyBUF_RECORDS_RO` asks for a shape, which has `ndim` entries.
            _ => sizes(unsafe { slice::from_raw_parts(view.shape, dimensions) }),
        };
        // SAFETY: the view is a whole one.
        let is_contiguous = unsafe { ffi::PyBuffer_IsContiguous(&raw const **view, b'C'.cast_signed()) } == 1;
        check_layout(py, what, is_contiguous, access == Access::Write && view.readonly != 0)?;
        let (start, bytes) = (view.buf.cast::<u8>(), usize::try_from(view.len).unwrap_or(0));
        Ok(Self::new(start, bytes, element_type, shape, Keeper::Buffer(held)))
    }

    fn of_dlpack(object: &Bound<'_, PyAny>, what: &str, access: Access) -> PyResult<Self> {
        let py = object.py();
        if let Some(exported) = exported(object, what)? {
            // SAFETY: the exporter has filled the tensor, which is held.
            let found = unsafe { exported.0.as_ref() };
            let (tensor, flags) = (found.tensor, found.flags);
            return Self::of_tensor(py, what, access, (tensor, flags), Keeper::Tensor(exported));
        }
        let versions = [("max_version", PyTuple::new(py, [1, 0])?)].into_py_dict(py)?;
        let capsule = match object.call_method("__dlpack__", (), Some(&versions)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
            other => other,
        };
        let capsule = capsule.map_err(|error| refused(py, format!("{what}: {}", error.value(py))))?;
        let tensor = tensor_of(&capsule)?;
        Self::of_tensor(py, what, access, tensor, Keeper::Capsule(capsule.unbind()))
    }

    /// The memory of a tensor with these flags.
    fn of_tensor(
        py: Python<'_>,
        what: &str,
        access: Access,
        (tensor, flags): (DlTensor, u64),
        keeper: Keeper,
    ) -> PyResult<Self> {
        if tensor.device.kind != DEVICE_HOST && tensor.device.kind != DEVICE_PINNED {
            let kind = tensor.device.kind;
            return Err(refused(
                py,
                format!("{what}: memory of a device (DLPack's kind {kind}); expected memory of the host: .cpu()"),
            ));
        }
        let Some(element_type) = tensor.element.element_type() else {
            let DlType { code, bits, lanes } = tensor.element;
            return Err(refused(
                py,
                unknown_type(what, &format!("elements of code {code}, {bits} bits, {lanes} lanes")),
            ));
        };
        let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
        let shape = match dimensions {
            0 => Vec::new(),
            // SAFETY: a tensor has `ndim` sizes, which live as long as the capsule.
            _ => sizes(unsafe { slice::from_raw_parts(tensor.shape, dimensions) }),
        };
        let is_contiguous = tensor.strides.is_null() || dimensions == 0 || {
            // SAFETY: strides that are not NULL are as many as sizes.
            let strides = unsafe { slice::from_raw_parts(tensor.strides, dimensions) };
            are_contiguous(&shape, strides)
        };
        check_layout(py, what, is_contiguous, access == Access::Write && flags & FLAG_READ_ONLY != 0)?;
        let elements = shape.iter().try_fold(1u64, |all, one| all.checked_mul(*one));
        let bytes = elements.and_then(|elements| elements.checked_mul(element_type.bytes()));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| refused(py, format!("{what}: a shape beyond memory")))?;
        let offset = usize::try_from(tensor.offset).unwrap_or(0);
        if tensor.data.is_null() && bytes > 0 {
            return Err(refused(py, format!("{what}: a tensor without memory; expected one that has values")));
        }
        let start = tensor.data.cast::<u8>().wrapping_add(offset);
        Ok(Self::new(start, bytes, element_type, shape, keeper))
    }

    fn new(start: *mut u8, bytes: usize, element_type: ElementType, shape: Vec<u64>, keeper: Keeper) -> Self {
        // A slice has an address, aligned for every type, even where it has no bytes.
        let start = if bytes == 0 { NonNull::<u64>::dangling().as_ptr().cast() } else { start };
        Self { start, bytes, element_type, shape, keeper }
    }
}

fn check_layout(py: Python<'_>, what: &str, is_contiguous: bool, is_read_only: bool) -> PyResult<()> {
    if !is_contiguous {
        let text = "elements that do not follow one another; expected a contiguous array: numpy.ascontiguousarray(a), \
                    tensor.contiguous()";
        return Err(refused(py, format!("{what}: {text}")));
    }
    if is_read_only {
        return Err(refused(py, format!("{what}: memory that may only be read; expected one to write the value to")));
    }
    Ok(())
}

fn unknown_type(what: &str, found: &str) -> String {
    format!("{what}: {found}; expected int32, uint32, int64, uint64, float16, bfloat16, float32 or float64")
}

fn sizes<T: Copy>(all: &[T]) -> Vec<u64>
where
    u64: TryFrom<T>,
{
    all.iter().map(|one| u64::try_from(*one).unwrap_or(0)).collect()
}

/// Whether elements lie in the order of the indices, without gaps. A dimension of one may have any stride.
fn are_contiguous(shape: &[u64], strides: &[i64]) -> bool {
    let mut expected = 1u64;
    shape.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *size <= 1 || u64::try_from(*stride) == Ok(expected);
        expected = expected.saturating_mul(*size);
        fits
    }) || shape.contains(&0)
}

fn type_of_format(format: &str, bytes: usize) -> Option<ElementType> {
    let foreign = if cfg!(target_endian = "little") { '>' } else { '<' };
    let letter = format.trim_start_matches(|prefix| "@=<>!".contains(prefix) && prefix != foreign && prefix != '!');
    match (letter, bytes) {
        ("e", 2) => Some(ElementType::Float16),
        ("f", 4) => Some(ElementType::Float32),
        ("d", 8) => Some(ElementType::Float64),
        ("i" | "l", 4) => Some(ElementType::Int32),
        ("I" | "L", 4) => Some(ElementType::Uint32),
        ("l" | "q" | "n", 8) => Some(ElementType::Int64),
        ("L" | "Q" | "N", 8) => Some(ElementType::Uint64),
        _ => None,
    }
}

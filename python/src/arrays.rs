//! Memory of Python objects: arrays by the buffer protocol and by DLPack.
//!
//! The package holds an object while a call uses its memory. Another thread of the program may change the contents
//! meanwhile, as with every library that lets other threads run; the lengths cannot change while the memory is held.

use std::ffi::CStr;
use std::fmt::{self, Display};
use std::ptr::NonNull;
use std::slice;

use pserver_client::Client;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_kernels::cuda::{ForeignClaim, ForeignStream};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{IntoPyDict, PyTuple};

use crate::dlpack::{
    DEFAULT_STREAM, DEVICE_CUDA, DEVICE_HOST, DEVICE_PINNED, DlTensor, DlType, FLAG_READ_ONLY, HeldTensor,
    TensorLibrary, tensor_of,
};
use crate::errors::refused;
use crate::tensors::LibraryTensor;

/// The use of an array by a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// To read, also a tensor that autograd follows.
    Look,
    /// To write, also a tensor that autograd follows.
    Replace,
    /// To read, also on a device, in the order of this stream if there is one.
    Send(GivenStream),
    /// To write, as well.
    Fetch(GivenStream),
}

/// The CUDA stream that a program has given for arrays of a device.
pub(crate) type GivenStream = Option<usize>;

impl Access {
    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Replace | Self::Fetch(_))
    }

    /// Whether memory of a device will do, and the stream for it.
    fn stream(self) -> Option<GivenStream> {
        match self {
            Self::Send(stream) | Self::Fetch(stream) => Some(stream),
            Self::Read | Self::Write | Self::Look | Self::Replace => None,
        }
    }
}

/// The use of a device's memory by a call.
#[derive(Clone, Copy)]
pub(crate) enum Staging {
    /// It sends a gradient: the sum of the memory and of its replicas.
    Gradient,
    /// It sends a value.
    Value,
    /// It fetches a value, which [`HeldArray::store`] writes to the device.
    Destination,
}

/// Contiguous memory of a Python object, held until this is dropped.
pub(crate) struct HeldArray {
    start: *mut u8,
    bytes: usize,
    element_type: ElementType,
    shape: Vec<u64>,
    /// Address and bytes of memory of a device. Its contents are in `claim`, once it is staged.
    device: Option<(usize, usize)>,
    /// The stream in whose order that memory is read and written; none for the one it was registered with.
    stream: Option<ForeignStream>,
    claim: Option<ForeignClaim>,
    #[expect(dead_code, reason = "it is held, and dropped with the array")]
    keeper: Keeper,
}

// SAFETY: the memory is the object's, which the keeper holds, and may be reached from every thread; the keeper itself
// is used only when it is dropped, with the interpreter attached.
unsafe impl Send for HeldArray {}
// SAFETY: as above; shared references only read the fields.
unsafe impl Sync for HeldArray {}

/// The name of a parameter in errors.
pub(crate) struct ParameterName<'a>(pub(crate) &'a str);

impl Display for ParameterName<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "parameter \"{}\"", self.0)
    }
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
    let mut library = TensorLibrary::default();
    let held =
        |(name, object): (&PyBackedStr, _)| HeldArray::within(&mut library, object, &ParameterName(name), access);
    names.iter().zip(objects).map(held).collect()
}

/// The memory of tensors, if all are contiguous ones of the host, also those that autograd follows; `None` otherwise.
/// Of gradients also if the memory of one is not what is to be sent: autograd follows it, or it has the negated values.
pub(crate) fn plain_tensors(objects: &[Bound<'_, PyAny>], are_gradients: bool) -> PyResult<Option<Vec<HeldArray>>> {
    let mut library = TensorLibrary::default();
    let mut held = Vec::with_capacity(objects.len());
    for object in objects {
        let Some(exported) = library.export_plain(object, are_gradients)? else { return Ok(None) };
        let Some(array) = HeldArray::of_plain(object.py(), exported) else { return Ok(None) };
        held.push(array);
    }
    Ok(Some(held))
}

/// Writes fetched values to the devices of their arrays.
pub(crate) fn store(arrays: &mut [HeldArray]) -> Result<(), Failure> {
    arrays.iter_mut().try_for_each(HeldArray::store)?;
    arrays.iter_mut().try_for_each(HeldArray::settle)
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
    pub(crate) fn of(object: &Bound<'_, PyAny>, what: &dyn Display, access: Access) -> PyResult<Self> {
        Self::within(&mut TensorLibrary::default(), object, what, access)
    }

    /// The same of one of several objects.
    pub(crate) fn within<'py>(
        library: &mut TensorLibrary<'py>,
        object: &Bound<'py, PyAny>,
        what: &dyn Display,
        access: Access,
    ) -> PyResult<Self> {
        if object.is_instance_of::<LibraryTensor>() {
            // Its buffer is bytes, without the type.
            return Self::of_dlpack(library, object, what, access);
        }
        // SAFETY: the object is alive.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            return Self::of_buffer(object, what, access);
        }
        if object.hasattr(intern!(object.py(), "__dlpack__"))? {
            return Self::of_dlpack(library, object, what, access);
        }
        if let Some(interface) = object.getattr_opt(intern!(object.py(), "__cuda_array_interface__"))? {
            return Self::of_cuda(&interface, what, access, object);
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

    fn of_buffer(object: &Bound<'_, PyAny>, what: &dyn Display, access: Access) -> PyResult<Self> {
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
        check_layout(py, what, is_contiguous, access.writes() && view.readonly != 0)?;
        let (start, bytes) = (view.buf.cast::<u8>(), usize::try_from(view.len).unwrap_or(0));
        Ok(Self::new(start, bytes, element_type, shape, Keeper::Buffer(held)))
    }

    fn of_dlpack<'py>(
        library: &mut TensorLibrary<'py>,
        object: &Bound<'py, PyAny>,
        what: &dyn Display,
        access: Access,
    ) -> PyResult<Self> {
        let py = object.py();
        if let Some(exported) = library.export(object, what, matches!(access, Access::Look | Access::Replace))? {
            // SAFETY: the exporter has filled the tensor, which is held.
            let found = unsafe { exported.0.as_ref() };
            let (tensor, flags) = (found.tensor, found.flags);
            if tensor.device.kind != DEVICE_CUDA {
                return Self::of_tensor(py, what, access, (tensor, flags), Keeper::Tensor(exported));
            }
            // These functions do not wait for the stream that computes the tensor.
        }
        let versions = [("max_version", PyTuple::new(py, [1, 0])?)].into_py_dict(py)?;
        let device = object.call_method0(intern!(py, "__dlpack_device__")).and_then(|device| device.extract());
        // An object without a device gets its error from `__dlpack__`.
        if device.is_ok_and(|(kind, _): (i32, i32)| kind == DEVICE_CUDA) {
            // The library that computes the array has this stream wait for what does.
            let stream = access.stream().flatten().filter(|stream| 0 < *stream);
            versions.set_item("stream", stream.unwrap_or(DEFAULT_STREAM))?;
        }
        let mut capsule = object.call_method("__dlpack__", (), Some(&versions));
        if capsule.as_ref().is_err_and(|error| error.is_instance_of::<PyTypeError>(py)) {
            // Objects before DLPack 1 know no versions.
            versions.del_item("max_version")?;
            capsule = object.call_method("__dlpack__", (), Some(&versions));
        }
        let capsule = capsule.map_err(|error| refused(py, format!("{what}: {}", error.value(py))))?;
        let tensor = tensor_of(&capsule)?;
        Self::of_tensor(py, what, access, tensor, Keeper::Capsule(capsule.unbind()))
    }

    /// The memory of a tensor with these flags.
    fn of_tensor(
        py: Python<'_>,
        what: &dyn Display,
        access: Access,
        (tensor, flags): (DlTensor, u64),
        keeper: Keeper,
    ) -> PyResult<Self> {
        let kind = tensor.device.kind;
        let stream = access.stream().filter(|_| kind == DEVICE_CUDA);
        if stream.is_none() && kind != DEVICE_HOST && kind != DEVICE_PINNED {
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
        let (shape, is_contiguous) = shape_of(&tensor);
        check_layout(py, what, is_contiguous, access.writes() && flags & FLAG_READ_ONLY != 0)?;
        let bytes = bytes_of(py, what, element_type, &shape)?;
        let offset = usize::try_from(tensor.offset).unwrap_or(0);
        if tensor.data.is_null() && bytes > 0 {
            return Err(refused(py, format!("{what}: a tensor without memory; expected one that has values")));
        }
        let start = tensor.data.cast::<u8>().wrapping_add(offset);
        if let Some(stream) = stream {
            let held = Self::new(std::ptr::null_mut(), 0, element_type, shape, keeper);
            return Ok(held.on_device(start.addr(), bytes, stream));
        }
        Ok(Self::new(start, bytes, element_type, shape, keeper))
    }

    /// The memory of a tensor that has some, of the host, contiguous, and such that it may be written.
    fn of_plain(py: Python<'_>, exported: HeldTensor) -> Option<Self> {
        // SAFETY: the exporter has filled the tensor, which is held.
        let found = unsafe { exported.0.as_ref() };
        let (tensor, flags) = (found.tensor, found.flags);
        if tensor.data.is_null() {
            return None;
        }
        Self::of_tensor(py, &"a tensor", Access::Replace, (tensor, flags), Keeper::Tensor(exported)).ok()
    }

    /// Memory of a CUDA device by its address, as `__cuda_array_interface__` says it.
    fn of_cuda(
        interface: &Bound<'_, PyAny>,
        what: &dyn Display,
        access: Access,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let py = object.py();
        let Some(given) = access.stream() else {
            return Err(refused(py, format!("{what}: memory of a CUDA device; expected memory of the host")));
        };
        let (address, is_read_only): (usize, bool) = interface.get_item("data")?.extract()?;
        let shape: Vec<u64> = interface.get_item("shape")?.extract()?;
        let format: String = interface.get_item("typestr")?.extract()?;
        let letters = format.trim_start_matches(['<', '|']);
        let element_type = ElementType::ALL.into_iter().find(|one| {
            let letter = match one {
                ElementType::Int32 | ElementType::Int64 => "i",
                ElementType::Uint32 | ElementType::Uint64 => "u",
                ElementType::Bfloat16 => return false,
                _ => "f",
            };
            letters == format!("{letter}{}", one.bytes())
        });
        let unknown = || refused(py, unknown_type(what, &format!("elements of {format:?}")));
        let element_type = element_type.ok_or_else(unknown)?;
        let entry = |name: &str| interface.call_method1("get", (name,));
        let own = entry("stream")?.extract::<GivenStream>()?;
        let default_as_zero = |stream| if stream == DEFAULT_STREAM { 0 } else { stream };
        if let (Some(given), Some(own)) = (given, own)
            && default_as_zero(given) != default_as_zero(own)
        {
            let text = format!("memory of stream {own:#x} for a call in stream {given:#x}; expected its own, or none");
            return Err(refused(py, format!("{what}: {text}")));
        }
        let stream = given.or(own);
        check_layout(py, what, entry("strides")?.is_none(), access.writes() && is_read_only)?;
        let bytes = bytes_of(py, what, element_type, &shape)?;
        let keeper = Keeper::Capsule(object.clone().unbind());
        let held = Self::new(std::ptr::null_mut(), 0, element_type, shape, keeper);
        Ok(held.on_device(address, bytes, stream))
    }

    fn on_device(mut self, address: usize, bytes: usize, stream: GivenStream) -> Self {
        self.device = Some((address, bytes)).filter(|(_, bytes)| 0 < *bytes);
        // SAFETY: the package keeps the object of a stream as long as calls in it, and a program that gives a number
        // keeps the stream; the protocols say the same of an array's.
        self.stream = stream.map(|stream| unsafe { ForeignStream::of(stream) });
        self
    }

    /// The stream that the program has given.
    pub(crate) fn stream(&self) -> Option<ForeignStream> {
        self.stream
    }

    /// The address and the bytes of the memory, and whether it is of a device.
    pub(crate) fn place(&self) -> (usize, usize, bool) {
        self.device.map_or((self.start.addr(), self.bytes, false), |(address, bytes)| (address, bytes, true))
    }

    /// Gives memory of a device pages of the host for one call, and begins to copy the contents to send: they are there
    /// after [`HeldArray::settle`]. Other memory stays.
    pub(crate) fn stage(&mut self, client: &Client, what: &dyn Display, staging: Staging) -> Result<(), Failure> {
        let Some((address, bytes)) = self.device else { return Ok(()) };
        let mut claim = client.claim(address, bytes)?.ok_or_else(|| {
            Failure::call(format!(
                "{what}: memory of a device that is not registered; expected client.register(array) before, or memory \
                 of the host: .cpu()"
            ))
        })?;
        if let Some(stream) = self.stream {
            claim.set_stream(stream);
        }
        claim.check_stream()?;
        match staging {
            Staging::Gradient => claim.begin_fetch_sum(self.element_type)?,
            Staging::Value => claim.begin_fetch()?,
            Staging::Destination => {}
        }
        (self.start, self.bytes) = (claim.start().as_ptr(), bytes);
        self.claim = Some(claim);
        Ok(())
    }

    /// Begins to write a fetched value to its device, which has it after [`HeldArray::settle`].
    pub(crate) fn store(&mut self) -> Result<(), Failure> {
        self.claim.as_mut().map_or(Ok(()), ForeignClaim::begin_store)
    }

    /// Waits for what was begun.
    pub(crate) fn settle(&mut self) -> Result<(), Failure> {
        self.claim.as_mut().map_or(Ok(()), ForeignClaim::settle)
    }

    fn new(start: *mut u8, bytes: usize, element_type: ElementType, shape: Vec<u64>, keeper: Keeper) -> Self {
        // A slice has an address, aligned for every type, even where it has no bytes.
        let start = if bytes == 0 { NonNull::<u64>::dangling().as_ptr().cast() } else { start };
        Self { start, bytes, element_type, shape, device: None, stream: None, claim: None, keeper }
    }
}

/// The sizes of a tensor that a library has filled, and whether its elements lie in the order of the indices.
fn shape_of(tensor: &DlTensor) -> (Vec<u64>, bool) {
    let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
    if dimensions == 0 {
        return (Vec::new(), true);
    }
    // SAFETY: a tensor has `ndim` sizes, which live as long as what exported it.
    let shape = sizes(unsafe { slice::from_raw_parts(tensor.shape, dimensions) });
    let is_contiguous = tensor.strides.is_null() || {
        // SAFETY: strides that are not NULL are as many as sizes.
        let strides = unsafe { slice::from_raw_parts(tensor.strides, dimensions) };
        are_contiguous(&shape, strides)
    };
    (shape, is_contiguous)
}

fn check_layout(py: Python<'_>, what: &dyn Display, is_contiguous: bool, is_read_only: bool) -> PyResult<()> {
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

fn bytes_of(py: Python<'_>, what: &dyn Display, element_type: ElementType, shape: &[u64]) -> PyResult<usize> {
    let bytes = shape.iter().try_fold(element_type.bytes(), |all, one| all.checked_mul(*one));
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| refused(py, format!("{what}: a shape beyond memory")))
}

fn unknown_type(what: &dyn Display, found: &str) -> String {
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

//! DLPack: tensors that other libraries of arrays lend, and tensors that are lent to them.

use std::ffi::{CStr, c_int, c_void};
use std::fmt::Display;
use std::ptr::NonNull;

use pserver_core::dtype::ElementType;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::errors::refused;

/// Kinds of devices whose memory the processor reads.
pub(crate) const DEVICE_HOST: i32 = 1;
pub(crate) const DEVICE_PINNED: i32 = 3;
/// Memory of a CUDA device.
pub(crate) const DEVICE_CUDA: i32 = 2;
/// The number of CUDA's legacy default stream, after whose work the library reads.
pub(crate) const DEFAULT_STREAM: usize = 1;
/// Names of capsules of both forms.
const VERSIONED: &CStr = c"dltensor_versioned";
const MANAGED: &CStr = c"dltensor";
/// The bit in a capsule's flags that forbids writing.
pub(crate) const FLAG_READ_ONLY: u64 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlDevice {
    pub(crate) kind: i32,
    pub(crate) index: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct DlType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor` of DLPack.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) dimensions: i32,
    pub(crate) element: DlType,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) offset: u64,
}

/// `DLManagedTensorVersioned` of DLPack 1; the older `DLManagedTensor` begins with its tensor.
#[repr(C)]
pub(crate) struct DlVersioned {
    pub(crate) version: [u32; 2],
    pub(crate) context: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DlVersioned)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DlTensor,
}

/// The beginning of `DLPackExchangeAPI` of DLPack 1.3: a library's functions, which cost less than `__dlpack__`.
#[repr(C)]
struct DlExchange {
    version: [u32; 2],
    previous: *const c_void,
    allocate: *const c_void,
    export: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut *mut DlVersioned) -> c_int>,
    import: *const c_void,
    look: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut DlTensor) -> c_int>,
}

/// The functions of the library of a call's objects. Objects of one type have the same, which are looked up once.
#[derive(Default)]
pub(crate) struct TensorLibrary<'py> {
    known: Option<(Bound<'py, PyType>, LibraryFunctions)>,
}

/// The functions for objects of a type.
#[derive(Clone, Copy)]
struct LibraryFunctions {
    exchange: Option<&'static DlExchange>,
    /// Whether memory may have negated values, which `is_neg` tells.
    has_negation: bool,
}

impl<'py> TensorLibrary<'py> {
    fn functions(&mut self, object: &Bound<'py, PyAny>) -> PyResult<LibraryFunctions> {
        let kind = object.get_type();
        if let Some((known, functions)) = &self.known
            && known.is(&kind)
        {
            return Ok(*functions);
        }
        let has_negation = kind.hasattr(intern!(kind.py(), "is_neg"))?;
        let functions = LibraryFunctions { exchange: exchange_of(&kind)?, has_negation };
        self.known = Some((kind, functions));
        Ok(functions)
    }

    /// The tensor of an object whose library has functions for this; `None` where `__dlpack__` is the way. It refuses
    /// what autograd follows.
    pub(crate) fn export(
        &mut self,
        object: &Bound<'py, PyAny>,
        what: &dyn Display,
        may_be_followed: bool,
    ) -> PyResult<Option<HeldTensor>> {
        let functions = self.functions(object)?;
        if functions.exchange.is_none() || (!may_be_followed && is_followed(object)?) {
            return Ok(None);
        }
        if functions.is_negated(object)? {
            let text = "a tensor whose memory has the negated values; expected the values: tensor.resolve_neg()";
            return Err(refused(object.py(), format!("{what}: {text}")));
        }
        self.export_directly(object)
    }

    /// The tensor of an object, also one that autograd follows, if its library has functions for this and the memory
    /// has its values, not negated. A gradient that autograd follows is none.
    pub(crate) fn export_plain(
        &mut self,
        object: &Bound<'py, PyAny>,
        is_gradient: bool,
    ) -> PyResult<Option<HeldTensor>> {
        if is_gradient && is_followed(object)? || self.functions(object)?.is_negated(object)? {
            return Ok(None);
        }
        self.export_directly(object)
    }

    fn export_directly(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Option<HeldTensor>> {
        let Some(export) = self.functions(object)?.exchange.and_then(|exchange| exchange.export) else {
            return Ok(None);
        };
        let mut found = std::ptr::null_mut();
        // SAFETY: the object has the type that the functions are for, and `found` takes a pointer.
        if unsafe { export(object.as_ptr(), &raw mut found) } != 0 {
            // `__dlpack__` says more about what cannot be exported.
            drop(PyErr::take(object.py()));
            return Ok(None);
        }
        Ok(NonNull::new(found).map(HeldTensor))
    }
}

impl LibraryFunctions {
    fn is_negated(self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.has_negation && object.call_method0(intern!(object.py(), "is_neg"))?.is_truthy()?)
    }
}

/// The functions of the library of a type, if it has some.
fn exchange_of(kind: &Bound<'_, PyType>) -> PyResult<Option<&'static DlExchange>> {
    let Some(table) = kind.getattr_opt(intern!(kind.py(), "__dlpack_c_exchange_api__"))? else {
        return Ok(None);
    };
    let name = c"dlpack_exchange_api";
    // SAFETY: the object is alive; another kind of object is no valid capsule.
    if unsafe { ffi::PyCapsule_IsValid(table.as_ptr(), name.as_ptr()) } != 1 {
        return Ok(None);
    }
    // SAFETY: the capsule has this name.
    let functions = unsafe { ffi::PyCapsule_GetPointer(table.as_ptr(), name.as_ptr()) };
    // SAFETY: DLPack gives a capsule of this name this content, which lives as long as the process.
    let functions: &'static DlExchange = unsafe { &*functions.cast::<DlExchange>() };
    Ok(Some(functions).filter(|functions| functions.version[0] == 1))
}

/// Whether autograd follows a tensor.
fn is_followed(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    object.getattr_opt(intern!(object.py(), "requires_grad"))?.map_or(Ok(false), |follows| follows.is_truthy())
}

/// The tensor of a capsule, and its flags.
pub(crate) fn tensor_of(capsule: &Bound<'_, PyAny>) -> PyResult<(DlTensor, u64)> {
    let py = capsule.py();
    // SAFETY: the object is alive; another kind of object is no valid capsule.
    if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), VERSIONED.as_ptr()) } == 1 {
        // SAFETY: the capsule has this name.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), VERSIONED.as_ptr()) };
        // SAFETY: DLPack gives a capsule of this name this content. It is not taken over, so it lives with the capsule.
        let found = unsafe { &*pointer.cast::<DlVersioned>() };
        if found.version[0] != 1 {
            return Err(refused(py, format!("DLPack of version {}; expected version 1", found.version[0])));
        }
        return Ok((found.tensor, found.flags));
    }
    // SAFETY: as above.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), MANAGED.as_ptr()) };
    if pointer.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: as above, of the older form.
    Ok((unsafe { *pointer.cast::<DlTensor>() }, 0))
}

impl DlType {
    /// The type of elements.
    pub(crate) fn of(element_type: ElementType) -> Self {
        let (code, bits) = match element_type {
            ElementType::Int32 => (0, 32),
            ElementType::Int64 => (0, 64),
            ElementType::Uint32 => (1, 32),
            ElementType::Uint64 => (1, 64),
            ElementType::Float16 => (2, 16),
            ElementType::Float32 => (2, 32),
            ElementType::Float64 => (2, 64),
            ElementType::Bfloat16 => (4, 16),
        };
        Self { code, bits, lanes: 1 }
    }

    /// The type of the parameters with such elements, if there is one.
    pub(crate) fn element_type(self) -> Option<ElementType> {
        ElementType::ALL.into_iter().find(|one| Self::of(*one) == self)
    }
}

/// A tensor that a library of arrays has exported.
pub(crate) struct HeldTensor(pub(crate) NonNull<DlVersioned>);

impl Drop for HeldTensor {
    fn drop(&mut self) {
        let release = |_: Python<'_>| {
            // SAFETY: the exporter gave the tensor to this owner, which has not released it.
            let deleter = unsafe { self.0.as_ref() }.deleter;
            if let Some(deleter) = deleter {
                // SAFETY: as above; it is released once, here.
                unsafe { deleter(self.0.as_ptr()) }
            }
        };
        // Without an interpreter the process ends, and the memory with it.
        let _ = Python::try_attach(release);
    }
}

/// `DLManagedTensor`, the form before DLPack 1.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

/// A tensor that is lent, with the object that owns its memory.
struct LentTensor {
    versioned: DlVersioned,
    managed: DlManaged,
    shape: Vec<i64>,
    strides: Vec<i64>,
    owner: Py<PyAny>,
}

/// A capsule with a contiguous tensor of this shape, which holds the owner of its memory.
pub(crate) fn export<'py>(
    py: Python<'py>,
    (tensor, is_read_only): (DlTensor, bool),
    shape: &[i64],
    owner: Py<PyAny>,
    is_versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let mut strides: Vec<i64> = shape.to_vec();
    let mut stride = 1;
    for size in strides.iter_mut().rev() {
        stride *= std::mem::replace(size, stride).max(1);
    }
    let flags = if is_read_only { FLAG_READ_ONLY } else { 0 };
    let context = std::ptr::null_mut();
    let mut lent = Box::new(LentTensor {
        versioned: DlVersioned { version: [1, 0], context, deleter: Some(drop_versioned), flags, tensor },
        managed: DlManaged { tensor, context, deleter: Some(drop_managed) },
        shape: shape.to_vec(),
        strides,
        owner,
    });
    let tensor = DlTensor { shape: lent.shape.as_ptr(), strides: lent.strides.as_ptr(), ..tensor };
    (lent.versioned.tensor, lent.managed.tensor) = (tensor, tensor);
    let lent = Box::leak(lent);
    let context: *mut c_void = (&raw mut *lent).cast();
    (lent.versioned.context, lent.managed.context) = (context, context);
    let (pointer, name) = match is_versioned {
        true => ((&raw mut lent.versioned).cast::<c_void>(), VERSIONED),
        false => ((&raw mut lent.managed).cast::<c_void>(), MANAGED),
    };
    // SAFETY: the pointer is not NULL, the name is static, and the destructor takes such a capsule.
    let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(drop_capsule)) };
    // SAFETY: a new reference, or NULL with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

unsafe extern "C" fn drop_versioned(tensor: *mut DlVersioned) {
    // SAFETY: the receiver gives back a tensor that it was lent.
    let context = unsafe { (*tensor).context };
    drop_lent(context);
}

unsafe extern "C" fn drop_managed(tensor: *mut DlManaged) {
    // SAFETY: as above.
    let context = unsafe { (*tensor).context };
    drop_lent(context);
}

/// Frees a lent tensor, and lets go of the owner of its memory.
fn drop_lent(lent: *mut c_void) {
    // SAFETY: `export` leaked it, its two tensors are its own, and one of them comes back, once.
    let lent = unsafe { Box::from_raw(lent.cast::<LentTensor>()) };
    // Without an interpreter the process ends, and the memory with it.
    let mut owner = Some(lent.owner);
    if Python::try_attach(|_| drop(owner.take())).is_none() {
        std::mem::forget(owner);
    }
}

/// Frees the tensor of a capsule that no library has taken, which renames it.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    for name in [VERSIONED, MANAGED] {
        // SAFETY: the interpreter passes the capsule that ends.
        if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } != 1 {
            continue;
        }
        // SAFETY: the capsule has this name.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) };
        if name == VERSIONED {
            // SAFETY: a capsule of this name has such a tensor.
            unsafe { drop_versioned(pointer.cast()) }
        } else {
            // SAFETY: as above.
            unsafe { drop_managed(pointer.cast()) }
        }
    }
}

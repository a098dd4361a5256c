//! Validation of the arguments of C calls: pointers, names, lengths, element types, configuration.
//!
//! A C caller promises, by the header, that a pointer which is not NULL points to what its parameter says for the
//! length of the call, and that no other thread writes there meanwhile. Every `SAFETY` comment here rests on that
//! promise; everything else that a caller says is checked.

use std::ffi::{c_char, c_double, c_int, c_void};
use std::ptr::{self, NonNull};
use std::slice;

use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::{DIMENSIONS_MAX, NAME_BYTES_MAX, PARAMETER_CONFIG_BYTES_MAX, PROGRAM_BYTES_MAX};
use pserver_core::partition::Name;

use super::sys::{NamedTensor, Parameter, Rows};
use pserver_client::GradientSlice;
use pserver_client::rule_file;

/// The longest text of a configuration in bytes: base64 makes four bytes of three.
const CONFIG_TEXT_BYTES_MAX: usize = 2 * PARAMETER_CONFIG_BYTES_MAX;
/// The longest path in bytes, as in Linux.
const PATH_BYTES_MAX: usize = 4096;
/// The longest text of a client's options in bytes.
const OPTIONS_BYTES_MAX: usize = 4096;
/// The most bytes of an array: an address space has no more.
const ARRAY_BYTES_MAX: usize = 1 << 56;

/// One call from C. Slices of the caller's memory live as long as this value, which is dropped before the call returns.
pub(super) struct Call(());

/// A call that is waited for later. The caller promises that contents stay until then; Rust cannot know how long
/// that is, and nothing that is borrowed here is used once the wait is over.
static LASTING: Call = Call(());

/// A caller's description of a tensor or of rows, in any edition.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorClaim {
    pub(super) name: *const c_char,
    pub(super) element_type: c_int,
    pub(super) content: *mut c_void,
    pub(super) content_len: i64,
    pub(super) ids: *const u64,
    pub(super) ids_len: i64,
}

/// A writable buffer of the caller, of which only the address and the length are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) start: NonNull<u8>,
    pub(super) bytes: usize,
}

impl Call {
    /// Begins a call. Only `guard`, in which every call runs, uses this.
    pub(super) fn begin() -> Self {
        Self(())
    }

    /// Begins a started call, which outlives its C function: its contents and outputs are used until its wait.
    pub(super) fn lasting() -> &'static Self {
        &LASTING
    }

    /// A parameter's name.
    pub(super) fn name(&self, pointer: *const c_char, what: &str) -> Result<&str, Failure> {
        let bytes = self.text(pointer, what, NAME_BYTES_MAX)?;
        Name::new(bytes).map_err(|failure| Failure::call(format!("{what}: {failure}")))?;
        Ok(str::from_utf8(bytes).expect("a name is UTF-8"))
    }

    /// An array of names.
    pub(super) fn names(&self, pointer: *const *const c_char, len: impl Into<i64>) -> Result<Vec<&str>, Failure> {
        let names = self.array(pointer, len, "names")?.iter().enumerate();
        names.map(|(index, name)| self.name(*name, &format!("names[{index}]"))).collect()
    }

    /// A path.
    pub(super) fn path(&self, pointer: *const c_char) -> Result<&str, Failure> {
        self.utf8(pointer, "path", PATH_BYTES_MAX)
    }

    /// A program's text, or the path of its file.
    pub(super) fn program(&self, pointer: *const c_char) -> Result<&str, Failure> {
        self.utf8(pointer, "program", PROGRAM_BYTES_MAX)
    }

    /// The text of a configuration; none if the pointer is NULL.
    pub(super) fn settings_text(&self, pointer: *const c_char) -> Result<Option<&str>, Failure> {
        if pointer.is_null() { Ok(None) } else { self.utf8(pointer, "configuration", CONFIG_TEXT_BYTES_MAX).map(Some) }
    }

    /// The options or the addresses of a client.
    pub(super) fn options(&self, pointer: *const c_char, what: &str) -> Result<&str, Failure> {
        self.utf8(pointer, what, OPTIONS_BYTES_MAX)
    }

    /// A configuration as text, or in protobuf's binary form where that has no zero; none if NULL.
    pub(super) fn settings(&self, pointer: *const c_char) -> Result<OptimizerSettings, Failure> {
        if pointer.is_null() {
            return Ok(OptimizerSettings::default());
        }
        let text = self.text(pointer, "configuration", CONFIG_TEXT_BYTES_MAX)?;
        OptimizerSettings::from_c_text(text, &rule_file::open)
    }

    /// A configuration in protobuf's binary form. With a length of 0 there is none, and the pointer is not read.
    pub(super) fn settings_bytes(&self, pointer: *const c_void, len: i64) -> Result<OptimizerSettings, Failure> {
        let most = i64::try_from(PARAMETER_CONFIG_BYTES_MAX).expect("it is small");
        if !(0..=most).contains(&len) {
            return Err(Failure::call(format!("configuration: length {len}; expected 0 to {most} bytes")));
        }
        if len == 0 {
            return Ok(OptimizerSettings::default());
        }
        let bytes = self.array(pointer.cast::<u8>(), len, "configuration")?;
        OptimizerSettings::from_bytes_with(bytes, &rule_file::open)
    }

    /// A shape, the slowest dimension first.
    pub(super) fn shape(&self, pointer: *const u64, dimensions: impl Into<i64>) -> Result<&[u64], Failure> {
        let dimensions = dimensions.into();
        if usize::try_from(dimensions).is_ok_and(|count| count > DIMENSIONS_MAX) {
            return Err(Failure::call(format!("shape: {dimensions} dimensions; expected at most {DIMENSIONS_MAX}")));
        }
        self.array(pointer, dimensions, "shape")
    }

    /// One parameter with its content.
    pub(super) fn parameter(&self, claim: &TensorClaim, what: &str) -> Result<GradientSlice<'_>, Failure> {
        let name = self.name(claim.name, &format!("{what}.name"))?;
        let element_type = element_type(claim.element_type, name)?;
        length(claim.content_len, name, element_type)?;
        let what = format!("parameter \"{name}\": content");
        let content = self.array(claim.content.cast::<u8>().cast_const(), claim.content_len, &what)?;
        Ok(GradientSlice { name, element_type, content })
    }

    /// The caller's array of tensors or rows, at least one.
    pub(super) fn claims<T: Copy + Into<TensorClaim>>(
        &self,
        pointer: *const T,
        len: impl Into<i64>,
        what: &str,
    ) -> Result<Vec<TensorClaim>, Failure> {
        let len = at_least_one(len, what)?;
        Ok(self.array(pointer, len, what)?.iter().map(|claim| (*claim).into()).collect())
    }

    /// An array of `len` elements. The pointer may be NULL if `len` is 0.
    pub(super) fn array<T>(&self, pointer: *const T, len: impl Into<i64>, what: &str) -> Result<&[T], Failure> {
        let len = len.into();
        let Ok(count) = usize::try_from(len) else {
            return Err(Failure::call(format!("{what}: length {len}; expected zero or more")));
        };
        if count == 0 {
            return Ok(&[]);
        }
        self.aligned(pointer, what)?;
        if count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > ARRAY_BYTES_MAX) {
            return Err(Failure::call(format!("{what}: length {len}; no array is that long")));
        }
        // SAFETY: the caller promises `count` elements that stay as they are during the call, and the call outlives
        // the slice; the pointer is aligned and not NULL, and the length was just checked.
        Ok(unsafe { slice::from_raw_parts(pointer, count) })
    }

    /// Writes an output of the caller, whose pointer `aligned` has checked.
    pub(super) fn write<T>(&self, pointer: *mut T, value: T) {
        assert!(!pointer.is_null() && pointer.is_aligned(), "outputs are checked before the work begins");
        // SAFETY: the caller promises that an output which is not NULL may be written to, and it is aligned.
        unsafe { pointer.write(value) }
    }

    /// Refuses a pointer that is NULL or not aligned for `T`.
    pub(super) fn aligned<T>(&self, pointer: *const T, what: &str) -> Result<(), Failure> {
        if pointer.is_null() {
            return Err(Failure::call(format!("{what} is NULL; expected a pointer")));
        }
        if !pointer.is_aligned() {
            let expected = align_of::<T>();
            return Err(Failure::call(format!("{what} is {pointer:p}; expected a multiple of {expected}")));
        }
        Ok(())
    }

    fn utf8(&self, pointer: *const c_char, what: &str, most: usize) -> Result<&str, Failure> {
        let bytes = self.text(pointer, what, most)?;
        str::from_utf8(bytes).map_err(|error| {
            Failure::call(format!("{what}: not UTF-8 at byte {}; expected UTF-8", error.valid_up_to()))
        })
    }

    /// The bytes before the NUL, of which there are at most `most`.
    fn text(&self, pointer: *const c_char, what: &str, most: usize) -> Result<&[u8], Failure> {
        self.aligned(pointer, what)?;
        let is_end = |index: &usize| {
            let letter = pointer.wrapping_add(*index);
            // SAFETY: the caller promises text that ends with a NUL, and none of the letters before was one.
            unsafe { letter.read() == 0 }
        };
        let length = (0..=most).find(is_end).ok_or_else(|| {
            Failure::call(format!("{what}: no NUL within {most} bytes; expected a text of at most {most} bytes"))
        })?;
        // SAFETY: the letters before the NUL were just read, and the caller promises that they stay.
        Ok(unsafe { slice::from_raw_parts(pointer.cast::<u8>(), length) })
    }
}

impl Room {
    /// The caller's buffer for a parameter; none if the pointer is NULL.
    pub(super) fn of(pointer: *mut c_void, len: impl Into<i64>, name: &str) -> Result<Option<Self>, Failure> {
        let Some(start) = NonNull::new(pointer.cast::<u8>()) else { return Ok(None) };
        let len = len.into();
        let bytes = usize::try_from(len).ok().filter(|bytes| *bytes <= ARRAY_BYTES_MAX).ok_or_else(|| {
            Failure::call(format!("parameter \"{name}\": content_len {len}; expected the room in bytes at content"))
        })?;
        Ok(Some(Self { start, bytes }))
    }

    /// The first `bytes` of the buffer, to fill. The buffers of one call were checked not to overlap.
    pub(super) fn bytes_mut(&mut self, bytes: usize) -> &mut [u8] {
        assert!(bytes <= self.bytes, "a room is measured before it is filled");
        // SAFETY: the caller promises `self.bytes` bytes that are its own during the call, and no other slice of
        // the call overlaps them, by `CallExtents::refuse_overlaps`.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), bytes) }
    }

    /// The first `bytes` of the buffer, to fill until the caller waits for the call.
    pub(super) fn lent(self, bytes: usize) -> &'static mut [u8] {
        assert!(bytes <= self.bytes, "a room is measured before it is filled");
        // SAFETY: the caller promises `self.bytes` bytes that are its own until it has waited for the call, nothing
        // of ours touches them after that, and `CallExtents::refuse_overlaps` keeps other slices of the call away.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), bytes) }
    }
}

impl From<Parameter> for TensorClaim {
    fn from(claim: Parameter) -> Self {
        let Parameter { name, element_type, content, content_len } = claim;
        let content_len = content_len.into();
        Self { name, element_type, content, content_len, ids: ptr::null(), ids_len: 0 }
    }
}

impl From<Rows> for TensorClaim {
    fn from(claim: Rows) -> Self {
        let Rows { name, element_type, ids, ids_len, content, content_len } = claim;
        Self { name, element_type, content, content_len: content_len.into(), ids, ids_len: ids_len.into() }
    }
}

impl From<NamedTensor> for TensorClaim {
    fn from(claim: NamedTensor) -> Self {
        let NamedTensor { name, element_type, content, content_len, ids, ids_len } = claim;
        Self { name, element_type, content, content_len: long(content_len), ids, ids_len: long(ids_len) }
    }
}

/// A length from a `size_t`. A length that no array can have becomes the largest, which is refused.
pub(super) fn long(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}

/// An element type by its number.
pub(super) fn element_type(number: c_int, name: &str) -> Result<ElementType, Failure> {
    ElementType::from_number(i64::from(number)).ok_or_else(|| {
        let last = ElementType::ALL.len() - 1;
        Failure::call(format!("parameter \"{name}\": element type {number}; expected a number from 0 to {last}"))
    })
}

/// A length in bytes that holds whole elements, at least one.
pub(super) fn length(len: impl Into<i64>, name: &str, element_type: ElementType) -> Result<usize, Failure> {
    let len = len.into();
    let each = element_type.bytes();
    let bytes = u64::try_from(len).ok().filter(|bytes| *bytes > 0 && bytes % each == 0);
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| {
        Failure::call(format!(
            "parameter \"{name}\": content_len {len}; expected a multiple of {each} bytes above 0, as it is \
             {element_type}"
        ))
    })
}

/// A learning rate of a call.
pub(super) fn rate(rate: c_double) -> Result<f64, Failure> {
    if rate.is_finite() && rate >= 0.0 {
        return Ok(rate);
    }
    Err(Failure::call(format!("learning rate {rate}; expected a finite number that is not negative")))
}

/// A length of an array that may not be empty.
pub(super) fn at_least_one(len: impl Into<i64>, what: &str) -> Result<i64, Failure> {
    let len = len.into();
    if len > 0 { Ok(len) } else { Err(Failure::call(format!("{what}: length {len}; expected at least one"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: std::fmt::Debug>(outcome: Result<T, Failure>, expected: &str) {
        let text = outcome.expect_err(expected).to_string();
        assert!(text.contains(expected), "{text}; expected {expected}");
    }

    #[test]
    fn invalid_names_are_refused() {
        let call = Call::begin();
        let long = vec![b'a'; 10 * 1024].into_iter().chain([0]).collect::<Vec<u8>>();
        assert_eq!(call.name(c"fc1.w".as_ptr(), "name"), Ok("fc1.w"));
        check(call.name(ptr::null(), "name"), "name is NULL; expected a pointer");
        check(call.name(c"".as_ptr(), "name"), "empty");
        check(call.name(long.as_ptr().cast(), "name"), "no NUL within 1024 bytes");
        check(call.name(c"\xff\xfe".as_ptr(), "name"), "not UTF-8");
        check(call.name(c"a\nb".as_ptr(), "name"), "control character");
        check(call.names([c"a".as_ptr(), ptr::null()].as_ptr(), 2), "names[1] is NULL");
        check(call.names(ptr::null(), 1), "names is NULL");
        check(call.names(ptr::null(), -1), "names: length -1");
        assert_eq!(call.names(ptr::null(), 0), Ok(Vec::new()));
    }

    #[test]
    fn lengths_and_types_that_do_not_fit_are_refused_by_name() {
        check(length(0, "w", ElementType::Float32), "parameter \"w\": content_len 0; expected a multiple of 4");
        check(length(-4, "w", ElementType::Float32), "content_len -4");
        check(length(7, "w", ElementType::Float64), "content_len 7; expected a multiple of 8");
        assert_eq!(length(8, "w", ElementType::Float64), Ok(8));
        check(element_type(8, "w"), "parameter \"w\": element type 8; expected a number from 0 to 7");
        check(element_type(-1, "w"), "element type -1");
        for number in [f64::NAN, f64::INFINITY, -0.1] {
            check(rate(number), "expected a finite number");
        }
        assert_eq!(rate(0.0), Ok(0.0));
    }

    #[test]
    fn pointers_are_checked_before_they_are_dereferenced() {
        let call = Call::begin();
        let numbers = [1_u64, 2];
        let odd = ptr::from_ref(&numbers).cast::<u8>().wrapping_add(1).cast::<u64>();
        assert_eq!(call.shape(numbers.as_ptr(), 2), Ok(&numbers[..]));
        check(call.shape(odd, 1), "expected a multiple of 8");
        check(call.shape(ptr::null(), 1), "shape is NULL");
        check(call.shape(numbers.as_ptr(), 65), "65 dimensions; expected at most 64");
        check(call.settings_bytes(ptr::null(), 3), "configuration is NULL");
        check(call.settings_bytes(ptr::null(), -1), "length -1");
        assert!(call.settings_bytes(ptr::without_provenance(1), 0).is_ok(), "nothing is read");
    }
}

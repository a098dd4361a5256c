//! Types of the C interface. Every value of these types is untrusted until `checked` has validated it.

use std::ffi::{c_char, c_int, c_void};

/// One connection to the parameter servers; a program only ever holds pointers to it.
pub struct ClientHandle;

/// A call that was started; a program only ever holds pointers to it.
pub struct CallHandle;

/// Parameters that are read where they are; a program only ever holds pointers to it.
pub struct ViewHandle;

/// A program that is loaded; a C program only ever holds pointers to it.
pub struct ProgramHandle;

/// The number of an element type.
pub type ElementTypeNumber = c_int;

/// One named tensor, or the gradient of one.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Parameter {
    /// 1 to 1024 bytes of UTF-8 without control characters, then a NUL.
    pub name: *mut c_char,
    /// The type of the elements.
    pub element_type: ElementTypeNumber,
    /// The elements, in the byte order of this machine.
    pub content: *mut c_void,
    /// The length of content in bytes.
    pub content_len: c_int,
}

/// Some rows of a sparse parameter, or of its gradient.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Rows {
    /// The parameter's name.
    pub name: *mut c_char,
    /// The type of the elements.
    pub element_type: ElementTypeNumber,
    /// Which rows.
    pub ids: *const u64,
    /// How many ids there are.
    pub ids_len: c_int,
    /// A row for each id, in their order.
    pub content: *mut c_void,
    /// The length of content in bytes.
    pub content_len: c_int,
}

/// A gradient looks like its parameter.
pub type Gradient = Parameter;

/// A tensor of the caller, or rows of a sparse parameter, with lengths of 64 bits: a value, a gradient, a place, or a
/// part of an optimizer's state.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NamedTensor {
    /// 1 to 1024 bytes of UTF-8 without control characters, then a NUL.
    pub name: *const c_char,
    /// The type of the elements.
    pub element_type: ElementTypeNumber,
    /// The elements, in the byte order of this machine: of rows, a row for each id, in their order.
    pub content: *mut c_void,
    /// The length of content in bytes.
    pub content_len: usize,
    /// Which rows of a sparse parameter; NULL for a tensor that is whole.
    pub ids: *const u64,
    /// How many ids there are.
    pub ids_len: usize,
}

/// A parameter of the job, as paddle_list_params tells of it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ParameterListing {
    /// Its name.
    pub name: *const c_char,
    /// The type of its elements.
    pub element_type: ElementTypeNumber,
    /// 1 if it is a table that is sent and fetched by rows, 0 if it is dense.
    pub is_sparse: c_int,
    /// Its length in bytes: of a table, that of all rows that may come to be.
    pub content_len: u64,
    /// Its dimensions in elements, the slowest first. The first of a table whose ids have no height is 0.
    pub shape: *const u64,
    /// How many dimensions there are.
    pub dimensions: usize,
    /// How many updates it has: the most that a part of it has.
    pub version: u64,
}

/// The optimizer's state of a dense parameter, or of some rows of a table.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct StateArrays {
    /// The tensors that its optimizer keeps, each with its name in the update rule, and in the parameter's type. Of
    /// rows each has the same ids, and a row for each.
    pub tensors: *const NamedTensor,
    /// How many tensors there are: 0 where the optimizer keeps none.
    pub tensors_len: usize,
    /// The updates that the parameter has seen: the learning rate's schedule, and Adam's correction of its means, go on
    /// from there.
    pub updates: u64,
    /// The learning rates that came with gradients of a table, where rows that have missed updates need them.
    pub rates: *const RateChange,
    /// How many there are.
    pub rates_len: usize,
}

/// A change of a table's learning rate.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RateChange {
    /// The first update that has it, from 1.
    pub update: u64,
    /// The learning rate; negative for the configured one.
    pub learning_rate: f64,
}

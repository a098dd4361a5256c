//! Values of variables while a program runs.

use std::fmt;

use half::{bf16, f16};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::rows::{Height, SelectedRows};

use super::variable::{Dim, VariableFacts};

// Elements in memory are elements on the wire and on disk.
const _: () = assert!(cfg!(target_endian = "little"), "the bytes of a tensor are little endian");

/// Memory of at least this many bytes is reserved from the system beforehand: reserving costs less than touching it.
const ASKED_BYTES_MIN: u64 = 16 << 20;

/// The elements of a tensor, in its own type.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Signed, 32 bits.
    Int32(Vec<i32>),
    /// Unsigned, 32 bits.
    Uint32(Vec<u32>),
    /// Signed, 64 bits.
    Int64(Vec<i64>),
    /// Unsigned, 64 bits.
    Uint64(Vec<u64>),
    /// IEEE binary32.
    Float32(Vec<f32>),
    /// IEEE binary64.
    Float64(Vec<f64>),
    /// IEEE binary16.
    Float16(Vec<f16>),
    /// bfloat16.
    Bfloat16(Vec<bf16>),
}

impl Elements {
    /// Their type.
    #[must_use]
    pub const fn element_type(&self) -> ElementType {
        match self {
            Self::Int32(_) => ElementType::Int32,
            Self::Uint32(_) => ElementType::Uint32,
            Self::Int64(_) => ElementType::Int64,
            Self::Uint64(_) => ElementType::Uint64,
            Self::Float32(_) => ElementType::Float32,
            Self::Float64(_) => ElementType::Float64,
            Self::Float16(_) => ElementType::Float16,
            Self::Bfloat16(_) => ElementType::Bfloat16,
        }
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Int32(values) => values.len(),
            Self::Uint32(values) => values.len(),
            Self::Int64(values) => values.len(),
            Self::Uint64(values) => values.len(),
            Self::Float32(values) => values.len(),
            Self::Float64(values) => values.len(),
            Self::Float16(values) => values.len(),
            Self::Bfloat16(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This many zeros.
    #[must_use]
    pub fn zeros(element_type: ElementType, count: usize) -> Self {
        match element_type {
            ElementType::Int32 => Self::Int32(vec![0; count]),
            ElementType::Uint32 => Self::Uint32(vec![0; count]),
            ElementType::Int64 => Self::Int64(vec![0; count]),
            ElementType::Uint64 => Self::Uint64(vec![0; count]),
            ElementType::Float32 => Self::Float32(vec![0.0; count]),
            ElementType::Float64 => Self::Float64(vec![0.0; count]),
            ElementType::Float16 => Self::Float16(vec![f16::ZERO; count]),
            ElementType::Bfloat16 => Self::Bfloat16(vec![bf16::ZERO; count]),
        }
    }

    /// Their bytes in the form of the wire: little endian.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Int32(values) => bytemuck::cast_slice(values),
            Self::Uint32(values) => bytemuck::cast_slice(values),
            Self::Int64(values) => bytemuck::cast_slice(values),
            Self::Uint64(values) => bytemuck::cast_slice(values),
            Self::Float32(values) => bytemuck::cast_slice(values),
            Self::Float64(values) => bytemuck::cast_slice(values),
            Self::Float16(values) => bytemuck::cast_slice(values),
            Self::Bfloat16(values) => bytemuck::cast_slice(values),
        }
    }

    /// Their bytes, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Int32(values) => bytemuck::cast_slice_mut(values),
            Self::Uint32(values) => bytemuck::cast_slice_mut(values),
            Self::Int64(values) => bytemuck::cast_slice_mut(values),
            Self::Uint64(values) => bytemuck::cast_slice_mut(values),
            Self::Float32(values) => bytemuck::cast_slice_mut(values),
            Self::Float64(values) => bytemuck::cast_slice_mut(values),
            Self::Float16(values) => bytemuck::cast_slice_mut(values),
            Self::Bfloat16(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

/// A dense tensor: elements with the last dimension fastest.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Vec<u64>,
    elements: Elements,
}

impl Tensor {
    /// A tensor.
    ///
    /// # Panics
    ///
    /// When there are not as many elements as the shape says.
    #[must_use]
    pub fn new(shape: impl Into<Vec<u64>>, elements: Elements) -> Self {
        let shape = shape.into();
        let count = shape.iter().try_fold(1_u64, |count, length| count.checked_mul(*length));
        assert_eq!(count, Some(elements.len() as u64), "the elements of shape {shape:?}");
        Self { shape, elements }
    }

    /// A tensor of zeros.
    ///
    /// # Panics
    ///
    /// When it is larger than memory could be.
    #[must_use]
    pub fn zeros(element_type: ElementType, shape: &[u64]) -> Self {
        let count = shape.iter().try_fold(1_usize, |count, length| count.checked_mul(usize::try_from(*length).ok()?));
        let count = count.unwrap_or_else(|| panic!("a tensor of shape {shape:?} is larger than memory"));
        Self { shape: shape.to_vec(), elements: Elements::zeros(element_type, count) }
    }

    /// A tensor of zeros, if there is memory for it.
    ///
    /// # Errors
    /// When there is no memory; names the bytes.
    pub fn try_zeros(element_type: ElementType, shape: &[u64]) -> Result<Self, Failure> {
        let bytes = shape.iter().fold(element_type.bytes(), |bytes, length| bytes.saturating_mul(*length));
        check_memory(bytes)?;
        Ok(Self::zeros(element_type, shape))
    }

    /// Its dimensions, the slowest first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Its elements.
    #[must_use]
    pub const fn elements(&self) -> &Elements {
        &self.elements
    }

    /// The bytes of its elements, little endian.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.elements.bytes()
    }

    /// The bytes of its elements, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.elements.bytes_mut()
    }
}

/// The value of a variable.
#[derive(Clone, Debug, PartialEq)]
pub enum VariableValue {
    /// A dense tensor.
    Dense(Tensor),
    /// Selected rows.
    SelectedRows(SelectedRows),
    /// Strings.
    Strings(Vec<String>),
}

impl VariableValue {
    /// Refuses a value that a variable with these facts cannot hold. The first dimension named [`Dim::Batch`] that is
    /// met sets `batch`, and every later one must be as long.
    ///
    /// # Errors
    /// Names what was found and expected; the caller knows the variable.
    pub fn check(&self, facts: &VariableFacts, batch: &mut Option<u64>) -> Result<(), Failure> {
        let fits = match (self, facts) {
            (Self::Dense(tensor), VariableFacts::Dense { element_type, shape }) => {
                tensor.elements.element_type() == *element_type
                    && tensor.shape.len() == shape.len()
                    && tensor.shape.iter().zip(shape).all(|(found, dim)| match dim {
                        Dim::Fixed(length) => found == length,
                        Dim::Batch => batch.get_or_insert(*found) == found,
                    })
            }
            (Self::SelectedRows(rows), VariableFacts::SelectedRows { element_type, height, width }) => {
                let layout = rows.view().layout();
                layout.element_type() == *element_type
                    && layout.height() == Height::Rows(*height)
                    && u64::from(layout.width()) == *width
            }
            (Self::Strings(_), VariableFacts::Strings) => true,
            _ => false,
        };
        if fits {
            return Ok(());
        }
        let batch = batch.map_or(String::new(), |batch| format!(" where batch is {batch}"));
        Err(Failure::call(format!("found {self}; expected {facts}{batch}")))
    }

    /// Bytes of its elements, ids and strings.
    #[must_use]
    pub fn byte_count(&self) -> u64 {
        match self {
            Self::Dense(tensor) => tensor.bytes().len() as u64,
            Self::SelectedRows(rows) => {
                let view = rows.view();
                view.values().len() as u64 + view.len() as u64 * size_of::<u64>() as u64
            }
            Self::Strings(strings) => strings.iter().map(|string| string.len() as u64).sum(),
        }
    }

    /// The tensor.
    ///
    /// # Panics
    /// When it is something else, which a checked program rules out.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        match self {
            Self::Dense(tensor) => tensor,
            other => panic!("{other} where a checked program has a dense tensor"),
        }
    }

    /// The selected rows.
    ///
    /// # Panics
    /// When it is something else, which a checked program rules out.
    #[must_use]
    pub fn rows(&self) -> &SelectedRows {
        match self {
            Self::SelectedRows(rows) => rows,
            other => panic!("{other} where a checked program has selected rows"),
        }
    }
}

impl From<Tensor> for VariableValue {
    fn from(tensor: Tensor) -> Self {
        Self::Dense(tensor)
    }
}

/// The value's type and shape: `float32[32, 64]`, `7 of rows(float32, 12500, 64)`, `3 strings`.
impl fmt::Display for VariableValue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense(tensor) => VariableFacts::fixed(tensor.elements.element_type(), &tensor.shape).fmt(formatter),
            Self::SelectedRows(rows) => {
                let (view, layout) = (rows.view(), rows.view().layout());
                let (element_type, height) = (layout.element_type(), layout.height().bound());
                write!(formatter, "{} of rows({element_type}, {height}, {})", view.len(), layout.width())
            }
            Self::Strings(strings) => write!(formatter, "{} strings", strings.len()),
        }
    }
}

/// Returns an error where an allocation of this size would abort the process.
///
/// # Errors
/// Names the bytes.
pub(super) fn check_memory(bytes: u64) -> Result<(), Failure> {
    if bytes < ASKED_BYTES_MIN {
        return Ok(());
    }
    let mut room = Vec::<u8>::new();
    let asked = usize::try_from(bytes).ok().and_then(|bytes| room.try_reserve_exact(bytes).ok());
    // Without this the compiler may elide the allocation.
    std::hint::black_box(&room);
    asked.ok_or_else(|| Failure::call(format!("found no memory for {bytes} bytes; expected as many")))
}

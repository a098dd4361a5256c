//! What a variable holds while a program runs.

use half::{bf16, f16};

use crate::dtype::ElementType;

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

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
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

    /// Its elements, to write; there are as many of the same type afterwards, or the next reader panics.
    #[must_use]
    pub const fn elements_mut(&mut self) -> &mut Elements {
        &mut self.elements
    }
}

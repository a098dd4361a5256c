//! Numbers of a file, converted to the element type of a variable.

use half::{bf16, f16};
use pserver_core::dtype::ElementType;
use pserver_program::Elements;

/// One number of a file, without loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number {
    Whole(i128),
    Real(f64),
}

/// The number type of a stored column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberType {
    Bool,
    Uint8,
    Int8,
    Uint16,
    Int16,
    Uint32,
    Int32,
    Uint64,
    Int64,
    Float16,
    Bfloat16,
    Float32,
    Float64,
}

/// A column as it is stored: little endian, the last dimension fastest.
#[derive(Clone, Debug)]
pub(super) struct StoredColumn {
    pub(super) number_type: NumberType,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Vec<u8>,
}

/// Type and shape of a column, or why it cannot be read.
pub(super) type ColumnFacts = Result<(NumberType, Vec<u64>), String>;

/// The bytes of a column.
///
/// # Errors
/// When they are too many for any memory.
pub(super) fn column_bytes(number_type: NumberType, shape: &[u64]) -> Result<usize, String> {
    let bytes = shape.iter().try_fold(number_type.bytes() as u64, |bytes, length| bytes.checked_mul(*length));
    let bytes = bytes.filter(|bytes| *bytes < 1 << 47).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| format!("shape {shape:?} is larger than memory"))
}

impl NumberType {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => 1,
            Self::Uint16 | Self::Int16 | Self::Float16 | Self::Bfloat16 => 2,
            Self::Uint32 | Self::Int32 | Self::Float32 => 4,
            Self::Uint64 | Self::Int64 | Self::Float64 => 8,
        }
    }

    /// The same type as elements of a variable; none for types that no variable has.
    pub(super) const fn element_type(self) -> Option<ElementType> {
        match self {
            Self::Uint32 => Some(ElementType::Uint32),
            Self::Int32 => Some(ElementType::Int32),
            Self::Uint64 => Some(ElementType::Uint64),
            Self::Int64 => Some(ElementType::Int64),
            Self::Float16 => Some(ElementType::Float16),
            Self::Bfloat16 => Some(ElementType::Bfloat16),
            Self::Float32 => Some(ElementType::Float32),
            Self::Float64 => Some(ElementType::Float64),
            Self::Bool | Self::Uint8 | Self::Int8 | Self::Uint16 | Self::Int16 => None,
        }
    }

    fn read(self, bytes: &[u8]) -> Number {
        fn of<const N: usize>(bytes: &[u8]) -> [u8; N] {
            bytes.try_into().expect("a number has the bytes of its type")
        }
        match self {
            Self::Bool | Self::Uint8 => Number::Whole(bytes[0].into()),
            Self::Int8 => Number::Whole(i8::from_le_bytes(of(bytes)).into()),
            Self::Uint16 => Number::Whole(u16::from_le_bytes(of(bytes)).into()),
            Self::Int16 => Number::Whole(i16::from_le_bytes(of(bytes)).into()),
            Self::Uint32 => Number::Whole(u32::from_le_bytes(of(bytes)).into()),
            Self::Int32 => Number::Whole(i32::from_le_bytes(of(bytes)).into()),
            Self::Uint64 => Number::Whole(u64::from_le_bytes(of(bytes)).into()),
            Self::Int64 => Number::Whole(i64::from_le_bytes(of(bytes)).into()),
            Self::Float16 => Number::Real(f16::from_le_bytes(of(bytes)).into()),
            Self::Bfloat16 => Number::Real(bf16::from_le_bytes(of(bytes)).into()),
            Self::Float32 => Number::Real(f32::from_le_bytes(of(bytes)).into()),
            Self::Float64 => Number::Real(f64::from_le_bytes(of(bytes))),
        }
    }
}

impl StoredColumn {
    /// The numbers in another type. A float is rounded once to nearest.
    ///
    /// # Errors
    /// Names the index and the value of a number that an integer type does not have.
    pub(super) fn elements(&self, to: ElementType) -> Result<Elements, String> {
        let size = self.number_type.bytes();
        if self.number_type.element_type() == Some(to) {
            let mut elements = Elements::zeros(to, self.bytes.len() / size);
            elements.bytes_mut().copy_from_slice(&self.bytes);
            return Ok(elements);
        }
        let numbers = self.bytes.chunks_exact(size).map(|bytes| self.number_type.read(bytes));
        elements(to, numbers).map_err(|(index, number)| {
            let rows = self.shape.first().copied().unwrap_or(1).max(1);
            let width = (self.bytes.len() / size) as u64 / rows;
            let found = match number {
                Number::Whole(whole) => whole.to_string(),
                Number::Real(real) => format!("{real:?}"),
            };
            format!("found {found} in row {}; expected a number of {to}", index as u64 / width.max(1))
        })
    }
}

/// Numbers as elements of a type. A float is rounded once to nearest.
///
/// # Errors
/// The index and the value of the first number that the type does not have.
pub(super) fn elements(to: ElementType, numbers: impl Iterator<Item = Number>) -> Result<Elements, (usize, Number)> {
    fn all<T>(
        numbers: impl Iterator<Item = Number>,
        convert: impl Fn(Number) -> Option<T>,
    ) -> Result<Vec<T>, (usize, Number)> {
        numbers.enumerate().map(|(index, number)| convert(number).ok_or((index, number))).collect()
    }
    Ok(match to {
        ElementType::Int32 => Elements::Int32(all(numbers, whole)?),
        ElementType::Uint32 => Elements::Uint32(all(numbers, whole)?),
        ElementType::Int64 => Elements::Int64(all(numbers, whole)?),
        ElementType::Uint64 => Elements::Uint64(all(numbers, whole)?),
        ElementType::Float32 => Elements::Float32(all(numbers, |number| Some(single(number)))?),
        ElementType::Float64 => Elements::Float64(all(numbers, |number| Some(double(number)))?),
        ElementType::Float16 => Elements::Float16(all(numbers, |number| Some(f16::from_f64(double(number))))?),
        ElementType::Bfloat16 => Elements::Bfloat16(all(numbers, |number| Some(bf16::from_f64(double(number))))?),
    })
}

/// The integer that equals the number, if the type has it.
fn whole<T: TryFrom<i128>>(number: Number) -> Option<T> {
    // 2^64: no integer type of a variable reaches further.
    const END: f64 = 18_446_744_073_709_551_616.0;
    let whole = match number {
        Number::Whole(whole) => whole,
        #[expect(clippy::cast_possible_truncation, reason = "the value is whole and below 2^64")]
        Number::Real(real) if real.fract() == 0.0 && real.abs() <= END => real as i128,
        Number::Real(_) => return None,
    };
    T::try_from(whole).ok()
}

#[expect(clippy::cast_possible_truncation, reason = "a float is rounded to nearest")]
const fn single(number: Number) -> f32 {
    match number {
        Number::Whole(whole) => whole as f32,
        Number::Real(real) => real as f32,
    }
}

const fn double(number: Number) -> f64 {
    match number {
        Number::Whole(whole) => whole as f64,
        Number::Real(real) => real,
    }
}

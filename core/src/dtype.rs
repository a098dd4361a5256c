//! Element types: the six of the C API, and the two half-precision types of gradients and values on the wire.

use std::fmt;

/// The type of a tensor's elements. The numbers are those of `paddle_element_type` and of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ElementType {
    /// Signed, 32 bits.
    Int32 = 0,
    /// Unsigned, 32 bits.
    Uint32 = 1,
    /// Signed, 64 bits.
    Int64 = 2,
    /// Unsigned, 64 bits.
    Uint64 = 3,
    /// IEEE binary32.
    Float32 = 4,
    /// IEEE binary64.
    Float64 = 5,
    /// IEEE binary16: for gradients, and for values on their way to trainers.
    Float16 = 6,
    /// bfloat16: for gradients, and for values on their way to trainers.
    Bfloat16 = 7,
}

impl ElementType {
    /// Every element type, in the order of its number.
    pub const ALL: [Self; 8] = [
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float32,
        Self::Float64,
        Self::Float16,
        Self::Bfloat16,
    ];

    /// The type with this number, if there is one.
    #[must_use]
    pub fn from_number(number: i64) -> Option<Self> {
        usize::try_from(number).ok().and_then(|index| Self::ALL.get(index).copied())
    }

    /// The number of this type in the C API and on the wire.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Bytes per element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
            Self::Float16 | Self::Bfloat16 => 2,
        }
    }

    /// Whether an optimizer may work on it; the integers are stored, sent, set and summed only.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::Float32 | Self::Float64 | Self::Float16 | Self::Bfloat16)
    }

    /// Whether a parameter may have this type. Halves are for gradients on the wire.
    #[must_use]
    pub const fn is_parameter_type(self) -> bool {
        !matches!(self, Self::Float16 | Self::Bfloat16)
    }

    /// Whether a gradient of this type may be sent for a parameter of `parameter`'s type.
    #[must_use]
    pub fn is_gradient_for(self, parameter: Self) -> bool {
        self == parameter
            || (matches!(self, Self::Float16 | Self::Bfloat16) && matches!(parameter, Self::Float32 | Self::Float64))
    }

    /// Whether values of a parameter of this type may be requested in half precision.
    #[must_use]
    pub const fn has_halves(self) -> bool {
        matches!(self, Self::Float32)
    }

    /// Its name, as configuration, errors and tools write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int32 => "int32",
            Self::Uint32 => "uint32",
            Self::Int64 => "int64",
            Self::Uint64 => "uint64",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
        }
    }
}

/// Half-precision types of a float32 parameter's value: each element rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Half {
    /// IEEE binary16.
    Float16 = ElementType::Float16 as u8,
    /// bfloat16.
    Bfloat16 = ElementType::Bfloat16 as u8,
}

impl Half {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Float16, Self::Bfloat16];

    /// This type as a half, if it is one.
    #[must_use]
    pub fn of(element_type: ElementType) -> Option<Self> {
        Self::ALL.into_iter().find(|half| half.element_type() == element_type)
    }

    /// The type.
    #[must_use]
    pub const fn element_type(self) -> ElementType {
        match self {
            Self::Float16 => ElementType::Float16,
            Self::Bfloat16 => ElementType::Bfloat16,
        }
    }

    /// Its number, which is the type's.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for Half {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.element_type().fmt(formatter)
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

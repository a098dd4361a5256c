//! Elements of tensors as bytes: little endian as on the wire, at any alignment.

use half::{bf16, f16};

use crate::dtype::ElementType;

/// One trainer's gradient for a piece of a parameter.
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// The gradient's elements, as many as the parameter's piece has.
    pub bytes: &'a [u8],
    /// The parameter's type, or a half for a parameter of floats.
    pub element_type: ElementType,
}

/// A type that a parameter may have.
pub(super) trait OptimizerElement: Copy {
    /// Bytes per element.
    const BYTES: usize;
    /// The sum of no gradients.
    const ZERO: Self;

    fn read(bytes: &[u8], index: usize) -> Self;
    fn write(self, bytes: &mut [u8], index: usize);
    /// Reads an element of a gradient, widening a half.
    fn read_gradient(gradient: &Gradient<'_>, index: usize) -> Self;
    /// Adds in this type: floats round, integers wrap.
    fn plus(self, other: Self) -> Self;
}

/// A type that an optimizer may work on.
pub(super) trait OptimizerReal: OptimizerElement {
    fn widen(self) -> f64;
    fn nearest(value: f64) -> Self;
    /// `self * scale` in this type: one rounding for the scale, and one for the product.
    fn scaled(self, scale: f64) -> Self;
}

macro_rules! integer {
    ($type:ty) => {
        impl OptimizerElement for $type {
            const BYTES: usize = size_of::<$type>();
            const ZERO: Self = 0;

            #[inline]
            fn read(bytes: &[u8], index: usize) -> Self {
                Self::from_le_bytes(array_at(bytes, index))
            }

            #[inline]
            fn write(self, bytes: &mut [u8], index: usize) {
                bytes[index * Self::BYTES..][..Self::BYTES].copy_from_slice(&self.to_le_bytes());
            }

            #[inline]
            fn read_gradient(gradient: &Gradient<'_>, index: usize) -> Self {
                Self::read(gradient.bytes, index)
            }

            #[inline]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
        }
    };
}

integer!(i32);
integer!(u32);
integer!(i64);
integer!(u64);

macro_rules! real {
    ($type:ty) => {
        impl OptimizerElement for $type {
            const BYTES: usize = size_of::<$type>();
            const ZERO: Self = 0.0;

            #[inline]
            fn read(bytes: &[u8], index: usize) -> Self {
                Self::from_le_bytes(array_at(bytes, index))
            }

            #[inline]
            fn write(self, bytes: &mut [u8], index: usize) {
                bytes[index * Self::BYTES..][..Self::BYTES].copy_from_slice(&self.to_le_bytes());
            }

            #[inline]
            fn read_gradient(gradient: &Gradient<'_>, index: usize) -> Self {
                match gradient.element_type {
                    ElementType::Float16 => f16::from_le_bytes(array_at(gradient.bytes, index)).into(),
                    ElementType::Bfloat16 => bf16::from_le_bytes(array_at(gradient.bytes, index)).into(),
                    _ => Self::read(gradient.bytes, index),
                }
            }

            #[inline]
            fn plus(self, other: Self) -> Self {
                self + other
            }
        }
    };
}

real!(f32);
real!(f64);

impl OptimizerReal for f32 {
    #[inline]
    fn widen(self) -> f64 {
        self.into()
    }

    #[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest binary32 is what is asked for")]
    #[inline]
    fn nearest(value: f64) -> Self {
        value as Self
    }

    #[inline]
    fn scaled(self, scale: f64) -> Self {
        self * Self::nearest(scale)
    }
}

impl OptimizerReal for f64 {
    #[inline]
    fn widen(self) -> f64 {
        self
    }

    #[inline]
    fn nearest(value: f64) -> Self {
        value
    }

    #[inline]
    fn scaled(self, scale: f64) -> Self {
        self * scale
    }
}

/// Writes a number over every element of a tensor of floats, rounded to its type.
///
/// # Panics
///
/// When the type is not f32 or f64.
pub fn fill(element_type: ElementType, bytes: &mut [u8], value: f64) {
    match element_type {
        ElementType::Float32 => bytes.as_chunks_mut().0.fill(f32::nearest(value).to_le_bytes()),
        ElementType::Float64 => bytes.as_chunks_mut().0.fill(value.to_le_bytes()),
        other => panic!("a state of {other}; expected float32 or float64"),
    }
}

#[inline]
pub(super) fn array_at<const BYTES: usize>(bytes: &[u8], index: usize) -> [u8; BYTES] {
    let mut array = [0; BYTES];
    array.copy_from_slice(&bytes[index * BYTES..][..BYTES]);
    array
}

//! The two types that arithmetic is done in.

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::value::Elements;

/// Binary32 or binary64.
pub(super) trait TensorReal:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;

    /// The elements of a tensor of this type.
    ///
    /// # Panics
    /// When they are of another type.
    fn slice(elements: &Elements) -> &[Self];
    /// Elements of this type.
    fn wrap(values: Vec<Self>) -> Elements;
    /// The value in this type that is nearest.
    fn nearest(value: f64) -> Self;
    /// Exactly, in binary64.
    fn widen(self) -> f64;
    /// The exponential.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The logarithm of one more.
    fn ln_1p(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Without its sign.
    fn abs(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// A power with a real exponent.
    fn powf(self, exponent: Self) -> Self;
    /// Whether it is no number.
    fn is_nan(self) -> bool;
    /// One less the error function.
    fn erfc(self) -> Self;

    /// A number of elements, rounded to this type.
    #[must_use]
    fn count(elements: usize) -> Self {
        Self::nearest(elements as f64)
    }

    /// `1 / (1 + exp(-x))`, by whichever exponential does not overflow.
    #[must_use]
    fn sigmoid(self) -> Self {
        let small = (-self.abs()).exp();
        if self < Self::ZERO { small / (Self::ONE + small) } else { Self::ONE / (Self::ONE + small) }
    }
}

macro_rules! real {
    ($type:ident, $variant:ident, $nearest:expr, $erfc:expr) => {
        impl TensorReal for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;

            fn slice(elements: &Elements) -> &[Self] {
                match elements {
                    Elements::$variant(values) => values,
                    other => panic!("{} in a checked program of {}", other.element_type(), stringify!($type)),
                }
            }

            fn wrap(values: Vec<Self>) -> Elements {
                Elements::$variant(values)
            }

            fn erfc(self) -> Self {
                $erfc(self)
            }

            fn nearest(value: f64) -> Self {
                $nearest(value)
            }

            fn widen(self) -> f64 {
                self.into()
            }

            fn exp(self) -> Self {
                $type::exp(self)
            }

            fn ln(self) -> Self {
                $type::ln(self)
            }

            fn ln_1p(self) -> Self {
                $type::ln_1p(self)
            }

            fn tanh(self) -> Self {
                $type::tanh(self)
            }

            fn abs(self) -> Self {
                $type::abs(self)
            }

            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }

            fn powf(self, exponent: Self) -> Self {
                $type::powf(self, exponent)
            }

            fn is_nan(self) -> bool {
                $type::is_nan(self)
            }
        }
    };
}

real!(f32, Float32, round, libm::erfcf);
real!(f64, Float64, std::convert::identity, libm::erfc);

#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest binary32 is what is asked for")]
fn round(value: f64) -> f32 {
    value as f32
}

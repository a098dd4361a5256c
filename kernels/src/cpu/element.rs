//! Elements as the loops see them: byte arrays in memory, numbers in registers.

use std::ops::{Add, Div, Mul, Neg, Sub};

use pserver_core::dtype::ElementType;
use pserver_core::optim::Gradient;
use pserver_core::rule::reference;

/// The elements of a tile. A power of two, so that the tiles of an aligned chunk are aligned; 8 KiB of f32 and of
/// each state fit the first-level cache together with the scratch.
pub(crate) const TILE: usize = 2048;

/// A tile's worth of one tensor on the stack, aligned so that no vector crosses a cache line.
#[repr(align(64))]
pub(crate) struct Scratch<E: KernelElement>(pub(crate) [E::Bytes; TILE]);

impl<E: KernelElement> Scratch<E> {
    pub(crate) fn zero() -> Self {
        Self([E::default().store(); TILE])
    }
}

/// An element in memory.
pub(crate) type ElementBytes<E> = <E as StoredAs<E>>::Bytes;

/// A type as it lies in a tensor that can be read as `E`: `E` itself, or a half that is widened.
pub(crate) trait StoredAs<E> {
    /// One element in memory, little endian.
    type Bytes: Copy + std::fmt::Debug;

    fn view(bytes: &[u8]) -> &[Self::Bytes];
    fn load(bytes: Self::Bytes) -> E;
}

/// A type that a parameter may have.
pub(crate) trait KernelElement: Copy + Default + StoredAs<Self> {
    fn view_mut(bytes: &mut [u8]) -> &mut [<Self as StoredAs<Self>>::Bytes];
    fn store(self) -> <Self as StoredAs<Self>>::Bytes;
    fn flat(view: &[<Self as StoredAs<Self>>::Bytes]) -> &[u8];
    /// Adds in this type: floats round, integers wrap.
    fn plus(self, other: Self) -> Self;
    /// Whether a gradient's elements are of this very type, so that they can be read where they lie.
    fn is_type_of(gradient: &Gradient<'_>) -> bool;
    /// Adds a tile's worth of a gradient to `into`, or copies it there when it is the `FIRST`.
    fn merge<const FIRST: bool>(into: &mut [<Self as StoredAs<Self>>::Bytes], gradient: &Gradient<'_>, start: usize);
}

/// A type that an optimizer may work on.
pub(crate) trait KernelReal:
    KernelElement
    + Default
    + std::fmt::Debug
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;

    fn nearest(value: f64) -> Self;
    /// A rule's scalar as this type's operations use it.
    fn of_scalar(scalar: f64) -> Self;
    fn widen(self) -> f64;
    fn sqrt(self) -> Self;
    fn abs(self) -> Self;
    fn copysign(self, sign: Self) -> Self;
    fn floor(self) -> Self;
}

/// IEEE binary16.
pub(crate) struct Binary16;

/// bfloat16.
pub(crate) struct Bfloat16;

macro_rules! element {
    ($type:ty, $element_type:expr, $plus:path, $merge:ident) => {
        impl StoredAs<Self> for $type {
            type Bytes = [u8; size_of::<$type>()];

            #[inline(always)]
            fn view(bytes: &[u8]) -> &[Self::Bytes] {
                bytes.as_chunks().0
            }

            #[inline(always)]
            fn load(bytes: Self::Bytes) -> Self {
                Self::from_le_bytes(bytes)
            }
        }

        impl KernelElement for $type {
            #[inline(always)]
            fn view_mut(bytes: &mut [u8]) -> &mut [[u8; size_of::<$type>()]] {
                bytes.as_chunks_mut().0
            }

            #[inline(always)]
            fn store(self) -> [u8; size_of::<$type>()] {
                self.to_le_bytes()
            }

            fn flat(view: &[[u8; size_of::<$type>()]]) -> &[u8] {
                view.as_flattened()
            }

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                $plus(self, other)
            }

            #[inline(always)]
            fn is_type_of(gradient: &Gradient<'_>) -> bool {
                gradient.element_type == $element_type
            }

            #[inline(always)]
            fn merge<const FIRST: bool>(into: &mut [[u8; size_of::<$type>()]], gradient: &Gradient<'_>, start: usize) {
                $merge::<Self, FIRST>(into, gradient, start);
            }
        }
    };
}

element!(i32, ElementType::Int32, i32::wrapping_add, merge_own);
element!(u32, ElementType::Uint32, u32::wrapping_add, merge_own);
element!(i64, ElementType::Int64, i64::wrapping_add, merge_own);
element!(u64, ElementType::Uint64, u64::wrapping_add, merge_own);
element!(f32, ElementType::Float32, Add::add, merge_any);
element!(f64, ElementType::Float64, Add::add, merge_any);

macro_rules! real {
    ($type:ty) => {
        impl StoredAs<$type> for Binary16 {
            type Bytes = [u8; 2];

            #[inline(always)]
            fn view(bytes: &[u8]) -> &[Self::Bytes] {
                bytes.as_chunks().0
            }

            #[inline(always)]
            fn load(bytes: Self::Bytes) -> $type {
                widen_half(u16::from_le_bytes(bytes)).into()
            }
        }

        impl StoredAs<$type> for Bfloat16 {
            type Bytes = [u8; 2];

            #[inline(always)]
            fn view(bytes: &[u8]) -> &[Self::Bytes] {
                bytes.as_chunks().0
            }

            #[inline(always)]
            fn load(bytes: Self::Bytes) -> $type {
                f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16).into()
            }
        }

        impl KernelReal for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;

            #[inline(always)]
            #[allow(clippy::cast_possible_truncation, reason = "rounding to the nearest is what is asked for")]
            fn nearest(value: f64) -> Self {
                value as Self
            }

            #[inline(always)]
            fn of_scalar(scalar: f64) -> Self {
                <Self as reference::RuleReal>::of_scalar(scalar)
            }

            #[inline(always)]
            fn widen(self) -> f64 {
                self.into()
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }

            #[inline(always)]
            fn abs(self) -> Self {
                self.abs()
            }

            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                self.copysign(sign)
            }

            #[inline(always)]
            fn floor(self) -> Self {
                self.floor()
            }
        }
    };
}

real!(f32);
real!(f64);

/// Merges a gradient of the parameter's own type.
#[inline(always)]
fn merge_own<E: KernelElement, const FIRST: bool>(into: &mut [ElementBytes<E>], gradient: &Gradient<'_>, start: usize) {
    merge_as::<E, E, FIRST>(into, gradient.bytes, start);
}

/// Merges a gradient of the parameter's own type or of half precision.
#[inline(always)]
fn merge_any<E: KernelElement, const FIRST: bool>(into: &mut [ElementBytes<E>], gradient: &Gradient<'_>, start: usize)
where
    Binary16: StoredAs<E>,
    Bfloat16: StoredAs<E>,
{
    match gradient.element_type {
        ElementType::Float16 => merge_as::<E, Binary16, FIRST>(into, gradient.bytes, start),
        ElementType::Bfloat16 => merge_as::<E, Bfloat16, FIRST>(into, gradient.bytes, start),
        _ => merge_own::<E, FIRST>(into, gradient, start),
    }
}

#[inline(always)]
fn merge_as<E: KernelElement, S: StoredAs<E>, const FIRST: bool>(
    into: &mut [ElementBytes<E>],
    gradient: &[u8],
    start: usize,
) {
    let gradient = &S::view(gradient)[start..][..into.len()];
    for (into, &from) in into.iter_mut().zip(gradient) {
        *into = if FIRST { S::load(from) } else { E::load(*into).plus(S::load(from)) }.store();
    }
}

/// Binary16 as binary32, without a branch, so that it becomes vector code on every target: `half`'s own conversion
/// asks for the processor's features at every call and cannot be inlined here. Exact, denormals included: the bits
/// moved into place are the value times `2^-112`.
#[inline(always)]
fn widen_half(bits: u16) -> f32 {
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    const EXPONENT: u32 = 0x7f80_0000;
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * SCALE).to_bits();
    let special = magnitude | EXPONENT;
    f32::from_bits(sign | if 0x7c00 << 13 <= magnitude { special } else { finite })
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::{Bfloat16, StoredAs, widen_half};

    fn same(found: f32, expected: f32) {
        assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{found} {expected}");
    }

    #[test]
    fn every_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            same(widen_half(bits), f16::from_bits(bits).to_f32());
            same(<Bfloat16 as StoredAs<f32>>::load(bits.to_le_bytes()), bf16::from_bits(bits).to_f32());
        }
    }
}

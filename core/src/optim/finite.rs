//! Detection of gradient elements that are not finite: a single one makes a parameter NaN for good.

use half::{bf16, f16};
use multiversion::multiversion;

use super::element::array_at;
use crate::dtype::ElementType;

/// The index of the first element that is NaN or infinite; none for integers.
///
/// ```
/// use pserver_core::dtype::ElementType;
/// use pserver_core::optim::first_nonfinite;
///
/// let bytes: Vec<u8> = [1.0, f32::MAX, f32::NAN].iter().flat_map(|value| value.to_le_bytes()).collect();
/// assert_eq!(first_nonfinite(ElementType::Float32, &bytes), Some(2));
/// assert_eq!(first_nonfinite(ElementType::Float32, &bytes[..8]), None);
/// ```
#[must_use]
pub fn first_nonfinite(element_type: ElementType, bytes: &[u8]) -> Option<usize> {
    if is_finite(element_type, bytes) {
        return None;
    }
    one_by_one(element_type, bytes)
}

fn one_by_one(element_type: ElementType, bytes: &[u8]) -> Option<usize> {
    let elements = usize::try_from(element_type.bytes()).map_or(0, |width| bytes.len() / width);
    (0..elements).find(|index| real_at(element_type, bytes, *index).is_some_and(|real| !real.is_finite()))
}

/// Whether all elements are finite; integers always are.
#[must_use]
pub fn is_finite(element_type: ElementType, bytes: &[u8]) -> bool {
    match element_type {
        ElementType::Float32 => bytes.chunks(PIECE).all(is_finite_32),
        ElementType::Float64 => bytes.chunks(PIECE).all(is_finite_64),
        ElementType::Float16 => bytes.chunks(PIECE).all(is_finite_16),
        ElementType::Bfloat16 => bytes.chunks(PIECE).all(is_finite_brain),
        ElementType::Int32 | ElementType::Uint32 | ElementType::Int64 | ElementType::Uint64 => true,
    }
}

/// Bytes per block of the search: few enough to find a bad element early, and enough to make the cost per block
/// negligible.
const PIECE: usize = 64 * 1024;

/// The bits without the sign, as an integer, grow with the number, and infinity and NaN have the largest. So one
/// maximum over the block, without a branch per element, decides.
macro_rules! finite {
    ($name:ident, $bits:ty, $infinity:expr) => {
        #[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
        fn $name(bytes: &[u8]) -> bool {
            let elements: &[[u8; size_of::<$bits>()]] = bytes.as_chunks().0;
            let largest = elements
                .iter()
                .fold(0, |largest: $bits, element| largest.max(<$bits>::from_le_bytes(*element) & (<$bits>::MAX >> 1)));
            largest < $infinity
        }
    };
}

finite!(is_finite_32, u32, 0x7f80_0000);
finite!(is_finite_64, u64, 0x7ff0_0000_0000_0000);
finite!(is_finite_16, u16, 0x7c00);
finite!(is_finite_brain, u16, 0x7f80);

/// One element as a binary64; none for integers.
///
/// # Panics
/// When there is no such element.
#[must_use]
pub fn real_at(element_type: ElementType, bytes: &[u8], index: usize) -> Option<f64> {
    match element_type {
        ElementType::Float32 => Some(f32::from_le_bytes(array_at(bytes, index)).into()),
        ElementType::Float64 => Some(f64::from_le_bytes(array_at(bytes, index))),
        ElementType::Float16 => Some(f16::from_le_bytes(array_at(bytes, index)).into()),
        ElementType::Bfloat16 => Some(bf16::from_le_bytes(array_at(bytes, index)).into()),
        ElementType::Int32 | ElementType::Uint32 | ElementType::Int64 | ElementType::Uint64 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every type, with a bad element at every index of a short gradient and at the ends of long ones, and with
    /// the largest finite numbers.
    #[test]
    fn the_first_nonfinite_element_is_the_one_that_the_plain_form_finds() {
        let bad = [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        let good = [0.0, -0.0, 1.5, -6e4, 5e-8];
        for element_type in ElementType::ALL {
            let width = usize::try_from(element_type.bytes()).expect("an element has few bytes");
            let encode = |value: f64| -> Vec<u8> {
                match element_type {
                    ElementType::Float32 => narrow(value).to_le_bytes().to_vec(),
                    ElementType::Float64 => value.to_le_bytes().to_vec(),
                    ElementType::Float16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
                    ElementType::Bfloat16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
                    _ => vec![0xff; width],
                }
            };
            for elements in [1_usize, 7, 64, 129, 40_000] {
                let clean: Vec<u8> = (0..elements).flat_map(|index| encode(good[index % good.len()])).collect();
                assert_eq!(first_nonfinite(element_type, &clean), None, "{element_type}: {elements}");
                let places = (0..elements).filter(|place| elements < 200 || *place < 3 || elements - 3 < *place);
                for (place, bad) in places.flat_map(|place| bad.map(|bad| (place, bad))) {
                    let mut spoiled = clean.clone();
                    spoiled[place * width..][..width].copy_from_slice(&encode(bad));
                    let expected = element_type.is_float().then_some(place);
                    assert_eq!(first_nonfinite(element_type, &spoiled), expected, "{element_type}: {bad}");
                    assert_eq!(one_by_one(element_type, &spoiled), expected, "{element_type}: {bad}, one by one");
                }
            }
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the tests' numbers are those of binary32")]
    fn narrow(value: f64) -> f32 {
        value as f32
    }
}

//! Conversion of wide numbers to half precision by way of binary32, rounded to odd, so that rounding twice equals
//! rounding once.
//!
//! A number exact in binary32 stays. Any other becomes the neighbour whose last bit is one. That bit marks the
//! discarded remainder: binary32 has more than two bits beyond binary16 and bfloat16, so a tie of theirs is
//! distinguished from a number beside it (S. Boldo and G. Melquiond, "When double rounding is odd", 2005). A number
//! beyond the largest becomes the largest, which half precision rounds to infinity.

use half::{bf16, f16};

use crate::dtype::{ElementType, Half};

/// A binary64, rounded to odd.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "what it loses is put in the last bit")]
pub fn round_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = f64::from(nearest);
    if back == value || value.is_nan() {
        return nearest;
    }
    odd(nearest, value.abs() < back.abs())
}

/// A whole number, rounded to odd.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "a binary32 that a whole number rounds to is whole, and in bounds")]
pub fn round_integer_to_odd(value: i128) -> f32 {
    let nearest = value as f32;
    let back = nearest as i128;
    if back == value {
        return nearest;
    }
    odd(nearest, value.unsigned_abs() < back.unsigned_abs())
}

/// The bytes of a number in half precision, rounded once.
///
/// # Panics
///
/// When the type is not half precision.
#[must_use]
pub fn half_bytes(value: f64, element_type: ElementType) -> [u8; 2] {
    match element_type {
        ElementType::Float16 => f16::from_f32(round_to_odd(value)).to_le_bytes(),
        ElementType::Bfloat16 => bf16::from_f32(round_to_odd(value)).to_le_bytes(),
        other => panic!("a half of {other}; expected float16 or bfloat16"),
    }
}

/// Converts binary32 to half precision: each element is rounded to nearest even. NaN stays NaN, and overflow becomes
/// infinite.
///
/// # Panics
///
/// When `into` is not half as long as `value`.
pub fn narrow_to_half(half: Half, value: &[u8], into: &mut [u8]) {
    let (value, into) = (value.as_chunks::<4>().0, into.as_chunks_mut::<2>().0);
    assert_eq!(value.len(), into.len(), "two bytes for every element");
    for (into, value) in into.iter_mut().zip(value) {
        let value = f32::from_le_bytes(*value);
        *into = match half {
            Half::Float16 => f16::from_f32(value).to_le_bytes(),
            Half::Bfloat16 => bf16::from_f32(value).to_le_bytes(),
        };
    }
}

/// The neighbour whose last bit is one, of a number that is not exact; `is_above` when its magnitude is too large.
fn odd(nearest: f32, is_above: bool) -> f32 {
    let below = nearest.to_bits() - u32::from(is_above);
    f32::from_bits(below | 1)
}

#[cfg(test)]
mod tests {
    use super::{half_bytes, narrow_to_half, round_integer_to_odd, round_to_odd};
    use crate::dtype::Half;
    use crate::prng::Prng;
    use half::{bf16, f16};

    /// The half nearest to a number, found by comparing all of them; of two equally near the even one.
    fn nearest(value: f64, all: impl Iterator<Item = (u16, f64)>, beyond: f64) -> u16 {
        let distance = |one: f64| if one.is_infinite() { (beyond - value.abs()).max(0.0) } else { (one - value).abs() };
        let signed = all.filter(|(_, one)| one.is_sign_negative() == value.is_sign_negative() && !one.is_nan());
        let best = signed.min_by(|(one, x), (other, y)| {
            let order = distance(*x).partial_cmp(&distance(*y)).expect("no number is missing");
            order.then((one & 1).cmp(&(other & 1)))
        });
        best.expect("there are halves").0
    }

    fn check(value: f64) {
        let narrow = f16::from_f32(round_to_odd(value)).to_bits();
        let all = (0..=u16::MAX).map(|bits| (bits, f64::from(f16::from_bits(bits))));
        assert_eq!(narrow, nearest(value, all, 65536.0), "binary16 of {value:e}");
        let brain = bf16::from_f32(round_to_odd(value)).to_bits();
        let all = (0..=u16::MAX).map(|bits| (bits, f64::from(bf16::from_bits(bits))));
        assert_eq!(brain, nearest(value, all, 2.0_f64.powi(128)), "bfloat16 of {value:e}");
    }

    #[test]
    fn half_precision_rounds_to_the_nearest_value_and_ties_to_even() {
        let power = |exponent: i32| 2.0_f64.powi(exponent);
        let beside = [
            1.0 + power(-11) + power(-40),
            1.0 + power(-11),
            1.0 + power(-10) + power(-11) - power(-30),
            1.0 + power(-8) + power(-21),
            1.0 + power(-8) + power(-40),
            1.0 + power(-7) + power(-8) - power(-50),
            65_519.999_999_999,
            65520.0,
            power(-25) + power(-60),
            power(-25),
            power(-24) * 1.5 - power(-70),
            power(-134) + power(-170),
            power(-133) * 1.5,
            1e-300,
            3.4e38,
            3.5e38,
            0.0,
        ];
        beside.iter().flat_map(|value| [*value, -*value]).for_each(check);
        let mut prng = Prng(5);
        for _ in 0..64 {
            let exponent = i32::try_from(prng.below(60)).expect("it is small") - 35;
            check((1.0 + (prng.next() >> 12) as f64 * power(-52)) * power(exponent));
        }
    }

    #[test]
    fn a_value_is_narrowed_element_by_element() {
        let numbers = [1.0, -0.0, 65520.0, 3.4e38, f32::MIN_POSITIVE / 3.0, f32::NEG_INFINITY, 1.000_488_3, -2.1e-7];
        let value: Vec<u8> = numbers.iter().flat_map(|number: &f32| number.to_le_bytes()).collect();
        for half in Half::ALL {
            let mut found = vec![0; value.len() / 2];
            narrow_to_half(half, &value, &mut found);
            let one = |number: &f32| half_bytes(f64::from(*number), half.element_type());
            let expected: Vec<u8> = numbers.iter().flat_map(one).collect();
            assert_eq!(found, expected, "{half}");
            narrow_to_half(half, &f32::NAN.to_le_bytes(), &mut found[..2]);
            let back =
                [f16::from_le_bytes([found[0], found[1]]).is_nan(), bf16::from_le_bytes([found[0], found[1]]).is_nan()];
            assert!(back[usize::from(half == Half::Bfloat16)], "{half}");
        }
    }

    #[test]
    fn inexact_values_round_to_odd_and_exact_values_stay() {
        assert_eq!(round_to_odd(1.5), 1.5);
        assert_eq!(round_to_odd(-0.0).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(round_to_odd(f64::INFINITY), f32::INFINITY);
        assert!(round_to_odd(f64::NAN).is_nan());
        assert_eq!(round_to_odd(1e300), f32::MAX);
        assert_eq!(round_to_odd(-1e-300), -f32::from_bits(1));
        assert_eq!(round_integer_to_odd(1 << 60), 2.0_f32.powi(60));
        assert_eq!(round_integer_to_odd(-((1 << 60) + 1)).to_bits() & 1, 1);
        // Rounding to binary64 first would make a tie, which then rounds to even.
        let above = (1_i128 << 63) + (1 << 55) + 1;
        assert_eq!(bf16::from_f32(round_integer_to_odd(above)).to_f64(), ((1_u128 << 63) + (1 << 56)) as f64);
    }
}

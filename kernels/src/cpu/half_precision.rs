//! Conversion of values to half precision.
//!
//! Integer arithmetic without a branch, so that it becomes vector code on every target: `half`'s own conversion tests
//! the processor's features at every call, and the instruction for bfloat16 treats denormals as zero. The bits are
//! those of [`pserver_core::narrowing::narrow_to_half`], NaN included.

use super::element::{ElementBytes, StoredAs};

/// The bits of infinity in binary32 without its sign; larger ones are NaN.
const INFINITY: u32 = 0x7f80_0000;

/// `into` = `value`, each element by `round`.
#[inline(always)]
pub(super) fn into_whole(value: &[u8], into: &mut [u8], round: impl Fn(u32) -> u16) {
    let value: &[ElementBytes<u32>] = <u32 as StoredAs<u32>>::view(value);
    for (into, &value) in into.as_chunks_mut::<2>().0.iter_mut().zip(value) {
        *into = round(u32::from_le_bytes(value)).to_le_bytes();
    }
}

/// Bits of binary32 as bits of bfloat16, which is its upper half: half of the lower one is added, less the last bit of
/// the upper one when that is even, and the carry is the rounding.
#[inline(always)]
pub(super) fn brain(bits: u32) -> u16 {
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let missing = bits | 0x0040_0000;
    upper(if INFINITY < bits & 0x7fff_ffff { missing } else { rounded })
}

/// Bits of binary32 as bits of binary16.
#[inline(always)]
pub(super) fn half(bits: u32) -> u16 {
    /// The magnitude from which on a half is normal, `2^-14`, and from which on it is infinite at any rate, `2^16`.
    const NORMAL: u32 = (127 - 14) << 23;
    const BEYOND: u32 = (127 + 16) << 23;
    /// A number whose last bit has the weight of the smallest binary16, `2^-24`: adding it rounds there.
    const SMALL: f32 = 0.5;
    let magnitude = bits & 0x7fff_ffff;
    // The exponent's bias becomes that of binary16; rounding is as above, and its carry may reach the exponent.
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0fff + (magnitude >> 13 & 1)) >> 13;
    let denormal = (f32::from_bits(magnitude) + SMALL).to_bits().wrapping_sub(SMALL.to_bits());
    let missing = 0x7e00 | magnitude >> 13 & 0x03ff;
    let finite = if magnitude < NORMAL { denormal } else { normal };
    let infinite = if INFINITY < magnitude { missing } else { 0x7c00 };
    let rounded = if magnitude < BEYOND { finite } else { infinite };
    lower(bits >> 16 & 0x8000 | rounded)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower bits are the half")]
fn lower(bits: u32) -> u16 {
    bits as u16
}

#[inline(always)]
fn upper(bits: u32) -> u16 {
    lower(bits >> 16)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use pserver_core::dtype::Half;
    use pserver_core::narrowing;

    use super::{brain, half};

    fn check(bits: u32) {
        let value = f32::from_bits(bits);
        assert_eq!(half(bits), f16::from_f32(value).to_bits(), "binary16 of {value:e}, {bits:#010x}");
        assert_eq!(brain(bits), bf16::from_f32(value).to_bits(), "bfloat16 of {value:e}, {bits:#010x}");
    }

    /// Every half-precision number, its neighbours, the midpoints, the values beside those, and NaN.
    #[test]
    fn a_half_has_the_bits_of_the_plain_form() {
        for upper in 0..=u16::MAX {
            let exact = [f16::from_bits(upper).to_f32().to_bits(), bf16::from_bits(upper).to_f32().to_bits()];
            for bits in exact {
                for beside in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                    check(bits.wrapping_add(beside));
                    check(bits.wrapping_sub(beside));
                }
            }
        }
    }

    #[test]
    fn a_value_of_any_length_and_alignment_is_narrowed_to_half_precision() {
        let numbers: Vec<u8> = (0..4096_u32).flat_map(|index| index.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        for half in Half::ALL {
            for (start, elements) in (0..70).map(|count| (count % 5, count)).chain([(3, 4000)]) {
                let value = &numbers[start * 4..][..elements * 4];
                let (mut found, mut expected) = (vec![0xa5; elements * 2 + 3], vec![0; elements * 2]);
                super::super::narrow_to_half(half, value, &mut found[1..=elements * 2]);
                narrowing::narrow_to_half(half, value, &mut expected);
                assert_eq!(found[1..=elements * 2], expected, "{half}: {elements} elements");
                assert!([found[0], found[elements * 2 + 1], found[elements * 2 + 2]] == [0xa5; 3], "its neighbours");
            }
        }
    }
}

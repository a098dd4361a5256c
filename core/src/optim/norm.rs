//! Sums and norms of a whole parameter, computed from its chunks.

use crate::dtype::ElementType;
use crate::limits::CHUNK_BYTES_MIN;
use crate::rule::ssa::ReductionKind;

use super::element::OptimizerReal;

/// The bytes of one block of [`square_sums`]: 1,024 elements of f32, 512 of f64. The smallest chunk, so that every
/// chunk size, being a power of two, is a whole number of blocks whatever the element type.
pub const SQUARE_BLOCK_BYTES: u32 = CHUNK_BYTES_MIN;

/// The sum of the squares of the elements: the [`square_sums`] added left to right, from zero.
///
/// For a parameter in one piece this is the square of its L2 norm. For a parameter in chunks the sum of these sums
/// would depend on the chunk size; use [`square_sums`] instead.
///
/// # Panics
///
/// When the type is not f32 or f64, or the bytes are not whole elements.
#[must_use]
pub fn square_sum(element_type: ElementType, values: &[u8]) -> f64 {
    let mut total = 0.0;
    square_sums(element_type, values, &mut |block| total += block);
    total
}

/// The sum of the elements, as a rule's `sum` computes it: blocks of [`SQUARE_BLOCK_BYTES`], each summed left to right
/// in binary64, and their sums.
///
/// # Panics
///
/// When the type is not f32 or f64, or the bytes are not whole elements.
#[must_use]
pub fn element_sum(element_type: ElementType, values: &[u8]) -> f64 {
    let mut total = 0.0;
    block_sums(ReductionKind::Sum, element_type, values, &mut |block| total += block);
    total
}

/// Passes to `out` the sum of squares of every block of [`SQUARE_BLOCK_BYTES`], counted from the slice's start, each
/// summed left to right in binary64; the last block may be short.
///
/// Calls on the chunks of a parameter, in order, with the same `out` that adds to one total from zero, give the same
/// bits as one call on the whole parameter, for every chunk size: no block lies in two chunks, and the order of blocks
/// is the same. So a clipped update does not depend on the chunk size.
///
/// # Panics
///
/// When the type is not f32 or f64, or the bytes are not whole elements.
pub fn square_sums(element_type: ElementType, values: &[u8], out: &mut impl FnMut(f64)) {
    block_sums(ReductionKind::SquareSum, element_type, values, out);
}

/// As [`square_sums`], of the elements or of their squares.
///
/// # Panics
///
/// As [`square_sums`].
pub(super) fn block_sums(kind: ReductionKind, element_type: ElementType, values: &[u8], out: &mut impl FnMut(f64)) {
    match element_type {
        ElementType::Float32 => blocks::<f32>(kind, values, out),
        ElementType::Float64 => blocks::<f64>(kind, values, out),
        other => panic!("elements of type {other} have no norm; expected float32 or float64"),
    }
}

fn blocks<E: OptimizerReal>(kind: ReductionKind, values: &[u8], out: &mut impl FnMut(f64)) {
    assert!(values.len().is_multiple_of(E::BYTES), "{} bytes are not whole elements", values.len());
    match kind {
        ReductionKind::Sum => sums::<E>(values, |element| element, out),
        ReductionKind::SquareSum => sums::<E>(values, |element| element * element, out),
        ReductionKind::Total => unreachable!("trainers make a total"),
    }
}

/// Blocks that are summed side by side: an addition waits for the one before it in its block, and for no other.
const BLOCKS_AT_ONCE: usize = 8;

fn sums<E: OptimizerReal>(values: &[u8], addend: impl Fn(f64) -> f64, out: &mut impl FnMut(f64)) {
    const BLOCK: usize = SQUARE_BLOCK_BYTES as usize;
    let (groups, rest) = values.as_chunks::<{ BLOCKS_AT_ONCE * BLOCK }>();
    for group in groups {
        let blocks: [&[u8]; BLOCKS_AT_ONCE] = std::array::from_fn(|block| &group[block * BLOCK..][..BLOCK]);
        let mut totals = [0.0; BLOCKS_AT_ONCE];
        for at in 0..BLOCK / E::BYTES {
            for (total, block) in totals.iter_mut().zip(blocks) {
                *total += addend(E::read(block, at).widen());
            }
        }
        totals.into_iter().for_each(&mut *out);
    }
    for block in rest.chunks(BLOCK) {
        let elements = block.chunks_exact(E::BYTES).map(|element| addend(E::read(element, 0).widen()));
        out(elements.fold(0.0, |total, element| total + element));
    }
}

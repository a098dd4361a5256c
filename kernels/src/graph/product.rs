//! Products of matrices.

use ndarray::{ArrayView2, LinalgScalar};

/// The product of two matrices, the last dimension fastest. A transposed one is read with its dimensions exchanged.
///
/// # Panics
/// When a matrix has not the elements that its dimensions say, or the inner dimensions differ: a checked graph has
/// neither.
pub(super) fn product<T: LinalgScalar>(
    left: &[T],
    left_shape: (usize, usize),
    transpose_left: bool,
    right: &[T],
    right_shape: (usize, usize),
    transpose_right: bool,
) -> Vec<T> {
    let left = view(left, left_shape, transpose_left);
    let right = view(right, right_shape, transpose_right);
    let product = left.dot(&right);
    // A product with one row or column may lie in memory the other way round.
    if product.is_standard_layout() { product.into_raw_vec_and_offset().0 } else { product.iter().copied().collect() }
}

fn view<T>(values: &[T], shape: (usize, usize), transpose: bool) -> ArrayView2<'_, T> {
    let view = ArrayView2::from_shape(shape, values).expect("a checked graph's matrix has its shape");
    if transpose { view.reversed_axes() } else { view }
}

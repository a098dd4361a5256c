//! Products of matrices.

use ndarray::{ArrayView2, LinalgScalar};

/// A matrix, the last dimension fastest.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, T> {
    pub(super) values: &'a [T],
    pub(super) shape: (usize, usize),
    /// Whether it is read with its dimensions exchanged.
    pub(super) is_transposed: bool,
}

/// The product of two matrices.
///
/// # Panics
/// When a matrix has not the elements that its dimensions say, or the inner dimensions differ: a checked graph has
/// neither.
pub(super) fn product<T: LinalgScalar>(left: Matrix<'_, T>, right: Matrix<'_, T>) -> Vec<T> {
    let product = left.view().dot(&right.view());
    // A product with one row or column may lie in memory the other way round.
    if product.is_standard_layout() { product.into_raw_vec_and_offset().0 } else { product.iter().copied().collect() }
}

impl<'a, T> Matrix<'a, T> {
    fn view(self) -> ArrayView2<'a, T> {
        let view = ArrayView2::from_shape(self.shape, self.values).expect("a checked graph's matrix has its shape");
        if self.is_transposed { view.reversed_axes() } else { view }
    }
}

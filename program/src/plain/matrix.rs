//! Products of matrices.

use crate::value::Tensor;

use super::pointwise::index;
use super::real::TensorReal;

/// The product of two matrices; each element is added up along the inner dimension from its first to its last.
pub(super) fn product<R: TensorReal>(
    left: &Tensor,
    right: &Tensor,
    transpose_left: bool,
    transpose_right: bool,
) -> Tensor {
    let (a, b) = (R::slice(left.elements()), R::slice(right.elements()));
    let (left_rows, left_columns) = (index(left.shape()[0]), index(left.shape()[1]));
    let (rows, inner) = if transpose_left { (left_columns, left_rows) } else { (left_rows, left_columns) };
    let right_columns = index(right.shape()[1]);
    let columns = if transpose_right { index(right.shape()[0]) } else { right_columns };
    let mut product = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let mut sum = R::ZERO;
            for at in 0..inner {
                let a = a[if transpose_left { at * left_columns + row } else { row * left_columns + at }];
                let b = b[if transpose_right { column * right_columns + at } else { at * right_columns + column }];
                sum = sum + a * b;
            }
            product.push(sum);
        }
    }
    Tensor::new([rows as u64, columns as u64], R::wrap(product))
}

/// Lengths before, along and after a dimension.
pub(super) fn around(shape: &[u64], axis: usize) -> (usize, usize, usize) {
    let product = |lengths: &[u64]| lengths.iter().map(|length| index(*length)).product();
    (product(&shape[..axis]), index(shape[axis]), product(&shape[axis + 1..]))
}

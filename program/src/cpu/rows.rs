//! A row beside every row of a larger tensor.

use std::ops::{Add, Mul};

/// An operation on two elements.
#[derive(Clone, Copy, Debug)]
pub(super) enum PairOp {
    Add,
    Mul,
}

/// Every row of the whole with the one row, which is not empty. The bits are those of the plain form.
pub(super) fn repeating<T: Copy + Add<Output = T> + Mul<Output = T>>(whole: &[T], row: &[T], pair: PairOp) -> Vec<T> {
    match pair {
        PairOp::Add => each(whole, row, |x, y| x + y),
        PairOp::Mul => each(whole, row, |x, y| x * y),
    }
}

fn each<T: Copy>(whole: &[T], row: &[T], f: impl Fn(T, T) -> T) -> Vec<T> {
    let mut values = Vec::with_capacity(whole.len());
    for rows in whole.chunks_exact(row.len()) {
        values.extend(rows.iter().zip(row).map(|(x, y)| f(*x, *y)));
    }
    values
}

/// The sum of all rows, the first before the last. The bits are those of the plain form.
pub(super) fn sum<T: Copy + Default + Add<Output = T>>(whole: &[T], width: usize) -> Vec<T> {
    let mut sums = vec![T::default(); width];
    for row in whole.chunks_exact(width) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum = *sum + *value;
        }
    }
    sums
}

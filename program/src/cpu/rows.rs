//! A row beside every row of a larger tensor.

use std::ops::{Add, Div, Mul, Sub};

use crate::OpKind;

/// An operation on two elements.
#[derive(Clone, Copy, Debug)]
pub(super) enum PairOp {
    Add,
    Mul,
    Sub,
    Div,
}

impl PairOp {
    /// That of an op; none for an op that runs the reference loop.
    pub(super) const fn of(kind: &OpKind) -> Option<Self> {
        match kind {
            OpKind::Add => Some(Self::Add),
            OpKind::Mul => Some(Self::Mul),
            OpKind::Sub => Some(Self::Sub),
            OpKind::Div => Some(Self::Div),
            _ => None,
        }
    }
}

/// Two tensors, of which the smaller is a row, not empty, beside every row of the larger. The bits are those of the
/// plain form.
pub(super) fn repeating<T>(x: &[T], y: &[T], pair: PairOp) -> Vec<T>
where
    T: Copy + Add<Output = T> + Mul<Output = T> + Sub<Output = T> + Div<Output = T>,
{
    match pair {
        PairOp::Add => each(x, y, |x, y| x + y),
        PairOp::Mul => each(x, y, |x, y| x * y),
        PairOp::Sub => each(x, y, |x, y| x - y),
        PairOp::Div => each(x, y, |x, y| x / y),
    }
}

fn each<T: Copy>(x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> Vec<T> {
    let mut values = Vec::with_capacity(x.len().max(y.len()));
    if x.len() >= y.len() {
        for rows in x.chunks_exact(y.len()) {
            values.extend(rows.iter().zip(y).map(|(x, y)| f(*x, *y)));
        }
    } else {
        for rows in y.chunks_exact(x.len()) {
            values.extend(x.iter().zip(rows).map(|(x, y)| f(*x, *y)));
        }
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

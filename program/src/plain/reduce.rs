//! Sums along dimensions, and repetitions along them.

use crate::value::Tensor;

use super::pointwise::{self, each_place, index};
use super::real::TensorReal;

/// Sums along dimensions, from the first element to the last.
pub(super) fn sum<R: TensorReal>(x: &Tensor, axes: &[u32], keep: bool) -> Tensor {
    let ones = ones(x.shape(), axes);
    let sums = match run(x.shape(), axes) {
        Some(around) => R::wrap(sum_run(R::slice(x.elements()), around)),
        None => pointwise::sum_to::<R>(x, &ones).elements().clone(),
    };
    let is_kept = |axis: usize| keep || !is_reduced(axes, axis);
    let shape = ones.into_iter().enumerate().filter(|(axis, _)| is_kept(*axis)).map(|(_, length)| length);
    Tensor::new(shape.collect::<Vec<_>>(), sums)
}

/// Repeats along dimensions that `x` lacks, or has as 1.
pub(super) fn repeat<R: TensorReal>(x: &Tensor, like: &[u64], axes: &[u32]) -> Tensor {
    let values = R::slice(x.elements());
    let mut repeated = Vec::with_capacity(like.iter().map(|length| index(*length)).product());
    match run(like, axes) {
        Some((outer, length, inner)) => {
            for before in 0..outer {
                (0..length).for_each(|_| repeated.extend_from_slice(&values[before * inner..][..inner]));
            }
        }
        None => each_place(like, [&ones(like, axes)], |_, [place]| repeated.push(values[place])),
    }
    Tensor::new(like, R::wrap(repeated))
}

/// The number of elements in each sum.
pub(super) fn count(shape: &[u64], axes: &[u32]) -> usize {
    let lengths = shape.iter().enumerate().filter(|(axis, _)| is_reduced(axes, *axis));
    lengths.map(|(_, length)| index(*length)).product()
}

/// None named are all.
fn is_reduced(axes: &[u32], axis: usize) -> bool {
    axes.is_empty() || axes.iter().any(|named| *named as usize == axis)
}

/// The shape with 1 where it is reduced.
fn ones(shape: &[u64], axes: &[u32]) -> Vec<u64> {
    let lengths = shape.iter().enumerate();
    lengths.map(|(axis, length)| if is_reduced(axes, axis) { 1 } else { *length }).collect()
}

/// The lengths before, along and after the reduced dimensions, where these are next to each other.
fn run(shape: &[u64], axes: &[u32]) -> Option<(usize, usize, usize)> {
    let reduced: Vec<usize> = (0..shape.len()).filter(|axis| is_reduced(axes, *axis)).collect();
    let (first, last) = (reduced.first().copied().unwrap_or(0), reduced.last().map_or(0, |last| last + 1));
    let product = |lengths: &[u64]| lengths.iter().map(|length| index(*length)).product();
    let is_run = last - first == reduced.len();
    is_run.then(|| (product(&shape[..first]), product(&shape[first..last]), product(&shape[last..])))
}

fn sum_run<R: TensorReal>(values: &[R], (outer, length, inner): (usize, usize, usize)) -> Vec<R> {
    let mut sums = vec![R::ZERO; outer * inner];
    for before in 0..outer {
        for along in 0..length {
            for after in 0..inner {
                let sum = &mut sums[before * inner + after];
                *sum = *sum + values[(before * length + along) * inner + after];
            }
        }
    }
    sums
}

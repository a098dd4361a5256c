//! Ops that select elements: by place, by index, or at random.

use std::ops::Range;

use crate::value::{Tensor, VariableValue};
use pserver_core::error::Failure;
use pserver_core::prng::{Prng, mix};

use super::loss::integers;
use super::matrix::around;
use super::pointwise::index;
use super::real::TensorReal;

/// A range of a dimension.
pub(super) fn slice(x: &Tensor, axis: usize, range: Range<u64>) -> Tensor {
    let mut shape = x.shape().to_vec();
    shape[axis] = range.end - range.start;
    let mut slice = Tensor::zeros(x.elements().element_type(), &shape);
    let places = slice_places(x, axis, range);
    for (from, into) in places.zip(1..) {
        let length = from.len();
        slice.bytes_mut()[(into - 1) * length..into * length].copy_from_slice(&x.bytes()[from]);
    }
    slice
}

/// Zero but for a range of a dimension.
pub(super) fn slice_gradient(x: &Tensor, slope: &Tensor, axis: usize, start: u64) -> Tensor {
    let mut gradient = Tensor::zeros(x.elements().element_type(), x.shape());
    let places = slice_places(x, axis, start..start + slope.shape()[axis]);
    for (into, from) in places.zip(1..) {
        let length = into.len();
        gradient.bytes_mut()[into].copy_from_slice(&slope.bytes()[(from - 1) * length..from * length]);
    }
    gradient
}

/// The bytes of a tensor that belong to a range of a dimension, in order and in equal pieces.
fn slice_places(x: &Tensor, axis: usize, range: Range<u64>) -> impl Iterator<Item = Range<usize>> + use<> {
    let (outer, length, inner) = around(x.shape(), axis);
    let along = inner * index(x.elements().element_type().bytes());
    let (start, end) = (index(range.start) * along, index(range.end) * along);
    (0..outer).map(move |before| before * length * along).map(move |begin| begin + start..begin + end)
}

/// Pieces of dimension 0 by number.
pub(super) fn gather(x: &Tensor, indices: &Tensor) -> Result<Tensor, Failure> {
    let mut shape = indices.shape().to_vec();
    shape.extend_from_slice(&x.shape()[1..]);
    let mut pieces = Tensor::zeros(x.elements().element_type(), &shape);
    let (_, _, inner) = around(x.shape(), 0);
    let length = inner * index(x.elements().element_type().bytes());
    let found = checked(x.shape()[0], indices)?;
    for (piece, from) in pieces.bytes_mut().chunks_exact_mut(length.max(1)).zip(found) {
        piece.copy_from_slice(&x.bytes()[from * length..][..length]);
    }
    Ok(pieces)
}

/// Pieces added to where they come from.
pub(super) fn gather_gradient<R: TensorReal>(x: &[u64], indices: &Tensor, slope: &Tensor) -> Result<Tensor, Failure> {
    let (_, height, inner) = around(x, 0);
    let mut gradient = vec![R::ZERO; height * inner];
    let pieces = R::slice(slope.elements()).chunks_exact(inner.max(1));
    for (piece, into) in pieces.zip(checked(x[0], indices)?) {
        for (sum, slope) in gradient[into * inner..][..inner].iter_mut().zip(piece) {
            *sum = *sum + *slope;
        }
    }
    Ok(Tensor::new(x, R::wrap(gradient)))
}

/// Indices that are all below a length.
fn checked(length: u64, indices: &Tensor) -> Result<Vec<usize>, Failure> {
    let check = |(place, found): (usize, &i64)| match u64::try_from(*found) {
        Ok(below) if below < length => Ok(index(below)),
        _ => Err(Failure::call(format!("index {found} at place {place}; expected a number from 0, below {length}"))),
    };
    integers(indices).iter().enumerate().map(check).collect()
}

/// Zero at random, else larger by as much as keeps the mean.
pub(super) fn dropout<R: TensorReal>(inputs: &[&VariableValue], rate: f64, seed: u64) -> Tensor {
    let x = inputs[0].tensor();
    let scalar = |input: &&VariableValue| integers(input.tensor())[0];
    let Ok(step) = u64::try_from(scalar(&inputs[1])) else { return x.clone() };
    let first = inputs.get(2).map_or(0, scalar);
    let row_length: usize = x.shape().iter().skip(1).map(|length| index(*length)).product();
    let kept = R::ONE / R::nearest(1.0 - rate);
    let mut values = Vec::with_capacity(x.elements().len());
    for (row, number) in R::slice(x.elements()).chunks(row_length.max(1)).zip(0_u64..) {
        let mut prng = Prng(mix(mix(mix(seed) ^ step) ^ first.cast_unsigned().wrapping_add(number)));
        values.extend(row.iter().map(|x| {
            // 53 bits, which a binary64 has, in [0, 1).
            let number = (prng.next() >> 11) as f64 / (1_u64 << 53) as f64;
            if number < rate { R::ZERO } else { *x * kept }
        }));
    }
    Tensor::new(x.shape(), R::wrap(values))
}

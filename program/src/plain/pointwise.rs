//! Element by element.

use crate::value::{Tensor, VariableValue};

use super::real::TensorReal;

pub(super) fn map<R: TensorReal>(x: &Tensor, f: impl Fn(R) -> R) -> Tensor {
    Tensor::new(x.shape(), R::wrap(R::slice(x.elements()).iter().map(|x| f(*x)).collect()))
}

/// Two tensors of one shape.
pub(super) fn zip<R: TensorReal>(x: &Tensor, y: &Tensor, f: impl Fn(R, R) -> R) -> Tensor {
    let pairs = R::slice(x.elements()).iter().zip(R::slice(y.elements()));
    Tensor::new(x.shape(), R::wrap(pairs.map(|(x, y)| f(*x, *y)).collect()))
}

/// Two tensors, the second repeating where it is smaller.
pub(super) fn repeating<R: TensorReal>(x: &Tensor, y: &Tensor, f: impl Fn(R, R) -> R) -> Tensor {
    let (whole, small) = (R::slice(x.elements()), R::slice(y.elements()));
    let mut values = Vec::with_capacity(whole.len());
    each_place(x.shape(), y.shape(), |index, place| values.push(f(whole[index], small[place])));
    Tensor::new(x.shape(), R::wrap(values))
}

/// All tensors, added from left to right.
pub(super) fn sum<R: TensorReal>(inputs: &[&VariableValue]) -> Tensor {
    let mut total = R::slice(inputs[0].tensor().elements()).to_vec();
    for input in &inputs[1..] {
        for (total, value) in total.iter_mut().zip(R::slice(input.tensor().elements())) {
            *total = *total + *value;
        }
    }
    Tensor::new(inputs[0].tensor().shape(), R::wrap(total))
}

/// The sum over the dimensions that broadcast a smaller shape.
pub(super) fn sum_to<R: TensorReal>(x: &Tensor, like: &[u64]) -> Tensor {
    let whole = R::slice(x.elements());
    let mut sums = vec![R::ZERO; like.iter().map(|length| index(*length)).product()];
    each_place(x.shape(), like, |index, place| sums[place] = sums[place] + whole[index]);
    Tensor::new(like, R::wrap(sums))
}

/// Walks a shape from its first element to its last, with the place in a smaller one that repeats.
fn each_place(shape: &[u64], small: &[u64], mut visit: impl FnMut(usize, usize)) {
    let mut strides = vec![0; shape.len()];
    let mut stride = 1;
    for (axis, length) in (shape.len() - small.len()..shape.len()).zip(small).rev() {
        strides[axis] = if *length == 1 { 0 } else { stride };
        stride *= index(*length);
    }
    let count: usize = shape.iter().map(|length| index(*length)).product();
    let mut position = vec![0_u64; shape.len()];
    let mut place = 0;
    for element in 0..count {
        visit(element, place);
        for axis in (0..shape.len()).rev() {
            position[axis] += 1;
            place += strides[axis];
            if position[axis] < shape[axis] {
                break;
            }
            place -= strides[axis] * index(position[axis]);
            position[axis] = 0;
        }
    }
}

/// A dimension of a tensor in memory.
pub(super) fn index(length: u64) -> usize {
    usize::try_from(length).expect("a tensor in memory has dimensions that memory has")
}

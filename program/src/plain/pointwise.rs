//! Element by element.

use crate::op::OpKind;
use crate::value::{Tensor, VariableValue};

use super::real::TensorReal;

pub(super) fn map<R: TensorReal>(x: &Tensor, f: impl Fn(R) -> R) -> Tensor {
    Tensor::new(x.shape(), R::wrap(R::slice(x.elements()).iter().map(|x| f(*x)).collect()))
}

/// Functions of one or two operands; none for another kind.
pub(super) fn outputs<R: TensorReal>(kind: &OpKind, inputs: &[&VariableValue]) -> Option<Tensor> {
    let x = inputs[0].tensor();
    let flag = |is_set: bool| if is_set { R::ONE } else { R::ZERO };
    let pair = |f: fn(R, R) -> R| broadcast::<R>(x, inputs[1].tensor(), f);
    Some(match kind {
        OpKind::Add => broadcast::<R>(x, inputs[1].tensor(), |a, b| a + b),
        OpKind::Mul => broadcast::<R>(x, inputs[1].tensor(), |a, b| a * b),
        OpKind::Sub => broadcast::<R>(x, inputs[1].tensor(), |a, b| a - b),
        OpKind::Div => broadcast::<R>(x, inputs[1].tensor(), |a, b| a / b),
        OpKind::Max => pair(|a, b| chosen(a, b, a > b)),
        OpKind::Min => pair(|a, b| chosen(a, b, a < b)),
        OpKind::Pow => pair(TensorReal::powf),
        OpKind::Greater => broadcast::<R>(x, inputs[1].tensor(), |a, b| flag(a > b)),
        OpKind::PowGradient { exponent } => pow_gradient::<R>(inputs, *exponent),
        OpKind::Sqrt => map::<R>(x, TensorReal::sqrt),
        OpKind::Exp => map::<R>(x, TensorReal::exp),
        OpKind::Log => map::<R>(x, TensorReal::ln),
        OpKind::Abs => map::<R>(x, TensorReal::abs),
        OpKind::Sign => map::<R>(x, |x| if x.is_nan() { x } else { flag(x > R::ZERO) - flag(x < R::ZERO) }),
        _ => return None,
    })
}

/// Two tensors of one shape.
pub(super) fn zip<R: TensorReal>(x: &Tensor, y: &Tensor, f: impl Fn(R, R) -> R) -> Tensor {
    let pairs = R::slice(x.elements()).iter().zip(R::slice(y.elements()));
    Tensor::new(x.shape(), R::wrap(pairs.map(|(x, y)| f(*x, *y)).collect()))
}

/// Two tensors, each repeating where the other is larger.
pub(super) fn broadcast<R: TensorReal>(x: &Tensor, y: &Tensor, f: impl Fn(R, R) -> R) -> Tensor {
    let shape = broadcast_shape(x.shape(), y.shape());
    let (left, right) = (R::slice(x.elements()), R::slice(y.elements()));
    let mut values = Vec::with_capacity(left.len().max(right.len()));
    each_place(&shape, [x.shape(), y.shape()], |_, [at, also]| values.push(f(left[at], right[also])));
    Tensor::new(shape, R::wrap(values))
}

/// The first where it is chosen, else the second; NaN where either is, because no comparison chooses one.
fn chosen<R: TensorReal>(a: R, b: R, is_first: bool) -> R {
    if is_first || a.is_nan() { a } else { b }
}

/// The shape of two tensors that are broadcast.
fn broadcast_shape(left: &[u64], right: &[u64]) -> Vec<u64> {
    let (long, short) = if left.len() < right.len() { (right, left) } else { (left, right) };
    let mut shape = long.to_vec();
    for (whole, length) in shape.iter_mut().rev().zip(short.iter().rev()) {
        *whole = if *whole == 1 { *length } else { *whole };
    }
    shape
}

/// The gradient of a power by its base, or by its exponent.
fn pow_gradient<R: TensorReal>(inputs: &[&VariableValue], by_exponent: bool) -> Tensor {
    let [a, b, slope] = [0, 1, 2].map(|place| inputs[place].tensor());
    let gradient = broadcast::<R>(a, b, |a, b| match by_exponent {
        true if a == R::ZERO && b >= R::ZERO => R::ZERO,
        true => a.powf(b) * a.ln(),
        false if b == R::ZERO => R::ZERO,
        false => b * a.powf(b - R::ONE),
    });
    zip::<R>(&gradient, slope, |gradient, slope| slope * gradient)
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
    each_place(x.shape(), [like], |index, [place]| sums[place] = sums[place] + whole[index]);
    Tensor::new(like, R::wrap(sums))
}

/// Walks a shape from its first element to its last, with the places in smaller ones that repeat.
pub(super) fn each_place<const N: usize>(shape: &[u64], small: [&[u64]; N], visit: impl FnMut(usize, [usize; N])) {
    walk(shape, small.map(|small| repeating_strides(shape, small)), visit);
}

/// Walks a shape from its first element to its last, with the places that strides along its dimensions lead to.
pub(super) fn walk<const N: usize>(shape: &[u64], strides: [Vec<usize>; N], mut visit: impl FnMut(usize, [usize; N])) {
    let count: usize = shape.iter().map(|length| index(*length)).product();
    let mut position = vec![0_u64; shape.len()];
    let mut places = [0; N];
    for element in 0..count {
        visit(element, places);
        for axis in (0..shape.len()).rev() {
            position[axis] += 1;
            (0..N).for_each(|nth| places[nth] += strides[nth][axis]);
            if position[axis] < shape[axis] {
                break;
            }
            (0..N).for_each(|nth| places[nth] -= strides[nth][axis] * index(position[axis]));
            position[axis] = 0;
        }
    }
}

/// How far the next element along each dimension of a shape is in a smaller one: nowhere, where it repeats.
fn repeating_strides(shape: &[u64], small: &[u64]) -> Vec<usize> {
    let mut strides = vec![0; shape.len()];
    let mut stride = 1;
    for (axis, length) in (shape.len() - small.len()..shape.len()).zip(small).rev() {
        strides[axis] = if *length == 1 { 0 } else { stride };
        stride *= index(*length);
    }
    strides
}

/// A dimension of a tensor in memory.
pub(super) fn index(length: u64) -> usize {
    usize::try_from(length).expect("a tensor in memory has dimensions that memory has")
}

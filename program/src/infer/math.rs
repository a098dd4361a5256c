//! Element-wise ops of one and of two operands, which are broadcast; reductions; other shapes of the same elements.

use crate::op::OpKind;
use crate::variable::{Dim, VariableFacts};

use super::network;
use super::operands::Operands;

type InferredOutputs = Result<Vec<VariableFacts>, String>;

/// The facts of the output.
pub(super) fn outputs(operands: &Operands<'_>) -> InferredOutputs {
    let inputs = |count| operands.check_inputs(count, count);
    match &operands.op.kind {
        kind if kind.is_binary_arithmetic() || *kind == OpKind::Greater => {
            inputs(2)?;
            broadcast(operands)
        }
        OpKind::Sqrt | OpKind::Exp | OpKind::Log | OpKind::Abs | OpKind::Sign => {
            inputs(1)?;
            let (element_type, shape) = operands.floats(0)?;
            Ok(vec![VariableFacts::dense(element_type, shape)])
        }
        OpKind::PowGradient { .. } => {
            inputs(3)?;
            let whole = broadcast(operands)?;
            operands.exactly(2, &whole[0])?;
            Ok(whole)
        }
        OpKind::ReduceSum { axes, keep } | OpKind::Mean { axes, keep } => {
            inputs(1)?;
            let (element_type, shape) = operands.floats(0)?;
            let axes = places(operands, 0, axes)?;
            Ok(vec![VariableFacts::dense(element_type, reduced(shape, &axes, *keep))])
        }
        OpKind::Repeat { axes } => {
            inputs(2)?;
            repeated(operands, 0, 1, axes)
        }
        OpKind::MeanGradient { axes } => {
            inputs(2)?;
            repeated(operands, 1, 0, axes)
        }
        OpKind::Reshape { shape } => {
            inputs(1)?;
            reshape(operands, shape)
        }
        OpKind::Transpose { axes } => {
            inputs(1)?;
            transpose(operands, axes)
        }
        OpKind::Softmax | OpKind::LogSoftmax => {
            inputs(1)?;
            let (element_type, shape) = operands.floats(0)?;
            match shape.last() {
                Some(Dim::Fixed(_)) => Ok(vec![VariableFacts::dense(element_type, shape)]),
                _ => Err(operands.misfit(0, "a last dimension that is fixed")),
            }
        }
        _ => network::outputs(operands),
    }
}

/// The first two operands, each repeating where the other is larger.
fn broadcast(operands: &Operands<'_>) -> InferredOutputs {
    let (element_type, left) = operands.floats(0)?;
    let (right_type, right) = operands.floats(1)?;
    let shape = (right_type == element_type).then(|| broadcast_shape(left, right)).flatten();
    let shape = shape.ok_or_else(|| {
        let other = operands.input(0);
        operands.misfit(1, &format!("{element_type}, and the last dimensions of {other}, where either may be 1"))
    })?;
    Ok(vec![VariableFacts::dense(element_type, shape)])
}

/// The shape of both, aligned at the last dimension; none where two dimensions differ and neither is 1.
fn broadcast_shape(left: &[Dim], right: &[Dim]) -> Option<Vec<Dim>> {
    const ONE: Dim = Dim::Fixed(1);
    let (long, short) = if left.len() < right.len() { (right, left) } else { (left, right) };
    let mut shape = long.to_vec();
    for (whole, dim) in shape.iter_mut().rev().zip(short.iter().rev()) {
        *whole = match (*whole, *dim) {
            (whole, dim) if whole == dim || dim == ONE => whole,
            (ONE, dim) => dim,
            _ => return None,
        };
    }
    Some(shape)
}

/// Whether `small` is the last dimensions of `shape`, or 1 in their place.
pub(super) fn repeats_to(small: &[Dim], shape: &[Dim]) -> bool {
    broadcast_shape(small, shape).is_some_and(|whole| whole == shape)
}

/// The indices of dimensions of an input, in ascending order; all, if none is named.
fn places(operands: &Operands<'_>, place: usize, axes: &[u32]) -> Result<Vec<usize>, String> {
    let (_, shape) = operands.dense(place)?;
    if axes.is_empty() {
        return Ok((0..shape.len()).collect());
    }
    let mut found = axes.iter().map(|axis| operands.axis(place, *axis)).collect::<Result<Vec<_>, _>>()?;
    found.sort_unstable();
    if found.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(format!("found axes {axes:?}; expected each dimension once"));
    }
    Ok(found)
}

/// A shape without some dimensions, or with 1 there.
fn reduced(shape: &[Dim], axes: &[usize], keep: bool) -> Vec<Dim> {
    let dims = shape.iter().enumerate().filter(|(axis, _)| keep || !axes.contains(axis));
    dims.map(|(axis, dim)| if axes.contains(&axis) { Dim::Fixed(1) } else { *dim }).collect()
}

/// An input that lacks dimensions of another one, or has 1 there, and gets them.
fn repeated(operands: &Operands<'_>, small: usize, like: usize, axes: &[u32]) -> InferredOutputs {
    let (element_type, shape) = operands.floats(like)?;
    let axes = places(operands, like, axes)?;
    if *operands.input(small) != VariableFacts::dense(element_type, reduced(shape, &axes, true)) {
        operands.exactly_dense(small, element_type, &reduced(shape, &axes, false))?;
    }
    Ok(vec![VariableFacts::dense(element_type, shape)])
}

fn reshape(operands: &Operands<'_>, lengths: &[u64]) -> InferredOutputs {
    let (element_type, shape) = operands.dense(0)?;
    let fixed = shape.iter().filter_map(|dim| match dim {
        Dim::Fixed(length) => Some(*length),
        Dim::Batch => None,
    });
    let (fixed, batches) = (fixed.product::<u64>(), shape.iter().filter(|dim| **dim == Dim::Batch).count());
    let zeros = lengths.iter().filter(|length| **length == 0).count();
    let mut known = lengths.iter().filter(|length| **length > 0);
    let known = known.try_fold(1_u64, |known, length| known.checked_mul(*length)).unwrap_or(u64::MAX);
    let rest = match (batches, zeros) {
        (0, 0) if known == fixed => Dim::Fixed(1),
        (0, 1) if fixed % known == 0 => Dim::Fixed(fixed / known),
        (1, 1) if known == fixed => Dim::Batch,
        _ => {
            let text = format!("as many elements as {lengths:?} has, where one 0 is what remains, or the batch");
            return Err(operands.misfit(0, &text));
        }
    };
    let dims = lengths.iter().map(|length| if *length == 0 { rest } else { Dim::Fixed(*length) });
    Ok(vec![VariableFacts::dense(element_type, dims.collect::<Vec<_>>())])
}

fn transpose(operands: &Operands<'_>, axes: &[u32]) -> InferredOutputs {
    let (element_type, shape) = operands.dense(0)?;
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    if sorted.len() != shape.len() || sorted.iter().zip(0..).any(|(axis, place)| *axis != place) {
        return Err(operands.misfit(0, &format!("a dimension for each of the axes {axes:?}, each once")));
    }
    let dims = axes.iter().map(|axis| shape[*axis as usize]);
    Ok(vec![VariableFacts::dense(element_type, dims.collect::<Vec<_>>())])
}

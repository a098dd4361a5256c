//! Element-wise ops of one and of two operands, which are broadcast.

use crate::op::OpKind;
use crate::variable::{Dim, VariableFacts};

use super::network;
use super::operands::Operands;

type InferredOutputs = Result<Vec<VariableFacts>, String>;

/// The facts of the output.
pub(super) fn outputs(operands: &Operands<'_>) -> InferredOutputs {
    let inputs = |count| operands.check_inputs(count, count);
    match &operands.op.kind {
        OpKind::Add
        | OpKind::Mul
        | OpKind::Sub
        | OpKind::Div
        | OpKind::Max
        | OpKind::Min
        | OpKind::Pow
        | OpKind::Greater => {
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

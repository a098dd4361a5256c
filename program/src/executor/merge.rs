//! Merge of a gradient's pieces: their sum or mean.

use crate::{Arithmetic, Node, OpKind, OpRole, Tensor, VariableFacts, VariableValue};
use pserver_core::config::Merge;
use pserver_core::error::Failure;
use pserver_core::optim::Gradient;
use pserver_core::port::Kernels;

/// Adds several pieces in the order given; a mean divides by how many they are.
pub(super) fn merged(
    arithmetic: &mut dyn Arithmetic,
    kernels: &mut dyn Kernels,
    facts: &VariableFacts,
    pieces: &[&VariableValue],
    merge: Merge,
) -> Result<VariableValue, Failure> {
    let count = u32::try_from(pieces.len()).expect("an accumulator is small, see `limits`");
    let sum = match pieces[0] {
        VariableValue::Dense(_) => VariableValue::from(added(kernels, pieces)),
        _ => only(arithmetic.run(&node(OpKind::Sum), pieces, &[facts])?),
    };
    let factor = match merge {
        Merge::Mean => 1.0 / f64::from(count),
        Merge::Sum => return Ok(sum),
    };
    Ok(only(arithmetic.run(&node(OpKind::Scale { factor }), &[&sum], &[facts])?))
}

/// The sum of dense pieces, as a server adds them.
fn added(kernels: &mut dyn Kernels, pieces: &[&VariableValue]) -> Tensor {
    let element_type = pieces[0].tensor().elements().element_type();
    let mut sum = Tensor::zeros(element_type, pieces[0].tensor().shape());
    let gradients = pieces.iter().map(|piece| Gradient { bytes: piece.tensor().bytes(), element_type });
    kernels.sum(element_type, sum.bytes_mut(), &gradients.collect::<Vec<_>>());
    sum
}

fn node(kind: OpKind) -> Node {
    Node { kind, role: OpRole::Communication, inputs: Vec::new(), outputs: Vec::new(), rule: None }
}

fn only(mut outputs: Vec<VariableValue>) -> VariableValue {
    outputs.pop().expect("the op has one output")
}

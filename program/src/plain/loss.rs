//! Losses, their gradients, and accuracy.

use crate::op::OpKind;
use crate::value::{Elements, Tensor, VariableValue};
use pserver_core::error::Failure;

use super::pointwise::{self, index};
use super::real::TensorReal;
use super::{OpOutputs, total};

pub(super) fn outputs<R: TensorReal>(kind: &OpKind, inputs: &[&VariableValue]) -> OpOutputs {
    let (scores, label) = (inputs[0].tensor(), inputs[1].tensor());
    match kind {
        OpKind::SoftmaxWithCrossEntropy => softmax::<R>(scores, label),
        OpKind::SoftmaxWithCrossEntropyGradient => {
            softmax_gradient::<R>(scores, label, inputs[2].tensor()).map(|slope| vec![slope.into()])
        }
        OpKind::SigmoidCrossEntropy => {
            let loss = |score: R, label: R| {
                let above = if score > R::ZERO { score } else { R::ZERO };
                above - score * label + (-score.abs()).exp().ln_1p()
            };
            Ok(vec![pointwise::zip(scores, label, loss).into()])
        }
        OpKind::SigmoidCrossEntropyGradient => {
            let off = pointwise::zip::<R>(scores, label, |score, label| score.sigmoid() - label);
            Ok(vec![pointwise::zip::<R>(&off, inputs[2].tensor(), |off, slope| slope * off).into()])
        }
        OpKind::Accuracy => accuracy::<R>(scores, label).map(|share| vec![share.into()]),
        other => panic!("{} is no arithmetic", other.name()),
    }
}

/// Rows of scores, each with its label, which is checked.
fn rows<'a, R: TensorReal>(scores: &'a Tensor, label: &'a Tensor) -> Result<Vec<(&'a [R], usize)>, Failure> {
    let classes = index(scores.shape()[1]);
    let rows = R::slice(scores.elements()).chunks_exact(classes).zip(integers(label));
    rows.enumerate()
        .map(|(row, (scores, label))| match usize::try_from(*label) {
            Ok(label) if label < classes => Ok((scores, label)),
            _ => Err(Failure::call(format!("label {label} in row {row}; expected 0 to {}", classes - 1))),
        })
        .collect()
}

/// The elements of a tensor of 64-bit signed integers.
pub(super) fn integers(tensor: &Tensor) -> &[i64] {
    match tensor.elements() {
        Elements::Int64(values) => values,
        other => panic!("{} where a checked program has int64", other.element_type()),
    }
}

/// The loss as `ln(sum of exp(score - largest)) - (score - largest)`, which neither overflows nor takes the logarithm
/// of a probability that rounded to zero.
fn softmax<R: TensorReal>(scores: &Tensor, label: &Tensor) -> OpOutputs {
    let mut losses = Vec::new();
    let mut probabilities = Vec::with_capacity(scores.elements().len());
    for (row, label) in rows::<R>(scores, label)? {
        let (largest, powers) = row_powers(row);
        let sum = total(&powers);
        losses.push(sum.ln() - (row[label] - largest));
        probabilities.extend(powers.iter().map(|power| *power / sum));
    }
    let loss = Tensor::new([losses.len() as u64], R::wrap(losses));
    Ok(vec![loss.into(), Tensor::new(scores.shape(), R::wrap(probabilities)).into()])
}

/// The largest of a row that is not empty, and the exponentials of the distances to it.
fn row_powers<R: TensorReal>(row: &[R]) -> (R, Vec<R>) {
    let largest = row.iter().fold(row[0], |largest, score| if *score > largest { *score } else { largest });
    (largest, row.iter().map(|score| (*score - largest).exp()).collect())
}

/// A function of each exponential, its logarithm, and the sum of the exponentials along the last dimension.
pub(super) fn softmax_rows<R: TensorReal>(x: &Tensor, f: impl Fn(R, R, R) -> R) -> Tensor {
    let classes = x.shape().last().map_or(1, |classes| index(*classes));
    let mut values = Vec::with_capacity(x.elements().len());
    for row in R::slice(x.elements()).chunks_exact(classes) {
        let (largest, powers) = row_powers(row);
        let sum = total(&powers);
        values.extend(row.iter().zip(&powers).map(|(score, power)| f(*power, *score - largest, sum)));
    }
    Tensor::new(x.shape(), R::wrap(values))
}

fn softmax_gradient<R: TensorReal>(probabilities: &Tensor, label: &Tensor, slope: &Tensor) -> Result<Tensor, Failure> {
    let mut slopes = Vec::with_capacity(probabilities.elements().len());
    for ((row, label), slope) in rows::<R>(probabilities, label)?.into_iter().zip(R::slice(slope.elements())) {
        let off = |(class, share): (usize, &R)| if class == label { *share - R::ONE } else { *share };
        slopes.extend(row.iter().enumerate().map(off).map(|off| *slope * off));
    }
    Ok(Tensor::new(probabilities.shape(), R::wrap(slopes)))
}

fn accuracy<R: TensorReal>(scores: &Tensor, label: &Tensor) -> Result<Tensor, Failure> {
    let rows = rows::<R>(scores, label)?;
    let best = |row: &[R]| (0..row.len()).fold(0, |best, class| if row[class] > row[best] { class } else { best });
    let right = rows.iter().filter(|(row, label)| best(row) == *label).count();
    let share = <f32 as TensorReal>::count(right) / <f32 as TensorReal>::count(rows.len());
    Ok(Tensor::new([], Elements::Float32(vec![share])))
}

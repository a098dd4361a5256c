//! Fast arithmetic of programs: matrix products, and convolutions as such, by the crate `matrixmultiply` (behind
//! `ndarray`, without unsafe code here), and sums over a batch. Everything else runs the reference loops,
//! which compile to vector code.
//!
//! The bits of a product depend only on its shape and the processor's instructions: one thread, and blocks of constant
//! size.

mod convolution;
mod product;
mod rows;
#[cfg(test)]
mod tests;

use pserver_core::error::Failure;

use crate::{Arithmetic, Elements, Node, OpKind, PlainArithmetic, Tensor, VariableFacts, VariableValue};

use product::{Matrix, product};

/// Arithmetic on the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuArithmetic {
    plain: PlainArithmetic,
}

impl Arithmetic for CpuArithmetic {
    fn run(
        &mut self,
        node: &Node,
        inputs: &[&VariableValue],
        outputs: &[&VariableFacts],
    ) -> Result<Vec<VariableValue>, Failure> {
        let fast = match (&node.kind, inputs) {
            (
                OpKind::Matmul { transpose_left, transpose_right },
                [VariableValue::Dense(left), VariableValue::Dense(right)],
            ) => matmul(left, *transpose_left, right, *transpose_right),
            (kind, [VariableValue::Dense(x), VariableValue::Dense(y)]) if let Some(pair) = rows::PairOp::of(kind) => {
                repeating(x, y, pair)
            }
            (OpKind::SumTo, [VariableValue::Dense(x), VariableValue::Dense(like)]) => sum_to(x, like),
            (kind, inputs) => convolution::output(kind, inputs),
        };
        match fast {
            Some(tensor) => Ok(vec![tensor.into()]),
            None => self.plain.run(node, inputs, outputs),
        }
    }

    fn name(&self) -> &'static str {
        "cpu"
    }
}

fn matmul(left: &Tensor, transpose_left: bool, right: &Tensor, transpose_right: bool) -> Option<Tensor> {
    let (left_shape, right_shape) = (dimensions(left)?, dimensions(right)?);
    let rows = left.shape()[usize::from(transpose_left)];
    let columns = right.shape()[usize::from(!transpose_right)];
    let elements = match (left.elements(), right.elements()) {
        (Elements::Float32(left), Elements::Float32(right)) => Elements::Float32(product(
            Matrix { values: left, shape: left_shape, is_transposed: transpose_left },
            Matrix { values: right, shape: right_shape, is_transposed: transpose_right },
        )),
        (Elements::Float64(left), Elements::Float64(right)) => Elements::Float64(product(
            Matrix { values: left, shape: left_shape, is_transposed: transpose_left },
            Matrix { values: right, shape: right_shape, is_transposed: transpose_right },
        )),
        _ => return None,
    };
    Some(Tensor::new([rows, columns], elements))
}

fn dimensions(matrix: &Tensor) -> Option<(usize, usize)> {
    let [rows, columns] = matrix.shape() else { return None };
    Some((usize::try_from(*rows).ok()?, usize::try_from(*columns).ok()?))
}

/// Where the smaller tensor is the last dimensions of the whole one, it repeats as a row does.
fn is_row(whole: &Tensor, small: &Tensor) -> bool {
    whole.shape().ends_with(small.shape()) && !small.elements().is_empty()
}

/// Either operand may be the row.
fn repeating(x: &Tensor, y: &Tensor, pair: rows::PairOp) -> Option<Tensor> {
    let shape = if is_row(x, y) {
        x.shape()
    } else if is_row(y, x) {
        y.shape()
    } else {
        return None;
    };
    let elements = match (x.elements(), y.elements()) {
        (Elements::Float32(x), Elements::Float32(y)) => Elements::Float32(rows::repeating(x, y, pair)),
        (Elements::Float64(x), Elements::Float64(y)) => Elements::Float64(rows::repeating(x, y, pair)),
        _ => return None,
    };
    Some(Tensor::new(shape, elements))
}

fn sum_to(x: &Tensor, like: &Tensor) -> Option<Tensor> {
    if !is_row(x, like) {
        return None;
    }
    let elements = match (x.elements(), like.elements()) {
        (Elements::Float32(whole), Elements::Float32(row)) => Elements::Float32(rows::sum(whole, row.len())),
        (Elements::Float64(whole), Elements::Float64(row)) => Elements::Float64(rows::sum(whole, row.len())),
        _ => return None,
    };
    Some(Tensor::new(like.shape(), elements))
}

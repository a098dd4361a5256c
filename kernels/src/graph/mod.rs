//! The arithmetic of programs, where speed matters: products of matrices by the crate `matrixmultiply` (behind
//! `ndarray`, which needs no unsafe code of ours), and sums over a batch. Everything else is the plain form's loops,
//! which compile to vector code as they are.
//!
//! The bits of a product depend on its shape and on what the processor can do, and on nothing else: one thread, and
//! blocks whose sizes are constants.

pub mod conformance;
mod product;
mod rows;
#[cfg(test)]
mod tests;

use pserver_core::error::Failure;
use pserver_core::port::Arithmetic;
use pserver_core::program::{Elements, Facts, Node, OpKind, PlainArithmetic, Tensor, Value};

/// Arithmetic on the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuArithmetic {
    plain: PlainArithmetic,
}

impl Arithmetic for CpuArithmetic {
    fn run(&mut self, node: &Node, inputs: &[&Value], outputs: &[&Facts]) -> Result<Vec<Value>, Failure> {
        let fast = match (&node.kind, inputs) {
            (OpKind::Matmul { transpose_left, transpose_right }, [Value::Dense(left), Value::Dense(right)]) => {
                matmul(left, *transpose_left, right, *transpose_right)
            }
            (OpKind::Add, [Value::Dense(x), Value::Dense(y)]) => repeating(x, y, rows::Pair::Add),
            (OpKind::Mul, [Value::Dense(x), Value::Dense(y)]) => repeating(x, y, rows::Pair::Mul),
            (OpKind::SumTo, [Value::Dense(x), Value::Dense(like)]) => sum_to(x, like),
            _ => None,
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
    let (a, b) = (dimensions(left)?, dimensions(right)?);
    let rows = left.shape()[usize::from(transpose_left)];
    let columns = right.shape()[usize::from(!transpose_right)];
    let elements = match (left.elements(), right.elements()) {
        (Elements::Float32(left), Elements::Float32(right)) => {
            Elements::Float32(product::product(left, a, transpose_left, right, b, transpose_right))
        }
        (Elements::Float64(left), Elements::Float64(right)) => {
            Elements::Float64(product::product(left, a, transpose_left, right, b, transpose_right))
        }
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

fn repeating(x: &Tensor, y: &Tensor, pair: rows::Pair) -> Option<Tensor> {
    if !is_row(x, y) {
        return None;
    }
    let elements = match (x.elements(), y.elements()) {
        (Elements::Float32(whole), Elements::Float32(row)) => Elements::Float32(rows::repeating(whole, row, pair)),
        (Elements::Float64(whole), Elements::Float64(row)) => Elements::Float64(rows::repeating(whole, row, pair)),
        _ => return None,
    };
    Some(Tensor::new(x.shape(), elements))
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

//! Reference form of ops that move, convert or create elements.

use half::{bf16, f16};

use crate::op::OpKind;
use crate::value::{Elements, Tensor, VariableValue};
use crate::variable::{Dim, VariableFacts};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::ROW_BYTES_MAX;
use pserver_core::narrowing;
use pserver_core::rows::{Height, RowLayout};

use super::matrix::around;
use super::pointwise::{index, walk};
use super::table;

/// Tensors side by side along a dimension.
pub(super) fn concat(inputs: &[&VariableValue], axis: usize) -> VariableValue {
    let mut shape = inputs[0].tensor().shape().to_vec();
    shape[axis] = inputs.iter().map(|input| input.tensor().shape()[axis]).sum();
    let (outer, _, inner) = around(&shape, axis);
    let element_type = inputs[0].tensor().elements().element_type();
    let along = inner * index(element_type.bytes());
    let mut whole = Tensor::zeros(element_type, &shape);
    let mut rest = whole.bytes_mut();
    for before in 0..outer {
        for input in inputs {
            let part = index(input.tensor().shape()[axis]) * along;
            let (here, after) = rest.split_at_mut(part);
            here.copy_from_slice(&input.tensor().bytes()[before * part..][..part]);
            rest = after;
        }
    }
    whole.into()
}

/// Pieces along a dimension.
pub(super) fn split(input: &VariableValue, axis: usize, lengths: &[u64]) -> Result<Vec<VariableValue>, Failure> {
    if let VariableValue::SelectedRows(rows) = input {
        return table::split(rows, lengths);
    }
    let tensor = input.tensor();
    let element_type = tensor.elements().element_type();
    let (_, total, inner) = around(tensor.shape(), axis);
    let along = inner * index(element_type.bytes());
    let mut first = 0;
    let mut pieces = Vec::with_capacity(lengths.len());
    for length in lengths {
        let mut shape = tensor.shape().to_vec();
        shape[axis] = *length;
        let mut piece = Tensor::zeros(element_type, &shape);
        let part = index(*length) * along;
        if part > 0 {
            for (before, into) in piece.bytes_mut().chunks_exact_mut(part).enumerate() {
                into.copy_from_slice(&tensor.bytes()[before * total * along + first..][..part]);
            }
        }
        first += part;
        pieces.push(piece.into());
    }
    Ok(pieces)
}

/// The same elements in another shape; a length of 0 is what remains.
pub(super) fn reshape(x: &Tensor, lengths: &[u64]) -> Tensor {
    let known: u64 = lengths.iter().filter(|length| **length > 0).product();
    let rest = x.elements().len() as u64 / known;
    let shape: Vec<u64> = lengths.iter().map(|length| if *length == 0 { rest } else { *length }).collect();
    Tensor::new(shape, x.elements().clone())
}

/// Dimensions in another order.
pub(super) fn transpose(x: &Tensor, axes: &[u32]) -> Tensor {
    let axes: Vec<usize> = axes.iter().map(|axis| *axis as usize).collect();
    let shape: Vec<u64> = axes.iter().map(|axis| x.shape()[*axis]).collect();
    let strides = axes.iter().map(|axis| around(x.shape(), *axis).2).collect();
    let element_type = x.elements().element_type();
    let bytes = index(element_type.bytes());
    let mut transposed = Tensor::zeros(element_type, &shape);
    let into = transposed.bytes_mut();
    walk(&shape, [strides], |element, [place]| {
        into[element * bytes..][..bytes].copy_from_slice(&x.bytes()[place * bytes..][..bytes]);
    });
    transposed
}

/// Elements in another type.
pub(super) fn cast(x: &Tensor, to: ElementType) -> Tensor {
    let values = x.elements();
    macro_rules! from {
        ($values:expr, $get:expr) => {
            convert($values.iter().map($get), to)
        };
    }
    let elements = match values {
        Elements::Int32(values) => from!(values, |value| CastNumber::Whole((*value).into())),
        Elements::Uint32(values) => from!(values, |value| CastNumber::Whole((*value).into())),
        Elements::Int64(values) => from!(values, |value| CastNumber::Whole((*value).into())),
        Elements::Uint64(values) => from!(values, |value| CastNumber::Whole((*value).into())),
        Elements::Float32(values) => from!(values, |value| CastNumber::Real((*value).into())),
        Elements::Float64(values) => from!(values, |value| CastNumber::Real(*value)),
        Elements::Float16(values) => from!(values, |value| CastNumber::Real((*value).into())),
        Elements::Bfloat16(values) => from!(values, |value| CastNumber::Real((*value).into())),
    };
    Tensor::new(x.shape(), elements)
}

/// An element of any type, without loss.
#[derive(Clone, Copy)]
enum CastNumber {
    Whole(i128),
    Real(f64),
}

impl CastNumber {
    /// Rounded once to binary64.
    fn real(self) -> f64 {
        match self {
            Self::Whole(value) => value as f64,
            Self::Real(value) => value,
        }
    }

    /// Rounds towards zero and saturates; NaN becomes zero.
    #[expect(clippy::cast_possible_truncation, reason = "a float beyond an integer's bounds becomes the bound")]
    fn whole(self, low: i128, high: i128) -> i128 {
        match self {
            Self::Whole(value) => value,
            Self::Real(value) => value as i128,
        }
        .clamp(low, high)
    }

    /// Rounded to odd in binary32, so that rounding the result to a half equals rounding once.
    fn odd(self) -> f32 {
        match self {
            Self::Whole(value) => narrowing::round_integer_to_odd(value),
            Self::Real(value) => narrowing::round_to_odd(value),
        }
    }

    /// Rounded once to binary32.
    #[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest is what is asked for")]
    fn single(self) -> f32 {
        match self {
            Self::Whole(value) => value as f32,
            Self::Real(value) => value as f32,
        }
    }
}

fn convert(values: impl Iterator<Item = CastNumber>, to: ElementType) -> Elements {
    macro_rules! integers {
        ($variant:ident, $type:ty) => {
            Elements::$variant(
                values
                    .map(|value| value.whole(<$type>::MIN.into(), <$type>::MAX.into()))
                    .map(|value| <$type>::try_from(value).expect("it was held within the type's bounds"))
                    .collect(),
            )
        };
    }
    match to {
        ElementType::Int32 => integers!(Int32, i32),
        ElementType::Uint32 => integers!(Uint32, u32),
        ElementType::Int64 => integers!(Int64, i64),
        ElementType::Uint64 => integers!(Uint64, u64),
        ElementType::Float32 => Elements::Float32(values.map(CastNumber::single).collect()),
        ElementType::Float64 => Elements::Float64(values.map(CastNumber::real).collect()),
        ElementType::Float16 => Elements::Float16(values.map(|value| f16::from_f32(value.odd())).collect()),
        ElementType::Bfloat16 => Elements::Bfloat16(values.map(|value| bf16::from_f32(value.odd())).collect()),
    }
}

/// A tensor as its declaration says. Rows that are wider than [`RowLayout`] goes are filled piece by piece, each with
/// a seed of its own.
pub(super) fn made(kind: &OpKind, facts: &VariableFacts) -> Tensor {
    let initializer = kind.initializer().expect("only kinds that make tensors come here");
    let (seed, first) = match *kind {
        OpKind::Uniform { seed, first, .. } | OpKind::Gaussian { seed, first, .. } => (seed, first),
        _ => (0, 0),
    };
    let VariableFacts::Dense { element_type, shape } = facts else { panic!("{facts} in a checked program") };
    let shape: Vec<u64> = shape.iter().map(fixed).collect();
    let mut tensor = Tensor::zeros(*element_type, &shape);
    let each = element_type.bytes();
    let row: u64 = shape.iter().skip(1).product::<u64>() * each;
    let widest = u64::from(ROW_BYTES_MAX) / each * each;
    for (id, row) in tensor.bytes_mut().chunks_exact_mut(index(row)).enumerate() {
        for (nth, piece) in row.chunks_mut(index(widest)).enumerate() {
            let width = u32::try_from(piece.len() as u64 / each).expect("a piece is at most as wide as a row may be");
            let layout = RowLayout::new(*element_type, width, Height::Unbounded).expect("the width was bounded");
            let (seed, id) = (seed.wrapping_add(nth as u64), first.wrapping_add(id as u64));
            initializer.fill(seed, id, layout, piece);
        }
    }
    tensor
}

fn fixed(dim: &Dim) -> u64 {
    match dim {
        Dim::Fixed(length) => *length,
        Dim::Batch => panic!("a batch in what a checked program makes"),
    }
}

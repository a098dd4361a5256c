//! The arithmetic ops.

use crate::op::OpKind;
use crate::variable::{Dim, VariableFacts};
use pserver_core::dtype::ElementType;
use pserver_core::rows::RowLayout;

use super::math::{self, repeats_to};
use super::operands::Operands;

type InferredOutputs = Result<Vec<VariableFacts>, String>;

/// The facts of an arithmetic op's outputs.
pub(super) fn outputs(operands: &Operands<'_>) -> InferredOutputs {
    let inputs = |count| operands.check_inputs(count, count);
    match &operands.op.kind {
        OpKind::Matmul { transpose_left, transpose_right } => {
            inputs(2)?;
            matmul(operands, *transpose_left, *transpose_right)
        }
        OpKind::Scale { factor } => {
            inputs(1)?;
            check_finite("factor", *factor)?;
            scale(operands)
        }
        OpKind::Relu | OpKind::Sigmoid | OpKind::Tanh => {
            inputs(1)?;
            same(operands)
        }
        OpKind::Sum => sum(operands),
        OpKind::Concat { axis } => concat(operands, *axis),
        OpKind::Split { axis, lengths } => {
            inputs(1)?;
            split(operands, *axis, lengths)
        }
        OpKind::Cast { to } => {
            inputs(1)?;
            let (_, shape) = operands.dense(0)?;
            Ok(vec![VariableFacts::dense(*to, shape)])
        }
        OpKind::Fill { .. } | OpKind::Uniform { .. } | OpKind::Gaussian { .. } | OpKind::Given { .. } => {
            inputs(0)?;
            made(operands)
        }
        _ => losses(operands),
    }
}

/// Losses, tables and metrics.
fn losses(operands: &Operands<'_>) -> InferredOutputs {
    let inputs = |count| operands.check_inputs(count, count);
    match &operands.op.kind {
        OpKind::SoftmaxWithCrossEntropy => {
            inputs(2)?;
            let (element_type, rows, classes) = scores(operands)?;
            Ok(vec![VariableFacts::dense(element_type, [rows]), VariableFacts::dense(element_type, [rows, classes])])
        }
        OpKind::SigmoidCrossEntropy => {
            inputs(2)?;
            let (element_type, shape) = operands.floats(0)?;
            operands.exactly_dense(1, element_type, shape)?;
            Ok(vec![VariableFacts::dense(element_type, shape)])
        }
        OpKind::LookupTable { padding } => {
            inputs(2)?;
            let (element_type, height, width) = table(operands)?;
            if let (Some(padding), Dim::Fixed(height)) = (padding, height) {
                check_padding(*padding, height)?;
            }
            let mut shape = operands.integers(1)?.to_vec();
            shape.push(width);
            Ok(vec![VariableFacts::Dense { element_type, shape }])
        }
        OpKind::Accuracy => {
            inputs(2)?;
            scores(operands)?;
            Ok(vec![VariableFacts::fixed(ElementType::Float32, &[])])
        }
        _ => gradients(operands),
    }
}

fn gradients(operands: &Operands<'_>) -> InferredOutputs {
    let inputs = |count| operands.check_inputs(count, count);
    match &operands.op.kind {
        OpKind::SumTo => {
            inputs(2)?;
            let (element_type, shape) = operands.floats(0)?;
            let (like_type, like) = operands.floats(1)?;
            if like_type != element_type || !repeats_to(like, shape) {
                let whole = VariableFacts::dense(element_type, shape);
                return Err(operands.misfit(1, &format!("the last dimensions of {whole}, or 1 where it repeats")));
            }
            Ok(vec![VariableFacts::dense(element_type, like)])
        }
        OpKind::ReluGradient | OpKind::SigmoidGradient | OpKind::TanhGradient => {
            inputs(2)?;
            let (element_type, shape) = operands.floats(0)?;
            operands.exactly_dense(1, element_type, shape)?;
            Ok(vec![VariableFacts::dense(element_type, shape)])
        }
        OpKind::SoftmaxWithCrossEntropyGradient => {
            inputs(3)?;
            let (element_type, rows, classes) = scores(operands)?;
            operands.exactly_dense(2, element_type, &[rows])?;
            Ok(vec![VariableFacts::dense(element_type, [rows, classes])])
        }
        OpKind::SigmoidCrossEntropyGradient => {
            inputs(3)?;
            let (element_type, shape) = operands.floats(0)?;
            operands.exactly_dense(1, element_type, shape)?;
            operands.exactly_dense(2, element_type, shape)?;
            Ok(vec![VariableFacts::dense(element_type, shape)])
        }
        OpKind::LookupTableGradient { height, padding } => {
            inputs(2)?;
            padding.map_or(Ok(()), |padding| check_padding(padding, *height))?;
            lookup_table_gradient(operands, *height)
        }
        _ => math::outputs(operands),
    }
}

fn matmul(operands: &Operands<'_>, transpose_left: bool, transpose_right: bool) -> InferredOutputs {
    let (element_type, rows, columns) = operands.matrix(0)?;
    let (rows, inner) = if transpose_left { (columns, rows) } else { (rows, columns) };
    let (_, upper, lower) = operands.matrix(1)?;
    let (found, width) = if transpose_right { (lower, upper) } else { (upper, lower) };
    if operands.dense(1)?.0 != element_type || found != inner {
        let shape = if transpose_right { format!("[{width}, {inner}]") } else { format!("[{inner}, {width}]") };
        return Err(operands.misfit(1, &format!("{element_type}{shape}, to be multiplied with {}", operands.input(0))));
    }
    Ok(vec![VariableFacts::dense(element_type, [rows, width])])
}

fn same(operands: &Operands<'_>) -> InferredOutputs {
    let (element_type, shape) = operands.floats(0)?;
    Ok(vec![VariableFacts::dense(element_type, shape)])
}

/// Dense, or selected rows, whose values are scaled.
fn scale(operands: &Operands<'_>) -> InferredOutputs {
    match operands.input(0) {
        rows @ VariableFacts::SelectedRows { element_type: ElementType::Float32 | ElementType::Float64, .. } => {
            Ok(vec![rows.clone()])
        }
        VariableFacts::SelectedRows { .. } => Err(operands.misfit(0, "float32 or float64")),
        _ => same(operands),
    }
}

/// All of one type and shape. Where some are dense and some are selected rows, the sum is dense.
fn sum(operands: &Operands<'_>) -> InferredOutputs {
    operands.check_inputs(1, usize::MAX)?;
    let first = operands.input(0);
    let Some((element_type, shape)) = whole(first) else {
        return Err(operands.misfit(0, "dense or rows, of float32 or float64"));
    };
    let mut sum = first;
    for place in 1..operands.input_count() {
        let input = operands.input(place);
        if whole(input).is_none_or(|found| found != (element_type, shape.clone())) {
            return Err(operands.misfit(place, &format!("facts that can be added to {first}")));
        }
        sum = if let VariableFacts::Dense { .. } = input { input } else { sum };
    }
    Ok(vec![sum.clone()])
}

/// The type and shape of a dense tensor, or of what selected rows are rows of.
fn whole(facts: &VariableFacts) -> Option<(ElementType, Vec<Dim>)> {
    let (element_type, shape) = match facts {
        VariableFacts::Dense { element_type, shape } => (*element_type, shape.clone()),
        VariableFacts::SelectedRows { element_type, height, width } => {
            (*element_type, vec![Dim::Fixed(*height), Dim::Fixed(*width)])
        }
        VariableFacts::Queue { .. } | VariableFacts::Strings => return None,
    };
    matches!(element_type, ElementType::Float32 | ElementType::Float64).then_some((element_type, shape))
}

/// A table to look up: a matrix, or selected rows of one.
fn table(operands: &Operands<'_>) -> Result<(ElementType, Dim, Dim), String> {
    match *operands.input(0) {
        VariableFacts::SelectedRows {
            element_type: element_type @ (ElementType::Float32 | ElementType::Float64),
            height,
            width,
        } => Ok((element_type, Dim::Fixed(height), Dim::Fixed(width))),
        VariableFacts::SelectedRows { .. } => Err(operands.misfit(0, "float32 or float64")),
        _ => operands.matrix(0),
    }
}

/// Selected rows of one width, along dimension 0.
fn concat_rows(operands: &Operands<'_>, axis: u32) -> InferredOutputs {
    let VariableFacts::SelectedRows { element_type, width, .. } = *operands.input(0) else {
        unreachable!("the first input is selected rows")
    };
    if axis != 0 {
        return Err(operands.misfit(0, &format!("a dense tensor with a dimension {axis}, or dimension 0")));
    }
    let mut total = 0_u64;
    for place in 0..operands.input_count() {
        total = match *operands.input(place) {
            VariableFacts::SelectedRows { element_type: found, height, width: wide }
                if found == element_type && wide == width =>
            {
                total.checked_add(height).ok_or_else(|| operands.misfit(place, "heights whose sum is below 2^64"))?
            }
            _ => return Err(operands.misfit(place, &format!("rows of {width} elements of {element_type}"))),
        };
    }
    Ok(vec![VariableFacts::SelectedRows { element_type, height: total, width }])
}

fn concat(operands: &Operands<'_>, axis: u32) -> InferredOutputs {
    operands.check_inputs(1, usize::MAX)?;
    if let VariableFacts::SelectedRows { .. } = operands.input(0) {
        return concat_rows(operands, axis);
    }
    let (element_type, first) = operands.dense(0)?;
    let axis = operands.axis(0, axis)?;
    let mut total = 0_u64;
    for place in 0..operands.input_count() {
        let (found, shape) = operands.dense(place)?;
        let Some(Dim::Fixed(length)) = shape.get(axis) else {
            return Err(
                operands.misfit(place, &format!("dimension {axis} to be fixed, because pieces are put together there"))
            );
        };
        let mut expected = first.to_vec();
        expected[axis] = Dim::Fixed(*length);
        if found != element_type || *shape != *expected {
            return Err(operands.misfit(place, &VariableFacts::dense(element_type, expected).to_string()));
        }
        total = total.checked_add(*length).ok_or_else(|| operands.misfit(place, "lengths whose sum is below 2^64"))?;
    }
    let mut shape = first.to_vec();
    shape[axis] = Dim::Fixed(total);
    Ok(vec![VariableFacts::Dense { element_type, shape }])
}

fn split(operands: &Operands<'_>, axis: u32, lengths: &[u64]) -> InferredOutputs {
    if lengths.is_empty() || lengths.contains(&0) {
        return Err(format!("found lengths {lengths:?}; expected one or more, above zero"));
    }
    let total = lengths.iter().try_fold(0_u64, |total, length| total.checked_add(*length));
    let total = total.ok_or_else(|| format!("found lengths {lengths:?}; expected a sum below 2^64"))?;
    if let VariableFacts::SelectedRows { element_type, height, width } = *operands.input(0) {
        if axis != 0 || total != height {
            return Err(operands.misfit(0, &format!("a height of {total} and dimension 0, but found dimension {axis}")));
        }
        let piece = |length: &u64| VariableFacts::SelectedRows { element_type, height: *length, width };
        return Ok(lengths.iter().map(piece).collect());
    }
    let (element_type, shape) = operands.dense(0)?;
    let axis = operands.axis(0, axis)?;
    if shape[axis] != Dim::Fixed(total) {
        return Err(operands.misfit(0, &format!("dimension {axis} to be {total}, which the lengths add up to")));
    }
    let piece = |length: &u64| {
        let mut shape = shape.to_vec();
        shape[axis] = Dim::Fixed(*length);
        VariableFacts::Dense { element_type, shape }
    };
    Ok(lengths.iter().map(piece).collect())
}

/// Ops without inputs: the declared facts.
fn made(operands: &Operands<'_>) -> InferredOutputs {
    operands.check_outputs(1)?;
    let facts = operands.declared(0)?;
    let name = &operands.op.outputs[0];
    let is_fill = matches!(operands.op.kind, OpKind::Fill { .. } | OpKind::Given { .. });
    let element_type = match facts {
        VariableFacts::Dense { element_type, shape } if !shape.contains(&Dim::Batch) => *element_type,
        _ => return Err(format!("output {name:?} is {facts}; expected a dense tensor of fixed dimensions")),
    };
    if !element_type.is_parameter_type() || !(is_fill || element_type.is_float()) {
        let expected = if is_fill { "a type that parameters have" } else { "float32 or float64" };
        return Err(format!("output {name:?} is {facts}; expected {expected}"));
    }
    if let Some(initializer) = operands.op.kind.initializer() {
        initializer.validate_for(element_type).map_err(|failure| failure.to_string())?;
    }
    Ok(vec![facts.clone()])
}

/// Scores, or probabilities, and one label for each of their rows.
fn scores(operands: &Operands<'_>) -> Result<(ElementType, Dim, Dim), String> {
    let (element_type, rows, classes) = operands.matrix(0)?;
    if !matches!(classes, Dim::Fixed(_)) {
        return Err(operands.misfit(0, "a matrix with a fixed number of classes"));
    }
    operands.exactly_dense(1, ElementType::Int64, &[rows])?;
    Ok((element_type, rows, classes))
}

fn lookup_table_gradient(operands: &Operands<'_>, height: u64) -> InferredOutputs {
    let ids = operands.integers(0)?;
    let (element_type, shape) = operands.floats(1)?;
    let Some((Dim::Fixed(width), leading)) = shape.split_last() else {
        return Err(operands.misfit(1, "a last dimension that is fixed: the width of the table"));
    };
    if leading != ids {
        let mut expected = ids.to_vec();
        expected.push(Dim::Fixed(*width));
        return Err(operands.misfit(1, &VariableFacts::dense(element_type, expected).to_string()));
    }
    let _: RowLayout = super::layout(element_type, height, *width)?;
    Ok(vec![VariableFacts::SelectedRows { element_type, height, width: *width }])
}

fn check_padding(padding: u64, height: u64) -> Result<(), String> {
    if padding < height {
        return Ok(());
    }
    Err(format!("found padding {padding}; expected the number of a row, below {height}"))
}

fn check_finite(name: &str, value: f64) -> Result<(), String> {
    if value.is_finite() { Ok(()) } else { Err(format!("found {name} {value}; expected a finite number")) }
}

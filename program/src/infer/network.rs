//! Layers of networks for images and texts, and their gradients.

use pserver_core::dtype::ElementType;

use crate::op::OpKind;
use crate::variable::{Dim, VariableFacts};
use crate::window::WindowSteps;

use super::operands::Operands;

type LayerOutputs = Result<Vec<VariableFacts>, String>;

/// The facts of a layer's outputs.
pub(super) fn outputs(operands: &Operands<'_>) -> LayerOutputs {
    let inputs = |count| operands.check_inputs(count, count);
    match &operands.op.kind {
        OpKind::Conv2d { steps } => {
            inputs(2)?;
            convolution(operands, 0, 1, *steps).map(|y| vec![y])
        }
        OpKind::Conv2dInputGradient { steps } => {
            inputs(3)?;
            operands.exactly(1, &convolution(operands, 2, 0, *steps)?)?;
            Ok(vec![operands.input(2).clone()])
        }
        OpKind::Conv2dFilterGradient { steps } => {
            inputs(3)?;
            operands.exactly(1, &convolution(operands, 0, 2, *steps)?)?;
            Ok(vec![operands.input(2).clone()])
        }
        OpKind::MaxPool2d { size, steps } | OpKind::AvgPool2d { size, steps } => {
            inputs(1)?;
            pool(operands, *size, *steps).map(|y| vec![y])
        }
        OpKind::MaxPool2dGradient { size, steps } | OpKind::AvgPool2dGradient { size, steps } => {
            inputs(2)?;
            operands.exactly(1, &pool(operands, *size, *steps)?)?;
            Ok(vec![operands.input(0).clone()])
        }
        OpKind::Gelu { .. } => {
            inputs(1)?;
            operands.floats(0)?;
            Ok(vec![operands.input(0).clone()])
        }
        OpKind::GeluGradient { .. } => {
            inputs(2)?;
            operands.floats(0)?;
            operands.exactly(1, operands.input(0))?;
            Ok(vec![operands.input(0).clone()])
        }
        OpKind::LayerNorm { epsilon } => {
            inputs(3)?;
            let row = normalised(operands, *epsilon)?;
            operands.exactly(2, &row)?;
            Ok(vec![operands.input(0).clone()])
        }
        OpKind::LayerNormGradient { epsilon } => {
            inputs(3)?;
            let row = normalised(operands, *epsilon)?;
            operands.exactly(2, operands.input(0))?;
            Ok(vec![operands.input(0).clone(), row])
        }
        OpKind::BatchNorm { epsilon } => {
            inputs(6)?;
            let channel = by_channel(operands, *epsilon)?;
            (2..5).try_for_each(|place| operands.exactly(place, &channel))?;
            operands.exactly_dense(5, ElementType::Int64, &[])?;
            Ok(vec![operands.input(0).clone(), channel.clone(), channel])
        }
        OpKind::BatchNormGradient { epsilon } => {
            inputs(6)?;
            let channel = by_channel(operands, *epsilon)?;
            (2..4).try_for_each(|place| operands.exactly(place, &channel))?;
            operands.exactly_dense(4, ElementType::Int64, &[])?;
            operands.exactly(5, operands.input(0))?;
            Ok(vec![operands.input(0).clone(), channel])
        }
        _ => arranged(operands),
    }
}

/// Ops that select elements.
fn arranged(operands: &Operands<'_>) -> LayerOutputs {
    let inputs = |count| operands.check_inputs(count, count);
    match &operands.op.kind {
        OpKind::Slice { axis, start, end } => {
            inputs(1)?;
            slice(operands, *axis, *start, *end).map(|y| vec![y])
        }
        OpKind::SliceGradient { axis, start, end } => {
            inputs(2)?;
            operands.floats(0)?;
            operands.exactly(1, &slice(operands, *axis, *start, *end)?)?;
            Ok(vec![operands.input(0).clone()])
        }
        OpKind::Gather => {
            inputs(2)?;
            gather(operands).map(|y| vec![y])
        }
        OpKind::GatherGradient => {
            inputs(3)?;
            operands.floats(0)?;
            operands.exactly(2, &gather(operands)?)?;
            Ok(vec![operands.input(0).clone()])
        }
        OpKind::Dropout { rate, .. } => {
            operands.check_inputs(2, 3)?;
            if !(0.0..1.0).contains(rate) {
                return Err(format!("found rate {rate}; expected a number from zero, below one"));
            }
            operands.floats(0)?;
            (1..operands.input_count()).try_for_each(|place| operands.exactly_dense(place, ElementType::Int64, &[]))?;
            Ok(vec![operands.input(0).clone()])
        }
        other => unreachable!("{} is no arithmetic", other.name()),
    }
}

/// The facts of a scale for the last dimension of the input at place 0, which the input at place 1 has.
fn normalised(operands: &Operands<'_>, epsilon: f64) -> Result<VariableFacts, String> {
    check_epsilon(epsilon)?;
    let (element_type, [.., Dim::Fixed(width)]) = operands.floats(0)? else {
        return Err(operands.misfit(0, "a last dimension that is fixed"));
    };
    let row = VariableFacts::fixed(element_type, &[*width]);
    operands.exactly(1, &row)?;
    Ok(row)
}

/// The facts of a scale for dimension 1 of the input at place 0, which the input at place 1 has.
fn by_channel(operands: &Operands<'_>, epsilon: f64) -> Result<VariableFacts, String> {
    check_epsilon(epsilon)?;
    let (element_type, [_, Dim::Fixed(channels), ..]) = operands.floats(0)? else {
        return Err(operands.misfit(0, "two dimensions or more, of which the second is fixed"));
    };
    let channel = VariableFacts::fixed(element_type, &[*channels]);
    operands.exactly(1, &channel)?;
    Ok(channel)
}

fn check_epsilon(epsilon: f64) -> Result<(), String> {
    match epsilon.is_finite() && epsilon > 0.0 {
        true => Ok(()),
        false => Err(format!("found epsilon {epsilon}; expected a finite number above zero")),
    }
}

fn slice(operands: &Operands<'_>, axis: u32, start: u64, end: u64) -> Result<VariableFacts, String> {
    if start >= end {
        return Err(format!("found start {start} and end {end}; expected the start before the end"));
    }
    let (element_type, shape) = operands.dense(0)?;
    let axis = operands.axis(0, axis)?;
    if !matches!(shape[axis], Dim::Fixed(length) if end <= length) {
        return Err(operands.misfit(0, &format!("dimension {axis} to be fixed, and at least {end}, the end")));
    }
    let mut shape = shape.to_vec();
    shape[axis] = Dim::Fixed(end - start);
    Ok(VariableFacts::Dense { element_type, shape })
}

/// The pieces of the input at place 0 by the indices at place 1.
fn gather(operands: &Operands<'_>) -> Result<VariableFacts, String> {
    let (element_type, shape) = operands.dense(0)?;
    let [_, rest @ ..] = shape else {
        return Err(operands.misfit(0, "one dimension or more"));
    };
    let mut pieces = operands.integers(1)?.to_vec();
    pieces.extend_from_slice(rest);
    Ok(VariableFacts::dense(element_type, pieces))
}

/// Images: any number of them, of fixed channels, height and width.
struct Images {
    element_type: ElementType,
    count: Dim,
    channels: u64,
    lengths: [u64; 2],
}

fn images(operands: &Operands<'_>, place: usize) -> Result<Images, String> {
    let expected = "four dimensions, of which the last three are fixed";
    match operands.floats_of(place, expected)? {
        (element_type, [count, Dim::Fixed(channels), Dim::Fixed(height), Dim::Fixed(width)]) => {
            Ok(Images { element_type, count: *count, channels: *channels, lengths: [*height, *width] })
        }
        _ => Err(operands.misfit(place, expected)),
    }
}

/// The output of a convolution of the images at place `x` with the filter at another.
fn convolution(operands: &Operands<'_>, x: usize, filter: usize, steps: WindowSteps) -> Result<VariableFacts, String> {
    check_stride(steps)?;
    let Images { element_type, count, channels, .. } = images(operands, x)?;
    let fits = |filter: &Images| (filter.element_type, filter.channels) == (element_type, channels);
    let found = images(operands, filter).ok().filter(fits);
    let Some(Images { count: Dim::Fixed(outputs), lengths: size, .. }) = found else {
        let expected = format!("a filter {element_type}[o, {channels}, kh, kw] for {}", operands.input(x));
        return Err(operands.misfit(filter, &expected));
    };
    let places = places(operands, x, steps, size)?;
    Ok(VariableFacts::dense(element_type, [count, Dim::Fixed(outputs), places[0], places[1]]))
}

/// The output of a pool over the images at place 0.
fn pool(operands: &Operands<'_>, size: [u32; 2], steps: WindowSteps) -> Result<VariableFacts, String> {
    check_stride(steps)?;
    let is_within = size.iter().zip(steps.padding).all(|(size, padding)| padding < *size);
    if !is_within {
        let padding = steps.padding;
        return Err(format!("found size {size:?} and padding {padding:?}; expected a padding below the size"));
    }
    let Images { element_type, count, channels, .. } = images(operands, 0)?;
    let places = places(operands, 0, steps, size.map(u64::from))?;
    Ok(VariableFacts::dense(element_type, [count, Dim::Fixed(channels), places[0], places[1]]))
}

fn places(operands: &Operands<'_>, x: usize, steps: WindowSteps, size: [u64; 2]) -> Result<[Dim; 2], String> {
    let axes = steps.over(images(operands, x)?.lengths, size);
    match axes.map(crate::window::WindowAxis::places) {
        [Some(rows), Some(columns)] => Ok([Dim::Fixed(rows), Dim::Fixed(columns)]),
        _ => {
            let [height, width] = size;
            let padding = steps.padding;
            let expected = format!("a height and a width that with padding {padding:?} hold {height} by {width}");
            Err(operands.misfit(x, &expected))
        }
    }
}

fn check_stride(steps: WindowSteps) -> Result<(), String> {
    if steps.stride.contains(&0) {
        return Err(format!("found stride {:?}; expected numbers above zero", steps.stride));
    }
    Ok(())
}

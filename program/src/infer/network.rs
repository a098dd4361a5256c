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
        other => unreachable!("{} is no arithmetic", other.name()),
    }
}

/// Images: any number of them, of fixed channels, height and width.
struct Images {
    element_type: ElementType,
    count: Dim,
    channels: u64,
    lengths: [u64; 2],
}

fn images(operands: &Operands<'_>, place: usize) -> Result<Images, String> {
    match operands.floats(place)? {
        (element_type, [count, Dim::Fixed(channels), Dim::Fixed(height), Dim::Fixed(width)]) => {
            Ok(Images { element_type, count: *count, channels: *channels, lengths: [*height, *width] })
        }
        _ => Err(operands.misfit(place, "four dimensions, of which the last three are fixed")),
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

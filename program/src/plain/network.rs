//! Layers of networks for texts.

use crate::value::{Tensor, VariableValue};

use super::real::TensorReal;
use super::{pointwise::index, total};

/// `x Phi(x)`, with the distribution function of the normal distribution.
pub(super) fn gelu<R: TensorReal>(x: R, approximate: bool) -> R {
    x * distribution(x, approximate)
}

/// The derivative `Phi(x) + x Phi'(x)`.
pub(super) fn gelu_slope<R: TensorReal>(x: R, approximate: bool) -> R {
    let whole = distribution(x, approximate);
    let half = R::nearest(0.5);
    let density = if approximate {
        // Its last factor grows, and without bound where the others vanish.
        let rise = R::nearest(TANH_RISE) * (R::ONE + R::nearest(3.0 * TANH_CUBE) * x * x);
        let fall = (R::ONE - whole) * whole;
        if fall > R::ZERO { (R::ONE + R::ONE) * fall * rise } else { R::ZERO }
    } else {
        (-(x * x * half)).exp() * R::nearest(std::f64::consts::FRAC_2_SQRT_PI / std::f64::consts::SQRT_2 / 2.0)
    };
    whole + x * density
}

/// `sqrt(2 / pi)`.
const TANH_RISE: f64 = std::f64::consts::FRAC_2_SQRT_PI / std::f64::consts::SQRT_2;
/// The factor of the cube in the approximation.
const TANH_CUBE: f64 = 0.044_715;

/// The distribution function. Both forms are without the difference from one that would lose the digits of its tail.
fn distribution<R: TensorReal>(x: R, approximate: bool) -> R {
    if approximate {
        // (1 + tanh(u)) / 2
        let u = R::nearest(TANH_RISE) * (x + R::nearest(TANH_CUBE) * x * x * x);
        (u + u).sigmoid()
    } else {
        R::nearest(0.5) * (-(x * R::nearest(std::f64::consts::FRAC_1_SQRT_2))).erfc()
    }
}

/// Rows of the last dimension, normalised, scaled and shifted.
pub(super) fn layer_norm<R: TensorReal>(inputs: &[&VariableValue], epsilon: f64) -> Tensor {
    let [x, scale, bias] = [0, 1, 2].map(|place: usize| inputs[place].tensor());
    let (scale, bias) = (R::slice(scale.elements()), R::slice(bias.elements()));
    let mut y = Vec::with_capacity(x.elements().len());
    for row in R::slice(x.elements()).chunks_exact(scale.len()) {
        let row = NormalisedRow::new(row, epsilon);
        y.extend(row.values.iter().zip(scale).zip(bias).map(|((value, scale), bias)| *value * *scale + *bias));
    }
    Tensor::new(x.shape(), R::wrap(y))
}

/// The gradients of the input and of the scale.
pub(super) fn layer_norm_gradient<R: TensorReal>(inputs: &[&VariableValue], epsilon: f64) -> Vec<VariableValue> {
    let [x, scale, slope] = [0, 1, 2].map(|place: usize| inputs[place].tensor());
    let width = index(scale.shape()[0]);
    let weights = R::slice(scale.elements());
    let mut x_gradient = Vec::with_capacity(x.elements().len());
    let mut scale_gradient = vec![R::ZERO; width];
    let slopes = R::slice(slope.elements()).chunks_exact(width);
    for (row, slope) in R::slice(x.elements()).chunks_exact(width).zip(slopes) {
        let row = NormalisedRow::new(row, epsilon);
        let inner: Vec<R> = slope.iter().zip(weights).map(|(slope, weight)| *slope * *weight).collect();
        let along: Vec<R> = inner.iter().zip(&row.values).map(|(slope, value)| *slope * *value).collect();
        let (shift, stretch) = (total(&inner) / R::count(width), total(&along) / R::count(width));
        let gradient = inner.iter().zip(&row.values);
        x_gradient.extend(gradient.map(|(slope, value)| row.inverse * (*slope - shift - *value * stretch)));
        for ((sum, slope), value) in scale_gradient.iter_mut().zip(slope).zip(&row.values) {
            *sum = *sum + *slope * *value;
        }
    }
    let x_gradient = Tensor::new(x.shape(), R::wrap(x_gradient));
    vec![x_gradient.into(), Tensor::new(scale.shape(), R::wrap(scale_gradient)).into()]
}

/// One over a standard deviation.
pub(super) fn inverse_deviation<R: TensorReal>(variance: R, epsilon: f64) -> R {
    R::ONE / (variance + R::nearest(epsilon)).sqrt()
}

/// A row of mean zero and variance one, as far as epsilon lets it.
struct NormalisedRow<R> {
    values: Vec<R>,
    /// One over the standard deviation.
    inverse: R,
}

impl<R: TensorReal> NormalisedRow<R> {
    fn new(row: &[R], epsilon: f64) -> Self {
        let mean = total(row) / R::count(row.len());
        let away: Vec<R> = row.iter().map(|value| *value - mean).collect();
        let squares: Vec<R> = away.iter().map(|away| *away * *away).collect();
        let variance = total(&squares) / R::count(row.len());
        let inverse = inverse_deviation(variance, epsilon);
        Self { values: away.iter().map(|away| *away * inverse).collect(), inverse }
    }
}

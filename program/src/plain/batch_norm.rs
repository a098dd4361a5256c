//! Normalisation of channels by a batch's statistics, and its gradients.

use crate::value::{Elements, Tensor, VariableValue};

use super::network::inverse_deviation;
use super::pointwise::index;
use super::real::TensorReal;

/// Places of a channel's elements in a tensor `[n, c, ...]`.
struct Channels {
    rows: usize,
    channels: usize,
    /// Elements of a channel in one row.
    inner: usize,
}

impl Channels {
    fn of(tensor: &Tensor) -> Self {
        let [rows, channels, inner @ ..] = tensor.shape() else { panic!("a checked channel has a dimension") };
        let inner = inner.iter().map(|length| index(*length)).product();
        Self { rows: index(*rows), channels: index(*channels), inner }
    }

    /// Places of a channel in one row after the other.
    fn places(&self, channel: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let Self { rows, channels, inner } = *self;
        (0..rows).map(move |row| (row * channels + channel) * inner).map(move |start| start..start + inner)
    }

    fn take<R: TensorReal>(&self, channel: usize, from: &Tensor) -> Vec<R> {
        let elements = R::slice(from.elements());
        self.places(channel).flat_map(|places| elements[places].iter().copied()).collect()
    }

    fn put<R: TensorReal>(&self, channel: usize, to: &mut [R], mut values: impl Iterator<Item = R>) {
        for places in self.places(channel) {
            to[places].iter_mut().zip(&mut values).for_each(|(element, value)| *element = value);
        }
    }
}

/// A sum in binary64: a channel of a large batch has many elements.
fn total<R: TensorReal>(values: impl Iterator<Item = R>) -> f64 {
    values.map(R::widen).sum()
}

/// The numbers of each channel that this input has.
fn numbers<R: TensorReal>(input: &VariableValue) -> &[R] {
    R::slice(input.tensor().elements())
}

/// Whether statistics are the batch's.
fn is_training(step: &VariableValue) -> bool {
    matches!(step.tensor().elements(), Elements::Int64(step) if step.first().is_some_and(|step| *step >= 0))
}

/// The normalised tensor, and the mean and the variance of each channel.
pub(super) fn output<R: TensorReal>(inputs: &[&VariableValue], epsilon: f64) -> Vec<VariableValue> {
    let x = inputs[0].tensor();
    let [scale, bias, means, variances] = [1, 2, 3, 4].map(|place: usize| numbers::<R>(inputs[place]));
    let (channels, is_training) = (Channels::of(x), is_training(inputs[5]));
    let mut y = vec![R::ZERO; x.elements().len()];
    let (mut means, mut variances) = (means.to_vec(), variances.to_vec());
    for channel in 0..scale.len() {
        let values = channels.take::<R>(channel, x);
        if is_training {
            let mean = R::nearest(total(values.iter().copied()) / values.len() as f64);
            let squares = values.iter().map(|value| (*value - mean) * (*value - mean));
            (means[channel], variances[channel]) = (mean, R::nearest(total(squares) / values.len() as f64));
        }
        let (mean, inverse) = (means[channel], inverse_deviation(variances[channel], epsilon));
        let normal = values.iter().map(|value| (*value - mean) * inverse * scale[channel] + bias[channel]);
        channels.put(channel, &mut y, normal);
    }
    let shape = inputs[1].tensor().shape();
    let statistics = [means, variances].map(|values| Tensor::new(shape, R::wrap(values)).into());
    std::iter::once(Tensor::new(x.shape(), R::wrap(y)).into()).chain(statistics).collect()
}

/// The gradients of the input and of the scale. At a step below zero the statistics do not depend on the input.
pub(super) fn gradient<R: TensorReal>(inputs: &[&VariableValue], epsilon: f64) -> Vec<VariableValue> {
    let (x, slope) = (inputs[0].tensor(), inputs[5].tensor());
    let [scale, means, variances] = [1, 2, 3].map(|place: usize| numbers::<R>(inputs[place]));
    let (channels, is_training) = (Channels::of(x), is_training(inputs[4]));
    let mut x_gradient = vec![R::ZERO; x.elements().len()];
    let mut scale_gradient = Vec::with_capacity(scale.len());
    for channel in 0..scale.len() {
        let inverse = inverse_deviation(variances[channel], epsilon);
        let values = channels.take::<R>(channel, x).into_iter().map(|value| (value - means[channel]) * inverse);
        let (values, slopes) = (values.collect::<Vec<R>>(), channels.take::<R>(channel, slope));
        let along = total(values.iter().zip(&slopes).map(|(value, slope)| *value * *slope));
        let share = |sum: f64| R::nearest(if is_training { sum / values.len() as f64 } else { 0.0 });
        let (shift, stretch) = (share(total(slopes.iter().copied())), share(along));
        let factor = scale[channel] * inverse;
        let elements = values.iter().zip(&slopes).map(|(value, slope)| factor * (*slope - shift - *value * stretch));
        channels.put(channel, &mut x_gradient, elements);
        scale_gradient.push(R::nearest(along));
    }
    let x_gradient = Tensor::new(x.shape(), R::wrap(x_gradient));
    vec![x_gradient.into(), Tensor::new(inputs[1].tensor().shape(), R::wrap(scale_gradient)).into()]
}

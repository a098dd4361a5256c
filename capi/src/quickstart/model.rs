//! A small neural network in plain Rust: 64 pixels, two hidden layers, ten classes.
//!
//! It stands in for the user's framework, so it knows nothing of servers: it has parameters with names and
//! shapes, and it computes gradients. Not here: who applies them; see [`super::trainer`].

use super::digits::{CLASSES, Digit, PIXELS};
use super::luck::Luck;

/// The widths between the layers. The last layer's output is the score of each class.
const WIDTHS: [usize; 4] = [PIXELS, 64, 32, CLASSES];

/// A named tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Such as `layer1/weight`.
    pub name: String,
    /// Row-major: a weight is inputs by outputs, a bias has one dimension.
    pub shape: Vec<u64>,
    /// One value an element.
    pub values: Vec<f32>,
}

/// The network: for every layer a weight and a bias, in that order.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    parameters: Vec<Parameter>,
}

/// The mean loss of a batch, and its gradient by every parameter, in the model's order.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Mean cross-entropy in nats.
    pub loss: f32,
    /// One tensor a parameter, of the parameter's length.
    pub by_parameter: Vec<Vec<f32>>,
}

impl Model {
    /// Initial values after He: weights uniform within `sqrt(6 / inputs)`, biases zero. They follow from `seed`
    /// alone.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut luck = Luck::new(seed);
        let mut parameters = Vec::new();
        for (layer, pair) in WIDTHS.windows(2).enumerate() {
            let (inputs, outputs) = (pair[0], pair[1]);
            let bound = (6.0 / real(inputs)).sqrt();
            let weight = (0..inputs * outputs).map(|_| narrow(luck.signed()) * bound);
            let named = |kind, shape: &[usize], values| Parameter {
                name: format!("layer{}/{kind}", layer + 1),
                shape: shape.iter().map(|&extent| extent as u64).collect(),
                values,
            };
            parameters.push(named("weight", &[inputs, outputs], weight.collect()));
            parameters.push(named("bias", &[outputs], vec![0.0; outputs]));
        }
        Self { parameters }
    }

    /// Its parameters, in a fixed order.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Its parameters, to be overwritten with new values.
    pub fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    /// The loss of `batch` and the gradient that lowers it when subtracted.
    ///
    /// # Panics
    /// When `batch` is empty: there is no mean.
    #[must_use]
    pub fn gradients(&self, batch: &[&Digit]) -> Gradients {
        assert!(!batch.is_empty(), "a batch has at least one digit");
        let mut by_parameter: Vec<Vec<f32>> = self.parameters.iter().map(|p| vec![0.0; p.values.len()]).collect();
        let activations = self.forward(batch);
        let (loss, mut slope) = loss_and_slope(&activations[activations.len() - 1], batch);
        for layer in (0..WIDTHS.len() - 1).rev() {
            let (weights, biases) = by_parameter.split_at_mut(2 * layer + 1);
            sum_outer(&activations[layer], &slope, &mut weights[2 * layer], &mut biases[0]);
            if layer > 0 {
                slope = slope_below(&activations[layer], &slope, &self.parameters[2 * layer].values, biases[0].len());
            }
        }
        Gradients { loss, by_parameter }
    }

    /// One step of plain gradient descent.
    pub fn descend(&mut self, gradients: &Gradients, rate: f32) {
        for (parameter, gradient) in self.parameters.iter_mut().zip(&gradients.by_parameter) {
            for (value, slope) in parameter.values.iter_mut().zip(gradient) {
                *value -= rate * slope;
            }
        }
    }

    /// The share of `digits` that the model names rightly, 0 to 1.
    ///
    /// # Panics
    /// When `digits` is empty.
    #[must_use]
    pub fn accuracy(&self, digits: &[&Digit]) -> f64 {
        assert!(!digits.is_empty(), "an accuracy needs at least one digit");
        let activations = self.forward(digits);
        let scores = activations[activations.len() - 1].chunks_exact(CLASSES);
        let right = scores.zip(digits).filter(|(scores, digit)| best(scores) == digit.label);
        f64::from(real(right.count())) / f64::from(real(digits.len()))
    }

    /// The inputs of every layer and the last one's output; row-major, one row a digit.
    fn forward(&self, batch: &[&Digit]) -> Vec<Vec<f32>> {
        let mut activations = vec![batch.iter().flat_map(|digit| digit.pixels).collect::<Vec<f32>>()];
        for layer in 0..WIDTHS.len() - 1 {
            let (weight, bias) = (&self.parameters[2 * layer].values, &self.parameters[2 * layer + 1].values);
            let mut output = affine(&activations[layer], weight, bias, WIDTHS[layer]);
            if layer + 2 < WIDTHS.len() {
                output.iter_mut().for_each(|value| *value = value.max(0.0));
            }
            activations.push(output);
        }
        activations
    }
}

fn affine(input: &[f32], weight: &[f32], bias: &[f32], inputs: usize) -> Vec<f32> {
    let mut output = Vec::with_capacity(input.len() / inputs * bias.len());
    for row in input.chunks_exact(inputs) {
        let start = output.len();
        output.extend_from_slice(bias);
        for (&value, weights) in row.iter().zip(weight.chunks_exact(bias.len())) {
            add_scaled(&mut output[start..], value, weights);
        }
    }
    output
}

/// Softmax and cross-entropy: the mean loss, and its slope by every score.
fn loss_and_slope(scores: &[f32], batch: &[&Digit]) -> (f32, Vec<f32>) {
    let mut slope = scores.to_vec();
    let mut loss = 0.0;
    for (row, digit) in slope.chunks_exact_mut(CLASSES).zip(batch) {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|score| *score = (*score - highest).exp());
        let sum: f32 = row.iter().sum();
        loss += (sum / row[digit.label]).ln();
        row.iter_mut().for_each(|part| *part /= sum);
        row[digit.label] -= 1.0;
        row.iter_mut().for_each(|part| *part /= real(batch.len()));
    }
    (loss / real(batch.len()), slope)
}

/// Adds every digit's share to a layer's gradients.
fn sum_outer(input: &[f32], slope: &[f32], weight: &mut [f32], bias: &mut [f32]) {
    let (inputs, outputs) = (weight.len() / bias.len(), bias.len());
    for (values, slopes) in input.chunks_exact(inputs).zip(slope.chunks_exact(outputs)) {
        add_scaled(bias, 1.0, slopes);
        for (&value, row) in values.iter().zip(weight.chunks_exact_mut(outputs)) {
            add_scaled(row, value, slopes);
        }
    }
}

/// The slope by a layer's input, which is a rectifier's output: zero passes nothing.
fn slope_below(input: &[f32], slope: &[f32], weight: &[f32], outputs: usize) -> Vec<f32> {
    let inputs = weight.len() / outputs;
    let mut below = Vec::with_capacity(input.len());
    for (values, slopes) in input.chunks_exact(inputs).zip(slope.chunks_exact(outputs)) {
        for (&value, row) in values.iter().zip(weight.chunks_exact(outputs)) {
            let through: f32 = row.iter().zip(slopes).map(|(weight, slope)| weight * slope).sum();
            below.push(if value > 0.0 { through } else { 0.0 });
        }
    }
    below
}

fn add_scaled(sum: &mut [f32], scale: f32, values: &[f32]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += scale * value;
    }
}

fn best(scores: &[f32]) -> usize {
    (0..scores.len()).fold(0, |best, class| if scores[class] > scores[best] { class } else { best })
}

/// A small count as a number to calculate with.
fn real(count: usize) -> f32 {
    f32::from(u16::try_from(count).expect("batches and widths here are below 65,536"))
}

/// Rounds to the nearest; the value is a random number below one, so nothing overflows.
#[expect(clippy::cast_possible_truncation, reason = "rounding is what is wanted")]
fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::super::digits::{Digit, Digits};
    use super::super::luck::Luck;
    use super::Model;

    /// The loss's slope along parameter `index`, element `element`, by a symmetric difference.
    fn difference(model: &Model, batch: &[&Digit], index: usize, element: usize) -> f32 {
        const STEP: f32 = 1.0 / 1024.0;
        let loss = |shift: f32| {
            let mut moved = model.clone();
            moved.parameters_mut()[index].values[element] += shift;
            moved.gradients(batch).loss
        };
        (loss(STEP) - loss(-STEP)) / (2.0 * STEP)
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        let digits = Digits::load().unwrap();
        let (share, model) = (digits.part(0, 45).unwrap(), Model::new(1));
        let gradients = model.gradients(&share).by_parameter;
        let mut luck = Luck::new(2);
        for (index, gradient) in gradients.iter().enumerate() {
            let largest = gradient.iter().fold(0.0_f32, |most, slope| most.max(slope.abs()));
            assert!(largest > 0.01, "{} is too flat to check", model.parameters()[index].name);
            for _ in 0..40 {
                let element = luck.below(gradient.len());
                let (exact, found) = (gradient[element], difference(&model, &share, index, element));
                // f32 keeps the loss to 2e-7, which a step of 1/1024 turns into 1e-4; the rectifier's corners
                // add the rest.
                assert!(
                    (exact - found).abs() < 1e-3 + 0.02 * exact.abs(),
                    "{}[{element}]: gradient {exact}, difference {found}",
                    model.parameters()[index].name
                );
            }
        }
    }

    #[test]
    fn the_network_reads_held_out_digits() {
        let digits = Digits::load().unwrap();
        let (mut share, mut model, mut luck) = (digits.part(0, 1).unwrap(), Model::new(7), Luck::new(7));
        for _ in 0..30 {
            luck.shuffle(&mut share);
            for batch in share.chunks(32) {
                let gradients = model.gradients(batch);
                model.descend(&gradients, 0.2);
            }
        }
        let accuracy = model.accuracy(&digits.held_out());
        assert!(accuracy >= 0.96, "accuracy {accuracy}");
    }

    #[test]
    fn the_same_seed_gives_the_same_model() {
        assert_eq!(Model::new(3), Model::new(3));
        assert_ne!(Model::new(3), Model::new(4));
    }

    #[test]
    fn parameters_have_names_and_shapes() {
        let model = Model::new(0);
        let found: Vec<(&str, &[u64])> =
            model.parameters().iter().map(|p| (p.name.as_str(), p.shape.as_slice())).collect();
        let expected: [(&str, &[u64]); 6] = [
            ("layer1/weight", &[64, 64]),
            ("layer1/bias", &[64]),
            ("layer2/weight", &[64, 32]),
            ("layer2/bias", &[32]),
            ("layer3/weight", &[32, 10]),
            ("layer3/bias", &[10]),
        ];
        assert_eq!(found, expected);
        for parameter in model.parameters() {
            assert_eq!(parameter.shape.iter().product::<u64>(), parameter.values.len() as u64);
        }
    }
}

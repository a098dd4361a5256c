//! Scalar reference implementation of every optimizer, one element after another. Kernels are compared with it.

use crate::dtype::ElementType;
use crate::limits::STATES_MAX;
use crate::rule::UpdateInputs;
use crate::rule::reference::ParameterPiece;

use super::algorithm::Algorithm;
use super::coefficients::{Coefficients, FtrlCoefficients};
use super::element::{Gradient, OptimizerElement, OptimizerReal};
use super::rule::Rule;

/// Updates a piece of a parameter and of its states, in place, by the sum of the gradients.
///
/// The states are in the order of [`Rule::states`]. Each gradient has as many elements as the parameter, of its own
/// type, in trainer order. No gradients mean a gradient of zero. Their bytes are little endian and may lie at any
/// address.
///
/// # Panics
///
/// When a length, a type or the number of states does not fit, or when the rule does not go with the type (see
/// [`Rule::validate_for`]): callers check them before.
pub fn update(rule: &Rule, coefficients: &Coefficients, piece: ParameterPiece<'_>, gradients: &[Gradient<'_>]) {
    let ParameterPiece { element_type, parameter, states } = piece;
    assert_gradients_fit(element_type, parameter, gradients);
    assert_eq!(states.len(), rule.states().len(), "{} has these states: {:?}", rule.algorithm.name(), rule.states());
    assert!(states.iter().all(|state| state.len() == parameter.len()), "a state is as long as its parameter");
    assert!(
        element_type.is_float() || rule.algorithm.is_exact(),
        "{} was let through for {element_type}",
        rule.algorithm.name()
    );
    let scale = coefficients.gradient_scale;
    match (&rule.algorithm, element_type) {
        (Algorithm::Add, _) => add_scaled(element_type, parameter, gradients, scale),
        (Algorithm::Sum, _) => sum_scaled(element_type, parameter, gradients, scale),
        (algorithm, ElementType::Float32) => {
            update_reals::<f32>(algorithm, coefficients, parameter, states, gradients);
        }
        (algorithm, _) => update_reals::<f64>(algorithm, coefficients, parameter, states, gradients),
    }
}

/// Adds the sum of the gradients times the scale to the parameter, as [`Algorithm::Add`] says. Integers are not scaled.
///
/// # Panics
///
/// When a length or a type does not fit.
pub fn add_scaled(element_type: ElementType, parameter: &mut [u8], gradients: &[Gradient<'_>], scale: f64) {
    assert_gradients_fit(element_type, parameter, gradients);
    match element_type {
        ElementType::Int32 => add_integers::<i32>(parameter, gradients),
        ElementType::Uint32 => add_integers::<u32>(parameter, gradients),
        ElementType::Int64 => add_integers::<i64>(parameter, gradients),
        ElementType::Uint64 => add_integers::<u64>(parameter, gradients),
        ElementType::Float32 => add_reals::<f32>(parameter, gradients, scale),
        ElementType::Float64 => add_reals::<f64>(parameter, gradients, scale),
        ElementType::Float16 | ElementType::Bfloat16 => refuse_half(element_type),
    }
}

/// Puts the sum of the gradients times the scale in the parameter's place, as [`Algorithm::Sum`] says. Integers are not
/// scaled.
///
/// # Panics
///
/// When a length or a type does not fit.
pub fn sum_scaled(element_type: ElementType, parameter: &mut [u8], gradients: &[Gradient<'_>], scale: f64) {
    sum(element_type, parameter, gradients);
    match element_type {
        ElementType::Float32 => scale_reals::<f32>(parameter, scale),
        ElementType::Float64 => scale_reals::<f64>(parameter, scale),
        _ => {}
    }
}

/// Writes the sum of the gradients, added left to right in `element_type`, over `into`. No gradients sum to zero.
///
/// # Panics
///
/// When a length or a type does not fit.
pub fn sum(element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
    assert_gradients_fit(element_type, into, gradients);
    match element_type {
        ElementType::Int32 => sum_elements::<i32>(into, gradients),
        ElementType::Uint32 => sum_elements::<u32>(into, gradients),
        ElementType::Int64 => sum_elements::<i64>(into, gradients),
        ElementType::Uint64 => sum_elements::<u64>(into, gradients),
        ElementType::Float32 => sum_elements::<f32>(into, gradients),
        ElementType::Float64 => sum_elements::<f64>(into, gradients),
        ElementType::Float16 | ElementType::Bfloat16 => refuse_half(element_type),
    }
}

fn add_integers<E: OptimizerElement>(parameter: &mut [u8], gradients: &[Gradient<'_>]) {
    for index in 0..parameter.len() / E::BYTES {
        E::read(parameter, index).plus(merged(gradients, index)).write(parameter, index);
    }
}

fn add_reals<E: OptimizerReal>(parameter: &mut [u8], gradients: &[Gradient<'_>], scale: f64) {
    for index in 0..parameter.len() / E::BYTES {
        E::read(parameter, index).plus(merged::<E>(gradients, index).scaled(scale)).write(parameter, index);
    }
}

fn scale_reals<E: OptimizerReal>(values: &mut [u8], scale: f64) {
    for index in 0..values.len() / E::BYTES {
        E::read(values, index).scaled(scale).write(values, index);
    }
}

fn update_reals<E: OptimizerReal>(
    algorithm: &Algorithm,
    coefficients: &Coefficients,
    parameter: &mut [u8],
    states: &mut [&mut [u8]],
    gradients: &[Gradient<'_>],
) {
    for index in 0..parameter.len() / E::BYTES {
        let weight = E::read(parameter, index);
        let sum: E = merged(gradients, index);
        let mut values = [0.0; STATES_MAX];
        let values = &mut values[..states.len()];
        for (value, state) in values.iter_mut().zip(states.iter()) {
            *value = E::read(state, index).widen();
        }
        let weight = update_element(algorithm, coefficients, weight.widen(), sum.widen(), values);
        for (value, state) in values.iter().zip(states.iter_mut()) {
            E::nearest(*value).write(state, index);
        }
        E::nearest(weight).write(parameter, index);
    }
}

/// Steps 2 to 5 of the [module's page](super) for one element; gives back the new weight.
fn update_element(
    algorithm: &Algorithm,
    coefficients: &Coefficients,
    weight: f64,
    sum: f64,
    states: &mut [f64],
) -> f64 {
    let c = coefficients;
    let gradient = bounded(sum * c.gradient_scale, c.gradient_bound);
    let gradient = gradient + pull(weight, c.regularization.coupled_l1, c.regularization.coupled_l2);
    let weight = weight - pull(weight, c.regularization.decay_l1, c.regularization.decay_l2);
    let weight = step(algorithm, c, weight, gradient, states);
    soft_threshold(weight, c.regularization.threshold) * c.regularization.shrink
}

pub(super) fn step(algorithm: &Algorithm, c: &Coefficients, weight: f64, gradient: f64, states: &mut [f64]) -> f64 {
    if let Algorithm::Custom(written) = algorithm {
        return written.interpret(&UpdateInputs { rate: c.rate, count: c.count }, weight, gradient, states);
    }
    let (mut none, mut neither) = (0.0, 0.0);
    let (first, second) = match states {
        [] => (&mut none, &mut neither),
        [first] => (first, &mut neither),
        [first, second, ..] => (first, second),
    };
    let decays = &c.decays;
    match algorithm {
        Algorithm::Add | Algorithm::Sum | Algorithm::Custom(_) => {
            unreachable!("exact and custom algorithms were handled above")
        }
        Algorithm::Sgd => weight - c.step * gradient,
        Algorithm::Momentum { nesterov, .. } => {
            *first = decays.momentum * *first - c.step * gradient;
            weight + if *nesterov { decays.momentum * *first - c.step * gradient } else { *first }
        }
        Algorithm::Adagrad { .. } => {
            *first += gradient * gradient;
            weight - c.step * gradient / (*first + c.epsilon).sqrt()
        }
        Algorithm::Adadelta { .. } => {
            *first = decays.rho * *first + decays.rho_complement * gradient * gradient;
            let direction = (*second + c.epsilon).sqrt() / (*first + c.epsilon).sqrt() * gradient;
            *second = decays.rho * *second + decays.rho_complement * direction * direction;
            weight - c.step * direction
        }
        Algorithm::RmsProp { .. } => {
            *first = decays.rho * *first + decays.rho_complement * gradient * gradient;
            *second = decays.momentum * *second - c.step * gradient / (*first + c.epsilon).sqrt();
            weight + *second
        }
        Algorithm::Adam { .. } | Algorithm::AdamW { .. } => {
            *first = decays.beta1 * *first + decays.beta1_complement * gradient;
            *second = decays.beta2 * *second + decays.beta2_complement * gradient * gradient;
            weight - c.step * *first / (second.sqrt() + c.epsilon)
        }
        Algorithm::Ftrl { .. } => ftrl(&c.ftrl, weight, gradient, first, second),
    }
}

fn ftrl(c: &FtrlCoefficients, weight: f64, gradient: f64, square_sum: &mut f64, linear: &mut f64) -> f64 {
    if c.inverse_rate == 0.0 {
        return weight;
    }
    let before = square_sum.powf(c.power);
    *square_sum += gradient * gradient;
    let after = square_sum.powf(c.power);
    *linear += gradient - (after - before) * c.inverse_rate * weight;
    if *square_sum == 0.0 {
        return weight;
    }
    -soft_threshold(*linear, c.l1) / ((c.beta + after) * c.inverse_rate + c.l2)
}

/// The sum of the gradients' elements, left to right. It starts from the first and not from zero, so that a single
/// negative zero is kept.
fn merged<E: OptimizerElement>(gradients: &[Gradient<'_>], index: usize) -> E {
    let mut elements = gradients.iter().map(|gradient| E::read_gradient(gradient, index));
    let first = elements.next().unwrap_or(E::ZERO);
    elements.fold(first, E::plus)
}

fn sum_elements<E: OptimizerElement>(into: &mut [u8], gradients: &[Gradient<'_>]) {
    for index in 0..into.len() / E::BYTES {
        merged::<E>(gradients, index).write(into, index);
    }
}

/// Clamps a value to plus and minus the bound. NaN passes.
fn bounded(value: f64, bound: f64) -> f64 {
    if value > bound {
        bound
    } else if value < -bound {
        -bound
    } else {
        value
    }
}

/// The derivative of the penalty. Without a penalty it is zero even where the weight is infinite.
fn pull(weight: f64, l1: f64, l2: f64) -> f64 {
    let first = if l1 == 0.0 { 0.0 } else { l1 * sign(weight) };
    let second = if l2 == 0.0 { 0.0 } else { l2 * weight };
    first + second
}

/// Minus one, zero or one; zero and NaN pass.
fn sign(value: f64) -> f64 {
    if value == 0.0 { value } else { value.signum() }
}

/// Moves a value towards zero by the threshold, and to zero when it is nearer. NaN passes.
fn soft_threshold(value: f64, threshold: f64) -> f64 {
    if value.abs() <= threshold { 0.0_f64.copysign(value) } else { value - threshold.copysign(value) }
}

/// Checks that gradients fit a parameter: an admissible type, and the same number of elements. Every kernel begins with
/// it.
///
/// # Panics
/// When they do not fit: admission to a round has checked them.
pub fn assert_gradients_fit(element_type: ElementType, parameter: &[u8], gradients: &[Gradient<'_>]) {
    let elements = elements(element_type, parameter);
    for gradient in gradients {
        let found = gradient.element_type;
        assert!(found.is_gradient_for(element_type), "a gradient of {found} does not fit {element_type}");
        assert_eq!(self::elements(found, gradient.bytes), elements, "a gradient is as long as its parameter");
    }
}

fn elements(element_type: ElementType, bytes: &[u8]) -> u64 {
    let length = bytes.len() as u64;
    // A power of two: a division would take longer than what is done to a short gradient.
    let shift = element_type.bytes().trailing_zeros();
    assert!(length >> shift << shift == length, "{length} bytes are not whole elements of {element_type}");
    length >> shift
}

fn refuse_half(element_type: ElementType) -> ! {
    panic!("a parameter of type {element_type} was admitted; half precision is for gradients")
}

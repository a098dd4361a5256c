//! One update of a chunk of floats: sum, scale, clip, regularize, step, regularize.
//!
//! The order and the formulas are those of [`pserver_core::optim`]. Every choice that a rule makes is made once per
//! tile, outside the loops; a regularizer that is absent costs nothing, one that is present is one more pass over a
//! tile that is in the first-level cache.

use pserver_core::optim::{Algorithm, Coefficients};
use pserver_core::port::Update;

use super::element::{Element, Real, Scratch, Source, TILE};
use super::sum;

/// An element in memory.
type Bytes<E> = <E as Source<E>>::Bytes;

/// The merged gradient of a tile, and what makes of its elements the gradient that the algorithm sees.
#[derive(Clone, Copy)]
struct Merged<'a, E: Element> {
    sum: &'a [Bytes<E>],
    scale: E,
    bound: E,
}

impl<'a, E: Real> Merged<'a, E> {
    #[inline(always)]
    fn new(sum: &'a [Bytes<E>], coefficients: &Coefficients) -> Self {
        Self { sum, scale: E::nearest(coefficients.gradient_scale), bound: E::nearest(coefficients.gradient_bound) }
    }

    /// A tile whose elements are already scaled and clipped.
    #[inline(always)]
    fn ready(sum: &'a [Bytes<E>]) -> Self {
        Self { sum, scale: E::ONE, bound: E::nearest(f64::INFINITY) }
    }

    /// Scales and keeps within the bound. A scale of one and an infinite bound change no bit.
    #[inline(always)]
    fn gradient(self, sum: Bytes<E>) -> E {
        let value = E::load(sum) * self.scale;
        let value = if value > self.bound { self.bound } else { value };
        if value < -self.bound { -self.bound } else { value }
    }
}

#[inline(always)]
pub(super) fn update_whole<E: Real>(update: &mut Update<'_>) {
    let (first, second): (&mut [u8], &mut [u8]) = match &mut *update.states {
        [] => (&mut [], &mut []),
        [first] => (first, &mut []),
        [first, second] => (first, second),
        more => panic!("no algorithm has {} states", more.len()),
    };
    let mut firsts = E::view_mut(first).chunks_mut(TILE);
    let mut seconds = E::view_mut(second).chunks_mut(TILE);
    // A lone gradient is its own sum, and a small chunk should not pay for clearing a tile.
    let mut scratch: Option<Scratch<E>> = None;
    let coefficients = update.coefficients;
    let coupled = coefficients.coupled_l1 != 0.0 || coefficients.coupled_l2 != 0.0;
    for (tile, weights) in E::view_mut(update.parameter).chunks_mut(TILE).enumerate() {
        let start = tile * TILE;
        let merged = match update.gradients {
            [lone] if !coupled && E::is_type_of(lone) => {
                Merged::<E>::new(&E::view(lone.bytes)[start..][..weights.len()], coefficients)
            }
            gradients => {
                let sum = &mut scratch.get_or_insert_with(Scratch::zero).0[..weights.len()];
                sum::into_tile::<E>(sum, gradients, start);
                if coupled {
                    couple::<E>(sum, weights, coefficients);
                    Merged::ready(sum)
                } else {
                    Merged::new(sum, coefficients)
                }
            }
        };
        let states = [firsts.next().unwrap_or_default(), seconds.next().unwrap_or_default()];
        update_tile::<E>(&update.rule.algorithm, coefficients, weights, states, merged);
    }
}

#[inline(always)]
fn update_tile<E: Real>(
    algorithm: &Algorithm,
    coefficients: &Coefficients,
    weights: &mut [Bytes<E>],
    states: [&mut [Bytes<E>]; 2],
    merged: Merged<'_, E>,
) {
    if coefficients.decay_l1 != 0.0 || coefficients.decay_l2 != 0.0 {
        decay::<E>(weights, coefficients);
    }
    step_tile::<E>(algorithm, coefficients, weights, states, merged);
    if coefficients.threshold != 0.0 || coefficients.shrink != 1.0 {
        shrink::<E>(weights, coefficients);
    }
}

#[inline(always)]
fn step_tile<E: Real>(
    algorithm: &Algorithm,
    c: &Coefficients,
    weights: &mut [Bytes<E>],
    [firsts, seconds]: [&mut [Bytes<E>]; 2],
    merged: Merged<'_, E>,
) {
    let step = E::nearest(c.step);
    match algorithm {
        Algorithm::Written(_) => unreachable!("what is written has code"),
        Algorithm::Add => stateless(weights, merged, |weight, gradient| weight + gradient),
        Algorithm::Sum => stateless(weights, merged, |_, gradient| gradient),
        Algorithm::Sgd => stateless(weights, merged, |weight, gradient| weight - step * gradient),
        Algorithm::Momentum { nesterov, .. } => momentum(*nesterov, c, weights, firsts, merged),
        Algorithm::Adagrad { .. } => {
            let epsilon = E::of_scalar(c.epsilon);
            one_state(weights, firsts, merged, |weight, gradient, square_sum| {
                *square_sum = *square_sum + gradient * gradient;
                weight - step * gradient / (*square_sum + epsilon).sqrt()
            });
        }
        Algorithm::Adadelta { .. } => adadelta(c, weights, firsts, seconds, merged),
        Algorithm::RmsProp { .. } => rms_prop(c, weights, firsts, seconds, merged),
        Algorithm::Adam { .. } | Algorithm::AdamW { .. } => adam(c, weights, firsts, seconds, merged),
        Algorithm::Ftrl { .. } => ftrl(c, weights, firsts, seconds, merged),
    }
}

#[inline(always)]
fn momentum<E: Real>(
    nesterov: bool,
    c: &Coefficients,
    weights: &mut [Bytes<E>],
    momentums: &mut [Bytes<E>],
    merged: Merged<'_, E>,
) {
    let (step, mu) = (E::nearest(c.step), E::nearest(c.momentum));
    if nesterov {
        one_state(weights, momentums, merged, |weight, gradient, momentum| {
            *momentum = mu * *momentum - step * gradient;
            weight + (mu * *momentum - step * gradient)
        });
    } else {
        one_state(weights, momentums, merged, |weight, gradient, momentum| {
            *momentum = mu * *momentum - step * gradient;
            weight + *momentum
        });
    }
}

#[inline(always)]
fn adadelta<E: Real>(
    c: &Coefficients,
    weights: &mut [Bytes<E>],
    gradient_means: &mut [Bytes<E>],
    step_means: &mut [Bytes<E>],
    merged: Merged<'_, E>,
) {
    let (step, epsilon) = (E::nearest(c.step), E::of_scalar(c.epsilon));
    let (rho, rest) = (E::nearest(c.rho), E::nearest(c.rho_complement));
    two_states(weights, gradient_means, step_means, merged, |weight, gradient, gradient_mean, step_mean| {
        *gradient_mean = rho * *gradient_mean + rest * gradient * gradient;
        let direction = (*step_mean + epsilon).sqrt() / (*gradient_mean + epsilon).sqrt() * gradient;
        *step_mean = rho * *step_mean + rest * direction * direction;
        weight - step * direction
    });
}

#[inline(always)]
fn rms_prop<E: Real>(
    c: &Coefficients,
    weights: &mut [Bytes<E>],
    square_means: &mut [Bytes<E>],
    momentums: &mut [Bytes<E>],
    merged: Merged<'_, E>,
) {
    let (step, epsilon) = (E::nearest(c.step), E::of_scalar(c.epsilon));
    let (rho, rest, mu) = (E::nearest(c.rho), E::nearest(c.rho_complement), E::nearest(c.momentum));
    if c.momentum == 0.0 {
        one_state(weights, square_means, merged, |weight, gradient, square_mean| {
            *square_mean = rho * *square_mean + rest * gradient * gradient;
            weight - step * gradient / (*square_mean + epsilon).sqrt()
        });
    } else {
        two_states(weights, square_means, momentums, merged, |weight, gradient, square_mean, momentum| {
            *square_mean = rho * *square_mean + rest * gradient * gradient;
            *momentum = mu * *momentum - step * gradient / (*square_mean + epsilon).sqrt();
            weight + *momentum
        });
    }
}

#[inline(always)]
fn adam<E: Real>(
    c: &Coefficients,
    weights: &mut [Bytes<E>],
    first_moments: &mut [Bytes<E>],
    second_moments: &mut [Bytes<E>],
    merged: Merged<'_, E>,
) {
    let (step, epsilon) = (E::nearest(c.step), E::of_scalar(c.epsilon));
    let (beta1, rest1) = (E::nearest(c.beta1), E::nearest(c.beta1_complement));
    let (beta2, rest2) = (E::nearest(c.beta2), E::nearest(c.beta2_complement));
    two_states(weights, first_moments, second_moments, merged, |weight, gradient, first, second| {
        *first = beta1 * *first + rest1 * gradient;
        *second = beta2 * *second + rest2 * gradient * gradient;
        weight - step * *first / (second.sqrt() + epsilon)
    });
}

/// In binary64 whatever the type: the difference of two powers that are nearly equal would lose every digit of a
/// binary32. The usual power, one half, is a root, which is vector code; any other is a call for every element.
#[inline(always)]
fn ftrl<E: Real>(
    c: &Coefficients,
    weights: &mut [Bytes<E>],
    square_sums: &mut [Bytes<E>],
    linears: &mut [Bytes<E>],
    merged: Merged<'_, E>,
) {
    if c.inverse_rate == 0.0 {
        return;
    }
    if c.power == 0.5 {
        ftrl_with::<E>(c, weights, square_sums, linears, merged, |value| value.sqrt());
    } else {
        ftrl_with::<E>(c, weights, square_sums, linears, merged, |value| value.powf(c.power));
    }
}

#[inline(always)]
fn ftrl_with<E: Real>(
    c: &Coefficients,
    weights: &mut [Bytes<E>],
    square_sums: &mut [Bytes<E>],
    linears: &mut [Bytes<E>],
    merged: Merged<'_, E>,
    power: impl Fn(f64) -> f64,
) {
    let (inverse_rate, beta, l1, l2) = (c.inverse_rate, c.beta, c.ftrl_l1, c.ftrl_l2);
    two_states(weights, square_sums, linears, merged, |old_weight, gradient, square_sum, linear| {
        let (weight, gradient) = (old_weight.widen(), gradient.widen());
        let before = square_sum.widen();
        let after = before + gradient * gradient;
        let (root_before, root_after) = (power(before), power(after));
        let pulled = linear.widen() + (gradient - (root_after - root_before) * inverse_rate * weight);
        *square_sum = E::nearest(after);
        *linear = E::nearest(pulled);
        let solved = -soft_threshold(pulled, l1) / ((beta + root_after) * inverse_rate + l2);
        if after == 0.0 { old_weight } else { E::nearest(solved) }
    });
}

/// Makes of the summed gradient the scaled, clipped and regularized one, in place.
#[inline(always)]
fn couple<E: Real>(sums: &mut [Bytes<E>], weights: &[Bytes<E>], c: &Coefficients) {
    let merged = Merged::<E>::new(&[], c);
    let (l1, l2) = (E::nearest(c.coupled_l1), E::nearest(c.coupled_l2));
    for (sum, &weight) in sums.iter_mut().zip(weights) {
        *sum = (merged.gradient(*sum) + pull(E::load(weight), l1, l2)).store();
    }
}

#[inline(always)]
fn decay<E: Real>(weights: &mut [Bytes<E>], c: &Coefficients) {
    let (l1, l2) = (E::nearest(c.decay_l1), E::nearest(c.decay_l2));
    for bytes in weights {
        let weight = E::load(*bytes);
        *bytes = (weight - pull(weight, l1, l2)).store();
    }
}

#[inline(always)]
fn shrink<E: Real>(weights: &mut [Bytes<E>], c: &Coefficients) {
    let (threshold, factor) = (E::nearest(c.threshold), E::nearest(c.shrink));
    for bytes in weights {
        *bytes = (soft_threshold(E::load(*bytes), threshold) * factor).store();
    }
}

/// The derivative of the penalty. An absent term is left out, so that an infinite weight stays infinite.
#[inline(always)]
fn pull<E: Real>(weight: E, l1: E, l2: E) -> E {
    // Zero and what is not a number are their own sign.
    let sign = if E::ZERO < weight.abs() { E::ONE.copysign(weight) } else { weight };
    let first = if l1 == E::ZERO { E::ZERO } else { l1 * sign };
    let second = if l2 == E::ZERO { E::ZERO } else { l2 * weight };
    first + second
}

/// Moves a value towards zero by the threshold, and to zero when it is nearer.
#[inline(always)]
fn soft_threshold<E: Real>(value: E, threshold: E) -> E {
    let moved = value - threshold.copysign(value);
    if value.abs() <= threshold { E::ZERO.copysign(value) } else { moved }
}

#[inline(always)]
fn stateless<E: Real>(weights: &mut [Bytes<E>], merged: Merged<'_, E>, step: impl Fn(E, E) -> E) {
    for (weight, &sum) in weights.iter_mut().zip(merged.sum) {
        *weight = step(E::load(*weight), merged.gradient(sum)).store();
    }
}

#[inline(always)]
fn one_state<E: Real>(
    weights: &mut [Bytes<E>],
    states: &mut [Bytes<E>],
    merged: Merged<'_, E>,
    step: impl Fn(E, E, &mut E) -> E,
) {
    for ((weight, &sum), state) in weights.iter_mut().zip(merged.sum).zip(states) {
        let mut value = E::load(*state);
        *weight = step(E::load(*weight), merged.gradient(sum), &mut value).store();
        *state = value.store();
    }
}

#[inline(always)]
fn two_states<E: Real>(
    weights: &mut [Bytes<E>],
    firsts: &mut [Bytes<E>],
    seconds: &mut [Bytes<E>],
    merged: Merged<'_, E>,
    step: impl Fn(E, E, &mut E, &mut E) -> E,
) {
    for (((weight, &sum), first), second) in weights.iter_mut().zip(merged.sum).zip(firsts).zip(seconds) {
        let (mut one, mut two) = (E::load(*first), E::load(*second));
        *weight = step(E::load(*weight), merged.gradient(sum), &mut one, &mut two).store();
        *first = one.store();
        *second = two.store();
    }
}

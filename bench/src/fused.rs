//! A hand-written optimizer as the ceiling of kernels: one loop over slices of f32, compiled for the machine's vectors.
//!
//! It is what the servers' rules are compared with. Not here: any use of it by a server.

use std::sync::Arc;

use multiversion::multiversion;
use pserver_core::error::Failure;
use pserver_core::optim::{Algorithm, Rule, Schedule};
use pserver_core::rule::{CheckedRule, RuleSettings};

/// The rate of every comparison.
const RATE: f64 = 0.001;
const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const LION_BETA2: f64 = 0.99;
const EPSILON: f64 = 1e-8;
const DECAY: f64 = 0.01;

/// Lion as a user of the servers writes it.
pub(crate) const LION: &str = "param b1 = 0.9; param b2 = 0.99; param wd = 0.01; state m = 0; \
    w -= lr*(sign(b1*m + (1 - b1)*g) + wd*w); m = b2*m + (1 - b2)*g";

/// An optimizer with a loop of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fused {
    /// `w -= r g`
    Sgd,
    /// With the rate within the velocity.
    Momentum,
    /// With corrected moments.
    Adam,
    /// A rule that is only a text on the servers.
    Lion,
}

impl Fused {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sgd, Self::Momentum, Self::Adam, Self::Lion];

    /// As it is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
            Self::Adam => "adam",
            Self::Lion => "lion",
        }
    }

    /// The servers' rule for the same arithmetic.
    ///
    /// # Errors
    /// When the text of a rule is wrong.
    pub fn rule(self) -> Result<Rule, Failure> {
        let algorithm = match self {
            Self::Sgd => Algorithm::Sgd,
            Self::Momentum => Algorithm::Momentum { momentum: BETA1, nesterov: false },
            Self::Adam => Algorithm::Adam { beta1: BETA1, beta2: BETA2, epsilon: EPSILON },
            Self::Lion => Algorithm::Custom(Arc::new(CheckedRule::new(LION, &RuleSettings::new())?)),
        };
        Ok(Rule { algorithm, schedule: Schedule::Const { rate: RATE }, ..Rule::default() })
    }

    /// Update number `count`, from one, of the parameter and the states behind it.
    ///
    /// # Panics
    /// When the tensors are not those of the optimizer.
    pub fn update(self, count: u64, tensors: &mut [&mut [f32]], gradient: &[f32]) {
        let rate = nearest(RATE);
        match (self, tensors) {
            (Self::Sgd, [weights]) => sgd(rate, weights, gradient),
            (Self::Momentum, [weights, velocities]) => momentum(rate, weights, velocities, gradient),
            (Self::Adam, [weights, firsts, seconds]) => {
                let count = count as f64;
                let root = (1.0 - BETA2.powf(count)).sqrt();
                let step = nearest(RATE * root / (1.0 - BETA1.powf(count)));
                adam(step, nearest(EPSILON * root), weights, firsts, seconds, gradient);
            }
            (Self::Lion, [weights, momentums]) => lion(rate, weights, momentums, gradient),
            (_, tensors) => panic!("{} tensors are not those of {}", tensors.len(), self.name()),
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn sgd(rate: f32, weights: &mut [f32], gradient: &[f32]) {
    for (weight, gradient) in weights.iter_mut().zip(gradient) {
        *weight -= rate * gradient;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn momentum(rate: f32, weights: &mut [f32], velocities: &mut [f32], gradient: &[f32]) {
    let mu = nearest(BETA1);
    for ((weight, velocity), gradient) in weights.iter_mut().zip(velocities).zip(gradient) {
        *velocity = mu * *velocity - rate * gradient;
        *weight += *velocity;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
// tidy: allow parameters: two numbers and the slices of one loop; a struct of slices would hide the loop's inputs.
fn adam(step: f32, epsilon: f32, weights: &mut [f32], firsts: &mut [f32], seconds: &mut [f32], gradient: &[f32]) {
    let (beta1, rest1) = (nearest(BETA1), nearest(1.0 - BETA1));
    let (beta2, rest2) = (nearest(BETA2), nearest(1.0 - BETA2));
    for (((weight, first), second), gradient) in weights.iter_mut().zip(firsts).zip(seconds).zip(gradient) {
        *first = beta1 * *first + rest1 * gradient;
        *second = beta2 * *second + rest2 * gradient * gradient;
        *weight -= step * *first / (second.sqrt() + epsilon);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn lion(rate: f32, weights: &mut [f32], momentums: &mut [f32], gradient: &[f32]) {
    let (beta1, rest1) = (nearest(BETA1), nearest(1.0 - BETA1));
    let (beta2, rest2) = (nearest(LION_BETA2), nearest(1.0 - LION_BETA2));
    let decay = nearest(DECAY);
    for ((weight, momentum), gradient) in weights.iter_mut().zip(momentums).zip(gradient) {
        let direction = beta1 * *momentum + rest1 * gradient;
        let sign = if direction.abs() > 0.0 { 1.0_f32.copysign(direction) } else { direction };
        *weight -= rate * (sign + decay * *weight);
        *momentum = beta2 * *momentum + rest2 * gradient;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest binary32 is what is asked for")]
const fn nearest(value: f64) -> f32 {
    value as f32
}

//! What sums gradients and updates parameters.

use std::sync::Arc;

use crate::dtype::ElementType;
use crate::optim::{self, Coefficients, Gradient, Rule};
use crate::rule::ssa::Lowered;

/// What an update computes.
#[derive(Clone, Copy, Debug)]
pub enum Arithmetic<'a> {
    /// `w + sum * scale`, for every type; see [`Algorithm::Add`](crate::optim::Algorithm::Add).
    Add {
        /// For floats; integers are never scaled.
        scale: f64,
    },
    /// `sum * scale`, for every type; see [`Algorithm::Sum`](crate::optim::Algorithm::Sum).
    Sum {
        /// For floats; integers are never scaled.
        scale: f64,
    },
    /// A rule, for f32 and f64.
    Rule {
        /// Its code. The same code comes behind the same `Arc`, update after update.
        code: &'a Arc<Lowered>,
        /// The scalars of this update, as [`Lowered::evaluate`] gave them: one for each of [`Lowered::scalars`].
        scalars: &'a [f64],
    },
}

/// One update of one chunk: the sum of the gradients, in the order given, then the rule.
pub struct Update<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// The rule's scalars for this update.
    pub coefficients: &'a Coefficients,
    /// The type of parameter and state.
    pub element_type: ElementType,
    /// The chunk's values, updated in place.
    pub parameter: &'a mut [u8],
    /// The rule's state tensors for this chunk, in the order of [`Rule::states`].
    pub states: &'a mut [&'a mut [u8]],
    /// The gradients, in trainer order.
    pub gradients: &'a [Gradient<'a>],
}

/// The arithmetic of a shard. Every implementation gives the same bits for the same inputs, whatever the tail,
/// the alignment or the number of threads; across implementations a measured tolerance holds.
pub trait Kernels: Send {
    /// `into = g0 + g1 + ...` in the order given, in the parameter's type; halves are widened first.
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]);

    /// Sums, scales, clips, regularises and steps.
    fn update(&mut self, update: Update<'_>);

    /// Its name, for the line that says what was chosen.
    fn name(&self) -> &'static str;
}

/// The plain form, which is the oracle.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Kernels for Plain {
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        optim::sum(element_type, into, gradients);
    }

    fn update(&mut self, update: Update<'_>) {
        optim::update(
            update.rule,
            update.coefficients,
            update.element_type,
            update.parameter,
            update.states,
            update.gradients,
        );
    }

    fn name(&self) -> &'static str {
        "plain"
    }
}

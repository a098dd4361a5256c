//! Interface of kernels, which sum gradients and update parameters.

use crate::dtype::{ElementType, Half};
use crate::narrowing;
use crate::optim::{self, Formula, Gradient};
use crate::rule::reference::{self, ParameterPiece};

/// One update of one chunk: the sum of the gradients, in the order given, then the arithmetic.
pub struct Update<'a> {
    /// The formula.
    pub formula: Formula<'a>,
    /// The type of parameter and state.
    pub element_type: ElementType,
    /// The chunk's values, updated in place.
    pub parameter: &'a mut [u8],
    /// The state tensors for this chunk, in the order of [`Lowered::states`](crate::rule::ssa::Lowered::states).
    pub states: &'a mut [&'a mut [u8]],
    /// The gradients, in trainer order.
    pub gradients: &'a [Gradient<'a>],
}

/// The arithmetic of a shard. Every implementation gives the same bits for the same inputs, whatever the tail,
/// the alignment or the number of threads, and those of [`Plain`].
pub trait Kernels: Send {
    /// `into = g0 + g1 + ...` in the order given, in the parameter's type; halves are widened first.
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]);

    /// Sums and computes.
    fn update(&mut self, update: Update<'_>);

    /// `into` = a value in binary32 as halves, as [`narrowing::narrow_to_half`] rounds it; half as long.
    fn narrow_to_half(&mut self, half: Half, value: &[u8], into: &mut [u8]);

    /// Its name, for the log.
    fn name(&self) -> &'static str;
}

/// One element after another, one operation after another.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Kernels for Plain {
    fn sum(&mut self, element_type: ElementType, into: &mut [u8], gradients: &[Gradient<'_>]) {
        optim::sum(element_type, into, gradients);
    }

    fn update(&mut self, update: Update<'_>) {
        let Update { formula, element_type, parameter, states, gradients } = update;
        match formula {
            Formula::Add { scale } => optim::add_scaled(element_type, parameter, gradients, scale),
            Formula::Sum { scale } => optim::sum_scaled(element_type, parameter, gradients, scale),
            Formula::Rule { code, scalars } => {
                let mut sum = vec![0; parameter.len()];
                optim::sum(element_type, &mut sum, gradients);
                reference::update(code, scalars, ParameterPiece { element_type, parameter, states }, &sum);
            }
        }
    }

    fn narrow_to_half(&mut self, half: Half, value: &[u8], into: &mut [u8]) {
        narrowing::narrow_to_half(half, value, into);
    }

    fn name(&self) -> &'static str {
        "plain"
    }
}

//! Optimizers: the rule of a parameter, and every optimizer's formula as a reference.
//!
//! Kernels run texts (`core/rules`): [`Prepared`] assembles a rule's texts and lowers them. The scalar reference here,
//! [`update`], implements the same formulas and shares nothing with the texts.
//!
//! Not here: the language of the texts ([`crate::rule`]); vector code and CUDA (`kernels`); the choice of a rule in a
//! configuration ([`crate::config`]); which gradients are summed, and when ([`crate::server`]).
//!
//! One update of one piece of a parameter, element by element:
//!
//! 1. *Sum.* The gradients are added left to right, which is trainer order, **in the parameter's own type**: binary32
//!    for f32, binary64 for f64, wrapping for integers; half precision is widened first. This is a promise, not a
//!    shortcut: every kernel adds in the same order with the same rounding, so the same inputs give the same bits.
//! 2. *Scale and clip.* The sum times [`Coefficients::gradient_scale`], then kept within
//!    [`Coefficients::gradient_bound`].
//! 3. *Regularize before*: the addition of [`Regularizer::Coupled`] to the gradient, the subtraction of
//!    [`Regularizer::Decoupled`] from the parameter.
//! 4. *Step*: the [`Algorithm`].
//! 5. *Regularize after*: the soft threshold and the shrink of [`Regularizer::Proximal`].
//!
//! From step 2 on the reference computes in binary64 and rounds when it stores. It is closer to the true value than
//! code in binary32, which is compared with a tolerance. [`Algorithm::Add`] and [`Algorithm::Sum`] are exact in both.
//!
//! Read in this order: [`Algorithm`], [`Rule`], [`Prepared`]; then [`Coefficients`] and [`update`].

mod algorithm;
mod coefficients;
mod element;
mod finite;
pub(crate) mod library;
mod norm;
mod plain;
mod prepared;
mod range;
mod reduce;
mod rule;
mod schedule;
#[cfg(test)]
mod tests;

pub use algorithm::Algorithm;
pub use coefficients::{Coefficients, DecayCoefficients, FtrlCoefficients, RegularizationCoefficients, Step};
pub use element::{Gradient, fill};
pub use finite::{first_nonfinite, is_finite, real_at};
pub use norm::{SQUARE_BLOCK_BYTES, element_sum, square_sum, square_sums};
pub use plain::{add_scaled, assert_gradients_fit, sum, sum_scaled, update};
pub use prepared::{Formula, Numbers, Prepared};
pub(crate) use range::Range;
pub use reduce::{ReducedPiece, reduce, share};
pub use rule::{NOT_ROW_WISE, Regularizer, Rule};
pub use schedule::Schedule;

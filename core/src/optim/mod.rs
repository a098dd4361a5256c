//! What the server does to a gradient: which rule a parameter has, and every optimizer's formula by hand.
//!
//! What runs are texts (`core/rules`): [`Prepared`] puts a rule's texts together and lowers them. The plain scalar form
//! here, [`update`], has the same formulas once more and shares nothing with the texts: it is the oracle.
//!
//! Not here: the language of the texts ([`crate::rule`]); vector code and CUDA (they live in `kernels`); how a
//! configuration names a rule ([`crate::config`]); who is summed with whom, and when ([`crate::server`]).
//!
//! One update of one piece of a parameter goes like this, element by element:
//!
//! 1. *Sum.* The gradients are added left to right, which is trainer order, **in the parameter's own type**:
//!    binary32 for f32, binary64 for f64, wrapping for integers; halves are widened first. This is a promise, not
//!    a shortcut: every kernel adds in the same order with the same rounding, so the same inputs give the same bits.
//! 2. *Scale and clip.* The sum times [`Coefficients::gradient_scale`], then kept within
//!    [`Coefficients::gradient_bound`].
//! 3. *Regularize before*: what [`Regularizer::Coupled`] adds to the gradient, what [`Regularizer::Decoupled`] takes
//!    from the parameter.
//! 4. *Step*: the [`Algorithm`].
//! 5. *Regularize after*: the soft threshold and the shrink of [`Regularizer::Proximal`].
//!
//! From 2 on the plain form computes in binary64 and rounds when it stores, so it is closer to the true value than
//! code that works in binary32, which is compared with it with a tolerance. [`Algorithm::Add`] and
//! [`Algorithm::Sum`] are the exception: they are exact, see there.
//!
//! Read in this order: [`Algorithm`], [`Rule`], [`Prepared`]; then [`Coefficients`] and [`update`].

mod algorithm;
mod coefficients;
mod element;
pub(crate) mod library;
mod norm;
mod plain;
mod prepared;
mod range;
mod rule;
mod schedule;
#[cfg(test)]
mod tests;

pub use algorithm::Algorithm;
pub use coefficients::{Coefficients, Step};
pub use element::{Gradient, fill};
pub use norm::{SQUARE_BLOCK_BYTES, square_sum, square_sums};
pub use plain::{add_scaled, assert_gradients_fit, sum, sum_scaled, update};
pub use prepared::{Formula, Numbers, Prepared};
pub(crate) use range::Range;
pub use rule::{Regularizer, Rule};
pub use schedule::Schedule;

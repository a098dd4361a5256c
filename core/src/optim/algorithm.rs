//! Optimizers: their formulas, constants and states.

use std::sync::Arc;

use crate::error::Failure;
use crate::rule::CheckedRule;

use super::range::Range;

/// Algorithm of an optimizer: the effect of a gradient on a parameter.
///
/// In the formulas `w` is the parameter, `g` the merged and clipped gradient, `r` the learning rate of this update
/// and `n` its number; a state keeps its name from [`states`](Self::states).
#[derive(Clone, Debug, PartialEq)]
pub enum Algorithm {
    /// `w + sum * scale`, in the parameter's own type with one rounding for the product and one for the sum, so that
    /// every kernel gives the same bits. For deltas and for integers; an integer's sum wraps and is never scaled.
    /// It has no learning rate, no regularization and no clipping.
    Add,
    /// `sum * scale`, in the parameter's own type, with the promises and refusals of [`Add`](Self::Add): the
    /// parameter is the merged gradient of its last round. It makes the servers an aggregator for trainers that
    /// optimize by themselves.
    Sum,
    /// `w -= r g`
    Sgd,
    /// `momentum = mu momentum - r g`, then `w += momentum`, or with Nesterov `w += mu momentum - r g`.
    Momentum {
        /// `mu`, in (0, 1).
        momentum: f64,
        /// Whether the step looks ahead.
        nesterov: bool,
    },
    /// `square_sum += g^2; w -= r g / sqrt(square_sum + epsilon)`
    Adagrad {
        /// Added inside the root; positive.
        epsilon: f64,
    },
    /// `gradient_square_mean = rho gradient_square_mean + (1 - rho) g^2`,
    /// `u = g sqrt(step_square_mean + epsilon) / sqrt(gradient_square_mean + epsilon)`,
    /// `step_square_mean = rho step_square_mean + (1 - rho) u^2`, `w -= r u`
    Adadelta {
        /// The decay of both means, in [0, 1).
        rho: f64,
        /// Added inside both roots; positive.
        epsilon: f64,
    },
    /// `square_mean = rho square_mean + (1 - rho) g^2`, `s = r g / sqrt(square_mean + epsilon)`, then `w -= s`, or with
    /// momentum `momentum = mu momentum - s; w += momentum`.
    RmsProp {
        /// The decay of the mean, in [0, 1).
        rho: f64,
        /// Added inside the root; positive.
        epsilon: f64,
        /// `mu`, in [0, 1); at zero there is no momentum and no state for it.
        momentum: f64,
    },
    /// `first_moment = beta1 first_moment + (1 - beta1) g`, `second_moment = beta2 second_moment + (1 - beta2) g^2`,
    /// `w -= r m / (sqrt(v) + epsilon)` with `m = first_moment / (1 - beta1^n)`, `v = second_moment / (1 - beta2^n)`.
    Adam {
        /// The decay of the first moment, in [0, 1).
        beta1: f64,
        /// The decay of the second moment, in [0, 1).
        beta2: f64,
        /// Added outside the root of the corrected second moment; positive.
        epsilon: f64,
    },
    /// Adam whose regularization is always [`Regularizer::Decoupled`](super::Regularizer::Decoupled).
    AdamW {
        /// The decay of the first moment, in [0, 1).
        beta1: f64,
        /// The decay of the second moment, in [0, 1).
        beta2: f64,
        /// Added outside the root of the corrected second moment; positive.
        epsilon: f64,
    },
    /// Follow the regularized leader, proximal. With `p = -learning_rate_power`, `N = square_sum + g^2`:
    /// `linear += g - (N^p - square_sum^p) w / r`, `square_sum = N`, and
    /// `w = (sign(linear) l1 - linear) / ((beta + N^p) / r + l2)`, or zero where `|linear| <= l1`.
    ///
    /// Proximal `l1` and `l2` are those of the formula, and nothing follows the step. An element that has never seen a
    /// gradient (`N` is zero) keeps its value, so dense and sparse updates agree on elements without a gradient. At a
    /// rate of zero no element changes.
    Ftrl {
        /// `-p`: zero or below; the usual value is -0.5.
        learning_rate_power: f64,
        /// Zero or above.
        beta: f64,
    },
    /// A rule's text: a user's own, or a named rule of the project without a variant here.
    Custom(Arc<CheckedRule>),
}

impl Algorithm {
    /// Its name, as errors write it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Sum => "sum",
            Self::Sgd => "sgd",
            Self::Momentum { .. } => "momentum",
            Self::Adagrad { .. } => "adagrad",
            Self::Adadelta { .. } => "adadelta",
            Self::RmsProp { .. } => "rmsprop",
            Self::Adam { .. } => "adam",
            Self::AdamW { .. } => "adamw",
            Self::Ftrl { .. } => "ftrl",
            Self::Custom(_) => "the rule",
        }
    }

    /// The names of its state tensors, in the order [`update`](super::update) takes them. Each has the parameter's
    /// type and length, and starts at zero unless the algorithm is [written](Self::Custom).
    #[must_use]
    pub fn states(&self) -> Vec<&str> {
        let known: &[&str] = match self {
            Self::Add | Self::Sum | Self::Sgd => &[],
            Self::Momentum { .. } => &["momentum"],
            Self::Adagrad { .. } => &["square_sum"],
            Self::Adadelta { .. } => &["gradient_square_mean", "step_square_mean"],
            Self::RmsProp { momentum: 0.0, .. } => &["square_mean"],
            Self::RmsProp { .. } => &["square_mean", "momentum"],
            Self::Adam { .. } | Self::AdamW { .. } => &["first_moment", "second_moment"],
            Self::Ftrl { .. } => &["square_sum", "linear"],
            Self::Custom(written) => return written.states().iter().map(|state| state.name.as_str()).collect(),
        };
        known.to_vec()
    }

    /// Whether the algorithm only adds, exactly in the parameter's own type. It then admits integers, and none of the
    /// settings of optimizers.
    #[must_use]
    pub const fn is_exact(&self) -> bool {
        matches!(self, Self::Add | Self::Sum)
    }

    /// Refuses a constant out of its range, by the name configuration gives it.
    pub(super) fn validate(&self) -> Result<(), Failure> {
        match *self {
            Self::Add | Self::Sum | Self::Sgd | Self::Custom(_) => Ok(()),
            Self::Momentum { momentum, .. } => Range::OpenFraction.check("sgd.momentum", momentum),
            Self::Adagrad { epsilon } => Range::Positive.check("adagrad.epsilon", epsilon),
            Self::Adadelta { rho, epsilon } => {
                Range::Fraction.check("adadelta.rho", rho)?;
                Range::Positive.check("adadelta.epsilon", epsilon)
            }
            Self::RmsProp { rho, epsilon, momentum } => {
                Range::Fraction.check("rmsprop.rho", rho)?;
                Range::Positive.check("rmsprop.epsilon", epsilon)?;
                Range::Fraction.check("rmsprop.momentum", momentum)
            }
            Self::Adam { beta1, beta2, epsilon } => {
                Range::Fraction.check("adam.beta_1", beta1)?;
                Range::Fraction.check("adam.beta_2", beta2)?;
                Range::Positive.check("adam.epsilon", epsilon)
            }
            Self::AdamW { beta1, beta2, epsilon } => {
                Range::Fraction.check("adamw.beta_1", beta1)?;
                Range::Fraction.check("adamw.beta_2", beta2)?;
                Range::Positive.check("adamw.epsilon", epsilon)
            }
            Self::Ftrl { learning_rate_power, beta } => {
                Range::NotPositive.check("ftrl.learning_rate_power", learning_rate_power)?;
                Range::NotNegative.check("ftrl.beta", beta)
            }
        }
    }
}

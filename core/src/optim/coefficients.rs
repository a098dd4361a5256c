//! Scalars of one update, as the reference uses them.

use crate::ids::Version;
use crate::rule::StepSettings;
use crate::rule::ssa::ScalarInputs;

use super::algorithm::Algorithm;
use super::rule::{Regularizer, Rule};

/// Inputs of one update besides its rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The number of this update, from one: the version it produces, unless the states were set.
    pub version: Version,
    /// Replaces the schedule's learning rate for this update; the parameter's own `rate_scale` still applies.
    pub rate: Option<f64>,
    /// The L2 norm of the whole merged gradient, which is the sum times `scale`. Required when the rule has
    /// `clip_norm`, unused otherwise.
    pub norm: Option<f64>,
    /// The merged gradient is the sum over the trainers times this: `1 / N` for a mean, 1 for a sum. Integers are
    /// summed and never scaled.
    pub scale: f64,
    /// Replace configured numbers of the rule for this update; see [`Prepared::settings`](super::Prepared::settings).
    pub settings: StepSettings,
}

impl Step {
    /// The first update, with nothing but what is configured, of a sum that is not scaled.
    pub const FIRST: Self =
        Self { version: Version(1), rate: None, norm: None, scale: 1.0, settings: StepSettings::NONE };
}

/// Every scalar of one update, computed once in binary64, as the reference uses them.
///
/// A scalar that the rule does not use is neutral: zero for an addend, one for `shrink`, infinity for `gradient_bound`.
/// A kernel omits terms whose factor is zero instead of multiplying by it, so that an infinite weight stays infinite.
/// The order is that of the [module's page](super).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// Multiplies the sum: the merge's scale times the factor of `clip_norm`.
    pub gradient_scale: f64,
    /// The scaled gradient is kept within plus and minus this; infinity when there is no `clip_value`.
    pub gradient_bound: f64,
    /// L1 and L2 outside of the algorithm's own formula.
    pub regularization: RegularizationCoefficients,
    /// The learning rate: the schedule's or the step's, times the parameter's own factor.
    pub rate: f64,
    /// The number of the update, from one.
    pub count: f64,
    /// The factor of the algorithm's direction: `rate`, and for Adam `rate sqrt(1 - beta2^n) / (1 - beta1^n)`.
    pub step: f64,
    /// The algorithm's epsilon. For Adam it is times `sqrt(1 - beta2^n)`, so that `step m / (sqrt(v) + epsilon)` on
    /// the moments as stored is the corrected step.
    pub epsilon: f64,
    /// Decays of the moving averages in the states.
    pub decays: DecayCoefficients,
    /// The formula of FTRL.
    pub ftrl: FtrlCoefficients,
}

/// Regularization before and after the algorithm's step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RegularizationCoefficients {
    /// `g += coupled_l1 sign(w)`, where the sign of zero is zero.
    pub coupled_l1: f64,
    /// `g += coupled_l2 w`
    pub coupled_l2: f64,
    /// `w -= decay_l1 sign(w)`; the learning rate is in it.
    pub decay_l1: f64,
    /// `w -= decay_l2 w`; the learning rate is in it.
    pub decay_l2: f64,
    /// The soft threshold after the step, `rate l1`.
    pub threshold: f64,
    /// The factor after the threshold, `1 / (1 + rate l2)`.
    pub shrink: f64,
}

/// Decays of moving averages, each with its complement as far as the algorithm uses it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayCoefficients {
    /// The momentum of Momentum and RMSProp.
    pub momentum: f64,
    /// The decay of the means of Adadelta and RMSProp.
    pub rho: f64,
    /// `1 - rho`
    pub rho_complement: f64,
    /// The decay of Adam's first moment.
    pub beta1: f64,
    /// `1 - beta1`
    pub beta1_complement: f64,
    /// The decay of Adam's second moment.
    pub beta2: f64,
    /// `1 - beta2`
    pub beta2_complement: f64,
}

/// Scalars of FTRL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FtrlCoefficients {
    /// FTRL's `p`, the power of the sum of squares: minus `learning_rate_power`.
    pub power: f64,
    /// FTRL's `beta`.
    pub beta: f64,
    /// FTRL's own L1, within its formula.
    pub l1: f64,
    /// FTRL's own L2, within its formula.
    pub l2: f64,
    /// FTRL's `1 / rate`; zero when the rate is below 1e-30, where a quotient may not be finite in binary32. The update
    /// then leaves parameter and states as they are.
    pub inverse_rate: f64,
}

/// The smallest rate at which FTRL changes a parameter.
const FTRL_RATE_MIN: f64 = 1e-30;

impl Coefficients {
    /// The coefficients of a sum that is scaled and added, without anything else.
    const NEUTRAL: Self = Self {
        gradient_scale: 1.0,
        gradient_bound: f64::INFINITY,
        regularization: RegularizationCoefficients {
            coupled_l1: 0.0,
            coupled_l2: 0.0,
            decay_l1: 0.0,
            decay_l2: 0.0,
            threshold: 0.0,
            shrink: 1.0,
        },
        rate: 0.0,
        count: 1.0,
        step: 0.0,
        epsilon: 0.0,
        decays: DecayCoefficients {
            momentum: 0.0,
            rho: 0.0,
            rho_complement: 1.0,
            beta1: 0.0,
            beta1_complement: 1.0,
            beta2: 0.0,
            beta2_complement: 1.0,
        },
        ftrl: FtrlCoefficients { power: 0.0, beta: 0.0, l1: 0.0, l2: 0.0, inverse_rate: 0.0 },
    };
}

impl Rule {
    /// The scalars of one update.
    ///
    /// # Panics
    ///
    /// When the step's version is zero, when the rule has `clip_norm` and the step has no norm, and when the step has
    /// settings: they are numbered by the code of a [`Prepared`](super::Prepared).
    #[must_use]
    pub fn coefficients(&self, step: &Step) -> Coefficients {
        assert!(step.settings.is_empty(), "the rule itself has the numbers of the reference");
        let ScalarInputs { rate, count, gradient_scale, .. } = self.inputs(step);
        let mut coefficients = Coefficients {
            gradient_scale,
            gradient_bound: self.clip_value.unwrap_or(f64::INFINITY),
            rate,
            count,
            step: rate,
            ..Coefficients::NEUTRAL
        };
        self.regularize(&mut coefficients);
        self.specialize(step.version, &mut coefficients);
        coefficients
    }

    /// The values of `lr` and `n` in a rule's text, the factor of the sum of the gradients, and the step's settings.
    ///
    /// # Panics
    ///
    /// When the step's version is zero, or when the rule has `clip_norm` and the step has no norm.
    #[must_use]
    pub fn inputs(&self, step: &Step) -> ScalarInputs {
        assert!(1 <= step.version.0, "updates are counted from one");
        ScalarInputs {
            rate: step.rate.unwrap_or_else(|| self.schedule.rate(step.version.0)) * self.rate_scale,
            // A count beyond 2^53 is rounded, which no rule depends on.
            count: step.version.0 as f64,
            gradient_scale: step.scale * self.norm_factor(step.norm),
            settings: step.settings,
        }
    }

    /// The factor that scales the merged gradient down to `clip_norm`; one when it is short enough. A NaN norm leaves
    /// the gradient as it is, so that the parameter shows the fault.
    fn norm_factor(&self, norm: Option<f64>) -> f64 {
        let Some(clip) = self.clip_norm else {
            return 1.0;
        };
        let norm = norm.expect("clip_norm needs the gradient's norm");
        if norm > clip { clip / norm } else { 1.0 }
    }

    fn regularize(&self, coefficients: &mut Coefficients) {
        let rate = coefficients.rate;
        let regularization = &mut coefficients.regularization;
        match (&self.algorithm, self.regularizer) {
            (Algorithm::Add | Algorithm::Sum, _) => {}
            (Algorithm::AdamW { .. }, _) | (_, Regularizer::Decoupled) => {
                regularization.decay_l1 = rate * self.l1;
                regularization.decay_l2 = rate * self.l2;
            }
            (_, Regularizer::Coupled) => {
                regularization.coupled_l1 = self.l1;
                regularization.coupled_l2 = self.l2;
            }
            (Algorithm::Ftrl { .. }, Regularizer::Proximal) => {
                coefficients.ftrl.l1 = self.l1;
                coefficients.ftrl.l2 = self.l2;
            }
            (_, Regularizer::Proximal) => {
                regularization.threshold = rate * self.l1;
                regularization.shrink = 1.0 / (1.0 + rate * self.l2);
            }
        }
    }

    fn specialize(&self, version: Version, coefficients: &mut Coefficients) {
        match self.algorithm {
            Algorithm::Add | Algorithm::Sum | Algorithm::Sgd | Algorithm::Custom(_) => {}
            Algorithm::Momentum { momentum, .. } => coefficients.decays.momentum = momentum,
            Algorithm::Adagrad { epsilon } => coefficients.epsilon = epsilon,
            Algorithm::Adadelta { rho, epsilon } => {
                coefficients.decays.rho = rho;
                coefficients.decays.rho_complement = 1.0 - rho;
                coefficients.epsilon = epsilon;
            }
            Algorithm::RmsProp { rho, epsilon, momentum } => {
                coefficients.decays.rho = rho;
                coefficients.decays.rho_complement = 1.0 - rho;
                coefficients.epsilon = epsilon;
                coefficients.decays.momentum = momentum;
            }
            Algorithm::Adam { beta1, beta2, epsilon } | Algorithm::AdamW { beta1, beta2, epsilon } => {
                coefficients.correct_moments(version, beta1, beta2, epsilon);
            }
            Algorithm::Ftrl { learning_rate_power, beta } => {
                coefficients.ftrl.power = -learning_rate_power;
                coefficients.ftrl.beta = beta;
                coefficients.ftrl.inverse_rate =
                    if coefficients.rate.abs() < FTRL_RATE_MIN { 0.0 } else { 1.0 / coefficients.rate };
            }
        }
    }
}

impl Coefficients {
    fn correct_moments(&mut self, version: Version, beta1: f64, beta2: f64, epsilon: f64) {
        let n = version.0 as f64;
        let first = 1.0 - beta1.powf(n);
        let second_root = (1.0 - beta2.powf(n)).sqrt();
        self.decays.beta1 = beta1;
        self.decays.beta1_complement = 1.0 - beta1;
        self.decays.beta2 = beta2;
        self.decays.beta2_complement = 1.0 - beta2;
        self.step = self.rate * second_root / first;
        self.epsilon = epsilon * second_root;
    }
}

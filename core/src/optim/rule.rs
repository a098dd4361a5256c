//! Complete update rule of a parameter, and its validation.

use std::sync::Arc;

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::rule::CheckedRule;

use super::algorithm::Algorithm;
use super::range::Range;
use super::schedule::Schedule;

/// Why a rule cannot update rows, where it is not [row-wise](Rule::is_row_wise).
pub const NOT_ROW_WISE: &str = "clip_norm, or sum or norm in the rule, needs the whole parameter, of which a push has \
                                rows; expected none, or a stage g = g * factor; update, whose factor reads a total of \
                                gradients";

/// Point of an update at which L1 and L2 are applied. `r` is the learning rate, `w` the parameter, `g` the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Regularizer {
    /// After the step: the soft threshold at `r l1`, then the shrink `w / (1 + r l2)`.
    #[default]
    Proximal,
    /// Before the algorithm: `g += l2 w + l1 sign(w)`.
    Coupled,
    /// Beside the algorithm: `w -= r (l2 w + l1 sign(w))`.
    Decoupled,
}

/// Update rule of a parameter: its checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The optimizer.
    pub algorithm: Algorithm,
    /// The weight of the parameter's L1 norm, zero or above.
    pub l1: f64,
    /// The weight of half the square of the parameter's L2 norm, zero or above.
    pub l2: f64,
    /// The point at which `l1` and `l2` are applied. AdamW is decoupled with every value.
    pub regularizer: Regularizer,
    /// The whole merged gradient is scaled down to this L2 norm when it is longer; above zero.
    pub clip_norm: Option<f64>,
    /// Every element of the merged gradient is kept within plus and minus this, after `clip_norm`; above zero.
    pub clip_value: Option<f64>,
    /// The learning rate over the updates.
    pub schedule: Schedule,
    /// This parameter's own factor of the learning rate, zero or above.
    pub rate_scale: f64,
    /// The computations before and after all of that.
    pub stage: Option<Arc<CheckedRule>>,
}

impl Default for Rule {
    /// Paddle's defaults: plain SGD at a learning rate of one.
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Sgd,
            l1: 0.0,
            l2: 0.0,
            regularizer: Regularizer::Proximal,
            clip_norm: None,
            clip_value: None,
            schedule: Schedule::Const { rate: 1.0 },
            rate_scale: 1.0,
            stage: None,
        }
    }
}

impl Rule {
    /// Whether an element's update needs only that element's gradient, so that the parameter may be updated in
    /// pieces. False with `clip_norm`, which needs the whole gradient's norm first, and for a rule's text with `sum` or
    /// `norm`.
    #[must_use]
    pub fn is_element_wise(&self) -> bool {
        self.clip_norm.is_none() && !self.has_reductions()
    }

    /// Whether a row of a parameter may be updated apart from the others: by its elements' gradients, which a number of
    /// the total of gradients may scale.
    #[must_use]
    pub fn is_row_wise(&self) -> bool {
        let own = matches!(&self.algorithm, Algorithm::Custom(written) if written.has_reductions());
        let scales = |stage: &CheckedRule| !stage.has_reductions() || stage.scales_by_total();
        self.clip_norm.is_none() && !own && self.stage.as_ref().is_none_or(|stage| scales(stage))
    }

    /// Whether its text or its stage needs numbers of the whole parameter; see [`reduce`](super::reduce()).
    #[must_use]
    pub fn has_reductions(&self) -> bool {
        let written = if let Algorithm::Custom(written) = &self.algorithm { Some(written) } else { None };
        written.into_iter().chain(&self.stage).any(|text| text.has_reductions())
    }

    /// Whether its stage reads a number of several parameters; see [`share`](super::share).
    #[must_use]
    pub fn has_total(&self) -> bool {
        self.stage.as_ref().is_some_and(|stage| stage.has_total())
    }

    /// The names of the state tensors, in the order [`update`](super::update) takes them. Each has the parameter's
    /// type and length.
    #[must_use]
    pub fn states(&self) -> Vec<&str> {
        let around = self.stage.iter().flat_map(|stage| stage.states()).map(|state| state.name.as_str());
        around.chain(self.algorithm.states()).collect()
    }

    /// Refuses an invalid rule, naming the setting as configuration spells it, the found and the expected value.
    pub fn validate(&self) -> Result<(), Failure> {
        self.algorithm.validate()?;
        self.schedule.validate()?;
        Range::NotNegative.check("l1", self.l1)?;
        Range::NotNegative.check("l2", self.l2)?;
        Range::NotNegative.check("rate_scale", self.rate_scale)?;
        for (name, clip) in [("clip_norm", self.clip_norm), ("clip_value", self.clip_value)] {
            clip.map_or(Ok(()), |value| Range::Positive.check(name, value))?;
        }
        self.check_rate(self.schedule.largest(), ElementType::Float64)?;
        self.validate_exact()
    }

    /// Refuses a learning rate whose product with the parameter's own factor overflows the element type: every
    /// parameter would become infinite. `add` and `sum` have no rate.
    ///
    /// # Errors
    /// Names the rate, the factor, their product and the largest that is expected.
    pub fn check_rate(&self, rate: f64, element_type: ElementType) -> Result<(), Failure> {
        let most = if element_type == ElementType::Float32 { f64::from(f32::MAX) } else { f64::MAX };
        let (factor, product) = (self.rate_scale, rate * self.rate_scale);
        if self.algorithm.is_exact() || product <= most {
            return Ok(());
        }
        Err(Failure::call(format!(
            "the learning rate {rate:e} times rate_scale {factor:e} is {product:e}; expected at most {most:e} for \
             {element_type}"
        )))
    }

    /// The constant learning rate of this rule, if it differs from `before` in the schedule alone.
    #[must_use]
    pub fn rate_instead_of(&self, before: &Self) -> Option<f64> {
        let Schedule::Const { rate } = self.schedule else { return None };
        let alike = Self { schedule: before.schedule.clone(), ..self.clone() };
        (self.schedule != before.schedule && alike == *before).then_some(rate)
    }

    /// Refuses this rule for a parameter type that it cannot update, naming both: integers go only with an algorithm
    /// that [is exact](Algorithm::is_exact), half precision with none.
    pub fn validate_for(&self, element_type: ElementType) -> Result<(), Failure> {
        let name = self.algorithm.name();
        if !element_type.is_parameter_type() {
            return Err(Failure::call(format!(
                "{name} cannot update a parameter of type {element_type}, which is for gradients; \
                 expected float32 or float64"
            )));
        }
        if !element_type.is_float() && !self.algorithm.is_exact() {
            return Err(Failure::call(format!(
                "{name} cannot update a parameter of type {element_type}; \
                 expected float32 or float64, or the algorithm add or sum"
            )));
        }
        self.check_rate(self.schedule.largest(), element_type)
    }

    /// `add` and `sum` promise to add and nothing else, so a setting without effect is refused.
    fn validate_exact(&self) -> Result<(), Failure> {
        if !self.algorithm.is_exact() {
            return Ok(());
        }
        let settings = [
            ("l1", self.l1),
            ("l2", self.l2),
            ("clip_norm", self.clip_norm.unwrap_or(0.0)),
            ("clip_value", self.clip_value.unwrap_or(0.0)),
        ];
        if self.stage.is_some() {
            let name = self.algorithm.name();
            return Err(Failure::call(format!(
                "a stage is given with the algorithm {name}, which only adds; expected none"
            )));
        }
        match settings.iter().find(|(_, value)| *value != 0.0) {
            Some((name, value)) => Err(Failure::call(format!(
                "{name} is {value} with the algorithm {}, which only adds; expected none",
                self.algorithm.name()
            ))),
            None => Ok(()),
        }
    }
}

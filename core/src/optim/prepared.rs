//! Rules that kernels can run: checked, and lowered to straight-line code.

use std::sync::Arc;

use crate::error::Failure;
use crate::rule::ssa::{Lowered, RuleReduction, StateResult};
use crate::rule::{CheckedRule, RuleSettings, StepSettings, Tunable, TunableId, TunableNames, lower};

use super::algorithm::Algorithm;
use super::coefficients::Step;
use super::rule::{Regularizer, Rule};

/// The computation of one update.
#[derive(Clone, Copy, Debug)]
pub enum Formula<'a> {
    /// `w + sum * scale`, for every type; see [`Algorithm::Add`].
    Add {
        /// For floats; integers are never scaled.
        scale: f64,
    },
    /// `sum * scale`, for every type; see [`Algorithm::Sum`].
    Sum {
        /// For floats; integers are never scaled.
        scale: f64,
    },
    /// A rule, for f32 and f64.
    Rule {
        /// Its code, with the same `Arc` in every update.
        code: &'a Arc<Lowered>,
        /// The scalars of this update, as [`Lowered::evaluate`] gave them: one for each of [`Lowered::scalars`].
        scalars: &'a [f64],
    },
}

/// A rule that has passed [`Rule::validate`], with its code.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    rule: Rule,
    /// None for `add` and `sum`.
    code: Option<Arc<Lowered>>,
}

impl Prepared {
    /// Checks and lowers a rule: clipping, coupled or decoupled regularization, the algorithm, proximal regularization,
    /// all of it in the place of its stage's `update`.
    ///
    /// # Errors
    /// As [`Rule::validate`], and when the whole exceeds the limits of a rule.
    pub fn new(rule: Rule) -> Result<Self, Failure> {
        rule.validate()?;
        if rule.algorithm.is_exact() {
            return Ok(Self { rule, code: None });
        }
        let pieces = pieces(&rule)?;
        let code = lower(rule.stage.as_deref(), &pieces.iter().map(Arc::as_ref).collect::<Vec<_>>())?;
        Ok(Self { rule, code: Some(Arc::new(code)) })
    }

    /// The rule itself.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The rule, without its code.
    #[must_use]
    pub fn into_rule(self) -> Rule {
        self.rule
    }

    /// The state tensors, in the order in which a kernel takes them.
    #[must_use]
    pub fn states(&self) -> &[StateResult] {
        self.code.as_ref().map_or(&[], |code| code.states())
    }

    /// Whether the computation depends on the number of the update, whatever the rate.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.code.as_ref().is_some_and(|code| code.counts())
    }

    /// The place of its total among the reductions, if it reads one.
    #[must_use]
    pub fn total(&self) -> Option<usize> {
        self.code.as_ref().and_then(|code| code.total())
    }

    /// Whether the update reads a reduction other than through its total.
    pub(super) fn reads_beside_total(&self, place: usize) -> bool {
        self.code.as_ref().is_some_and(|code| code.reads_beside_total(place))
    }

    /// The reductions of its code, in the order in which they are computed.
    #[must_use]
    pub fn reductions(&self) -> &[RuleReduction] {
        self.code.as_ref().map_or(&[], |code| code.reductions())
    }

    /// The numbers that a step may carry other values of.
    pub fn tunables(&self) -> impl Iterator<Item = (TunableId, &Tunable)> {
        (0..).map(TunableId).zip(self.code.iter().flat_map(|code| code.tunables()))
    }

    /// Settings of a step, by name, in place of those of the rule.
    ///
    /// # Errors
    /// Names the setting that the rule does not have or that is given twice, the value that is out of its range, or
    /// those with which the rule has other code than with the configured ones.
    pub fn settings<'a>(&self, given: impl IntoIterator<Item = (&'a str, f64)>) -> Result<StepSettings, Failure> {
        let mut settings = StepSettings::NONE;
        for (name, value) in given {
            let Some((id, tunable)) = self.tunables().find(|(_, tunable)| tunable.name == name) else {
                return Err(self.no_tunable(name));
            };
            tunable.check(value)?;
            if settings.of(id).is_some() {
                return Err(Failure::call(format!("the step carries {name:?} twice; expected it once")));
            }
            settings.put(id, value);
        }
        match &self.code {
            Some(code) if !code.is_of(settings) => Err(self.other_code(settings)),
            _ => Ok(settings),
        }
    }

    fn no_tunable(&self, name: &str) -> Failure {
        let mut known: Vec<&str> = self.tunables().map(|(_, tunable)| tunable.name.as_str()).collect();
        known.sort_unstable();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Failure::call(format!(
            "the step carries {name:?}, which the rule does not have, or for which it was configured without a term; \
             expected some of: {known}"
        ))
    }

    fn other_code(&self, settings: StepSettings) -> Failure {
        let carried = self.tunables().filter_map(|(id, tunable)| {
            Some(format!("{} = {} (configured as {})", tunable.name, settings.of(id)?, tunable.value))
        });
        let carried = carried.collect::<Vec<_>>().join(", ");
        Failure::call(format!(
            "the step carries {carried}, with which the rule has other operations or an infinite number; expected \
             values with the operations of the configured ones, or a job that is configured with such values"
        ))
    }

    /// The computation of this update. `scalars` is a buffer for its numbers; its content is replaced.
    ///
    /// # Panics
    ///
    /// As [`Rule::inputs`], and when the rule has reductions; see [`formula_reduced`](Self::formula_reduced).
    #[must_use]
    pub fn formula<'a>(&'a self, step: &Step, scalars: &'a mut Vec<f64>) -> Formula<'a> {
        self.formula_reduced(step, &[], scalars)
    }

    /// The computation of this update, with the values that [`reduce`](super::reduce()) gave for it.
    ///
    /// # Panics
    ///
    /// As [`Rule::inputs`], and when a reduction's value is missing.
    #[must_use]
    pub fn formula_reduced<'a>(&'a self, step: &Step, reduced: &[f64], scalars: &'a mut Vec<f64>) -> Formula<'a> {
        let inputs = self.rule.inputs(step);
        let scale = inputs.gradient_scale;
        match (&self.code, &self.rule.algorithm) {
            (Some(code), _) => {
                code.evaluate(&inputs, reduced, scalars);
                Formula::Rule { code, scalars }
            }
            (None, Algorithm::Sum) => Formula::Sum { scale },
            (None, _) => Formula::Add { scale },
        }
    }
}

/// A cache of one update's scalars. Consecutive equal updates share them: the chunks of one frame mostly have one rule
/// and one version.
#[derive(Debug, Default)]
pub struct Numbers {
    /// The rule and step that the scalars belong to.
    of: Option<(Arc<Prepared>, StepBits)>,
    scalars: Vec<f64>,
}

/// A step's version, rate, norm and scale as bits, where zeros of either sign and different NaNs are distinct, and its
/// settings, which are finite and have no negative zero.
type StepBits = (u64, Option<u64>, Option<u64>, u64, StepSettings);

impl Numbers {
    /// The computation of an update by a rule, with the values of its reductions. Those are not compared: an update
    /// with reductions is not kept.
    ///
    /// # Panics
    ///
    /// As [`Prepared::formula_reduced`].
    #[must_use]
    pub fn formula<'a>(&'a mut self, rule: &'a Arc<Prepared>, step: &Step, reduced: &[f64]) -> Formula<'a> {
        let Some(code) = &rule.code else { return rule.formula(step, &mut self.scalars) };
        if !reduced.is_empty() {
            self.of = None;
            return rule.formula_reduced(step, reduced, &mut self.scalars);
        }
        let [rate, norm] = [step.rate, step.norm].map(|number| number.map(f64::to_bits));
        let bits = (step.version.0, rate, norm, step.scale.to_bits(), step.settings);
        if !matches!(&self.of, Some((known, of)) if Arc::ptr_eq(known, rule) && *of == bits) {
            code.evaluate(&rule.rule.inputs(step), &[], &mut self.scalars);
            self.of = Some((Arc::clone(rule), bits));
        }
        Formula::Rule { code, scalars: &self.scalars }
    }
}

/// The texts that make up a rule, in the order in which they run.
fn pieces(rule: &Rule) -> Result<Vec<Arc<CheckedRule>>, Failure> {
    let mut pieces = Vec::new();
    if let Some(bound) = rule.clip_value {
        pieces.push(piece(include_str!("../../rules/clip.rule"), &[("bound", bound)], &[])?);
    }
    let regularizer = match (&rule.algorithm, rule.regularizer) {
        _ if rule.l1 == 0.0 && rule.l2 == 0.0 => None,
        (Algorithm::AdamW { .. }, _) => Some(Regularizer::Decoupled),
        // FTRL's formula contains the proximal step.
        (Algorithm::Ftrl { .. }, Regularizer::Proximal) => None,
        (_, regularizer) => Some(regularizer),
    };
    match regularizer {
        Some(Regularizer::Coupled) => pieces.push(penalty(include_str!("../../rules/coupled.rule"), rule)?),
        Some(Regularizer::Decoupled) => pieces.push(penalty(include_str!("../../rules/decoupled.rule"), rule)?),
        Some(Regularizer::Proximal) | None => {}
    }
    pieces.push(algorithm(rule)?);
    if regularizer == Some(Regularizer::Proximal) {
        pieces.push(penalty(include_str!("../../rules/proximal.rule"), rule)?);
    }
    Ok(pieces)
}

/// The text of a regularizer. A term that is configured as zero is left out, and no step brings it back.
fn penalty(text: &str, rule: &Rule) -> Result<Arc<CheckedRule>, Failure> {
    let has = |weight: f64| if weight == 0.0 { 0.0 } else { 1.0 };
    let settings = [("l1", rule.l1), ("l2", rule.l2), ("has_l1", has(rule.l1)), ("has_l2", has(rule.l2))];
    let tunables: &'static [(&'static str, &'static str)] = match &rule.algorithm {
        // The names are those of the text's own parameters.
        Algorithm::Custom(written) if ["l1", "l2"].iter().any(|name| written.parameters().contains_key(*name)) => &[],
        _ if rule.l1 == 0.0 => &[("l2", "l2")],
        _ if rule.l2 == 0.0 => &[("l1", "l1")],
        _ => &[("l1", "l1"), ("l2", "l2")],
    };
    piece(text, &settings, tunables)
}

/// The text of the algorithm, with its constants.
pub(super) fn algorithm(rule: &Rule) -> Result<Arc<CheckedRule>, Failure> {
    match rule.algorithm {
        Algorithm::Custom(ref written) => Ok(Arc::clone(written)),
        Algorithm::Add | Algorithm::Sum => unreachable!("add and sum have no text"),
        Algorithm::Sgd => piece(include_str!("../../rules/sgd.rule"), &[], &[]),
        Algorithm::Momentum { momentum, nesterov: false } => {
            piece(include_str!("../../rules/momentum.rule"), &[("mu", momentum)], MOMENTUM)
        }
        Algorithm::Momentum { momentum, nesterov: true } => {
            piece(include_str!("../../rules/nesterov.rule"), &[("mu", momentum)], MOMENTUM)
        }
        Algorithm::Adagrad { epsilon } => {
            let tunables = &[("epsilon", "epsilon")];
            piece(include_str!("../../rules/adagrad.rule"), &[("epsilon", epsilon)], tunables)
        }
        Algorithm::Adadelta { rho, epsilon } => {
            piece(include_str!("../../rules/adadelta.rule"), &[("rho", rho), ("epsilon", epsilon)], MEANS)
        }
        Algorithm::RmsProp { rho, epsilon, momentum: 0.0 } => {
            piece(include_str!("../../rules/rmsprop.rule"), &[("rho", rho), ("epsilon", epsilon)], MEANS)
        }
        Algorithm::RmsProp { rho, epsilon, momentum } => {
            let settings = [("rho", rho), ("epsilon", epsilon), ("mu", momentum)];
            let tunables = &[("rho", "rho"), ("epsilon", "epsilon"), ("mu", "momentum")];
            piece(include_str!("../../rules/rmsprop_momentum.rule"), &settings, tunables)
        }
        Algorithm::Adam { beta1, beta2, epsilon } | Algorithm::AdamW { beta1, beta2, epsilon } => {
            let settings = [("beta_1", beta1), ("beta_2", beta2), ("epsilon", epsilon)];
            let tunables = &[("beta_1", "beta_1"), ("beta_2", "beta_2"), ("epsilon", "epsilon")];
            piece(include_str!("../../rules/adam.rule"), &settings, tunables)
        }
        Algorithm::Ftrl { learning_rate_power, beta } => {
            let is_proximal = rule.regularizer == Regularizer::Proximal;
            let (l1, l2) = if is_proximal { (rule.l1, rule.l2) } else { (0.0, 0.0) };
            // The subtraction gives a positive zero for a power of zero, where a negation would give a negative one.
            let settings = [("power", 0.0 - learning_rate_power), ("beta", beta), ("l1", l1), ("l2", l2)];
            // Its code shares the usual zeros and ones of these settings with constants of the text.
            piece(include_str!("../../rules/ftrl.rule"), &settings, &[])
        }
    }
}

/// Tunables of momentum, whose texts call it `mu`.
const MOMENTUM: &[(&str, &str)] = &[("mu", "momentum")];
/// Tunables of means that decay by `rho`.
const MEANS: &[(&str, &str)] = &[("rho", "rho"), ("epsilon", "epsilon")];

/// A text with its settings, and the names of those that are tunable: in the text, and in configuration.
fn piece(
    text: &str,
    settings: &[(&str, f64)],
    tunables: &'static [(&'static str, &'static str)],
) -> Result<Arc<CheckedRule>, Failure> {
    let settings: RuleSettings = settings.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    CheckedRule::piece(text, &settings, TunableNames::Some(tunables)).map(Arc::new)
}

//! Builder of straight-line code: numbers operations, merges equal ones and folds constants.
//!
//! A tunable number is no constant: a step may carry another value. Where its configured value decides about an
//! operation, such as a factor of one that is omitted, the decision becomes a premise of the code.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::limits::{RULE_OPS_MAX, RULE_REDUCTIONS_MAX, RULE_SCALARS_MAX, STATES_MAX, TUNABLES_MAX};

use super::ssa::{
    Binary, Comparison, Lowered, Premises, ReductionId, ReductionKind, RuleFunction, RuleOp, RuleReduction, ScalarId,
    ScalarInput, ScalarInputs, ScalarOp, StateId, StateResult, Unary, ValueId,
};
use super::tunable::{StepSettings, Tunable, TunableId};

/// An operand during code generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    /// A real that is the same for every element.
    Scalar(ScalarId),
    /// A condition that is the same for every element: one or zero.
    Truth(ScalarId),
    /// A real of an element.
    Element(ValueId),
    /// A condition on an element.
    Mask(ValueId),
}

/// The code so far. One statement may exceed the limits until [`check_limits`](Self::check_limits) runs.
#[derive(Default)]
pub(super) struct CodeBuilder {
    scalars: Vec<ScalarOp>,
    /// The value of each scalar of configured numbers alone.
    known: Vec<Option<f64>>,
    tunables: Vec<Tunable>,
    /// Scalars with tunables that have decided about operations.
    decided: BTreeSet<ScalarId>,
    ops: Vec<RuleOp>,
    places: BTreeMap<RuleOp, ValueId>,
    /// Each with the element that it adds.
    reductions: Vec<(ReductionKind, ValueId)>,
}

/// Inputs that are unknown while code is generated; no known value depends on them.
const NOTHING: ScalarInputs = ScalarInputs { rate: 0.0, count: 0.0, gradient_scale: 0.0, settings: StepSettings::NONE };

impl CodeBuilder {
    pub(super) fn weight(&mut self) -> Operand {
        Operand::Element(self.op(RuleOp::Weight))
    }

    /// The merged gradient, scaled.
    pub(super) fn gradient(&mut self) -> Operand {
        let sum = Operand::Element(self.op(RuleOp::Gradient));
        let scale = self.input(ScalarInput::GradientScale);
        self.binary(Binary::Multiply, sum, scale)
    }

    pub(super) fn state(&mut self, state: StateId) -> Operand {
        Operand::Element(self.op(RuleOp::State(state)))
    }

    pub(super) fn input(&mut self, input: ScalarInput) -> Operand {
        Operand::Scalar(self.scalar(ScalarOp::Input(input)))
    }

    pub(super) fn constant(&mut self, value: f64) -> Operand {
        Operand::Scalar(self.scalar(ScalarOp::Constant(value)))
    }

    /// A number that a step may carry another value of; a constant when there are as many tunables as may be.
    pub(super) fn tunable(&mut self, tunable: Tunable) -> Operand {
        let value = tunable.value;
        match u8::try_from(self.tunables.len()) {
            Ok(place) if usize::from(place) < TUNABLES_MAX => {
                self.tunables.push(tunable);
                Operand::Scalar(self.scalar(ScalarOp::Tunable(TunableId(place), value)))
            }
            _ => self.constant(value),
        }
    }

    /// The configured value of an operand that is known before training; true is one, false zero.
    pub(super) fn known(&self, operand: Operand) -> Option<f64> {
        let (Operand::Scalar(scalar) | Operand::Truth(scalar)) = operand else { return None };
        self.known[scalar.index()]
    }

    /// [`known`](Self::known), of which the code depends from now on: no step may carry what changes it.
    pub(super) fn decide(&mut self, operand: Operand) -> Option<f64> {
        let (Operand::Scalar(scalar) | Operand::Truth(scalar)) = operand else { return None };
        let known = self.known[scalar.index()]?;
        if !self.is_constant(scalar) {
            self.decided.insert(scalar);
        }
        Some(known)
    }

    pub(super) fn unary(&mut self, unary: Unary, operand: Operand) -> Operand {
        match operand {
            Operand::Scalar(scalar) => Operand::Scalar(self.scalar(ScalarOp::Unary(unary, scalar))),
            operand => Operand::Element(self.unary_of_element(unary, operand)),
        }
    }

    pub(super) fn binary(&mut self, binary: Binary, left: Operand, right: Operand) -> Operand {
        if let (Operand::Scalar(left), Operand::Scalar(right)) = (left, right) {
            return Operand::Scalar(self.scalar(ScalarOp::Binary(binary, left, right)));
        }
        // Operations that change no bit of any element are omitted.
        match (binary, self.known(left), self.known(right)) {
            (Binary::Multiply | Binary::Divide, _, Some(1.0)) => {
                self.decide(right);
                return left;
            }
            (Binary::Multiply, Some(1.0), _) => {
                self.decide(left);
                return right;
            }
            (Binary::Subtract, _, Some(zero)) if zero.to_bits() == 0 => {
                self.decide(right);
                return left;
            }
            _ => {}
        }
        let (mut left, mut right) = (self.element(left), self.element(right));
        if matches!(binary, Binary::Add | Binary::Multiply) && right < left {
            (left, right) = (right, left);
        }
        Operand::Element(self.op(RuleOp::Binary(binary, left, right)))
    }

    pub(super) fn compare(&mut self, comparison: Comparison, left: Operand, right: Operand) -> Operand {
        if let (Operand::Scalar(left), Operand::Scalar(right)) = (left, right) {
            return Operand::Truth(self.scalar(ScalarOp::Compare(comparison, left, right)));
        }
        let (left, right) = (self.element(left), self.element(right));
        Operand::Mask(self.op(RuleOp::Compare(comparison, left, right)))
    }

    pub(super) fn not(&mut self, operand: Operand) -> Operand {
        match operand {
            Operand::Truth(truth) => {
                let zero = self.scalar(ScalarOp::Constant(0.0));
                Operand::Truth(self.scalar(ScalarOp::Compare(Comparison::Equal, truth, zero)))
            }
            operand => {
                let mask = self.mask(operand);
                Operand::Mask(self.op(RuleOp::Not(mask)))
            }
        }
    }

    pub(super) fn and(&mut self, left: Operand, right: Operand) -> Operand {
        match (self.decide_beside(left, right), self.decide_beside(right, left), left, right) {
            (Some(0.0), ..) => left,
            (Some(_), ..) => right,
            (_, Some(0.0), ..) => right,
            (_, Some(_), ..) => left,
            (_, _, Operand::Truth(left), Operand::Truth(right)) => {
                Operand::Truth(self.scalar(ScalarOp::Binary(Binary::Minimum, left, right)))
            }
            _ => {
                let (left, right) = (self.mask(left), self.mask(right));
                Operand::Mask(self.op(RuleOp::And(left, right)))
            }
        }
    }

    pub(super) fn or(&mut self, left: Operand, right: Operand) -> Operand {
        match (self.decide_beside(left, right), self.decide_beside(right, left), left, right) {
            (Some(0.0), ..) => right,
            (Some(_), ..) => left,
            (_, Some(0.0), ..) => left,
            (_, Some(_), ..) => right,
            (_, _, Operand::Truth(left), Operand::Truth(right)) => {
                Operand::Truth(self.scalar(ScalarOp::Binary(Binary::Maximum, left, right)))
            }
            _ => {
                let (left, right) = (self.mask(left), self.mask(right));
                Operand::Mask(self.op(RuleOp::Or(left, right)))
            }
        }
    }

    pub(super) fn select(&mut self, condition: Operand, then: Operand, otherwise: Operand) -> Operand {
        if then == otherwise {
            return then;
        }
        if let (Operand::Truth(condition), Operand::Scalar(then), Operand::Scalar(otherwise)) =
            (condition, then, otherwise)
        {
            return Operand::Scalar(self.scalar(ScalarOp::Select { condition, then, otherwise }));
        }
        if let Some(truth) = self.decide(condition) {
            return if truth == 0.0 { otherwise } else { then };
        }
        let mask = self.mask(condition);
        let (then, otherwise) = (self.element(then), self.element(otherwise));
        Operand::Element(self.op(RuleOp::Select { mask, then, otherwise }))
    }

    pub(super) fn call(&mut self, function: RuleFunction, operand: Operand) -> Operand {
        match operand {
            Operand::Scalar(scalar) => Operand::Scalar(self.scalar(ScalarOp::Call(function, scalar))),
            operand => {
                let operand = self.element(operand);
                Operand::Element(self.op(RuleOp::Call(function, operand)))
            }
        }
    }

    /// A scalar rounded to binary32; none for an element.
    pub(super) fn single(&mut self, operand: Operand) -> Option<Operand> {
        let Operand::Scalar(scalar) = operand else { return None };
        Some(Operand::Scalar(self.scalar(ScalarOp::Single(scalar))))
    }

    /// The value of an element, added over the whole parameter.
    pub(super) fn reduce(&mut self, kind: ReductionKind, operand: Operand) -> Operand {
        let one = (kind, self.element(operand));
        let place = self.reductions.iter().position(|known| *known == one).unwrap_or_else(|| {
            self.reductions.push(one);
            self.reductions.len() - 1
        });
        let id = ReductionId(u16::try_from(place).expect("a statement adds few reductions to those allowed"));
        Operand::Scalar(self.scalar(ScalarOp::Reduced(id)))
    }

    /// Whether a number of several parameters is read.
    pub(super) fn has_total(&self) -> bool {
        self.reductions.iter().any(|(kind, _)| *kind == ReductionKind::Total)
    }

    /// Powers of elements for which there is an instruction use it: `x ^ 1`, `x ^ 2` and `x ^ 0.5`.
    pub(super) fn power(&mut self, base: Operand, exponent: Operand) -> Operand {
        match (base, exponent, self.known(exponent)) {
            (Operand::Scalar(base), Operand::Scalar(exponent), _) => {
                Operand::Scalar(self.scalar(ScalarOp::Power(base, exponent)))
            }
            (base, _, Some(known)) if [0.5, 1.0, 2.0].contains(&known) => {
                self.decide(exponent);
                match known {
                    1.0 => base,
                    2.0 => self.binary(Binary::Multiply, base, base),
                    _ => self.unary(Unary::SquareRoot, base),
                }
            }
            (base, exponent, _) => {
                let (base, exponent) = (self.element(base), self.element(exponent));
                Operand::Element(self.op(RuleOp::Power(base, exponent)))
            }
        }
    }

    /// Refuses code that exceeds the limits.
    pub(super) fn check_limits(&self) -> Result<(), String> {
        // A result that is a scalar becomes an operation at the end.
        let results = STATES_MAX + 1;
        if self.ops.len() + results > RULE_OPS_MAX {
            let most = RULE_OPS_MAX - results;
            return Err(format!("expected at most {most} operations in a rule, found more"));
        }
        if self.scalars.len() > RULE_SCALARS_MAX {
            return Err(format!("expected at most {RULE_SCALARS_MAX} numbers and scalars in a rule, found more"));
        }
        if self.reductions.len() > RULE_REDUCTIONS_MAX {
            return Err(format!(
                "expected at most {RULE_REDUCTIONS_MAX} different sums and norms in a rule, found more"
            ));
        }
        Ok(())
    }

    /// The code that these results need, in the same order. The limits were checked, and the results themselves fit.
    pub(super) fn finish(mut self, states: Vec<(String, f64, Operand)>, weight: Operand) -> Lowered {
        let mut results: Vec<ValueId> = states.iter().map(|(_, _, value)| self.element(*value)).collect();
        results.push(self.element(weight));
        let unchanged: Vec<ValueId> =
            (0_u16..).zip(&states).map(|(id, _)| self.op(RuleOp::State(StateId(id)))).collect();
        let states: Vec<(String, f64)> = states.into_iter().map(|(name, initial, _)| (name, initial)).collect();
        let whole = self.extract(&states, &results);
        let codes: Vec<Lowered> = self
            .reductions
            .iter()
            .map(|(_, element)| self.extract(&states, &[unchanged.as_slice(), &[*element]].concat()))
            .collect();
        let mut needed = vec![false; codes.len()];
        whole.reads().for_each(|id| needed[id.index()] = true);
        for (place, code) in codes.iter().enumerate().rev() {
            if needed[place] {
                code.reads().for_each(|id| needed[id.index()] = true);
            }
        }
        let numbers = numbers(&needed);
        let kept = self.reductions.iter().zip(codes).zip(&needed).filter(|(_, is_needed)| **is_needed);
        let reductions = kept.map(|(((kind, _), code), _)| RuleReduction {
            kind: *kind,
            code: Arc::new(code.with_reductions_numbered(&numbers)),
        });
        let reductions = reductions.collect();
        let premises = self.premises();
        whole.with_reductions_numbered(&numbers).with_reductions(reductions).with_tunables(self.tunables, premises)
    }

    /// The values of scalars for which the operations are the rule's.
    fn premises(&self) -> Premises {
        if self.tunables.is_empty() {
            return Premises::default();
        }
        let known = |id: ScalarId| self.known[id.index()].expect("what has decided was known");
        let decided = self.decided.iter().map(|id| (*id, known(*id))).collect();
        let finite = (0..).map(ScalarId).zip(&self.known).filter(|(id, _)| !self.is_constant(*id));
        let finite = finite.filter(|(_, known)| known.is_some_and(f64::is_finite)).map(|(id, _)| id).collect();
        Premises { scalars: self.scalars.clone(), decided, finite }
    }

    /// The code that these results, the states' and the weight's, need.
    fn extract(&self, states: &[(String, f64)], results: &[ValueId]) -> Lowered {
        let values = self.needed_values(results);
        let scalars = self.needed_scalars(&values);
        let value = |id: ValueId| ValueId(values[id.index()].expect("what is used was kept"));
        let scalar = |id: ScalarId| ScalarId(scalars[id.index()].expect("what is used was kept"));
        let kept = |places: &[Option<u16>], place: usize| places[place].is_some();
        let ops = self.ops.iter().enumerate().filter(|(place, _)| kept(&values, *place));
        let ops = ops.map(|(_, op)| op.renumbered(value, scalar)).collect();
        let kept_scalars = self.scalars.iter().enumerate().filter(|(place, _)| kept(&scalars, *place));
        let kept_scalars = kept_scalars.map(|(_, op)| op.renumbered(scalar)).collect();
        let weight = value(*results.last().expect("the weight was pushed"));
        let states = states.iter().zip(results).map(|((name, initial), result)| StateResult {
            name: name.clone(),
            initial: *initial,
            value: value(*result),
        });
        Lowered::new(kept_scalars, ops, states.collect(), weight)
    }

    /// The new number of every operation that a result needs.
    fn needed_values(&self, results: &[ValueId]) -> Vec<Option<u16>> {
        let mut needed = vec![false; self.ops.len()];
        results.iter().for_each(|result| needed[result.index()] = true);
        for place in (0..self.ops.len()).rev() {
            if needed[place] {
                self.ops[place].operands().for_each(|operand| needed[operand.index()] = true);
            }
        }
        numbers(&needed)
    }

    /// The new number of every scalar that a kept operation needs.
    fn needed_scalars(&self, values: &[Option<u16>]) -> Vec<Option<u16>> {
        let mut needed = vec![false; self.scalars.len()];
        for (op, _) in self.ops.iter().zip(values).filter(|(_, kept)| kept.is_some()) {
            if let RuleOp::Scalar(scalar) = op {
                needed[scalar.index()] = true;
            }
        }
        for place in (0..self.scalars.len()).rev() {
            if needed[place] {
                self.scalars[place].operands().for_each(|operand| needed[operand.index()] = true);
            }
        }
        numbers(&needed)
    }

    fn element(&mut self, operand: Operand) -> ValueId {
        match operand {
            Operand::Element(value) => value,
            Operand::Scalar(scalar) => self.op(RuleOp::Scalar(scalar)),
            Operand::Truth(_) | Operand::Mask(_) => unreachable!("a condition was let through as a real"),
        }
    }

    fn mask(&mut self, operand: Operand) -> ValueId {
        match operand {
            Operand::Mask(value) => value,
            Operand::Truth(truth) => {
                let zero = self.scalar(ScalarOp::Constant(0.0));
                let (zero, truth) = (self.op(RuleOp::Scalar(zero)), self.op(RuleOp::Scalar(truth)));
                self.op(RuleOp::Compare(Comparison::Less, zero, truth))
            }
            Operand::Scalar(_) | Operand::Element(_) => unreachable!("a real was let through as a condition"),
        }
    }

    fn unary_of_element(&mut self, unary: Unary, operand: Operand) -> ValueId {
        let operand = self.element(operand);
        match (unary, self.ops[operand.index()]) {
            (Unary::Negate, RuleOp::Unary(Unary::Negate, inner)) => inner,
            _ => self.op(RuleOp::Unary(unary, operand)),
        }
    }

    fn op(&mut self, op: RuleOp) -> ValueId {
        let next = ValueId(u16::try_from(self.ops.len()).expect("a statement adds few operations to those allowed"));
        *self.places.entry(op).or_insert_with(|| {
            self.ops.push(op);
            next
        })
    }

    /// Merges equal scalars and folds constants.
    fn scalar(&mut self, scalar: ScalarOp) -> ScalarId {
        let scalar = self.folded(scalar);
        let place = self.scalars.iter().position(|known| is_same(*known, scalar)).unwrap_or_else(|| {
            self.known.push(self.known_value(scalar));
            self.scalars.push(scalar);
            self.scalars.len() - 1
        });
        ScalarId(u16::try_from(place).expect("a statement adds few scalars to those allowed"))
    }

    fn folded(&self, scalar: ScalarOp) -> ScalarOp {
        if let ScalarOp::Select { condition, then, otherwise } = scalar
            && let ScalarOp::Constant(truth) = self.scalars[condition.index()]
        {
            return self.scalars[if truth == 0.0 { otherwise } else { then }.index()];
        }
        if scalar.is_leaf() || !scalar.operands().all(|operand| self.is_constant(operand)) {
            return scalar;
        }
        ScalarOp::Constant(self.known_value(scalar).expect("its operands are constants"))
    }

    /// The value of a scalar of configured numbers alone.
    fn known_value(&self, scalar: ScalarOp) -> Option<f64> {
        match scalar {
            ScalarOp::Input(_) | ScalarOp::Reduced(_) => return None,
            ScalarOp::Select { condition, then, otherwise } => {
                let truth = self.known[condition.index()]?;
                return self.known[if truth == 0.0 { otherwise } else { then }.index()];
            }
            _ => {}
        }
        if scalar.operands().any(|operand| self.known[operand.index()].is_none()) {
            return None;
        }
        let operands: Vec<f64> = self.known.iter().map(|known| known.unwrap_or(f64::NAN)).collect();
        Some(scalar.value(&NOTHING, &[], &operands))
    }

    fn is_constant(&self, scalar: ScalarId) -> bool {
        matches!(self.scalars[scalar.index()], ScalarOp::Constant(_))
    }

    /// The value of a condition that decides about an operation of both; with another scalar only a constant does.
    fn decide_beside(&mut self, operand: Operand, other: Operand) -> Option<f64> {
        match (operand, other) {
            (Operand::Truth(truth), Operand::Truth(_)) if !self.is_constant(truth) => None,
            _ => self.decide(operand),
        }
    }
}

/// Compares constants by their bits: zero is not negative zero.
fn is_same(one: ScalarOp, other: ScalarOp) -> bool {
    match (one, other) {
        (ScalarOp::Constant(one), ScalarOp::Constant(other)) => one.to_bits() == other.to_bits(),
        _ => one == other,
    }
}

fn numbers(needed: &[bool]) -> Vec<Option<u16>> {
    let mut next = 0_u16;
    let number = |needed: &bool| {
        needed.then(|| {
            next += 1;
            next - 1
        })
    };
    needed.iter().map(number).collect()
}

impl RuleOp {
    fn renumbered(self, value: impl Fn(ValueId) -> ValueId, scalar: impl Fn(ScalarId) -> ScalarId) -> Self {
        match self {
            Self::Weight | Self::Gradient | Self::State(_) => self,
            Self::Scalar(id) => Self::Scalar(scalar(id)),
            Self::Unary(unary, operand) => Self::Unary(unary, value(operand)),
            Self::Binary(binary, left, right) => Self::Binary(binary, value(left), value(right)),
            Self::Compare(comparison, left, right) => Self::Compare(comparison, value(left), value(right)),
            Self::Not(operand) => Self::Not(value(operand)),
            Self::And(left, right) => Self::And(value(left), value(right)),
            Self::Or(left, right) => Self::Or(value(left), value(right)),
            Self::Select { mask, then, otherwise } => {
                Self::Select { mask: value(mask), then: value(then), otherwise: value(otherwise) }
            }
            Self::Call(function, operand) => Self::Call(function, value(operand)),
            Self::Power(base, exponent) => Self::Power(value(base), value(exponent)),
        }
    }
}

impl ScalarOp {
    /// Whether it has no operands.
    fn is_leaf(self) -> bool {
        matches!(self, Self::Constant(_) | Self::Tunable(..) | Self::Input(_) | Self::Reduced(_))
    }

    fn renumbered(self, scalar: impl Fn(ScalarId) -> ScalarId) -> Self {
        match self {
            Self::Constant(_) | Self::Tunable(..) | Self::Input(_) | Self::Reduced(_) => self,
            Self::Unary(unary, operand) => Self::Unary(unary, scalar(operand)),
            Self::Binary(binary, left, right) => Self::Binary(binary, scalar(left), scalar(right)),
            Self::Compare(comparison, left, right) => Self::Compare(comparison, scalar(left), scalar(right)),
            Self::Select { condition, then, otherwise } => {
                Self::Select { condition: scalar(condition), then: scalar(then), otherwise: scalar(otherwise) }
            }
            Self::Call(function, operand) => Self::Call(function, scalar(operand)),
            Self::Single(operand) => Self::Single(scalar(operand)),
            Self::Power(base, exponent) => Self::Power(scalar(base), scalar(exponent)),
        }
    }
}

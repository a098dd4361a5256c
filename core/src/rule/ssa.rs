//! Straight-line code of a rule over the elements of a chunk, in SSA form, and the scalars it needs.
//!
//! Kernels take this form. It has no names, no loops and no branches; a value is defined once, by the operation at its
//! index in the list, and operations use only values before them. Unused operations are removed, equal ones are merged,
//! and values that are the same for all elements are scalars.
//!
//! **The arithmetic is specified.** Every operation computes in the parameter's own type, binary32 or binary64, and
//! rounds once, to nearest even: no product is contracted with a sum, nothing is reassociated, subnormal numbers are
//! not flushed. All kernels that keep this give the bits of [`super::reference`]. Each operation documents its results
//! for zeros and NaN; *which* NaN results is unspecified.

use std::sync::Arc;

use crate::limits::{RULE_OPS_MAX, RULE_REDUCTIONS_MAX, RULE_SCALARS_MAX, STATES_MAX};

use super::elementary;
use super::tunable::{StepSettings, Tunable, TunableId};

/// The value that the operation at this place defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u16);

/// The scalar at this place in [`Lowered::scalars`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScalarId(pub u16);

/// The state at this place in [`Lowered::states`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateId(pub u16);

impl ValueId {
    /// Its place in [`Lowered::ops`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl ScalarId {
    /// Its place in [`Lowered::scalars`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl StateId {
    /// Its place in [`Lowered::states`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The reduction at this place in [`Lowered::reductions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReductionId(pub u16);

impl ReductionId {
    /// Its place in [`Lowered::reductions`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One operation on an element. It defines a real number, or a mask (true or false) where it says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleOp {
    /// The parameter's element before the update.
    Weight,
    /// The sum of the gradients in trainer order, in the parameter's type; no gradients mean a gradient of zero. It is
    /// not scaled: the merge's factor is a scalar like others.
    Gradient,
    /// The state's element before the update.
    State(StateId),
    /// A scalar, rounded by [`round_to_binary32`] for f32.
    Scalar(ScalarId),
    /// One real of one real.
    Unary(Unary, ValueId),
    /// One real of two reals, the left one first.
    Binary(Binary, ValueId, ValueId),
    /// A mask of two reals; all are false when one of the two is not a number.
    Compare(Comparison, ValueId, ValueId),
    /// A mask that is true where this one is false.
    Not(ValueId),
    /// A mask that is true where both are.
    And(ValueId, ValueId),
    /// A mask that is true where one of the two is.
    Or(ValueId, ValueId),
    /// A real: the bits of `then` where the mask is true, else those of `otherwise`. Both are computed; the other one
    /// has no effect.
    Select {
        /// A mask.
        mask: ValueId,
        /// A real.
        then: ValueId,
        /// A real.
        otherwise: ValueId,
    },
    /// One real of one real, by a function call for every element.
    Call(RuleFunction, ValueId),
    /// The first to the power of the second, by [`power`] for every element.
    Power(ValueId, ValueId),
}

/// Arithmetic of one operand that vector units have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unary {
    /// Flips the sign bit, also of NaN.
    Negate,
    /// Clears the sign bit, also of NaN.
    Absolute,
    /// IEEE's root: not a number below zero, negative zero of negative zero.
    SquareRoot,
    /// Minus one or one; zeros and NaN are returned as they are.
    Sign,
    /// The largest integer that is not above it, with its own sign where that is zero; infinities and NaN are returned
    /// as they are.
    Floor,
}

/// Arithmetic of two operands that vector units have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Binary {
    /// IEEE's sum.
    Add,
    /// IEEE's difference.
    Subtract,
    /// IEEE's product.
    Multiply,
    /// IEEE's quotient.
    Divide,
    /// `min(a, b)` is `b` where `b < a`, else `a`. So of two zeros it is the first, and with a NaN it is the first. It
    /// is x86's `minps` with `b` as the first source and `a` as the second.
    Minimum,
    /// `max(a, b)` is `b` where `b > a`, else `a`; zeros and NaN as with the minimum.
    Maximum,
    /// The magnitude of the first with the sign bit of the second, also for NaN.
    CopySign,
}

/// How two reals are compared. "Above" is the comparison of the exchanged operands, "not equal" is [`RuleOp::Not`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Comparison {
    /// The first is below the second.
    Less,
    /// The first is not above the second.
    LessOrEqual,
    /// They are equal; zeros of both signs are.
    Equal,
}

/// Functions without an instruction, computed in binary64 by [`RuleFunction::of`] and rounded once to the parameter's
/// type. They consist of sums, products and quotients, each rounded by itself, so that every kernel on every machine
/// gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleFunction {
    /// `e^x`
    Exponential,
    /// `e^x - 1`, exact to the last place near zero too.
    ExponentialMinusOne,
    /// The natural logarithm.
    Logarithm,
    /// `log(1 + x)`, exact to the last place near zero too.
    LogarithmOnePlus,
    /// The hyperbolic tangent.
    HyperbolicTangent,
}

/// The definition of a scalar, computed once for every update, in binary64. True is one, false zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScalarOp {
    /// A number of the rule's text, or folded from such.
    Constant(f64),
    /// A tunable: the value that the step carries, else this one, which is configured.
    Tunable(TunableId, f64),
    /// An input of the update.
    Input(ScalarInput),
    /// The reduction at this place in [`Lowered::reductions`].
    Reduced(ReductionId),
    /// As on elements.
    Unary(Unary, ScalarId),
    /// As on elements.
    Binary(Binary, ScalarId, ScalarId),
    /// One where it holds, else zero.
    Compare(Comparison, ScalarId, ScalarId),
    /// `then` unless the condition is zero.
    Select {
        /// Zero, or anything else.
        condition: ScalarId,
        /// For anything but zero.
        then: ScalarId,
        /// For zero.
        otherwise: ScalarId,
    },
    /// As on elements.
    Call(RuleFunction, ScalarId),
    /// Rounded to binary32, by [`single`].
    Single(ScalarId),
    /// As on elements.
    Power(ScalarId, ScalarId),
}

/// Inputs of an update that its rule does not contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScalarInput {
    /// The learning rate: the schedule's or the step's, times the parameter's own factor.
    Rate,
    /// The number of this update, from one.
    Count,
    /// The factor of the sum of the gradients: the merge's factor times that of `clip_norm`.
    GradientScale,
}

/// The values of [`ScalarInput`] for one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalarInputs {
    /// [`ScalarInput::Rate`]
    pub rate: f64,
    /// [`ScalarInput::Count`]
    pub count: f64,
    /// [`ScalarInput::GradientScale`]
    pub gradient_scale: f64,
    /// Values that the step carries in place of configured ones.
    pub settings: StepSettings,
}

/// A state tensor: as long as the parameter and of its type.
#[derive(Clone, Debug, PartialEq)]
pub struct StateResult {
    /// As the rule's text writes it; checkpoints carry it.
    pub name: String,
    /// Every element before the first update, rounded to the parameter's type.
    pub initial: f64,
    /// The element after the update: a real. It is [`RuleOp::State`] itself where the rule does not assign it.
    pub value: ValueId,
}

/// The way to a number of a whole parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReductionKind {
    /// Addition of the elements, in binary64.
    Sum,
    /// Addition of their squares, in binary64.
    SquareSum,
    /// The number that trainers make of this one, the parameter's *share*, and of those of other parameters. The code
    /// of the reduction has one scalar as its element: the share. A rule has at most one.
    Total,
}

/// One number of a whole parameter, computed before the update.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleReduction {
    /// The way to the number.
    pub kind: ReductionKind,
    /// The code of the element that is added: its [`weight`](Lowered::weight). It leaves every state as it is, has the
    /// states of the whole rule, and reads reductions before this one only.
    pub code: Arc<Lowered>,
}

/// A rule as straight-line code. The code is well formed (see [`new`](Self::new)), so kernels need not check it.
///
/// The same `Lowered` behind the same `Arc` serves every chunk of a parameter for the life of the job; a kernel may
/// cache generated code by that identity.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    scalars: Vec<ScalarOp>,
    ops: Vec<RuleOp>,
    states: Vec<StateResult>,
    weight: ValueId,
    reductions: Vec<RuleReduction>,
    tunables: Vec<Tunable>,
    premises: Premises,
}

/// Scalars for which the code was made: it is the rule's code as long as they keep their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Premises {
    pub(super) scalars: Vec<ScalarOp>,
    /// Scalars that decided about operations, with their values.
    pub(super) decided: Vec<(ScalarId, f64)>,
    /// Scalars of configured numbers alone, which are finite.
    pub(super) finite: Vec<ScalarId>,
}

impl Lowered {
    /// Straight-line code from its parts.
    ///
    /// # Panics
    ///
    /// When an operation uses a value that is not before it, a mask where it needs a real or the other way round, a
    /// scalar or a state that is not there; when a result is a mask; when a list is longer than [`crate::limits`]
    /// allows.
    #[must_use]
    pub fn new(scalars: Vec<ScalarOp>, ops: Vec<RuleOp>, states: Vec<StateResult>, weight: ValueId) -> Self {
        assert!(scalars.len() <= RULE_SCALARS_MAX, "{} scalars; at most {RULE_SCALARS_MAX}", scalars.len());
        assert!(ops.len() <= RULE_OPS_MAX, "{} operations; at most {RULE_OPS_MAX}", ops.len());
        assert!(states.len() <= STATES_MAX, "{} states; at most {STATES_MAX}", states.len());
        for (place, scalar) in scalars.iter().enumerate() {
            assert!(scalar.operands().all(|id| id.index() < place), "scalar {place} uses one that is not before it");
        }
        let (reductions, tunables, premises) = (Vec::new(), Vec::new(), Premises::default());
        let lowered = Self { scalars, ops, states, weight, reductions, tunables, premises };
        for (place, op) in lowered.ops.iter().enumerate() {
            lowered.assert_operands(place, *op);
        }
        for result in lowered.states.iter().map(|state| state.value).chain([weight]) {
            lowered.assert_real(lowered.ops.len(), result);
        }
        lowered
    }

    /// This code with the reductions that its scalars read.
    ///
    /// # Panics
    /// When there are more than [`crate::limits`] allows, or code reads a reduction that is not before it.
    #[must_use]
    pub fn with_reductions(self, reductions: Vec<RuleReduction>) -> Self {
        assert!(reductions.len() <= RULE_REDUCTIONS_MAX, "{} reductions", reductions.len());
        let codes = reductions.iter().map(|reduction| reduction.code.as_ref()).chain([&self]);
        for (place, code) in codes.enumerate() {
            assert!(code.reads().all(|id| id.index() < place), "code {place} reads a reduction that is not before it");
        }
        Self { reductions, ..self }
    }

    /// The reductions, in the order in which they are computed.
    #[must_use]
    pub fn reductions(&self) -> &[RuleReduction] {
        &self.reductions
    }

    /// This code with the numbers that a step may carry other values of.
    pub(super) fn with_tunables(self, tunables: Vec<Tunable>, premises: Premises) -> Self {
        Self { tunables, premises, ..self }
    }

    /// The numbers that a step may carry other values of.
    #[must_use]
    pub fn tunables(&self) -> &[Tunable] {
        &self.tunables
    }

    /// Whether this code is that of the rule with these settings too.
    pub(crate) fn is_of(&self, settings: StepSettings) -> bool {
        self.premises.hold(settings)
    }

    /// This code with other numbers of the reductions that it reads.
    pub(super) fn with_reductions_numbered(mut self, numbers: &[Option<u16>]) -> Self {
        for scalar in &mut self.scalars {
            if let ScalarOp::Reduced(id) = scalar {
                *id = ReductionId(numbers[id.index()].expect("a reduction that is read is kept"));
            }
        }
        self
    }

    /// The reductions that its scalars read.
    pub(super) fn reads(&self) -> impl Iterator<Item = ReductionId> {
        self.scalars.iter().filter_map(|scalar| if let ScalarOp::Reduced(id) = scalar { Some(*id) } else { None })
    }

    /// The scalars, in the order in which they are computed. A kernel needs only the values that
    /// [`evaluate`](Self::evaluate) gave.
    #[must_use]
    pub fn scalars(&self) -> &[ScalarOp] {
        &self.scalars
    }

    /// The operations; the one at place `i` defines value `i`.
    #[must_use]
    pub fn ops(&self) -> &[RuleOp] {
        &self.ops
    }

    /// The place of its total among the reductions, if it reads one.
    #[must_use]
    pub fn total(&self) -> Option<usize> {
        self.reductions.iter().position(|reduction| reduction.kind == ReductionKind::Total)
    }

    /// Whether the update reads a reduction itself, or through reductions after its total.
    pub(crate) fn reads_beside_total(&self, place: usize) -> bool {
        let after = self.total().map_or(0, |total| total + 1);
        let later = self.reductions[after..].iter().map(|reduction| reduction.code.as_ref());
        let mut needed: Vec<bool> = vec![false; self.reductions.len()];
        self.reads().chain(later.flat_map(Self::reads)).for_each(|id| needed[id.index()] = true);
        for known in (place..after.saturating_sub(1)).rev() {
            if needed[known] {
                self.reductions[known].code.reads().for_each(|id| needed[id.index()] = true);
            }
        }
        needed[place]
    }

    /// The scalar that its element is, in code of a total.
    ///
    /// # Panics
    /// When its element is no scalar.
    pub(crate) fn scalar(&self) -> ScalarId {
        let RuleOp::Scalar(scalar) = self.ops[self.weight.index()] else { panic!("a share is one scalar") };
        scalar
    }

    /// The states, in the order in which a kernel is handed their tensors.
    #[must_use]
    pub fn states(&self) -> &[StateResult] {
        &self.states
    }

    /// The parameter's element after the update: a real.
    #[must_use]
    pub fn weight(&self) -> ValueId {
        self.weight
    }

    /// Whether a scalar is the number of the update, so that two updates at one rate may differ.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.scalars.contains(&ScalarOp::Input(ScalarInput::Count))
    }

    /// The scalars of one update, in the order of [`scalars`](Self::scalars), in place of what `values` held.
    /// `reduced` has the values of the reductions that this code reads, in the order of
    /// [`reductions`](Self::reductions).
    ///
    /// # Panics
    /// When `reduced` lacks one.
    pub fn evaluate(&self, inputs: &ScalarInputs, reduced: &[f64], values: &mut Vec<f64>) {
        values.clear();
        for scalar in &self.scalars {
            let value = scalar.value(inputs, reduced, values);
            values.push(value);
        }
    }

    fn assert_operands(&self, place: usize, op: RuleOp) {
        match op {
            RuleOp::Weight | RuleOp::Gradient => {}
            RuleOp::State(state) => assert!(state.index() < self.states.len(), "operation {place} reads no state"),
            RuleOp::Scalar(scalar) => assert!(scalar.index() < self.scalars.len(), "operation {place} reads no scalar"),
            RuleOp::Unary(_, operand) | RuleOp::Call(_, operand) => self.assert_real(place, operand),
            RuleOp::Binary(_, left, right) | RuleOp::Compare(_, left, right) | RuleOp::Power(left, right) => {
                self.assert_real(place, left);
                self.assert_real(place, right);
            }
            RuleOp::Not(operand) => self.assert_mask(place, operand),
            RuleOp::And(left, right) | RuleOp::Or(left, right) => {
                self.assert_mask(place, left);
                self.assert_mask(place, right);
            }
            RuleOp::Select { mask, then, otherwise } => {
                self.assert_mask(place, mask);
                self.assert_real(place, then);
                self.assert_real(place, otherwise);
            }
        }
    }

    fn assert_real(&self, place: usize, operand: ValueId) {
        assert!(operand.index() < place, "operation {place} uses a value that is not before it");
        assert!(!self.ops[operand.index()].is_mask(), "operation {place} uses a mask where it needs a real");
    }

    fn assert_mask(&self, place: usize, operand: ValueId) {
        assert!(operand.index() < place, "operation {place} uses a value that is not before it");
        assert!(self.ops[operand.index()].is_mask(), "operation {place} uses a real where it needs a mask");
    }
}

impl Premises {
    /// Whether the code is that of the rule with these settings too.
    pub(super) fn hold(&self, settings: StepSettings) -> bool {
        // No premise depends on these inputs.
        let inputs = ScalarInputs { rate: 0.0, count: 0.0, gradient_scale: 0.0, settings };
        let mut values = Vec::with_capacity(self.scalars.len());
        for scalar in &self.scalars {
            values.push(scalar.value(&inputs, &[0.0; RULE_REDUCTIONS_MAX], &values));
        }
        let is_kept = |(id, value): &(ScalarId, f64)| values[id.index()].to_bits() == value.to_bits();
        self.decided.iter().all(is_kept) && self.finite.iter().all(|id| values[id.index()].is_finite())
    }
}

impl RuleOp {
    /// Whether it defines a mask.
    #[must_use]
    pub const fn is_mask(self) -> bool {
        matches!(self, Self::Compare(..) | Self::Not(_) | Self::And(..) | Self::Or(..))
    }

    /// The values it uses, in order.
    pub fn operands(self) -> impl Iterator<Item = ValueId> {
        let operands = match self {
            Self::Weight | Self::Gradient | Self::State(_) | Self::Scalar(_) => [None; 3],
            Self::Unary(_, operand) | Self::Call(_, operand) | Self::Not(operand) => [Some(operand), None, None],
            Self::Binary(_, left, right)
            | Self::Compare(_, left, right)
            | Self::Power(left, right)
            | Self::And(left, right)
            | Self::Or(left, right) => [Some(left), Some(right), None],
            Self::Select { mask, then, otherwise } => [Some(mask), Some(then), Some(otherwise)],
        };
        operands.into_iter().flatten()
    }
}

impl ScalarOp {
    /// The scalars it uses, in order.
    pub fn operands(self) -> impl Iterator<Item = ScalarId> {
        let operands = match self {
            Self::Constant(_) | Self::Tunable(..) | Self::Input(_) | Self::Reduced(_) => [None; 3],
            Self::Unary(_, operand) | Self::Call(_, operand) | Self::Single(operand) => [Some(operand), None, None],
            Self::Binary(_, left, right) | Self::Compare(_, left, right) | Self::Power(left, right) => {
                [Some(left), Some(right), None]
            }
            Self::Select { condition, then, otherwise } => [Some(condition), Some(then), Some(otherwise)],
        };
        operands.into_iter().flatten()
    }

    /// Its value, from those before it.
    pub(super) fn value(self, inputs: &ScalarInputs, reduced: &[f64], before: &[f64]) -> f64 {
        let at = |id: ScalarId| before[id.index()];
        match self {
            Self::Constant(value) => value,
            Self::Tunable(id, configured) => inputs.settings.of(id).unwrap_or(configured),
            Self::Input(ScalarInput::Rate) => inputs.rate,
            Self::Input(ScalarInput::Count) => inputs.count,
            Self::Input(ScalarInput::GradientScale) => inputs.gradient_scale,
            Self::Reduced(id) => reduced[id.index()],
            Self::Unary(unary, operand) => unary.of(at(operand)),
            Self::Binary(binary, left, right) => binary.of(at(left), at(right)),
            Self::Compare(comparison, left, right) => f64::from(u8::from(comparison.holds(at(left), at(right)))),
            Self::Select { condition, then, otherwise } => at(if at(condition) == 0.0 { otherwise } else { then }),
            Self::Call(function, operand) => function.of(at(operand)),
            Self::Single(operand) => single(at(operand)),
            Self::Power(base, exponent) => power(at(base), at(exponent)),
        }
    }
}

impl Unary {
    /// In binary64.
    #[must_use]
    pub fn of(self, value: f64) -> f64 {
        match self {
            Self::Negate => -value,
            Self::Absolute => value.abs(),
            Self::SquareRoot => value.sqrt(),
            Self::Sign if value.abs() > 0.0 => 1.0_f64.copysign(value),
            Self::Sign => value,
            Self::Floor => value.floor(),
        }
    }
}

impl Binary {
    /// In binary64.
    #[must_use]
    pub fn of(self, left: f64, right: f64) -> f64 {
        match self {
            Self::Add => left + right,
            Self::Subtract => left - right,
            Self::Multiply => left * right,
            Self::Divide => left / right,
            Self::Minimum if right < left => right,
            Self::Maximum if right > left => right,
            Self::Minimum | Self::Maximum => left,
            Self::CopySign => left.copysign(right),
        }
    }
}

impl Comparison {
    /// Whether the comparison holds, in binary64.
    #[must_use]
    pub fn holds(self, left: f64, right: f64) -> bool {
        match self {
            Self::Less => left < right,
            Self::LessOrEqual => left <= right,
            Self::Equal => left == right,
        }
    }
}

impl RuleFunction {
    /// The function itself, in binary64. Kernels call this one, and round.
    #[must_use]
    pub fn of(self, value: f64) -> f64 {
        match self {
            Self::Exponential => elementary::exponential(value),
            Self::ExponentialMinusOne => elementary::exponential_minus_one(value),
            Self::Logarithm => elementary::logarithm(value),
            Self::LogarithmOnePlus => elementary::logarithm_one_plus(value),
            Self::HyperbolicTangent => elementary::hyperbolic_tangent(value),
        }
    }
}

/// The first to the power of the second, in binary64. Kernels call this one, and round.
#[must_use]
pub fn power(base: f64, exponent: f64) -> f64 {
    elementary::power(base, exponent)
}

/// The nearest binary32, as a binary64: what arithmetic in binary32 makes of an exact result.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest binary32 is what is asked for")]
pub fn single(value: f64) -> f64 {
    f64::from(value as f32)
}

/// A scalar rounded for an f32 chunk: the nearest binary32, but a nonzero scalar never becomes smaller than the
/// smallest normal number. An epsilon that is rounded to zero would lead to a division of zero by zero.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest binary32 is what is asked for")]
pub fn round_to_binary32(scalar: f64) -> f32 {
    let nearest = scalar as f32;
    if scalar != 0.0 && nearest.abs() < f32::MIN_POSITIVE { f32::MIN_POSITIVE.copysign(nearest) } else { nearest }
}

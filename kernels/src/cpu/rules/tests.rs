//! Every form against the reference: the same bits for random rules on random values.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use pserver_core::dtype::ElementType;
use pserver_core::limits::RULE_OPS_MAX;
use pserver_core::optim::{self, Gradient};
use pserver_core::rule::StepSettings;
use pserver_core::rule::reference::ElementMachine;
use pserver_core::rule::ssa::{
    Binary, Comparison, Lowered, RuleFunction, RuleOp, ScalarId, ScalarInputs, ScalarOp, StateId, StateResult, Unary,
    ValueId,
};

use super::{CachedRule, Form, KEPT_MAX, RuleExecution, RuleKernels, RuleUpdate};
use crate::native::{GRADIENTS_MAX, GradientFormat, Width};

/// Numbers of every class: mostly ordinary ones, and also zeros, subnormals, infinities and NaN.
const VALUES: [f64; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -2.75,
    3.0e-3,
    -7.0e5,
    1e-30,
    -1e-42,
    1e-44,
    3e25,
    -2e38,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];

/// A drawn operation, with numbers that choose its operands among the earlier values.
type Drawn = (u8, [u16; 3]);

/// A random rule: the operations that were drawn, and then the last values as results.
fn code(drawn: &[Drawn], states: usize) -> Lowered {
    let mut ops = vec![RuleOp::Weight, RuleOp::Gradient];
    ops.extend((0..states).map(|state| RuleOp::State(StateId(u16::try_from(state).expect("there are few")))));
    let scalars: Vec<ScalarOp> = [0.9, -1.5, 1e-3, 0.0].map(ScalarOp::Constant).to_vec();
    ops.extend((0..4).map(|scalar| RuleOp::Scalar(ScalarId(scalar))));
    let inputs = ops.len();
    for (kind, numbers) in drawn {
        let op = operation(&ops, inputs, *kind, *numbers);
        ops.push(op);
    }
    let reals = of_kind(&ops, false);
    let result = |back: usize| reals[reals.len() - 1 - back % reals.len()];
    let states = (0..states).map(|state| StateResult {
        name: format!("s{state}"),
        initial: 0.0,
        value: if state % 3 == 2 {
            ValueId(1 + u16::try_from(state).expect("there are few"))
        } else {
            result(state + 1)
        },
    });
    Lowered::new(scalars, ops.clone(), states.collect(), result(0))
}

fn of_kind(ops: &[RuleOp], is_mask: bool) -> Vec<ValueId> {
    let all = (0_u16..).zip(ops).filter(|(_, op)| op.is_mask() == is_mask);
    all.map(|(place, _)| ValueId(place)).collect()
}

fn operation(ops: &[RuleOp], inputs: usize, kind: u8, numbers: [u16; 3]) -> RuleOp {
    let (reals, masks) = (of_kind(ops, false), of_kind(ops, true));
    let [a, b, c] = numbers.map(|number| reals[usize::from(number) % reals.len()]);
    // The sign of a computed NaN is unspecified, so signs are copied from inputs only.
    let input = ValueId([0, 2, 3][usize::from(numbers[1]) % 3].min(u16::try_from(inputs - 1).expect("there are few")));
    let mask = |number: u16| masks.get(usize::from(number) % masks.len().max(1)).copied();
    match kind % 28 {
        0 => RuleOp::Unary(Unary::Negate, a),
        1 => RuleOp::Unary(Unary::Absolute, a),
        2 => RuleOp::Unary(Unary::SquareRoot, a),
        3 => RuleOp::Unary(Unary::Sign, a),
        4 => RuleOp::Unary(Unary::Floor, a),
        5 | 6 => RuleOp::Binary(Binary::Add, a, b),
        7 | 8 => RuleOp::Binary(Binary::Subtract, a, b),
        9 | 10 => RuleOp::Binary(Binary::Multiply, a, b),
        11 => RuleOp::Binary(Binary::Divide, a, b),
        12 => RuleOp::Binary(Binary::Minimum, a, b),
        13 => RuleOp::Binary(Binary::Maximum, a, b),
        14 => RuleOp::Binary(Binary::CopySign, a, input),
        15 | 16 => RuleOp::Compare(Comparison::Less, a, b),
        17 => RuleOp::Compare(Comparison::LessOrEqual, a, b),
        18 => RuleOp::Compare(Comparison::Equal, a, b),
        19 => RuleOp::Call(
            [RuleFunction::Exponential, RuleFunction::Logarithm, RuleFunction::HyperbolicTangent]
                [usize::from(numbers[2]) % 3],
            a,
        ),
        20 if numbers[2].is_multiple_of(2) => RuleOp::Power(a, b),
        20 => RuleOp::Call(
            [RuleFunction::ExponentialMinusOne, RuleFunction::LogarithmOnePlus][usize::from(numbers[0]) % 2],
            b,
        ),
        kind => match (mask(numbers[0]), mask(numbers[1])) {
            (Some(first), Some(second)) => match kind {
                21 => RuleOp::Not(first),
                22 => RuleOp::And(first, second),
                23 => RuleOp::Or(first, second),
                _ => RuleOp::Select { mask: first, then: b, otherwise: c },
            },
            _ => RuleOp::Binary(Binary::Add, a, b),
        },
    }
}

/// Bytes at any alignment.
#[derive(Clone, Debug)]
struct Misaligned(Vec<u8>, usize);

impl Misaligned {
    fn new(content: &[u8], by: usize) -> Self {
        let mut bytes = vec![0xa5; by];
        bytes.extend_from_slice(content);
        bytes.extend_from_slice(&[0xa5; 64]);
        Self(bytes, by)
    }

    fn get(&self) -> &[u8] {
        &self.0[self.1..self.0.len() - 64]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        let end = self.0.len() - 64;
        &mut self.0[self.1..end]
    }

    fn assert_guards(&self) {
        let (before, after) = (&self.0[..self.1], &self.0[self.0.len() - 64..]);
        assert!(before.iter().chain(after).all(|&byte| byte == 0xa5), "wrote outside its tensor");
    }
}

/// One random update.
#[derive(Clone, Debug)]
struct Case {
    drawn: Vec<Drawn>,
    states: usize,
    length: usize,
    misaligned: usize,
    is_double: bool,
    /// For each gradient: the type.
    gradients: Vec<u8>,
    seed: u64,
}

fn cases(ops: std::ops::Range<usize>) -> impl Strategy<Value = Case> {
    let gradients = prop_oneof![
        vec(0_u8..1, 1..4),
        (0_u8..3).prop_flat_map(|kind| vec(kind..kind + 1, 1..GRADIENTS_MAX + 3)),
        vec(0_u8..3, 0..6),
    ];
    let shape = (0_usize..5, 0_usize..200, 0_usize..64, any::<bool>());
    (vec((any::<u8>(), any::<[u16; 3]>()), ops), shape, gradients, any::<u64>()).prop_map(
        |(drawn, (states, length, misaligned, is_double), gradients, seed)| Case {
            drawn,
            states,
            length,
            misaligned,
            is_double,
            gradients,
            seed,
        },
    )
}

fn tensor(case: &Case, which: u64, element_type: ElementType) -> Misaligned {
    let mut random = case.seed ^ which.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::new();
    for _ in 0..case.length {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let kind = usize::try_from(random >> 59).expect("five bits");
        let common = ((random >> 20) & 0xffff) as f64 / 8192.0 - 4.0;
        push(&mut bytes, element_type, VALUES.get(kind).copied().unwrap_or(common));
    }
    Misaligned::new(&bytes, (case.misaligned + usize::try_from(which).expect("few tensors") * 5) % 64)
}

#[expect(clippy::cast_possible_truncation, reason = "rounding makes the inputs")]
fn push(bytes: &mut Vec<u8>, element_type: ElementType, value: f64) {
    match element_type {
        ElementType::Float32 => bytes.extend((value as f32).to_le_bytes()),
        ElementType::Float16 => bytes.extend(half::f16::from_f64(value).to_le_bytes()),
        ElementType::Bfloat16 => bytes.extend(half::bf16::from_f64(value).to_le_bytes()),
        _ => bytes.extend(value.to_le_bytes()),
    }
}

/// A type's elements as bytes and back, for the reference.
trait Element: pserver_core::rule::reference::RuleReal {
    fn read(bytes: &[u8]) -> Vec<Self>;
    fn bits(self) -> u64;
}

impl Element for f32 {
    fn read(bytes: &[u8]) -> Vec<Self> {
        bytes.as_chunks().0.iter().map(|bytes| Self::from_le_bytes(*bytes)).collect()
    }

    fn bits(self) -> u64 {
        if self.is_nan() { u64::MAX } else { self.to_bits().into() }
    }
}

impl Element for f64 {
    fn read(bytes: &[u8]) -> Vec<Self> {
        bytes.as_chunks().0.iter().map(|bytes| Self::from_le_bytes(*bytes)).collect()
    }

    fn bits(self) -> u64 {
        if self.is_nan() { u64::MAX } else { self.to_bits() }
    }
}

/// Weights and states after the update, as bits, with one bit pattern for NaN.
fn expected<E: Element>(code: &Lowered, scalars: &[f64], tensors: &[Misaligned], sum: &[u8]) -> Vec<Vec<u64>> {
    let mut values: Vec<Vec<E>> = tensors.iter().map(|tensor| E::read(tensor.get())).collect();
    let mut machine = ElementMachine::new(code);
    for (index, gradient) in E::read(sum).into_iter().enumerate() {
        let mut states: Vec<E> = values[1..].iter().map(|state| state[index]).collect();
        values[0][index] = machine.update(code, scalars, values[0][index], gradient, &mut states);
        values[1..].iter_mut().zip(states).for_each(|(state, value)| state[index] = value);
    }
    values.into_iter().map(|tensor| tensor.into_iter().map(E::bits).collect()).collect()
}

fn bits(tensors: &[Misaligned], is_double: bool) -> Vec<Vec<u64>> {
    let read = |tensor: &Misaligned| match is_double {
        true => f64::read(tensor.get()).into_iter().map(f64::bits).collect(),
        false => f32::read(tensor.get()).into_iter().map(f32::bits).collect(),
    };
    tensors.iter().map(read).collect()
}

fn check(case: &Case) {
    let code = Arc::new(code(&case.drawn, case.states));
    let element_type = if case.is_double { ElementType::Float64 } else { ElementType::Float32 };
    let mut scalars = Vec::new();
    code.evaluate(
        &ScalarInputs { rate: 0.1, count: 3.0, gradient_scale: 0.5, settings: StepSettings::NONE },
        &[],
        &mut scalars,
    );
    let tensors: Vec<Misaligned> = (0..=case.states as u64).map(|which| tensor(case, which, element_type)).collect();
    let types = case
        .gradients
        .iter()
        .map(|kind| [element_type, ElementType::Float16, ElementType::Bfloat16][usize::from(*kind)]);
    let held: Vec<(ElementType, Misaligned)> =
        (20..).zip(types).map(|(which, element_type)| (element_type, tensor(case, which, element_type))).collect();
    let gradients: Vec<Gradient<'_>> =
        held.iter().map(|(element_type, bytes)| Gradient { bytes: bytes.get(), element_type: *element_type }).collect();
    let mut sum = vec![0; tensors[0].get().len()];
    optim::sum(element_type, &mut sum, &gradients);
    let expected = match case.is_double {
        true => expected::<f64>(&code, &scalars, &tensors, &sum),
        false => expected::<f32>(&code, &scalars, &tensors, &sum),
    };
    for (form, at_once) in Form::here().into_iter().flat_map(|form| [1, 4, GRADIENTS_MAX].map(|count| (form, count))) {
        let mut found = tensors.clone();
        let (weights, states) = found.split_first_mut().expect("there is a weight");
        let mut rules = RuleKernels::new(form);
        rules.at_once = at_once;
        rules.update(RuleUpdate {
            code: &code,
            scalars: &scalars,
            width: if case.is_double { Width::Double } else { Width::Single },
            weights: weights.get_mut(),
            states: &mut states.iter_mut().map(Misaligned::get_mut).collect::<Vec<_>>(),
            gradients: &gradients,
        });
        found.iter().for_each(Misaligned::assert_guards);
        let found = bits(&found, case.is_double);
        assert_eq!(found, expected, "{form:?}, {at_once} gradients at once, of {:?}", code.ops());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn every_form_gives_the_bits_of_the_reference(case in cases(1..40)) {
        check(&case);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn rules_with_more_values_than_registers_match_the_reference(case in cases(60..RULE_OPS_MAX - 20)) {
        check(&case);
    }
}

/// Many different drawn rules.
fn many_rules() -> Vec<Arc<Lowered>> {
    let scalars = |rule: usize| vec![ScalarOp::Constant(1.0 + rule as f64)];
    let ops = vec![RuleOp::Weight, RuleOp::Scalar(ScalarId(0)), RuleOp::Binary(Binary::Add, ValueId(0), ValueId(1))];
    (0..KEPT_MAX + 9).map(|rule| Arc::new(Lowered::new(scalars(rule), ops.clone(), vec![], ValueId(2)))).collect()
}

#[test]
fn rules_beyond_the_cache_size_are_correct_and_take_no_more_memory() {
    let all = many_rules();
    for form in Form::here() {
        let mut rules = RuleKernels::new(form);
        let mut weights = 0.5_f64.to_le_bytes();
        let mut expected = 0.5;
        for code in all.iter().chain(&all).chain(all.iter().rev()) {
            let mut scalars = Vec::new();
            code.evaluate(
                &ScalarInputs { rate: 0.1, count: 1.0, gradient_scale: 1.0, settings: StepSettings::NONE },
                &[],
                &mut scalars,
            );
            expected += scalars[0];
            let (weights, width) = (&mut weights, Width::Double);
            rules.update(RuleUpdate { code, scalars: &scalars, width, weights, states: &mut [], gradients: &[] });
        }
        assert_eq!(f64::from_le_bytes(weights), expected, "{form:?}");
        assert_eq!(rules.kept.len(), KEPT_MAX);
    }
}

#[test]
fn rules_that_differ_in_constants_share_code() {
    let of = |constant: usize, op: Binary| {
        let ops = vec![RuleOp::Weight, RuleOp::Scalar(ScalarId(0)), RuleOp::Binary(op, ValueId(0), ValueId(1))];
        Arc::new(Lowered::new(vec![ScalarOp::Constant(constant as f64)], ops, vec![], ValueId(2)))
    };
    let all: Vec<_> = (0..200).map(|rule| of(rule, Binary::Add)).chain([of(7, Binary::Subtract)]).collect();
    for form in Form::here() {
        let mut rules = RuleKernels::new(form);
        for code in all.iter().chain(&all) {
            rules.find(code, Width::Single, GradientFormat::Own);
        }
        let address = |kept: &CachedRule| match &kept.run {
            RuleExecution::Generated { function, .. } => Arc::as_ptr(function).addr(),
            RuleExecution::Tiles(program) => Arc::as_ptr(program).addr(),
        };
        let addresses: std::collections::BTreeSet<usize> = rules.kept.iter().map(address).collect();
        assert_eq!((rules.kept.len(), addresses.len()), (201, 2), "{form:?}: one for sums, one for differences");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn no_memory_is_writable_and_runs() {
    let mut rules = RuleKernels::new(Form::best());
    let code = many_rules().pop().expect("there are many");
    let mut weights = [0; 4096];
    let (weights, width) = (&mut weights, Width::Single);
    rules.update(RuleUpdate { code: &code, scalars: &[1.0], width, weights, states: &mut [], gradients: &[] });
    let maps = std::fs::read_to_string("/proc/self/maps").expect("this is Linux");
    let both = maps.lines().find(|line| line.split_whitespace().nth(1).is_some_and(|rights| rights.starts_with("rwx")));
    assert_eq!(both, None);
}

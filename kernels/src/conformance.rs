//! Conformance suite for every implementation of [`Kernels`].
//!
//! - A sum, and an update of integers or by an exact algorithm, has the bits of [`pserver_core::optim`].
//! - Every other update has the bits of [`Plain`], which runs the rule's code element by element, and is within
//!   [`TOLERANCE_ULPS`] of [`pserver_core::optim`], as [`worst`] measures.
//! - A conversion to half precision has the bits of [`narrowing::narrow_to_half`].
//! - Bits do not depend on where a buffer is cut or on how it is aligned.
//! - Nothing outside the buffers is written.
//!
//! All NaN are considered equal: which bit pattern results is unspecified.

pub mod compiled;
pub mod device;
pub mod skips;
pub mod standin;

use std::sync::Arc;

use half::{bf16, f16};
use pserver_core::dtype::{ElementType, Half};
use pserver_core::ids::Version;
use pserver_core::narrowing;
use pserver_core::optim::{self, Algorithm, Coefficients, Gradient, Prepared, Regularizer, Rule, Schedule, Step};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_core::rule::reference::ParameterPiece;
use pserver_core::rule::{CheckedRule, RuleSettings};

/// How far an update may be from the oracle's, in the unit of [`worst`].
///
/// The difference comes from arithmetic in the parameter's own type, where the oracle has binary64: each scalar is
/// rounded once and each operation rounds, about ten times in Adadelta, and each rounding counts as at most half an
/// ulp of what it rounds. Measured over this suite: 3.31 for the CPU, of which the worst is RMSProp in binary32.
pub const TOLERANCE_ULPS: f64 = 8.0;

const GRADIENT_COUNTS: [usize; 5] = [1, 2, 3, 8, 17];
const LONG: usize = 4096 + 3;

/// Checks `kernels`.
///
/// # Panics
/// With the first violated property, its inputs, the found and the expected values.
pub fn check(kernels: &mut dyn Kernels) {
    let worst = worst(kernels);
    assert!(
        worst.ulps <= TOLERANCE_ULPS,
        "{} is {} ulps from the oracle, at most {TOLERANCE_ULPS} are allowed: {}",
        kernels.name(),
        worst.ulps,
        worst.case
    );
}

/// The update that was farthest from the oracle.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// The distance; infinite when a value that must be infinite or not a number was not.
    pub ulps: f64,
    /// Where, in words.
    pub case: String,
}

/// How far the updates are from the oracle in binary64. The unit, for one value, is what the oracle's own answer
/// changes by when each of its inputs (weight, gradient, states) changes by one ulp, plus an ulp of the
/// answer and of the
/// weight: so an ill-conditioned input is not held against a kernel, and a well-conditioned one is.
///
/// Three things are not compared: what follows from a state that overflowed the type (a later state, the weight),
/// because the oracle goes on with the state before it is rounded; anything where the oracle's neighbours are infinite;
/// and FTRL's element whose weight is infinite, which the oracle multiplies by a difference of powers that has become
/// zero, and the rule by the growth, which has not.
///
/// # Panics
///
/// When one of the exact promises is broken.
pub fn worst(kernels: &mut dyn Kernels) -> Worst {
    worst_of(kernels, rules())
}

/// As [`worst`], for some rules: for slow kernels.
///
/// # Panics
/// As [`worst`].
pub fn worst_of(kernels: &mut dyn Kernels, rules: Vec<Rule>) -> Worst {
    let mut worst = Worst { ulps: 0.0, case: "none".into() };
    for shape in shapes() {
        for element_type in ElementType::ALL.into_iter().filter(|found| found.is_parameter_type()) {
            for gradient_type in ElementType::ALL.into_iter().filter(|found| found.is_gradient_for(element_type)) {
                check_sum(kernels, shape, element_type, gradient_type);
                check_exact(kernels, &Algorithm::Add, shape, element_type, gradient_type);
                check_exact(kernels, &Algorithm::Sum, shape, element_type, gradient_type);
            }
        }
        Half::ALL.into_iter().for_each(|half| check_halves(kernels, shape, half));
    }
    for rule in rules {
        // Prepared once, as for a parameter: kernels cache code by identity.
        let prepared = Prepared::new(rule).expect("it is a rule");
        for shape in shapes() {
            for element_type in [ElementType::Float32, ElementType::Float64] {
                check_update(kernels, shape, element_type, &prepared, &mut worst);
            }
        }
    }
    worst
}

/// One entry of the table of buffers.
#[derive(Clone, Copy, Debug)]
struct BufferShape {
    length: usize,
    /// How many bytes past an aligned address a buffer begins.
    misaligned: usize,
    count: usize,
    seed: u64,
}

/// Lengths that some vectors or none fit into, and a long one. `PSERVER_FULL` has all of them, else those around
/// multiples of eight do.
fn shapes() -> impl Iterator<Item = BufferShape> {
    let is_full = std::env::var_os("PSERVER_FULL").is_some();
    let lengths = (1..=67).filter(move |length| is_full || matches!(length % 8, 0 | 1 | 7));
    lengths.chain([LONG]).enumerate().map(|(index, length)| BufferShape {
        length,
        misaligned: index % 8,
        count: GRADIENT_COUNTS[index % 5],
        seed: index as u64,
    })
}

/// Bytes at a chosen distance from alignment, between guards.
struct GuardedBuffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

const GUARD: u8 = 0xa5;

impl GuardedBuffer {
    fn new(content: &[u8], misaligned: usize) -> Self {
        let mut bytes = vec![GUARD; content.len() + 32];
        let start = bytes.as_ptr().align_offset(8) + misaligned;
        bytes[start..][..content.len()].copy_from_slice(content);
        Self { bytes, start, length: content.len() }
    }

    fn get(&self) -> &[u8] {
        &self.bytes[self.start..][..self.length]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }

    fn assert_guards(&self, case: &str) {
        let (before, rest) = self.bytes.split_at(self.start);
        let after = &rest[self.length..];
        assert!(before.iter().chain(after).all(|&byte| byte == GUARD), "wrote outside its buffer: {case}");
    }
}

/// A chunk's tensors as bytes, and its gradients.
struct ChunkTensors {
    element_type: ElementType,
    parameter: Vec<u8>,
    states: Vec<Vec<u8>>,
    gradient_type: ElementType,
    gradients: Vec<Vec<u8>>,
}

impl ChunkTensors {
    /// Runs the elements in `range` through an update from buffers of the given alignment.
    fn updated(
        &self,
        kernels: &mut dyn Kernels,
        (prepared, step): (&Prepared, &Step),
        range: std::ops::Range<usize>,
        misaligned: usize,
    ) -> Vec<Vec<u8>> {
        let rule = prepared.rule();
        let case = format!("{rule:?} of {}, elements {range:?}", self.element_type);
        let cut = |bytes: &Vec<u8>, element_type: ElementType, misaligned| {
            let size = size(element_type);
            GuardedBuffer::new(&bytes[range.start * size..range.end * size], misaligned % 8)
        };
        let mut parameter = cut(&self.parameter, self.element_type, misaligned);
        let mut states: Vec<GuardedBuffer> =
            self.states.iter().map(|state| cut(state, self.element_type, misaligned * 3)).collect();
        let held: Vec<GuardedBuffer> =
            self.gradients.iter().map(|bytes| cut(bytes, self.gradient_type, misaligned * 5)).collect();
        kernels.update(Update {
            formula: prepared.formula(step, &mut Vec::new()),
            element_type: self.element_type,
            parameter: parameter.get_mut(),
            states: &mut states.iter_mut().map(GuardedBuffer::get_mut).collect::<Vec<_>>(),
            gradients: &views(&held, self.gradient_type),
        });
        let buffers = || std::iter::once(&parameter).chain(&states);
        buffers().for_each(|buffer| buffer.assert_guards(&case));
        buffers().map(|buffer| buffer.get().to_vec()).collect()
    }

    fn whole_and_cut(&self, kernels: &mut dyn Kernels, rule: (&Prepared, &Step), shape: BufferShape) -> Vec<Vec<u8>> {
        let whole = self.updated(kernels, rule, 0..shape.length, shape.misaligned);
        let cut = shape.length / 3;
        let head = self.updated(kernels, rule, 0..cut, shape.misaligned + 1);
        let tail = self.updated(kernels, rule, cut..shape.length, shape.misaligned + 2);
        for ((whole, head), tail) in whole.iter().zip(&head).zip(tail) {
            let joined = [head.as_slice(), &tail].concat();
            assert_same(self.element_type, whole, &joined, || format!("cut at {cut}: {shape:?} {:?}", rule.0.rule()));
        }
        whole
    }
}

fn check_sum(kernels: &mut dyn Kernels, shape: BufferShape, element_type: ElementType, gradient_type: ElementType) {
    let gradients = gradients(shape, gradient_type);
    let held: Vec<GuardedBuffer> = gradients.iter().map(|bytes| GuardedBuffer::new(bytes, shape.misaligned)).collect();
    let mut expected = vec![0; shape.length * size(element_type)];
    optim::sum(element_type, &mut expected, &views(&held, gradient_type));
    let mut found = GuardedBuffer::new(&expected, (shape.misaligned + 3) % 8);
    found.get_mut().fill(0x11);
    kernels.sum(element_type, found.get_mut(), &views(&held, gradient_type));
    let case = || format!("sum of {gradient_type} as {element_type}: {shape:?}");
    found.assert_guards(&case());
    assert_same(element_type, found.get(), &expected, case);
}

fn check_halves(kernels: &mut dyn Kernels, shape: BufferShape, half: Half) {
    // Values between two half-precision numbers, and values beyond their range.
    let mut value = values(ElementType::Float32, shape.length, shape.seed, 9);
    for (index, value) in value.as_chunks_mut::<4>().0.iter_mut().enumerate().step_by(3) {
        let edges = [65_519.996, 65_520.0, 6.1e-5, 2.980_232_5e-8, 1.000_488_3, 1.003_906_3, 3.395e38, -3.396e38];
        *value = f32::to_le_bytes(edges[(index + shape.length) % edges.len()]);
    }
    let held = GuardedBuffer::new(&value, shape.misaligned);
    let mut expected = vec![0; shape.length * 2];
    narrowing::narrow_to_half(half, &value, &mut expected);
    let mut found = GuardedBuffer::new(&vec![0x11; expected.len()], (shape.misaligned + 3) % 8);
    kernels.narrow_to_half(half, held.get(), found.get_mut());
    let case = || format!("a value as {half}: {shape:?}");
    found.assert_guards(&case());
    assert_same(half.element_type(), found.get(), &expected, case);
}

fn check_exact(
    kernels: &mut dyn Kernels,
    algorithm: &Algorithm,
    shape: BufferShape,
    element_type: ElementType,
    gradient_type: ElementType,
) {
    let rule = Rule { algorithm: algorithm.clone(), ..Rule::default() };
    let step = Step { version: Version(1), scale: 1.0 / 3.0, ..Step::FIRST };
    let (coefficients, prepared) = (rule.coefficients(&step), Prepared::new(rule.clone()).expect("it is a rule"));
    let tensors = ChunkTensors {
        element_type,
        parameter: values(element_type, shape.length, shape.seed ^ 0x77, 0),
        states: Vec::new(),
        gradient_type,
        gradients: gradients(shape, gradient_type),
    };
    let found = tensors.whole_and_cut(kernels, (&prepared, &step), shape);
    let mut expected = tensors.parameter.clone();
    let held: Vec<GuardedBuffer> = tensors.gradients.iter().map(|bytes| GuardedBuffer::new(bytes, 0)).collect();
    let piece = ParameterPiece { element_type, parameter: &mut expected, states: &mut [] };
    optim::update(&rule, &coefficients, piece, &views(&held, gradient_type));
    let case = || format!("{} of {gradient_type} to {element_type}: {shape:?}", algorithm.name());
    assert_same(element_type, &found[0], &expected, case);
}

fn check_update(
    kernels: &mut dyn Kernels,
    shape: BufferShape,
    element_type: ElementType,
    prepared: &Prepared,
    worst: &mut Worst,
) {
    let rule = prepared.rule();
    let tensors = update_tensors(shape, element_type, rule);
    let norm = rule.clip_norm.map(|clip| clip * 1.7);
    let scale = if shape.count == 1 { 1.0 } else { 1.0 / shape.count as f64 };
    let step = Step { version: Version(1 + shape.seed), norm, scale, ..Step::FIRST };
    let coefficients = rule.coefficients(&step);
    let found = tensors.whole_and_cut(kernels, (prepared, &step), shape);
    let plain = tensors.updated(&mut Plain, (prepared, &step), 0..shape.length, 0);
    for (found, plain) in found.iter().zip(&plain) {
        assert_same(element_type, found, plain, || format!("{shape:?} {rule:?}"));
    }

    let held: Vec<GuardedBuffer> = tensors.gradients.iter().map(|bytes| GuardedBuffer::new(bytes, 0)).collect();
    let mut sum = vec![0; tensors.parameter.len()];
    optim::sum(element_type, &mut sum, &views(&held, tensors.gradient_type));
    let sum = floats(element_type, &sum);
    let inputs: Vec<Vec<f64>> = std::iter::once(&tensors.parameter)
        .chain(&tensors.states)
        .map(|bytes| floats(element_type, bytes))
        .chain([sum])
        .collect();
    let found: Vec<Vec<f64>> = found.iter().map(|bytes| floats(element_type, bytes)).collect();
    compare(rule, &coefficients, element_type, &inputs, &found, worst, shape);
}

fn update_tensors(shape: BufferShape, element_type: ElementType, rule: &Rule) -> ChunkTensors {
    let gradient_types = [element_type, ElementType::Float16, ElementType::Bfloat16];
    let gradient_type = gradient_types[usize::try_from(shape.seed % 3).expect("it is below three")];
    // Squares are not negative; a state that is no square may be.
    let states = rule.states().into_iter().enumerate().map(|(state, name)| {
        let bytes = values(element_type, shape.length, shape.seed + 31 * state as u64, 5);
        if name.contains("square") || name == "second_moment" { absolute(element_type, &bytes) } else { bytes }
    });
    ChunkTensors {
        element_type,
        parameter: values(element_type, shape.length, shape.seed ^ 0x55, 3),
        states: states.collect(),
        gradient_type,
        gradients: gradients(shape, gradient_type),
    }
}

/// Compares with the oracle in binary64. `inputs` are the weights, the states and the sum.
fn compare(
    rule: &Rule,
    coefficients: &Coefficients,
    element_type: ElementType,
    inputs: &[Vec<f64>],
    found: &[Vec<f64>],
    worst: &mut Worst,
    shape: BufferShape,
) {
    let expected = oracle(rule, coefficients, inputs);
    let neighbours = neighbours(rule, coefficients, element_type, inputs);
    let is_ftrl = matches!(rule.algorithm, Algorithm::Ftrl { .. });
    for index in (0..shape.length).filter(|&index| !is_ftrl || inputs[0][index].is_finite()) {
        let largest = largest(element_type);
        // A state is computed from those before it, and the weight from all of them.
        let overflowed = (1..expected.len()).find(|&state| {
            let value = expected[state][index];
            value.is_finite() && largest < value.abs()
        });
        let compared = overflowed.map_or(0..expected.len(), |state| 1..state + 1);
        for tensor in compared {
            let (answer, found) = (expected[tensor][index], found[tensor][index]);
            let reach: f64 = neighbours.iter().map(|moved| (moved[tensor][index] - answer).abs()).sum();
            let unit = reach + ulp(element_type, answer) + ulp(element_type, inputs[tensor][index]);
            let ulps = distance(answer, found, unit, largest);
            if worst.ulps < ulps {
                let had: Vec<f64> = inputs.iter().map(|input| input[index]).collect();
                let case = format!(
                    "{element_type} {rule:?}: tensor {tensor} at {index} is {found:e}, expected {answer:e}; \
                     from weight, states, sum {had:?}; {shape:?}"
                );
                *worst = Worst { ulps, case };
            }
        }
    }
}

/// The oracle's answers when one of the inputs is an ulp larger or smaller.
fn neighbours(
    rule: &Rule,
    coefficients: &Coefficients,
    element_type: ElementType,
    inputs: &[Vec<f64>],
) -> Vec<Vec<Vec<f64>>> {
    (0..inputs.len() * 2)
        .map(|which| {
            let mut moved = inputs.to_vec();
            let up = if which % 2 == 0 { 1.0 } else { -1.0 };
            // A weight of zero stays: the sign of zero is exact, and a step away from it would excuse anything.
            let is_weight = which / 2 == 0;
            for (index, value) in moved[which / 2].iter_mut().enumerate() {
                let inexact = if which / 2 == 2 { ftrl_inexact(rule, coefficients, inputs, index) } else { 0.0 };
                let stays = is_weight && *value == 0.0;
                *value += up * if stays { 0.0 } else { ulp(element_type, *value) + inexact };
            }
            oracle(rule, coefficients, &moved)
        })
        .collect()
}

/// From the oracle's `answer` in units; infinite when only one of the two is infinite or not a number. A finite answer
/// that is too large for the type is judged where its neighbours are numbers: of those of a square that is zero, one is
/// not.
fn distance(answer: f64, found: f64, unit: f64, largest: f64) -> f64 {
    if largest < answer.abs() && (unit.is_finite() || answer.is_infinite()) {
        if found == answer.signum() * f64::INFINITY { 0.0 } else { f64::INFINITY }
    } else if answer.is_nan() {
        if found.is_nan() { 0.0 } else { f64::INFINITY }
    } else if unit.is_finite() {
        let distance = (found - answer).abs() / unit;
        if distance.is_nan() { f64::INFINITY } else { distance }
    } else {
        0.0
    }
}

/// The error of FTRL's `linear` from an ulp of a power. The powers nearly cancel and are divided by the rate, so that
/// two good libraries (a root, a power) differ by more than the inputs' ulps explain; zero for every other rule.
fn ftrl_inexact(rule: &Rule, coefficients: &Coefficients, inputs: &[Vec<f64>], index: usize) -> f64 {
    let (Algorithm::Ftrl { .. }, [weights, square_sums, _, sums]) = (&rule.algorithm, inputs) else {
        return 0.0;
    };
    let bound = coefficients.gradient_bound;
    let gradient = (sums[index] * coefficients.gradient_scale).clamp(-bound, bound);
    let power = (square_sums[index] + gradient * gradient).powf(coefficients.ftrl.power);
    let weight =
        weights[index].abs() * (1.0 + coefficients.regularization.decay_l2) + coefficients.regularization.decay_l1;
    let moved = ulp(ElementType::Float64, power) * weight * coefficients.ftrl.inverse_rate;
    if moved.is_finite() { moved } else { 0.0 }
}

/// The plain form in binary64 throughout: weights and states after the update, unrounded.
fn oracle(rule: &Rule, coefficients: &Coefficients, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut bytes: Vec<Vec<u8>> = inputs.iter().map(|input| bytes_of(input)).collect();
    let (sum, tensors) = bytes.split_last_mut().expect("the last input is the sum");
    let (weights, states) = tensors.split_first_mut().expect("the first input is the weights");
    let gradients = [Gradient { bytes: sum, element_type: ElementType::Float64 }];
    let mut states: Vec<&mut [u8]> = states.iter_mut().map(Vec::as_mut_slice).collect();
    let piece = ParameterPiece { element_type: ElementType::Float64, parameter: weights, states: &mut states };
    optim::update(rule, coefficients, piece, &gradients);
    bytes[..inputs.len() - 1].iter().map(|tensor| floats(ElementType::Float64, tensor)).collect()
}

/// A rule that is only a text.
const LION: &str = "state m = 0; w -= lr*(sign(0.9*m + 0.1*g) + 0.5*w); m = 0.99*m + 0.01*g";

/// The rules of the suite: every algorithm alone, with every regularizer and with every clip. Code that is generated
/// ahead of time is generated for these.
#[must_use]
pub fn rules() -> Vec<Rule> {
    let schedule = Schedule::Const { rate: 0.01 };
    let mut rules: Vec<Rule> =
        algorithms().map(|algorithm| Rule { algorithm, schedule: schedule.clone(), ..Rule::default() }).to_vec();
    for bare in rules.clone() {
        for regularizer in [Regularizer::Proximal, Regularizer::Coupled, Regularizer::Decoupled] {
            for (l1, l2) in [(0.125, 0.25), (0.125, 0.0), (0.0, 0.25)] {
                rules.push(Rule { l1, l2, regularizer, ..bare.clone() });
            }
        }
        rules.push(Rule { clip_value: Some(0.75), ..bare.clone() });
        rules.push(Rule { clip_norm: Some(0.5), clip_value: Some(0.25), l1: 0.125, ..bare });
    }
    rules
}

fn algorithms() -> [Algorithm; 12] {
    let lion = CheckedRule::new(LION, &RuleSettings::new()).expect("it is a rule");
    [
        Algorithm::Sgd,
        Algorithm::Momentum { momentum: 0.9, nesterov: false },
        Algorithm::Momentum { momentum: 0.9, nesterov: true },
        Algorithm::Adagrad { epsilon: 1e-6 },
        Algorithm::Adadelta { rho: 0.95, epsilon: 1e-6 },
        Algorithm::RmsProp { rho: 0.9, epsilon: 1e-8, momentum: 0.0 },
        Algorithm::RmsProp { rho: 0.9, epsilon: 1e-8, momentum: 0.5 },
        Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
        Algorithm::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-60 },
        Algorithm::Ftrl { learning_rate_power: -0.5, beta: 1.0 },
        Algorithm::Ftrl { learning_rate_power: -0.3, beta: 0.0 },
        Algorithm::Custom(Arc::new(lion)),
    ]
}

fn views(held: &[GuardedBuffer], element_type: ElementType) -> Vec<Gradient<'_>> {
    held.iter().map(|buffer| Gradient { bytes: buffer.get(), element_type }).collect()
}

fn gradients(shape: BufferShape, element_type: ElementType) -> Vec<Vec<u8>> {
    (0..shape.count).map(|trainer| values(element_type, shape.length, shape.seed * 17 + trainer as u64, 1)).collect()
}

/// Values of every kind, in an order that depends on the seed: mostly common ones, then tiny, huge (whose squares leave
/// binary32), denormal, negative zero, infinite and NaN. Equal seeds and strides give equal values.
#[must_use]
pub fn values(element_type: ElementType, length: usize, seed: u64, stride: u64) -> Vec<u8> {
    let kinds: [f64; 9] = [0.0, -0.0, 1e-30, -1e-42, 1e-44, 3e25, -2e30, f64::INFINITY, f64::NAN];
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (stride << 32) ^ 0x1234_5678;
    let mut bytes = Vec::with_capacity(length * size(element_type));
    for _ in 0..length {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let bits = random ^ (random >> 29);
        let kind = usize::try_from(bits % 64).expect("it is below 64");
        let fraction = (bits >> 11) as f64 / (1_u64 << 53) as f64;
        let value = kinds.get(kind).copied().unwrap_or((fraction - 0.5) * 4.0);
        push(&mut bytes, element_type, value, bits);
    }
    bytes
}

#[expect(clippy::cast_possible_truncation, reason = "rounding and cutting make the inputs")]
fn push(bytes: &mut Vec<u8>, element_type: ElementType, value: f64, bits: u64) {
    match element_type {
        ElementType::Int32 | ElementType::Uint32 => bytes.extend((bits as u32).to_le_bytes()),
        ElementType::Int64 | ElementType::Uint64 => bytes.extend(bits.to_le_bytes()),
        ElementType::Float32 => bytes.extend((value as f32).to_le_bytes()),
        ElementType::Float64 => bytes.extend(value.to_le_bytes()),
        ElementType::Float16 | ElementType::Bfloat16 => bytes.extend(narrowing::half_bytes(value, element_type)),
    }
}

fn size(element_type: ElementType) -> usize {
    usize::try_from(element_type.bytes()).expect("it is at most eight")
}

/// The same floats without their signs.
fn absolute(element_type: ElementType, bytes: &[u8]) -> Vec<u8> {
    let mut positive = Vec::with_capacity(bytes.len());
    floats(element_type, bytes).iter().for_each(|value| push(&mut positive, element_type, value.abs(), 0));
    positive
}

fn floats(element_type: ElementType, bytes: &[u8]) -> Vec<f64> {
    match element_type {
        ElementType::Float32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect(),
        ElementType::Float16 => bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f64()).collect(),
        ElementType::Bfloat16 => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f64()).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
    }
}

fn bytes_of(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The distance to the next larger magnitude in the type; zero for infinities and NaN.
#[expect(clippy::cast_possible_truncation, reason = "the type is binary32")]
fn ulp(element_type: ElementType, value: f64) -> f64 {
    if !value.is_finite() {
        return 0.0;
    }
    match element_type {
        ElementType::Float32 => {
            let magnitude = (value.abs() as f32).min(f32::MAX.next_down());
            f64::from(magnitude.next_up()) - f64::from(magnitude)
        }
        _ => value.abs().next_up() - value.abs(),
    }
}

fn largest(element_type: ElementType) -> f64 {
    if element_type == ElementType::Float32 { f32::MAX.into() } else { f64::MAX }
}

fn assert_same(element_type: ElementType, found: &[u8], expected: &[u8], case: impl Fn() -> String) {
    let size = size(element_type);
    for (index, (found, expected)) in found.chunks(size).zip(expected.chunks(size)).enumerate() {
        let both_nan =
            element_type.is_float() && [found, expected].iter().all(|bytes| floats(element_type, bytes)[0].is_nan());
        assert!(found == expected || both_nan, "{}: element {index} is {found:?}, expected {expected:?}", case());
    }
}

#[cfg(test)]
mod tests {
    use pserver_core::port::{Kernels, Plain};

    use super::{TOLERANCE_ULPS, check, worst};
    use crate::FaultyKernels;
    use crate::cpu::{Cpu, Form};

    fn measure(kernels: &mut dyn Kernels) {
        let worst = worst(kernels);
        println!("{}: {worst:?}", kernels.name());
        assert!(worst.ulps <= TOLERANCE_ULPS, "{worst:?}");
    }

    /// A machine without these instructions runs the tiles once more.
    #[test]
    fn rules_as_tiles_pass_the_conformance_suite() {
        measure(&mut Cpu::with(Form::Tiles));
    }

    #[test]
    fn generated_avx2_code_passes_the_conformance_suite() {
        measure(&mut Cpu::with(Form::Avx2));
    }

    #[test]
    fn generated_avx512_code_passes_the_conformance_suite() {
        measure(&mut Cpu::with(Form::Avx512));
    }

    #[test]
    fn the_code_of_every_rule_equals_the_oracle() {
        measure(&mut Plain);
    }

    #[test]
    #[should_panic(expected = "expected")]
    fn one_wrong_bit_in_every_update_is_noticed() {
        check(&mut FaultyKernels::new(Cpu::new(), 1));
    }

    #[test]
    #[should_panic(expected = "expected")]
    fn one_wrong_bit_in_many_updates_is_noticed() {
        check(&mut FaultyKernels::new(Cpu::new(), 997));
    }
}

use std::collections::BTreeMap;
mod settings;
mod stages;

use std::sync::Arc;

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::dtype::ElementType;
use crate::ids::Version;
use crate::limits::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN};
use crate::port::{Kernels, Plain, Update};
use crate::rule::reference::ParameterPiece;
use crate::rule::{CheckedRule, UpdateInputs};

const ADAM: Algorithm = Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
const ADAMW: Algorithm = Algorithm::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
const ADAGRAD: Algorithm = Algorithm::Adagrad { epsilon: 1e-5 };
const ADADELTA: Algorithm = Algorithm::Adadelta { rho: 0.9, epsilon: 1e-5 };
const RMSPROP: Algorithm = Algorithm::RmsProp { rho: 0.9, epsilon: 0.6, momentum: 0.0 };
const RMSPROP_MOMENTUM: Algorithm = Algorithm::RmsProp { rho: 0.9, epsilon: 0.6, momentum: 0.5 };
const MOMENTUM: Algorithm = Algorithm::Momentum { momentum: 0.9, nesterov: false };
const NESTEROV: Algorithm = Algorithm::Momentum { momentum: 0.9, nesterov: true };
const FTRL: Algorithm = Algorithm::Ftrl { learning_rate_power: -0.5, beta: 1.0 };
const FTRL_BARE: Algorithm = Algorithm::Ftrl { learning_rate_power: -0.5, beta: 0.0 };

/// Every algorithm that takes a learning rate.
const OPTIMIZERS: [Algorithm; 11] =
    [Algorithm::Sgd, MOMENTUM, NESTEROV, ADAGRAD, ADADELTA, RMSPROP, RMSPROP_MOMENTUM, ADAM, ADAMW, FTRL, FTRL_BARE];

/// How far a hand-derived value may be from the plain form in f32: three roundings of half a unit in 2^24 while
/// storing, on values of at most one binade above the expected one.
const F32_TOLERANCE: f64 = 4e-7;
/// The hand-derived values are written with twelve digits.
const F64_TOLERANCE: f64 = 1e-11;

fn rule(algorithm: Algorithm, rate: f64) -> Rule {
    Rule { algorithm, schedule: Schedule::Const { rate }, ..Rule::default() }
}

#[expect(clippy::cast_possible_truncation, reason = "a test's values are written with more digits than binary32 has")]
fn to_bytes(element_type: ElementType, values: &[f64]) -> Vec<u8> {
    let widths = values.iter().map(|value| match element_type {
        ElementType::Float32 => (*value as f32).to_le_bytes().to_vec(),
        ElementType::Float64 => value.to_le_bytes().to_vec(),
        ElementType::Float16 => f16::from_f64(*value).to_le_bytes().to_vec(),
        ElementType::Bfloat16 => bf16::from_f64(*value).to_le_bytes().to_vec(),
        other => panic!("{other} is not a float"),
    });
    widths.flatten().collect()
}

fn to_values(element_type: ElementType, bytes: &[u8]) -> Vec<f64> {
    match element_type {
        ElementType::Float32 => {
            bytes.chunks_exact(4).map(|e| f32::from_le_bytes(e.try_into().unwrap()).into()).collect()
        }
        ElementType::Float64 => bytes.chunks_exact(8).map(|e| f64::from_le_bytes(e.try_into().unwrap())).collect(),
        other => panic!("{other} is not a parameter of floats"),
    }
}

/// A parameter and its states, at addresses that are not aligned.
struct Piece {
    element_type: ElementType,
    parameter: Vec<u8>,
    states: Vec<Vec<u8>>,
}

impl Piece {
    fn new(rule: &Rule, element_type: ElementType, weights: &[f64]) -> Self {
        let mut parameter = vec![0xff];
        parameter.extend(to_bytes(element_type, weights));
        let states = vec![vec![0; parameter.len()]; rule.states().len()];
        Self { element_type, parameter, states }
    }

    fn update(&mut self, rule: &Rule, step: &Step, gradients: &[Gradient<'_>]) {
        let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(|state| &mut state[1..]).collect();
        let coefficients = rule.coefficients(step);
        let parameter = &mut self.parameter[1..];
        let piece = ParameterPiece { element_type: self.element_type, parameter, states: &mut states };
        update(rule, &coefficients, piece, gradients);
    }

    fn weights(&self) -> Vec<f64> {
        to_values(self.element_type, &self.parameter[1..])
    }
}

/// The weights after one update per gradient, starting from states of zero.
fn run(rule: &Rule, element_type: ElementType, weights: &[f64], gradients: &[&[f64]]) -> Vec<f64> {
    let mut piece = Piece::new(rule, element_type, weights);
    for (index, gradient) in gradients.iter().enumerate() {
        let bytes = to_bytes(element_type, gradient);
        let norm = square_sum(element_type, &bytes).sqrt();
        let step = Step { version: Version(index as u64 + 1), norm: Some(norm), ..Step::FIRST };
        piece.update(rule, &step, &[Gradient { bytes: &bytes, element_type }]);
    }
    piece.weights()
}

fn assert_close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let close = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(close, "{what}: found {found}, expected {expected}");
    }
}

/// One weight, one gradient per update, in both types.
fn check(rule: &Rule, weight: f64, gradients: &[f64], expected: f64) {
    let steps: Vec<&[f64]> = gradients.iter().map(std::slice::from_ref).collect();
    for (element_type, tolerance) in [(ElementType::Float32, F32_TOLERANCE), (ElementType::Float64, F64_TOLERANCE)] {
        let found = run(rule, element_type, &[weight], &steps);
        assert_close(&found, &[expected], tolerance, &format!("{rule:?} on {element_type}"));
    }
}

#[test]
fn a_rule_counts_its_updates_only_if_its_code_reads_the_count() {
    let check = |algorithm: Algorithm, expected: bool| {
        let rule = Prepared::new(Rule { algorithm, ..Rule::default() }).expect("it is a rule");
        assert_eq!(rule.counts(), expected, "{:?}", rule.rule().algorithm);
    };
    let written = |text: &str| Algorithm::Custom(Arc::new(CheckedRule::new(text, &BTreeMap::new()).expect("a rule")));
    for algorithm in OPTIMIZERS {
        let counts = matches!(algorithm, Algorithm::Adam { .. } | Algorithm::AdamW { .. });
        check(algorithm, counts);
    }
    check(Algorithm::Sum, false);
    check(written("w -= lr * g"), false);
    check(written("w -= lr * g / n"), true);
}

#[test]
fn cached_numbers_equal_those_of_a_formula_computed_anew() {
    let clipped = Rule { clip_norm: Some(2.0), ..rule(Algorithm::Sgd, 0.5) };
    let algorithms = [ADAM, MOMENTUM, Algorithm::Sum].map(|algorithm| rule(algorithm, 0.1));
    let rules = algorithms.into_iter().chain([clipped]);
    let rules: Vec<_> = rules.map(|rule| Arc::new(Prepared::new(rule).expect("it is a rule"))).collect();
    let bits = |formula: Formula<'_>| match formula {
        Formula::Rule { scalars, .. } => scalars.iter().map(|scalar| scalar.to_bits()).collect(),
        Formula::Add { scale } | Formula::Sum { scale } => vec![scale.to_bits()],
    };
    let mut numbers = Numbers::default();
    for version in [1, 1, 2] {
        for rate in [None, Some(0.0), Some(-0.0), Some(0.25)] {
            for (norm, scale) in [(1.0, 1.0), (4.0, 1.0), (4.0, 1.0), (4.0, -1.0), (f64::NAN, 0.5)] {
                for rule in rules.iter().chain(&rules[..1]) {
                    let step = Step { version: Version(version), rate, norm: Some(norm), scale, ..Step::FIRST };
                    let expected = bits(rule.formula(&step, &mut Vec::new()));
                    assert_eq!(bits(numbers.formula(rule, &step, &[])), expected, "{:?} at {step:?}", rule.rule());
                    assert_eq!(bits(numbers.formula(rule, &step, &[])), expected, "the same once more");
                }
            }
        }
    }
}

/// `w = g = [0, 1, 2, 3, 4]`, the same gradient every time, against the vectors recomputed from Paddle's formulas with
/// scalars in binary64 and storage in binary32. The last bits differ where Paddle reads a momentum back that it has
/// just rounded and the plain form does not.
#[test]
fn the_golden_vectors_hold() {
    let check = |rule: &Rule, steps: usize, expected: [f64; 5]| {
        let values = [0.0, 1.0, 2.0, 3.0, 4.0];
        for element_type in [ElementType::Float32, ElementType::Float64] {
            let found = run(rule, element_type, &values, &vec![&values[..]; steps]);
            assert_close(&found, &expected, F32_TOLERANCE, &format!("{rule:?} on {element_type}"));
        }
    };
    let decay = Rule { l2: 0.01, regularizer: Regularizer::Decoupled, ..rule(Algorithm::Sgd, 0.1) };
    check(&rule(Algorithm::Sgd, 0.1), 1, [0.0, 0.899999976, 1.79999995, 2.70000005, 3.5999999]);
    check(&rule(Algorithm::Sgd, 0.1), 3, [0.0, 0.699999928, 1.39999986, 2.10000014, 2.79999971]);
    check(&rule(MOMENTUM, 0.1), 3, [0.0, 0.438999981, 0.877999961, 1.31700015, 1.75599992]);
    check(&rule(NESTEROV, 0.1), 3, [0.0, 0.195100039, 0.390200078, 0.585300088, 0.780400157]);
    check(&decay, 3, [0.0, 0.697302938, 1.39460588, 2.09190869, 2.78921175]);
    // Descent: as Paddle wrote it, the weights grew to 1.228, 2.228, ...
    check(&rule(ADAGRAD, 0.1), 3, [0.0, 0.771555126, 1.77155447, 2.77155447, 3.77155447]);
    check(&rule(ADADELTA, 1.0), 3, [0.0, 0.969303668, 1.96930254, 2.96930242, 3.96930218]);
}

/// The two Adam vectors of the same table change, because epsilon is outside the root (they were .900055528 .. and
/// .700000942 ..). With a constant gradient the corrected moments are exactly `g` and `g^2`, so `n` updates subtract `n
/// r g / (|g| + epsilon)`, whatever the betas.
#[test]
fn adam_has_its_epsilon_outside_the_root() {
    let check_adam = |beta1: f64, beta2: f64, epsilon: f64, steps: i32| {
        let rule = rule(Algorithm::Adam { beta1, beta2, epsilon }, 0.1);
        for gradient in [-3.0, 0.0, 1e-3, 1.0, 2.0, 3.0, 4.0] {
            let expected = 1.0 - f64::from(steps) * 0.1 * gradient / (gradient.abs() + epsilon);
            check(&rule, 1.0, &vec![gradient; steps.try_into().unwrap()], expected);
        }
    };
    check_adam(0.9, 0.1, 1e-3, 1);
    check_adam(0.9, 0.999, 1e-8, 3);
    check_adam(0.0, 0.0, 1e-2, 3);
    // m = .09 - .1, corrected by .19; v = .001999, corrected by itself.
    check(&rule(ADAM, 0.1), 1.0, &[1.0, -1.0], 1.0 - 0.1 / (1.0 + 1e-8) + 0.1 * (0.01 / 0.19) / (1.0 + 1e-8));
}

#[test]
fn adamw_decay_is_decoupled_under_every_regularizer() {
    for regularizer in [Regularizer::Proximal, Regularizer::Coupled, Regularizer::Decoupled] {
        let decayed = Rule { l2: 0.5, regularizer, ..rule(ADAMW, 0.1) };
        check(&decayed, 2.0, &[1.0], 2.0 - 0.1 * 0.5 * 2.0 - 0.1 / (1.0 + 1e-8));
        check(&Rule { l1: 0.5, l2: 0.0, ..decayed }, -2.0, &[1.0], -2.0 + 0.1 * 0.5 - 0.1 / (1.0 + 1e-8));
    }
}

#[test]
fn rmsprop_divides_by_the_root_of_the_mean_square() {
    // .1 * 4 + .6 = 1 under the root, then .36 + .1 + .6 = 1.06.
    check(&rule(RMSPROP, 0.1), 1.0, &[2.0], 0.8);
    check(&rule(RMSPROP, 0.1), 1.0, &[2.0, 1.0], 0.8 - 0.1 / 1.06_f64.sqrt());
    check(&rule(RMSPROP_MOMENTUM, 0.1), 1.0, &[2.0, 1.0], 0.8 - 0.1 - 0.1 / 1.06_f64.sqrt());
}

#[test]
fn ftrl_follows_its_closed_form() {
    let regularized = Rule { l1: 0.5, l2: 0.25, ..rule(FTRL, 0.5) };
    // square_sum 4, linear 2: -(2 - .5) / ((1 + 2) / .5 + .25).
    check(&regularized, 0.0, &[2.0], -0.24);
    // square_sum 5, linear 2 - 1 + .24 (sqrt 5 - 2) / .5.
    let linear = 1.0 + 0.24 * (5.0_f64.sqrt() - 2.0) / 0.5;
    check(&regularized, 0.0, &[2.0, -1.0], -(linear - 0.5) / ((1.0 + 5.0_f64.sqrt()) / 0.5 + 0.25));
    check(&regularized, 0.0, &[0.3], 0.0);
    // Without beta, l1 and l2 the first step is one of a length of the learning rate.
    check(&rule(FTRL_BARE, 0.5), 3.0, &[-7.0], 3.5);
    // A power of one: square_sum 4, linear 2 - 4 / .5 * 1.
    let linear_power = Algorithm::Ftrl { learning_rate_power: -1.0, beta: 0.0 };
    check(&rule(linear_power, 0.5), 1.0, &[2.0], 6.0 / 8.0);
    // An element without a gradient so far, and a rate of zero, keep the value.
    check(&regularized, 3.0, &[0.0], 3.0);
    check(&rule(FTRL_BARE, 0.5), 3.0, &[0.0], 3.0);
    check(&rule(FTRL, 0.0), 3.0, &[1.0], 3.0);
    // So does a rate whose inverse overflows binary32, or by which a moderate value can be divided in binary64 only.
    for rate in [1e-31, 1e-38, 2.5e-39, 1e-40, 1e-45, 5e-324] {
        check(&rule(FTRL, rate), 3.0, &[1.0, -2.0], 3.0);
        check(&rule(FTRL_BARE, rate), 0.0, &[100.0], 0.0);
    }
}

#[test]
fn l1_and_l2_enter_where_the_regularizer_says() {
    let regularized =
        |algorithm: Algorithm, regularizer| Rule { l1: 2.0, l2: 2.5, regularizer, ..rule(algorithm, 0.1) };
    // A gradient of 1 moves .1; the threshold is .2 and the shrink 1 / 1.25.
    let proximal = regularized(Algorithm::Sgd, Regularizer::Proximal);
    check(&proximal, 1.0, &[1.0], 0.56);
    check(&proximal, -1.0, &[-1.0], -0.56);
    check(&proximal, 0.25, &[1.0], 0.0);
    check(&proximal, -0.05, &[0.0], 0.0);
    // Adagrad's first step has the size of the learning rate whatever the gradient, so it tells the kinds apart.
    let adagrad = Algorithm::Adagrad { epsilon: 1e-30 };
    check(&regularized(adagrad.clone(), Regularizer::Coupled), 1.0, &[1.0], 0.9);
    check(&regularized(adagrad.clone(), Regularizer::Coupled), -1.0, &[1.0], -0.9);
    check(&regularized(adagrad.clone(), Regularizer::Decoupled), 1.0, &[1.0], 0.9 - 0.1 * 4.5);
    check(&regularized(adagrad, Regularizer::Proximal), 1.0, &[1.0], (0.9 - 0.2) / 1.25);
    check(&regularized(Algorithm::Sgd, Regularizer::Coupled), 1.0, &[1.0], 1.0 - 0.1 * 5.5);
    check(&regularized(Algorithm::Sgd, Regularizer::Decoupled), 0.0, &[0.0], 0.0);
}

#[test]
fn the_rate_is_that_of_the_schedule_or_of_the_step_times_rate_scale() {
    let rule = Rule { rate_scale: 0.5, schedule: Schedule::Linear { rate: 1.0, a: 0.1, b: 0.0 }, ..Rule::default() };
    let step = Step { version: Version(3), ..Step::FIRST };
    assert_eq!(rule.coefficients(&step).rate, 0.5 * (1.0 - 0.1 * 3.0));
    assert_eq!(rule.coefficients(&Step { rate: Some(8.0), ..step }).rate, 4.0);
}

#[test]
fn a_schedule_gives_the_rate_of_its_formula() {
    let check = |schedule: Schedule, rates: [(u64, f64); 3]| {
        for (n, expected) in rates {
            assert_close(&[schedule.rate(n)], &[expected], 1e-15, &format!("{schedule:?} at {n}"));
        }
    };
    check(Schedule::Const { rate: 0.3 }, [(1, 0.3), (2, 0.3), (u64::MAX, 0.3)]);
    check(Schedule::Linear { rate: 1.0, a: 0.25, b: 0.1 }, [(1, 0.75), (3, 0.25), (4, 0.1)]);
    check(Schedule::Poly { rate: 2.0, a: 3.0, b: 0.5 }, [(0, 2.0), (1, 1.0), (5, 0.5)]);
    check(Schedule::Exp { rate: 1.0, a: 0.25, b: 4.0 }, [(2, 0.5), (4, 0.25), (6, 0.125)]);
    check(Schedule::DiscExp { rate: 1.0, a: 0.25, b: 4.0 }, [(3, 1.0), (4, 0.25), (7, 0.25)]);
}

#[test]
fn clipping_bounds_the_merged_gradient() {
    let check = |rule: Rule, scale: f64, norm: Option<f64>, gradients: &[&[f64]], expected: &[f64]| {
        let element_type = ElementType::Float64;
        let bytes: Vec<Vec<u8>> = gradients.iter().map(|gradient| to_bytes(element_type, gradient)).collect();
        let gradients: Vec<_> = bytes.iter().map(|bytes| Gradient { bytes, element_type }).collect();
        let mut piece = Piece::new(&rule, element_type, &vec![0.0; expected.len()]);
        piece.update(&rule, &Step { version: Version(1), norm, scale, ..Step::FIRST }, &gradients);
        assert_close(&piece.weights(), expected, 1e-15, &format!("{rule:?} {scale} {norm:?}"));
    };
    let by_value = Rule { clip_value: Some(1.0), ..Rule::default() };
    let by_norm = Rule { clip_norm: Some(1.0), ..Rule::default() };
    let by_both = Rule { clip_value: Some(0.7), ..by_norm.clone() };
    check(by_value.clone(), 1.0, None, &[&[-3.0, 0.5, 3.0]], &[1.0, -0.5, -1.0]);
    check(by_value, 0.5, None, &[&[-3.0, 0.5, 3.0], &[1.5, 0.5, 3.0]], &[0.75, -0.5, -1.0]);
    check(by_norm.clone(), 1.0, Some(5.0), &[&[3.0, 4.0]], &[-0.6, -0.8]);
    check(by_norm.clone(), 0.5, Some(2.5), &[&[3.0, 4.0]], &[-0.6, -0.8]);
    check(by_norm.clone(), 0.25, Some(1.25), &[&[3.0, 4.0]], &[-0.6, -0.8]);
    check(by_norm.clone(), 0.1, Some(0.5), &[&[3.0, 4.0]], &[-0.3, -0.4]);
    check(by_norm, 1.0, Some(f64::NAN), &[&[3.0, 4.0]], &[-3.0, -4.0]);
    check(by_both, 1.0, Some(5.0), &[&[3.0, 4.0]], &[-0.6, -0.7]);
}

#[test]
#[should_panic(expected = "clip_norm needs the gradient's norm")]
fn clipping_by_norm_without_a_norm_is_a_bug() {
    let step = Step { version: Version(1), ..Step::FIRST };
    let _ = Rule { clip_norm: Some(1.0), ..Rule::default() }.coefficients(&step);
}

#[test]
fn the_sum_is_in_trainer_order_and_in_the_parameters_type() {
    let check = |element_type: ElementType, terms: [f64; 3], expected: f64| {
        let bytes = terms.map(|term| to_bytes(element_type, &[term]));
        let gradients: Vec<_> = bytes.iter().map(|bytes| Gradient { bytes, element_type }).collect();
        let mut into = to_bytes(element_type, &[7.0]);
        sum(element_type, &mut into, &gradients);
        assert_eq!(to_values(element_type, &into)[0].to_bits(), expected.to_bits(), "{terms:?}");
        let mut piece = Piece::new(&rule(Algorithm::Sgd, 1.0), element_type, &[0.0]);
        let step = Step { version: Version(1), ..Step::FIRST };
        piece.update(&rule(Algorithm::Sgd, 1.0), &step, &gradients);
        assert_eq!(piece.weights(), [-expected], "an update sums as sum does: {terms:?}");
    };
    check(ElementType::Float32, [1e8, 1.0, -1e8], 0.0);
    check(ElementType::Float32, [1e8, -1e8, 1.0], 1.0);
    check(ElementType::Float64, [1e8, 1.0, -1e8], 1.0);
    check(ElementType::Float64, [1e16, 1.0, -1e16], 0.0);
    check(ElementType::Float32, [-0.0, -0.0, -0.0], -0.0);
}

#[test]
fn no_gradients_sum_to_zero() {
    let mut into = to_bytes(ElementType::Float32, &[7.0, 8.0]);
    sum(ElementType::Float32, &mut into, &[]);
    assert_eq!(into, [0; 8]);
}

#[test]
fn halves_are_widened_before_they_are_summed() {
    // Half a unit in the last place of 1, which a sum in the half itself would lose, and the smallest number.
    let halves = [
        (ElementType::Float16, 2.0_f64.powi(-11), 2.0_f64.powi(-24)),
        (ElementType::Bfloat16, 2.0_f64.powi(-8), 2.0_f64.powi(-133)),
    ];
    for (half, unit, smallest) in halves {
        for element_type in [ElementType::Float32, ElementType::Float64] {
            let values = [[1.0, smallest, -2.0, f64::INFINITY], [unit, 0.0, 0.5, 1.0], [unit, 0.0, -0.0, 1.0]];
            let bytes = values.map(|values| to_bytes(half, &values));
            let gradients: Vec<_> = bytes.iter().map(|bytes| Gradient { bytes, element_type: half }).collect();
            let mut into = to_bytes(element_type, &[7.0; 4]);
            sum(element_type, &mut into, &gradients);
            let expected = [1.0 + 2.0 * unit, smallest, -1.5, f64::INFINITY];
            assert_eq!(to_values(element_type, &into), expected, "{half} for {element_type}");
        }
    }
}

#[test]
fn integers_are_added_exactly_and_wrap() {
    fn check<const BYTES: usize>(
        element_type: ElementType,
        start: [u8; BYTES],
        terms: &[[u8; BYTES]],
        expected: [u8; BYTES],
    ) {
        let add = rule(Algorithm::Add, 1.0);
        let gradients: Vec<_> = terms.iter().map(|bytes| Gradient { bytes, element_type }).collect();
        // The scale of a mean does not reach integers.
        let coefficients = add.coefficients(&Step { version: Version(1), scale: 0.5, ..Step::FIRST });
        let mut parameter = start;
        let piece = ParameterPiece { element_type, parameter: &mut parameter, states: &mut [] };
        update(&add, &coefficients, piece, &gradients);
        assert_eq!(parameter, expected, "{element_type}");
    }
    let large = (1_u64 << 53) + 1;
    check(
        ElementType::Int32,
        5_i32.to_le_bytes(),
        &[(-7_i32).to_le_bytes(), 1_i32.to_le_bytes()],
        (-1_i32).to_le_bytes(),
    );
    check(ElementType::Int32, i32::MAX.to_le_bytes(), &[1_i32.to_le_bytes()], i32::MIN.to_le_bytes());
    check(ElementType::Uint32, u32::MAX.to_le_bytes(), &[2_u32.to_le_bytes()], 1_u32.to_le_bytes());
    check(
        ElementType::Int64,
        0_i64.to_le_bytes(),
        &[i64::MIN.to_le_bytes(), (-1_i64).to_le_bytes()],
        i64::MAX.to_le_bytes(),
    );
    check(
        ElementType::Uint64,
        large.to_le_bytes(),
        &[large.to_le_bytes(), 1_u64.to_le_bytes()],
        (2 * large + 1).to_le_bytes(),
    );
}

#[test]
fn add_is_exact_in_the_parameters_type() {
    let check = |weight: f32, terms: &[f32], scale: f64, expected: f32| {
        let add = rule(Algorithm::Add, 0.0);
        let bytes: Vec<_> = terms.iter().map(|term| term.to_le_bytes()).collect();
        let element_type = ElementType::Float32;
        let gradients: Vec<_> = bytes.iter().map(|bytes| Gradient { bytes, element_type }).collect();
        let coefficients = add.coefficients(&Step { version: Version(9), scale, ..Step::FIRST });
        let mut parameter = weight.to_le_bytes();
        let piece = ParameterPiece { element_type, parameter: &mut parameter, states: &mut [] };
        update(&add, &coefficients, piece, &gradients);
        assert_eq!(f32::from_le_bytes(parameter).to_bits(), expected.to_bits());
    };
    check(0.1, &[0.2], 1.0, 0.1_f32 + 0.2_f32);
    check(0.1, &[0.2, 0.7, 1e-9], 1.0 / 3.0, 0.1_f32 + (0.2_f32 + 0.7_f32 + 1e-9_f32) * (1.0_f32 / 3.0_f32));
    check(-0.0, &[-0.0], 1.0, -0.0);
    check(f32::INFINITY, &[1.0], 0.5, f32::INFINITY);
}

#[test]
fn nan_reaches_only_its_own_element() {
    for algorithm in OPTIMIZERS {
        let everything = Rule { l1: 0.1, l2: 0.1, clip_value: Some(0.5), ..rule(algorithm, 0.1) };
        for element_type in [ElementType::Float32, ElementType::Float64] {
            let gradients: [&[f64]; 2] = [&[1.0, f64::NAN, 1.0], &[1.0, 1.0, 1.0]];
            let found = run(&everything, element_type, &[1.0, 1.0, 1.0], &gradients);
            assert!(found[0].is_finite() && found[1].is_nan() && found[2] == found[0], "{everything:?}: {found:?}");
            let found = run(&everything, element_type, &[1.0, f64::NAN], &[&[1.0, 0.5]]);
            // The closed form of FTRL replaces a weight only through `linear`, which is NaN then too.
            assert!(found[0].is_finite() && found[1].is_nan(), "{everything:?}: {found:?}");
        }
    }
}

#[test]
fn infinity_passes_an_update_without_regularization() {
    for algorithm in OPTIMIZERS.into_iter().filter(|algorithm| !matches!(algorithm, Algorithm::Ftrl { .. })) {
        let found = run(&rule(algorithm.clone(), 0.1), ElementType::Float32, &[f64::INFINITY, 1.0], &[&[1.0, 1.0]]);
        assert!(found[0] == f64::INFINITY && found[1].is_finite(), "{algorithm:?}: {found:?}");
    }
    let clipped = Rule { clip_value: Some(0.5), ..rule(Algorithm::Sgd, 1.0) };
    assert_eq!(run(&clipped, ElementType::Float32, &[1.0], &[&[f64::NEG_INFINITY]]), [1.5]);
    assert_eq!(run(&rule(Algorithm::Sgd, 1.0), ElementType::Float32, &[1.0], &[&[f64::INFINITY]]), [f64::NEG_INFINITY]);
}

#[test]
fn negative_zero_survives_a_gradient_of_zero() {
    // Algorithms with a momentum give the positive zero, the IEEE sum of the two zeros.
    for algorithm in [Algorithm::Sgd, ADAM, ADAGRAD, ADADELTA, FTRL] {
        let found = run(&rule(algorithm.clone(), 0.1), ElementType::Float32, &[-0.0], &[&[0.0]]);
        assert_eq!(found[0].to_bits(), (-0.0_f64).to_bits(), "{algorithm:?}");
    }
}

#[test]
fn a_rule_is_refused_for_a_type_it_cannot_update() {
    let check = |algorithm: Algorithm, element_type: ElementType, expected: &str| {
        let found = rule(algorithm, 0.1).validate_for(element_type);
        match found {
            Ok(()) => assert_eq!(expected, "", "{element_type}"),
            Err(failure) => assert!(
                !expected.is_empty() && failure.to_string().starts_with(expected),
                "found {failure}, expected {expected:?}"
            ),
        }
    };
    check(Algorithm::Sgd, ElementType::Float32, "");
    check(ADAM, ElementType::Float64, "");
    check(Algorithm::Add, ElementType::Int32, "");
    check(Algorithm::Add, ElementType::Float32, "");
    let scaled = |rate, rate_scale| Rule { rate_scale, ..rule(Algorithm::Sgd, rate) };
    for (rate, scale, narrow, wide) in [(3e38, 1.0, true, true), (3e38, 2.0, false, true), (1e300, 1e9, false, false)] {
        let found =
            [ElementType::Float32, ElementType::Float64].map(|one| scaled(rate, scale).validate_for(one).is_ok());
        assert_eq!(found, [narrow, wide], "{rate:e} times {scale:e}");
        assert_eq!(scaled(rate, scale).validate().is_ok(), wide, "{rate:e} times {scale:e}");
        let sent = scaled(0.1, scale).check_rate(rate, ElementType::Float32);
        assert_eq!(sent.is_ok(), narrow, "{rate:e} times {scale:e}, sent with a gradient");
        let exact = Rule { algorithm: Algorithm::Add, ..scaled(0.1, scale) };
        assert_eq!(exact.check_rate(rate, ElementType::Float32), Ok(()), "what adds has no rate");
    }
    check(Algorithm::Sgd, ElementType::Int64, "sgd cannot update a parameter of type int64; expected float32");
    check(ADAM, ElementType::Uint32, "adam cannot update a parameter of type uint32; expected float32");
    check(
        Algorithm::Add,
        ElementType::Float16,
        "add cannot update a parameter of type float16, which is for gradients; expected float32",
    );
    check(ADAM, ElementType::Bfloat16, "adam cannot update a parameter of type bfloat16, which is for gradients");
}

#[test]
fn the_states_are_those_an_algorithm_keeps() {
    let check = |algorithm: Algorithm, expected: &[&str]| assert_eq!(rule(algorithm, 0.1).states(), expected);
    check(Algorithm::Add, &[]);
    check(Algorithm::Sgd, &[]);
    check(MOMENTUM, &["momentum"]);
    check(ADAGRAD, &["square_sum"]);
    check(ADADELTA, &["gradient_square_mean", "step_square_mean"]);
    check(RMSPROP, &["square_mean"]);
    check(RMSPROP_MOMENTUM, &["square_mean", "momentum"]);
    check(ADAM, &["first_moment", "second_moment"]);
    check(ADAMW, &["first_moment", "second_moment"]);
    check(FTRL, &["square_sum", "linear"]);
    assert!(OPTIMIZERS.iter().all(|algorithm| rule(algorithm.clone(), 0.1).is_element_wise()));
    assert!(!Rule { clip_norm: Some(1.0), ..Rule::default() }.is_element_wise());
}

fn optimizers() -> impl Strategy<Value = Algorithm> {
    prop::sample::select(OPTIMIZERS.to_vec())
}

proptest! {
    /// The boundaries of a parameter's pieces do not change its bits.
    #[test]
    fn two_pieces_give_the_bits_of_one(
        algorithm in optimizers(),
        values in prop::collection::vec((-10.0..10.0_f64, -10.0..10.0_f64), 1..40),
        cut in any::<prop::sample::Index>(),
    ) {
        let regularized = Rule { l1: 0.01, l2: 0.01, clip_value: Some(3.0), ..rule(algorithm, 0.1) };
        let (weights, gradients): (Vec<f64>, Vec<f64>) = values.into_iter().unzip();
        let cut = cut.index(weights.len());
        let piece = |weights: &[f64], gradient: &[f64]| {
            run(&regularized, ElementType::Float32, weights, &[gradient, gradient])
        };
        let (first, second) = (piece(&weights[..cut], &gradients[..cut]), piece(&weights[cut..], &gradients[cut..]));
        prop_assert_eq!(piece(&weights, &gradients), [first, second].concat());
    }

    /// The norm, and so the clipped update, is the same whatever the chunk size.
    #[test]
    fn the_norm_does_not_depend_on_the_chunk_size(
        element_type in prop::sample::select(vec![ElementType::Float32, ElementType::Float64]),
        values in prop::collection::vec(-1e3..1e3_f64, 0..20_000),
        doublings in 0..=(CHUNK_BYTES_MAX / CHUNK_BYTES_MIN).ilog2(),
    ) {
        let bytes = to_bytes(element_type, &values);
        let mut total = 0.0;
        for chunk in bytes.chunks((CHUNK_BYTES_MIN << doublings) as usize) {
            square_sums(element_type, chunk, &mut |block| total += block);
        }
        prop_assert_eq!(total.to_bits(), square_sum(element_type, &bytes).to_bits());
    }

    /// A first step goes against the gradient: no algorithm ascends, as Paddle's Adagrad did.
    #[test]
    fn every_optimizer_descends(algorithm in optimizers(), gradient in 0.1..10.0_f64, weight in -10.0..10.0_f64) {
        prop_assume!(algorithm != FTRL); // its beta pulls the first value towards zero
        let found = run(&rule(algorithm, 0.1), ElementType::Float64, &[weight, weight], &[&[gradient, -gradient]]);
        prop_assert!(found[0] < weight && weight < found[1], "{:?}", found);
    }
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), -3.0..3.0_f64, -1e-6..1e-6_f64, -1e4..1e4_f64]
}

proptest! {
    /// The project's texts agree with the formulas, which were written independently.
    #[test]
    fn every_rule_text_agrees_with_its_formula(
        algorithm in optimizers(),
        (l1, l2) in (0.0..0.5_f64, 0.0..0.5_f64),
        (weight, gradient, version) in (number(), number(), 1..50_u64),
        states in (number(), number()),
    ) {
        let rule = Rule { l1, l2, ..rule(algorithm, 0.1) };
        let text = prepared::algorithm(&rule).expect("it is a rule");
        let count = rule.states().len();
        prop_assert_eq!(text.states().iter().map(|state| state.name.as_str()).collect::<Vec<_>>(), rule.states());
        prop_assert!(text.states().iter().all(|state| state.initial == 0.0));
        // A sum of squares is not negative; a momentum may be.
        let is_root = |name: &str| name.contains("square") || name == "second_moment";
        let states = rule.states().into_iter().zip([states.0, states.1]);
        let states: Vec<f64> = states.map(|(name, state)| if is_root(name) { state.abs() } else { state }).collect();
        let step = Step { version: Version(version), ..Step::FIRST };
        // The formula alone: the steps around it are the same for all and compared elsewhere.
        let bare = Rule { l1: 0.0, l2: 0.0, ..rule.clone() };
        let bare = if matches!(rule.algorithm, Algorithm::Ftrl { .. }) { rule.clone() } else { bare };
        let mut expected = states.clone();
        let coefficients = bare.coefficients(&step);
        let expected_weight = plain::step(&bare.algorithm, &coefficients, weight, gradient, &mut expected);
        let mut found = states;
        let given = UpdateInputs { rate: coefficients.rate, count: coefficients.count };
        let found_weight = text.interpret(&given, weight, gradient, &mut found);
        let scale = weight.abs().max(1e-3);
        let close = |found: f64, expected: f64| (found - expected).abs() <= 1e-9 * expected.abs().max(scale);
        prop_assert!(close(found_weight, expected_weight), "{:?}: {} {}", rule, found_weight, expected_weight);
        for (found, expected) in found.iter().zip(&expected).take(count) {
            prop_assert!(close(*found, *expected), "{:?}: {} {}", rule, found, expected);
        }
    }
}

/// Elements of a parameter of more than one block, so that a total is over several.
const REDUCED: usize = 2500;

/// A parameter, two states and the gradients of updates, all about 1.
fn varied(seed: usize) -> Vec<f64> {
    (0..REDUCED).map(|index| f64::from(u32::try_from((index * 37 + seed * 11) % 101).unwrap()) / 50.0 - 1.0).collect()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

/// LAMB as its authors wrote it.
fn lamb(weights: &mut [f64], states: &mut [Vec<f64>; 2], gradient: &[f64], count: i32) {
    let [first, second] = states;
    let step: Vec<f64> = (0..weights.len())
        .map(|at| {
            first[at] = 0.9 * first[at] + 0.1 * gradient[at];
            second[at] = 0.999 * second[at] + 0.001 * gradient[at] * gradient[at];
            let (m, v) = (first[at] / (1.0 - 0.9_f64.powi(count)), second[at] / (1.0 - 0.999_f64.powi(count)));
            m / (v.sqrt() + 1e-6) + 0.01 * weights[at]
        })
        .collect();
    let (length, of_step) = (norm(weights.iter().copied()), norm(step.iter().copied()));
    let trust = if length > 0.0 && of_step > 0.0 { length / of_step } else { 1.0 };
    weights.iter_mut().zip(step).for_each(|(weight, step)| *weight -= 0.1 * trust * step);
}

/// LARS as its authors wrote it, with momentum.
fn lars(weights: &mut [f64], states: &mut [Vec<f64>; 2], gradient: &[f64], _count: i32) {
    let (length, of_gradient) = (norm(weights.iter().copied()), norm(gradient.iter().copied()));
    let trust = if length > 0.0 && of_gradient > 0.0 { 0.001 * length / (of_gradient + 0.01 * length) } else { 1.0 };
    for (at, weight) in weights.iter_mut().enumerate() {
        states[0][at] = 0.9 * states[0][at] + 0.1 * trust * (gradient[at] + 0.01 * *weight);
        *weight -= states[0][at];
    }
}

fn of_library(name: &str, settings: &[(&str, f64)]) -> Prepared {
    let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    let text = super::library::text(name).expect("a rule of the library");
    let written = CheckedRule::new(text, &settings).expect("a rule");
    Prepared::new(rule(Algorithm::Custom(Arc::new(written)), 0.1)).expect("a rule")
}

/// One update of a parameter of this type in pieces of so many bytes.
fn update_reduced(
    rule: &Prepared,
    (element_type, version): (ElementType, u64),
    weights: &mut [u8],
    states: &mut [Vec<u8>],
    gradient: &[u8],
    piece: usize,
) {
    let step = Step { version: Version(version), ..Step::FIRST };
    let reduced = reduce(&mut Plain, rule, &step, None, |each| {
        for begin in (0..weights.len()).step_by(piece) {
            let range = begin..weights.len().min(begin + piece);
            let mut parts: Vec<&mut [u8]> = states.iter_mut().map(|state| &mut state[range.clone()]).collect();
            let (parameter, gradient) = (&weights[range.clone()], &gradient[range]);
            each(ReducedPiece { element_type, parameter, states: &mut parts, gradient });
        }
    });
    let mut scalars = Vec::new();
    Plain.update(Update {
        formula: rule.formula_reduced(&step, &reduced, &mut scalars),
        element_type,
        parameter: weights,
        states: &mut states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
        gradients: &[Gradient { bytes: gradient, element_type }],
    });
}

fn bytes_of(element_type: ElementType, values: &[f64]) -> Vec<u8> {
    match element_type {
        #[expect(clippy::cast_possible_truncation, reason = "rounded once to nearest")]
        ElementType::Float32 => values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

fn values_of(element_type: ElementType, bytes: &[u8]) -> Vec<f64> {
    match element_type {
        ElementType::Float32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
    }
}

#[test]
fn rules_with_norms_match_their_papers_and_have_the_same_bits_in_any_pieces() {
    type Oracle = fn(&mut [f64], &mut [Vec<f64>; 2], &[f64], i32);
    let rules: [(&str, Prepared, Oracle); 2] =
        [("lamb", of_library("lamb", &[]), lamb), ("lars", of_library("lars", &[("decay", 0.01)]), lars)];
    // The oracle computes in binary64, from weights and gradients that binary32 has; about 1, they differ by its steps.
    let types = [(ElementType::Float64, 1e-12, 1e-3), (ElementType::Float32, 1e-6, 1.0)];
    for ((name, rule, oracle), (element_type, tolerance, least)) in
        rules.iter().flat_map(|rule| types.iter().map(move |one| (rule, *one)))
    {
        assert!(!rule.rule().is_element_wise() && rule.reductions().len() == 2, "{name}");
        let rounded = |seed| values_of(element_type, &bytes_of(element_type, &varied(seed)));
        let mut expected = (rounded(1), [vec![0.0; REDUCED], vec![0.0; REDUCED]]);
        let mut found = (bytes_of(element_type, &expected.0), Vec::new());
        found.1.resize(rule.states().len(), vec![0; found.0.len()]);
        let mut in_pieces = found.clone();
        for version in 1..=5_u8 {
            let gradient = rounded(usize::from(version) + 1);
            oracle(&mut expected.0, &mut expected.1, &gradient, version.into());
            let gradient = bytes_of(element_type, &gradient);
            let at = (element_type, version.into());
            update_reduced(rule, at, &mut found.0, &mut found.1, &gradient, usize::MAX / 2);
            update_reduced(rule, at, &mut in_pieces.0, &mut in_pieces.1, &gradient, 4096);
            assert!(found == in_pieces, "{name}: pieces of 4 KiB have the bits of the whole");
            for (found, expected) in values_of(element_type, &found.0).into_iter().zip(&expected.0) {
                let bound = tolerance * expected.abs().max(least);
                assert!((found - expected).abs() <= bound, "{name}, {element_type}: {found} {expected}");
            }
        }
    }
}

#[test]
fn a_reduction_may_need_another_and_an_unused_reduction_is_left_out() {
    let text = "let mean = sum(w) / sum(w * 0 + 1); let unused = norm(w); w -= lr * norm(w - mean) * sum(g)";
    let written = CheckedRule::new(text, &BTreeMap::new()).expect("a rule");
    let rule = Prepared::new(rule(Algorithm::Custom(Arc::new(written)), 0.5)).expect("a rule");
    assert_eq!(rule.reductions().len(), 4, "two sums, the norm that needs them, and the gradient's sum");
    let element_type = ElementType::Float64;
    let bytes = |values: &[f64]| bytes_of(element_type, values);
    let (mut weights, gradient) = (bytes(&[1.0, 2.0, 6.0]), bytes(&[0.5, 0.25, 0.25]));
    update_reduced(&rule, (element_type, 1), &mut weights, &mut [], &gradient, 4096);
    let step = 0.5 * 14.0_f64.sqrt();
    let found = values_of(element_type, &weights);
    assert!(
        found.iter().zip([1.0, 2.0, 6.0]).all(|(found, weight)| (found - (weight - step)).abs() < 1e-12),
        "{found:?}"
    );
    for (text, expected) in [
        ("w -= lr * norm(lr)", "expected norm of a value of elements, found one number for all"),
        ("w -= sum(g, w)", "1"),
        ("state m = sum(w); w -= m", "made of numbers and parameters"),
    ] {
        let refused = CheckedRule::new(text, &BTreeMap::new()).expect_err("it is no rule").to_string();
        assert!(refused.contains(expected), "{text}: {refused}");
    }
    let many: String = (0..17).map(|number| format!("w -= lr * sum(g * {number}.5)\n")).collect();
    let refused = CheckedRule::new(&many, &BTreeMap::new()).expect_err("too many").to_string();
    assert!(refused.contains("at most 16 different sums and norms"), "{refused}");
}

//! Norms, finiteness, casts, and scalars computed on the device.

use std::mem::offset_of;

use bytemuck::{Zeroable, bytes_of, cast_slice};
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Gradient, Prepared, Rule, Step, square_sum, square_sums};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_core::rule::ssa::{Lowered, ScalarInputs};
use pserver_core::rule::{CheckedRule, RuleSettings};
use pserver_kernels::conformance::compiled::{code_of, module};
use pserver_kernels::conformance::{self, values};
use pserver_kernels::cuda::arguments::{
    CastArguments, ElementKind, FiniteArguments, ScalarValues, ScalarsArguments, SquaresArguments, TotalArguments,
};
use pserver_kernels::cuda::scalars::scalar_code;
use pserver_kernels::cuda::{Emitted, ModuleSource};

use crate::launcher::{BufferId, DeviceAddress, Launcher, assert_a_lost_launch_is_noticed, on_every};
use crate::launches::{FLOATS, Port, assert_same, floats, size};
use crate::updates::nearest_half;

#[test]
fn a_norm_is_summed_in_the_promised_order() {
    on_every(&module(), check_norms);
}

fn check_norms(launcher: &mut dyn Launcher) {
    for length in [1, 511, 1024, 1025, 9999] {
        check_norms_of(launcher, length);
    }
}

/// Norms, casts, finiteness and scalars, each once.
pub(crate) fn check_each(launcher: &mut dyn Launcher) {
    check_norms_of(launcher, 9999);
    check_finite_of(launcher, 7);
    check_casts(launcher);
    assert!(scalars_are_right(launcher), "scalars");
}

fn check_norms_of(launcher: &mut dyn Launcher, length: usize) {
    for element_type in FLOATS {
        for (misaligned, blocks, order) in [(0, 1, 0), (1, 3, 1), (0, 2, 7)] {
            launcher.order(order);
            let bytes = finite(element_type, length);
            let mut expected = Vec::new();
            square_sums(element_type, &bytes, &mut |sum| expected.push(sum));
            let held = launcher.buffer(&bytes, misaligned * size(element_type));
            let squares = launcher.buffer(&vec![0xff; expected.len() * 8], 0);
            let mut arguments = SquaresArguments::zeroed();
            arguments.elements = length as u64;
            let addresses = [
                DeviceAddress::of(offset_of!(SquaresArguments, values), held),
                DeviceAddress::of(offset_of!(SquaresArguments, squares), squares),
            ];
            let suffix = ElementKind::of(element_type).suffix().expect("a float");
            launcher.launch(&format!("pserver_squares_{suffix}"), [blocks, 1], bytes_of(&arguments), &addresses);
            assert_eq!(
                launcher.read(squares, expected.len() * 8),
                cast_slice::<f64, u8>(&expected),
                "{element_type} {length}"
            );
            let whole = square_sum(element_type, &bytes);
            assert_eq!(total(launcher, squares, expected.len()), whole.to_le_bytes(), "{element_type} {length}");
            launcher.release();
        }
    }
}

/// The bytes of the total of these squares, from zero on.
fn total(launcher: &mut dyn Launcher, squares: BufferId, count: usize) -> Vec<u8> {
    let total = launcher.buffer(&0.0_f64.to_le_bytes(), 8);
    let mut arguments = TotalArguments::zeroed();
    arguments.count = count as u64;
    let addresses = [
        DeviceAddress::of(offset_of!(TotalArguments, squares), squares),
        DeviceAddress::of(offset_of!(TotalArguments, total), total),
    ];
    launcher.launch("pserver_total", [2, 1], bytes_of(&arguments), &addresses);
    launcher.read(total, 8)
}

/// Three rounds of a block and a part of one, to detect a missing barrier.
pub(crate) fn total_is_right(launcher: &mut dyn Launcher) -> bool {
    let squares: Vec<f64> = (0..800).map(|place| 1.0 / f64::from(place + 1)).collect();
    let held = launcher.buffer(cast_slice(&squares), 0);
    let found = total(launcher, held, squares.len());
    launcher.release();
    found == squares.iter().fold(0.0, |sum, square| sum + square).to_le_bytes()
}

fn finite(element_type: ElementType, length: usize) -> Vec<u8> {
    let mut bytes = values(element_type, length, 4, 4);
    let numbers = floats(element_type, &bytes);
    for (element, number) in bytes.chunks_mut(size(element_type)).zip(numbers) {
        if !number.is_finite() {
            element.fill(0);
        }
    }
    bytes
}

#[test]
fn one_element_that_is_not_finite_is_found_wherever_it_is() {
    on_every(&module(), check_finite);
}

fn check_finite(launcher: &mut dyn Launcher) {
    for length in [1, 7, 40] {
        check_finite_of(launcher, length);
    }
}

fn check_finite_of(launcher: &mut dyn Launcher, length: usize) {
    for element_type in [ElementType::Float32, ElementType::Float64, ElementType::Float16, ElementType::Bfloat16] {
        let fine = finite(element_type, length);
        let exponent: &[u8] = match element_type {
            ElementType::Float16 => &[0, 0x7c],
            ElementType::Float32 => &[1, 0, 0x80, 0xff],
            ElementType::Float64 => &[0, 0, 0, 0, 1, 0, 0xf0, 0x7f],
            _ => &[0x80, 0x7f],
        };
        for (place, misaligned) in (0..=length).flat_map(|place| [0, 1].map(|misaligned| (place, misaligned))) {
            let mut spoiled = fine.clone();
            if place < length {
                spoiled[place * exponent.len()..][..exponent.len()].copy_from_slice(exponent);
            }
            let align = misaligned * size(element_type);
            let gradients = [launcher.buffer(&fine, align), launcher.buffer(&spoiled, align)];
            let flag = launcher.buffer(&[0; 4], 0);
            let mut arguments = FiniteArguments::zeroed();
            (arguments.elements, arguments.count) = (length as u64, 2);
            arguments.kind = ElementKind::of(element_type).code();
            let mut addresses = vec![DeviceAddress::of(offset_of!(FiniteArguments, flag), flag)];
            for (index, gradient) in gradients.into_iter().enumerate() {
                addresses.push(DeviceAddress::of(offset_of!(FiniteArguments, gradients) + 8 * index, gradient));
            }
            launcher.launch("pserver_finite", [1, 1], bytes_of(&arguments), &addresses);
            let found = launcher.read(flag, 4);
            assert_eq!(found, [u8::from(place < length), 0, 0, 0], "{element_type} {length} at {place}");
            launcher.release();
        }
    }
}

/// Half-precision numbers at the edges of their ranges, and neighbours of midpoints.
fn edges(element_type: ElementType) -> Vec<u8> {
    let mut numbers: Vec<f64> = (0..=u16::MAX).step_by(97).map(|bits| half::f16::from_bits(bits).into()).collect();
    numbers.extend((0..=u16::MAX).step_by(89).map(|bits| f64::from(half::bf16::from_bits(bits))));
    numbers.extend([
        65504.0,
        65519.9,
        65520.0,
        65536.0,
        6e-8,
        2.98e-8,
        2.980_232_238_769_532e-8,
        6.1e-5,
        1e-300,
        1e300,
    ]);
    let middles: Vec<f64> =
        numbers.iter().flat_map(|one| [1.0, 1.0 + 1e-7, 1.0 - 1e-15].map(|by| one * by * 1.0004883)).collect();
    numbers.extend(middles);
    match element_type {
        #[expect(clippy::cast_possible_truncation, reason = "rounding makes the inputs")]
        ElementType::Float32 => numbers.iter().flat_map(|number| (*number as f32).to_le_bytes()).collect(),
        ElementType::Float64 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        _ => (0..=u16::MAX).step_by(7).flat_map(u16::to_le_bytes).collect(),
    }
}

#[test]
fn a_cast_rounds_once_to_nearest_even() {
    on_every(&module(), check_casts);
}

fn check_casts(launcher: &mut dyn Launcher) {
    let types = [ElementType::Float32, ElementType::Float64, ElementType::Float16, ElementType::Bfloat16];
    for (from, into, misaligned) in
        types.into_iter().flat_map(|from| types.into_iter().flat_map(move |into| [(from, into, 0), (from, into, 1)]))
    {
        let bytes = edges(from);
        let numbers = floats(from, &bytes);
        #[expect(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
        let expected: Vec<u8> = match into {
            ElementType::Float32 => numbers.iter().flat_map(|number| (*number as f32).to_le_bytes()).collect(),
            ElementType::Float64 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
            half => numbers.iter().flat_map(|number| nearest_half(*number, half)).collect(),
        };
        let (held, left) =
            (launcher.buffer(&bytes, misaligned * size(from)), launcher.buffer(&vec![0x22; expected.len()], 0));
        let mut arguments = CastArguments::zeroed();
        arguments.elements = numbers.len() as u64;
        (arguments.from_kind, arguments.into_kind) = (ElementKind::of(from).code(), ElementKind::of(into).code());
        let addresses = [
            DeviceAddress::of(offset_of!(CastArguments, from), held),
            DeviceAddress::of(offset_of!(CastArguments, into), left),
        ];
        launcher.launch("pserver_cast", [2, 1], bytes_of(&arguments), &addresses);
        assert_same(into, &launcher.read(left, expected.len()), &expected, &format!("{from} to {into}"));
        launcher.release();
    }
}

/// A rule that has every function and every operation of scalars.
const STRANGE: &str = "param a in (-inf, inf) = 0.5; \
    let x = exp(lr) + expm1(lr) + log(n) + log1p(n) + tanh(lr - 1) + pow(n, a) + pow(lr, 3); \
    let y = select(lr < n and not (n <= 2), min(lr, n), max(-lr, floor(n * 0.7))); \
    let z = copysign(sqrt(abs(x)), sign(y)) + select(n == 3, 1, 0); \
    w -= lr * (x * g + y / z) + exp(g) + log(abs(g)) + tanh(w) + pow(abs(w), a) + expm1(w) + log1p(abs(g))";

fn strange() -> Prepared {
    let written = CheckedRule::new(STRANGE, &RuleSettings::new()).expect("it is a rule");
    let algorithm = pserver_core::optim::Algorithm::Custom(std::sync::Arc::new(written));
    Prepared::new(Rule { algorithm, ..Rule::default() }).expect("it is a rule")
}

#[test]
fn scalars_computed_on_the_device_equal_those_of_the_host() {
    on_every(&module(), check_scalars);
}

fn check_scalars(launcher: &mut dyn Launcher) {
    let rules = conformance::rules().into_iter().map(|rule| Prepared::new(rule).expect("it is a rule"));
    for (prepared, element_type) in
        rules.chain([strange()]).flat_map(|rule| FLOATS.map(|element_type| (rule.clone(), element_type)))
    {
        let Some(code) = code_of(&prepared) else { continue };
        for (count, total, skip) in [(1_u32, 0.0_f64, 0_u32), (3, 2.5, 0), (700, f64::NAN, 1)] {
            let reckoned = reckon(launcher, &prepared, &code, element_type, (count, total, skip));
            let name = prepared.rule().algorithm.name();
            assert_same(element_type, &reckoned.found, &reckoned.expected, name);
            assert_eq!(reckoned.counted, f64::from(count) + f64::from(1 - skip), "the count");
        }
    }
}

/// Detects a missing barrier.
pub(crate) fn scalars_are_right(launcher: &mut dyn Launcher) -> bool {
    let prepared = strange();
    let code = code_of(&prepared).expect("it has code");
    let reckoned = reckon(launcher, &prepared, &code, ElementType::Float64, (3, 2.5, 0));
    reckoned.found == reckoned.expected
}

/// A rule's scalars as the device and as the host computed them.
struct Reckoned {
    found: Vec<u8>,
    expected: Vec<u8>,
    /// The count afterwards.
    counted: f64,
}

fn reckon(
    launcher: &mut dyn Launcher,
    prepared: &Prepared,
    code: &Lowered,
    element_type: ElementType,
    (count, total, skip): (u32, f64, u32),
) -> Reckoned {
    let (emitted, clip_norm, scale) = (Emitted::of(code), prepared.rule().clip_norm, 0.25_f64);
    let step = Step { version: Version(count.into()), norm: Some(total.sqrt() * scale), scale, ..Step::FIRST };
    let inputs = prepared.rule().inputs(&step);
    let (mut values, mut expected) = (Vec::new(), Vec::new());
    code.evaluate(&ScalarInputs { ..inputs }, &[], &mut values);
    emitted.pack(element_type, &values, &mut expected);
    let clip = clip_norm.unwrap_or(f64::INFINITY);
    let given = ScalarValues { rate: inputs.rate, count: count.into(), scale, clip_norm: clip };
    let places: Vec<u32> = emitted.used().iter().map(|scalar| scalar.0.into()).collect();
    let program = scalar_code(code);
    let mut arguments = ScalarsArguments::zeroed();
    (arguments.operations, arguments.used) =
        (u32::try_from(program.len()).expect("few"), u32::try_from(places.len()).expect("few"));
    (arguments.kind, arguments.advances) = (ElementKind::of(element_type).code(), 1);
    let held = launcher.buffer(bytes_of(&given), 0);
    let left = launcher.buffer(&vec![0xee; expected.len()], 0);
    let mut addresses = vec![
        DeviceAddress::of(offset_of!(ScalarsArguments, values), held),
        DeviceAddress::of(offset_of!(ScalarsArguments, scalars), left),
        DeviceAddress::of(offset_of!(ScalarsArguments, skip), launcher.buffer(&skip.to_le_bytes(), 0)),
        DeviceAddress::of(offset_of!(ScalarsArguments, code), launcher.buffer(cast_slice(&program), 0)),
        DeviceAddress::of(offset_of!(ScalarsArguments, places), launcher.buffer(cast_slice(&places), 0)),
    ];
    if clip_norm.is_some() {
        let total = launcher.buffer(&total.to_le_bytes(), 0);
        addresses.push(DeviceAddress::of(offset_of!(ScalarsArguments, total), total));
    }
    launcher.launch("pserver_scalars", [1, 1], bytes_of(&arguments), &addresses);
    let (found, counted) = (launcher.read(left, expected.len()), launcher.read(held, size_of::<ScalarValues>()));
    launcher.release();
    let counted = f64::from_le_bytes(counted[8..16].try_into().expect("eight bytes"));
    Reckoned { found, expected, counted }
}

/// The functions of `elementary.cu` are those of `core::rule`, on numbers of every size.
#[test]
fn every_function_gives_the_processors_bits() {
    let texts = ["exp(g)", "expm1(g)", "log(g)", "log1p(g)", "tanh(g)", "pow(w, g)", "floor(g)", "sign(g)"];
    let rules = texts.map(|text| {
        let written = CheckedRule::new(&format!("w = {text}"), &RuleSettings::new()).expect("it is a rule");
        let algorithm = pserver_core::optim::Algorithm::Custom(std::sync::Arc::new(written));
        Prepared::new(Rule { algorithm, ..Rule::default() }).expect("it is a rule")
    });
    let emitted: Vec<Emitted> = rules.iter().map(|rule| Emitted::of(&code_of(rule).expect("a rule"))).collect();
    on_every(&ModuleSource::new(&emitted, [], &FLOATS), |launcher| check_functions(launcher, &rules));
}

fn check_functions(launcher: &mut dyn Launcher, rules: &[Prepared]) {
    let has = |launcher: &mut dyn Launcher, rule: &Prepared| {
        let emitted = Emitted::of(&code_of(rule).expect("a rule"));
        FLOATS.iter().all(|float| launcher.has(&emitted.update_entry(*float)))
    };
    let rules: Vec<&Prepared> = rules.iter().filter(|rule| has(launcher, rule)).collect();
    let mut port = Port::new(launcher);
    let step = Step { version: Version(1), ..Step::FIRST };
    for (element_type, stretch) in FLOATS.into_iter().flat_map(|each| [(each, 0), (each, 1), (each, 2)]) {
        let (weights, gradients) = (numbers(element_type, stretch, 11), numbers(element_type, stretch, 12));
        for rule in &rules {
            let run = |kernels: &mut dyn Kernels| {
                let mut weights = weights.clone();
                kernels.update(Update {
                    formula: rule.formula(&step, &mut Vec::new()),
                    element_type,
                    parameter: &mut weights,
                    states: &mut [],
                    gradients: &[Gradient { bytes: &gradients, element_type }],
                });
                weights
            };
            assert_same(element_type, &run(&mut port), &run(&mut Plain), &format!("{:?}", rule.rule().algorithm));
        }
    }
}

/// Ordinary numbers, numbers between -800 and 800, and any bits at all.
fn numbers(element_type: ElementType, stretch: usize, seed: u64) -> Vec<u8> {
    const COUNT: usize = 20_000;
    match (stretch, element_type) {
        (0, _) => values(element_type, COUNT, seed, 0),
        (1, ElementType::Float32) => {
            #[expect(clippy::cast_possible_truncation, reason = "rounding makes the inputs")]
            let wide = |number: &f64| (number * 400.0) as f32;
            floats(element_type, &values(element_type, COUNT, seed, 0))
                .iter()
                .flat_map(|n| wide(n).to_le_bytes())
                .collect()
        }
        (1, _) => floats(element_type, &values(element_type, COUNT, seed, 0))
            .iter()
            .flat_map(|number| (number * 400.0).to_le_bytes())
            .collect(),
        (_, ElementType::Float32) => values(ElementType::Uint32, COUNT, seed, 0),
        _ => values(ElementType::Uint64, COUNT, seed, 0),
    }
}

/// The checks fail for a launcher that loses any one launch.
#[test]
fn a_lost_launch_is_noticed() {
    on_every(&module(), |launcher| {
        let assert =
            |is_right: fn(&mut dyn Launcher) -> bool| move |launcher: &mut dyn Launcher| assert!(is_right(launcher));
        assert_a_lost_launch_is_noticed(launcher, "pserver_", assert(total_is_right));
        assert_a_lost_launch_is_noticed(launcher, "pserver_", assert(scalars_are_right));
    });
}

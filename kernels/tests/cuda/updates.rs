//! Updates and sums of whole tensors.

use std::collections::BTreeSet;
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytemuck::{Zeroable, bytes_of};
use half::{bf16, f16};
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{self, Formula, Gradient, Prepared, Rule, Step};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_kernels::conformance::compiled::{code_of, module};
use pserver_kernels::conformance::{self, values};
use pserver_kernels::cuda::Emitted;
use pserver_kernels::cuda::arguments::{ElementKind, SumMode, UpdateArguments};

use crate::child::Shim;
use crate::launcher::{DeviceAddress, Launcher, assert_a_lost_launch_is_noticed, on_device, on_every};
use crate::launches::{FLOATS, Launch, Left, Port, assert_same, floats, plain, size};

#[test]
fn the_cuda_kernels_pass_the_conformance_suite() {
    on_every(&module(), check_port);
}

/// Cases with the rules for which the launcher has kernels.
fn check_port(launcher: &mut dyn Launcher) {
    let mut rules = conformance::rules();
    rules.retain(|rule| {
        let code = code_of(&Prepared::new(rule.clone()).expect("it is a rule"));
        let emitted = code.map(|code| Emitted::of(&code));
        emitted.is_none_or(|emitted| FLOATS.iter().all(|float| launcher.has(&emitted.update_entry(*float))))
    });
    assert!(BARE <= rules.len() + 1, "every algorithm is shipped but a text of the suite's own: {}", rules.len());
    let worst = conformance::worst_of(&mut Port::new(launcher), rules);
    assert!(worst.ulps <= conformance::TOLERANCE_ULPS, "{worst:?}");
}

/// The first digits of a digest, and the case.
const DIGESTS: &str = include_str!("../../cu/conformance.digests");

/// The number of the suite's rules that are bare algorithms.
const BARE: usize = 12;

/// The tensors of one update, its rule's kernel, and the reference results.
struct Case {
    entry: String,
    scalars: Vec<u8>,
    element_type: ElementType,
    weights: Vec<u8>,
    states: Vec<Vec<u8>>,
    gradient_type: ElementType,
    gradients: Vec<Vec<u8>>,
    expected: Left,
}

impl Case {
    fn new(rule: &Rule, element_type: ElementType, gradient_type: ElementType, count: usize, length: usize) -> Self {
        let prepared = Prepared::new(rule.clone()).expect("it is a rule");
        let step = Step { version: Version(3), norm: rule.clip_norm, scale: 1.0 / count.max(1) as f64, ..Step::FIRST };
        let weights = values(element_type, length, 1, 3);
        let states: Vec<Vec<u8>> =
            (0..prepared.states().len()).map(|state| values(element_type, length, 2, state as u64)).collect();
        let gradients: Vec<Vec<u8>> =
            (0..count).map(|gradient| values(gradient_type, length, 3 + gradient as u64, 1)).collect();
        let mut scalars = Vec::new();
        let mut entry = String::new();
        let mut values = Vec::new();
        if let Formula::Rule { code, scalars: values } = prepared.formula(&step, &mut values) {
            let emitted = Emitted::of(code);
            emitted.pack(element_type, values, &mut scalars);
            entry = emitted.update_entry(element_type);
        }
        let mut left = Left { weights: weights.clone(), states: states.clone(), copy: Vec::new() };
        Plain.update(Update {
            formula: prepared.formula(&step, &mut values),
            element_type,
            parameter: &mut left.weights,
            states: &mut left.states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            gradients: &views(&gradients, gradient_type),
        });
        Self { entry, scalars, element_type, weights, states, gradient_type, gradients, expected: left }
    }

    fn run(&self, launcher: &mut dyn Launcher, change: impl Fn(&mut Launch<'_>)) -> Left {
        let states: Vec<&[u8]> = self.states.iter().map(Vec::as_slice).collect();
        let gradients = views(&self.gradients, self.gradient_type);
        let mut launch = Launch {
            entry: &self.entry,
            element_type: self.element_type,
            weights: &self.weights,
            states: &states,
            gradients: &gradients,
            scalars: &self.scalars,
            ..plain()
        };
        change(&mut launch);
        launch.run(launcher)
    }

    fn assert(&self, left: &Left, case: &str) {
        assert_same(self.element_type, &left.weights, &self.expected.weights, case);
        for (found, expected) in left.states.iter().zip(&self.expected.states) {
            assert_same(self.element_type, found, expected, case);
        }
    }
}

fn views(held: &[Vec<u8>], element_type: ElementType) -> Vec<Gradient<'_>> {
    held.iter().map(|bytes| Gradient { bytes, element_type }).collect()
}

/// Every algorithm bare, and one rule with everything around it.
fn some_rules() -> Vec<Rule> {
    let all = conformance::rules();
    let mut some = all[..BARE].to_vec();
    some.extend(all.into_iter().filter(|rule| rule.clip_norm.is_some()).take(2));
    some
}

/// The table, from which the digests are computed too.
fn table() -> impl Iterator<Item = (String, Case)> {
    some_rules().into_iter().enumerate().flat_map(|(index, rule)| {
        FLOATS.into_iter().flat_map(move |element_type| {
            let rule = rule.clone();
            [0, 1, 2, 4, 8, 16, 64].into_iter().enumerate().map(move |(place, count)| {
                let kinds = [element_type, ElementType::Float16, ElementType::Bfloat16];
                let gradient_type = kinds[(index + place) % 3];
                let length = [1, 3, 67, 1021, 2053][(index + place) % 5];
                let name = format!("rule {index} {element_type} {count} {gradient_type} {length}");
                (name, Case::new(&rule, element_type, gradient_type, count, length))
            })
        })
    })
}

#[test]
fn any_number_of_gradients_in_any_order_of_threads_gives_the_plain_forms_bits() {
    on_every(&module(), check_table);
}

fn check_table(launcher: &mut dyn Launcher) {
    let mut found = 0;
    for (index, (name, case)) in table().enumerate() {
        if !launcher.has(&case.entry) {
            continue;
        }
        let mut digests = BTreeSet::new();
        for (order, misaligned, blocks) in [(0, 0, 1), (1, 1, 3), (index as u64 + 2, index % 4, 2)] {
            launcher.order(order);
            let left = case.run(launcher, |launch| (launch.misaligned, launch.blocks) = (misaligned, blocks));
            case.assert(&left, &format!("{name}, order {order}, misaligned {misaligned}, {blocks} blocks"));
            digests.insert(digest(&left, case.element_type));
        }
        let committed = DIGESTS.lines().nth(index).and_then(|line| line.split(' ').next()).unwrap_or_default();
        assert!(
            digests.iter().map(String::as_str).eq([committed]),
            "{name}: kernels/cu/conformance.digests has {committed}: {digests:?}"
        );
        found += 1;
    }
    let all = DIGESTS.lines().count();
    println!("{found} of {all} committed digests are the launcher's");
    assert!(all * 4 / 5 <= found, "{found} of {all} cases have a kernel");
}

/// An update of aligned tensors, and one of misaligned ones.
pub(crate) fn check_rule(
    launcher: &mut dyn Launcher,
    rule: &Rule,
    element_type: ElementType,
    gradient_type: ElementType,
) {
    let case = Case::new(rule, element_type, gradient_type, 3, 1027);
    for misaligned in 0..2 {
        let left = case.run(launcher, |launch| (launch.misaligned, launch.blocks) = (misaligned, 2));
        case.assert(&left, &format!("{element_type}, {gradient_type}, misaligned {misaligned}: {rule:?}"));
    }
}

/// The reference results of the table, on every machine.
#[test]
fn the_committed_digests_are_those_of_the_plain_form() {
    let line = |(name, case): (String, Case)| format!("{} {name}\n", digest(&case.expected, case.element_type));
    let made: String = table().map(line).collect();
    assert!(made == DIGESTS, "kernels/cu/conformance.digests would be\n{made}");
}

/// The digest of a case's results, with one bit pattern for NaN.
fn digest(left: &Left, element_type: ElementType) -> String {
    let mut hasher = blake3::Hasher::new();
    for tensor in std::iter::once(&left.weights).chain(&left.states) {
        for (bytes, value) in tensor.chunks(size(element_type)).zip(floats(element_type, tensor)) {
            hasher.update(if value.is_nan() { &[0xff] } else { bytes });
        }
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

#[test]
fn a_partial_sum_is_the_first_addend_and_may_be_the_only_one() {
    on_every(&module(), check_sums_so_far);
}

fn check_sums_so_far(launcher: &mut dyn Launcher) {
    for element_type in FLOATS {
        let case = Case::new(&some_rules()[7], element_type, element_type, 5, 131);
        for cut in 1..=5 {
            let mut sum = vec![0; case.weights.len()];
            optim::sum(element_type, &mut sum, &views(&case.gradients[..cut], element_type));
            let rest = views(&case.gradients[cut..], element_type);
            let states: Vec<&[u8]> = case.states.iter().map(Vec::as_slice).collect();
            let launch = Launch {
                entry: &case.entry,
                element_type,
                weights: &case.weights,
                states: &states,
                sum: Some(&sum),
                gradients: &rest,
                scalars: &case.scalars,
                ..plain()
            };
            case.assert(&launch.run(launcher), &format!("{cut} of 5 summed before"));
        }
    }
}

#[test]
fn a_step_that_is_skipped_changes_nothing() {
    on_every(&module(), check_skips);
}

fn check_skips(launcher: &mut dyn Launcher) {
    let case = Case::new(&some_rules()[7], ElementType::Float32, ElementType::Float16, 3, 67);
    case.assert(&case.run(launcher, |launch| launch.skip = Some(0)), "not skipped");
    let left = case.run(launcher, |launch| (launch.skip, launch.copy) = (Some(1), Some(ElementType::Bfloat16)));
    assert_eq!(left.weights, case.weights);
    assert_eq!(left.states, case.states);
    assert!(left.copy.iter().all(|byte| *byte == 0x11), "no copy either");
}

#[test]
fn a_copy_is_the_new_weights_rounded_once() {
    on_every(&module(), check_copies);
}

fn check_copies(launcher: &mut dyn Launcher) {
    for (element_type, copy) in FLOATS
        .into_iter()
        .flat_map(|element_type| [ElementType::Float16, ElementType::Bfloat16].map(|copy| (element_type, copy)))
    {
        for misaligned in 0..2 {
            let case = Case::new(&some_rules()[0], element_type, element_type, 1, 515);
            let left = case.run(launcher, |launch| (launch.copy, launch.misaligned) = (Some(copy), misaligned));
            let weights = floats(element_type, &case.expected.weights);
            let expected: Vec<u8> = weights.iter().flat_map(|weight| nearest_half(*weight, copy)).collect();
            assert_same(copy, &left.copy, &expected, &format!("{element_type} as {copy}"));
        }
    }
}

/// Through a binary32 whose last bit is sticky, so that there is one rounding.
pub(crate) fn nearest_half(value: f64, into: ElementType) -> [u8; 2] {
    #[expect(clippy::cast_possible_truncation, reason = "what is lost is put into the last bit")]
    let near = value as f32;
    let odd = if f64::from(near) == value || value.is_nan() || near.is_infinite() && value.is_infinite() {
        near
    } else {
        let towards_zero = if f64::from(near).abs() > value.abs() { near.abs().next_down() } else { near.abs() };
        f32::from_bits(towards_zero.to_bits() | 1).copysign(near)
    };
    match into {
        ElementType::Float16 => f16::from_f32(odd).to_le_bytes(),
        _ => bf16::from_f32(odd).to_le_bytes(),
    }
}

/// `w += g` in place: gradients that arrive are accumulated.
#[test]
fn a_sum_in_place_adds_to_what_is_there() {
    on_every(&module(), check_sums_in_place);
}

pub(crate) fn check_sums_in_place(launcher: &mut dyn Launcher) {
    for element_type in ElementType::ALL.into_iter().filter(|found| found.is_parameter_type()) {
        let held = values(element_type, 333, 5, 0);
        let gradient = values(element_type, 333, 6, 0);
        let mut expected = vec![0; held.len()];
        optim::sum(element_type, &mut expected, &views(&[held.clone(), gradient.clone()], element_type));
        let mut arguments = UpdateArguments::zeroed();
        (arguments.elements, arguments.count, arguments.merge) = (333, 1, SumMode::Sum as u32);
        arguments.gradient_kind = ElementKind::of(element_type).code();
        let (held, gradient) = (launcher.buffer(&held, 0), launcher.buffer(&gradient, 0));
        let addresses = [
            (offset_of!(UpdateArguments, weights), held),
            (offset_of!(UpdateArguments, sum), held),
            (offset_of!(UpdateArguments, gradients), gradient),
        ]
        .map(|(offset, buffer)| DeviceAddress { offset, buffer, within: 0 });
        let entry = pserver_kernels::cuda::arguments::sum_entry(element_type).expect("a parameter's type");
        launcher.launch(entry, [2, 1], bytes_of(&arguments), &addresses);
        assert_same(element_type, &launcher.read(held, expected.len()), &expected, entry);
        launcher.release();
    }
}

/// A launch with this many elements too many.
fn launch_too_much(launcher: &mut dyn Launcher, more: u64) {
    let case = Case::new(&some_rules()[0], ElementType::Float32, ElementType::Float32, 1, 64);
    let mut arguments = UpdateArguments::zeroed();
    (arguments.elements, arguments.count) = (64 + more, 1);
    let buffers = [&case.weights, &case.gradients[0], &case.scalars].map(|bytes| launcher.buffer(bytes, 0));
    let offsets = [
        offset_of!(UpdateArguments, weights),
        offset_of!(UpdateArguments, gradients),
        offset_of!(UpdateArguments, scalars),
    ];
    let addresses = [0, 1, 2].map(|k| DeviceAddress::of(offsets[k], buffers[k]));
    launcher.launch(&case.entry, [1, 1], bytes_of(&arguments), &addresses);
    launcher.release();
}

/// The process ends; on a device the bytes beside a buffer have changed.
#[test]
fn a_kernel_that_writes_out_of_bounds_is_caught() {
    for (more, is_caught) in [(0, false), (1, true), (4, true), (4096, true)] {
        let Some(mut shim) = Shim::new(&module()) else { return };
        launch_too_much(&mut shim, more);
        assert_eq!(!shim.end().success(), is_caught, "{more} elements too many");
    }
}

#[test]
fn a_kernel_that_writes_out_of_bounds_on_a_device_is_caught() {
    on_device(&module(), |device| {
        launch_too_much(device, 0);
        for more in [1, 4] {
            let outcome = catch_unwind(AssertUnwindSafe(|| launch_too_much(device, more)));
            assert!(outcome.is_err(), "{more} elements too many");
        }
    });
}

/// The checks fail for a launcher that loses any one launch.
#[test]
fn a_lost_launch_is_noticed() {
    on_every(&module(), |launcher| {
        assert_a_lost_launch_is_noticed(launcher, "pserver_", check_copies);
        assert_a_lost_launch_is_noticed(launcher, "pserver_", check_sums_in_place);
    });
}

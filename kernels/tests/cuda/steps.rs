//! Training steps as a CUDA graph: captured once, and replayed with new inputs in device memory.

use std::mem::{offset_of, size_of};

use bytemuck::{Zeroable, bytes_of, cast_slice};
use half::bf16;
use pserver_core::dtype::ElementType::{Bfloat16, Float32};
use pserver_core::ids::Version;
use pserver_core::optim::{Algorithm, Gradient, Prepared, Rule, Schedule, Step};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_kernels::conformance::compiled::{code_of, module};
use pserver_kernels::conformance::values;
use pserver_kernels::cuda::arguments::{
    ElementKind, FiniteArguments, ScalarValues, ScalarsArguments, SumMode, UpdateArguments,
};
use pserver_kernels::cuda::{Emitted, scalars::scalar_code};

use crate::device::{OnDevice, StepLaunch};
use crate::launcher::{BufferId, DeviceAddress, Launcher, on_device};
use crate::launches::assert_same;

const ELEMENTS: usize = 1027;
const GRADIENTS: usize = 3;
const SCALE: f64 = 1.0 / GRADIENTS as f64;

/// Learning rates of the steps; where there is none, a gradient is infinite and the step is skipped.
const STEPS: [Option<f64>; 5] = [Some(0.1), Some(0.02), None, Some(0.5), Some(0.003)];

/// The device memory of a step.
struct Held {
    weights: BufferId,
    states: [BufferId; 2],
    gradients: [BufferId; GRADIENTS],
    values: BufferId,
    flag: BufferId,
}

#[test]
fn a_step_that_is_captured_once_and_replayed_has_the_bits_of_the_plain_form() {
    on_device(&module(), |device| {
        let algorithm = Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        let rule = Rule { algorithm, schedule: Schedule::Const { rate: 0.01 }, ..Rule::default() };
        let rule = Prepared::new(rule).expect("it is a rule");
        let mut weights = values(Float32, ELEMENTS, 1, 1);
        let mut states = [0, 1].map(|state| values(Float32, ELEMENTS, 2 + state, 1));
        states[1].chunks_exact_mut(4).for_each(|bytes| bytes[3] &= 0x7f);
        let held = Held {
            weights: device.buffer(&weights, 0),
            states: [device.buffer(&states[0], 0), device.buffer(&states[1], 0)],
            gradients: [0; GRADIENTS].map(|_| device.buffer(&[0; 2 * ELEMENTS], 0)),
            values: device.buffer(&[0; size_of::<ScalarValues>()], 0),
            flag: device.buffer(&[0; 4], 0),
        };
        let launches = launches(device, &rule, &held);
        let step = device.capture(&launches);
        assert_same(Float32, &device.read(held.weights, weights.len()), &weights, "a capture runs nothing");
        let mut version = 1;
        for (round, rate) in STEPS.into_iter().enumerate() {
            let gradients = gradients(round, rate.is_none());
            held.gradients.iter().zip(&gradients).for_each(|(buffer, bytes)| device.rewrite(*buffer, bytes));
            // The device keeps the count. The host writes the rate before it in each step, and the rest after it once.
            device.rewrite(held.values, &rate.unwrap_or(9.0).to_le_bytes());
            if round == 0 {
                let rest = ScalarValues { rate: 0.1, count: 1.0, scale: SCALE, clip_norm: f64::INFINITY };
                device.rewrite(held.values, bytes_of(&rest));
            }
            device.rewrite(held.flag, &[0; 4]);
            device.replay(&step);
            if let Some(rate) = rate {
                update(&rule, version, rate, &mut weights, &mut states, &gradients);
                version += 1;
            }
            let name = format!("step {round}, rate {rate:?}");
            assert_same(Float32, &device.read(held.weights, weights.len()), &weights, &name);
            for (buffer, state) in held.states.iter().zip(&states) {
                assert_same(Float32, &device.read(*buffer, state.len()), state, &name);
            }
        }
        assert_eq!(version, 5, "one of five was skipped");
        drop(step);
        device.release();
    });
}

/// Is everything finite; the scalars; the sum of all gradients but the last; the update with it and the last.
fn launches(device: &mut OnDevice, rule: &Prepared, held: &Held) -> Vec<StepLaunch> {
    let code = code_of(rule).expect("it has code");
    let emitted = Emitted::of(&code);
    let (program, places) = (scalar_code(&code), emitted.used().iter().map(|scalar| u32::from(scalar.0)));
    let places: Vec<u32> = places.collect();
    let number = |length: usize| u32::try_from(length).expect("few");
    let (kind, elements) = (ElementKind::of(Bfloat16).code(), ELEMENTS as u64);
    let scalars = device.buffer(&vec![0; 4 * places.len()], 0);
    let accumulator = device.buffer(&[0; 4 * ELEMENTS], 0);
    let of_gradients = |offset: usize, from: usize, to: usize| {
        let places = held.gradients[from..to].iter().enumerate();
        places.map(move |(place, buffer)| DeviceAddress::of(offset + 8 * place, *buffer)).collect::<Vec<_>>()
    };
    let finite = FiniteArguments { elements, count: number(GRADIENTS), kind, ..FiniteArguments::zeroed() };
    let mut finite_at = of_gradients(offset_of!(FiniteArguments, gradients), 0, GRADIENTS);
    finite_at.push(DeviceAddress::of(offset_of!(FiniteArguments, flag), held.flag));

    let (operations, used) = (number(program.len()), number(places.len()));
    let reckon = ScalarsArguments {
        operations,
        used,
        kind: ElementKind::of(Float32).code(),
        advances: 1,
        ..ScalarsArguments::zeroed()
    };
    let reckon_at = vec![
        DeviceAddress::of(offset_of!(ScalarsArguments, values), held.values),
        DeviceAddress::of(offset_of!(ScalarsArguments, skip), held.flag),
        DeviceAddress::of(offset_of!(ScalarsArguments, code), device.buffer(cast_slice(&program), 0)),
        DeviceAddress::of(offset_of!(ScalarsArguments, places), device.buffer(cast_slice(&places), 0)),
        DeviceAddress::of(offset_of!(ScalarsArguments, scalars), scalars),
    ];

    let plain = UpdateArguments { elements, gradient_kind: kind, ..UpdateArguments::zeroed() };
    let sum = UpdateArguments { count: number(GRADIENTS - 1), merge: SumMode::Sum as u32, ..plain };
    let mut sum_at = of_gradients(offset_of!(UpdateArguments, gradients), 0, GRADIENTS - 1);
    sum_at.push(DeviceAddress::of(offset_of!(UpdateArguments, weights), accumulator));
    sum_at.push(DeviceAddress::of(offset_of!(UpdateArguments, skip), held.flag));

    let update = UpdateArguments { count: 1, ..plain };
    let mut update_at = of_gradients(offset_of!(UpdateArguments, gradients), GRADIENTS - 1, GRADIENTS);
    update_at.extend([
        DeviceAddress::of(offset_of!(UpdateArguments, weights), held.weights),
        DeviceAddress::of(offset_of!(UpdateArguments, states), held.states[0]),
        DeviceAddress::of(offset_of!(UpdateArguments, states) + 8, held.states[1]),
        DeviceAddress::of(offset_of!(UpdateArguments, sum), accumulator),
        DeviceAddress::of(offset_of!(UpdateArguments, scalars), scalars),
        DeviceAddress::of(offset_of!(UpdateArguments, skip), held.flag),
    ]);
    vec![
        device.prepared("pserver_finite", bytes_of(&finite), &finite_at),
        device.prepared("pserver_scalars", bytes_of(&reckon), &reckon_at),
        device.prepared("pserver_sum_f32", bytes_of(&sum), &sum_at),
        device.prepared(&emitted.update_entry(Float32), bytes_of(&update), &update_at),
    ]
}

/// A step's gradients, small and finite but for one element of the last.
fn gradients(round: usize, is_infinite: bool) -> [Vec<u8>; GRADIENTS] {
    let number = |index: usize| {
        let spread = index.wrapping_mul(2_654_435_761) % 2003;
        bf16::from_f32(f32::from(u16::try_from(spread).expect("it is small")) / 512.0 - 1.9)
    };
    let mut all: [Vec<u8>; GRADIENTS] = std::array::from_fn(|gradient| {
        (0..ELEMENTS).flat_map(|at| number(at + 7919 * (gradient + GRADIENTS * round)).to_le_bytes()).collect()
    });
    if is_infinite {
        all[GRADIENTS - 1][2 * 500..][..2].copy_from_slice(&bf16::INFINITY.to_le_bytes());
    }
    all
}

fn update(
    rule: &Prepared,
    version: u64,
    rate: f64,
    weights: &mut [u8],
    states: &mut [Vec<u8>; 2],
    gradients: &[Vec<u8>; GRADIENTS],
) {
    let step = Step { version: Version(version), rate: Some(rate), scale: SCALE, ..Step::FIRST };
    let mut scalars = Vec::new();
    Plain.update(Update {
        formula: rule.formula(&step, &mut scalars),
        element_type: Float32,
        parameter: weights,
        states: &mut states.each_mut().map(Vec::as_mut_slice),
        gradients: &gradients.each_ref().map(|bytes| Gradient { bytes, element_type: Bfloat16 }),
    });
}

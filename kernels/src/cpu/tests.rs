//! Bits that may not depend on the vector width, nor on how a sum is made.

use multiversion::multiversion;
use proptest::collection::vec;
use proptest::prelude::*;
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Algorithm, Gradient, Prepared, Regularizer, Rule, Step};
use pserver_core::port::{Kernels, Update};

use super::{Cpu, step, sum};

const MAGNITUDES: [f32; 6] = [1.0, 1e-3, 1e-30, 1e-42, 1e20, 1e30];

/// The kernels' loops with only AVX2, on a machine that may have more.
#[multiversion(targets("x86_64+avx2"))]
fn update_narrow(update: &mut Update<'_>) {
    step::update_whole::<f32>(update);
}

fn algorithms() -> [Algorithm; 5] {
    [
        Algorithm::Sgd,
        Algorithm::Momentum { momentum: 0.9, nesterov: true },
        Algorithm::Adadelta { rho: 0.95, epsilon: 1e-6 },
        Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
        Algorithm::Ftrl { learning_rate_power: -0.5, beta: 1.0 },
    ]
}

fn tensor(length: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    vec((-1.0_f32..1.0, 0..MAGNITUDES.len()), length)
        .prop_map(|drawn| drawn.iter().map(|(value, which)| value * MAGNITUDES[*which]).collect())
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The weights and states after `run` has updated `weights` by `gradients`, as bit patterns.
fn updated(rule: &Rule, weights: &[f32], gradients: &[&[u8]], run: impl Fn(&mut Update<'_>)) -> Vec<Vec<u8>> {
    let step = Step { version: Version(2), rate: Some(0.1), norm: None, scale: 0.5 };
    let prepared = Prepared::new(rule.clone()).expect("it is a rule");
    let mut parameter = bytes_of(weights);
    let squares: Vec<f32> = weights.iter().map(|weight| weight * weight).collect();
    let mut states = vec![bytes_of(&squares); rule.states().len()];
    let gradients: Vec<Gradient<'_>> =
        gradients.iter().map(|bytes| Gradient { bytes, element_type: ElementType::Float32 }).collect();
    run(&mut Update {
        rule,
        coefficients: &rule.coefficients(&step),
        arithmetic: prepared.arithmetic(&step, &mut Vec::new()),
        element_type: ElementType::Float32,
        parameter: &mut parameter,
        states: &mut states.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
        gradients: &gradients,
    });
    states.push(parameter);
    states.iter().map(|bytes| without_patterns_of_nan(bytes)).collect()
}

fn without_patterns_of_nan(bytes: &[u8]) -> Vec<u8> {
    let values = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    values.flat_map(|value| if value.is_nan() { f32::NAN } else { value }.to_le_bytes()).collect()
}

proptest! {
    #[test]
    fn every_vector_width_gives_the_same_bits(weights in tensor(1..100), algorithm in 0_usize..5) {
        let rule = Rule {
            algorithm: algorithms()[algorithm].clone(),
            l1: 0.125,
            l2: 0.25,
            regularizer: Regularizer::Decoupled,
            ..Rule::default()
        };
        let gradient = bytes_of(&weights.iter().rev().copied().collect::<Vec<_>>());
        let gradients = [gradient.as_slice()];
        let plain = updated(&rule, &weights, &gradients, step::update_whole::<f32>);
        let narrow = updated(&rule, &weights, &gradients, update_narrow);
        let best = updated(&rule, &weights, &gradients, super::update_wide::<f32>);
        prop_assert_eq!(&plain, &narrow);
        prop_assert_eq!(&plain, &best);
    }

    #[test]
    fn a_sum_made_in_parts_has_the_bits_of_the_whole(
        gradient in tensor(1..70),
        count in 2_usize..20,
        cut in 1_usize..19,
    ) {
        let turned = |by: usize| {
            let mut values = gradient.clone();
            values.rotate_left(by % gradient.len());
            bytes_of(&values)
        };
        let held: Vec<Vec<u8>> = (0..count).map(turned).collect();
        let view = |bytes| Gradient { bytes, element_type: ElementType::Float32 };
        let all: Vec<Gradient<'_>> = held.iter().map(|bytes| view(bytes)).collect();
        let mut whole = vec![0; held[0].len()];
        Cpu.sum(ElementType::Float32, &mut whole, &all);
        let cut = cut.min(count - 1);
        let mut head = vec![0; held[0].len()];
        sum::into_whole::<f32>(&mut head, &all[..cut]);
        let parts: Vec<Gradient<'_>> = std::iter::once(view(&head)).chain(all[cut..].iter().copied()).collect();
        let mut joined = vec![0; held[0].len()];
        Cpu.sum(ElementType::Float32, &mut joined, &parts);
        prop_assert_eq!(whole, joined);
    }
}

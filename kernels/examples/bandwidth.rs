//! How near the CPU kernels come to memory's own speed.
//!
//! `cargo run --release -p pserver-kernels --example bandwidth -- --elements 100000000`
//!
//! Every kernel walks f32 tensors in chunks of 1 MiB on one core, beside a ceiling that touches the same number of
//! tensors with the same pattern (so many read, so many updated in place) and does one addition per tensor and
//! element. Bytes are counted,
//! not measured: every tensor read and every tensor written. Kernel and ceiling alternate; medians of nine.

use std::hint::black_box;
use std::time::Instant;

use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Algorithm, Gradient, Rule, Schedule, Step};
use pserver_core::port::{Kernels, Update};
use pserver_kernels::cpu::Cpu;

const CHUNK_ELEMENTS: usize = 1024 * 1024 / 4;
const ROUNDS: usize = 9;
const SUMMED: usize = 8;

/// One line of the table: what is timed, and what it is compared with.
struct Row {
    name: &'static str,
    algorithm: Option<Algorithm>,
    /// Tensors that are only read.
    read: usize,
    /// Tensors that are read and written.
    updated: usize,
    /// Tensors that are only written.
    written: usize,
}

fn main() {
    let elements = elements_asked();
    println!("{elements} elements of f32 per tensor, chunks of 1 MiB, one core, medians of {ROUNDS}");
    let mut tensors: Vec<Vec<f32>> = (0..=SUMMED).map(|seed| tensor(elements, seed)).collect();
    let copied = copy_speed(&mut tensors);
    println!("memcpy {copied:.1} GB/s (read + written)");
    println!("{:10} {:>9} {:>9} {:>6} {:>9}  hash", "", "GB/s", "ceiling", "ratio", "Gelem/s");
    for row in rows() {
        measure(&row, &mut tensors);
    }
}

fn rows() -> Vec<Row> {
    let updated = |name, algorithm, updated| Row { name, algorithm: Some(algorithm), read: 1, updated, written: 0 };
    let moments = Algorithm::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
    vec![
        updated("sgd", Algorithm::Sgd, 1),
        updated("momentum", Algorithm::Momentum { momentum: 0.9, nesterov: false }, 2),
        updated("adagrad", Algorithm::Adagrad { epsilon: 1e-6 }, 2),
        updated("adam", moments, 3),
        Row { name: "sum of 8", algorithm: None, read: SUMMED, updated: 0, written: 1 },
    ]
}

/// The count after `--elements`; what a small machine can do in seconds when there is none.
fn elements_asked() -> usize {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.as_slice() {
        [_] => 10_000_000,
        [_, flag, count] if flag == "--elements" => count.parse().expect("--elements takes a count"),
        other => panic!("found {other:?}; expected --elements and a count"),
    }
}

fn tensor(elements: usize, seed: usize) -> Vec<f32> {
    (0..elements).map(|index| 1.0 + ((index * 7 + seed * 13) % 1000) as f32 * 1e-3).collect()
}

fn measure(row: &Row, tensors: &mut [Vec<f32>]) {
    let (mut kernel_seconds, mut ceiling_seconds) = (Vec::new(), Vec::new());
    run(row, tensors);
    for _ in 0..ROUNDS {
        kernel_seconds.push(timed(|| run(row, tensors)));
        ceiling_seconds.push(timed(|| ceiling(row, tensors)));
    }
    let (kernel, ceiling) = (median(kernel_seconds), median(ceiling_seconds));
    let elements = tensors[0].len() as f64;
    let bytes = elements * 4.0 * (row.read + 2 * row.updated + row.written) as f64;
    println!(
        "{:10} {:9.1} {:9.1} {:6.2} {:9.2}  {:08x}",
        row.name,
        bytes / kernel * 1e-9,
        bytes / ceiling * 1e-9,
        ceiling / kernel,
        elements / kernel * 1e-9,
        hash(&tensors[0])
    );
}

fn run(row: &Row, tensors: &mut [Vec<f32>]) {
    match &row.algorithm {
        Some(algorithm) => update(algorithm, tensors, row.updated - 1),
        None => sum(tensors),
    }
}

fn update(algorithm: &Algorithm, tensors: &mut [Vec<f32>], state_count: usize) {
    let rule = Rule { algorithm: algorithm.clone(), schedule: Schedule::Const { rate: 1e-3 }, ..Rule::default() };
    let step = Step { version: Version(3), rate: None, norm: None, scale: 0.5 };
    let coefficients = rule.coefficients(&step);
    let (gradient, updated) = tensors.split_last_mut().expect("there are nine tensors");
    let (parameter, states) = updated.split_first_mut().expect("there are nine tensors");
    for start in (0..parameter.len()).step_by(CHUNK_ELEMENTS) {
        let chunk = start..parameter.len().min(start + CHUNK_ELEMENTS);
        let gradients =
            [Gradient { bytes: bytemuck::cast_slice(&gradient[chunk.clone()]), element_type: ElementType::Float32 }];
        let mut states: Vec<&mut [u8]> =
            states[..state_count].iter_mut().map(|state| bytemuck::cast_slice_mut(&mut state[chunk.clone()])).collect();
        Cpu.update(Update {
            rule: &rule,
            coefficients: &coefficients,
            element_type: ElementType::Float32,
            parameter: bytemuck::cast_slice_mut(&mut parameter[chunk]),
            states: &mut states,
            gradients: &gradients,
        });
    }
}

fn sum(tensors: &mut [Vec<f32>]) {
    let (into, summed) = tensors.split_first_mut().expect("there are nine tensors");
    for start in (0..into.len()).step_by(CHUNK_ELEMENTS) {
        let chunk = start..into.len().min(start + CHUNK_ELEMENTS);
        let gradients: Vec<Gradient<'_>> = summed
            .iter()
            .map(|tensor| Gradient {
                bytes: bytemuck::cast_slice(&tensor[chunk.clone()]),
                element_type: ElementType::Float32,
            })
            .collect();
        Cpu.sum(ElementType::Float32, bytemuck::cast_slice_mut(&mut into[chunk]), &gradients);
    }
}

/// The same pattern with hardly any arithmetic.
fn ceiling(row: &Row, tensors: &mut [Vec<f32>]) {
    match (row.updated, tensors) {
        (1, [weight, .., gradient]) => {
            for (weight, gradient) in weight.iter_mut().zip(&*gradient) {
                *weight += gradient;
            }
        }
        (2, [weight, state, .., gradient]) => {
            for ((weight, state), gradient) in weight.iter_mut().zip(state).zip(&*gradient) {
                *weight += gradient;
                *state += gradient;
            }
        }
        (3, [weight, first, second, .., gradient]) => {
            for (((weight, first), second), gradient) in weight.iter_mut().zip(first).zip(second).zip(&*gradient) {
                *weight += gradient;
                *first += gradient;
                *second += gradient;
            }
        }
        (0, [into, a, b, c, d, e, f, g, h]) => {
            let early = a.iter().zip(&*b).zip(&*c).zip(&*d);
            let late = e.iter().zip(&*f).zip(&*g).zip(&*h);
            for (into, ((((a, b), c), d), (((e, f), g), h))) in into.iter_mut().zip(early.zip(late)) {
                *into = ((a + b) + (c + d)) + ((e + f) + (g + h));
            }
        }
        _ => unreachable!("every row has a ceiling"),
    }
}

/// Bytes read and written per second, in units of 10^9, of one copy.
fn copy_speed(tensors: &mut [Vec<f32>]) -> f64 {
    let [to, from, ..] = tensors else { unreachable!("there are nine tensors") };
    to.copy_from_slice(from);
    let seconds = (0..ROUNDS).map(|_| timed(|| black_box(&mut *to).copy_from_slice(from))).collect();
    to.len() as f64 * 8.0 / median(seconds) * 1e-9
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// So that speed is never bought with a different answer.
fn hash(values: &[f32]) -> u32 {
    values.iter().fold(0x811c_9dc5, |hash: u32, value| (hash ^ value.to_bits()).wrapping_mul(0x0100_0193))
}

//! The memory bandwidth of one core.

use std::hint::black_box;
use std::time::Instant;

use pserver_core::dtype::ElementType;
use pserver_core::optim::Gradient;
use pserver_kernels::cpu;

use crate::alternation::BLOCKS_MIN;
use crate::report::{Outcome, Report};
use crate::sizes::{length, show};
use crate::statistics::median;

/// Memory's own speed on one core: payload bytes a second, each byte counted once. That of a copy comes back.
pub(super) fn measure(bytes: u64, report: &mut Report) -> f64 {
    let elements = length(bytes) / 4;
    let (from, mut to) = (vec![1.0_f32; elements], vec![0.0_f32; elements]);
    let copy = timed(bytes, || black_box(&mut to).copy_from_slice(black_box(&from)));
    let memcpy = bytes as f64 / copy;
    let mut line = |name: &str, seconds: f64| {
        let result = Outcome::new(&format!("{name}, {} arrays, one core", show(bytes)))
            .with("bytes", bytes)
            .with("bytes_per_second", bytes as f64 / seconds)
            .with("latency_us_p50", seconds * 1e6)
            .with("ratio_to_raw", bytes as f64 / seconds / memcpy)
            .with("ratio_to_ceiling", 1.0);
        report.push(result);
    };
    line("memcpy", copy);
    let gradient = [Gradient { bytes: bytemuck::cast_slice(&from), element_type: ElementType::Float32 }];
    line(
        "in-place add",
        timed(bytes, || {
            let into = black_box(&mut to);
            into.iter_mut().zip(black_box(&from)).for_each(|(into, from)| *into += from);
        }),
    );
    line(
        "read",
        timed(bytes, || {
            black_box(sum_of(black_box(&from)));
        }),
    );
    let into: &mut [u8] = bytemuck::cast_slice_mut(&mut to);
    line("sum of one", timed(bytes, || cpu::sum(ElementType::Float32, black_box(into), &gradient)));
    memcpy
}

/// Reads every element once, in lanes that no addition waits for another in.
fn sum_of(values: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 64];
    for piece in values.chunks_exact(64) {
        lanes.iter_mut().zip(piece).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().sum()
}

/// The median of several repetitions, each long enough to time.
fn timed(bytes: u64, mut work: impl FnMut()) -> f64 {
    let repetitions = ((64 << 20) / bytes.max(1)).max(1);
    work();
    let samples: Vec<f64> = (0..BLOCKS_MIN)
        .map(|_| {
            let start = Instant::now();
            (0..repetitions).for_each(|_| work());
            start.elapsed().as_secs_f64() / repetitions as f64
        })
        .collect();
    median(&samples)
}

//! Tensors that a kernel walks in the servers' chunks, the same walk without formula, and the plain form's word
//! on what came of it.

use std::hint::black_box;
use std::ops::{Deref, DerefMut};

use bytemuck::{cast_slice, cast_slice_mut};
use memmap2::MmapMut;
use multiversion::multiversion;
use pserver_core::dtype::ElementType;
use pserver_core::optim::{Gradient, Prepared, Rule, Step};
use pserver_core::port::{Kernels, Plain, Update};
use pserver_kernels::cpu::Cpu;

use crate::fused::Fused;

/// Elements of a chunk: 1 MiB.
const CHUNK: usize = 1 << 18;
/// Elements of a piece that still stays in the first-level cache.
const TILE: usize = 1024;
/// Values repeat with this prime period, so one period of the plain form stands for all.
pub(crate) const PERIOD: usize = 1021;
/// How far a kernel in binary32 may be from the plain form in binary64, for values about 1 after some steps: a few
/// roundings of 6e-8 each step, and Adam's quotient adds some more.
const TOLERANCE: f32 = 2e-5;

/// How many tensors are read, read and written, or only written.
#[derive(Clone, Copy)]
pub(crate) struct Streams {
    pub(crate) read: usize,
    pub(crate) updated: usize,
    pub(crate) written: usize,
}

/// A tensor on pages of its own, as a server's chunk of 1 MiB stands. A large `Vec` begins 16 bytes behind a page, so
/// that each vector would be in two cache lines.
struct TensorPages(MmapMut);

impl TensorPages {
    fn new(elements: usize) -> Self {
        Self(MmapMut::map_anon(elements * size_of::<f32>()).expect("there is memory for a tensor"))
    }

    fn filled(elements: usize, seed: usize) -> Self {
        let mut pages = Self::new(elements);
        pages.iter_mut().enumerate().for_each(|(index, element)| *element = value(index, seed));
        pages
    }
}

impl Deref for TensorPages {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        cast_slice(&self.0)
    }
}

impl DerefMut for TensorPages {
    fn deref_mut(&mut self) -> &mut [f32] {
        cast_slice_mut(&mut self.0)
    }
}

/// The tensors of one kernel.
pub(crate) struct Tensors {
    kernels: Cpu,
    rule: Option<Prepared>,
    /// The parameter, then its states; for a sum, where it goes.
    written: Vec<TensorPages>,
    gradients: Vec<TensorPages>,
    /// One period of `written`, reckoned by the plain form.
    plain: Vec<Vec<f32>>,
}

impl Tensors {
    pub(crate) fn new(elements: usize, gradients: usize, rule: Option<Rule>) -> Self {
        let states = rule.as_ref().map_or(0, |rule| rule.states().len());
        let of_states = 0..states;
        let zeros = of_states.clone().map(|_| TensorPages::new(elements));
        let written = std::iter::once(TensorPages::filled(elements, 0)).chain(zeros).collect();
        let period = (0..PERIOD).map(|index| value(index, 0)).collect();
        let plain = std::iter::once(period).chain(of_states.map(|_| vec![0.0; PERIOD])).collect();
        let gradients = (1..=gradients).map(|seed| TensorPages::filled(elements, seed)).collect();
        let rule = rule.map(|rule| Prepared::new(rule).expect("a rule of a message is checked"));
        Self { kernels: Cpu::new(), rule, written, gradients, plain }
    }

    pub(crate) fn streams(&self) -> Streams {
        let read = self.gradients.len();
        match self.rule {
            Some(_) => Streams { read, updated: self.written.len(), written: 0 },
            None => Streams { read, updated: 0, written: 1 },
        }
    }

    pub(crate) fn gradients(&self) -> usize {
        self.gradients.len()
    }

    /// One update of everything by the servers' kernel.
    pub(crate) fn step(&mut self, step: &Step) {
        let elements = self.written[0].len();
        for start in (0..elements).step_by(CHUNK) {
            let range = start..elements.min(start + CHUNK);
            let gradients: Vec<_> = self.gradients.iter().map(|one| gradient(&one[range.clone()])).collect();
            let mut written: Vec<&mut [u8]> =
                self.written.iter_mut().map(|one| cast_slice_mut(&mut one[range.clone()])).collect();
            update(&mut self.kernels, self.rule.as_ref(), step, &mut written, &gradients);
        }
    }

    /// One update of everything by a loop that was written for this optimizer; of one gradient.
    pub(crate) fn step_fused(&mut self, fused: Fused, step: &Step) {
        let mut written: Vec<&mut [f32]> = self.written.iter_mut().map(|one| &mut **one).collect();
        fused.update(step.version.0, &mut written, &self.gradients[0]);
    }

    /// Keeps the plain form at the same step; outside of what is timed.
    pub(crate) fn step_plain(&mut self, step: &Step) {
        let periods: Vec<Vec<f32>> =
            (1..=self.gradients.len()).map(|seed| (0..PERIOD).map(|index| value(index, seed)).collect()).collect();
        let gradients: Vec<_> = periods.iter().map(|one| gradient(one)).collect();
        let mut written: Vec<&mut [u8]> = self.plain.iter_mut().map(|one| cast_slice_mut(one.as_mut_slice())).collect();
        update(&mut Plain, self.rule.as_ref(), step, &mut written, &gradients);
    }

    /// Reads and writes the same tensors with one addition for each element that is read, which leaves every value as
    /// it is; `is_tiled` says how: some lines of each stream in turn, or some pages.
    pub(crate) fn stream(&mut self, is_tiled: bool) {
        let is_sum = self.rule.is_none();
        if is_tiled {
            stream::<TILE>(is_sum, &mut self.written, &self.gradients);
        } else {
            stream::<64>(is_sum, &mut self.written, &self.gradients);
        }
    }

    /// Elements of parameter and states that are not what the plain form says.
    pub(crate) fn wrong(&self) -> u64 {
        let far = |(found, expected): (&f32, &f32)| {
            let distance = (found - expected).abs();
            distance.is_nan() || TOLERANCE * expected.abs().max(1.0) < distance
        };
        let wrong_of = |(found, expected): (&TensorPages, &Vec<f32>)| {
            found.iter().zip(expected.iter().cycle()).filter(|pair| far(*pair)).count()
        };
        let wrong: usize = self.written.iter().zip(&self.plain).map(wrong_of).sum();
        wrong.try_into().expect("a count of elements fits")
    }
}

/// As wide as the machine allows; see the kernels.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl", "x86_64+avx2"))]
fn stream<const WIDTH: usize>(is_sum: bool, written: &mut [TensorPages], gradients: &[TensorPages]) {
    let zero = black_box(0.0_f32);
    let reads: Vec<_> = gradients.iter().map(|one| one.as_chunks::<WIDTH>().0).collect();
    let mut writes: Vec<_> = written.iter_mut().map(|one| one.as_chunks_mut::<WIDTH>().0).collect();
    for piece in 0..writes[0].len() {
        let mut sum = reads[0][piece];
        for read in &reads[1..] {
            sum.iter_mut().zip(&read[piece]).for_each(|(sum, read)| *sum += read);
        }
        for write in &mut writes {
            if is_sum {
                write[piece] = sum;
            } else {
                write[piece].iter_mut().zip(&sum).for_each(|(write, sum)| *write += zero * sum);
            }
        }
    }
}

fn update(
    kernels: &mut dyn Kernels,
    rule: Option<&Prepared>,
    step: &Step,
    written: &mut [&mut [u8]],
    gradients: &[Gradient<'_>],
) {
    let (parameter, states) = written.split_first_mut().expect("there is a parameter");
    let element_type = ElementType::Float32;
    match rule {
        None => kernels.sum(element_type, parameter, gradients),
        Some(rule) => {
            let mut scalars = Vec::new();
            let formula = rule.formula(step, &mut scalars);
            let mut states: Vec<&mut [u8]> = states.iter_mut().map(|state| &mut **state).collect();
            let states = states.as_mut_slice();
            kernels.update(Update { formula, element_type, parameter, states, gradients });
        }
    }
}

fn gradient(values: &[f32]) -> Gradient<'_> {
    Gradient { bytes: cast_slice(values), element_type: ElementType::Float32 }
}

/// A number about 1, which no rule takes near zero within some steps.
pub(crate) fn value(index: usize, seed: usize) -> f32 {
    let scattered = (index % PERIOD * 7 + seed * 13) % 1000;
    1.0 + f32::from(u16::try_from(scattered).expect("it is below 1000")) * 1e-3
}

//! Gradients that are small whole numbers, and the values that must come of them.
//!
//! Gradients repeat with a prime period, which no chunk's length divides, so a chunk that comes back in another's
//! place is seen. Every second round takes back what the first gave, so values stay small and every sum is exact; the
//! round after that starts elsewhere in the period, so a value of another round is seen.
//!
//! All rules work element by element, so values repeat with the same period, and one period of them is reckoned
//! here: for Adam by the servers' own kernels, whose bits do not depend on where a tensor is cut.

use anyhow::{Context, Result};
use half::{bf16, f16};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType;
use pserver_core::ids::Version;
use pserver_core::optim::{Gradient, Rule, Step};
use pserver_core::port::{Kernels, Update};
use pserver_kernels::cpu::Cpu;

use crate::job::{Dtype, Job, RuleName};

/// Elements of a period; a prime.
const PERIOD: usize = 1021;

/// The gradients of a job.
#[derive(Clone, Copy)]
pub(crate) struct Pattern {
    dtype: Dtype,
    trainers: u32,
}

/// The values that every round must give.
pub(crate) struct Expected {
    pattern: Pattern,
    /// None where the value becomes the gradients' sum.
    rule: Option<Rule>,
    value: Vec<u8>,
    states: Vec<Vec<u8>>,
    rounds: u64,
}

impl Pattern {
    pub(crate) fn of(job: &Job) -> Self {
        Self { dtype: job.dtype, trainers: job.trainers }
    }

    /// Writes a trainer's gradient of a round, counted from zero.
    pub(crate) fn fill(&self, trainer: u32, round: u64, into: &mut [u8]) {
        let table = self.gradient(trainer, round);
        for piece in into.chunks_mut(table.len()) {
            piece.copy_from_slice(&table[..piece.len()]);
        }
    }

    /// One period of a gradient.
    fn gradient(&self, trainer: u32, round: u64) -> Vec<u8> {
        let start = usize::try_from((round / 2 * 17 + u64::from(trainer) * 101) % 1021).expect("it is below 1021");
        let sign = if round.is_multiple_of(2) { 1.0 } else { -1.0 };
        let values = (0..PERIOD).map(|index| sign * small((index + start) % PERIOD));
        encode(self.dtype.gradient(), values)
    }
}

impl Expected {
    pub(crate) fn new(job: &Job) -> Result<Self> {
        let pattern = Pattern::of(job);
        let rule = match job.rule {
            RuleName::None | RuleName::Sum => None,
            RuleName::Sgd | RuleName::Adam => {
                Some(OptimizerSettings::from_text(job.rule.text())?.rule.context("the message names a rule")?)
            }
        };
        let zeros = encode(job.dtype.value(), (0..PERIOD).map(|_| 0.0));
        let states = vec![zeros.clone(); rule.as_ref().map_or(0, |rule| rule.states().len())];
        Ok(Self { pattern, rule, value: zeros, states, rounds: 0 })
    }

    /// Goes one round on. Without a barrier between trainers only the sum over many rounds is known; see
    /// [`wrong`](Self::wrong).
    pub(crate) fn advance(&mut self) {
        let tables: Vec<_> =
            (0..self.pattern.trainers).map(|trainer| self.pattern.gradient(trainer, self.rounds)).collect();
        self.rounds += 1;
        let element_type = self.pattern.dtype.gradient();
        let gradients: Vec<_> = tables.iter().map(|bytes| Gradient { bytes, element_type }).collect();
        let element_type = self.pattern.dtype.value();
        match &self.rule {
            None => Cpu.sum(element_type, &mut self.value, &gradients),
            Some(rule) => {
                let step = Step { version: Version(self.rounds), rate: None, norm: None, scale: 1.0 };
                let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
                Cpu.update(Update {
                    rule,
                    coefficients: &rule.coefficients(&step),
                    element_type,
                    parameter: &mut self.value,
                    states: &mut states,
                    gradients: &gradients,
                });
            }
        }
    }

    /// How many elements of a whole value are not what they must be.
    pub(crate) fn wrong(&self, value: &[u8]) -> u64 {
        let element = usize::try_from(self.pattern.dtype.value().bytes()).expect("elements are small");
        let differ = |piece: &[u8]| {
            let pairs = piece.chunks(element).zip(self.value.chunks(element));
            pairs.filter(|(found, expected)| found != expected).count()
        };
        let pieces = value.chunks(self.value.len());
        let wrong = pieces.filter(|piece| **piece != self.value[..piece.len()]).map(differ).sum::<usize>();
        wrong.try_into().expect("a count of elements fits")
    }
}

/// A whole number from 1 to 8, as good as random.
fn small(index: usize) -> f64 {
    let hash = u32::try_from(index).expect("it is below the period").wrapping_mul(0x9e37_79b1) >> 29;
    f64::from(hash + 1)
}

/// Elements of a type from numbers that it holds exactly.
fn encode(element_type: ElementType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        match element_type {
            ElementType::Float64 => bytes.extend(value.to_le_bytes()),
            ElementType::Float16 => bytes.extend(f16::from_f64(value).to_le_bytes()),
            ElementType::Bfloat16 => bytes.extend(bf16::from_f64(value).to_le_bytes()),
            _ => bytes.extend(f32::from_f64(value).to_le_bytes()),
        }
    }
    bytes
}

/// A conversion that rounds, by name.
trait FromF64 {
    fn from_f64(value: f64) -> Self;
}

impl FromF64 for f32 {
    #[expect(clippy::cast_possible_truncation, reason = "small whole numbers are exact in binary32")]
    fn from_f64(value: f64) -> Self {
        value as Self
    }
}

//! Gradients that are small whole numbers, and the values that must come of them.
//!
//! Gradients repeat with a prime period, which no chunk's length divides, so a chunk that comes back in another's
//! place is seen. Every second round takes back what the first gave, so values stay small and every sum is exact; the
//! round after that starts elsewhere in the period, so a value of another round is seen.
//!
//! All rules work element by element, so values repeat with the same period, and one period of them is reckoned
//! here: for Adam by the servers' own kernels, whose bits do not depend on where a tensor is cut.

use std::borrow::Cow;

use anyhow::Result;
use pserver_core::dtype::{ElementType, Half};
use pserver_core::ids::Version;
use pserver_core::narrowing;
use pserver_core::optim::{Gradient, Prepared, Step};
use pserver_core::port::{Kernels, Update};
use pserver_kernels::cpu::{self, Cpu};

use crate::job::{BenchJob, Dtype};

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
    rule: Option<Prepared>,
    half: Option<Half>,
    value: Vec<u8>,
    states: Vec<Vec<u8>>,
    rounds: u64,
    kernels: Cpu,
}

impl Pattern {
    pub(crate) fn of(job: &BenchJob) -> Self {
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
    pub(crate) fn new(job: &BenchJob) -> Result<Self> {
        let pattern = Pattern::of(job);
        let rule = job.rule()?;
        let zeros = encode(job.dtype.value(), (0..PERIOD).map(|_| 0.0));
        let states = vec![zeros.clone(); rule.as_ref().map_or(0, |rule| rule.states().len())];
        Ok(Self { pattern, rule, half: job.half(), value: zeros, states, rounds: 0, kernels: Cpu::new() })
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
            None => cpu::sum(element_type, &mut self.value, &gradients),
            Some(rule) => {
                let step = Step { version: Version(self.rounds), ..Step::FIRST };
                let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
                self.kernels.update(Update {
                    formula: rule.formula(&step, &mut Vec::new()),
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
        let own = self.pattern.dtype.value();
        let element = usize::try_from(self.half.map_or(own, Half::element_type).bytes()).expect("elements are small");
        let expected = self.half.map_or(Cow::Borrowed(&self.value), |half| {
            let mut halves = vec![0; self.value.len() / 2];
            narrowing::narrow_to_half(half, &self.value, &mut halves);
            Cow::Owned(halves)
        });
        let differ = |piece: &[u8]| {
            let pairs = piece.chunks(element).zip(expected.chunks(element));
            pairs.filter(|(found, expected)| found != expected).count()
        };
        let pieces = value.chunks(expected.len());
        let wrong = pieces.filter(|piece| **piece != expected[..piece.len()]).map(differ).sum::<usize>();
        wrong.try_into().expect("a count of elements fits")
    }
}

/// A whole number from 1 to 8, as good as random.
fn small(index: usize) -> f64 {
    let mut hash = u32::try_from(index).expect("it is below the period").wrapping_mul(0x9e37_79b1);
    // A product alone is regular: two shifts of it would agree in half of their places.
    hash = (hash ^ hash >> 15).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    f64::from((hash >> 29) + 1)
}

/// Elements of a type from numbers that it holds exactly.
fn encode(element_type: ElementType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        match element_type {
            ElementType::Float64 => bytes.extend(value.to_le_bytes()),
            ElementType::Float16 | ElementType::Bfloat16 => bytes.extend(narrowing::half_bytes(value, element_type)),
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::job::{Buffers, Checks, ModeName, Poll, RuleName, TransportName};
    use crate::sizes::length;

    pub(crate) fn job(rule: RuleName) -> BenchJob {
        BenchJob {
            transport: TransportName::Tcp,
            trainers: 2,
            servers: 1,
            shards: 1,
            bytes: 64 << 10,
            parameters: 1,
            chunk_bytes: 4096,
            mode: ModeName::Sync,
            staleness: 0,
            checks: Checks::BetweenHosts,
            rdma_device: "auto".to_owned(),
            token_file: None,
            dtype: Dtype::F32,
            values: None,
            rule,
            poll: Poll::Block,
            buffers: Buffers::Ordinary,
            pin: false,
            serve: Vec::new(),
            program: None,
        }
    }

    /// The values of the servers after so many rounds of sums.
    fn summed(job: &BenchJob, rounds: u64) -> Vec<u8> {
        let whole = length(job.bytes);
        let gradients: Vec<_> = (0..job.trainers)
            .map(|trainer| {
                let mut gradient = vec![0; whole];
                Pattern::of(job).fill(trainer, rounds - 1, &mut gradient);
                gradient
            })
            .collect();
        let element_type = ElementType::Float32;
        let gradients: Vec<_> = gradients.iter().map(|bytes| Gradient { bytes, element_type }).collect();
        let mut value = vec![0; whole];
        cpu::sum(element_type, &mut value, &gradients);
        value
    }

    fn expected(job: &BenchJob, rounds: u64) -> Expected {
        let mut expected = Expected::new(job).expect("the rule is known");
        (0..rounds).for_each(|_| expected.advance());
        expected
    }

    #[test]
    fn the_value_of_a_round_is_right_in_that_round_alone() {
        let job = job(RuleName::Sum);
        for rounds in 1..20 {
            assert_eq!(expected(&job, rounds).wrong(&summed(&job, rounds)), 0);
            for other in (1..20).filter(|other| *other != rounds) {
                assert!(expected(&job, other).wrong(&summed(&job, rounds)) > 10_000, "{rounds} passes for {other}");
            }
        }
    }

    #[test]
    fn a_chunk_at_another_chunks_offset_is_counted_as_wrong() {
        let job = job(RuleName::Sum);
        let mut value = summed(&job, 1);
        value.copy_within(0..4096, 4096);
        let wrong = expected(&job, 1).wrong(&value);
        assert!((700..=1024).contains(&wrong), "{wrong} of 1024");
    }

    #[test]
    fn one_wrong_element_is_counted_once() {
        let job = job(RuleName::Sum);
        let mut value = summed(&job, 3);
        let last = value.len() - 1;
        value[last] ^= 1;
        assert_eq!(expected(&job, 3).wrong(&value), 1);
    }

    #[test]
    fn two_rounds_of_sgd_or_of_deltas_restore_the_first_values() {
        let differences = BenchJob { mode: ModeName::Delta, ..job(RuleName::Sum) };
        for job in [job(RuleName::Sgd), differences] {
            assert_eq!(expected(&job, 8).wrong(&vec![0; 64 << 10]), 0);
            assert_ne!(expected(&job, 7).wrong(&vec![0; 64 << 10]), 0);
        }
    }
}

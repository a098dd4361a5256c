//! The compiled programs of a shard: of each the pace of its flow, and its stage, which makes an update of a complete
//! round.
//!
//! A program receives, accumulates and sends in one fixed form, which [`flow`](super::flow) carries out. The ops
//! between the accumulator and `send` are the stage: an optional `scale`, and an `update` by the parameter's rule.

use super::initialisation::ChunkTable;
use super::job::Job;
use super::program::{program_of, rule_of};
use crate::accumulator::AccumulatorPace;
use crate::config::Merge;
use crate::error::Failure;
use crate::program::{Graph, Op, OpKind, Program};

/// The ops between the accumulator and `send`, compiled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stage {
    merge: Merge,
    /// The factor on the merged gradient.
    factor: f64,
}

impl Stage {
    fn compile(merge: Merge, ops: &[&OpKind]) -> Option<Self> {
        match ops {
            [OpKind::Update { .. }] => Some(Self { merge, factor: 1.0 }),
            [OpKind::Scale { factor }, OpKind::Update { .. }] => Some(Self { merge, factor: *factor }),
            _ => None,
        }
    }

    /// The factor on the sum of this many gradients.
    pub(super) fn scale(&self, gradients: usize) -> f64 {
        let mean_over = match self.merge {
            Merge::Mean => u32::try_from(gradients).unwrap_or(u32::MAX),
            Merge::Sum => 1,
        };
        1.0 / f64::from(mean_over) * self.factor
    }
}

/// A compiled program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Flow {
    /// When a round receives a gradient, and when it is complete.
    pub(super) pace: AccumulatorPace,
    pub(super) stage: Stage,
}

impl Flow {
    /// Compiles the endless loop of a server's program.
    ///
    /// # Errors
    /// When the program is malformed, or its loop has another form.
    pub(super) fn compile(program: Program) -> Result<Self, Failure> {
        let graph = Graph::new(program)?;
        let kinds: Vec<&OpKind> = graph.program().blocks[1].ops.iter().map(|Op { kind, .. }| kind).collect();
        let compiled = match kinds.as_slice() {
            [
                OpKind::Recv { .. },
                OpKind::GradientAccumulator { merge, staleness, .. },
                OpKind::StringAccumulator { .. },
                ops @ ..,
                OpKind::Send { .. },
            ] => Stage::compile(*merge, ops).map(|stage| Self { pace: AccumulatorPace::of(*staleness), stage }),
            _ => None,
        };
        compiled.ok_or_else(|| {
            let found: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
            Failure::call(format!(
                "a server's loop has the ops {}; expected recv, gradient_accumulator, string_accumulator, at most one \
                 scale, update, send",
                found.join(", ")
            ))
        })
    }
}

/// Parameters whose programs differ in names, shapes and numbers of the rule only.
#[derive(PartialEq)]
struct ProgramKind {
    states: usize,
    is_float: bool,
}

/// The compiled programs of a shard, and which chunk runs which.
pub(super) struct Flows {
    compiled: Vec<(ProgramKind, Flow)>,
    by_slot_index: Vec<u32>,
}

impl Flows {
    /// Compiles the program of every parameter in a table.
    pub(super) fn new(job: &Job, table: &ChunkTable) -> Result<Self, Failure> {
        let mut new = Self { compiled: Vec::new(), by_slot_index: vec![0; table.chunks.len()] };
        for held in table.parameters.values() {
            let kind = ProgramKind {
                states: rule_of(job, &held.rule).states().len(),
                is_float: held.element_type().is_float(),
            };
            let number = match new.compiled.iter().position(|(one, _)| *one == kind) {
                Some(number) => number,
                None => {
                    let program = program_of(job, held);
                    let (name, text) = (held.name(), program.to_string());
                    let lines = text.lines().count();
                    tracing::info!("parameter {name:?}, and all like it, run a program of {lines} lines");
                    tracing::debug!("the program of parameter {name:?}:\n{text}");
                    new.compiled.push((kind, Flow::compile(program)?));
                    new.compiled.len() - 1
                }
            };
            let number = u32::try_from(number).expect("there are few kinds");
            held.chunks.iter().for_each(|slot_index| new.by_slot_index[*slot_index] = number);
        }
        Ok(new)
    }

    /// The flow of a chunk.
    #[inline]
    pub(super) fn of(&self, slot_index: usize) -> &Flow {
        &self.compiled[self.by_slot_index[slot_index] as usize].1
    }
}

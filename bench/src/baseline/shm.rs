//! The baseline server through shared memory: counters, and nothing else.
//!
//! Every trainer has a region for its gradient, the server one for the value, which is also where it is kept. A
//! trainer counts the chunks it has posted, the server the chunks it has summed. With copies a trainer's region is a
//! few slots that stay in the cache; in place it holds the whole gradient, and a round moves nothing but counters.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pserver_core::optim::Gradient;
use pserver_kernels::cpu;

use super::shared::Region;
use super::turns::Counter;
use super::{BaselinePlan, Shape};
use crate::child;
use crate::sizes::length;
use crate::trainer::Exchange;

/// Slots of a trainer that copies.
const SLOTS: usize = 4;
/// Counters in the value's region: what is summed, then each trainer's posts.
const SUMMED: Counter = Counter::at(0);

fn posted(trainer: usize) -> Counter {
    Counter::at(1 + trainer)
}

/// The regions of a run, held by the parent: the value's, then each trainer's.
pub(crate) fn regions(plan: &BaselinePlan) -> Result<Vec<(Region, String)>> {
    let whole = length(plan.gradient_bytes());
    let slots = if plan.shape == Shape::ShmInPlace { whole } else { SLOTS * plan.gradient_span(0).len() };
    let sizes = std::iter::once(length(plan.bytes)).chain((0..plan.trainers).map(|_| slots));
    sizes.map(Region::create).collect()
}

/// The server's process.
pub(crate) fn serve(plan: &BaselinePlan) -> Result<()> {
    let plan = plan.clone();
    let mut regions = open(&plan)?;
    std::thread::Builder::new()
        .name("baseline-shm".to_owned())
        .spawn(move || {
            let (value, gradients) = regions.split_first_mut().expect("there is the value's");
            sum(&plan, value, gradients);
        })
        .context("no thread")?;
    child::serve_usage("shm")
}

fn open(plan: &BaselinePlan) -> Result<Vec<Region>> {
    plan.regions.iter().map(|path| Region::open(path)).collect()
}

/// Sums chunk after chunk, for ever.
fn sum(plan: &BaselinePlan, value: &mut Region, gradients: &[Region]) {
    let chunks = plan.chunks();
    for count in 1_u32.. {
        let chunk = usize::try_from(count - 1).expect("a count fits") % chunks;
        for trainer in 0..gradients.len() {
            posted(trainer).wait(value, count, plan.poll);
        }
        let slot = slot(plan, chunk);
        if let ([alone], true) = (gradients, plan.dtype.gradient() == plan.dtype.value()) {
            // The sum of one is a copy.
            value.bytes_mut(plan.span(chunk)).copy_from_slice(alone.bytes(slot));
            SUMMED.add(value, 1);
            continue;
        }
        let gradients: Vec<_> = gradients
            .iter()
            .map(|region| Gradient { bytes: region.bytes(slot.clone()), element_type: plan.dtype.gradient() })
            .collect();
        cpu::sum(plan.dtype.value(), value.bytes_mut(plan.span(chunk)), &gradients);
        SUMMED.add(value, 1);
    }
}

/// Where a chunk's gradient stands in its trainer's region.
fn slot(plan: &BaselinePlan, chunk: usize) -> Range<usize> {
    let span = plan.gradient_span(chunk);
    if plan.shape == Shape::ShmInPlace {
        return span;
    }
    let start = chunk % SLOTS * plan.gradient_span(0).len();
    start..start + span.len()
}

/// A trainer's end.
pub(crate) struct ShmTrainer {
    plan: BaselinePlan,
    trainer: usize,
    value: Region,
    own: Region,
    /// The caller's memory, where it is copied from and to; in place the regions themselves are the caller's.
    gradient: Vec<u8>,
    result: Vec<u8>,
    /// Chunks summed when the last round ended.
    summed: u32,
}

impl ShmTrainer {
    pub(crate) fn new(plan: &BaselinePlan, trainer: u32) -> Result<Self> {
        let trainer = usize::try_from(trainer)?;
        let value = Region::open(&plan.regions[0])?;
        let own = Region::open(&plan.regions[1 + trainer])?;
        let is_copied = plan.shape != Shape::ShmInPlace;
        let buffer = |bytes| if is_copied { vec![0; length(bytes)] } else { Vec::new() };
        let (gradient, result) = (buffer(plan.gradient_bytes()), buffer(plan.bytes));
        Ok(Self { plan: plan.clone(), trainer, value, own, gradient, result, summed: 0 })
    }

    /// Copies in, copies out, and waits only when neither is possible.
    fn copy_round(&mut self) {
        let chunks = self.plan.chunks();
        let (mut sent, mut got) = (0, 0);
        while got < chunks {
            let goal = self.summed.wrapping_add(1);
            let is_there = SUMMED.is_at(&self.value, goal);
            if !is_there && sent < chunks && sent - got < SLOTS {
                self.own
                    .bytes_mut(slot(&self.plan, sent))
                    .copy_from_slice(&self.gradient[self.plan.gradient_span(sent)]);
                posted(self.trainer).add(&self.value, 1);
                sent += 1;
                continue;
            }
            if !is_there {
                SUMMED.wait(&self.value, goal, self.plan.poll);
            }
            let span = self.plan.span(got);
            self.result[span.clone()].copy_from_slice(self.value.bytes(span));
            self.summed = goal;
            got += 1;
        }
    }

    fn place_round(&mut self) {
        let chunks = u32::try_from(self.plan.chunks()).expect("chunks are few");
        posted(self.trainer).add(&self.value, chunks);
        self.summed = self.summed.wrapping_add(chunks);
        SUMMED.wait(&self.value, self.summed, self.plan.poll);
    }
}

impl Exchange for ShmTrainer {
    fn gradient(&mut self) -> &mut [u8] {
        let whole = 0..length(self.plan.gradient_bytes());
        if self.plan.shape == Shape::ShmInPlace { self.own.bytes_mut(whole) } else { &mut self.gradient }
    }

    fn round(&mut self, begin: &mut dyn FnMut() -> Instant) -> Result<Duration> {
        let start = begin();
        match self.plan.shape {
            Shape::ShmInPlace => self.place_round(),
            Shape::ShmCopy | Shape::Tcp => self.copy_round(),
        }
        Ok(start.elapsed())
    }

    fn value(&mut self) -> &[u8] {
        if self.plan.shape == Shape::ShmInPlace { self.value.bytes(0..length(self.plan.bytes)) } else { &self.result }
    }

    fn settle(&mut self) -> Result<()> {
        Ok(())
    }
}

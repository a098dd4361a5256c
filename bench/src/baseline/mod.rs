//! The baseline servers: for each path the simplest program that gets sums from trainers to trainers. They have no
//! protocol, no names, no retries and one parameter, and are what the parameter server is compared with.
//!
//! They keep the sum, as a parameter server must: each holds the whole value in memory of its own.

pub(crate) mod link;
mod shared;
pub(crate) mod shm;
pub(crate) mod tcp;
pub(crate) mod turns;
mod wire;

use std::ops::Range;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::job::{BenchJob, Buffers, Dtype, Poll, TransportName};
use crate::sizes::length;
use crate::trainer::{Exchange, Runner};

pub(crate) use shared::Region;

use turns::Barrier;

/// A path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Shape {
    /// A socket for each trainer.
    Tcp,
    /// Shared memory, one copy each way.
    ShmCopy,
    /// Shared memory without copies.
    ShmInPlace,
}

/// The plan of a baseline run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BaselinePlan {
    pub(crate) shape: Shape,
    pub(crate) bytes: u64,
    pub(crate) chunk_bytes: u64,
    /// Bytes of a parameter. Over TCP trainers send and receive pieces of this length, as the memory of many parameters
    /// is. The server keeps all parameters side by side.
    pub(crate) piece_bytes: u64,
    pub(crate) trainers: u32,
    pub(crate) dtype: Dtype,
    pub(crate) poll: Poll,
    /// Where the server listens.
    pub(crate) address: String,
    /// Shared memory: the value's, then each trainer's.
    pub(crate) regions: Vec<String>,
}

impl Shape {
    /// The path that a job is compared with.
    pub(crate) fn of(job: &BenchJob) -> Self {
        match (job.transport, job.buffers) {
            // Within one process a payload is copied once each way, too.
            (TransportName::Shm, Buffers::Ordinary | Buffers::Own) | (TransportName::Loopback, _) => Self::ShmCopy,
            (TransportName::Shm, Buffers::Registered) => Self::ShmInPlace,
            _ => Self::Tcp,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "baseline tcp",
            Self::ShmCopy => "baseline shm, a copy each way",
            Self::ShmInPlace => "baseline shm, in place",
        }
    }
}

impl BaselinePlan {
    pub(crate) fn new(shape: Shape, job: &BenchJob, chunk_bytes: u64) -> Self {
        let element = job.dtype.value().bytes();
        Self {
            shape,
            bytes: job.bytes,
            piece_bytes: (job.bytes / u64::from(job.parameters)).next_multiple_of(element),
            chunk_bytes: chunk_bytes.next_multiple_of(element).min(job.bytes),
            trainers: job.trainers,
            dtype: job.dtype,
            poll: job.poll,
            address: String::new(),
            regions: Vec::new(),
        }
    }

    fn chunks(&self) -> usize {
        length(self.bytes.div_ceil(self.chunk_bytes))
    }

    fn gradient_bytes(&self) -> u64 {
        self.bytes / self.dtype.value().bytes() * self.dtype.gradient().bytes()
    }

    /// A chunk's place in the value.
    fn span(&self, chunk: usize) -> Range<usize> {
        let (all, each) = (length(self.bytes), length(self.chunk_bytes));
        chunk * each..all.min((chunk + 1) * each)
    }

    /// A chunk's place in a gradient.
    fn gradient_span(&self, chunk: usize) -> Range<usize> {
        let (value, gradient) = (length(self.dtype.value().bytes()), length(self.dtype.gradient().bytes()));
        let span = self.span(chunk);
        span.start / value * gradient..span.end / value * gradient
    }
}

/// The server's process.
pub(crate) fn serve(plan: &BaselinePlan) -> Result<()> {
    if plan.shape == Shape::Tcp { tcp::serve(plan) } else { shm::serve(plan) }
}

/// A trainer's process.
pub(crate) fn train(plan: &BaselinePlan, job: &BenchJob, trainer: u32, barrier: Barrier) -> Result<()> {
    let mut exchange: Box<dyn Exchange> = match plan.shape {
        Shape::Tcp => Box::new(tcp::TcpTrainer::new(plan, trainer)?),
        Shape::ShmCopy | Shape::ShmInPlace => Box::new(shm::ShmTrainer::new(plan, trainer)?),
    };
    Runner::new(exchange.as_mut(), job, trainer, barrier)?.serve()
}

/// The barrier of a run's trainers, behind a path or none.
pub(crate) fn barrier(path: Option<&str>, job: &BenchJob) -> Result<Barrier> {
    let region = path.map(Region::open).transpose()?;
    Ok(Barrier::new(region, job.trainers, job.poll))
}

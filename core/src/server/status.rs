//! Summary of a shard's contents, for logs, and its report, for people and monitoring.

use std::fmt;

use super::bucket::Bucket;
use super::programs::ShardProgram;
use super::report::{MemoryReport, ProgramReport, ShardPhase, ShardReport, WaitReport};
use super::serving::Serving;
use super::shard::{Phase, Shard};
use crate::ids::{Generation, Version};
use crate::port::EndKind;
use crate::time::Now;

/// Summary of a shard's contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardStatus {
    /// Zero before initialisation.
    pub generation: Generation,
    /// Chunks held.
    pub chunks: u64,
    /// Bytes of values held; of a bucket those of its rows.
    pub bytes: u64,
    /// The least version of any chunk.
    pub slowest: Version,
    /// The greatest version of any chunk.
    pub fastest: Version,
}

impl fmt::Display for ShardStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} chunks, {} bytes, versions {} to {}", self.chunks, self.bytes, self.slowest, self.fastest)
    }
}

impl Shard {
    /// A summary of the shard's contents for logs.
    #[must_use]
    pub fn status(&self) -> ShardStatus {
        ShardStatus::of(self)
    }
}

impl Shard {
    /// A report of the shard.
    #[must_use]
    pub fn report(&self, now: Now) -> ShardReport {
        let ShardStatus { generation, chunks, bytes, slowest, fastest } = self.status();
        let memory = self.pool.mapped.iter();
        let (phase, serving) = match &self.phase {
            Phase::Empty => (ShardPhase::Empty, None),
            Phase::Filling(_) => (ShardPhase::Initialising, None),
            Phase::Serving(serving) => (ShardPhase::Serving, Some(serving)),
        };
        ShardReport {
            phase,
            generation: generation.0,
            chunks,
            value_bytes: bytes,
            slowest_version: slowest.0,
            fastest_version: fastest.0,
            memory: memory
                .map(|(reason, bytes)| MemoryReport { reason: (*reason).to_owned(), bytes: *bytes })
                .collect(),
            trainers: self.trainers.connections().collect(),
            waiting_requests: serving.map_or(0, |serving| serving.waits.per_peer.values().sum::<usize>() as u64),
            wait: serving.and_then(|serving| self.wait(serving, now)),
            journal_position: self.journal_position(),
            programs: serving.map_or_else(Vec::new, |serving| serving.program_reports()),
        }
    }

    /// The least version of any chunk. Those of a hosted program count items, and one of them never changes.
    fn slowest(&self) -> Version {
        let Phase::Serving(serving) = &self.phase else { return Version(0) };
        let table = &serving.table;
        let own = table.chunks.slot_indices().filter(|slot_index| serving.programs.of(*slot_index).is_none());
        own.map(|slot_index| table.chunks[slot_index].version).min().unwrap_or_default()
    }

    fn wait(&self, serving: &Serving, now: Now) -> Option<WaitReport> {
        let (since, slot_index) = serving.waits.by_time.first().copied()?;
        Some(WaitReport {
            milliseconds: u64::try_from(since.until(now).as_millis()).unwrap_or(u64::MAX),
            text: serving.wait_text(now, &self.trainers, slot_index),
            trainers: serving.missing(slot_index).into_iter().map(|trainer| trainer.0).collect(),
        })
    }
}

impl Serving {
    fn program_reports(&self) -> Vec<ProgramReport> {
        let report = |program: &ShardProgram| {
            let ends = program.program.ends().iter().zip(&program.slots);
            let inputs = ends.filter(|(end, _)| matches!(end.kind, EndKind::Input(_)));
            let name = self.table.held(self.table.chunks[program.slot].id).name().to_owned();
            let items = inputs.map(|(_, slots)| self.table.chunks[slots[0]].version.0).sum();
            ProgramReport { name, items, state: program.state() }
        };
        self.programs.all.iter().map(report).collect()
    }
}

impl ShardStatus {
    fn of(shard: &Shard) -> Self {
        let (generation, chunks) = match &shard.phase {
            Phase::Serving(serving) => (serving.table.generation, serving.table.chunks.iter()),
            Phase::Filling(table) => (Generation(0), table.chunks.iter()),
            Phase::Empty => (Generation(0), [].iter()),
        };
        Self {
            generation,
            chunks: chunks.len() as u64,
            bytes: chunks.clone().map(|chunk| chunk.bucket().map_or(chunk.bytes.into(), Bucket::value_bytes)).sum(),
            slowest: shard.slowest(),
            fastest: chunks.map(|chunk| chunk.version).max().unwrap_or_default(),
        }
    }
}

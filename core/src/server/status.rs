//! Summary of a shard's contents, for logs.

use std::fmt;

use super::bucket::Bucket;
use super::shard::{Phase, Shard};
use crate::ids::{Generation, Version};

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

impl ShardStatus {
    fn of(shard: &Shard) -> Self {
        let (generation, chunks) = match &shard.phase {
            Phase::Serving(serving) => (serving.table.generation, serving.table.chunks.as_slice()),
            Phase::Filling(table) => (Generation(0), table.chunks.as_slice()),
            Phase::Empty => (Generation(0), [].as_slice()),
        };
        Self {
            generation,
            chunks: chunks.len() as u64,
            bytes: chunks.iter().map(|chunk| chunk.bucket().map_or(chunk.bytes.into(), Bucket::value_bytes)).sum(),
            slowest: chunks.iter().map(|chunk| chunk.version).min().unwrap_or_default(),
            fastest: chunks.iter().map(|chunk| chunk.version).max().unwrap_or_default(),
        }
    }
}

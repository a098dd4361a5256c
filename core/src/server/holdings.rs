//! The parameters of a shard's table as sizes.

use super::bucket::Bucket;
use super::chunk::Chunk;
use super::initialisation::ChunkTable;
use super::job::Job;
use super::needs::Holdings;

impl Holdings {
    /// The holdings of a shard.
    pub(super) fn of(table: &ChunkTable, job: &Job) -> Self {
        Self::counted(table, job, Bucket::row_count)
    }

    /// The holdings of a shard when its tables have all declared rows.
    pub(super) fn declared(table: &ChunkTable, job: &Job) -> Self {
        Self::counted(table, job, Bucket::declared_rows)
    }

    fn counted(table: &ChunkTable, job: &Job, rows: fn(&Bucket) -> u64) -> Self {
        let mut held = Self::new(job.trainers);
        for chunk in &table.chunks {
            let states = state_count(table, job, chunk);
            match chunk.bucket() {
                Some(bucket) => held.add_rows(bucket.row_bytes(), states, rows(bucket), 1),
                None => held.add_chunks(chunk.bytes, states, 1),
            }
        }
        held
    }
}

/// How many states a chunk has in a job.
fn state_count(table: &ChunkTable, job: &Job, chunk: &Chunk) -> u64 {
    u64::try_from(job.rule_of(&table.held(chunk.id).rule).states().len()).unwrap_or(u64::MAX)
}

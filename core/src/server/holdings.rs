//! The parameters of a shard's table as sizes.

use super::bucket::Bucket;
use super::chunk::Chunk;
use super::chunk_table::ChunkTable;
use super::job::Job;
use super::needs::Holdings;
use super::serving::Serving;

impl Holdings {
    /// The dense chunks of a shard.
    pub(super) fn of_dense(table: &ChunkTable, job: &Job) -> Self {
        let mut held = Self::new(job.trainers);
        for chunk in table.chunks.iter().filter(|chunk| chunk.bucket().is_none()) {
            held.add_chunks(chunk.bytes, state_count(table, job, chunk), 1);
        }
        held
    }

    /// The holdings of a shard with the rows that its tables were given.
    pub(super) fn initial(table: &ChunkTable, job: &Job) -> Self {
        let mut held = Self::of_dense(table, job);
        held.add_buckets(table, job, Bucket::row_count);
        held
    }

    /// The holdings of a shard when its tables have all declared rows.
    pub(super) fn declared(table: &ChunkTable, job: &Job) -> Self {
        let mut held = Self::of_dense(table, job);
        held.add_buckets(table, job, Bucket::declared_rows);
        held
    }

    fn add_buckets(&mut self, table: &ChunkTable, job: &Job, rows: fn(&Bucket) -> u64) {
        for chunk in table.chunks.iter().filter(|_| table.has_rows) {
            if let Some(bucket) = chunk.bucket() {
                self.add_rows(bucket.row_bytes(), state_count(table, job, chunk), rows(bucket), 1);
            }
        }
    }
}

impl Serving {
    /// The shard's holdings. The disk's room is compared with them after each piece of journal, so that only tables,
    /// which grow, are counted anew.
    pub(super) fn holdings(&self) -> Holdings {
        let mut held = self.dense.clone();
        held.add_buckets(&self.table, &self.job, Bucket::row_count);
        held
    }
}

/// How many states a chunk has in a job.
fn state_count(table: &ChunkTable, job: &Job, chunk: &Chunk) -> u64 {
    u64::try_from(job.rule_of(&table.held(chunk.id).rule).states().len()).unwrap_or(u64::MAX)
}

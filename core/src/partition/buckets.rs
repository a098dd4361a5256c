//! Buckets: the chunks of a sparse parameter, to which rows are distributed by a hash of their id.

use super::topology::Topology;
use crate::limits::BUCKETS_MAX;

/// Size of a sparse parameter for placement. Its shape is `[height, width]`, with height zero when every id is valid,
/// and its length is that of `rows` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// The number of rows in all buckets together, at most.
    pub rows: u64,
    /// How many buckets there are: 1 to [`BUCKETS_MAX`].
    pub count: u32,
}

/// About as many buckets of a parameter are on each shard: enough for pulls and checkpoints to take turns, and few
/// enough to keep a push small that has no row for most of them.
const BUCKETS_PER_SHARD: u64 = 4;
/// The least number of buckets of a parameter, so that a job has the same buckets on one shard as on four.
const BUCKETS_WANTED: u64 = 16;

impl Buckets {
    /// Default count of buckets: a multiple of the shards, so that every shard has equally many where servers have
    /// equal shards.
    #[must_use]
    pub fn suiting(topology: &Topology) -> u32 {
        let shards = topology.shard_ids().count() as u64;
        let each = BUCKETS_WANTED.div_ceil(shards).max(BUCKETS_PER_SHARD);
        u32::try_from(shards * each).map_or(BUCKETS_MAX, |count| count.min(BUCKETS_MAX))
    }

    /// The bucket of a row. Consecutive ids are in unrelated buckets.
    #[must_use]
    pub fn of(self, id: u64) -> u32 {
        let bucket = (u128::from(scatter(id)) * u128::from(self.count)) >> 64;
        u32::try_from(bucket).expect("less than the number of buckets")
    }

    /// The most rows of one bucket: its mean share and six standard deviations. A parameter's only bucket may have
    /// exactly as many as the parameter.
    #[must_use]
    pub fn rows_in_each(self) -> u64 {
        let share = self.rows.div_ceil(self.count.into());
        if self.count == 1 { share } else { share.saturating_add(6 * (share.isqrt() + 1)).min(self.rows) }
    }
}

/// A one-to-one hash of 64 bits: the finalizer of MurmurHash3 (Appleby). Tables hash ids within a bucket by another
/// function, because all rows of a bucket would collide with this one.
const fn scatter(id: u64) -> u64 {
    let value = (id ^ id >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let value = (value ^ value >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ value >> 33
}

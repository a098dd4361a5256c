//! Buckets: the chunks of a sparse parameter, to which rows are distributed by a hash of their id.

use super::topology::Topology;
use crate::limits::BUCKETS_MAX;

/// Size of a sparse parameter for placement. Its shape is `[height, width]`, with height zero when every id is valid,
/// and its length is that of `rows` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// The rows that may come to be, in all buckets together.
    pub rows: u64,
    /// How many buckets there are: 1 to [`BUCKETS_MAX`].
    pub count: u32,
}

/// A shard has about so many buckets of a parameter: enough for pulls and checkpoints to take turns, and few enough
/// for a push that concerns none of their rows to be small.
const BUCKETS_PER_SHARD: u64 = 4;
/// And a parameter at least so many, so that a job on one shard is cut as one on four is.
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

    /// The bucket of a row. Ids that follow each other, and those that are asked for most, land anywhere.
    #[must_use]
    pub fn of(self, id: u64) -> u32 {
        let bucket = (u128::from(scatter(id)) * u128::from(self.count)) >> 64;
        u32::try_from(bucket).expect("less than the number of buckets")
    }

    /// The rows that one bucket may have: its share, and six standard deviations of the share that chance gives it.
    /// The one bucket of a parameter that has one may have exactly as many as the parameter.
    #[must_use]
    pub fn rows_in_each(self) -> u64 {
        let share = self.rows.div_ceil(self.count.into());
        if self.count == 1 { share } else { share.saturating_add(6 * (share.isqrt() + 1)).min(self.rows) }
    }
}

/// A one-to-one scattering of 64 bits: the finalizer of MurmurHash3 (Appleby). Tables scatter ids within a bucket by
/// another one, or all rows of a bucket would collide there.
const fn scatter(id: u64) -> u64 {
    let value = (id ^ id >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let value = (value ^ value >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ value >> 33
}

//! Room on the disk: what a shard's files take there, and what its journal leaves free.

use super::manifest;
use super::owner::Folder;

/// The journal leaves so much free beside the next checkpoint: a restart writes files of its owner and coordinator.
pub const RESERVE_BYTES: u64 = 2 * 1024 * 1024;
/// The journal between two checkpoints has at least so much room.
const JOURNAL_BYTES_LEAST: u64 = 4 * 1024 * 1024;
/// So much is journalled before the disk is looked at again.
pub const LOOK_BYTES: u64 = 512 * 1024;

/// Room for the journal between two checkpoints of a shard with so many bytes of values. The first one has the values.
#[must_use]
pub fn journal_room(values: u64) -> u64 {
    values.max(JOURNAL_BYTES_LEAST)
}

/// Bytes of the disk that a shard needs: two checkpoints that are kept, one that is written, the journal from the
/// oldest of them on, and the reserve.
#[must_use]
pub fn disk_need(checkpoint: u64, values: u64, has_journal: bool) -> u64 {
    let journal = if has_journal { journal_room(values) } else { 0 };
    checkpoint.saturating_add(journal).saturating_mul(3).saturating_add(RESERVE_BYTES)
}

impl Folder {
    /// How many whole checkpoints of this shard are on the disk, at most the two that are kept.
    #[must_use]
    pub fn checkpoints(&self) -> u64 {
        manifest::names(&*self.storage, &self.directory).map_or(0, |names| names.len().min(2) as u64)
    }

    /// This shard's part of the bytes that are free on the disk, where that is known.
    #[must_use]
    pub fn free(&self) -> Option<u64> {
        Some(self.storage.free()? / u64::from(self.identity.shards.max(1)))
    }
}

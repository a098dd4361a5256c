//! Room on the disk: what a shard's files take there, and what its journal leaves free.

use super::manifest;
use super::owner::{Folder, shard_directory};
use super::storage::join;

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

    /// This shard's part of the disk: of the bytes that are free, and of those that files of its server have. Another
    /// shard may have written its values and its first checkpoint already. None where it is not known.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        let bytes = |path: &str| Some(self.storage.find(path).ok()?.map_or(0, |file| file.len()));
        let of = |shard| {
            let directory = shard_directory(self.identity.server, shard);
            let names = self.storage.list(&directory).ok()?;
            names.iter().map(|name| bytes(&join(&directory, name))).sum::<Option<u64>>()
        };
        let taken = (0..self.sharers).map(of).sum::<Option<u64>>()?;
        Some(self.storage.free()?.saturating_add(taken) / u64::from(self.sharers.max(1)))
    }

    /// This shard's part of the bytes that are free on the disk, where that is known.
    #[must_use]
    pub fn free(&self) -> Option<u64> {
        Some(self.storage.free()? / u64::from(self.sharers.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::checkpoint::owner::ShardIdentity;
    use crate::checkpoint::storage::{InMemory, Storage};

    #[test]
    fn files_of_other_shards_take_nothing_of_a_shards_room() {
        let memory = InMemory::default();
        memory.set_room(1000);
        let storage: Arc<dyn Storage> = Arc::new(memory);
        let of = |shard| {
            let identity = ShardIdentity { job: 1, server: 0, shard };
            Folder { sharers: 2, ..Folder::first(Arc::clone(&storage), identity) }
        };
        let before = of(0).room().expect("it is known");
        let file = join(of(1).directory(), "checkpoint-of-the-other");
        storage.create(&file).and_then(|mut file| file.write(&[&[0; 400]])).expect("there is room");
        assert_eq!(of(0).room(), Some(before));
        assert_eq!(of(0).free(), Some(before - 200));
        // Files of another server are not in its room.
        let file = join(&shard_directory(1, 0), "checkpoint-of-a-neighbour");
        storage.create(&file).and_then(|mut file| file.write(&[&[0; 100]])).expect("there is room");
        assert_eq!(of(0).room(), Some(before - 50));
    }
}

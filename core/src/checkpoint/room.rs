//! Room on the disk: what a shard's files take there, and what its journal leaves free.

use super::manifest;
use super::owner::Folder;
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

    /// The bytes of the disk that there are for the shard: free ones that the other shards of the process leave, and
    /// those of its own files, which are replaced. Where its files of so many bytes fit, it needs the free part from
    /// now on. None where it is not known.
    #[must_use]
    pub fn room_for(&self, bytes: u64) -> Option<u64> {
        let length = |name: &String| {
            let path = join(&self.directory, name);
            Some(self.storage.find(&path).ok()?.map_or(0, |file| file.len()))
        };
        let own = self.storage.list(&self.directory).ok()?.iter().map(length).sum::<Option<u64>>()?;
        let room = self.free()?.saturating_add(own);
        if bytes <= room {
            self.need(bytes.saturating_sub(own));
        }
        Some(room)
    }

    /// Says how many bytes of the disk the shard needs to be free.
    pub fn need(&self, bytes: u64) {
        self.need.set(bytes);
    }

    /// The bytes that are free on the disk and that the other shards of the process leave, where that is known.
    #[must_use]
    pub fn free(&self) -> Option<u64> {
        Some(self.need.left_of(self.storage.free()?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::checkpoint::owner::ShardIdentity;
    use crate::checkpoint::storage::{InMemory, Storage};
    use crate::shares::SharedNeeds;

    #[test]
    fn a_shard_may_use_the_disk_space_that_the_other_shards_do_not_need() {
        let memory = InMemory::default();
        memory.set_room(1000);
        let (storage, needs): (Arc<dyn Storage>, _) = (Arc::new(memory), SharedNeeds::default());
        let of = |shard| {
            let identity = ShardIdentity { job: 1, server: 0, shard };
            Folder { need: needs.shard(), ..Folder::first(Arc::clone(&storage), identity) }
        };
        let (one, other) = (of(0), of(1));
        let all = one.room_for(300).expect("it is known");
        assert_eq!(other.free(), Some(all - 300));
        other.need(500);
        assert_eq!((one.free(), one.room_for(300)), (Some(all - 500), Some(all - 500)));
        // A file takes space of the disk, and its shard needs less from then on.
        let file = join(other.directory(), "checkpoint-of-the-other");
        storage.create(&file).and_then(|mut file| file.write(&[&[0; 400]])).expect("there is room");
        other.need(100);
        assert_eq!(one.free(), Some(all - 500));
        // The shard's own files count as space, because they are replaced, and the shard needs only the rest.
        assert_eq!(other.room_for(500), Some(all - 300));
        assert_eq!(one.free(), Some(all - 500));
        // A refused need is not recorded.
        assert_eq!(other.room_for(all), Some(all - 300));
        assert_eq!(one.free(), Some(all - 500));
    }
}

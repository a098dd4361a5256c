//! Needs of the shards of a process of a thing that they share: memory of the host or of a device under one limit, or
//! room on a disk. Each shard says its need, and has the rest that the others leave.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The needs of all shards of a process. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SharedNeeds(Arc<Mutex<Vec<Weak<AtomicU64>>>>);

/// The need of one shard, in bytes: zero until it is said, and forgotten with the last clone.
#[derive(Clone, Debug, Default)]
pub struct ShardNeed {
    all: SharedNeeds,
    own: Arc<AtomicU64>,
}

impl SharedNeeds {
    /// The need of one more shard.
    #[must_use]
    pub fn shard(&self) -> ShardNeed {
        let own = Arc::new(AtomicU64::new(0));
        let mut needs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        needs.retain(|one| one.strong_count() > 0);
        needs.push(Arc::downgrade(&own));
        ShardNeed { all: self.clone(), own }
    }
}

impl ShardNeed {
    /// Replaces the need.
    pub fn set(&self, bytes: u64) {
        self.own.store(bytes, Relaxed);
    }

    /// Replaces the need, unless the other shards leave less of so many bytes; false then.
    #[must_use]
    pub fn try_set(&self, need: u64, of: u64) -> bool {
        let needs = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = need <= self.left(&needs, of);
        if fits {
            self.set(need);
        }
        fits
    }

    /// The rest of so many bytes that the other shards leave.
    #[must_use]
    pub fn left_of(&self, bytes: u64) -> u64 {
        self.left(&self.all.0.lock().unwrap_or_else(PoisonError::into_inner), bytes)
    }

    fn left(&self, needs: &[Weak<AtomicU64>], bytes: u64) -> u64 {
        let others = needs.iter().filter_map(Weak::upgrade).filter(|one| !Arc::ptr_eq(one, &self.own));
        others.fold(bytes, |left, one| left.saturating_sub(one.load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_may_use_the_bytes_that_the_other_shards_do_not_need() {
        let all = SharedNeeds::default();
        let (one, two, three) = (all.shard(), all.shard(), all.shard());
        assert_eq!(one.left_of(100), 100);
        one.set(70);
        two.set(20);
        assert_eq!([&one, &two, &three].map(|need| need.left_of(100)), [80, 30, 10]);
        two.set(50);
        assert_eq!((one.left_of(100), three.left_of(100)), (50, 0));
        assert!(!one.try_set(51, 100) && one.try_set(50, 100));
        assert_eq!(two.left_of(100), 50);
        // A shard that has moved away needs nothing once the last clone of its need is dropped.
        let part = two.clone();
        drop(two);
        assert_eq!(one.left_of(100), 50);
        drop(part);
        assert_eq!(one.left_of(100), 100);
        assert_eq!(ShardNeed::default().left_of(100), 100);
    }
}

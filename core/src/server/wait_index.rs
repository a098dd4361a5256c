//! Index of the requests that a shard's chunks let wait, by time and by connection, and the waits that the log has
//! reported.
//!
//! Not here: the requests of one chunk (`waiters`), their expiry (`waits`), the lines of the log (`watch`).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::chunk::Chunk;
use super::chunk_table::Chunks;
use super::group::SlotIndex;
use super::reply::Refusal;
use super::waiters::Waiter;
use crate::ids::{PeerId, Version};
use crate::limits::WAITS_PER_PEER_MAX;
use crate::time::Now;
use crate::wire::ErrorCode;

/// Waits shorter than this are not reported.
const ORDINARY: Duration = Duration::from_secs(10);

/// The pending requests of a shard.
#[derive(Default)]
pub(super) struct WaitIndex {
    /// Chunks with a pending request, each once, by the time of its oldest one.
    pub(super) by_time: BTreeSet<(Now, SlotIndex)>,
    /// Pending requests per connection.
    pub(super) per_peer: BTreeMap<PeerId, usize>,
    /// Time of the last search for waits on lost trainers.
    pub(super) lost_checked_at: Now,
    /// Waits that the log has reported.
    pub(super) log: StallLog,
}

/// Reported waits.
#[derive(Debug, Default)]
pub(super) struct StallLog {
    /// The reported wait that has not ended.
    pub(super) open: Option<ReportedWait>,
    /// Earliest time of the next report.
    pub(super) next: Now,
}

/// A wait that the log has reported.
#[derive(Debug)]
pub(super) struct ReportedWait {
    pub(super) slot_index: SlotIndex,
    pub(super) version: Version,
    pub(super) since: Now,
}

impl WaitIndex {
    /// Adds a request that waits for a version of a chunk.
    pub(super) fn add(&mut self, slot_index: SlotIndex, chunk: &mut Chunk, waiter: Waiter) {
        *self.per_peer.entry(waiter.peer).or_default() += 1;
        chunk.waiters.add(waiter);
        self.note(slot_index, chunk);
    }

    /// Updates the chunk's place in the order of time.
    #[inline]
    pub(super) fn note(&mut self, slot_index: SlotIndex, chunk: &mut Chunk) {
        let is_idle = chunk.waiters.is_empty()
            && chunk.round.is_bare()
            && chunk.bucket().is_none()
            && chunk.deferred_set.is_none();
        if chunk.noted.is_none() && is_idle {
            return;
        }
        let (before, after) = (chunk.noted, chunk.waits_since());
        if before == after {
            return;
        }
        chunk.noted = after;
        if let Some(before) = before {
            self.by_time.remove(&(before, slot_index));
        }
        if let Some(after) = after {
            self.by_time.insert((after, slot_index));
        }
    }

    /// Counts the requests of each connection down by those that were taken from their chunk.
    pub(super) fn note_taken(&mut self, taken: &[Waiter]) {
        for waiter in taken {
            if let Entry::Occupied(mut count) = self.per_peer.entry(waiter.peer) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }

    /// Removes the requests of a closed connection.
    pub(super) fn forget(&mut self, chunks: &mut Chunks, peer: PeerId) {
        if self.per_peer.remove(&peer).is_none() {
            return;
        }
        for (slot_index, chunk) in chunks.placed_mut() {
            if chunk.waiters.forget(peer) > 0 {
                self.note(slot_index, chunk);
            }
        }
    }

    /// Refuses a pull beyond the bound of pending requests per connection: each occupies server memory.
    pub(super) fn check(&self, chunks: usize, peer: PeerId, entries: usize) -> Result<(), Refusal> {
        let waiting = self.per_peer.get(&peer).copied().unwrap_or_default();
        let most = WAITS_PER_PEER_MAX + 2 * chunks;
        if waiting + entries <= most {
            return Ok(());
        }
        let text = format!(
            "{waiting} pulls of this connection wait for versions that are not there yet; expected at most {most}: two \
             for each chunk of the shard and {WAITS_PER_PEER_MAX}"
        );
        Err(Refusal::new(ErrorCode::Busy, text))
    }

    /// The time of the next report of a wait, if no state changes.
    pub(super) fn report_due(&self) -> Option<Now> {
        self.by_time.first().map(|(since, _)| (*since + ORDINARY).max(self.log.next))
    }
}

//! The journal of a shard: a record is a frame, the encoded head and the payloads after it.
//!
//! The journal computes a checksum over a record's parts and then writes them, so they must not change in between. A
//! payload in its sender's memory may change: its private copy is checksummed and written.

use super::reply::{Refusal, RetryReason};
use crate::checkpoint::Journal;
use crate::error::Failure;
use crate::port::Incoming;
use crate::wire::{ErrorCode, Frame};

/// The journal of a shard, if it keeps one.
#[derive(Default)]
pub(super) struct ShardJournal {
    pub(super) open: Option<Journal>,
    copied: PrivateCopy,
    /// End of the journal when it was switched off: the position of every frame that the journal does not hold.
    pub(super) end: u64,
    /// The failure of a shard whose files another process owns; nothing may be written after it.
    replaced: Option<Failure>,
}

impl ShardJournal {
    /// Length of the journal over its life; its end when journalling is off.
    pub(super) fn position(&self) -> u64 {
        self.open.as_ref().map_or(self.end, Journal::position)
    }

    /// Appends a frame and its payloads, if the shard keeps a journal, and returns the record's position.
    pub(super) fn append(&mut self, frame: &Frame, body: &[Incoming]) -> Result<u64, Refusal> {
        let Some(journal) = &mut self.open else { return Ok(self.end) };
        let head = frame.encode();
        let appended = journal.append(&self.copied.parts(&head, body));
        appended.map_err(|failure| {
            let text = format!("the journal cannot be written: {failure}");
            if matches!(failure, Failure::Node(_)) {
                self.replaced = Some(failure);
            }
            Refusal::new(ErrorCode::Busy, text).behind(journal.is_short().then_some(RetryReason::Disk))
        })
    }

    /// The failure of a shard whose files another process owns.
    pub(super) fn check_owned(&self) -> Result<(), Failure> {
        self.replaced.as_ref().map_or(Ok(()), |replaced| Err(replaced.clone()))
    }
}

/// Private memory for the payloads of one record, reused; at most as long as the longest payload of a frame. It stays
/// in the processor's cache, which is cheaper than reading a sender's memory twice
/// (`docs/decisions/zero-copy.md`).
#[derive(Default)]
pub(super) struct PrivateCopy(Vec<u8>);

impl PrivateCopy {
    /// The parts of the record of a frame with this head and these payloads.
    pub(super) fn parts<'a>(&'a mut self, head: &'a [u8], body: &'a [Incoming]) -> Vec<&'a [u8]> {
        let foreign: usize = body.iter().filter_map(foreign_bytes).sum();
        if self.0.len() < foreign {
            self.0.resize(foreign, 0);
        }
        let mut room = self.0.as_mut_slice();
        let mut parts = Vec::with_capacity(1 + body.len());
        parts.push(head);
        for place in body {
            parts.push(match (foreign_bytes(place), place) {
                (Some(bytes), Incoming::Chunk { lease, .. }) => {
                    let (copy, rest) = room.split_at_mut(bytes);
                    lease.copy_to(copy);
                    room = rest;
                    copy
                }
                _ => place.bytes(),
            });
        }
        parts
    }
}

/// Length of a payload in its sender's memory.
fn foreign_bytes(place: &Incoming) -> Option<usize> {
    match place {
        Incoming::Chunk { lease, bytes } => lease.is_foreign().then_some(*bytes as usize),
        Incoming::Loan(_) | Incoming::Discard { .. } => None,
    }
}

#[cfg(test)]
mod tests;

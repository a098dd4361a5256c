//! Recording of received frames: the last checks of their payloads, their journal record, and then their application.
//! A record is a frame: the encoded head, and the payloads after it.
//!
//! The journal computes a checksum over a record's parts and then writes them, so they must not change in between. A
//! payload in its sender's memory may change: its private copy is checksummed and written.

use super::context::Origin;
use super::reply::{Refusal, Replies};
use super::shard::{Phase, ReceivedFrame, Shard};
use crate::checkpoint::Journal;
use crate::error::Failure;
use crate::ids::PeerId;
use crate::port::Incoming;
use crate::wire::{ErrorCode, Frame, Kind};

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

impl Shard {
    /// Journals a frame that changes state, then applies it.
    pub(super) fn record_and_apply(
        &mut self,
        peer: PeerId,
        mut arrived: ReceivedFrame<'_>,
        mut body: Vec<Incoming>,
        replies: &mut Replies,
    ) -> Result<(), Refusal> {
        let ReceivedFrame { frame, admitted, .. } = arrived;
        self.copy_foreign_rows(frame, &mut body)?;
        self.screen(frame, admitted, &mut body)?;
        if let Phase::Serving(serving) = &mut self.phase {
            serving.check_rows(frame, body.iter().map(Incoming::bytes), Origin::Live)?;
        }
        if frame.head.kind == Kind::Finish {
            self.check_room(frame)?;
        }
        let is_mutating = frame.head.kind.is_mutating();
        if is_mutating {
            arrived.position = self.journal.append(frame, &body)?;
        }
        let leases = body.into_iter().filter_map(|incoming| match incoming {
            Incoming::Chunk { lease, .. } => Some(lease),
            Incoming::Loan(_) | Incoming::Discard { .. } => None,
        });
        match is_mutating {
            true => self.apply(&arrived, leases.collect(), replies),
            false => self.answer_request(peer, &arrived, leases.collect(), replies),
        }
    }

    /// Copies rows and ids out of their sender's memory: the sender may write there between the check and the update.
    fn copy_foreign_rows(&mut self, frame: &Frame, body: &mut [Incoming]) -> Result<(), Refusal> {
        let Phase::Serving(serving) = &self.phase else { return Ok(()) };
        if !serving.has_rows() {
            return Ok(());
        }
        let entries = frame.entries.iter().filter(|entry| entry.bytes > 0);
        for (_, incoming) in entries.zip(body).filter(|(entry, _)| serving.is_of_rows(entry)) {
            if let Incoming::Chunk { lease, bytes } = incoming
                && lease.is_foreign()
            {
                let own = self.pool.take_for_rows(*bytes);
                let mut own = own.map_err(|failure| Refusal::new(ErrorCode::Busy, failure.to_string()))?;
                lease.copy_to(&mut own.bytes_mut()[..*bytes as usize]);
                *lease = own;
            }
        }
        Ok(())
    }
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
            Refusal::new(ErrorCode::Busy, text)
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

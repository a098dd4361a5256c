//! The journal of a shard: a record is a frame, the encoded head and the payloads after it.
//!
//! The journal computes a checksum over a record's parts and then writes them, and the shard then applies them: what is
//! applied is what was journalled. Payloads in their sender's memory, which may change, are copied before.

use super::reply::{Refusal, RetryReason};
use crate::checkpoint::Journal;
use crate::error::Failure;
use crate::wire::{ErrorCode, Frame};

/// The journal of a shard, if it keeps one.
#[derive(Default)]
pub(super) struct ShardJournal {
    pub(super) open: Option<Journal>,
    /// Bytes that checkpoints have carried over, until the node asks.
    pub(super) carried: u64,
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
    pub(super) fn append<'a>(
        &mut self,
        frame: &Frame,
        payloads: impl Iterator<Item = &'a [u8]>,
    ) -> Result<u64, Refusal> {
        self.write(frame, payloads, Journal::append)
    }

    /// Appends a record for a checkpoint, which has room of its own on the disk.
    pub(super) fn carry(&mut self, frame: &Frame, payloads: &[&[u8]]) -> Result<u64, Refusal> {
        let before = self.position();
        let carried = self.write(frame, payloads.iter().copied(), Journal::append_reserved);
        self.carried += self.position() - before;
        carried
    }

    fn write<'a>(
        &mut self,
        frame: &Frame,
        payloads: impl Iterator<Item = &'a [u8]>,
        append: impl FnOnce(&mut Journal, &[&[u8]]) -> Result<u64, Failure>,
    ) -> Result<u64, Refusal> {
        let Some(journal) = &mut self.open else { return Ok(self.end) };
        let head = frame.encode();
        let mut parts = vec![head.as_slice()];
        // A shorter life than the payloads'.
        parts.extend(payloads.map(|payload| -> &[u8] { payload }));
        append(journal, &parts).map_err(|failure| {
            let text = format!("the journal cannot be written: {failure}");
            if matches!(failure, Failure::Node(_)) {
                self.replaced = Some(failure);
            }
            Refusal::new(ErrorCode::Busy, text).behind(journal.is_short().then_some(RetryReason::Disk))
        })
    }

    /// Allows the acknowledgement of every record that was appended.
    pub(super) fn commit(&mut self) -> Result<(), Failure> {
        self.open.as_mut().map_or(Ok(()), Journal::commit)
    }

    /// The failure of a shard whose files another process owns.
    pub(super) fn check_owned(&self) -> Result<(), Failure> {
        self.replaced.as_ref().map_or(Ok(()), |replaced| Err(replaced.clone()))
    }
}

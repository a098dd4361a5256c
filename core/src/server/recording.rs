//! Recording of decided rounds: which of them share a record, and what the record has of each.

use super::chunk_table::ChunkTable;
use super::decided::{DecidedRound, RoundsRecord};
use super::reply::Refusal;
use crate::ids::Round;
use crate::wire::{Entry, Frame};

impl ChunkTable {
    /// Appends records of decided rounds. Returns how many rounds have theirs, and why the others have none: the chunks
    /// of a group have theirs together.
    pub(super) fn append_rounds(
        &self,
        decided: &[DecidedRound],
        mut append: impl FnMut(&Frame, &[&[u8]]) -> Result<u64, Refusal>,
    ) -> (usize, Option<Refusal>) {
        let (mut whole, mut end, mut first) = (0, 0, None);
        while end < decided.len() {
            let (record, payloads) = self.next_record(&decided[end..]);
            end += record.rounds();
            let group = |one: &DecidedRound| Some((self.chunks[one.slot_index].group?, one.is_next));
            let next = decided.get(end).and_then(group);
            let continues = next.is_some() && next == group(&decided[end - 1]);
            match append(&record.finish(self.generation, first, continues), &payloads) {
                Ok(position) if continues => first = first.or(Some(position)),
                Ok(_) => (whole, first) = (end, None),
                Err(refusal) => return (whole, Some(refusal)),
            }
        }
        (whole, None)
    }

    /// The record of as many of these rounds as fit one, and its payloads.
    fn next_record<'a>(&'a self, decided: &[DecidedRound]) -> (RoundsRecord<'a>, Vec<&'a [u8]>) {
        let (mut record, mut payloads) = (RoundsRecord::new(), Vec::new());
        for one in decided {
            let chunk = &self.chunks[one.slot_index];
            let contributions = chunk.round.part(one.is_next);
            let number = Round(chunk.version.0 + 1 + u64::from(one.is_next));
            let mut entry = Entry::bare(chunk.id, number, chunk.element_type);
            if chunk.is_recorded_whole(one.is_next) {
                entry.bytes = chunk.bytes;
            }
            if !record.fits(&entry, contributions.len()) {
                break;
            }
            if 0 < entry.bytes {
                payloads.push(chunk.round.merged(one.is_next, chunk.bytes));
            }
            record.add(entry, contributions);
        }
        (record, payloads)
    }
}

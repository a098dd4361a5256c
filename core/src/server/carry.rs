//! Carried records of a checkpoint. It has the value of a chunk as of a position of the journal. Gradients, values and
//! decided rounds that wait then are written to the journal once more, behind that position, when the chunk is written.
//! A restart takes the chunk and goes on with the records behind it.
//!
//! Only the table is read here, so that a checkpoint can carry over whatever the shard is doing.

use super::bucket::Bucket;
use super::call::CallId;
use super::chunk::Chunk;
use super::chunk_table::ChunkTable;
use super::contribution::{Contribution, PushHeader, RowsLease};
use super::decided::{DecidedRound, RoundsRecord, RoundsRecordKind};
use super::group::{SlotIndex, UpdateUnit};
use super::journal::ShardJournal;
use super::reply::Refusal;
use crate::accumulator::AccumulatorPace;
use crate::dtype::ElementType;
use crate::ids::{Generation, Round, TrainerId};
use crate::optim::Gradient;
use crate::wire::{Entry, Frame, Head, Kind, PushMessage};

impl ChunkTable {
    /// Writes what the values of a unit lack to the journal, in the order in which a replay takes it in.
    ///
    /// # Errors
    /// When the disk takes no record.
    pub(super) fn carry(
        &self,
        journal: &mut ShardJournal,
        unit: &UpdateUnit,
        pace: AccumulatorPace,
    ) -> Result<(), Refusal> {
        let slot_indices = unit.slot_indices();
        let chunks = || slot_indices.iter().map(|slot_index| &self.chunks[*slot_index]);
        if journal.open.is_none() || chunks().all(|chunk| chunk.lacks_nothing() && chunk.of_step.is_none()) {
            return Ok(());
        }
        chunks().try_for_each(|chunk| self.carry_of_step(journal, chunk))?;
        if pace == AccumulatorPace::Rounds {
            self.carry_rounds(journal, slot_indices)?;
        } else {
            self.carry_alone(journal, slot_indices)?;
        }
        // A trainer's call that is gathered is later than its calls that are whole, and comes behind them.
        for chunk in chunks() {
            for (trainer, call, round, rows) in chunk.bucket().into_iter().flat_map(Bucket::gathered) {
                let frame = push_frame(self.generation, (trainer, call), &PushMessage::default());
                carry_rows(journal, chunk, &frame, round, rows)?;
            }
        }
        Ok(())
    }

    /// Carries the value that the last update made, where a set has replaced it.
    fn carry_of_step(&self, journal: &mut ShardJournal, chunk: &Chunk) -> Result<(), Refusal> {
        let Some(value) = &chunk.of_step else { return Ok(()) };
        let mut record = RoundsRecord::new();
        record.add(Entry { bytes: chunk.bytes, ..chunk.value_entry(None) }, &[]);
        let frame = record.finish_as(RoundsRecordKind::OfStep, self.generation);
        journal.carry(&frame, &[value.bytes()]).map(drop)
    }

    /// Carries the open round and the next one, and the values that are set between them.
    fn carry_rounds(&self, journal: &mut ShardJournal, slot_indices: &[SlotIndex]) -> Result<(), Refusal> {
        let chunks = || slot_indices.iter().map(|slot_index| &self.chunks[*slot_index]);
        for chunk in chunks() {
            self.carry_folded(journal, chunk)?;
            carry_set(journal, chunk, |before| before == 0)?;
            chunk.round.loose(false).try_for_each(|one| self.carry_gradient(journal, chunk, one))?;
        }
        self.carry_decided(journal, slot_indices, false)?;
        for chunk in chunks() {
            carry_set(journal, chunk, |before| before == 1)?;
            chunk.round.loose(true).try_for_each(|one| self.carry_gradient(journal, chunk, one))?;
        }
        self.carry_decided(journal, slot_indices, true)?;
        chunks().try_for_each(|chunk| carry_set(journal, chunk, |before| 1 < before))
    }

    /// Carries the first gradients of an open round, of which only the sum is left.
    fn carry_folded(&self, journal: &mut ShardJournal, chunk: &Chunk) -> Result<(), Refusal> {
        let Some((contributions, sum)) = chunk.round.folded(chunk.bytes) else { return Ok(()) };
        let mut record = RoundsRecord::new();
        let entry = Entry { bytes: chunk.bytes, ..chunk.open_entry() };
        record.add(entry, contributions);
        journal.carry(&record.finish_as(RoundsRecordKind::Open, self.generation), &[sum]).map(drop)
    }

    /// Carries the decided rounds of the chunks of a unit, also those whose record the disk did not take so far. Where
    /// gradients of one are still to be merged, none is carried: their trainers have no answer.
    fn carry_decided(
        &self,
        journal: &mut ShardJournal,
        slot_indices: &[SlotIndex],
        is_next: bool,
    ) -> Result<(), Refusal> {
        let is_decided = |slot_index: &&SlotIndex| {
            let chunk = &self.chunks[**slot_index];
            // A hosted program takes its inputs in the order of their records.
            let keeps_order = chunk.lacks_record(is_next) && self.held(chunk.id).declaration.hosted.is_some();
            chunk.has_decided(is_next) && !keeps_order
        };
        let decided: Vec<DecidedRound> = (slot_indices.iter().filter(is_decided))
            .map(|slot_index| DecidedRound { slot_index: *slot_index, is_next })
            .collect();
        let lacks_sum = |one: &DecidedRound| {
            let chunk = &self.chunks[one.slot_index];
            chunk.is_recorded_whole(is_next) && !chunk.round.is_merged(is_next)
        };
        if decided.iter().any(lacks_sum) {
            return Ok(());
        }
        let (_, refused) = self.append_rounds(&decided, |frame, payloads| journal.carry(frame, payloads));
        refused.map_or(Ok(()), Err)
    }

    /// Carries gradients that are updates of their own, in the order in which they are applied: first those that have
    /// entered, of which a group waits for the rest. A value that is set comes behind some of its chunk's.
    fn carry_alone(&self, journal: &mut ShardJournal, slot_indices: &[SlotIndex]) -> Result<(), Refusal> {
        let of_unit = |is_next: bool| {
            let chunks = slot_indices.iter().map(|slot_index| &self.chunks[*slot_index]).enumerate();
            chunks.flat_map(move |(at, chunk)| {
                let alone = chunk.round.alone(is_next, (chunk.element_type, chunk.bytes));
                alone.map(move |one| (at, chunk, one))
            })
        };
        let mut ahead: Vec<_> = of_unit(true).collect();
        ahead.sort_by_key(|(.., (one, _))| one.sending.arrival);
        let mut carried = vec![0; slot_indices.len()];
        for (at, chunk, one) in of_unit(false).chain(ahead) {
            carry_set(journal, chunk, |before| before == carried[at])?;
            self.carry_gradient(journal, chunk, one)?;
            carried[at] += 1;
        }
        let mut rest = slot_indices.iter().zip(carried);
        rest.try_for_each(|(slot_index, carried)| {
            carry_set(journal, &self.chunks[*slot_index], |before| carried <= before)
        })
    }

    fn carry_gradient(
        &self,
        journal: &mut ShardJournal,
        chunk: &Chunk,
        (one, gradient): (&Contribution, Option<Gradient<'_>>),
    ) -> Result<(), Refusal> {
        let PushHeader { call, rate, ref settings, is_void, is_pass, .. } = *one.sending;
        let message = PushMessage { rate, is_void, settings: settings.clone(), is_pass };
        // The answer may go to a later call, whose gradient was not taken.
        let mut frame = push_frame(self.generation, (one.trainer, call), &message);
        if !one.rows.is_empty() {
            return one.rows.iter().try_for_each(|rows| carry_rows(journal, chunk, &frame, one.round, rows));
        }
        let payload: Vec<&[u8]> = gradient.iter().map(|gradient| gradient.bytes).collect();
        let element_type = gradient.map_or(one.element_type, |gradient| gradient.element_type);
        let bytes = gradient.map_or(0, |gradient| u32::try_from(gradient.bytes.len()).expect("it fits a chunk"));
        frame.entries.push(entry(chunk, one.round, element_type, bytes));
        journal.carry(&frame, &payload).map(drop)
    }
}

/// Carries rows of a bucket, as a frame with this head.
fn carry_rows(
    journal: &mut ShardJournal,
    chunk: &Chunk,
    frame: &Frame,
    round: Round,
    rows: &RowsLease,
) -> Result<(), Refusal> {
    let mut frame = frame.clone();
    frame.entries.push(entry(chunk, round, rows.element_type, rows.bytes));
    journal.carry(&frame, &[&rows.lease.bytes()[..rows.bytes as usize]]).map(drop)
}

/// Carries the value that waits to be set, if the count of updates before it is right.
fn carry_set(journal: &mut ShardJournal, chunk: &Chunk, is_right: impl FnOnce(u64) -> bool) -> Result<(), Refusal> {
    let Some(set) = chunk.deferred_set.as_ref() else { return Ok(()) };
    if !is_right(set.after.0.saturating_sub(chunk.version.0)) {
        return Ok(());
    }
    let payload = set.replacement.payload(set.entry.bytes);
    let payload: Vec<&[u8]> = payload.iter().map(AsRef::as_ref).collect();
    // Rates of learning that are the same one after the other are kept once.
    let bytes = payload.iter().map(|part| u32::try_from(part.len()).expect("it fitted a frame")).sum();
    let entries = [Entry { bytes, ..set.entry }].into_iter().collect();
    let frame = Frame { entries, control: set.control.clone(), head: set.head };
    journal.carry(&frame, &payload).map(drop)
}

/// A push of a call, without entries.
fn push_frame(generation: Generation, (trainer, call): (TrainerId, CallId), message: &PushMessage) -> Frame {
    let CallId { incarnation, sequence } = call;
    Frame::with_control(Head { trainer, incarnation, sequence, generation, ..Head::new(Kind::Push) }, message)
}

fn entry(chunk: &Chunk, round: Round, element_type: ElementType, bytes: u32) -> Entry {
    Entry { bytes, ..Entry::bare(chunk.id, round, element_type) }
}

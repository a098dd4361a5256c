//! Checkpoint and restart of a shard.
//!
//! A checkpoint is taken chunk by chunk while the shard serves. Each chunk is written as of its last closed round, with
//! call ids that say which gradients it contains; what it lacks is carried over in the journal, which is kept from the
//! checkpoint's begin on. A restart loads the checkpoint and replays the journal through the path of live frames; the
//! call ids identify duplicates.

use std::sync::Arc;

use prost::Message;

use super::bucket::Bucket;
use super::call::TrainerMarks;
use super::checkpointing::Checkpointing;
use super::chunk::Chunk;
use super::chunk_table::ChunkTable;
use super::decided::RecordedRounds;
use super::device::Device;
use super::group::SlotIndex;
use super::job::rule_of_mode;
use super::journal::ShardJournal;
use super::marks::{AboutMessage, MarksMessage};
use super::reply::Refusal;
use super::serving::Serving;
use super::shard::{Phase, Shard};
use crate::checkpoint::{
    ChunkLayout, ChunkRecord, Folder, Journal, Loaded, ReplayOptions, Replayed, ShardCheckpoint, StateLayout,
    journal_needed_from, load_latest, replay,
};
use crate::config::Mode;
use crate::error::Failure;
use crate::ids::{ChunkId, ChunkIndex, Generation, Incarnation, JobRun, ParameterIndex, RunNumber, Version};
use crate::wire::FinishMessage;

/// The record that describes the shard itself; no parameter has this index, see `limits::PARAMETERS_MAX`.
const ABOUT: ChunkId = ChunkId { parameter: ParameterIndex(u32::MAX), chunk: ChunkIndex(0) };

/// How a shard keeps its journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalOptions {
    /// Whether acknowledged frames are journalled; otherwise frames after the last checkpoint are lost with the
    /// process.
    pub is_on: bool,
    /// Whether a record survives the loss of the host before it is acknowledged.
    pub sync: bool,
    /// Whether damage with whole records behind it ends the journal there, instead of being refused.
    pub accepts_torn_tail: bool,
}

/// Result of a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// The checkpoint that was loaded, if there was one.
    pub loaded: Option<Loaded>,
    /// The replayed part of the journal.
    pub replayed: Replayed,
}

impl Restored {
    /// Warnings for the operator, one per line.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let fell_back = self.loaded.iter().flat_map(|loaded| &loaded.fell_back);
        let older = fell_back.map(|reason| format!("an older checkpoint is used: {reason}"));
        older.chain(self.replayed.warnings()).collect()
    }
}

/// Visitor of chunks: id, version, value and state tensors.
pub type Visit<'a> = dyn FnMut(ChunkId, Version, &[u8], &[&[u8]]) + 'a;

impl Serving {
    /// Writes what the values of a chunk's unit, or of the hosted program that it begins, lack to the journal.
    fn carry(&self, journal: &mut ShardJournal, slot_index: SlotIndex) -> Result<(), Refusal> {
        let carry = |slot_index: SlotIndex, journal: &mut ShardJournal| {
            self.table.carry(journal, &self.table.unit(slot_index), self.flows.of(slot_index).pace)
        };
        match self.programs.of(slot_index) {
            None => carry(slot_index, journal),
            Some(host) => self.programs.inputs_in_order(host).iter().try_for_each(|input| carry(input[0], journal)),
        }
    }
}

impl Shard {
    /// Restores the state of the last process from checkpoint and journal, then opens the journal.
    ///
    /// # Errors
    /// When the files cannot be read, are damaged, or belong to another shard or job; the shard then does not serve.
    pub fn restore(&mut self, folder: &Folder, options: JournalOptions) -> Result<Restored, Failure> {
        let mut about = None;
        let storage = folder.storage();
        let visit = &mut |record: ChunkRecord<'_>| self.restore_chunk(&record, &mut about);
        let loaded = load_latest(storage, folder.directory(), Some(folder.identity()), visit)?;
        if loaded.is_some() {
            let about = about.ok_or_else(|| Failure::Node("the checkpoint does not describe its shard".into()))?;
            self.restore_about(about)?;
        }
        let reading = ReplayOptions {
            storage,
            directory: folder.directory(),
            identity: Some(folder.identity()),
            from: loaded.as_ref().map_or(0, |loaded| loaded.journal_from),
            accepts_torn_tail: options.accepts_torn_tail,
        };
        self.replaying = Some(RecordedRounds::default());
        let replayed = replay(&reading, &mut |position, record| self.replay(position, record))?;
        // A journal position that a chunk counts as past is not reused.
        let mut least = reading.from;
        if let Phase::Serving(serving) = &mut self.phase {
            least = serving.table.chunks.iter().filter_map(|chunk| chunk.restored).max().unwrap_or(0).max(least);
        }
        self.replayed();
        self.folder = Some(folder.clone());
        if options.is_on {
            self.journal.open = Some(Journal::begin(folder, options.sync, &replayed, least)?);
        } else {
            self.journal.end = replayed.end.max(least);
        }
        self.decide_complete();
        Ok(Restored { loaded, replayed })
    }

    /// Length of the journal over its life; its end when journalling is off.
    #[must_use]
    pub fn journal_position(&self) -> u64 {
        self.journal.position()
    }

    /// Reserves bytes of the disk. The journal leaves `kept` of them free: a frame whose record needs them is refused
    /// until there is more. The other shards of the process leave these and those of `journal`.
    pub fn reserve_disk(&mut self, kept: u64, journal: u64) {
        if let Some(open) = &mut self.journal.open {
            open.keep_free(kept);
        }
        if let Some(folder) = &self.folder {
            folder.need(kept.saturating_add(journal));
        }
    }

    /// The bytes that are written of the checkpoint that is being taken.
    #[must_use]
    pub fn checkpoint_written(&self) -> u64 {
        self.checkpointing.as_ref().map_or(0, |checkpoint| checkpoint.writer.written())
    }

    /// The bytes of the journal that checkpoints have carried over since this was last asked.
    pub fn take_carried(&mut self) -> u64 {
        std::mem::take(&mut self.journal.carried)
    }

    /// The bytes that a checkpoint takes about now.
    #[must_use]
    pub fn checkpoint_bytes(&self) -> u64 {
        let Phase::Serving(serving) = &self.phase else { return 0 };
        serving.holdings().checkpoint()
    }

    /// The bytes of its values, rows among them.
    #[must_use]
    pub fn value_bytes(&self) -> u64 {
        if let Phase::Serving(serving) = &self.phase { serving.holdings().values() } else { 0 }
    }

    /// Begins a checkpoint under `number`; does nothing before initialisation.
    ///
    /// # Errors
    /// When the disk refuses or its owner was replaced; what was saved before stays.
    pub fn begin_checkpoint(&mut self, folder: &Folder, number: u64) -> Result<bool, Failure> {
        self.device.as_ref().map_or(Ok(()), Device::check_kept)?;
        let Phase::Serving(serving) = &self.phase else {
            return Ok(false);
        };
        let from = self.journal_position();
        let generation = serving.table.generation;
        let about = self.about(serving).encode_to_vec();
        let layout = layout(serving);
        let writer = ShardCheckpoint::begin(folder, number, from, layout)?;
        if let Some(journal) = &mut self.journal.open {
            journal.rotate()?;
        }
        self.checkpointing = Some(Checkpointing::new(writer, about, generation));
        Ok(true)
    }

    /// Whether a checkpoint is being taken.
    #[must_use]
    pub fn is_checkpointing(&self) -> bool {
        self.checkpointing.is_some()
    }

    /// Writes chunks of the checkpoint that is being taken, about `bytes` of them. When all are written the
    /// writer comes out; finishing it waits for the disk, so that is for another thread.
    ///
    /// # Errors
    /// When the disk refuses; the checkpoint is given up and what was saved before stays.
    pub fn continue_checkpoint(&mut self, bytes: u64) -> Result<Option<ShardCheckpoint>, Failure> {
        let continued = self.write_chunks(bytes);
        let is_over = !matches!(continued, Ok(None));
        if let (true, Phase::Serving(serving)) = (is_over, &mut self.phase) {
            self.device.iter_mut().for_each(|device| serving.release_held(device));
            serving.table.chunks.iter_mut().filter_map(Chunk::bucket_mut).for_each(Bucket::stop_copy);
        }
        continued
    }

    fn write_chunks(&mut self, bytes: u64) -> Result<Option<ShardCheckpoint>, Failure> {
        let Some(mut checkpoint) = self.checkpointing.take() else {
            return Ok(None);
        };
        let position = self.journal_position();
        let serving = match &mut self.phase {
            Phase::Serving(serving) if serving.table.generation == checkpoint.generation => serving,
            _ => return Err(Failure::call("the parameters were initialised anew while a checkpoint was taken")),
        };
        let mut left = bytes;
        // A group is written as of one round, with its share and its total: a restart could not close a round that only
        // some of its chunks contain. A bucket is the last of its group, and as it was when its first byte was copied.
        let mut writing_group = None;
        while let Some(id) = checkpoint.writer.next() {
            let first = serving.table.first_of_group(id);
            if left == 0 && writing_group != Some(first) {
                self.checkpointing = Some(checkpoint);
                return Ok(None);
            }
            if id == ABOUT {
                let marks = checkpoint.about.clone();
                let about = ChunkRecord { id, version: Version(0), marks: &marks, value: &[], states: &[] };
                checkpoint.writer.push(about)?;
                continue;
            }
            let slot_index = serving.table.slot_index(id);
            let slot_index = slot_index.expect("the layout is of this generation's chunks");
            if writing_group != Some(first)
                && let Some(device) = &mut self.device
                && !serving.hold_for_checkpoint(device, id, bytes)?
            {
                self.checkpointing = Some(checkpoint);
                return Ok(None);
            }
            if writing_group != Some(first) && !checkpoint.is_in_bucket() {
                let is_alone = serving.table.chunks[slot_index].group.is_none() && first.parameter == id.parameter;
                let of_unit = if is_alone { slot_index } else { serving.table.slot_index(first).expect("it is here") };
                let carried = serving.carry(&mut self.journal, of_unit);
                carried.map_err(|refusal| Failure::Call(refusal.text))?;
            }
            let host = serving.programs.saved(slot_index);
            let chunk = &mut serving.table.chunks[slot_index];
            if chunk.bucket().is_some() {
                checkpoint.push_bucket(chunk, position, &mut left)?;
            } else {
                left = left.saturating_sub(checkpoint.push_chunk(chunk, position, host)?);
            }
            if let (true, Some(device)) = (serving.table.chunks[slot_index].release(), &mut self.device) {
                device.released.push(slot_index);
            }
            let chunk = &serving.table.chunks[slot_index];
            let is_of_group =
                chunk.group.is_some() || first.parameter != id.parameter || serving.programs.of(slot_index).is_some();
            writing_group = (is_of_group && chunk.bucket().is_none()).then_some(first);
        }
        Ok(Some(checkpoint.writer))
    }

    /// Deletes the part of the journal that no checkpoint needs.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn retain_journal(&mut self, folder: &Folder) -> Result<(), Failure> {
        let needed = journal_needed_from(folder.storage(), folder.directory())?;
        match (&mut self.journal.open, needed) {
            (Some(journal), Some(position)) => journal.retain_from(position),
            _ => Ok(()),
        }
    }

    /// The values and states of every chunk in the order of their names, for a digest that does not depend on
    /// how parameters were cut. With an accelerator the states are those of the last [`Shard::settle`].
    pub fn visit(&self, visit: &mut Visit<'_>) {
        let Phase::Serving(serving) = &self.phase else {
            return;
        };
        for chunk in in_order(&serving.table) {
            if let Some(bucket) = chunk.bucket() {
                let tensors = bucket.tensors();
                let (value, states) = tensors.parts();
                visit(chunk.id, chunk.version, value, &states);
                continue;
            }
            let states: Vec<&[u8]> = chunk.states.iter().map(|state| &state.bytes()[..chunk.bytes as usize]).collect();
            visit(chunk.id, chunk.version, chunk.value_bytes(), &states);
        }
    }

    fn about(&self, serving: &Serving) -> AboutMessage {
        AboutMessage {
            generation: serving.table.generation.0,
            chunks: serving.table.chunks.len() as u64,
            job: Some(serving.job.to_message()),
            parameters: serving.table.parameters.iter().map(|(index, held)| held.message(*index)).collect(),
            known: self.trainers.incarnations.iter().map(|known| known.0).collect(),
            left: serving.participants.departed(),
            runs: self.trainers.runs.iter().map(|run| run.number.0).collect(),
            run_trainers: self.trainers.runs.iter().map(|run| run.trainers).collect(),
            run: serving.participants.run().0,
            expected: serving.participants.expected(),
        }
    }

    fn restore_chunk(&mut self, record: &ChunkRecord<'_>, about: &mut Option<AboutMessage>) -> Result<(), Failure> {
        let damaged = |what: &str| Failure::Node(format!("checkpoint of chunk {:?}: {what}", record.id));
        if record.id == ABOUT {
            let message = AboutMessage::decode(record.marks).map_err(|error| damaged(&error.to_string()))?;
            self.phase = Phase::Filling(table_of(&message)?);
            *about = Some(message);
            return Ok(());
        }
        let marks = MarksMessage::decode(record.marks).map_err(|error| damaged(&error.to_string()))?;
        let Phase::Filling(table) = &mut self.phase else {
            return Err(damaged("it comes before the shard's description"));
        };
        let held = table.parameters.get(&record.id.parameter).ok_or_else(|| damaged("its parameter is unknown"))?;
        if held.rows.is_some() {
            let chunk = table.bucket(record.id)?;
            let bucket = chunk.bucket_mut().expect("it was made as one");
            let updates = Version(record.version.0.wrapping_add_signed(marks.updates_beyond));
            let restored = bucket.restore(updates, marks.rates(), record.value, record.states);
            restored.map_err(|failure| damaged(&failure.to_string()))?;
            restore_marks(chunk, record.version, marks);
            return Ok(());
        }
        let mut marks = marks;
        if let Some(host) = marks.host.take() {
            table.programs.insert(record.id.parameter, host);
        }
        let bytes = u32::try_from(record.value.len()).map_err(|_| damaged("it is too long"))?;
        let entry = crate::wire::Entry {
            bytes,
            ..crate::wire::Entry::bare(record.id, Default::default(), held.element_type())
        };
        let mut value = self.pool.take(bytes)?;
        value.bytes_mut()[..record.value.len()].copy_from_slice(record.value);
        table.fill(&entry, value);
        let chunk = table.chunks.iter_mut().next_back().expect("the chunk was just filled");
        for bytes in record.states {
            let mut state = self.pool.take(chunk.bytes)?;
            state.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            chunk.states.push(state);
        }
        restore_marks(chunk, record.version, marks);
        Ok(())
    }

    fn restore_about(&mut self, about: AboutMessage) -> Result<(), Failure> {
        let finish = FinishMessage { chunks: about.chunks, job: about.job };
        self.serve(&finish).map_err(|refusal| Failure::Node(refusal.text))?;
        self.trainers.incarnations = about.known.into_iter().map(Incarnation).collect();
        let runs = about.runs.into_iter().zip(about.run_trainers);
        self.trainers.runs = runs.map(|(number, trainers)| JobRun { number: RunNumber(number), trainers }).collect();
        if let Phase::Serving(serving) = &mut self.phase {
            serving.participants.restore(RunNumber(about.run), &about.left, &about.expected);
        }
        Ok(())
    }
}

fn restore_marks(chunk: &mut Chunk, version: Version, marks: MarksMessage) {
    chunk.version = version;
    chunk.updates_beyond = marks.updates_beyond;
    chunk.heard = marks.heard.iter().map(TrainerMarks::from).collect();
    chunk.restored = Some(marks.position);
}

/// The parameters and the number of trainers that the first record of a checkpoint declares.
pub(super) fn declared(record: &ChunkRecord<'_>) -> Result<(ChunkTable, u32), Failure> {
    let refused = |text: String| Failure::Node(format!("the first record of a checkpoint: {text}"));
    if record.id != ABOUT {
        return Err(refused("it does not describe the shard".to_owned()));
    }
    let about = AboutMessage::decode(record.marks).map_err(|error| refused(error.to_string()))?;
    let trainers = about.job.as_ref().map_or(0, |job| job.trainers);
    Ok((table_of(&about)?, trainers))
}

fn layout(serving: &Serving) -> Vec<ChunkLayout> {
    let about = ChunkLayout::fixed(ABOUT, crate::dtype::ElementType::Uint32, 0, Vec::new());
    let chunks = in_order(&serving.table).map(|chunk| {
        let held = serving.table.held(chunk.id);
        let (element_type, bytes) = (held.element_type(), u64::from(chunk.bytes));
        if let Some(bucket) = chunk.bucket() {
            return ChunkLayout::growing(chunk.id, element_type, bucket.state_layouts());
        }
        let names = held.rule.states().iter().take(chunk.state_count());
        let states =
            names.map(|state| StateLayout { name: Arc::from(state.name.as_str()), element_type, bytes }).collect();
        ChunkLayout::fixed(chunk.id, element_type, bytes, states)
    });
    std::iter::once(about).chain(chunks).collect()
}

/// The chunks of a table by parameter and then by chunk, whatever the order in which they came. The numbers of a
/// bucket's total are before it.
fn in_order(table: &ChunkTable) -> impl Iterator<Item = &Chunk> {
    let is_of_table = |index: &ParameterIndex| {
        let reader = table.reader_of(*index);
        reader != *index && table.parameters[&reader].rows.is_some()
    };
    let own = table.parameters.iter().filter(move |(index, _)| !is_of_table(index));
    let slot_indices = own.flat_map(|(_, held)| &held.chunks).flat_map(|slot_index| {
        let chunk = &table.chunks[*slot_index];
        let total = table.group(chunk).filter(|_| chunk.bucket().is_some()).and_then(|group| group.total);
        total.into_iter().flat_map(|slots| [slots.share, slots.total]).chain([*slot_index])
    });
    slot_indices.map(|slot_index| &table.chunks[slot_index])
}

fn table_of(about: &AboutMessage) -> Result<ChunkTable, Failure> {
    let mut table = ChunkTable::new(Generation(about.generation));
    for message in &about.parameters {
        table.declare(message.clone(), &[]).map_err(|refusal| Failure::Node(refusal.text))?;
    }
    let mode = about.job.and_then(|job| Mode::from_numbers(job.mode, job.staleness));
    if let Some(rule) = mode.and_then(rule_of_mode) {
        // Tables of rows are made as they were, without the states of the rule that was declared.
        table.replace_rule(&rule)?;
    }
    Ok(table)
}

//! What of a shard outlives its process, and how it comes back.
//!
//! A checkpoint is taken chunk by chunk while the shard serves. Each chunk is written as of its last closed
//! round, with the marks that say which gradients are in it; gradients of open rounds are in the journal, which
//! is kept from the oldest of them on. A restart loads the checkpoint and feeds the journal through the door
//! that frames come through; the marks tell what is contained already.

use std::fmt;
use std::sync::Arc;

use prost::Message;

use super::bucket::{Bucket, BucketTensors};
use super::chunk::{Chunk, Heard, Mark, Open, Restoring, Stage};
use super::device::Device;
use super::gate::Table;
use super::program::rule_of_mode;
use super::serving::{Job, Serving};
use super::shard::{Phase, Shard};
use crate::checkpoint::{
    ChunkLayout, ChunkRecord, Journal, ShardCheckpoint, StateLayout, Storage, load_latest, replay,
};
use crate::config::Mode;
use crate::error::Failure;
use crate::ids::{ChunkId, ChunkIndex, Generation, Incarnation, ParameterIndex, Sequence, TrainerId, Version};
use crate::limits::FRAME_PAYLOAD_BYTES_MAX;
use crate::rows::Rates;
use crate::wire::{FinishMessage, Frame, Head, InitMessage, JobMessage, Kind};

/// The record that describes the shard itself; no parameter has this index, see `limits::PARAMETERS_MAX`.
const ABOUT: ChunkId = ChunkId { parameter: ParameterIndex(u32::MAX), chunk: ChunkIndex(0) };

/// A checkpoint that is being taken.
pub struct Checkpointing {
    writer: ShardCheckpoint,
    about: Vec<u8>,
    generation: Generation,
    /// The bucket that is being written, if one is.
    bucket: Option<BucketWriting>,
}

/// A bucket on its way into a checkpoint: its rows are copied, some in every turn, as they are when it begins, and then
/// the copy is written, some of it in every turn.
struct BucketWriting {
    version: Version,
    marks: Vec<u8>,
    /// The copy, when it is whole.
    copy: Option<BucketTensors>,
    /// How much of it is written.
    written: u64,
}

/// What a restart found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// The checkpoint that was loaded, if there was one.
    pub checkpoint: Option<u64>,
    /// Newer checkpoints that could not be loaded, and why.
    pub fell_back: Vec<String>,
    /// Journal records that were fed through the door.
    pub records: u64,
}

/// What is shown of each chunk: its name, version, value and state tensors.
pub type Visit<'a> = dyn FnMut(ChunkId, Version, &[u8], &[&[u8]]) + 'a;

/// What a shard holds, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardStatus {
    /// Zero before initialisation.
    pub generation: Generation,
    /// Chunks held.
    pub chunks: u64,
    /// Bytes of values held; of a bucket those of its rows.
    pub bytes: u64,
    /// The least version of any chunk.
    pub slowest: Version,
    /// The greatest version of any chunk.
    pub fastest: Version,
}

impl fmt::Display for ShardStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} chunks, {} bytes, versions {} to {}", self.chunks, self.bytes, self.slowest, self.fastest)
    }
}

impl ShardStatus {
    pub(super) fn of(shard: &Shard) -> Self {
        let (generation, chunks) = match &shard.phase {
            Phase::Serving(serving) => (serving.table.generation, serving.table.chunks.as_slice()),
            Phase::Filling(table) => (Generation(0), table.chunks.as_slice()),
            Phase::Empty => (Generation(0), [].as_slice()),
        };
        Self {
            generation,
            chunks: chunks.len() as u64,
            bytes: chunks.iter().map(|chunk| chunk.bucket().map_or(chunk.bytes.into(), Bucket::value_bytes)).sum(),
            slowest: chunks.iter().map(|chunk| chunk.version).min().unwrap_or_default(),
            fastest: chunks.iter().map(|chunk| chunk.version).max().unwrap_or_default(),
        }
    }
}

impl Shard {
    /// Gives the shard its journal, after bringing back what the last process left.
    ///
    /// # Errors
    /// When what is on disk cannot be read or is of another job; nothing is then served.
    pub fn restore(&mut self, storage: &Arc<dyn Storage>, directory: &str, sync: bool) -> Result<Restored, Failure> {
        let mut restored = Restored::default();
        let mut about = None;
        let loaded = load_latest(&**storage, directory, None, &mut |record| self.restore_chunk(&record, &mut about))?;
        let mut from = 0;
        if let Some(loaded) = loaded {
            restored.checkpoint = Some(loaded.number);
            restored.fell_back = loaded.fell_back;
            from = loaded.journal_from;
            self.restore_about(
                about.ok_or_else(|| Failure::Node("the checkpoint does not describe its shard".into()))?,
            )?;
        }
        let replayed = replay(&**storage, directory, from, &mut |position, record| self.replay(position, record))?;
        restored.records = replayed.records;
        let mut journal = Journal::open(Arc::clone(storage), directory, sync)?;
        if let Phase::Serving(serving) = &mut self.phase {
            let restored = serving.table.chunks.iter().filter_map(|chunk| chunk.restored.as_ref());
            pad(&mut journal, restored.map(|restored| restored.position).max().unwrap_or(0))?;
        }
        self.replayed();
        self.journal = Some(journal);
        Ok(restored)
    }

    /// Writes nothing down from here on: what comes after the last checkpoint is lost with the process.
    pub fn stop_journal(&mut self) {
        self.unwritten = self.journal.take().map_or(self.unwritten, |journal| journal.position());
    }

    /// How long the journal is, over all its life; where it ended when nothing is written down any more.
    #[must_use]
    pub fn journal_position(&self) -> u64 {
        self.journal.as_ref().map_or(self.unwritten, Journal::position)
    }

    /// Begins a checkpoint under `number`; does nothing before initialisation.
    ///
    /// # Errors
    /// When the disk refuses; what was saved before stays.
    pub fn begin_checkpoint(
        &mut self,
        storage: &Arc<dyn Storage>,
        directory: &str,
        number: u64,
    ) -> Result<bool, Failure> {
        self.device.as_ref().map_or(Ok(()), Device::check_kept)?;
        let Phase::Serving(serving) = &self.phase else {
            return Ok(false);
        };
        let now = self.journal_position();
        let open = serving.table.chunks.iter().filter_map(Chunk::oldest_position).min();
        let from = open.map_or(now, |open| open.min(now));
        let generation = serving.table.generation;
        let about = self.about(serving).encode_to_vec();
        let digest = blake3::hash(&about).into();
        let layout = layout(serving);
        let writer = ShardCheckpoint::begin(Arc::clone(storage), directory, number, digest, from, layout)?;
        if let Some(journal) = &mut self.journal {
            journal.rotate()?;
        }
        self.checkpointing = Some(Checkpointing { writer, about, generation, bucket: None });
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
        // Chunks that step together are written together, as of one round: a restart could not close a round that
        // only some of them have seen. They lie side by side, because a parameter is initialised in one go.
        let mut together = None;
        while let Some(id) = checkpoint.writer.next() {
            if left == 0 && together != Some(id.parameter) {
                self.checkpointing = Some(checkpoint);
                return Ok(None);
            }
            if id == ABOUT {
                let marks = checkpoint.about.clone();
                let about = ChunkRecord { id, version: Version(0), marks: &marks, value: &[], states: &[] };
                checkpoint.writer.push(about)?;
                continue;
            }
            let place = serving.table.place(id);
            let place = place.expect("the layout is of this generation's chunks");
            if together != Some(id.parameter)
                && let Some(device) = &mut self.device
                && !serving.hold_for_checkpoint(device, id, bytes)?
            {
                self.checkpointing = Some(checkpoint);
                return Ok(None);
            }
            let chunk = &mut serving.table.chunks[place];
            if chunk.bucket().is_some() {
                checkpoint.push_bucket(chunk, position, &mut left)?;
            } else {
                left = left.saturating_sub(push_chunk(&mut checkpoint.writer, chunk, position)?);
            }
            if let (true, Some(device)) = (serving.table.chunks[place].release(), &mut self.device) {
                device.released.push(place);
            }
            together = (!serving.table.held(id).rule.rule().is_element_wise()).then_some(id.parameter);
        }
        Ok(Some(checkpoint.writer))
    }

    /// Forgets the part of the journal that no checkpoint needs any more.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn retain_journal(&mut self, storage: &dyn Storage, directory: &str) -> Result<(), Failure> {
        let needed = crate::checkpoint::journal_needed_from(storage, directory)?;
        match (&mut self.journal, needed) {
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
            epoch: self.options.epoch.0,
            generation: serving.table.generation.0,
            chunks: serving.table.chunks.len() as u64,
            job: Some(serving.job.to_message()),
            parameters: serving.table.parameters.iter().map(|(index, held)| held.message(*index)).collect(),
            known: self.known.iter().map(|known| known.0).collect(),
            left: serving.left.iter().map(|left| left.map_or(0, |one| one.0)).collect(),
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
            let restored = bucket.restore(record.version, rates(&marks), record.value, record.states);
            restored.map_err(|failure| damaged(&failure.to_string()))?;
            restore_marks(chunk, record.version, marks);
            return Ok(());
        }
        let bytes = u32::try_from(record.value.len()).map_err(|_| damaged("it is too long"))?;
        let entry = crate::wire::Entry {
            bytes,
            ..crate::wire::Entry::bare(record.id, Default::default(), held.element_type())
        };
        let mut value = self.pool.take(bytes)?;
        value.bytes_mut()[..record.value.len()].copy_from_slice(record.value);
        table.fill(&entry, value);
        let chunk = table.chunks.last_mut().expect("the chunk was just filled");
        for bytes in record.states {
            let mut state = self.pool.take(chunk.bytes)?;
            state.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            chunk.states.push(state);
        }
        restore_marks(chunk, record.version, marks);
        Ok(())
    }

    fn restore_about(&mut self, about: AboutMessage) -> Result<(), Failure> {
        if about.epoch != self.options.epoch.0 {
            return Err(Failure::Node(format!(
                "the checkpoint is of epoch {}, this job is epoch {}: give each job a directory of its own",
                about.epoch, self.options.epoch
            )));
        }
        let finish = FinishMessage { chunks: about.chunks, job: about.job };
        self.serve(&finish).map_err(|refusal| Failure::Node(refusal.text))?;
        self.known = about.known.into_iter().map(Incarnation).collect();
        if let Phase::Serving(serving) = &mut self.phase {
            let left = about.left.into_iter().map(|left| (left > 0).then_some(Incarnation(left)));
            serving.left = left.collect();
        }
        Ok(())
    }
}

fn restore_marks(chunk: &mut Chunk, version: Version, marks: MarksMessage) {
    chunk.version = version;
    chunk.sealed = u8::try_from(marks.sealed).unwrap_or(u8::MAX).min(2);
    chunk.heard = marks.heard.iter().map(Heard::from).collect();
    let open = marks.open.into_iter().map(OpenMessage::open).collect();
    chunk.restored = Some(Box::new(Restoring { position: marks.position, open }));
}

impl Job {
    fn to_message(&self) -> JobMessage {
        let (mode, staleness) = self.mode.numbers();
        JobMessage { mode, staleness, merge: self.merge.number(), trainers: self.trainers, chunk_bytes: 0 }
    }
}

/// Brings a journal that lost its tail with the host to where the checkpoint saw it, with records that mean nothing:
/// a position that a chunk counts as past is not given to a frame that is new.
fn pad(journal: &mut Journal, position: u64) -> Result<(), Failure> {
    let nothing = Frame::bare(Head::new(Kind::Pull)).encode();
    while journal.position() < position {
        let missing = position - journal.position();
        let bytes = missing.min(u64::from(FRAME_PAYLOAD_BYTES_MAX));
        let padding = vec![0; usize::try_from(bytes).expect("a payload's length fits an address")];
        journal.append(&[&nothing, &padding])?;
    }
    Ok(())
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

/// The chunks of a table by parameter and then by chunk, whatever the order in which they came.
fn in_order(table: &Table) -> impl Iterator<Item = &Chunk> {
    table.parameters.values().flat_map(|held| held.group.chunks.iter().map(|place| &table.chunks[*place]))
}

impl Checkpointing {
    /// Copies about `left` bytes of a bucket, or writes so many of its copy. The bucket is the next chunk until it is
    /// whole.
    fn push_bucket(&mut self, chunk: &mut Chunk, position: u64, left: &mut u64) -> Result<(), Failure> {
        let id = chunk.id;
        let mut writing = self.bucket.take().unwrap_or_else(|| BucketWriting::begin(chunk, position));
        let BucketWriting { version, marks, copy, written } = &mut writing;
        let Some(whole) = copy else {
            *copy = chunk.bucket_mut().expect("a bucket is pushed").copy_on(left);
            self.bucket = Some(writing);
            return Ok(());
        };
        let (value, states) = whole.parts();
        let record = ChunkRecord { id, version: *version, marks, value, states: &states };
        let before = *written;
        let is_whole = self.writer.push_some(record, written, *left)?;
        *left -= *written - before;
        if !is_whole {
            self.bucket = Some(writing);
        }
        Ok(())
    }
}

impl BucketWriting {
    fn begin(chunk: &mut Chunk, position: u64) -> Self {
        let marks = MarksMessage::of(chunk, position).encode_to_vec();
        chunk.bucket_mut().expect("a bucket is pushed").begin_copy();
        Self { version: chunk.version, marks, copy: None, written: 0 }
    }
}

fn push_chunk(writer: &mut ShardCheckpoint, chunk: &Chunk, position: u64) -> Result<u64, Failure> {
    let marks = MarksMessage::of(chunk, position).encode_to_vec();
    let bytes = chunk.bytes as usize;
    let states: Vec<&[u8]> = chunk.states.iter().map(|state| &state.bytes()[..bytes]).collect();
    writer.push(ChunkRecord {
        id: chunk.id,
        version: chunk.version,
        marks: &marks,
        value: chunk.value_bytes(),
        states: &states,
    })?;
    Ok(u64::from(chunk.bytes) * (1 + states.len() as u64))
}

fn table_of(about: &AboutMessage) -> Result<Table, Failure> {
    let mut table = Table::new(Generation(about.generation));
    for message in &about.parameters {
        table.declare(message.clone(), &[]).map_err(|refusal| Failure::Node(refusal.text))?;
    }
    let mode = about.job.and_then(|job| Mode::from_numbers(job.mode, job.staleness));
    if let Some(rule) = mode.and_then(rule_of_mode) {
        // Tables of rows are made as they were, without the states of the rule that was declared.
        table.follow(&rule)?;
    }
    Ok(table)
}

#[derive(Clone, PartialEq, Message)]
struct AboutMessage {
    #[prost(uint64, tag = "1")]
    epoch: u64,
    #[prost(uint32, tag = "2")]
    generation: u32,
    #[prost(uint64, tag = "3")]
    chunks: u64,
    #[prost(message, optional, tag = "4")]
    job: Option<JobMessage>,
    #[prost(message, repeated, tag = "5")]
    parameters: Vec<InitMessage>,
    #[prost(uint32, repeated, tag = "6")]
    known: Vec<u32>,
    /// The incarnation with which each trainer left; zero for one that takes part.
    #[prost(uint32, repeated, tag = "7")]
    left: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct MarksMessage {
    #[prost(message, repeated, tag = "1")]
    heard: Vec<HeardMessage>,
    /// Where the journal was when the chunk was written.
    #[prost(uint64, tag = "2")]
    position: u64,
    #[prost(message, repeated, tag = "3")]
    open: Vec<OpenMessage>,
    /// Of a bucket: the learning rates that steps brought with them, where they changed.
    #[prost(message, repeated, tag = "4")]
    rates: Vec<RateMessage>,
    /// How many rounds were complete and not closed.
    #[prost(uint32, tag = "5")]
    sealed: u32,
}

impl MarksMessage {
    /// Of a chunk as it is when the journal is at this position.
    fn of(chunk: &Chunk, position: u64) -> Self {
        let heard = chunk.heard.iter().map(HeardMessage::of).collect();
        let open = chunk.open().map(OpenMessage::of).collect();
        let rates = chunk.bucket().map(RateMessage::of).unwrap_or_default();
        Self { heard, position, open, rates, sealed: chunk.sealed.into() }
    }
}

/// From which version on steps brought which learning rate; absent where the schedule's holds.
#[derive(Clone, Copy, PartialEq, Message)]
struct RateMessage {
    #[prost(uint64, tag = "1")]
    version: u64,
    #[prost(double, optional, tag = "2")]
    rate: Option<f64>,
}

impl RateMessage {
    fn of(bucket: &Bucket) -> Vec<Self> {
        let changes = bucket.rates().changes().iter();
        changes.map(|(version, rate)| Self { version: version.0, rate: *rate }).collect()
    }
}

fn rates(marks: &MarksMessage) -> Rates {
    let mut rates = Rates::default();
    marks.rates.iter().for_each(|one| rates.note(Version(one.version), one.rate));
    rates
}

/// A contribution that is not in the value yet.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct OpenMessage {
    #[prost(uint32, tag = "1")]
    trainer: u32,
    #[prost(uint32, tag = "2")]
    incarnation: u32,
    #[prost(uint64, tag = "3")]
    sequence: u64,
    #[prost(bool, tag = "4")]
    is_ahead: bool,
    /// Whether some of its parts are missing.
    #[prost(bool, tag = "5")]
    is_gathered: bool,
    /// Of a value that replaces the chunk's, the version that comes first.
    #[prost(uint64, optional, tag = "6")]
    set_after: Option<u64>,
}

impl OpenMessage {
    fn of(open: Open) -> Self {
        let Open { trainer, call, stage } = open;
        Self {
            trainer: trainer.0,
            incarnation: call.incarnation.0,
            sequence: call.sequence.0,
            is_ahead: stage == Stage::Ahead,
            is_gathered: stage == Stage::Gathered,
            set_after: if let Stage::Set(after) = stage { Some(after.0) } else { None },
        }
    }

    fn open(self) -> Open {
        let call = Mark { incarnation: Incarnation(self.incarnation), sequence: Sequence(self.sequence) };
        let stage = match (self.set_after, self.is_gathered, self.is_ahead) {
            (Some(after), ..) => Stage::Set(Version(after)),
            (None, true, _) => Stage::Gathered,
            (None, false, true) => Stage::Ahead,
            (None, false, false) => Stage::Entered,
        };
        Open { trainer: TrainerId(self.trainer), call, stage }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct HeardMessage {
    #[prost(uint32, tag = "1")]
    push_incarnation: u32,
    #[prost(uint64, tag = "2")]
    push_sequence: u64,
    #[prost(uint32, tag = "3")]
    set_incarnation: u32,
    #[prost(uint64, tag = "4")]
    set_sequence: u64,
    #[prost(uint64, tag = "5")]
    clock: u64,
}

impl HeardMessage {
    fn of(heard: &Heard) -> Self {
        Self {
            push_incarnation: heard.push.incarnation.0,
            push_sequence: heard.push.sequence.0,
            set_incarnation: heard.set.incarnation.0,
            set_sequence: heard.set.sequence.0,
            clock: heard.clock,
        }
    }
}

impl From<&HeardMessage> for Heard {
    fn from(message: &HeardMessage) -> Self {
        let mark = |incarnation, sequence| Mark { incarnation: Incarnation(incarnation), sequence: Sequence(sequence) };
        Self {
            push: mark(message.push_incarnation, message.push_sequence),
            set: mark(message.set_incarnation, message.set_sequence),
            clock: message.clock,
        }
    }
}

//! The accelerator of a shard, and the choice of the chunks that live on it.
//!
//! A chunk that lives on the accelerator has a [`DeviceChunk`]; its updates are asynchronous work, whose completions
//! `device_work` handles. A chunk without one is updated by the processor.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::chunk::Chunk;
use super::chunk_table::{ChunkTable, Chunks, ShardParameter};
use super::device_chunk::DeviceChunk;
use super::group::SlotIndex;
use super::job::Job;
use super::options::NoRoom;
use super::pool::Pool;
use crate::config::Mode;
use crate::error::Failure;
use crate::ids::{Generation, Version};
use crate::memory::Arena;
use crate::optim::{Formula, Prepared, Step};
use crate::port::{Accelerator, DeviceCode, DeviceFacts, DeviceSlot, Done, NotAdopted, Resident, Work};

/// An accelerator with its queue of work.
pub(super) struct Device {
    accelerator: Box<dyn Accelerator>,
    name: Arc<str>,
    no_room: NoRoom,
    /// Reservation for chunks that are not adopted yet.
    reserved: Option<DeviceReservation>,
    /// Generation of the chunks on it.
    generation: Generation,
    queue: VecDeque<Work>,
    /// Slot index of the chunk in each device slot.
    slot_indices: Vec<SlotIndex>,
    /// Work in flight.
    under_way: usize,
    /// Chunks released by a checkpoint.
    pub(super) released: Vec<SlotIndex>,
    /// The loss of states on it, once it happened.
    lost: Option<String>,
}

impl Device {
    pub(super) fn new(accelerator: Box<dyn Accelerator>, no_room: NoRoom) -> Self {
        let name = accelerator.capabilities().name.into();
        Self {
            accelerator,
            name,
            no_room,
            reserved: None,
            generation: Generation(0),
            queue: VecDeque::new(),
            slot_indices: Vec::new(),
            under_way: 0,
            released: Vec::new(),
            lost: None,
        }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) fn is_under_way(&self) -> bool {
        0 < self.under_way
    }

    /// The chunk of a slot.
    pub(super) fn slot_index(&self, slot: DeviceSlot) -> SlotIndex {
        self.slot_indices[slot.0 as usize]
    }

    /// Records the loss of states: the shard can neither continue nor write a checkpoint.
    pub(super) fn lose(&mut self, what: String) -> Failure {
        Failure::Node(self.lost.insert(what).clone())
    }

    pub(super) fn check_kept(&self) -> Result<(), Failure> {
        self.lost.as_ref().map_or(Ok(()), |lost| Err(Failure::Node(lost.clone())))
    }

    pub(super) fn push(&mut self, work: Work) {
        self.under_way += 1;
        self.queue.push_back(work);
    }

    /// Pins memory that was mapped after the chunks were offered.
    pub(super) fn pin(&mut self, arena: &Arena) -> Result<(), Failure> {
        self.accelerator.pin(arena)
    }

    /// Submits queued work and collects completions.
    pub(super) fn exchange(&mut self, done: &mut Vec<Done>) -> Result<(), Failure> {
        let exchanged = self.accelerator.submit(&mut self.queue).and_then(|()| self.accelerator.poll(done));
        self.under_way -= done.len();
        exchanged.map_err(|failure| {
            let text = format!("{}: {failure}: its chunks are lost", self.name);
            self.lose(text)
        })
    }

    pub(super) fn wait(&mut self, limit: Duration) {
        self.accelerator.wait(limit);
    }

    /// Whether the chunks of this generation are still to be offered.
    pub(super) fn is_new(&self, generation: Generation) -> bool {
        self.generation != generation
    }

    /// Forgets the released chunks of a superseded generation.
    pub(super) fn forget(&mut self) {
        self.released.clear();
    }

    /// Whether missing room is an error.
    pub(super) fn must_hold_all(&self) -> bool {
        self.no_room == NoRoom::Refused
    }

    /// Clears the device and reserves room for a table's chunks.
    ///
    /// # Errors
    /// [`Failure::Call`] when parameters find no room and the policy refuses; it names the bytes asked for and free.
    pub(super) fn reserve(&mut self, job: &Job, table: &ChunkTable) -> Result<(), Failure> {
        self.accelerator.clear();
        self.queue.clear();
        self.slot_indices.clear();
        self.released.clear();
        self.under_way = 0;
        self.reserved = None;
        // Queried once: it is a driver call.
        let DeviceFacts { bytes_free: free, bytes_least: least, .. } = self.accelerator.capabilities();
        let mut reserved = DeviceReservation::of(table.generation, least);
        for held in table.parameters.values() {
            self.reserve_parameter(job, held, &table.chunks, &mut reserved);
        }
        if let Some(full) = &reserved.full {
            self.accelerator.clear();
            let (name, asked) = (&self.name, reserved.asked);
            return Err(Failure::call(format!(
                "{name}: {asked} bytes were asked for, for parameters, states and kept sums, and {free} were free; \
                 {full}"
            )));
        }
        self.reserved = Some(reserved);
        Ok(())
    }

    fn reserve_parameter(
        &mut self,
        job: &Job,
        held: &ShardParameter,
        chunks: &Chunks,
        reserved: &mut DeviceReservation,
    ) {
        let (count, least) = (held.chunks.len(), reserved.least);
        let rule = job.rule_of(&held.rule);
        if let Some(kept) = reserved.tally.kept(job, held) {
            *kept += count as u64;
            return;
        }
        let (code, keeps_sum) = (code_of(&rule), !rule.rule().is_element_wise());
        let resident = |slot_index: SlotIndex| {
            let Chunk { element_type, bytes, .. } = chunks[slot_index];
            Resident { element_type, bytes, code: code.clone(), keeps_sum }
        };
        let slot_indices = held.chunks.iter().copied();
        let slot_indices: Vec<SlotIndex> =
            slot_indices.filter(|slot_index| least <= chunks[*slot_index].bytes).collect();
        reserved.tally.short += (count - slot_indices.len()) as u64;
        let asked: u64 = slot_indices.iter().map(|slot_index| resident(*slot_index).bytes_total()).sum();
        for (taken, slot_index) in slot_indices.iter().enumerate() {
            let resident = resident(*slot_index);
            let slot = match self.accelerator.adopt(&resident) {
                Ok(slot) => slot,
                Err(why) => return reserved.refuse(held, slot_indices.len() - taken, asked, &why, self.no_room),
            };
            reserved.on_device(*slot_index, slot, resident);
        }
        reserved.asked += asked;
    }

    /// Moves the chunks with reserved room to the device.
    ///
    /// # Errors
    /// [`Failure::Node`] when parameters that must live here find no room.
    pub(super) fn adopt_chunks(&mut self, job: &Job, table: &mut ChunkTable, pool: &Pool) -> Result<(), Failure> {
        self.generation = table.generation;
        if self.reserved.as_ref().is_none_or(|reserved| reserved.generation != self.generation) {
            self.reserve(job, table).map_err(|failure| self.lose(failure.to_string()))?;
        }
        let DeviceReservation { on_device_chunks, tally, .. } = self.reserved.take().expect("it was just made");
        if let Err(failure) = pool.offer(self.accelerator.as_mut()) {
            tracing::warn!("{}: memory is not locked, and copies are slower: {failure}", self.name);
        }
        for (slot_index, slot, code) in on_device_chunks {
            assert_eq!(slot.0 as usize, self.slot_indices.len(), "slots are counted from zero");
            self.slot_indices.push(slot_index);
            let chunk = &mut table.chunks[slot_index];
            let states = std::mem::take(&mut chunk.states);
            chunk.on_device = Some(Box::new(DeviceChunk::new(slot, code, Arc::clone(&self.name))));
            self.push(Work::Load { slot, parameter: chunk.value(), states });
        }
        tracing::info!("{}: {tally}", self.name);
        Ok(())
    }
}

/// A reservation for the chunks of a table.
struct DeviceReservation {
    /// Generation of the table.
    generation: Generation,
    /// Chunks shorter than this are not offered.
    least: u32,
    /// Chunks with a device slot, in the order of slots.
    on_device_chunks: Vec<(SlotIndex, DeviceSlot, DeviceCode)>,
    tally: DevicePlacement,
    /// Bytes of all chunks asked for.
    asked: u64,
    /// The first parameter without room, where that is an error.
    full: Option<String>,
}

impl DeviceReservation {
    fn of(generation: Generation, least: u32) -> Self {
        Self {
            generation,
            least,
            on_device_chunks: Vec::new(),
            tally: DevicePlacement::default(),
            asked: 0,
            full: None,
        }
    }

    fn on_device(&mut self, slot_index: SlotIndex, slot: DeviceSlot, resident: Resident) {
        self.tally.seated += 1;
        self.tally.bytes += resident.bytes_total();
        self.on_device_chunks.push((slot_index, slot, resident.code));
    }

    /// Records that the last chunks of a parameter, which takes `asked` bytes, found no room.
    fn refuse(&mut self, held: &ShardParameter, left: usize, asked: u64, why: &NotAdopted, no_room: NoRoom) {
        self.tally.refused += left as u64;
        let what = format!("parameter {:?}: {left} of {} chunks", held.name(), held.chunks.len());
        match why {
            NotAdopted::Full(why) if no_room == NoRoom::Refused => {
                self.asked += asked;
                self.full.get_or_insert(format!("{what} found no room: {why}"));
            }
            _ => tracing::warn!("{what} stay on the processor: {why}"),
        }
    }
}

/// The device code of a rule, independent of the step.
fn code_of(rule: &Prepared) -> DeviceCode {
    let step = Step { version: Version(1), norm: Some(1.0), ..Step::FIRST };
    match rule.formula(&step, &mut Vec::new()) {
        Formula::Add { .. } => DeviceCode::Add,
        Formula::Sum { .. } => DeviceCode::Sum,
        Formula::Rule { code, .. } => DeviceCode::Rule(Arc::clone(code)),
    }
}

/// Counts of chunks by placement, for the log line.
#[derive(Default)]
struct DevicePlacement {
    seated: u64,
    bytes: u64,
    of_rows: u64,
    bounded: u64,
    reducing: u64,
    hosted: u64,
    short: u64,
    refused: u64,
}

impl DevicePlacement {
    /// The counter of a parameter that stays on the processor by kind or mode.
    fn kept(&mut self, job: &Job, held: &ShardParameter) -> Option<&mut u64> {
        if held.rows.is_some() {
            Some(&mut self.of_rows)
        } else if matches!(job.mode, Mode::Staleness { .. }) {
            Some(&mut self.bounded)
        } else if job.rule_of(&held.rule).rule().has_reductions() || held.declaration.total_part.is_some() {
            Some(&mut self.reducing)
        } else if held.declaration.hosted.is_some() {
            Some(&mut self.hosted)
        } else {
            None
        }
    }
}

impl std::fmt::Display for DevicePlacement {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} chunks live there, {} bytes with states and kept sums", self.seated, self.bytes)?;
        let reasons = [
            (self.of_rows, "tables of rows"),
            (self.bounded, "bounded staleness, where admission depends on completed updates"),
            (self.reducing, "a rule with sum or norm"),
            (self.hosted, "a program that the executor runs"),
            (self.short, "too short to be faster there"),
            (self.refused, "refused"),
        ];
        let apart = reasons.iter().filter(|(count, _)| 0 < *count);
        let words: Vec<String> = apart.map(|(count, why)| format!("{count} ({why})")).collect();
        if words.is_empty() { Ok(()) } else { write!(formatter, "; on the processor: {}", words.join(", ")) }
    }
}

//! The accelerator of a shard, and which of its chunks live there.
//!
//! A chunk has a [`Seat`] or it has none, and then nothing here concerns it. One that has is updated by work that ends
//! later; how the shard goes on then is in `completing`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::chunk::Chunk;
use super::gate::{Held, Table};
use super::pool::Pool;
use super::program::rule_of;
use super::serving::{Job, Serving};
use crate::config::Mode;
use crate::error::Failure;
use crate::ids::{Generation, Version};
use crate::memory::Lease;
use crate::optim::{Formula, Prepared, Step};
use crate::port::{Accelerator, Code, DeviceFacts, DeviceSlot, Done, GradientLease, NotAdopted, Resident, Work};

/// What becomes of parameters that an accelerator could take and has no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// They stay on the processor, and the log says so.
    Processor,
    /// They are not initialised: whoever does it is told how many bytes were asked for, and how many are free. A shard
    /// that restores them stops.
    Refused,
}

/// An accelerator with what was submitted to it.
pub(super) struct Device {
    accelerator: Box<dyn Accelerator>,
    name: Arc<str>,
    no_room: NoRoom,
    /// Room for chunks that do not live there yet.
    reserved: Option<Reserved>,
    /// Whose chunks live on it.
    generation: Generation,
    queue: VecDeque<Work>,
    /// Which chunk has which slot.
    places: Vec<usize>,
    /// Pieces of work that have not come back.
    under_way: usize,
    /// Chunks that a checkpoint has held up and lets go.
    pub(super) released: Vec<usize>,
    /// What was lost with it, once something was.
    lost: Option<String>,
}

/// What a chunk on an accelerator has there.
pub(super) struct Seat {
    pub(super) slot: DeviceSlot,
    pub(super) code: Code,
    pub(super) doing: Doing,
    /// Whether the states in the host's memory are those on the device, or there are none.
    pub(super) is_fresh: bool,
    /// Whether a checkpoint is about to write it: no update begins.
    pub(super) is_held: bool,
    /// Whether it gives up its place once the update that is over is published.
    pub(super) leaves: bool,
    /// Why its states could not be stored.
    pub(super) not_stored: Option<String>,
    device: Arc<str>,
}

/// What is done for a chunk on the device.
#[derive(Default)]
pub(super) enum Doing {
    #[default]
    Nothing,
    Loading,
    /// Its gradients are summed, where it steps together with others.
    Summing,
    /// Its sum is on the device, and it waits for those of the others.
    Summed(Box<Summed>),
    Updating,
    Storing,
    /// The update is over and not published.
    Updated(Lease),
    /// Its states are stored because it goes back to the processor, with the work that could not be done.
    Leaving(Option<Box<Work>>),
}

/// What an update takes whose sum was made before.
pub(super) struct Summed {
    /// What was summed, for when the device cannot do the update.
    pub(super) gradients: Vec<GradientLease>,
    /// For the next value. It has the sums of squares until then.
    pub(super) into: Lease,
}

impl Seat {
    fn new(slot: DeviceSlot, code: Code, device: Arc<str>) -> Self {
        Self {
            slot,
            code,
            doing: Doing::Loading,
            is_fresh: true,
            is_held: false,
            leaves: false,
            not_stored: None,
            device,
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        !matches!(self.doing, Doing::Nothing)
    }

    /// Whether the device does a part of its update.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self.doing, Doing::Summing | Doing::Updating | Doing::Leaving(Some(_)))
    }

    /// Whether a checkpoint can write the chunk as it is: value, states and marks are of one version, and what is not
    /// in them waits for its turn, and the journal has it.
    pub(super) fn is_writable(&self) -> bool {
        let is_at_rest = matches!(self.doing, Doing::Nothing) && self.is_fresh;
        is_at_rest || self.code.states() == 0
    }

    /// What a round that is complete waits for, for who asks why it is not closed.
    pub(super) fn waits_for(&self) -> Option<String> {
        self.is_busy().then(|| self.device.to_string())
    }
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
            places: Vec::new(),
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
    pub(super) fn place(&self, slot: DeviceSlot) -> usize {
        self.places[slot.0 as usize]
    }

    /// The states on it are gone: the shard cannot go on, nor write down what it has.
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

    /// Hands over what waits, and takes back what is over.
    pub(super) fn exchange(&mut self, done: &mut Vec<Done>) -> Result<(), Failure> {
        let exchanged = self.accelerator.submit(&mut self.queue).and_then(|()| self.accelerator.poll(done));
        self.under_way -= done.len();
        exchanged.map_err(|failure| {
            let text = format!("{}: {failure}: what lives on it is lost", self.name);
            self.lose(text)
        })
    }

    pub(super) fn wait(&mut self, limit: Duration) {
        self.accelerator.wait(limit);
    }

    /// Whether the chunks of a generation have yet to be offered.
    pub(super) fn is_new(&self, generation: Generation) -> bool {
        self.generation != generation
    }

    /// The chunks that lived here are no more: nobody goes on with them.
    pub(super) fn forget(&mut self) {
        self.released.clear();
    }

    /// Whether parameters that find no room are an error.
    pub(super) fn must_hold_all(&self) -> bool {
        self.no_room == NoRoom::Refused
    }

    /// Forgets what lived here, and makes room for a table's chunks, as far as they can live here.
    ///
    /// # Errors
    /// [`Failure::Call`] when parameters that must live here find no room: how many bytes all of them take, and how
    /// many were free.
    pub(super) fn reserve(&mut self, job: &Job, table: &Table) -> Result<(), Failure> {
        self.accelerator.clear();
        self.queue.clear();
        self.places.clear();
        self.released.clear();
        self.under_way = 0;
        self.reserved = None;
        // Asked once: a device asks its driver for it.
        let DeviceFacts { bytes_free: free, bytes_least: least, .. } = self.accelerator.capabilities();
        let mut reserved = Reserved::of(table.generation, least);
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

    fn reserve_parameter(&mut self, job: &Job, held: &Held, chunks: &[Chunk], reserved: &mut Reserved) {
        let (count, least) = (held.group.chunks.len(), reserved.least);
        let rule = rule_of(job, &held.rule);
        if let Some(kept) = reserved.tally.kept(job, held) {
            *kept += count as u64;
            return;
        }
        let (code, keeps_sum) = (code_of(&rule), !rule.rule().is_element_wise());
        let resident = |place: usize| {
            let Chunk { element_type, bytes, .. } = chunks[place];
            Resident { element_type, bytes, code: code.clone(), keeps_sum }
        };
        let places = held.group.chunks.iter().copied();
        let places: Vec<usize> = places.filter(|place| least <= chunks[*place].bytes).collect();
        reserved.tally.short += (count - places.len()) as u64;
        let asked: u64 = places.iter().map(|place| resident(*place).bytes_total()).sum();
        for (taken, place) in places.iter().enumerate() {
            let resident = resident(*place);
            let slot = match self.accelerator.adopt(&resident) {
                Ok(slot) => slot,
                Err(why) => return reserved.refuse(held, places.len() - taken, asked, &why, self.no_room),
            };
            reserved.seat(*place, slot, resident);
        }
        reserved.asked += asked;
    }

    /// Takes in the chunks of a shard that serves, those that there is room for.
    ///
    /// # Errors
    /// [`Failure::Node`] when parameters that must live here find no room.
    pub(super) fn take_in(&mut self, serving: &mut Serving, pool: &Pool) -> Result<(), Failure> {
        self.generation = serving.table.generation;
        if self.reserved.as_ref().is_none_or(|reserved| reserved.generation != self.generation) {
            self.reserve(&serving.job, &serving.table).map_err(|failure| self.lose(failure.to_string()))?;
        }
        let Reserved { seats, tally, .. } = self.reserved.take().expect("it was just made");
        if let Err(failure) = pool.offer(self.accelerator.as_mut()) {
            tracing::warn!("{}: memory is not locked, and copies are slower: {failure}", self.name);
        }
        for (place, slot, code) in seats {
            assert_eq!(slot.0 as usize, self.places.len(), "slots are counted from zero");
            self.places.push(place);
            let chunk = &mut serving.table.chunks[place];
            let states = std::mem::take(&mut chunk.states);
            chunk.seat = Some(Box::new(Seat::new(slot, code, Arc::clone(&self.name))));
            self.push(Work::Load { slot, parameter: chunk.value(), states });
        }
        tracing::info!("{}: {tally}", self.name);
        Ok(())
    }
}

/// Room for the chunks of a table.
struct Reserved {
    /// Whose it is.
    generation: Generation,
    /// Chunks shorter than this are not offered.
    least: u32,
    /// Chunks that have a slot: their places in the table, in the order of slots.
    seats: Vec<(usize, DeviceSlot, Code)>,
    tally: Tally,
    /// Bytes of the chunks that have room, and of those for which there is none.
    asked: u64,
    /// What must find room here, and finds none.
    full: Option<String>,
}

impl Reserved {
    fn of(generation: Generation, least: u32) -> Self {
        Self { generation, least, seats: Vec::new(), tally: Tally::default(), asked: 0, full: None }
    }

    fn seat(&mut self, place: usize, slot: DeviceSlot, resident: Resident) {
        self.tally.seated += 1;
        self.tally.bytes += resident.bytes_total();
        self.seats.push((place, slot, resident.code));
    }

    /// The last chunks of a parameter, which takes `asked` bytes, cannot live there.
    fn refuse(&mut self, held: &Held, left: usize, asked: u64, why: &NotAdopted, no_room: NoRoom) {
        self.tally.refused += left as u64;
        let what = format!("parameter {:?}: {left} of {} chunks", held.name(), held.group.chunks.len());
        match why {
            NotAdopted::Full(why) if no_room == NoRoom::Refused => {
                self.asked += asked;
                self.full.get_or_insert(format!("{what} found no room: {why}"));
            }
            _ => tracing::warn!("{what} stay on the processor: {why}"),
        }
    }
}

/// What is run for a rule's chunks, whatever the step.
fn code_of(rule: &Prepared) -> Code {
    let step = Step { version: Version(1), rate: None, norm: Some(1.0), scale: 1.0 };
    match rule.formula(&step, &mut Vec::new()) {
        Formula::Add { .. } => Code::Add,
        Formula::Sum { .. } => Code::Sum,
        Formula::Rule { code, .. } => Code::Rule(Arc::clone(code)),
    }
}

/// Where chunks went, for the line that says so.
#[derive(Default)]
struct Tally {
    seated: u64,
    bytes: u64,
    of_rows: u64,
    bounded: u64,
    short: u64,
    refused: u64,
}

impl Tally {
    /// Where the chunks of a parameter are counted that no accelerator takes.
    fn kept(&mut self, job: &Job, held: &Held) -> Option<&mut u64> {
        if held.rows.is_some() {
            Some(&mut self.of_rows)
        } else if matches!(job.mode, Mode::Staleness { .. }) {
            Some(&mut self.bounded)
        } else {
            None
        }
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} chunks live there, {} bytes with states and kept sums", self.seated, self.bytes)?;
        let reasons = [
            (self.of_rows, "tables of rows"),
            (self.bounded, "bounded staleness, where what is admitted depends on what is over"),
            (self.short, "too short to be faster there"),
            (self.refused, "refused"),
        ];
        let apart = reasons.iter().filter(|(count, _)| 0 < *count);
        let words: Vec<String> = apart.map(|(count, why)| format!("{count} ({why})")).collect();
        if words.is_empty() { Ok(()) } else { write!(formatter, "; on the processor: {}", words.join(", ")) }
    }
}

//! The accelerator of a shard, and which of its chunks live there.
//!
//! A chunk has a [`Seat`] or it has none, and then nothing here concerns it. One that has is updated by work that ends
//! later; how the shard goes on then is in `completing`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::chunk::Chunk;
use super::gate::Held;
use super::pool::Pool;
use super::serving::{Job, Serving};
use crate::config::Mode;
use crate::error::Failure;
use crate::ids::{Generation, Version};
use crate::memory::Lease;
use crate::optim::{Formula, Step};
use crate::port::{Accelerator, Code, DeviceSlot, Done, Resident, Work};

/// An accelerator with what was submitted to it.
pub(super) struct Device {
    accelerator: Box<dyn Accelerator>,
    name: Arc<str>,
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
    Updating,
    Storing,
    /// The update is over and not published.
    Updated(Lease),
    /// Its states are stored because it goes back to the processor, with the work that could not be done.
    Leaving(Option<Box<Work>>),
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
        !matches!(self.doing, Doing::Nothing | Doing::Updated(_))
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
    pub(super) fn new(accelerator: Box<dyn Accelerator>) -> Self {
        let name = accelerator.capabilities().name.into();
        Self {
            accelerator,
            name,
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

    /// Forgets what lived here, and takes in the chunks of a shard that serves, as far as they can live here.
    pub(super) fn take_in(&mut self, serving: &mut Serving, pool: &Pool) {
        self.accelerator.clear();
        self.queue.clear();
        self.places.clear();
        self.released.clear();
        self.under_way = 0;
        self.generation = serving.table.generation;
        if let Err(failure) = pool.offer(self.accelerator.as_mut()) {
            tracing::warn!("{}: memory is not locked, and copies are slower: {failure}", self.name);
        }
        let mut tally = Tally::default();
        for held in serving.table.parameters.values() {
            self.take_in_parameter(&serving.job, held, &mut serving.table.chunks, &mut tally);
        }
        tracing::info!("{}: {tally}", self.name);
    }

    fn take_in_parameter(&mut self, job: &Job, held: &Held, chunks: &mut [Chunk], tally: &mut Tally) {
        let (places, least) = (&held.group.chunks, self.accelerator.capabilities().bytes_least);
        let count = places.len() as u64;
        if held.rows.is_some() {
            tally.of_rows += count;
            return;
        }
        if matches!(job.mode, Mode::Staleness { .. }) {
            tally.bounded += count;
            return;
        }
        if !held.rule.rule().is_element_wise() {
            tally.whole += count;
            return;
        }
        for (taken, place) in (0..).zip(places) {
            let chunk = &mut chunks[*place];
            if chunk.bytes < least {
                tally.short += 1;
            } else if let Err(failure) = self.take_in_chunk(*place, chunk, tally) {
                let left = count - taken;
                tally.refused += left;
                let name = held.name();
                tracing::warn!("parameter {name:?}: {left} of {count} chunks stay on the processor: {failure}");
                return;
            }
        }
    }

    fn take_in_chunk(&mut self, place: usize, chunk: &mut Chunk, tally: &mut Tally) -> Result<(), Failure> {
        let resident = Resident { element_type: chunk.element_type, bytes: chunk.bytes, code: code_of(chunk) };
        let slot = self.accelerator.adopt(&resident)?;
        assert_eq!(slot.0 as usize, self.places.len(), "slots are counted from zero");
        self.places.push(place);
        tally.seated += 1;
        tally.bytes += resident.bytes_total();
        let states = std::mem::take(&mut chunk.states);
        chunk.seat = Some(Box::new(Seat::new(slot, resident.code, Arc::clone(&self.name))));
        self.push(Work::Load { slot, parameter: chunk.value(), states });
        Ok(())
    }
}

/// What is run for a chunk, whatever the step.
fn code_of(chunk: &Chunk) -> Code {
    let step = Step { version: Version(1), rate: None, norm: None, scale: 1.0 };
    match chunk.rule.formula(&step, &mut Vec::new()) {
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
    whole: u64,
    short: u64,
    refused: u64,
}

impl std::fmt::Display for Tally {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} chunks live there, {} bytes with their states", self.seated, self.bytes)?;
        let reasons = [
            (self.of_rows, "tables of rows"),
            (self.bounded, "bounded staleness, where what is admitted depends on what is over"),
            (self.whole, "rules that need the whole gradient"),
            (self.short, "too short to be faster there"),
            (self.refused, "refused"),
        ];
        let apart = reasons.iter().filter(|(count, _)| 0 < *count);
        let words: Vec<String> = apart.map(|(count, why)| format!("{count} ({why})")).collect();
        if words.is_empty() { Ok(()) } else { write!(formatter, "; on the processor: {}", words.join(", ")) }
    }
}

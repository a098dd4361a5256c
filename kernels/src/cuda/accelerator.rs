//! The accelerator: chunks in the device's memory, and work that runs through its lanes.
//!
//! ```text
//! In       numbers, gradients -> bank    numbers, gradients -> next bank
//! Compute                        sum and rule, in the slot                  sum and rule, in another slot
//! Out                                                         parameter ->
//! ```
//!
//! Events order a piece of work's copies and kernels, and those of the next one begin while it runs. The host waits for
//! nothing; it asks for the one event at the end. Bytes in memory that is not pinned go through a ring of pinned
//! pieces, and the work is submitted as far as there are free ones, a little in every turn of the caller's loop.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::limits::RULE_SCALARS_MAX;
use pserver_core::memory::Arena;
use pserver_core::port::{Accelerator, DeviceFacts, DeviceSlot, Done, NotAdopted, Resident, Work};

use super::arguments::GRADIENTS_MAX;
use super::checked::Refused;
use super::code::{Kernels, Program};
use super::gathering::{Banks, aligned};
use super::locked::Locked;
use super::room::{Places, Room};
use super::safe::{Context, Entry, Event, Lanes, Memory, Part, Piece, Pinned, Ring, Ticket};
use super::settings::Settings;
use super::submission::Course;

/// Work that is under way at the same time: enough that copies and kernels of several chunks overlap, and that a round
/// of small chunks is not one at a time.
const DEPTH: usize = 64;

/// One update's numbers at most.
const NUMBERS_BYTES: usize = RULE_SCALARS_MAX * 8;

/// Pieces of the ring that bytes of memory go through which is not pinned.
pub(super) const RING_PIECES: usize = 8;

/// How long [`Accelerator::wait`] looks away: about what a copy of a MiB takes.
const LOOK_AWAY: Duration = Duration::from_micros(20);
/// How often it looks before it looks away.
const LOOKS: u32 = 32;

/// A device of CUDA.
pub struct Cuda {
    name: String,
    settings: Settings,
    pub(super) context: Arc<Context>,
    // The lanes go first: whatever they work on is given up after them.
    pub(super) lanes: Lanes<Job>,
    pub(super) ring: Ring,
    /// Work whose bytes are not all on their way: nothing else begins before.
    pub(super) course: Option<Course>,
    pub(super) kernels: Kernels,
    pub(super) banks: Banks,
    /// The sum of the groups so far. Only the compute lane touches it, in order.
    pub(super) sum: Part,
    pub(super) desks: Vec<Desk>,
    pub(super) free: Vec<Seat>,
    room: Room,
    pub(super) slots: Vec<Slot>,
    pub(super) arenas: Vec<Locked>,
    /// Work that was not submitted whole, and why.
    pub(super) spoiled: Vec<(Ticket, Failure)>,
    /// Work that is over and not yet told.
    pub(super) over: Vec<Done>,
    /// Why the device is gone.
    lost: Option<String>,
    /// Places for the lists of the work that begins.
    pub(super) packed: Vec<u8>,
    pub(super) gradients: Vec<(u32, ElementType)>,
    /// Of what goes to the device, in order: whether the device reads it where it is.
    pub(super) is_pinned: Vec<bool>,
}

/// A chunk's place.
pub(super) struct Slot {
    pub(super) resident: Resident,
    pub(super) program: Program,
    pub(super) sum: Entry,
    pub(super) parameter: Part,
    pub(super) states: Vec<Part>,
    pub(super) kept: Option<Kept>,
    pub(super) is_loaded: bool,
    pub(super) is_busy: bool,
    /// Why nobody knows what is in it.
    pub(super) broken: Option<String>,
}

/// A slot's sum of gradients, for the next update.
pub(super) struct Kept {
    pub(super) sum: Part,
    pub(super) squares: Part,
    /// What makes the squares.
    pub(super) entry: Entry,
    /// Whether there is a sum.
    pub(super) is_there: bool,
}

/// What one piece of work under way needs on the device.
pub(super) struct Desk {
    pub(super) numbers: Part,
    /// Where there are no gradients: its copy in is done, and later its kernel. A wait is for what was recorded when it
    /// was asked for, so one event is both.
    pub(super) reached: Event,
}

/// What it needs on the host.
pub(super) struct Seat {
    pub(super) desk: usize,
    pub(super) numbers: Piece,
    pub(super) end: Event,
}

/// Work under way.
pub(super) struct Job {
    pub(super) work: Work,
    pub(super) desk: usize,
    pub(super) numbers: Piece,
}

impl Cuda {
    /// Opens a device and takes the memory that does not depend on chunks.
    ///
    /// # Errors
    /// [`Failure::Call`] with what was missing: the driver, a device, this device, memory (bytes asked for and free).
    pub fn open(settings: Settings) -> Result<Self, Failure> {
        settings.check()?;
        let context = Context::open(settings.ordinal).map_err(Failure::call)?;
        let found = context.properties();
        let (major, minor) = found.driver;
        let name = format!("cuda:{} ({}, driver for CUDA {major}.{minor})", settings.ordinal, found.name);
        let refused = |error: Refused| Failure::call(format!("CUDA device {}: {error}", settings.ordinal));
        let sum_bytes = aligned(u64::from(settings.chunk_bytes));
        let gradient_bytes = settings.gradient_bytes;
        let fixed = sum_bytes + gradient_bytes + (DEPTH * NUMBERS_BYTES) as u64;
        let memory = Memory::new(&context, fixed).map_err(|error| {
            let (free, total) = context.memory().unwrap_or((0, 0));
            Failure::call(format!(
                "memory of CUDA device {}: {fixed} bytes were asked for (gradients {gradient_bytes}, a sum {sum_bytes} \
                 and numbers), {free} of {total} are free: {error}",
                settings.ordinal
            ))
        })?;
        let part = |range| memory.part(range);
        let pinned = |bytes: usize| {
            Pinned::new(&context, bytes).map_err(|error| {
                let ordinal = settings.ordinal;
                let text = "bytes of the host's memory were to be pinned for its copies";
                Failure::call(format!("CUDA device {ordinal}: {bytes} {text}: {error}"))
            })
        };
        let seats = pinned(DEPTH * NUMBERS_BYTES)?.pieces(NUMBERS_BYTES);
        let piece_bytes = (settings.staging_bytes as usize / RING_PIECES).max(1);
        let ring = pinned(piece_bytes * RING_PIECES)?.pieces(piece_bytes);
        let mut desks = Vec::with_capacity(DEPTH);
        let mut free = Vec::with_capacity(DEPTH);
        for (desk, numbers) in seats.into_iter().enumerate() {
            let event = || Event::new(&context, false).map_err(refused);
            let from = sum_bytes + gradient_bytes + (desk * NUMBERS_BYTES) as u64;
            let place = part(from..from + NUMBERS_BYTES as u64);
            desks.push(Desk { numbers: place, reached: event()? });
            free.push(Seat { desk, numbers, end: event()? });
        }
        Ok(Self {
            lanes: Lanes::new(&context, DEPTH).map_err(refused)?,
            ring: Ring::new(&context, ring).map_err(refused)?,
            course: None,
            kernels: Kernels::new(&context, settings.cache.as_deref())?,
            banks: Banks::new(&context, &part(sum_bytes..sum_bytes + gradient_bytes)).map_err(refused)?,
            sum: part(0..sum_bytes),
            room: Room::new(&context, settings.memory_bytes, fixed),
            packed: Vec::with_capacity(NUMBERS_BYTES),
            gradients: Vec::with_capacity(GRADIENTS_MAX),
            is_pinned: Vec::with_capacity(GRADIENTS_MAX),
            slots: Vec::new(),
            arenas: Vec::new(),
            spoiled: Vec::new(),
            over: Vec::with_capacity(DEPTH),
            lost: None,
            name,
            desks,
            free,
            context,
            settings,
        })
    }

    fn check_alive(&self) -> Result<(), Failure> {
        self.lost.as_ref().map_or(Ok(()), |reason| Err(Failure::Device(format!("{} is lost: {reason}", self.name))))
    }

    /// A call failed that no single piece of work is behind.
    pub(super) fn lose(&mut self, refused: &Refused) -> Failure {
        let failure = Failure::Device(format!("{} is lost: {refused}", self.name));
        if self.lost.is_none() {
            tracing::error!(%refused, device = self.name, "a CUDA device is lost; its memory is not used again");
            self.lost = Some(refused.to_string());
        }
        failure
    }

    /// Gives arenas their pages back, unless the device may still work on them.
    fn let_go(&mut self) {
        if self.lost.is_none() && self.lanes.len() == 0 {
            self.arenas.clear();
        } else {
            self.arenas.drain(..).for_each(mem::forget);
        }
    }

    /// Goes on with what is not all on its way, and takes what is over from the lanes.
    fn collect(&mut self) -> Result<(), Failure> {
        self.check_alive()?;
        self.go_on()?;
        let Self { lanes, free, slots, spoiled, over, .. } = self;
        let collected = lanes.release(|ticket, job, end| {
            let Job { work, desk, numbers } = job;
            free.push(Seat { desk, numbers, end });
            let slot = &mut slots[work.slot().0 as usize];
            slot.is_busy = false;
            let spoilt = spoiled.iter().position(|(other, _)| *other == ticket);
            let outcome = spoilt.map_or(Ok(()), |place| Err(spoiled.swap_remove(place).1));
            match &outcome {
                Ok(()) => slot.note_happened(&work),
                Err(Failure::Device(reason)) => slot.broken = Some(reason.clone()),
                Err(_) => {}
            }
            over.push(Done { work, outcome });
        });
        collected.map_err(|refused| self.lose(&refused))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl Accelerator for Cuda {
    fn capabilities(&self) -> DeviceFacts {
        DeviceFacts {
            name: self.name.clone(),
            bytes_free: if self.lost.is_some() { 0 } else { self.room.free() },
            bytes_least: self.settings.bytes_least,
        }
    }

    fn pin(&mut self, arena: &Arena) -> Result<(), Failure> {
        self.check_alive()?;
        let mut locked = Locked::new(arena);
        locked.try_first(&self.context).map_err(Failure::call)?;
        self.arenas.push(locked);
        Ok(())
    }

    fn adopt(&mut self, resident: &Resident) -> Result<DeviceSlot, NotAdopted> {
        self.check_alive()?;
        let (bytes, most) = (u64::from(resident.bytes), self.settings.chunk_bytes);
        if most < resident.bytes {
            let text = format!("a chunk of {bytes} bytes; this device was opened for {most} at most");
            return Err(NotAdopted::Unfit(text));
        }
        let program = self.kernels.program(&resident.code, resident.element_type)?;
        let sum = self.kernels.sum(resident.element_type)?;
        let squares = resident.keeps_sum.then(|| self.kernels.squares(resident.element_type)).transpose()?;
        let Places { parameter, states, kept } = self.room.take(resident)?;
        let kept = kept.zip(squares).map(|((sum, squares), entry)| Kept { sum, squares, entry, is_there: false });
        let slot = DeviceSlot(u32::try_from(self.slots.len()).expect("there are fewer chunks than that"));
        let resident = resident.clone();
        let (is_loaded, is_busy, broken) = (false, false, None);
        self.slots.push(Slot { resident, program, sum, parameter, states, kept, is_loaded, is_busy, broken });
        Ok(slot)
    }

    fn clear(&mut self) {
        let course = self.course.take();
        if self.lost.is_none() {
            // After a restore this is a thread's first call of the driver.
            let waited = self.context.enter().and_then(|()| {
                course.map_or(Ok(()), |course| self.lanes.close_early(course.ticket))?;
                self.lanes.synchronize()
            });
            let emptied = waited.and_then(|()| {
                self.lanes.empty(|job, end| {
                    self.free.push(Seat { desk: job.desk, numbers: job.numbers, end });
                })
            });
            emptied.unwrap_or_else(|refused| drop(self.lose(&refused)));
        }
        self.over.clear();
        self.spoiled.clear();
        self.slots.clear();
        self.let_go();
        self.room.clear();
        self.kernels.clear();
    }

    fn submit(&mut self, queue: &mut VecDeque<Work>) -> Result<(), Failure> {
        self.check_alive()?;
        self.context.enter().map_err(|refused| self.lose(&refused))?;
        self.go_on()?;
        while self.course.is_none()
            && self.lanes.has_room()
            && let Some(work) = queue.pop_front()
        {
            self.begin(work)?;
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Failure> {
        self.check_alive()?;
        self.context.enter().map_err(|refused| self.lose(&refused))?;
        self.collect()?;
        done.append(&mut self.over);
        Ok(())
    }

    fn wait(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut looks = 0;
        while self.over.is_empty() && 0 < self.lanes.len() && self.lost.is_none() {
            // What fails here is kept, and the next poll says it.
            if self.context.enter().is_err() || self.collect().is_err() || until <= Instant::now() {
                return;
            }
            looks += 1;
            if LOOKS < looks {
                thread::sleep(LOOK_AWAY);
            }
        }
    }
}

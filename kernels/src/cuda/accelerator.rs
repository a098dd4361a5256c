//! CUDA accelerator: chunks in device memory, updated by work that runs on three streams.
//!
//! ```text
//! In       numbers, gradients -> bank    numbers, gradients -> next bank
//! Compute                        sum and rule, in the slot                  sum and rule, in another slot
//! Out                                                         parameter ->
//! ```
//!
//! Events order the copies and kernels of one piece of work; the next one overlaps with it. The host never blocks; it
//! polls the event at the end. Bytes in memory that is not pinned go through a ring of pinned staging pieces, and work
//! is submitted as far as pieces are free, a little in every turn of the caller's loop.

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
use super::checked::DriverError;
use super::chunk_memory::{ChunkMemory, ChunkRanges};
use super::code::{KernelLoader, UpdateKernel};
use super::gathering::{Banks, aligned};
use super::pinned_arena::PinnedArena;
use super::safe::{
    CudaContext, CudaEvent, DeviceMemory, DeviceRange, KernelFunction, PinnedMemory, PinnedRange, Ring, StreamSet,
    Ticket,
};
use super::settings::CudaSettings;
use super::submission::Submission;

/// Work items in flight: enough that copies and kernels of several chunks overlap, also in a round of small chunks.
const DEPTH: usize = 64;

/// Bytes of the numbers of one update, at most.
const NUMBERS_BYTES: usize = RULE_SCALARS_MAX * 8;

/// Pieces of the staging ring for memory that is not pinned.
pub(super) const RING_PIECES: usize = 8;

/// Sleep between polls in [`Accelerator::wait`]: about the time of a copy of 1 MiB.
const LOOK_AWAY: Duration = Duration::from_micros(20);
/// Polls before the first sleep.
const LOOKS: u32 = 32;

/// An accelerator on one CUDA device.
pub struct Cuda {
    name: String,
    settings: CudaSettings,
    pub(super) context: Arc<CudaContext>,
    // Dropped first: all memory that the streams work on is released after them.
    pub(super) streams: StreamSet<SubmittedWork>,
    pub(super) ring: Ring,
    /// Work that is submitted in part, because the staging ring is full. No other work begins before it is complete.
    pub(super) submission: Option<Submission>,
    pub(super) kernels: KernelLoader,
    pub(super) banks: Banks,
    /// The partial sum of a streamed update. Only the compute stream touches it, in order.
    pub(super) sum: DeviceRange,
    pub(super) device_scratch: Vec<DeviceScratch>,
    pub(super) free: Vec<HostScratch>,
    chunk_memory: ChunkMemory,
    pub(super) slots: Vec<SlotState>,
    pub(super) arenas: Vec<PinnedArena>,
    /// Work that was not submitted in full, and the reason.
    pub(super) failed: Vec<(Ticket, Failure)>,
    /// Completed work that the caller has not polled yet.
    pub(super) completed: Vec<Done>,
    /// The reason why the device is lost.
    lost: Option<String>,
    /// Buffers for the work that begins, kept to avoid allocations.
    pub(super) packed: Vec<u8>,
    pub(super) gradients: Vec<(u32, ElementType)>,
    /// For each copy to the device, in order: whether its source is pinned.
    pub(super) is_pinned: Vec<bool>,
}

/// A chunk that lives on the device.
pub(super) struct SlotState {
    pub(super) resident: Resident,
    pub(super) program: UpdateKernel,
    pub(super) sum: KernelFunction,
    pub(super) parameter: DeviceRange,
    pub(super) states: Vec<DeviceRange>,
    pub(super) kept: Option<KeptSum>,
    pub(super) is_loaded: bool,
    pub(super) is_busy: bool,
    /// The reason why the content is unknown.
    pub(super) broken: Option<String>,
}

/// A chunk's sum of gradients, kept for the next update.
pub(super) struct KeptSum {
    pub(super) sum: DeviceRange,
    pub(super) squares: DeviceRange,
    /// The kernel that computes the squares.
    pub(super) entry: KernelFunction,
    /// Whether the sum has been computed.
    pub(super) is_there: bool,
}

/// Device memory and event of one piece of work in flight.
pub(super) struct DeviceScratch {
    pub(super) numbers: DeviceRange,
    /// Recorded first after the copy in (work without gradients) and later after the kernel. A wait refers to the last
    /// record before it, so one event serves both.
    pub(super) reached: CudaEvent,
}

/// Pinned memory and event of one piece of work in flight.
pub(super) struct HostScratch {
    pub(super) scratch: usize,
    pub(super) numbers: PinnedRange,
    pub(super) end: CudaEvent,
}

/// A piece of work in flight.
pub(super) struct SubmittedWork {
    pub(super) work: Work,
    pub(super) scratch: usize,
    pub(super) numbers: PinnedRange,
}

impl Cuda {
    /// Opens a device and allocates the memory that does not depend on chunks.
    ///
    /// # Errors
    /// [`Failure::Call`] names what was missing: the driver, a device, this device, memory (bytes asked for and free).
    pub fn open(settings: CudaSettings) -> Result<Self, Failure> {
        settings.check()?;
        let context = CudaContext::open(settings.ordinal).map_err(Failure::call)?;
        let found = context.properties();
        let (major, minor) = found.driver;
        let name = format!("cuda:{} ({}, driver for CUDA {major}.{minor})", settings.ordinal, found.name);
        let refused = |error: DriverError| Failure::call(format!("CUDA device {}: {error}", settings.ordinal));
        let sum_bytes = aligned(u64::from(settings.chunk_bytes));
        let gradient_bytes = settings.gradient_bytes;
        let fixed = sum_bytes + gradient_bytes + (DEPTH * NUMBERS_BYTES) as u64;
        let memory = DeviceMemory::new(&context, fixed).map_err(|error| {
            let (free, total) = context.memory().unwrap_or((0, 0));
            Failure::call(format!(
                "memory of CUDA device {}: {fixed} bytes were asked for (gradients {gradient_bytes}, a sum {sum_bytes} \
                 and numbers), {free} of {total} are free: {error}",
                settings.ordinal
            ))
        })?;
        let part = |range| memory.part(range);
        let pinned = |bytes: usize| {
            PinnedMemory::new(&context, bytes).map_err(|error| {
                let ordinal = settings.ordinal;
                let text = "bytes of the host's memory were to be pinned for its copies";
                Failure::call(format!("CUDA device {ordinal}: {bytes} {text}: {error}"))
            })
        };
        let host_scratch = pinned(DEPTH * NUMBERS_BYTES)?.pieces(NUMBERS_BYTES);
        let piece_bytes = (settings.staging_bytes as usize / RING_PIECES).max(1);
        let ring = pinned(piece_bytes * RING_PIECES)?.pieces(piece_bytes);
        let mut device_scratch = Vec::with_capacity(DEPTH);
        let mut free = Vec::with_capacity(DEPTH);
        for (scratch, numbers) in host_scratch.into_iter().enumerate() {
            let event = || CudaEvent::new(&context, false).map_err(refused);
            let from = sum_bytes + gradient_bytes + (scratch * NUMBERS_BYTES) as u64;
            let place = part(from..from + NUMBERS_BYTES as u64);
            device_scratch.push(DeviceScratch { numbers: place, reached: event()? });
            free.push(HostScratch { scratch, numbers, end: event()? });
        }
        Ok(Self {
            streams: StreamSet::new(&context, DEPTH).map_err(refused)?,
            ring: Ring::new(&context, ring).map_err(refused)?,
            submission: None,
            kernels: KernelLoader::new(&context, settings.cache.as_deref())?,
            banks: Banks::new(&context, &part(sum_bytes..sum_bytes + gradient_bytes)).map_err(refused)?,
            sum: part(0..sum_bytes),
            chunk_memory: ChunkMemory::new(&context, settings.memory_bytes, fixed),
            packed: Vec::with_capacity(NUMBERS_BYTES),
            gradients: Vec::with_capacity(GRADIENTS_MAX),
            is_pinned: Vec::with_capacity(GRADIENTS_MAX),
            slots: Vec::new(),
            arenas: Vec::new(),
            failed: Vec::new(),
            completed: Vec::with_capacity(DEPTH),
            lost: None,
            name,
            device_scratch,
            free,
            context,
            settings,
        })
    }

    fn check_alive(&self) -> Result<(), Failure> {
        self.lost.as_ref().map_or(Ok(()), |reason| Err(Failure::Device(format!("{} is lost: {reason}", self.name))))
    }

    /// Marks the device as lost, after a call failed that belongs to no single piece of work.
    pub(super) fn lose(&mut self, refused: &DriverError) -> Failure {
        let failure = Failure::Device(format!("{} is lost: {refused}", self.name));
        if self.lost.is_none() {
            tracing::error!(%refused, device = self.name, "a CUDA device is lost; its memory is not used again");
            self.lost = Some(refused.to_string());
        }
        failure
    }

    /// Unpins arenas, unless the device may still access them.
    fn release_arenas(&mut self) {
        if self.lost.is_none() && self.streams.len() == 0 {
            self.arenas.clear();
        } else {
            self.arenas.drain(..).for_each(mem::forget);
        }
    }

    /// Continues a partial submission, and collects completed work from the streams.
    fn collect(&mut self) -> Result<(), Failure> {
        self.check_alive()?;
        self.advance()?;
        let Self { streams, free, slots, failed, completed, .. } = self;
        let collected = streams.release(|ticket, job, end| {
            let SubmittedWork { work, scratch, numbers } = job;
            free.push(HostScratch { scratch, numbers, end });
            let slot = &mut slots[work.slot().0 as usize];
            slot.is_busy = false;
            let spoilt = failed.iter().position(|(other, _)| *other == ticket);
            let outcome = spoilt.map_or(Ok(()), |place| Err(failed.swap_remove(place).1));
            match &outcome {
                Ok(()) => slot.record_completion(&work),
                Err(Failure::Device(reason)) => slot.broken = Some(reason.clone()),
                Err(_) => {}
            }
            completed.push(Done { work, outcome });
        });
        collected.map_err(|refused| self.lose(&refused))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.release_arenas();
    }
}

impl Accelerator for Cuda {
    fn capabilities(&self) -> DeviceFacts {
        DeviceFacts {
            name: self.name.clone(),
            bytes_free: if self.lost.is_some() { 0 } else { self.chunk_memory.free() },
            bytes_least: self.settings.bytes_least,
        }
    }

    fn pin(&mut self, arena: &Arena) -> Result<(), Failure> {
        self.check_alive()?;
        let mut locked = PinnedArena::new(arena);
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
        let ChunkRanges { parameter, states, kept } = self.chunk_memory.take(resident)?;
        let kept = kept.zip(squares).map(|((sum, squares), entry)| KeptSum { sum, squares, entry, is_there: false });
        let slot = DeviceSlot(u32::try_from(self.slots.len()).expect("there are fewer chunks than that"));
        let resident = resident.clone();
        let (is_loaded, is_busy, broken) = (false, false, None);
        self.slots.push(SlotState { resident, program, sum, parameter, states, kept, is_loaded, is_busy, broken });
        Ok(slot)
    }

    fn clear(&mut self) {
        let submission = self.submission.take();
        if self.lost.is_none() {
            // After a restore this is the thread's first call of the driver.
            let waited = self.context.enter().and_then(|()| {
                submission.map_or(Ok(()), |submission| self.streams.close_early(submission.ticket))?;
                self.streams.synchronize()
            });
            let emptied = waited.and_then(|()| {
                self.streams.empty(|job, end| {
                    self.free.push(HostScratch { scratch: job.scratch, numbers: job.numbers, end });
                })
            });
            emptied.unwrap_or_else(|refused| drop(self.lose(&refused)));
        }
        self.completed.clear();
        self.failed.clear();
        self.slots.clear();
        self.release_arenas();
        self.chunk_memory.clear();
        self.kernels.clear();
    }

    fn submit(&mut self, queue: &mut VecDeque<Work>) -> Result<(), Failure> {
        self.check_alive()?;
        self.context.enter().map_err(|refused| self.lose(&refused))?;
        self.advance()?;
        while self.submission.is_none()
            && self.streams.has_room()
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
        done.append(&mut self.completed);
        Ok(())
    }

    fn wait(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut looks = 0;
        while self.completed.is_empty() && 0 < self.streams.len() && self.lost.is_none() {
            // The failure is kept, and the next poll returns it.
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

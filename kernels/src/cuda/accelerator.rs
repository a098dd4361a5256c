//! CUDA accelerator: chunks in device memory, updated by work that runs on three streams.
//!
//! ```text
//! In       gradients -> bank    gradients -> next bank
//! Compute                       sum and rule, in the slot    sum and rule, in another slot
//! Out                                                        parameter ->
//! ```
//!
//! Events order the copies and kernels of one piece of work; the next one overlaps with it. The host never blocks; it
//! polls the event at the end. Bytes in memory that is not pinned go through a ring of pinned staging pieces, and work
//! is submitted as far as pieces are free, a little in every turn of the caller's loop.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pserver_core::error::Failure;
use pserver_core::limits::RULE_SCALARS_MAX;
use pserver_core::memory::Arena;
use pserver_core::port::{Accelerator, DeviceFacts, DeviceSlot, Done, NotAdopted, Resident, Work};
use pserver_core::shares::ShardNeed;

use super::arguments::GRADIENTS_MAX;
use super::checked::DriverError;
use super::chunk_memory::{ChunkMemory, ChunkRanges};
use super::code::KernelLoader;
use super::gathering::{Banks, aligned};
use super::in_flight::{FreeEvents, PreparedWork, Submission, SubmittedWork, WorkEvents, WorkOutcomes};
use super::pinned_arena::PinnedArenas;
use super::safe::{CudaContext, CudaEvent, DeviceMemory, DeviceRange, PinnedMemory, Ring, StreamSet};
use super::settings::CudaSettings;
use super::slot::{KeptSum, SlotState};

/// Work items in flight: enough that copies and kernels of several chunks overlap, also in a round of small chunks.
const DEPTH: usize = 64;

/// Pieces of the staging ring for memory that is not pinned.
pub(super) const RING_PIECES: usize = 8;

/// Sleep between polls in [`Accelerator::wait`]: about the time of a copy of 1 MiB.
const LOOK_AWAY: Duration = Duration::from_micros(20);
/// Polls before the first sleep.
const LOOKS: u32 = 32;

/// An accelerator on one CUDA device.
pub struct Cuda {
    device: DeviceState,
    pub(super) context: Arc<CudaContext>,
    // Dropped before the memory: all memory that the streams work on is released after them.
    pub(super) streams: StreamSet<SubmittedWork>,
    pub(super) ring: Ring,
    /// Work that is submitted in part, because the staging ring is full. No other work begins before it is complete.
    pub(super) submission: Option<Submission>,
    pub(super) prepared: PreparedWork,
    pub(super) kernels: KernelLoader,
    pub(super) summing: SumMemory,
    pub(super) events: WorkEvents,
    pub(super) chunks: ResidentChunks,
    pub(super) arenas: PinnedArenas,
    pub(super) outcomes: WorkOutcomes,
}

/// A device's name, its settings, and whether it is lost.
struct DeviceState {
    name: String,
    settings: CudaSettings,
    /// The reason why the device is lost.
    lost: Option<String>,
}

/// Device memory in which gradients are summed.
pub(super) struct SumMemory {
    pub(super) banks: Banks,
    /// The partial sum of a streamed update. Only the compute stream touches it, in order.
    pub(super) partial: DeviceRange,
}

/// The chunks that live on the device, and their memory.
pub(super) struct ResidentChunks {
    memory: ChunkMemory,
    pub(super) slots: Vec<SlotState>,
}

impl Cuda {
    /// Opens a device and allocates the memory that does not depend on chunks.
    ///
    /// # Errors
    /// [`Failure::Call`] names what was missing: the driver, a device, this device, memory (bytes asked for and free).
    pub fn open(settings: CudaSettings) -> Result<Self, Failure> {
        Self::open_sharing(settings, ShardNeed::default())
    }

    /// As [`open`](Self::open); its chunks have the rest of the settings' memory that others who share `need` leave.
    ///
    /// # Errors
    /// As those of [`open`](Self::open).
    pub fn open_sharing(settings: CudaSettings, need: ShardNeed) -> Result<Self, Failure> {
        settings.check()?;
        let context = CudaContext::open(settings.ordinal).map_err(Failure::call)?;
        let found = context.properties();
        let (major, minor) = found.driver;
        let name = format!("cuda:{} ({}, driver for CUDA {major}.{minor})", settings.ordinal, found.name);
        let refused = |error: DriverError| Failure::call(format!("CUDA device {}: {error}", settings.ordinal));
        let sum_bytes = aligned(u64::from(settings.chunk_bytes));
        let gradient_bytes = settings.gradient_bytes;
        let fixed = sum_bytes + gradient_bytes;
        let memory = DeviceMemory::new(&context, fixed).map_err(|error| {
            let (free, total) = context.memory().unwrap_or((0, 0));
            Failure::call(format!(
                "memory of CUDA device {}: {fixed} bytes were asked for (gradients {gradient_bytes}, a sum \
                 {sum_bytes}), {free} of {total} are free: {error}",
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
        let piece_bytes = (settings.staging_bytes as usize / RING_PIECES).max(1);
        let ring = pinned(piece_bytes * RING_PIECES)?.pieces(piece_bytes);
        let event = || CudaEvent::new(&context, false).map_err(refused);
        let reached = (0..DEPTH).map(|_| event()).collect::<Result<Vec<_>, _>>()?;
        let free = (0..DEPTH).map(|place| Ok(FreeEvents { place, end: event()?, works: Vec::new() }));
        let free = free.collect::<Result<Vec<_>, Failure>>()?;
        Ok(Self {
            streams: StreamSet::new(&context, DEPTH).map_err(refused)?,
            ring: Ring::new(&context, ring).map_err(refused)?,
            submission: None,
            prepared: PreparedWork {
                packed: Vec::with_capacity(size_of::<[f64; RULE_SCALARS_MAX]>()),
                gradients: Vec::with_capacity(GRADIENTS_MAX),
                is_pinned: Vec::with_capacity(GRADIENTS_MAX),
                pinned: Vec::new(),
                launches: Vec::new(),
            },
            kernels: KernelLoader::new(&context, settings.cache.as_deref())?,
            summing: SumMemory {
                banks: Banks::new(&context, &part(sum_bytes..sum_bytes + gradient_bytes)).map_err(refused)?,
                partial: part(0..sum_bytes),
            },
            events: WorkEvents { reached, free },
            chunks: ResidentChunks {
                memory: ChunkMemory::new(&context, (settings.memory_bytes, need), fixed),
                slots: Vec::new(),
            },
            arenas: PinnedArenas::new(&context),
            outcomes: WorkOutcomes { failed: Vec::new(), completed: Vec::with_capacity(DEPTH) },
            device: DeviceState { name, settings, lost: None },
            context,
        })
    }

    /// Marks the device as lost, after a call failed that belongs to no single piece of work.
    pub(super) fn lose(&mut self, refused: &DriverError) -> Failure {
        self.device.lose(refused)
    }

    /// Unpins arenas, unless the device may still access them.
    fn release_arenas(&mut self) {
        self.arenas.clear(self.device.is_lost() || 0 < self.streams.len());
    }

    /// Continues a partial submission, and collects completed work from the streams.
    fn collect(&mut self) -> Result<(), Failure> {
        self.device.check_alive()?;
        self.advance()?;
        let Self { streams, events: WorkEvents { free, .. }, chunks, outcomes, .. } = self;
        let WorkOutcomes { failed, completed } = outcomes;
        let collected = streams.release(|ticket, job, end| {
            let SubmittedWork { mut works, place } = job;
            let spoilt = failed.iter().position(|one| one.ticket == ticket).map(|place| failed.swap_remove(place));
            for (number, work) in works.drain(..).enumerate() {
                let slot = &mut chunks.slots[work.slot().0 as usize];
                slot.is_busy = false;
                let outcome = spoilt.as_ref().map_or(Ok(()), |spoilt| spoilt.outcome(number, work.slot()));
                match &outcome {
                    Ok(()) => slot.record_completion(&work),
                    Err(Failure::Device(reason)) => slot.broken = Some(reason.clone()),
                    Err(_) => {}
                }
                completed.push(Done { work, outcome });
            }
            free.push(FreeEvents { place, end, works });
        });
        collected.map_err(|refused| self.lose(&refused))
    }
}

impl DeviceState {
    fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    fn check_alive(&self) -> Result<(), Failure> {
        self.lost.as_ref().map_or(Ok(()), |reason| Err(Failure::Device(format!("{} is lost: {reason}", self.name))))
    }

    fn lose(&mut self, refused: &DriverError) -> Failure {
        let failure = Failure::Device(format!("{} is lost: {refused}", self.name));
        if self.lost.is_none() {
            tracing::error!(%refused, device = self.name, "a CUDA device is lost; its memory is not used again");
            self.lost = Some(refused.to_string());
        }
        failure
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
            name: self.device.name.clone(),
            bytes_free: if self.device.is_lost() { 0 } else { self.chunks.memory.free() },
            bytes_least: self.device.settings.bytes_least,
        }
    }

    fn pin(&mut self, arena: &Arena) -> Result<(), Failure> {
        self.device.check_alive()?;
        self.arenas.add(arena).map_err(Failure::call)
    }

    fn adopt(&mut self, resident: &Resident) -> Result<DeviceSlot, NotAdopted> {
        self.device.check_alive()?;
        let (bytes, most) = (u64::from(resident.bytes), self.device.settings.chunk_bytes);
        if most < resident.bytes {
            let text = format!("a chunk of {bytes} bytes; this device was opened for {most} at most");
            return Err(NotAdopted::Unfit(text));
        }
        let program = self.kernels.program(&resident.code, resident.element_type)?;
        let sum = self.kernels.sum(resident.element_type)?;
        let squares = resident.keeps_sum.then(|| self.kernels.squares(resident.element_type)).transpose()?;
        let ChunkRanges { parameter, states, kept } = self.chunks.memory.take(resident)?;
        let kept = kept.zip(squares).map(|((sum, squares), entry)| KeptSum { sum, squares, entry, is_there: false });
        let slot = DeviceSlot(u32::try_from(self.chunks.slots.len()).expect("there are fewer chunks than that"));
        let resident = resident.clone();
        let (is_loaded, is_busy, broken) = (false, false, None);
        self.chunks.slots.push(SlotState {
            resident,
            program,
            sum,
            parameter,
            states,
            kept,
            is_loaded,
            is_busy,
            broken,
        });
        Ok(slot)
    }

    fn clear(&mut self) {
        let submission = self.submission.take();
        if !self.device.is_lost() {
            // After a restore this is the thread's first call of the driver.
            let waited = self.context.enter().and_then(|()| {
                submission.map_or(Ok(()), |submission| self.streams.close_early(submission.ticket))?;
                self.streams.synchronize()
            });
            let emptied = waited.and_then(|()| {
                self.streams.empty(|SubmittedWork { mut works, place }, end| {
                    works.clear();
                    self.events.free.push(FreeEvents { place, end, works });
                })
            });
            emptied.unwrap_or_else(|refused| drop(self.lose(&refused)));
        }
        self.outcomes.completed.clear();
        self.outcomes.failed.clear();
        self.prepared.pinned.clear();
        self.chunks.slots.clear();
        self.release_arenas();
        self.chunks.memory.clear();
        self.kernels.clear();
    }

    fn submit(&mut self, queue: &mut VecDeque<Work>) -> Result<(), Failure> {
        self.device.check_alive()?;
        self.context.enter().map_err(|refused| self.lose(&refused))?;
        self.advance()?;
        if self.streams.len() == 0 {
            self.arenas.forget_trainers_that_left();
        }
        while self.submission.is_none() && self.streams.has_room() {
            match self.together(queue) {
                0 | 1 => {
                    let Some(work) = queue.pop_front() else { break };
                    self.begin(work)?;
                }
                count => self.begin_together(queue, count)?,
            }
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Failure> {
        self.device.check_alive()?;
        self.context.enter().map_err(|refused| self.lose(&refused))?;
        self.collect()?;
        done.append(&mut self.outcomes.completed);
        Ok(())
    }

    fn wait(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut looks = 0;
        while self.outcomes.completed.is_empty() && 0 < self.streams.len() && !self.device.is_lost() {
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

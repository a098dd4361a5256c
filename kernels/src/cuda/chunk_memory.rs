//! Device memory of chunks: allocated in blocks while chunks are adopted, and counted by purpose.

use std::fmt;
use std::sync::Arc;

use pserver_core::port::{NotAdopted, Resident};
use pserver_core::shares::ShardNeed;

use super::checked::DriverError;
use super::gathering::aligned;
use super::safe::{CudaContext, DeviceMemory, DeviceRange};

/// The size of an allocation: the driver gives whole pages of 2 MiB, and few allocations are few registrations for a
/// network card.
const BLOCK_BYTES: u64 = 64 << 20;

/// Reserve without a configured limit, for modules, pinned pages and another shard's streams, which are allocated after
/// the chunks. On a small device a fraction.
const KEPT_BYTES: u64 = 256 << 20;
const KEPT_PART: u64 = 64;

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryUse {
    pub(super) parameters: u64,
    pub(super) states: u64,
    /// Kept sums that wait for the norm of the whole gradient, with their squares.
    pub(super) kept: u64,
    /// Gradients in transfer, a partial sum, and numbers.
    pub(super) gradients: u64,
}

/// Device memory of one chunk.
pub(super) struct ChunkRanges {
    pub(super) parameter: DeviceRange,
    pub(super) states: Vec<DeviceRange>,
    /// The kept sum, and its sums of squares.
    pub(super) kept: Option<(DeviceRange, DeviceRange)>,
}

/// A bump allocator over blocks; everything is freed at once.
pub(super) struct ChunkMemory {
    context: Arc<CudaContext>,
    /// The bytes that all shards may take together.
    limit: Option<u64>,
    /// The bytes of all blocks, for the other shards.
    need: ShardNeed,
    blocks: Vec<Arc<DeviceMemory>>,
    /// The unused rest of the last block.
    left: Option<DeviceRange>,
    /// Bytes of all blocks.
    taken: u64,
    reasons: MemoryUse,
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameters, states, kept, gradients } = self;
        write!(formatter, "parameters {parameters}, states {states}, kept sums {kept}, gradients and sums {gradients}")
    }
}

impl ChunkMemory {
    /// Memory for the rest of `limit` bytes that the others who share it leave, besides the `gradients` bytes allocated
    /// before.
    pub(super) fn new(context: &Arc<CudaContext>, (limit, need): (Option<u64>, ShardNeed), gradients: u64) -> Self {
        let reasons = MemoryUse { gradients, ..MemoryUse::default() };
        Self { context: Arc::clone(context), limit, need, blocks: Vec::new(), left: None, taken: 0, reasons }
    }

    /// Bytes that can still be allocated, as an estimate.
    pub(super) fn free(&self) -> u64 {
        self.left.as_ref().map_or(0, DeviceRange::bytes) + self.allowed()
    }

    /// Bytes that may still be taken from the driver.
    fn allowed(&self) -> u64 {
        let (free, total) = self.context.memory().unwrap_or((0, 0));
        match self.limit {
            Some(limit) => free.min(self.need.left_of(limit).saturating_sub(self.taken)),
            None => free.saturating_sub(kept(total)),
        }
    }

    /// Allocates a chunk's parameter, its states, and its kept sum.
    ///
    /// # Errors
    /// [`NotAdopted::Full`] when there is not enough; names the bytes asked for and the free ones.
    pub(super) fn take(&mut self, resident: &Resident) -> Result<ChunkRanges, NotAdopted> {
        let (bytes, states) = (u64::from(resident.bytes), resident.code.states() as u64);
        let squares = u64::from(resident.squares_bytes());
        let each = aligned(bytes);
        let kept = if resident.keeps_sum { each + aligned(squares) } else { 0 };
        let needed = each * (1 + states) + kept;
        if self.left.as_ref().is_none_or(|left| left.bytes() < needed) {
            self.grow(needed)?;
        }
        let left = self.left.as_ref().expect("it was made large enough");
        let part = |index| left.part(index * each..index * each + bytes);
        let behind = (2 + states) * each;
        let kept_parts = resident.keeps_sum.then(|| (part(1 + states), left.part(behind..behind + squares)));
        let places = ChunkRanges { parameter: part(0), states: (1..=states).map(part).collect(), kept: kept_parts };
        self.left = Some(left.part(needed..left.bytes()));
        self.reasons.parameters += each;
        self.reasons.states += each * states;
        self.reasons.kept += kept;
        Ok(places)
    }

    /// Frees everything.
    pub(super) fn clear(&mut self) {
        self.left = None;
        self.blocks.clear();
        self.taken = 0;
        self.need.set(0);
        self.reasons = MemoryUse { gradients: self.reasons.gradients, ..MemoryUse::default() };
    }

    fn grow(&mut self, needed: u64) -> Result<(), NotAdopted> {
        let allowed = self.allowed();
        // A whole block, or exactly the needed bytes when that is all there is.
        let mut refused = None;
        for bytes in [needed.max(BLOCK_BYTES), needed].into_iter().filter(|bytes| *bytes <= allowed) {
            // Another shard may have taken some meanwhile.
            if !self.need.try_set(self.taken + bytes, self.limit.unwrap_or(u64::MAX)) {
                continue;
            }
            match DeviceMemory::new(&self.context, bytes) {
                Ok(memory) => {
                    self.left = Some(memory.part(0..bytes));
                    self.blocks.push(memory);
                    self.taken += bytes;
                    return Ok(());
                }
                Err(error) => {
                    self.need.set(self.taken);
                    refused = Some(error);
                }
            }
        }
        Err(self.exhausted(needed, refused.as_ref()))
    }

    /// The failure with the limit, or with the driver's error.
    fn exhausted(&self, needed: u64, refused: Option<&DriverError>) -> NotAdopted {
        let (free, total) = self.context.memory().unwrap_or((0, 0));
        let kept = || format!(", {} are kept for the driver", kept(total));
        let allowed =
            |limit| format!(", {limit} are allowed for chunks, of which others leave {}", self.need.left_of(limit));
        let limit = self.limit.map_or_else(kept, allowed);
        let why = refused.map_or_else(String::new, |refused| format!(": {refused}"));
        NotAdopted::Full(format!(
            "memory of CUDA device {}: {needed} bytes were asked for, {free} of {total} are free{limit}; taken for \
             {}{why}",
            self.context.properties().ordinal,
            self.reasons
        ))
    }
}

/// The reserve on a device with this many bytes.
fn kept(total: u64) -> u64 {
    KEPT_BYTES.min(total / KEPT_PART)
}

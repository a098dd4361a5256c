//! Memory of the host whose pages are pinned (page-locked by the driver), one piece at a time: arenas of this process,
//! and those of trainers on this host, which gradients are views of.
//!
//! An arena is mapped for its largest possible use, and pinning all of it would make all of it resident. So a piece is
//! pinned by the first copy that touches it. A lease never lies in two pieces of an arena: its slot begins at a
//! multiple of its own size, and no slot is larger than a piece. A view that does is copied as unpinned memory is.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::{Arena, Lease};

use super::safe::{CudaContext, HostMapping, RegisteredRange};

const PIECE_BYTES: usize = CHUNK_BYTES_MAX as usize;

/// All memory that is pinned piece by piece, by where it begins.
pub(super) struct PinnedArenas {
    context: Arc<CudaContext>,
    by_start: BTreeMap<usize, PinnedArena>,
}

/// An arena and the state of its pieces.
struct PinnedArena {
    mapping: Arc<HostMapping>,
    pieces: Vec<PinState>,
}

enum PinState {
    /// No copy has touched it.
    Free,
    /// It is pinned.
    Held { _registered: RegisteredRange },
    /// The driver refused: copies go through the staging ring.
    Refused,
}

impl PinnedArenas {
    /// None.
    pub(super) fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: Arc::clone(context), by_start: BTreeMap::new() }
    }

    /// Adds an arena, and pins its first piece to find out whether the driver allows it.
    pub(super) fn add(&mut self, arena: &Arena) -> Result<(), String> {
        let mut pinned = PinnedArena::new(HostMapping::Arena(arena.clone()));
        let bytes = pinned.len().min(PIECE_BYTES);
        let registered = RegisteredRange::new(&self.context, &pinned.mapping, 0..bytes);
        let registered = registered.map_err(|error| format!("{bytes} bytes cannot be pinned: {error}"))?;
        pinned.pieces[0] = PinState::Held { _registered: registered };
        self.by_start.insert(pinned.start(), pinned);
        Ok(())
    }

    /// Pins the piece that the lease lies in, and adds the memory of a trainer by its first lease; returns whether it
    /// is pinned.
    pub(super) fn lock(&mut self, lease: &Lease) -> bool {
        let bytes = lease.bytes();
        if let Some(is_pinned) = self.lock_bytes(bytes) {
            return is_pinned;
        }
        let Some(memory) = lease.foreign().filter(|_| self.context.properties().pins_read_only) else { return false };
        self.forget_trainers_that_left();
        let arena = PinnedArena::new(HostMapping::View(Arc::clone(memory)));
        self.by_start.insert(arena.start(), arena);
        self.lock_bytes(bytes).unwrap_or_default()
    }

    /// Unpins memory of trainers that nobody else has mapped any more.
    pub(super) fn forget_trainers_that_left(&mut self) {
        self.by_start.retain(|_, arena| !arena.mapping.is_last());
    }

    /// Unpins everything; or, where the device may still access it, leaves it pinned and mapped.
    pub(super) fn clear(&mut self, is_in_use: bool) {
        let all = mem::take(&mut self.by_start);
        if is_in_use {
            mem::forget(all);
        }
    }

    /// Pins the piece that these bytes lie in; returns whether it is pinned, and nothing where no arena has them.
    pub(super) fn lock_bytes(&mut self, bytes: &[u8]) -> Option<bool> {
        let Self { context, by_start } = self;
        let at = bytes.as_ptr().addr();
        let (start, arena) = by_start.range_mut(..=at).next_back()?;
        let offset = at - start;
        (offset < arena.len()).then(|| arena.lock(context, offset, bytes.len()))
    }
}

impl PinnedArena {
    fn new(mapping: HostMapping) -> Self {
        let mapping = Arc::new(mapping);
        let pieces = (0..mapping.all().len().div_ceil(PIECE_BYTES)).map(|_| PinState::Free).collect();
        Self { mapping, pieces }
    }

    fn start(&self) -> usize {
        self.mapping.all().as_ptr().cast::<u8>().addr()
    }

    fn len(&self) -> usize {
        self.mapping.all().len()
    }

    /// Pins the piece that has these bytes; returns whether it is pinned.
    fn lock(&mut self, context: &Arc<CudaContext>, offset: usize, bytes: usize) -> bool {
        let (index, last) = (offset / PIECE_BYTES, (offset + bytes.max(1) - 1) / PIECE_BYTES);
        if index != last {
            return false;
        }
        if matches!(self.pieces[index], PinState::Free) {
            let range = index * PIECE_BYTES..((index + 1) * PIECE_BYTES).min(self.len());
            let bytes = range.len();
            self.pieces[index] = match RegisteredRange::new(context, &self.mapping, range) {
                Ok(registered) => PinState::Held { _registered: registered },
                Err(error) => {
                    // One line for an arena, whose other pieces will be refused as well.
                    if !self.pieces.iter().any(|piece| matches!(piece, PinState::Refused)) {
                        tracing::warn!(%error, "{bytes} bytes of memory cannot be pinned; their copies are slower");
                    }
                    PinState::Refused
                }
            };
        }
        matches!(self.pieces[index], PinState::Held { .. })
    }
}

//! Arenas whose pages are pinned (page-locked by the driver), one piece at a time.
//!
//! An arena is mapped for its largest possible use, and pinning all of it would make all of it resident. So a piece is
//! pinned by the first copy that touches it. A lease never lies in two pieces: its slot begins at a multiple of its own
//! size, and no slot is larger than a piece.

use std::sync::Arc;

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::Arena;

use super::safe::{CudaContext, RegisteredRange};

const PIECE_BYTES: usize = CHUNK_BYTES_MAX as usize;

/// An arena and the state of its pieces.
pub(super) struct PinnedArena {
    arena: Arena,
    start: usize,
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

impl PinnedArena {
    /// An arena without pinned pieces.
    pub(super) fn new(arena: &Arena) -> Self {
        let mapping = arena.mapping();
        let pieces = (0..mapping.len().div_ceil(PIECE_BYTES)).map(|_| PinState::Free).collect();
        Self { arena: arena.clone(), start: mapping.as_ptr().cast::<u8>().addr(), pieces }
    }

    /// Pins the piece that contains these bytes, if they belong to this arena; returns whether it is pinned.
    pub(super) fn lock(&mut self, context: &Arc<CudaContext>, bytes: &[u8]) -> Option<bool> {
        let length = self.arena.mapping().len();
        let offset = bytes.as_ptr().addr().checked_sub(self.start).filter(|offset| *offset < length)?;
        let index = offset / PIECE_BYTES;
        if matches!(self.pieces[index], PinState::Free) {
            let range = index * PIECE_BYTES..((index + 1) * PIECE_BYTES).min(length);
            self.pieces[index] = match RegisteredRange::new(context, &self.arena, range) {
                Ok(registered) => PinState::Held { _registered: registered },
                Err(error) => {
                    tracing::warn!(%error, "{PIECE_BYTES} bytes of memory cannot be pinned; their copies are slower");
                    PinState::Refused
                }
            };
        }
        Some(matches!(self.pieces[index], PinState::Held { .. }))
    }

    /// Pins the first piece, to find out whether the driver allows it.
    pub(super) fn try_first(&mut self, context: &Arc<CudaContext>) -> Result<(), String> {
        let bytes = self.arena.mapping().len().min(PIECE_BYTES);
        let registered = RegisteredRange::new(context, &self.arena, 0..bytes);
        let registered = registered.map_err(|error| format!("{bytes} bytes cannot be pinned: {error}"))?;
        self.pieces[0] = PinState::Held { _registered: registered };
        Ok(())
    }
}

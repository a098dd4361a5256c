//! Arenas whose pages the driver holds in place, a piece at a time.
//!
//! An arena is mapped for the most that can be needed, and holding all of it would make all of it resident. So a piece
//! is held from the first copy on that touches it. A lease never lies in two pieces: its slot begins at a multiple of
//! its own size, and no slot is larger than a piece.

use std::sync::Arc;

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::Arena;

use super::safe::{Context, Registered};

const PIECE_BYTES: usize = CHUNK_BYTES_MAX as usize;

/// One arena.
pub(super) struct Locked {
    arena: Arena,
    start: usize,
    pieces: Vec<Piece>,
}

enum Piece {
    /// Nobody has asked for it.
    Free,
    /// The driver holds it.
    Held { _registered: Registered },
    /// The driver refused: its bytes are copied once more on their way.
    Refused,
}

impl Locked {
    /// An arena of which nothing is held yet.
    pub(super) fn new(arena: &Arena) -> Self {
        let mapping = arena.mapping();
        let pieces = (0..mapping.len().div_ceil(PIECE_BYTES)).map(|_| Piece::Free).collect();
        Self { arena: arena.clone(), start: mapping.as_ptr().cast::<u8>().addr(), pieces }
    }

    /// Holds the piece that has these bytes, if they are of this arena; says whether it is held.
    pub(super) fn lock(&mut self, context: &Arc<Context>, bytes: &[u8]) -> Option<bool> {
        let length = self.arena.mapping().len();
        let offset = bytes.as_ptr().addr().checked_sub(self.start).filter(|offset| *offset < length)?;
        let index = offset / PIECE_BYTES;
        if matches!(self.pieces[index], Piece::Free) {
            let range = index * PIECE_BYTES..((index + 1) * PIECE_BYTES).min(length);
            self.pieces[index] = match Registered::new(context, &self.arena, range) {
                Ok(registered) => Piece::Held { _registered: registered },
                Err(error) => {
                    tracing::warn!(%error, "{PIECE_BYTES} bytes of memory cannot be pinned; their copies are slower");
                    Piece::Refused
                }
            };
        }
        Some(matches!(self.pieces[index], Piece::Held { .. }))
    }

    /// Holds the first piece, to learn whether it can be done at all.
    pub(super) fn try_first(&mut self, context: &Arc<Context>) -> Result<(), String> {
        let bytes = self.arena.mapping().len().min(PIECE_BYTES);
        let registered = Registered::new(context, &self.arena, 0..bytes);
        let registered = registered.map_err(|error| format!("{bytes} bytes cannot be pinned: {error}"))?;
        self.pieces[0] = Piece::Held { _registered: registered };
        Ok(())
    }
}

//! Memory of tables, in pieces of equal size.

use crate::error::Failure;
use crate::memory::{Arena, Lease};

/// Equally sized pieces of memory, from an arena that was mapped at the start. The arena should be used by tables only:
/// growing tables take every slot of that size. Several tables may share one. Rows are accessed at random, so it should
/// be [of large pages](Arena::of_large_pages).
#[derive(Clone, Debug)]
pub struct TablePieces {
    arena: Arena,
    bytes: u32,
}

impl TablePieces {
    /// Pieces of `bytes` bytes.
    #[must_use]
    pub const fn new(arena: Arena, bytes: u32) -> Self {
        Self { arena, bytes }
    }

    /// Bytes of a piece.
    #[must_use]
    pub const fn bytes(&self) -> u32 {
        self.bytes
    }

    /// A piece with undefined content.
    ///
    /// # Errors
    /// When every piece is taken.
    pub(super) fn take(&self) -> Result<Lease, Failure> {
        self.arena.take(self.bytes)
    }
}

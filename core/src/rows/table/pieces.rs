//! Where a table's memory comes from.

use crate::error::Failure;
use crate::memory::{Arena, Lease};

/// Pieces of one size, from an arena that was mapped at the start. The arena should be for tables alone: a table that
/// grows takes every slot of that size there is. Several tables may share one. Rows are wanted in no order, so it
/// should be [of large pages](Arena::of_large_pages).
#[derive(Clone, Debug)]
pub struct Pieces {
    arena: Arena,
    bytes: u32,
}

impl Pieces {
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

    /// A piece; what is in it is anybody's guess.
    ///
    /// # Errors
    /// When every piece is taken.
    pub(super) fn take(&self) -> Result<Lease, Failure> {
        self.arena.take(self.bytes)
    }
}

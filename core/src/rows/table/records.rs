//! The rows themselves, each with what an optimizer keeps of it in one run of bytes: the version it was last
//! brought up to, when that is kept, the weight, and the states. A record never moves and is never given back.

use crate::error::Failure;
use crate::memory::Lease;

use super::pieces::Pieces;

/// The alignment of every record.
const ALIGNMENT: usize = 8;
/// A cache line.
const LINE_BYTES: usize = 64;
/// A record is put at a line's start when that costs at most this part of it: so it touches one line less.
const LINE_SHARE: usize = 16;

/// Records in slots, counted from zero.
#[derive(Debug)]
pub(super) struct Records {
    pieces: Pieces,
    leases: Vec<Lease>,
    record_bytes: usize,
    stride: usize,
    per_piece: u32,
    len: u32,
}

impl Records {
    pub(super) fn new(pieces: Pieces, record_bytes: usize) -> Result<Self, Failure> {
        let aligned = record_bytes.next_multiple_of(LINE_BYTES);
        let is_cheap = (aligned - record_bytes) * LINE_SHARE <= record_bytes;
        let stride = if is_cheap { aligned } else { record_bytes.next_multiple_of(ALIGNMENT) };
        let per_piece = pieces.bytes() / u32::try_from(stride).unwrap_or(u32::MAX);
        if per_piece == 0 {
            return Err(Failure::call(format!(
                "pieces of {} bytes; expected at least {stride}, a row with its states",
                pieces.bytes()
            )));
        }
        Ok(Self { pieces, leases: Vec::new(), record_bytes, stride, per_piece, len: 0 })
    }

    /// How many records there are.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Bytes of the pieces they are in.
    pub(super) fn bytes(&self) -> u64 {
        self.leases.len() as u64 * u64::from(self.pieces.bytes())
    }

    /// Makes sure that [`add`](Self::add) has room for one more.
    pub(super) fn reserve(&mut self) -> Result<(), Failure> {
        if self.len == u32::MAX {
            return Err(Failure::call(format!("{} rows in one table; expected fewer than 2^32", self.len)));
        }
        if self.leases.len() as u64 * u64::from(self.per_piece) == u64::from(self.len) {
            self.leases.push(self.pieces.take()?);
        }
        Ok(())
    }

    /// Adds a record, whose bytes are anybody's guess.
    ///
    /// # Panics
    /// When no room was reserved.
    pub(super) fn add(&mut self) -> &mut [u8] {
        self.len += 1;
        self.get_mut(self.len - 1)
    }

    #[inline]
    pub(super) fn get(&self, slot: u32) -> &[u8] {
        let start = (slot % self.per_piece) as usize * self.stride;
        &self.leases[(slot / self.per_piece) as usize].bytes()[start..start + self.record_bytes]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: u32) -> &mut [u8] {
        let start = (slot % self.per_piece) as usize * self.stride;
        &mut self.leases[(slot / self.per_piece) as usize].bytes_mut()[start..start + self.record_bytes]
    }
}

//! Records of rows: the version of the last replayed update (where it is needed), the weight, and the states, in one
//! run of bytes. A record never moves and is never freed.

use crate::error::Failure;
use crate::memory::Lease;

use super::pieces::TablePieces;

/// The alignment of every record.
const ALIGNMENT: usize = 8;
/// A cache line.
const LINE_BYTES: usize = 64;
/// A record is aligned to a cache line when the padding is at most this part of it, so that it touches one line less.
const LINE_SHARE: usize = 16;

/// Records in slots. The bits of a slot are the index of a piece and the index within it, so that an access needs no
/// division. Slots ascend, and some numbers are no slots.
#[derive(Debug)]
pub(super) struct RowRecords {
    pieces: TablePieces,
    leases: Vec<Lease>,
    record_bytes: usize,
    stride: usize,
    per_piece: u32,
    /// Number of a slot's lower bits that are the record's index within its piece.
    bits: u32,
    len: u32,
    /// Number of records in the last piece.
    in_last: u32,
}

impl RowRecords {
    pub(super) fn new(pieces: TablePieces, record_bytes: usize) -> Result<Self, Failure> {
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
        let bits = u32::BITS - (per_piece - 1).leading_zeros();
        Ok(Self { pieces, leases: Vec::new(), record_bytes, stride, per_piece, bits, len: 0, in_last: 0 })
    }

    /// How many records there are.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// A bound: every slot so far is below it, and no later slot is.
    pub(super) fn end(&self) -> u32 {
        let pieces = u32::try_from(self.leases.len()).expect("it was compared");
        pieces.checked_sub(1).map_or(0, |last| (last << self.bits) + self.in_last)
    }

    /// Bytes of the pieces of the records.
    pub(super) fn bytes(&self) -> u64 {
        self.leases.len() as u64 * u64::from(self.pieces.bytes())
    }

    /// The slot that [`add`](Self::add) gives next, with room for its record.
    pub(super) fn reserve(&mut self) -> Result<u32, Failure> {
        if self.leases.is_empty() || self.in_last == self.per_piece {
            if (self.leases.len() as u64 + 1) << self.bits > u64::from(u32::MAX) {
                return Err(Failure::call(format!("{} rows in one table; expected no more", self.len)));
            }
            self.leases.push(self.pieces.take()?);
            self.in_last = 0;
        }
        let last = u32::try_from(self.leases.len() - 1).expect("it was compared");
        Ok(last << self.bits | self.in_last)
    }

    /// Adds a record with undefined content.
    ///
    /// # Panics
    /// When no memory was reserved.
    pub(super) fn add(&mut self) -> &mut [u8] {
        let (piece, place) = (self.leases.len() - 1, self.in_last);
        assert!(place < self.per_piece, "room was reserved");
        self.in_last += 1;
        self.len += 1;
        let start = place as usize * self.stride;
        &mut self.leases[piece].bytes_mut()[start..start + self.record_bytes]
    }

    #[inline]
    pub(super) fn get(&self, slot: u32) -> &[u8] {
        let start = self.start(slot);
        &self.leases[(slot >> self.bits) as usize].bytes()[start..start + self.record_bytes]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: u32) -> &mut [u8] {
        let start = self.start(slot);
        &mut self.leases[(slot >> self.bits) as usize].bytes_mut()[start..start + self.record_bytes]
    }

    #[inline]
    fn start(&self, slot: u32) -> usize {
        (slot & ((1 << self.bits) - 1)) as usize * self.stride
    }
}

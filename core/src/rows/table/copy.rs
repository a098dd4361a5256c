//! Copy of a table at one moment, made piece by piece while the table is in use.
//!
//! Rows are copied page by page of the index. A row that changes before its turn is copied first, so every row has its
//! value of the beginning. A bit for each row marks it as copied. Rows that were added later have later slots, and are
//! left out.

use crate::ids::Version;
use crate::memory::prefetch;

use super::RowTable;
use super::rest::IdleRows;

/// Stored rows, for a checkpoint, in the order of the index's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableCopy {
    /// The weights, then each state, row after row.
    pub contents: Vec<Vec<u8>>,
    /// The ids, 8 bytes each, little endian.
    pub ids: Vec<u8>,
    /// The version of the last update of each row, 8 bytes each, little endian; the table's own when no update can be
    /// missed.
    pub lasts: Vec<u8>,
}

/// A copy in progress.
#[derive(Debug)]
pub(super) struct Copying {
    copy: TableCopy,
    /// The table's version at the beginning.
    version: Version,
    /// The first slot of the rows that were added later.
    end: u32,
    /// The next page to copy.
    page: u32,
    /// A bit for each slot: whether its row was copied.
    copied: Vec<u64>,
}

impl TableCopy {
    /// A copy with room for this many rows of this many tensors of this many bytes.
    fn with_capacity(rows: usize, tensors: usize, row_bytes: usize) -> Self {
        let numbers = || Vec::with_capacity(rows * size_of::<u64>());
        let content = || Vec::with_capacity(rows * row_bytes);
        Self { contents: (0..tensors).map(|_| content()).collect(), ids: numbers(), lasts: numbers() }
    }

    /// Bytes of all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let contents: usize = self.contents.iter().map(Vec::len).sum();
        (contents + self.ids.len() + self.lasts.len()) as u64
    }

    fn push(&mut self, id: u64, last: Version, content: &[u8], row_bytes: usize) {
        for (tensor, part) in self.contents.iter_mut().zip(content.chunks_exact(row_bytes)) {
            tensor.extend_from_slice(part);
        }
        self.ids.extend_from_slice(&id.to_le_bytes());
        self.lasts.extend_from_slice(&last.0.to_le_bytes());
    }
}

impl Copying {
    /// Marks a row as copied; false when it is copied already or was added later.
    fn note(&mut self, slot: u32) -> bool {
        let (word, bit) = ((slot / u64::BITS) as usize, 1 << (slot % u64::BITS));
        if self.end <= slot || self.copied[word] & bit != 0 {
            return false;
        }
        self.copied[word] |= bit;
        true
    }
}

impl RowTable {
    /// A copy of the current table, in ascending order of the ids.
    #[must_use]
    pub fn copy(&self) -> TableCopy {
        let sorted = self.sorted();
        let row_bytes = self.shape.row_bytes;
        let mut copy = TableCopy::with_capacity(sorted.len(), self.shape.states + 1, row_bytes);
        for record in (0..sorted.len()).map(|index| self.record(&sorted, index)) {
            copy.push(record.id, record.last, record.content, row_bytes);
        }
        copy
    }

    /// Begins a copy of the table as of now. [`copy_on`](Self::copy_on) continues it, and a row that changes before it
    /// is copied costs an extra copy, once. An unfinished earlier copy is discarded.
    pub fn begin_copy(&mut self) {
        let (rows, end) = (self.records.len() as usize, self.records.end());
        self.copying = Some(Box::new(Copying {
            copy: TableCopy::with_capacity(rows, self.shape.states + 1, self.shape.row_bytes),
            version: self.version,
            end,
            page: 0,
            copied: vec![0; end.div_ceil(u64::BITS) as usize],
        }));
    }

    /// Copies about `left` bytes of rows, and subtracts them from it; returns the copy when it is complete.
    ///
    /// # Panics
    /// When no copy was begun.
    pub fn copy_on(&mut self, left: &mut u64) -> Option<TableCopy> {
        let mut copying = self.copying.take().expect("a copy was begun");
        while copying.page < self.index.pages() {
            if *left == 0 {
                self.copying = Some(copying);
                return None;
            }
            let before = copying.copy.bytes();
            self.index.entries_in(copying.page).for_each(|(_, slot)| prefetch(self.records.get(slot)));
            for (id, slot) in self.index.entries_in(copying.page) {
                self.copy_row(&mut copying, id, slot);
            }
            copying.page += 1;
            *left = left.saturating_sub(copying.copy.bytes() - before);
        }
        Some(copying.copy)
    }

    /// Discards the copy in progress, if any.
    pub fn stop_copy(&mut self) {
        self.copying = None;
    }

    /// Copies a row that is about to change, if a copy in progress does not have it yet.
    #[inline]
    pub(super) fn keep(&mut self, id: u64, slot: u32) {
        if let Some(mut copying) = self.copying.take() {
            self.copy_row(&mut copying, id, slot);
            self.copying = Some(copying);
        }
    }

    fn copy_row(&self, copying: &mut Copying, id: u64, slot: u32) {
        if copying.note(slot) {
            let last = if self.rest == IdleRows::Always { copying.version } else { self.last(slot) };
            copying.copy.push(id, last, &self.records.get(slot)[self.head_bytes()..], self.shape.row_bytes);
        }
    }
}

//! Rows of a call, partitioned by bucket in memory of the call.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::ChunkIndex;
use pserver_core::memory::prefetch;
use pserver_core::partition::Buckets;
use pserver_core::rows::{Ids, RowLayout, RowMerge, RowsView};
use pserver_core::wire::RowsPart;

/// Bytes of an id.
const ID_BYTES: usize = size_of::<u64>();
/// Rows of an answer that are prefetched ahead.
const ROWS_AHEAD: usize = 16;
/// Buffers that are kept from one call to the next.
const KEPT_MAX: usize = 16;

/// Buffers of calls by rows, reused because fresh pages cost as much as the work in them. They are as large as the
/// largest calls.
#[derive(Debug, Default)]
pub(super) struct RowBuffers {
    pub(super) merge: RowMerge,
    kept: Vec<Vec<u8>>,
}

/// Partitions the rows of one parameter by bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucketizer {
    pub(super) buckets: Buckets,
    /// The bytes of one payload.
    pub(super) bytes_max: u32,
}

/// Rows to send: the parts of every bucket, each with its header.
#[derive(Debug)]
pub(super) struct BucketedRows {
    pub(super) element_type: ElementType,
    /// At least as long as the parts.
    bytes: Vec<u8>,
    /// The bucket of each part and where the part ends; a bucket without rows has one part without bytes.
    ends: Vec<(ChunkIndex, usize)>,
}

/// A query for rows: the unique ids of every bucket.
#[derive(Debug)]
pub(super) struct RowQuery {
    ids: Vec<u8>,
    /// The bucket of each piece, where its ids end, and the bytes of its answer.
    ends: Vec<(ChunkIndex, usize, usize)>,
    row_bytes: usize,
    /// The position of each of the caller's ids among the queried ids.
    positions: Vec<u32>,
}

/// A piece of a query that fits a frame.
pub(super) struct RowQueryPiece<'a> {
    pub(super) bucket: ChunkIndex,
    pub(super) payload: &'a [u8],
    pub(super) answer_bytes: usize,
}

impl Bucketizer {
    /// Merges repeated rows and partitions them by bucket, with ascending ids, so that the parts do not depend on the
    /// order of the rows. Rows without repetition keep their element type.
    ///
    /// # Errors
    /// When there are too many rows.
    pub(super) fn bucketize(
        self,
        layout: RowLayout,
        rows: RowsView<'_>,
        buffers: &mut RowBuffers,
    ) -> Result<BucketedRows, Failure> {
        let bytes = buffers.take();
        let given = [rows];
        let merged = buffers.merge.partition_by_bucket(layout, &given, self.buckets)?;
        if merged.len() == rows.len() {
            return Ok(self.write_buckets(rows.layout(), bytes, merged.ids(), |some, into| merged.copy(some, into)));
        }
        Ok(self.write_buckets(layout, bytes, merged.ids(), |some, into| merged.sum(some, into)))
    }

    /// Partitions the rows of a whole matrix by bucket.
    ///
    /// # Errors
    /// When there are too many rows.
    pub(super) fn bucketize_all(self, layout: RowLayout, values: &[u8]) -> Result<BucketedRows, Failure> {
        let ids: Vec<u64> = (0..).take(values.len() / layout.row_bytes()).collect();
        let mut buffers = RowBuffers::default();
        let rows = [RowsView::new(layout, &ids, values)?];
        let merged = buffers.merge.partition_by_bucket(layout, &rows, self.buckets)?;
        Ok(self.write_buckets(layout, Vec::new(), merged.ids(), |some, into| merged.copy(some, into)))
    }

    /// The query for these rows.
    ///
    /// # Errors
    /// When there are too many rows.
    pub(super) fn query(self, layout: RowLayout, ids: Ids<'_>, merge: &mut RowMerge) -> Result<RowQuery, Failure> {
        let row_bytes = layout.row_bytes();
        let unique = merge.deal_ids(ids, self.buckets)?;
        let mut query = RowQuery { ids: Vec::new(), ends: Vec::new(), row_bytes, positions: vec![0; ids.len()] };
        unique.number_rows(&mut query.positions);
        query.ids.extend(unique.ids().flat_map(u64::to_le_bytes));
        let each = (self.bytes_max as usize / row_bytes.max(ID_BYTES)).max(1);
        for (bucket, rows) in self.runs(unique.ids()) {
            for start in rows.clone().step_by(each) {
                let end = rows.end.min(start + each);
                query.ends.push((bucket, end * ID_BYTES, (end - start) * row_bytes));
            }
        }
        Ok(query)
    }

    /// Writes the parts of rows that are ordered by bucket; `write` writes a range of rows.
    fn write_buckets(
        self,
        layout: RowLayout,
        bytes: Vec<u8>,
        ids: impl ExactSizeIterator<Item = u64> + Clone,
        write: impl Fn(Range<usize>, &mut [u8]),
    ) -> BucketedRows {
        let row_bytes = layout.row_bytes();
        let each = ((self.bytes_max as usize).saturating_sub(RowsPart::BYTES) / (ID_BYTES + row_bytes)).max(1);
        let parts = ids.len() / each + self.buckets.count as usize;
        let most = ids.len() * (ID_BYTES + row_bytes) + parts * RowsPart::BYTES;
        let mut bucketed = BucketedRows { element_type: layout.element_type(), bytes, ends: Vec::new() };
        bucketed.bytes.resize(bucketed.bytes.len().max(most), 0);
        let mut rest = ids.clone();
        let mut runs = self.runs(ids).peekable();
        for bucket in (0..u64::from(self.buckets.count)).map(ChunkIndex) {
            let rows = runs.next_if(|(next, _)| *next == bucket).map_or(0..0, |(_, rows)| rows);
            if rows.is_empty() {
                bucketed.ends.push((bucket, bucketed.len()));
            }
            let count = u32::try_from(rows.len().div_ceil(each)).expect("rows are fewer than 2^32");
            for (index, start) in (0..count).zip(rows.clone().step_by(each)) {
                let some = start..rows.end.min(start + each);
                let into =
                    bucketed.add_part(bucket, RowsPart { index, count }, (&mut rest).take(some.len()), row_bytes);
                write(some, into);
            }
        }
        bucketed
    }

    /// The buckets of ids that are ordered by bucket, each with its range of ids.
    fn runs(self, ids: impl Iterator<Item = u64>) -> impl Iterator<Item = (ChunkIndex, Range<usize>)> {
        let mut buckets = ids.map(move |id| ChunkIndex(self.buckets.of(id).into())).peekable();
        let mut start = 0;
        std::iter::from_fn(move || {
            let bucket = buckets.next()?;
            let mut end = start + 1;
            while buckets.next_if_eq(&bucket).is_some() {
                end += 1;
            }
            let run = start..end;
            start = end;
            Some((bucket, run))
        })
    }
}

impl RowBuffers {
    /// A buffer of any length and content.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.kept.pop().unwrap_or_default()
    }

    /// A buffer of at least `bytes` bytes, with any content.
    pub(super) fn take_of(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.take();
        buffer.resize(buffer.len().max(bytes), 0);
        buffer
    }

    /// Keeps buffers for later calls.
    pub(super) fn keep(&mut self, buffers: impl IntoIterator<Item = Vec<u8>>) {
        let room = KEPT_MAX.saturating_sub(self.kept.len());
        self.kept.extend(buffers.into_iter().take(room));
    }
}

impl BucketedRows {
    /// Payload bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.len() as u64
    }

    /// The memory of the parts.
    pub(super) fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }

    fn len(&self) -> usize {
        self.ends.last().map_or(0, |(_, end)| *end)
    }

    /// Every bucket with each of its parts. A bucket without rows has one empty part.
    pub(super) fn parts(&self) -> impl Iterator<Item = (ChunkIndex, &[u8])> {
        let mut start = 0;
        self.ends.iter().map(move |(bucket, end)| {
            let part = &self.bytes[start..*end];
            start = *end;
            (*bucket, part)
        })
    }

    /// Adds a part with its ids, and returns the memory for its rows.
    fn add_part(
        &mut self,
        bucket: ChunkIndex,
        part: RowsPart,
        ids: impl ExactSizeIterator<Item = u64>,
        row_bytes: usize,
    ) -> &mut [u8] {
        let start = self.len();
        let rows_at = start + RowsPart::BYTES + ids.len() * ID_BYTES;
        let end = rows_at + ids.len() * row_bytes;
        self.ends.push((bucket, end));
        let (head, rows) = self.bytes[start..end].split_at_mut(rows_at - start);
        let (header, positions) = head.split_at_mut(RowsPart::BYTES);
        header.copy_from_slice(&part.encode());
        positions.as_chunks_mut().0.iter_mut().zip(ids).for_each(|(place, id)| *place = id.to_le_bytes());
        rows
    }
}

impl RowQuery {
    /// A query for existing ids: from each bucket at most `most`, beginning with the given id.
    pub(super) fn after_ids(open: &[(ChunkIndex, u64)], most: usize) -> Self {
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        for (bucket, from) in open {
            ids.extend_from_slice(&from.to_le_bytes());
            ids.extend_from_slice(&(most as u64).to_le_bytes());
            ends.push((*bucket, ids.len(), most * ID_BYTES));
        }
        Self { ids, ends, row_bytes: ID_BYTES, positions: Vec::new() }
    }

    /// Payload bytes of the query.
    pub(super) fn bytes(&self) -> u64 {
        self.ids.len() as u64
    }

    /// Payload bytes of the answer.
    pub(super) fn answer_bytes(&self) -> usize {
        self.ends.iter().map(|(_, _, answer)| answer).sum()
    }

    /// The pieces of the query, by bucket.
    pub(super) fn pieces(&self) -> impl Iterator<Item = RowQueryPiece<'_>> {
        let mut start = 0;
        self.ends.iter().map(move |(bucket, end, answer_bytes)| {
            let payload = &self.ids[start..*end];
            start = *end;
            RowQueryPiece { bucket: *bucket, payload, answer_bytes: *answer_bytes }
        })
    }

    /// Copies every row to the positions of its id.
    pub(super) fn scatter(&self, answer: &[u8], into: &mut [u8]) {
        let bytes = self.row_bytes;
        for (at, (place, row)) in self.positions.iter().zip(into.chunks_exact_mut(bytes)).enumerate() {
            if let Some(ahead) = self.positions.get(at + ROWS_AHEAD) {
                prefetch(&answer[*ahead as usize * bytes..][..bytes]);
            }
            row.copy_from_slice(&answer[*place as usize * bytes..][..bytes]);
        }
    }

    /// Appends the ids of an answer to `found`. Returns the buckets that have more ids, each with the next id.
    pub(super) fn take_ids(&self, answer: &[u8], found: &mut Vec<u64>) -> Vec<(ChunkIndex, u64)> {
        let mut open = Vec::new();
        let mut rest = answer;
        for (bucket, _, bytes) in &self.ends {
            let (own, after) = rest.split_at(*bytes);
            rest = after;
            let ids = own.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id));
            let before = found.len();
            found.extend(ids.take_while(|id| *id != u64::MAX));
            if (found.len() - before) * ID_BYTES == *bytes {
                let last = found.last().copied().expect("a query is after one id or more");
                open.push((*bucket, last + 1));
            }
        }
        open
    }
}

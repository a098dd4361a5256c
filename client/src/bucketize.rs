//! Rows of a call, partitioned by bucket in memory of the call.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::ChunkIndex;
use pserver_core::memory::{LendingMemory, LoanOut, prefetch};
use pserver_core::partition::Buckets;
use pserver_core::rows::{Ids, Merged, RowLayout, RowMerge, RowsView};
use pserver_core::wire::RowsPart;

/// Bytes of an id.
const ID_BYTES: usize = size_of::<u64>();
/// Rows of an answer that are prefetched ahead.
const ROWS_AHEAD: usize = 16;
/// Buffers that are kept from one call to the next.
const KEPT_MAX: usize = 16;

/// Memory of calls by rows, reused because fresh pages cost as much as the work in them. It is as large as the largest
/// calls.
#[derive(Debug, Default)]
pub(super) struct RowBuffers {
    /// One for each parameter of a call.
    pub(super) merges: Vec<RowMerge>,
    pub(super) kept: KeptBuffers,
}

/// Buffers of earlier calls.
#[derive(Debug, Default)]
pub(super) struct KeptBuffers(Vec<Vec<u8>>);

/// Partitions the rows of one parameter by bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucketizer {
    pub(super) buckets: Buckets,
    /// The bytes of one payload.
    pub(super) bytes_max: u32,
}

/// Rows to send, grouped by bucket. Their bytes are written part by part, so that a part travels while the next one is
/// summed.
#[derive(Debug)]
pub(super) struct BucketedRows<'a> {
    merged: Merged<'a>,
    /// The layout in which they are sent.
    layout: RowLayout,
    /// The parts by bucket; a bucket without rows has one part without bytes.
    parts: Vec<PlannedPart>,
}

/// A part of a bucket's rows.
#[derive(Debug)]
struct PlannedPart {
    bucket: ChunkIndex,
    header: RowsPart,
    /// Indices of its unique rows.
    rows: Range<usize>,
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
    /// Groups rows by bucket, with ascending ids, so that the parts do not depend on the order of the rows. Repeated
    /// rows are summed when they are written; rows without repetition keep their element type.
    ///
    /// # Errors
    /// When there are too many rows.
    pub(super) fn bucketize<'a>(
        self,
        layout: RowLayout,
        rows: &'a [RowsView<'a>; 1],
        merge: &'a mut RowMerge,
    ) -> Result<BucketedRows<'a>, Failure> {
        let merged = merge.partition_by_bucket(layout, rows, self.buckets)?;
        let layout = if merged.is_without_repetition() { rows[0].layout() } else { layout };
        let row_bytes = ID_BYTES + layout.row_bytes();
        let each = ((self.bytes_max as usize).saturating_sub(RowsPart::BYTES) / row_bytes).max(1);
        let mut parts = Vec::new();
        let mut runs = self.runs(merged.ids()).peekable();
        for bucket in (0..u64::from(self.buckets.count)).map(ChunkIndex) {
            let rows = runs.next_if(|(next, _)| *next == bucket).map_or(0..0, |(_, rows)| rows);
            let count = u32::try_from(rows.len().div_ceil(each)).expect("rows are fewer than 2^32");
            if rows.is_empty() {
                parts.push(PlannedPart { bucket, header: RowsPart { index: 0, count }, rows: 0..0 });
            }
            for (index, start) in (0..count).zip(rows.clone().step_by(each)) {
                let rows = start..rows.end.min(start + each);
                parts.push(PlannedPart { bucket, header: RowsPart { index, count }, rows });
            }
        }
        Ok(BucketedRows { merged, layout, parts })
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

impl KeptBuffers {
    /// A buffer of at least `bytes` bytes, with any content.
    pub(super) fn take(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.0.pop().unwrap_or_default();
        buffer.resize(buffer.len().max(bytes), 0);
        buffer
    }

    /// Keeps buffers for later calls.
    pub(super) fn keep(&mut self, buffers: impl IntoIterator<Item = Vec<u8>>) {
        let room = KEPT_MAX.saturating_sub(self.0.len());
        self.0.extend(buffers.into_iter().take(room));
    }
}

impl BucketedRows<'_> {
    /// The element type in which the rows are sent.
    pub(super) fn element_type(&self) -> ElementType {
        self.layout.element_type()
    }

    /// Payload bytes.
    pub(super) fn bytes(&self) -> usize {
        self.parts.iter().map(|part| self.part_bytes(part)).sum()
    }

    /// Every bucket with each of its parts, which is written when the iterator comes to it. A bucket without rows has
    /// one part, of no bytes.
    ///
    /// # Panics
    /// When the memory is shorter than the payload.
    pub(super) fn parts(&self, memory: &mut LendingMemory) -> impl Iterator<Item = (ChunkIndex, LoanOut)> {
        self.parts.iter().map(|part| {
            let bytes = u32::try_from(self.part_bytes(part)).expect("a part fits a frame");
            (part.bucket, memory.read(bytes, |into| self.write(part, into)))
        })
    }

    /// The rows in sets of at most one part of each bucket, each part whole by itself.
    pub(super) fn into_sets(mut self) -> Vec<Self> {
        self.parts.retain(|part| !part.rows.is_empty());
        let mut sets: Vec<Vec<PlannedPart>> = Vec::new();
        for part in self.parts {
            let at = part.header.index as usize;
            sets.resize_with(sets.len().max(at + 1), Vec::new);
            sets[at].push(PlannedPart { header: RowsPart::ONLY, ..part });
        }
        sets.into_iter().map(|parts| Self { merged: self.merged, layout: self.layout, parts }).collect()
    }

    fn part_bytes(&self, part: &PlannedPart) -> usize {
        let header = if part.rows.is_empty() { 0 } else { RowsPart::BYTES };
        header + part.rows.len() * (ID_BYTES + self.layout.row_bytes())
    }

    /// Writes a part: its header, its ids, its rows.
    fn write(&self, part: &PlannedPart, into: &mut [u8]) {
        let Some((header, rest)) = into.split_at_mut_checked(RowsPart::BYTES) else { return };
        let (ids, rows) = rest.split_at_mut(part.rows.len() * ID_BYTES);
        header.copy_from_slice(&part.header.encode());
        let places = ids.as_chunks_mut().0.iter_mut();
        places.zip(part.rows.clone()).for_each(|(place, row)| *place = self.merged.id(row).to_le_bytes());
        if self.merged.is_without_repetition() {
            self.merged.copy(part.rows.clone(), rows);
        } else {
            self.merged.sum(part.rows.clone(), rows);
        }
    }
}

impl RowQuery {
    /// A query for a list: from each bucket at most `most` records of so many bytes, beginning with the given one.
    pub(super) fn listing(open: &[(ChunkIndex, u64)], most: usize, record_bytes: usize) -> Self {
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        for (bucket, from) in open {
            ids.extend_from_slice(&from.to_le_bytes());
            ids.extend_from_slice(&(most as u64).to_le_bytes());
            ends.push((*bucket, ids.len(), most * record_bytes));
        }
        Self { ids, ends, row_bytes: record_bytes, positions: (0..).take(open.len() * most).collect() }
    }

    /// Bytes of a row of the answer.
    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Payload bytes of the query.
    pub(super) fn bytes(&self) -> usize {
        self.ids.len()
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

    /// Copies every row to the positions of its id, in parts of whole rows.
    pub(super) fn scatter<'a>(&self, answer: &[u8], into: impl Iterator<Item = &'a mut [u8]>) {
        let bytes = self.row_bytes;
        let places = into.flat_map(|part| part.chunks_exact_mut(bytes));
        for (at, (place, row)) in self.positions.iter().zip(places).enumerate() {
            if let Some(ahead) = self.positions.get(at + ROWS_AHEAD) {
                prefetch(&answer[*ahead as usize * bytes..][..bytes]);
            }
            row.copy_from_slice(&answer[*place as usize * bytes..][..bytes]);
        }
    }
}

/// Appends the ids in the answer to [`RowQuery::listing`] to `found`. Returns the buckets that have more ids, each
/// with the next id.
pub(super) fn take_ids(
    open: &[(ChunkIndex, u64)],
    most: usize,
    answer: &[u8],
    found: &mut Vec<u64>,
) -> Vec<(ChunkIndex, u64)> {
    let mut more = Vec::new();
    for ((bucket, _), own) in open.iter().zip(answer.chunks(most * ID_BYTES)) {
        let mut ids = own.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id));
        let before = found.len();
        found.extend(ids.by_ref().take_while(|id| *id != u64::MAX));
        match ids.next() {
            // The id of all ones exists, which is the end of a list too.
            Some(0) => found.push(u64::MAX),
            Some(_) => {}
            None => {
                let last = if before < found.len() { found.last().copied() } else { None };
                more.push((*bucket, last.expect("a query is for several ids") + 1));
            }
        }
    }
    more
}

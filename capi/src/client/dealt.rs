//! Rows dealt to buckets, in memory of their own.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::ChunkIndex;
use pserver_core::memory::prefetch;
use pserver_core::partition::Buckets;
use pserver_core::rows::{Ids, Merge, RowLayout, RowsView};
use pserver_core::wire::RowsPart;

/// Bytes of an id.
const ID_BYTES: usize = size_of::<u64>();
/// Rows of an answer that are asked for ahead.
const ROWS_AHEAD: usize = 16;
/// Buffers that are kept from one call to the next.
const KEPT_MAX: usize = 16;

/// What calls with rows work in, kept from one call to the next: pages that the system has just given cost as much as
/// what is done in them. It is as large as the largest calls were.
#[derive(Debug, Default)]
pub(super) struct RowsRoom {
    pub(super) merge: Merge,
    kept: Vec<Vec<u8>>,
}

/// How the rows of one parameter are dealt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dealt {
    pub(super) buckets: Buckets,
    /// The bytes of one payload.
    pub(super) bytes_max: u32,
}

/// Rows that leave: for every bucket its parts, each with its header.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) element_type: ElementType,
    /// At least as long as the parts.
    bytes: Vec<u8>,
    /// The bucket of each part and where the part ends; a bucket without rows has one part without bytes.
    ends: Vec<(ChunkIndex, usize)>,
}

/// Questions after rows: for every bucket the ids that are wanted, each once.
#[derive(Debug)]
pub(super) struct Question {
    ids: Vec<u8>,
    /// The bucket of each piece, where its ids end, and the bytes of its answer.
    ends: Vec<(ChunkIndex, usize, usize)>,
    row_bytes: usize,
    /// For every id of the caller its place among those that are asked for.
    places: Vec<u32>,
}

/// A part of a question that fits a frame.
pub(super) struct QuestionPiece<'a> {
    pub(super) bucket: ChunkIndex,
    pub(super) payload: &'a [u8],
    pub(super) answer_bytes: usize,
}

impl Dealt {
    /// Merges rows that repeat, and stacks them by bucket, by ascending ids: who sends the same rows again, in another
    /// order, sends the same parts. Rows that do not repeat go in the type in which they came.
    ///
    /// # Errors
    /// When there are too many rows.
    pub(super) fn stack(self, layout: RowLayout, rows: RowsView<'_>, room: &mut RowsRoom) -> Result<Stack, Failure> {
        let bytes = room.take();
        let given = [rows];
        let merged = room.merge.deal(layout, &given, self.buckets)?;
        if merged.len() == rows.len() {
            return Ok(self.stack_by(rows.layout(), bytes, merged.ids(), |some, into| merged.copy(some, into)));
        }
        Ok(self.stack_by(layout, bytes, merged.ids(), |some, into| merged.sum(some, into)))
    }

    /// Stacks the rows of a whole matrix.
    ///
    /// # Errors
    /// When there are too many rows.
    pub(super) fn stack_all(self, layout: RowLayout, values: &[u8]) -> Result<Stack, Failure> {
        let ids: Vec<u64> = (0..).take(values.len() / layout.row_bytes()).collect();
        let mut room = RowsRoom::default();
        let rows = [RowsView::new(layout, &ids, values)?];
        let merged = room.merge.deal(layout, &rows, self.buckets)?;
        Ok(self.stack_by(layout, Vec::new(), merged.ids(), |some, into| merged.copy(some, into)))
    }

    /// What to ask for these rows.
    ///
    /// # Errors
    /// When there are too many rows.
    pub(super) fn question(self, layout: RowLayout, ids: Ids<'_>, merge: &mut Merge) -> Result<Question, Failure> {
        let row_bytes = layout.row_bytes();
        let unique = merge.deal_ids(ids, self.buckets)?;
        let mut question = Question { ids: Vec::new(), ends: Vec::new(), row_bytes, places: vec![0; ids.len()] };
        unique.number_rows(&mut question.places);
        question.ids.extend(unique.ids().flat_map(u64::to_le_bytes));
        let each = (self.bytes_max as usize / row_bytes.max(ID_BYTES)).max(1);
        for (bucket, rows) in self.runs(unique.ids()) {
            for start in rows.clone().step_by(each) {
                let end = rows.end.min(start + each);
                question.ends.push((bucket, end * ID_BYTES, (end - start) * row_bytes));
            }
        }
        Ok(question)
    }

    /// Stacks rows that stand by bucket; `write` writes some of them.
    fn stack_by(
        self,
        layout: RowLayout,
        bytes: Vec<u8>,
        ids: impl ExactSizeIterator<Item = u64> + Clone,
        write: impl Fn(Range<usize>, &mut [u8]),
    ) -> Stack {
        let row_bytes = layout.row_bytes();
        let each = ((self.bytes_max as usize).saturating_sub(RowsPart::BYTES) / (ID_BYTES + row_bytes)).max(1);
        let parts = ids.len() / each + self.buckets.count as usize;
        let most = ids.len() * (ID_BYTES + row_bytes) + parts * RowsPart::BYTES;
        let mut stack = Stack { element_type: layout.element_type(), bytes, ends: Vec::new() };
        stack.bytes.resize(stack.bytes.len().max(most), 0);
        let mut rest = ids.clone();
        let mut runs = self.runs(ids).peekable();
        for bucket in (0..u64::from(self.buckets.count)).map(ChunkIndex) {
            let rows = runs.next_if(|(next, _)| *next == bucket).map_or(0..0, |(_, rows)| rows);
            if rows.is_empty() {
                stack.ends.push((bucket, stack.len()));
            }
            let count = u32::try_from(rows.len().div_ceil(each)).expect("rows are fewer than 2^32");
            for (index, start) in (0..count).zip(rows.clone().step_by(each)) {
                let some = start..rows.end.min(start + each);
                let into = stack.add_part(bucket, RowsPart { index, count }, (&mut rest).take(some.len()), row_bytes);
                write(some, into);
            }
        }
        stack
    }

    /// The buckets of ids that stand by bucket, and which of them each has.
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

impl RowsRoom {
    /// A buffer, of whatever length and with whatever in it.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.kept.pop().unwrap_or_default()
    }

    /// A buffer of at least so many bytes, with whatever in it.
    pub(super) fn take_of(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.take();
        buffer.resize(buffer.len().max(bytes), 0);
        buffer
    }

    /// Takes buffers back.
    pub(super) fn keep(&mut self, buffers: impl IntoIterator<Item = Vec<u8>>) {
        let room = KEPT_MAX.saturating_sub(self.kept.len());
        self.kept.extend(buffers.into_iter().take(room));
    }
}

impl Stack {
    /// Payload bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.len() as u64
    }

    /// Its memory.
    pub(super) fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }

    fn len(&self) -> usize {
        self.ends.last().map_or(0, |(_, end)| *end)
    }

    /// Every bucket with each of its parts; at least one, which has no bytes where no rows go.
    pub(super) fn parts(&self) -> impl Iterator<Item = (ChunkIndex, &[u8])> {
        let mut start = 0;
        self.ends.iter().map(move |(bucket, end)| {
            let part = &self.bytes[start..*end];
            start = *end;
            (*bucket, part)
        })
    }

    /// Adds a part and its ids, and gives the place of their rows.
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
        let (header, places) = head.split_at_mut(RowsPart::BYTES);
        header.copy_from_slice(&part.encode());
        places.as_chunks_mut().0.iter_mut().zip(ids).for_each(|(place, id)| *place = id.to_le_bytes());
        rows
    }
}

impl Question {
    /// A question after the ids that are there, in these buckets and from these ids on, so many of each.
    pub(super) fn after_ids(open: &[(ChunkIndex, u64)], most: usize) -> Self {
        let (mut ids, mut ends) = (Vec::new(), Vec::new());
        for (bucket, from) in open {
            ids.extend_from_slice(&from.to_le_bytes());
            ids.extend_from_slice(&(most as u64).to_le_bytes());
            ends.push((*bucket, ids.len(), most * ID_BYTES));
        }
        Self { ids, ends, row_bytes: ID_BYTES, places: Vec::new() }
    }

    /// Payload bytes of the question.
    pub(super) fn bytes(&self) -> u64 {
        self.ids.len() as u64
    }

    /// Payload bytes of the answer.
    pub(super) fn answer_bytes(&self) -> usize {
        self.ends.iter().map(|(_, _, answer)| answer).sum()
    }

    /// What is asked of each bucket, in pieces.
    pub(super) fn pieces(&self) -> impl Iterator<Item = QuestionPiece<'_>> {
        let mut start = 0;
        self.ends.iter().map(move |(bucket, end, answer_bytes)| {
            let payload = &self.ids[start..*end];
            start = *end;
            QuestionPiece { bucket: *bucket, payload, answer_bytes: *answer_bytes }
        })
    }

    /// Puts every row where its id stands.
    pub(super) fn deal_out(&self, answer: &[u8], into: &mut [u8]) {
        let bytes = self.row_bytes;
        for (at, (place, row)) in self.places.iter().zip(into.chunks_exact_mut(bytes)).enumerate() {
            if let Some(ahead) = self.places.get(at + ROWS_AHEAD) {
                prefetch(&answer[*ahead as usize * bytes..][..bytes]);
            }
            row.copy_from_slice(&answer[*place as usize * bytes..][..bytes]);
        }
    }

    /// Takes ids out of the answer, and says which buckets have more of them, and from where on.
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
                let last = found.last().copied().expect("a question is after one id or more");
                open.push((*bucket, last + 1));
            }
        }
        open
    }
}

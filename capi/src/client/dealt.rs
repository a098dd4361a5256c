//! Rows dealt to buckets, in memory of their own.

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::ChunkIndex;
use pserver_core::partition::Buckets;
use pserver_core::rows::{Merge, RowLayout, RowsView};
use pserver_core::wire::RowsPart;

/// Bytes of an id.
const ID_BYTES: usize = size_of::<u64>();

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
    pub(super) fn stack(self, layout: RowLayout, rows: RowsView<'_>, merge: &mut Merge) -> Result<Stack, Failure> {
        let given = [rows];
        let merged = merge.unite(layout, &given)?;
        if merged.len() == rows.len() {
            let row = |place: usize, into: &mut [u8]| into.copy_from_slice(rows.row(merged.first_row(place)));
            return Ok(self.stack_by(rows.layout(), merged.ids(), row));
        }
        Ok(self.stack_by(layout, merged.ids(), |place, into| merged.sum(place..place + 1, into)))
    }

    /// Stacks the rows of a whole matrix.
    pub(super) fn stack_all(self, layout: RowLayout, values: &[u8]) -> Stack {
        let bytes = layout.row_bytes();
        let rows = values.len() / bytes;
        self.stack_by(layout, (0..rows).map(|id| id as u64), |place, into| {
            into.copy_from_slice(&values[place * bytes..][..bytes]);
        })
    }

    /// What to ask for these rows.
    pub(super) fn question(self, layout: RowLayout, ids: &[u64]) -> Question {
        let row_bytes = layout.row_bytes();
        let mut wanted: Vec<(u32, u64, u32)> =
            (0..).zip(ids).map(|(place, id)| (self.buckets.of(*id), *id, place)).collect();
        wanted.sort_unstable();
        let each = (self.bytes_max as usize / row_bytes.max(ID_BYTES)).max(1);
        let mut question = Question { ids: Vec::new(), ends: Vec::new(), row_bytes, places: vec![0; ids.len()] };
        let (mut before, mut count, mut rows) = (None, 0_u32, 0);
        for (bucket, id, place) in wanted {
            if before != Some((bucket, id)) {
                let is_full = rows == each || before.is_none_or(|(last, _)| last != bucket);
                if is_full {
                    question.ends.push((ChunkIndex(bucket.into()), 0, 0));
                    rows = 0;
                }
                (before, count, rows) = (Some((bucket, id)), count + 1, rows + 1);
                question.ids.extend_from_slice(&id.to_le_bytes());
                let end = question.ids.len();
                let (_, last_end, answer) = question.ends.last_mut().expect("a piece was begun");
                (*last_end, *answer) = (end, rows * row_bytes);
            }
            question.places[place as usize] = count - 1;
        }
        question
    }

    fn stack_by(
        self,
        layout: RowLayout,
        ids: impl ExactSizeIterator<Item = u64> + Clone,
        row: impl Fn(usize, &mut [u8]),
    ) -> Stack {
        let count = self.buckets.count as usize;
        let bucket = |id: u64| self.buckets.of(id) as usize;
        let mut starts = vec![0_usize; count + 1];
        ids.clone().for_each(|id| starts[bucket(id) + 1] += 1);
        (1..=count).for_each(|at| starts[at] += starts[at - 1]);
        let mut order = vec![(0_usize, 0_u64); ids.len()];
        let mut nexts = starts.clone();
        for (place, id) in ids.enumerate() {
            let next = &mut nexts[bucket(id)];
            order[*next] = (place, id);
            *next += 1;
        }
        let row_bytes = layout.row_bytes();
        let each = ((self.bytes_max as usize).saturating_sub(RowsPart::BYTES) / (ID_BYTES + row_bytes)).max(1);
        let headers = starts.windows(2).map(|pair| (pair[1] - pair[0]).div_ceil(each)).sum::<usize>();
        let bytes = Vec::with_capacity(order.len() * (ID_BYTES + row_bytes) + headers * RowsPart::BYTES);
        let mut stack = Stack { element_type: layout.element_type(), bytes, ends: Vec::new() };
        for (bucket, pair) in (0..).map(ChunkIndex).zip(starts.windows(2)) {
            stack.add_bucket(bucket, &order[pair[0]..pair[1]], each, row_bytes, &row);
        }
        stack
    }
}

impl Stack {
    /// Payload bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.len() as u64
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

    fn add_bucket(
        &mut self,
        bucket: ChunkIndex,
        rows: &[(usize, u64)],
        each: usize,
        row_bytes: usize,
        row: &impl Fn(usize, &mut [u8]),
    ) {
        if rows.is_empty() {
            self.ends.push((bucket, self.bytes.len()));
            return;
        }
        let count = u32::try_from(rows.len().div_ceil(each)).expect("rows are fewer than 2^32");
        for (index, part) in (0..).zip(rows.chunks(each)) {
            self.bytes.extend_from_slice(&RowsPart { index, count }.encode());
            part.iter().for_each(|(_, id)| self.bytes.extend_from_slice(&id.to_le_bytes()));
            let start = self.bytes.len();
            self.bytes.resize(start + part.len() * row_bytes, 0);
            for ((place, _), into) in part.iter().zip(self.bytes[start..].chunks_exact_mut(row_bytes)) {
                row(*place, into);
            }
            self.ends.push((bucket, self.bytes.len()));
        }
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
        for (place, row) in self.places.iter().zip(into.chunks_exact_mut(bytes)) {
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

//! Memory in which the rows of a call travel, and the destinations to which they are copied at its end.

use pserver_core::memory::{LendingMemory, LoanBook, LoanIn, LoanOut};

use super::bucketize::{KeptBuffers, RowQuery, RowQueryPiece};

/// Longest part of a destination that is lent as one.
const LENT_BYTES_MAX: usize = 1024 * 1024 * 1024;

/// The memory of a call by rows: parts to send, then for each query its ids and its answer.
pub(super) struct RowMemory {
    pub(super) memory: LendingMemory,
    /// Bytes of the parts to send.
    pub(super) sent: usize,
    pub(super) fetched: Vec<FetchedRows>,
}

/// Rows that a call fetches of one parameter.
pub(super) struct FetchedRows {
    query: RowQuery,
    /// The caller's place, in parts of whole rows.
    into: Vec<LoanIn>,
}

impl FetchedRows {
    /// A query whose answer is copied to a destination.
    pub(super) fn of<'env>(query: RowQuery, into: &'env mut [u8], book: &LoanBook<'env>) -> Self {
        let each = (LENT_BYTES_MAX / query.row_bytes()).max(1) * query.row_bytes();
        let into = into.chunks_mut(each).map(|part| book.write(part)).collect();
        Self { query, into }
    }

    /// Bytes of all queries, and of all answers.
    pub(super) fn bytes(all: &[Self]) -> (usize, usize) {
        let asked = all.iter().map(|one| one.query.bytes()).sum();
        (asked, all.iter().map(|one| one.query.answer_bytes()).sum())
    }

    /// The pieces of the query, each with its ids and the memory for its answer.
    pub(super) fn pieces<'a>(
        &'a self,
        memory: &'a mut LendingMemory,
    ) -> impl Iterator<Item = (RowQueryPiece<'a>, LoanOut, LoanIn)> {
        let pieces: Vec<_> = self.query.pieces().collect();
        let asked: Vec<LoanOut> = pieces.iter().map(|piece| lend_copy(memory, piece.payload)).collect();
        pieces.into_iter().zip(asked).map(|(piece, asked)| {
            let into = memory.write(u32::try_from(piece.answer_bytes).expect("a piece fits a frame"));
            (piece, asked, into)
        })
    }
}

impl RowMemory {
    /// Copies the fetched rows of a successful call to their destinations, and keeps the memory for later calls.
    pub(super) fn finish(self, is_successful: bool, kept: &mut KeptBuffers) {
        // A transport that still has a part after a failure keeps all of it.
        let Some(memory) = self.memory.take_back() else { return };
        if is_successful {
            let mut rest = &memory[self.sent..];
            for FetchedRows { query, mut into } in self.fetched {
                let (answer, after) = rest[query.bytes()..].split_at(query.answer_bytes());
                rest = after;
                query.scatter(answer, into.iter_mut().map(LoanIn::bytes_mut));
            }
        }
        kept.keep([memory]);
    }
}

fn lend_copy(memory: &mut LendingMemory, bytes: &[u8]) -> LoanOut {
    memory.read(u32::try_from(bytes.len()).expect("a piece fits a frame"), |part| part.copy_from_slice(bytes))
}

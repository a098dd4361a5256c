//! Pushes and pulls of sparse parameters, by rows.
//!
//! A push groups rows by bucket, and sums and sends them part by part, from memory of the call. A pull receives
//! each unique row once into memory of the call, and scatters it to the caller's destinations.

use prost::Message;
use pserver_core::client::LaneId;
use pserver_core::config::row_layout;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Sequence};
use pserver_core::limits::LISTED_IDS_MAX;
use pserver_core::memory::LoanBook;
use pserver_core::port::{Incoming, Outgoing};
use pserver_core::rows::{Ids, RowLayout, RowMerge, RowsView};
use pserver_core::wire::{Entry, Flags, Kind, PushMessage};

use super::bucketize::{BucketedRows, Bucketizer, RowBuffers, RowQuery};
use super::call::CallNumber;
use super::client_lock::ClientGuard;
use super::job::JoinedJob;
use super::packer::{ChunkPiece, Packer};
use super::transfer::check_rate;
use super::{Client, ClientState, DestinationRows, Extent, GradientRows};

/// Ids in the answers of all buckets together, unless `LISTED_LEAST` needs more.
const LISTED_TOGETHER: usize = 8 * 1024 * 1024;
/// Ids in each bucket's answer at least.
const LISTED_LEAST: usize = 1024;

impl Client {
    /// Sends rows of gradients, or of deltas where the job optimises on the client. Rows may repeat; they are summed.
    /// Every bucket of these parameters takes part in the round, also where no row of it is sent. `rate` replaces the
    /// schedule's rate.
    ///
    /// # Errors
    /// The rows that are refused, and why, also that a table would outgrow its declaration; or the server that did not
    /// answer before the deadline.
    pub fn push_rows(&self, gradients: &[GradientRows<'_>], rate: Option<f64>) -> Result<(), Failure> {
        let _memory = self.hold(gradients.iter().flat_map(|given| [Extent::of(given.ids), Extent::of(given.values)]));
        let mut state = self.lock()?;
        state.ready()?;
        check_rate(rate)?;
        let mut room = std::mem::take(&mut state.memory.rows);
        let pushed = state.push_rows_in(gradients, rate, &mut room);
        state.memory.rows = room;
        pushed
    }

    /// Fetches rows by their ids, which may repeat, each where its id stands. A row that nobody has pushed to is as it
    /// was declared to begin. In sync mode rows have all rounds in them that this trainer has pushed. After a failure
    /// the places are as they were.
    ///
    /// # Errors
    /// The rows that are refused, and why; or the server or trainer that was waited for until the deadline.
    pub fn pull_rows(&self, into: &mut [DestinationRows<'_>]) -> Result<(), Failure> {
        let _memory = self.hold(into.iter().flat_map(|wanted| [Extent::of(wanted.ids), Extent::of(wanted.values)]));
        let mut state = self.lock()?;
        state.ready()?;
        let (chosen, queries) = state.row_queries(into)?;
        let mut answers: Vec<Vec<u8>> =
            queries.iter().map(|one| state.memory.rows.kept.take(one.answer_bytes())).collect();
        state.lend(|state, book| {
            let call = state.start_pull_rows(&chosen, &queries, &mut answers, Flags::default(), book)?;
            state.finish(call)
        })?;
        for ((wanted, query), answer) in into.iter_mut().zip(&queries).zip(&answers) {
            query.scatter(answer, wanted.values);
        }
        state.memory.rows.kept.keep(answers);
        Ok(())
    }

    /// The ids of a sparse parameter's rows that somebody has pushed to, ascending: all that were there when the call
    /// began, and perhaps some that came to be meanwhile.
    ///
    /// # Errors
    /// When there is no such parameter, when it is not sparse, or who did not answer before the deadline.
    pub fn list_rows(&self, name: &str) -> Result<Vec<u64>, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        let index = state.ready_job().parameter(name, &mut None)?;
        layout_of(state.ready_job(), index)?;
        let buckets = state.ready_job().chosen(index).chunk_count();
        let mut open: Vec<(ChunkIndex, u64)> = (0..buckets).map(|bucket| (ChunkIndex(bucket), 0)).collect();
        let mut found = Vec::new();
        while !open.is_empty() {
            let each = (LISTED_IDS_MAX as usize).min(LISTED_TOGETHER / open.len()).max(LISTED_LEAST);
            let query = RowQuery::after_ids(&open, each);
            let mut answers = vec![vec![0; query.answer_bytes()]];
            state.lend(|state, book| {
                let queries = std::slice::from_ref(&query);
                let call = state.start_pull_rows(&[index], queries, &mut answers, Flags::LIST, book)?;
                state.finish(call)
            })?;
            open = query.take_ids(&answers[0], &mut found);
        }
        found.sort_unstable();
        Ok(found)
    }
}

impl ClientGuard<'_> {
    /// Checks the rows of all gradients and groups them by bucket, then sends part after part.
    fn push_rows_in(
        &mut self,
        gradients: &[GradientRows<'_>],
        rate: Option<f64>,
        room: &mut RowBuffers,
    ) -> Result<(), Failure> {
        let job = self.ready_job();
        let (mut chosen, mut given, mut last) = (Vec::new(), Vec::new(), None);
        for rows in gradients {
            let index = job.parameter(rows.name, &mut last)?;
            let layout = layout_of(job, index)?;
            given.push([checked(layout, rows).map_err(|failure| named(rows.name, &failure))?]);
            chosen.push(index);
        }
        job.check_once(&chosen)?;
        room.prepare(given.len());
        let mut bucketed = Vec::new();
        for ((index, rows), merge) in chosen.iter().zip(&given).zip(&mut room.merges) {
            let declaration = job.chosen(*index).declaration();
            let buckets = declaration.buckets.expect("the parameter is sparse");
            let bucketizer = Bucketizer { buckets, bytes_max: job.chunk_bytes() };
            let rows = bucketizer.bucketize(layout_of(job, *index)?, rows, merge);
            bucketed.push(rows.map_err(|failure| named(declaration.name.as_str(), &failure))?);
        }
        self.learn_rounds(&chosen)?;
        let mut buffers: Vec<Vec<u8>> = bucketed.iter().map(|rows| room.kept.take(rows.bytes())).collect();
        let pushed = self.lend(|state, book| {
            let call = state.start_push_rows(&chosen, &bucketed, &mut buffers, rate, book)?;
            state.finish(call)
        });
        room.kept.keep(buffers);
        pushed
    }
}

impl ClientState {
    /// Checks destinations of rows, and makes their queries by bucket.
    fn row_queries(&mut self, into: &[DestinationRows<'_>]) -> Result<(Vec<ParameterIndex>, Vec<RowQuery>), Failure> {
        let mut room = std::mem::take(&mut self.memory.rows);
        room.prepare(1);
        let asked = self.row_queries_in(into, &mut room.merges[0]);
        self.memory.rows = room;
        asked
    }

    fn row_queries_in(
        &mut self,
        into: &[DestinationRows<'_>],
        merge: &mut RowMerge,
    ) -> Result<(Vec<ParameterIndex>, Vec<RowQuery>), Failure> {
        let job = self.ready_job();
        let (mut chosen, mut queries, mut last) = (Vec::new(), Vec::new(), None);
        for wanted in into {
            let index = job.parameter(wanted.name, &mut last)?;
            let named = |failure: Failure| named(wanted.name, &failure);
            let layout = layout_of(job, index)?;
            let ids = Ids::new(layout, wanted.ids).map_err(named)?;
            let expected = wanted.ids.len().saturating_mul(layout.row_bytes());
            if wanted.values.len() != expected {
                let found = wanted.values.len();
                let text = format!("a destination of {found} bytes for {} rows; expected {expected}", wanted.ids.len());
                return Err(named(Failure::call(text)));
            }
            let buckets = job.chosen(index).declaration().buckets.expect("the parameter is sparse");
            let bucketizer = Bucketizer { buckets, bytes_max: Packer::shared_bytes_max(job.chunk_bytes()) };
            queries.push(bucketizer.query(layout, ids, merge).map_err(named)?);
            chosen.push(index);
        }
        job.check_once(&chosen)?;
        Ok((chosen, queries))
    }

    fn start_push_rows<'env>(
        &mut self,
        chosen: &[ParameterIndex],
        bucketed: &[BucketedRows<'_>],
        buffers: &'env mut [Vec<u8>],
        rate: Option<f64>,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let counts_rounds = self.ready_job().counts_rounds();
        let sent = bucketed.iter().map(|rows| rows.bytes() as u64).sum();
        let fresh = self.open(Kind::Push, chosen, (sent, 0))?;
        let mut packer = self.packer(Kind::Push, chosen).with(Flags::default(), PushMessage { rate }.encode_to_vec());
        for ((index, rows), buffer) in chosen.iter().zip(bucketed).zip(buffers) {
            let progress = self.ready_job().progress(*index);
            let round = progress.round.filter(|_| counts_rounds).unwrap_or_default();
            let sequence = progress.push_again.unwrap_or(fresh);
            for (bucket, part) in rows.parts(buffer) {
                let id = ChunkId { parameter: *index, chunk: bucket };
                let entry = Entry::with_payload(id, round, rows.element_type(), part);
                let payload = (!part.is_empty()).then(|| Outgoing::Loan(book.read(part)));
                self.add(&mut packer, ChunkPiece { entry, payload, into: None, sequence });
            }
        }
        Ok(self.send_rest(packer))
    }

    fn start_pull_rows<'env>(
        &mut self,
        chosen: &[ParameterIndex],
        queries: &'env [RowQuery],
        answers: &'env mut [Vec<u8>],
        flags: Flags,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let counts_rounds = self.ready_job().counts_rounds();
        let received = queries.iter().map(|query| query.answer_bytes() as u64).sum();
        let sent = queries.iter().map(RowQuery::bytes).sum();
        self.open(Kind::Pull, chosen, (sent, received))?;
        let mut packer = self.packer(Kind::Pull, chosen).with(flags, Vec::new());
        for ((index, query), answer) in chosen.iter().zip(queries).zip(answers) {
            let job = self.ready_job();
            let round = job.progress(*index).round.filter(|_| counts_rounds).unwrap_or_default();
            let element_type = job.chosen(*index).declaration().element_type;
            let mut rest = answer.as_mut_slice();
            for piece in query.pieces() {
                let (place, after) = rest.split_at_mut(piece.answer_bytes);
                rest = after;
                let id = ChunkId { parameter: *index, chunk: piece.bucket };
                let entry = Entry::with_payload(id, round, element_type, piece.payload);
                let payload = Some(Outgoing::Loan(book.read(piece.payload)));
                let into = Some(book.write(place));
                self.add(
                    &mut packer,
                    ChunkPiece { entry, payload, into: into.map(Incoming::Loan), sequence: Sequence(0) },
                );
            }
        }
        Ok(self.send_rest(packer))
    }

    /// Adds a piece of the open call to its frame, and sends a full frame.
    fn add(&mut self, packer: &mut Packer, piece: ChunkPiece) {
        let job = self.ready_job();
        let lane: LaneId = job.lane(job.chosen(piece.entry.id.parameter).shard_of(piece.entry.id.chunk));
        if let Some(full) = packer.add(lane, piece) {
            self.send_frame(lane, full);
        }
    }
}

/// Checks the rows of a gradient.
fn checked<'a>(layout: RowLayout, rows: &GradientRows<'a>) -> Result<RowsView<'a>, Failure> {
    if !rows.element_type.is_gradient_for(layout.element_type()) {
        let (found, expected) = (rows.element_type, layout.element_type());
        return Err(Failure::call(format!("rows of {found}; expected {expected}")));
    }
    RowsView::new(layout.of(rows.element_type)?, rows.ids, rows.values)
}

/// A failure with the parameter that it is about.
fn named(name: &str, failure: &Failure) -> Failure {
    Failure::call(format!("parameter \"{name}\": {failure}"))
}

/// The row layout of a parameter, which must be sparse.
pub(super) fn layout_of(job: &JoinedJob, index: ParameterIndex) -> Result<RowLayout, Failure> {
    let declaration = job.chosen(index).declaration();
    row_layout(declaration)?.ok_or_else(|| {
        let name = declaration.name.as_str();
        Failure::call(format!("parameter \"{name}\" is not sparse: it is sent and fetched as a whole, not by rows"))
    })
}

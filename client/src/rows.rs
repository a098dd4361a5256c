//! Pushes and pulls of sparse parameters, by rows.
//!
//! A push merges rows and partitions them by bucket in memory of the call, from which they are sent. A pull receives
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
        let (chosen, bucketed) = state.bucketize_rows(gradients)?;
        state.learn_rounds(&chosen)?;
        let pushed = state.lend(|state, book| {
            let call = state.start_push_rows(&chosen, &bucketed, rate, book)?;
            state.finish(call)
        });
        state.memory.rows.keep(bucketed.into_iter().map(BucketedRows::into_buffer));
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
            queries.iter().map(|one| state.memory.rows.take_of(one.answer_bytes())).collect();
        state.lend(|state, book| {
            let call = state.start_pull_rows(&chosen, &queries, &mut answers, Flags::default(), book)?;
            state.finish(call)
        })?;
        for ((wanted, query), answer) in into.iter_mut().zip(&queries).zip(&answers) {
            query.scatter(answer, wanted.values);
        }
        state.memory.rows.keep(answers);
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

impl ClientState {
    /// Checks rows of gradients, and partitions them by bucket.
    fn bucketize_rows(
        &mut self,
        gradients: &[GradientRows<'_>],
    ) -> Result<(Vec<ParameterIndex>, Vec<BucketedRows>), Failure> {
        let mut room = std::mem::take(&mut self.memory.rows);
        let bucketed = self.bucketize_rows_in(gradients, &mut room);
        self.memory.rows = room;
        bucketed
    }

    fn bucketize_rows_in(
        &mut self,
        gradients: &[GradientRows<'_>],
        room: &mut RowBuffers,
    ) -> Result<(Vec<ParameterIndex>, Vec<BucketedRows>), Failure> {
        let job = self.ready_job();
        let (mut chosen, mut bucketed, mut last) = (Vec::new(), Vec::new(), None);
        for given in gradients {
            let index = job.parameter(given.name, &mut last)?;
            let named = |failure: Failure| Failure::call(format!("parameter \"{}\": {failure}", given.name));
            let layout = layout_of(job, index)?;
            if !given.element_type.is_gradient_for(layout.element_type()) {
                let (found, expected) = (given.element_type, layout.element_type());
                return Err(named(Failure::call(format!("rows of {found}; expected {expected}"))));
            }
            let sent = layout.of(given.element_type).map_err(named)?;
            let view = RowsView::new(sent, given.ids, given.values).map_err(named)?;
            let buckets = job.chosen(index).declaration().buckets.expect("the parameter is sparse");
            let bucketizer = Bucketizer { buckets, bytes_max: job.chunk_bytes() };
            bucketed.push(bucketizer.bucketize(layout, view, room).map_err(named)?);
            chosen.push(index);
        }
        job.check_once(&chosen)?;
        Ok((chosen, bucketed))
    }

    /// Checks destinations of rows, and makes their queries by bucket.
    fn row_queries(&mut self, into: &[DestinationRows<'_>]) -> Result<(Vec<ParameterIndex>, Vec<RowQuery>), Failure> {
        let mut room = std::mem::take(&mut self.memory.rows);
        let asked = self.row_queries_in(into, &mut room.merge);
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
            let named = |failure: Failure| Failure::call(format!("parameter \"{}\": {failure}", wanted.name));
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
        bucketed: &'env [BucketedRows],
        rate: Option<f64>,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let counts_rounds = self.ready_job().counts_rounds();
        let sent = bucketed.iter().map(BucketedRows::bytes).sum();
        let fresh = self.open(Kind::Push, chosen, (sent, 0))?;
        let mut packer = self.packer(Kind::Push, chosen).with(Flags::default(), PushMessage { rate }.encode_to_vec());
        for (index, stack) in chosen.iter().zip(bucketed) {
            let progress = self.ready_job().progress(*index);
            let round = progress.round.filter(|_| counts_rounds).unwrap_or_default();
            let sequence = progress.push_again.unwrap_or(fresh);
            for (bucket, part) in stack.parts() {
                let id = ChunkId { parameter: *index, chunk: bucket };
                let entry = Entry::with_payload(id, round, stack.element_type, part);
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

/// The row layout of a parameter, which must be sparse.
pub(super) fn layout_of(job: &JoinedJob, index: ParameterIndex) -> Result<RowLayout, Failure> {
    let declaration = job.chosen(index).declaration();
    row_layout(declaration)?.ok_or_else(|| {
        let name = declaration.name.as_str();
        Failure::call(format!("parameter \"{name}\" is not sparse: it is sent and fetched as a whole, not by rows"))
    })
}

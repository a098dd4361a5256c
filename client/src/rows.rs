//! Pushes and pulls of sparse parameters, by rows.
//!
//! Rows travel in memory of the call (`row_memory`). A push groups rows by bucket, and sums and sends them part by
//! part. A pull receives each unique row once; at the end of the call the rows are copied to the caller's destinations.
//! A push that fetches is one call in two phases: its queries leave once every part of the push is answered.

use pserver_core::client::LaneId;
use pserver_core::config::row_layout;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Sequence};
use pserver_core::limits::LISTED_IDS_MAX;
use pserver_core::memory::{LendingMemory, LoanBook};
use pserver_core::port::{Incoming, Outgoing};
use pserver_core::rows::{Ids, RowLayout, RowMerge, RowsView};
use pserver_core::wire::{Entry, Flags, Kind};

use super::bucketize::{BucketedRows, Bucketizer, RowQuery, take_ids};
use super::call::CallNumber;
use super::carried::CarriedNumbers;
use super::client_lock::ClientGuard;
use super::job::JoinedJob;
use super::packer::{ChunkPiece, PackedFrame, Packer};
use super::row_memory::{FetchedRows, RowMemory};
use super::{Client, ClientState, DestinationRows, Extent, GradientRows};

/// Ids in the answers of all buckets together, unless `LISTED_LEAST` needs more.
const LISTED_TOGETHER: usize = 8 * 1024 * 1024;
/// Ids in each bucket's answer at least.
const LISTED_LEAST: usize = 1024;

impl Client {
    /// Sends rows of gradients, or of deltas where the job optimises on the client. Rows may repeat; they are summed.
    /// Every bucket of these parameters takes part in the round, also where no row of it is sent. `numbers` replace
    /// configured ones.
    ///
    /// # Errors
    /// The rows that are refused, and why, also that a table would outgrow its declaration; or the server that did not
    /// answer before the deadline.
    pub fn push_rows<'a>(
        &self,
        gradients: &[GradientRows<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
    ) -> Result<(), Failure> {
        let numbers = numbers.into();
        let _memory = self.hold(sent_extents(gradients));
        let mut state = self.lock()?;
        state.ready()?;
        state.contain(|state| {
            let call = state.start_push_rows(gradients, numbers, None, &LoanBook::open())?;
            state.finish(call)
        })
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
        state.lend(|state, book| {
            let call = state.start_pull_rows(borrowed(into), book)?;
            state.finish(call)
        })
    }

    /// Sends rows of gradients, then fetches rows of the same parameters, mostly those of the next step, with these
    /// gradients in them. A call that failed may be repeated: no gradient is applied twice. After a failure the places
    /// are as they were.
    ///
    /// # Errors
    /// As [`Client::push_rows`] and [`Client::pull_rows`]; and when both sides are not of the same parameters, in the
    /// same order.
    pub fn push_pull_rows<'a>(
        &self,
        gradients: &[GradientRows<'_>],
        numbers: impl Into<CarriedNumbers<'a>>,
        into: &mut [DestinationRows<'_>],
    ) -> Result<(), Failure> {
        let numbers = numbers.into();
        let wanted = into.iter().flat_map(|wanted| [Extent::of(wanted.ids), Extent::of(wanted.values)]);
        let _memory = self.hold(sent_extents(gradients).chain(wanted));
        let mut state = self.lock()?;
        state.ready()?;
        state.lend(|state, book| {
            let call = state.start_push_rows(gradients, numbers, Some(borrowed(into)), book)?;
            state.finish(call)
        })
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
            let query = RowQuery::listing(&open, each, size_of::<u64>());
            let mut answer = vec![0; query.answer_bytes()];
            state.lend(|state, book| {
                let fetched = vec![FetchedRows::of(query, &mut answer, book)];
                let call = state.start_queries(&[index], fetched, (Flags::LIST, Vec::new()))?;
                state.finish(call)
            })?;
            open = take_ids(&open, each, &answer, &mut found);
        }
        found.sort_unstable();
        Ok(found)
    }
}

impl ClientGuard<'_> {
    /// Checks the rows of all gradients and groups them by bucket, then sends part after part. With destinations the
    /// same call then fetches these.
    pub(super) fn start_push_rows<'env>(
        &mut self,
        gradients: &[GradientRows<'_>],
        numbers: CarriedNumbers<'_>,
        into: Option<Vec<DestinationRows<'env>>>,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let mut merges = std::mem::take(&mut self.memory.rows.merges);
        let started = self.start_push_rows_with(gradients, numbers, into, book, &mut merges);
        self.memory.rows.merges = merges;
        started
    }

    fn start_push_rows_with<'env>(
        &mut self,
        gradients: &[GradientRows<'_>],
        numbers: CarriedNumbers<'_>,
        into: Option<Vec<DestinationRows<'env>>>,
        book: &LoanBook<'env>,
        merges: &mut Vec<RowMerge>,
    ) -> Result<CallNumber, Failure> {
        let job = self.ready_job();
        let (mut chosen, mut given, mut last) = (Vec::new(), Vec::new(), None);
        for rows in gradients {
            let index = job.parameter(rows.name, &mut last)?;
            let layout = layout_of(job, index)?;
            given.push([checked(layout, rows).map_err(|failure| named(rows.name, &failure))?]);
            chosen.push(index);
        }
        job.check_once(&chosen)?;
        self.job.as_mut().expect("the job is ready").check_carried(&chosen, numbers)?;
        let count = given.len().max(merges.len());
        merges.resize_with(count.max(1), RowMerge::default);
        let (wanted, fetched) = self.queries(into.unwrap_or_default(), &mut merges[0], book)?;
        if !wanted.is_empty() && wanted != chosen {
            return Err(Failure::call("push_pull_rows takes the same parameters, in the same order, on both sides"));
        }
        let job = self.ready_job();
        let mut bucketed = Vec::new();
        for ((index, rows), merge) in chosen.iter().zip(&given).zip(merges) {
            let declaration = job.chosen(*index).declaration();
            let buckets = declaration.buckets.expect("the parameter is sparse");
            let bucketizer = Bucketizer { buckets, bytes_max: job.chunk_bytes() };
            let rows = bucketizer.bucketize(layout_of(job, *index)?, rows, merge);
            bucketed.push(rows.map_err(|failure| named(declaration.name.as_str(), &failure))?);
        }
        self.learn_rounds(&chosen)?;
        self.send_push_rows(&chosen, &bucketed, numbers, fetched)
    }
}

impl ClientState {
    /// Starts to fetch rows.
    pub(super) fn start_pull_rows<'env>(
        &mut self,
        into: Vec<DestinationRows<'env>>,
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        self.start_pull_rows_with(into, (Flags::default(), Vec::new()), book)
    }

    /// [`start_pull_rows`](Self::start_pull_rows), in frames with these flags and this control message.
    pub(super) fn start_pull_rows_with<'env>(
        &mut self,
        into: Vec<DestinationRows<'env>>,
        about: (Flags, Vec<u8>),
        book: &LoanBook<'env>,
    ) -> Result<CallNumber, Failure> {
        let mut merges = std::mem::take(&mut self.memory.rows.merges);
        merges.resize_with(merges.len().max(1), RowMerge::default);
        let asked = self.queries(into, &mut merges[0], book);
        self.memory.rows.merges = merges;
        let (chosen, fetched) = asked?;
        self.start_queries(&chosen, fetched, about)
    }

    /// Checks destinations of rows, and makes their queries by bucket.
    fn queries<'env>(
        &mut self,
        into: Vec<DestinationRows<'env>>,
        merge: &mut RowMerge,
        book: &LoanBook<'env>,
    ) -> Result<(Vec<ParameterIndex>, Vec<FetchedRows>), Failure> {
        let job = self.ready_job();
        let (mut chosen, mut fetched, mut last) = (Vec::new(), Vec::new(), None);
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
            let query = bucketizer.query(layout, ids, merge).map_err(named)?;
            fetched.push(FetchedRows::of(query, wanted.values, book));
            chosen.push(index);
        }
        job.check_once(&chosen)?;
        Ok((chosen, fetched))
    }

    /// Opens a push, sends its parts, and packs the queries that leave after their answers.
    fn send_push_rows(
        &mut self,
        chosen: &[ParameterIndex],
        bucketed: &[BucketedRows<'_>],
        numbers: CarriedNumbers<'_>,
        fetched: Vec<FetchedRows>,
    ) -> Result<CallNumber, Failure> {
        let sent: usize = bucketed.iter().map(BucketedRows::bytes).sum();
        let (asked, received) = FetchedRows::bytes(&fetched);
        let fresh = self.open(Kind::Push, chosen, (as_u64(sent + asked), as_u64(received)))?;
        let mut memory = LendingMemory::new(self.memory.rows.kept.take(sent + asked + received));
        let mut packer = self.packer(Kind::Push, chosen).with(Flags::default(), numbers.message());
        packer = packer.with_controls(self.own_rates(chosen, numbers));
        for (index, rows) in chosen.iter().zip(bucketed) {
            let progress = self.ready_job().progress(*index);
            let round = progress.round.unwrap_or_default();
            let sequence = progress.push_again.unwrap_or(fresh);
            for (bucket, part) in rows.parts(&mut memory) {
                let id = ChunkId { parameter: *index, chunk: bucket };
                let entry = Entry::with_payload(id, round, rows.element_type(), part.bytes());
                let payload = (!part.is_empty()).then_some(Outgoing::Loan(part));
                let piece = ChunkPiece { entry, payload, into: None, sequence };
                self.add(&mut packer, piece, ClientState::send_frame);
            }
        }
        packer.rest().for_each(|(lane, packed)| self.send_frame(lane, packed));
        let about = (Flags::default(), Vec::new());
        self.pack_queries(chosen, &fetched, about, &mut memory, ClientState::send_frame_after);
        Ok(self.close_rows(RowMemory { memory, sent, fetched }))
    }

    /// Starts to send queries, in frames with these flags and this control message.
    pub(super) fn start_queries(
        &mut self,
        chosen: &[ParameterIndex],
        fetched: Vec<FetchedRows>,
        about: (Flags, Vec<u8>),
    ) -> Result<CallNumber, Failure> {
        let (asked, received) = FetchedRows::bytes(&fetched);
        self.open(Kind::Pull, chosen, (as_u64(asked), as_u64(received)))?;
        let mut memory = LendingMemory::new(self.memory.rows.kept.take(asked + received));
        self.pack_queries(chosen, &fetched, about, &mut memory, ClientState::send_frame);
        Ok(self.close_rows(RowMemory { memory, sent: 0, fetched }))
    }

    /// Packs queries of the open call, and passes each full frame on.
    fn pack_queries(
        &mut self,
        chosen: &[ParameterIndex],
        fetched: &[FetchedRows],
        (flags, control): (Flags, Vec<u8>),
        memory: &mut LendingMemory,
        pass_on: fn(&mut Self, LaneId, PackedFrame),
    ) {
        let mut packer = self.packer(Kind::Pull, chosen).with(flags, control);
        for (index, fetched) in chosen.iter().zip(fetched) {
            let job = self.ready_job();
            let round = job.progress(*index).round.unwrap_or_default();
            let element_type = job.chosen(*index).declaration().element_type;
            for (piece, asked, into) in fetched.pieces(memory) {
                let id = ChunkId { parameter: *index, chunk: piece.bucket };
                let entry = Entry::with_payload(id, round, element_type, asked.bytes());
                let (payload, into) = (Some(Outgoing::Loan(asked)), Some(Incoming::Loan(into)));
                self.add(&mut packer, ChunkPiece { entry, payload, into, sequence: Sequence(0) }, pass_on);
            }
        }
        packer.rest().for_each(|(lane, packed)| pass_on(self, lane, packed));
    }

    /// Marks the open call as packed, and gives it the memory that its rows travel in.
    pub(super) fn close_rows(&mut self, rows: RowMemory) -> CallNumber {
        self.calls.last_mut().expect("a call is open").rows = Some(rows);
        self.close()
    }

    /// Adds a piece of the open call to its frame, and passes a full frame on.
    pub(super) fn add(&mut self, packer: &mut Packer, piece: ChunkPiece, pass_on: fn(&mut Self, LaneId, PackedFrame)) {
        let job = self.ready_job();
        let lane: LaneId = job.lane(job.chosen(piece.entry.id.parameter).shard_of(piece.entry.id.chunk));
        if let Some(full) = packer.add(lane, piece) {
            pass_on(self, lane, full);
        }
    }
}

/// The memory of rows to send.
pub(super) fn sent_extents(gradients: &[GradientRows<'_>]) -> impl Iterator<Item = Extent> {
    gradients.iter().flat_map(|given| [Extent::of(given.ids), Extent::of(given.values)])
}

/// The destinations, borrowed for a blocking call.
fn borrowed<'a>(into: &'a mut [DestinationRows<'_>]) -> Vec<DestinationRows<'a>> {
    let borrow =
        |one: &'a mut DestinationRows<'_>| DestinationRows { name: one.name, ids: one.ids, values: &mut *one.values };
    into.iter_mut().map(borrow).collect()
}

pub(super) fn as_u64(bytes: usize) -> u64 {
    bytes as u64
}

/// Checks the rows of a gradient.
pub(super) fn checked<'a>(layout: RowLayout, rows: &GradientRows<'a>) -> Result<RowsView<'a>, Failure> {
    if !rows.element_type.is_gradient_for(layout.element_type()) {
        let (found, expected) = (rows.element_type, layout.element_type());
        return Err(Failure::call(format!("rows of {found}; expected {expected}")));
    }
    RowsView::new(layout.of(rows.element_type)?, rows.ids, rows.values)
}

/// A failure with the parameter that it is about.
pub(super) fn named(name: &str, failure: &Failure) -> Failure {
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

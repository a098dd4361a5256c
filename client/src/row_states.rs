//! The optimizer's state of rows, out of the servers of a table and into them.
//!
//! A table may be larger than the trainer's memory, so its state travels by rows: any of them in a call. The updates
//! that a table has seen concern all its rows; they are set last, with or after the last rows.

use prost::Message;
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round, Sequence, Version};
use pserver_core::limits::{FRAME_PAYLOAD_BYTES_MAX, STATE_UPDATES_MAX};
use pserver_core::memory::{LendingMemory, LoanBook};
use pserver_core::port::Outgoing;
use pserver_core::rows::{RateChanges, RowMerge, RowsView};
use pserver_core::wire::{Entry, Flags, Kind, StateMessage};

use super::bucketize::{BucketedRows, Bucketizer, RowQuery};
use super::call::CallNumber;
use super::client_lock::ClientGuard;
use super::optimizer_state::FETCHES_MAX;
use super::packer::ChunkPiece;
use super::row_memory::{FetchedRows, RowMemory};
use super::rows::{as_u64, checked, layout_of, named};
use super::{Client, ClientState, DestinationRows, Extent, GradientRows, StateSlice, StateTensor};

/// Bytes of a change of the learning rate in a payload.
const RATE_BYTES: usize = RateChanges::CHANGE_BYTES;
/// Changes of the learning rate in one answer.
const RATES_LISTED: usize = 8 * 1024;
/// Most changes of the learning rate that one frame brings.
const RATES_MAX: usize = FRAME_PAYLOAD_BYTES_MAX as usize / RATE_BYTES;

/// The optimizer's state of some rows.
#[derive(Clone, Debug, PartialEq)]
pub struct RowStates {
    /// The type of the elements of each tensor, which is the parameter's.
    pub element_type: ElementType,
    /// Elements of a row.
    pub width: u64,
    /// The updates that the table has seen.
    pub progress: TableProgress,
    /// The tensors in the rule's order, each a row for each id; none where the rule has no state.
    pub tensors: Vec<StateTensor>,
}

/// The updates that a table of rows has seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableProgress {
    /// Their number. Adam's correction of its means and the schedule of the learning rate go on from there.
    pub updates: u64,
    /// The learning rates that came with gradients: the first update of each, and the rate, or none for the schedule's.
    /// Empty unless absent rows need them, which they do under rules that change rows without gradients, such as decay.
    pub rates: Vec<(u64, Option<f64>)>,
}

impl Client {
    /// The optimizer's state of rows by their ids, which may repeat, all of it after the same updates; updates that
    /// rows have missed are in it. In sync mode it has every round in it that this trainer has pushed. A whole table
    /// goes out in pieces of [`Client::list_rows`]; pieces with equal `progress` belong together. Weights are those of
    /// [`Client::pull_rows`].
    ///
    /// # Errors
    /// When there is no such parameter, it is not sparse, or it has no such row; when other trainers' gradients changed
    /// the state each time while it was fetched; or when a server does not answer before the deadline.
    pub fn row_states(&self, name: &str, ids: &[u64]) -> Result<RowStates, Failure> {
        let _memory = self.hold(std::iter::once(Extent::of(ids)));
        let mut state = self.lock()?;
        state.ready()?;
        let index = state.ready_job().parameter(name, &mut None)?;
        let layout = layout_of(state.ready_job(), index)?;
        let names = state.state_names(index)?;
        let bytes = ids.len().checked_mul(layout.row_bytes());
        let bytes = bytes.ok_or_else(|| named(name, &Failure::call("the state of these rows exceeds the memory")))?;
        let mut contents = vec![vec![0; bytes]; names.len()];
        state.wait_for_own_round(index)?;
        for _ in 0..FETCHES_MAX {
            let fetched = state.lend(|state, book| state.fetch_states((name, index), ids, &mut contents, book))?;
            let Some(updates) = fetched else { continue };
            let rates = state.fetch_rates(index, updates)?;
            let tensors = names.into_iter().zip(contents);
            let tensors = tensors.map(|(name, content)| StateTensor { name, content }).collect();
            let (element_type, width) = (layout.element_type(), u64::from(layout.width()));
            return Ok(RowStates { element_type, width, progress: TableProgress { updates, rates }, tensors });
        }
        Err(Failure::call(format!(
            "parameter \"{name}\": its state was after different updates in each of {FETCHES_MAX} fetches; expected no \
             gradients of other trainers meanwhile"
        )))
    }

    /// Replaces the optimizer's state of rows: every tensor, with a row for each id. The weights stay, and so do other
    /// rows. With `progress` the table has then seen these updates: it comes with the last rows, because a row that is
    /// set later first gets all of them. Other trainers should wait meanwhile. After a failure some of it may be
    /// replaced; the call may be repeated.
    ///
    /// # Errors
    /// When an id repeats or is no row's, the tensors are not exactly those of the rule, one has another length, or the
    /// progress is none; then nothing is sent. Else as [`Client::row_states`].
    pub fn set_row_states(
        &self,
        name: &str,
        ids: &[u64],
        tensors: &[StateSlice<'_>],
        progress: Option<&TableProgress>,
    ) -> Result<(), Failure> {
        let given = tensors.iter().map(|tensor| Extent::of(tensor.content));
        let _memory = self.hold(given.chain([Extent::of(ids)]));
        let mut state = self.lock()?;
        state.ready()?;
        let index = state.ready_job().parameter(name, &mut None)?;
        let layout = layout_of(state.ready_job(), index)?;
        progress.map_or(Ok(()), |progress| progress.check(name))?;
        let bytes = ids.len().saturating_mul(layout.row_bytes());
        let ordered = state.ordered_tensors(index, tensors, as_u64(bytes))?;
        let rows = |values| GradientRows { name, element_type: layout.element_type(), ids, values };
        let rows: Vec<_> = ordered.into_iter().map(rows).collect();
        state.check_rows_to_set(&rows)?;
        state.wait_for_own_round(index)?;
        for (tensor, rows) in (0..).zip(&rows) {
            let about = StateMessage { state: Some(tensor), updates: 0 };
            state.set_rows(rows, (Flags::STATE, about.encode_to_vec()))?;
        }
        let Some(progress) = progress else { return Ok(()) };
        state.contain(|state| {
            let call = state.start_progress_set(index, progress)?;
            state.finish(call)
        })
    }
}

impl TableProgress {
    fn check(&self, name: &str) -> Result<(), Failure> {
        let (updates, changes) = (self.updates, self.rates.len());
        let refuse = |text: String| Err(named(name, &Failure::call(text)));
        if updates > STATE_UPDATES_MAX {
            return refuse(format!("a state after {updates} updates; expected at most {STATE_UPDATES_MAX}"));
        }
        if changes > RATES_MAX {
            return refuse(format!("{changes} changes of the learning rate; expected at most {RATES_MAX}"));
        }
        let is_rate = |rate: f64| rate.is_finite() && rate >= 0.0;
        if let Some((update, Some(rate))) = self.rates.iter().find(|(_, rate)| !rate.is_none_or(is_rate)) {
            return refuse(format!("rate {rate} from update {update} on; expected a finite number, not negative"));
        }
        let is_ascending = self.rates.is_sorted_by(|one, next| one.0 < next.0);
        if is_ascending && self.rates.last().is_none_or(|(update, _)| *update <= updates) {
            return Ok(());
        }
        refuse(format!("rates of ascending updates up to {updates} are expected"))
    }
}

impl ClientGuard<'_> {
    /// Fetches all tensors of rows; the updates that they have seen, or none when these differ.
    fn fetch_states<'env>(
        &mut self,
        (name, index): (&'env str, ParameterIndex),
        ids: &'env [u64],
        contents: &'env mut [Vec<u8>],
        book: &LoanBook<'env>,
    ) -> Result<Option<u64>, Failure> {
        let mut calls = Vec::with_capacity(contents.len() + 1);
        for (tensor, values) in (0..).zip(contents) {
            if !ids.is_empty() {
                let about = StateMessage { state: Some(tensor), updates: 0 };
                let rows = vec![DestinationRows { name, ids, values }];
                calls.push(self.start_pull_rows_with(rows, (Flags::STATE, about.encode_to_vec()), book)?);
            }
        }
        calls.push(self.start_progress_pull(index)?);
        let versions: Vec<_> = calls.into_iter().map(|call| self.finish_versions(call)).collect();
        let versions = versions.into_iter().collect::<Result<Vec<_>, _>>()?;
        let last = versions.last().copied().flatten();
        Ok(last.filter(|last| versions.iter().all(|one| *one == Some(*last))).map(|Version(updates)| updates))
    }

    /// Fetches the learning rates of the first updates. Where rates reached buckets in different orders, in async mode,
    /// they are those of the first bucket, because an absent row may have had any order.
    fn fetch_rates(&mut self, index: ParameterIndex, updates: u64) -> Result<Vec<(u64, Option<f64>)>, Failure> {
        let mut rates = Vec::new();
        loop {
            let query = RowQuery::listing(&[(ChunkIndex(0), as_u64(rates.len()))], RATES_LISTED, RATE_BYTES);
            let mut answer = vec![0; query.answer_bytes()];
            self.lend(|state, book| {
                let fetched = vec![FetchedRows::of(query, &mut answer, book)];
                let about = StateMessage { state: None, updates: 0 }.encode_to_vec();
                let call = state.start_queries(&[index], fetched, (Flags::LIST.with(Flags::STATE), about))?;
                state.finish(call)
            })?;
            let changes = answer.as_chunks().0.iter().map(RateChanges::decode);
            let changes = changes.map(|(Version(since), rate)| (since, rate));
            let found: Vec<_> = changes.take_while(|(since, _)| *since <= updates).collect();
            let is_whole = found.len() < RATES_LISTED;
            rates.extend(found);
            if is_whole {
                return Ok(rates);
            }
        }
    }

    /// Replaces rows of one tensor, in calls with at most one part of each bucket: a server takes a call's set of a
    /// bucket once.
    pub(super) fn set_rows(&mut self, rows: &GradientRows<'_>, about: (Flags, Vec<u8>)) -> Result<(), Failure> {
        let index = self.ready_job().parameter(rows.name, &mut None)?;
        let layout = layout_of(self.ready_job(), index)?;
        let view = [checked(layout, rows).map_err(|failure| named(rows.name, &failure))?];
        let mut merge = RowMerge::default();
        let job = self.ready_job();
        let buckets = job.chosen(index).declaration().buckets.expect("the parameter is sparse");
        let bucketizer = Bucketizer { buckets, bytes_max: job.chunk_bytes() };
        let bucketed = bucketizer.bucketize(layout, &view, &mut merge).map_err(|failure| named(rows.name, &failure))?;
        bucketed.into_sets().iter().try_for_each(|set| {
            self.contain(|state| {
                let call = state.start_rows_set(index, set, &about)?;
                state.finish(call)
            })
        })
    }
}

impl ClientState {
    /// Checks rows of values or of states before any of them is set.
    pub(super) fn check_rows_to_set(&mut self, all: &[GradientRows<'_>]) -> Result<(), Failure> {
        for rows in all {
            let refuse = |text: String| Err(named(rows.name, &Failure::call(text)));
            let job = self.ready_job();
            let layout = layout_of(job, job.parameter(rows.name, &mut None)?)?;
            if rows.element_type != layout.element_type() {
                return refuse(format!("rows of {}; expected {}", rows.element_type, layout.element_type()));
            }
            let checked = RowsView::new(layout, rows.ids, rows.values);
            checked.map_err(|failure| named(rows.name, &failure))?;
            let mut sorted = rows.ids.to_vec();
            sorted.sort_unstable();
            if let Some([twice, _]) = sorted.array_windows().find(|[one, next]| one == next) {
                return refuse(format!("row {twice} is there twice; expected each once"));
            }
        }
        Ok(())
    }

    /// Starts to fetch the updates of every bucket.
    fn start_progress_pull(&mut self, index: ParameterIndex) -> Result<CallNumber, Failure> {
        self.open(Kind::Pull, &[index], (0, 0))?;
        let pieces = self.bucket_entries(index).into_iter();
        let pieces =
            pieces.map(|entry| ChunkPiece { entry, payload: None, into: None, sequence: Sequence(0) }).collect();
        self.pack_state(Kind::Pull, StateMessage { state: None, updates: 0 }, pieces);
        Ok(self.close())
    }

    /// Starts to replace the updates of every bucket.
    fn start_progress_set(&mut self, index: ParameterIndex, progress: &TableProgress) -> Result<CallNumber, Failure> {
        let changes = progress.rates.iter().map(|(since, rate)| (Version(*since), *rate));
        let rates: Vec<u8> = changes.flat_map(RateChanges::encode).collect();
        let entries = self.bucket_entries(index);
        let sent = rates.len() * entries.len();
        let sequence = self.open(Kind::Set, &[index], (as_u64(sent), 0))?;
        self.forget_repetition();
        let mut memory = LendingMemory::new(self.memory.rows.kept.take(sent));
        let bytes = u32::try_from(rates.len()).expect("the rates fit a frame");
        let pieces = entries.into_iter().map(|entry| {
            let payload = (bytes > 0).then(|| Outgoing::Loan(memory.read(bytes, |part| part.copy_from_slice(&rates))));
            ChunkPiece { entry: Entry { bytes, ..entry }, payload, into: None, sequence }
        });
        let pieces = pieces.collect();
        self.pack_state(Kind::Set, StateMessage { state: None, updates: progress.updates }, pieces);
        Ok(self.close_rows(RowMemory { memory, sent, fetched: Vec::new() }))
    }

    /// Starts to replace rows that are in one part of each bucket.
    fn start_rows_set(
        &mut self,
        index: ParameterIndex,
        rows: &BucketedRows<'_>,
        (flags, control): &(Flags, Vec<u8>),
    ) -> Result<CallNumber, Failure> {
        let sent = rows.bytes();
        let sequence = self.open(Kind::Set, &[index], (as_u64(sent), 0))?;
        self.forget_repetition();
        let mut memory = LendingMemory::new(self.memory.rows.kept.take(sent));
        let mut packer = self.packer(Kind::Set, &[]).with(*flags, control.clone());
        for (chunk, part) in rows.parts(&mut memory) {
            let id = ChunkId { parameter: index, chunk };
            let entry = Entry::with_payload(id, Round(0), rows.element_type(), part.bytes());
            let piece = ChunkPiece { entry, payload: Some(Outgoing::Loan(part)), into: None, sequence };
            self.add(&mut packer, piece, ClientState::send_frame);
        }
        packer.rest().for_each(|(lane, packed)| self.send_frame(lane, packed));
        Ok(self.close_rows(RowMemory { memory, sent, fetched: Vec::new() }))
    }

    /// An entry without payload for every bucket.
    fn bucket_entries(&mut self, index: ParameterIndex) -> Vec<Entry> {
        let parameter = self.ready_job().chosen(index);
        let element_type = parameter.declaration().element_type;
        let bare = |chunk| Entry::bare(ChunkId { parameter: index, chunk: ChunkIndex(chunk) }, Round(0), element_type);
        (0..parameter.chunk_count()).map(bare).collect()
    }
}

//! A bucket: the chunk of a sparse parameter, a table of rows with the partial contributions to it.

use std::sync::Arc;

use smallvec::SmallVec;

use super::call::CallId;
use super::contribution::{Contribution, RowsLease};
use super::pool::Pool;
use super::reply::Refusal;
use super::waiters::RowsRequest;
use crate::checkpoint::StateLayout;
use crate::config::{SparseSettings, row_layout};
use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::{ChunkIndex, PeerId, Round, TrainerId, Version};
use crate::limits::{FRAME_PAYLOAD_BYTES_MAX, LISTED_IDS_MAX, STATES_MAX};
use crate::memory::{Arena, Budget, Value};
use crate::optim::{NOT_ROW_WISE, Prepared, ReducedPiece, Rule, Step};
use crate::partition::{Buckets, Declaration};
use crate::port::{Kernels, Plain};
use crate::rows::{
    Height, Ids, PartialRead, RateChanges, Record, RowLayout, RowMerge, RowTable, RowWorkspace, RowsView, TableCopy,
    TablePieces, TableSettings,
};
use crate::time::Now;
use crate::wire::{Entry, Head, RowsPart};

/// Names of the checkpoint tensors for row ids and for the version of each row; no state of a rule has such a name.
const IDS: &str = "rows:ids";
const LASTS: &str = "rows:last";
/// Bytes of an id.
const ID_BYTES: usize = size_of::<u64>();
/// Bytes of a change of the learning rate in a payload.
const RATE_BYTES: usize = RateChanges::CHANGE_BYTES;
/// Parts of one contribution.
const PARTS_MAX: u64 = 64 * 1024;
/// Size of one memory piece of a table: large enough to keep their number small.
const PIECE_BYTES: u64 = 1024 * 1024;
/// Tables of this size or more use large pages.
const LARGE_BYTES: u64 = 16 * 1024 * 1024;
/// Bytes of summed rows that a reduction gets at once.
const REDUCED_BYTES: usize = 64 * 1024;
/// A page of the row index, and its rows in the worst case, just after all pages split.
const INDEX_PAGE_BYTES: u64 = 4096;
const INDEX_PAGE_ROWS: u64 = 80;

/// Properties shared by the buckets of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RowsPlan {
    pub(super) layout: RowLayout,
    pub(super) buckets: Buckets,
    pub(super) sparse: SparseSettings,
}

/// Requested rows, as far as they are written.
pub(super) struct RowsAnswer {
    pub(super) value: Value,
    read: PartialRead,
}

impl RowsAnswer {
    /// An answer with the weights, or with a state of the rule's.
    pub(super) fn new(value: Value, state: Option<u32>) -> Self {
        Self { value, read: state.map(|state| PartialRead::of_state(state as usize)).unwrap_or_default() }
    }
}

/// Result of adding a part.
pub(super) enum GatherOutcome {
    /// Parts are missing.
    Some,
    /// The contribution is complete.
    All {
        /// In order.
        parts: Vec<RowsLease>,
        /// The connection and head of the part with the highest number, which awaits an answer.
        closing: Option<(Option<PeerId>, Head)>,
    },
}

/// A contribution with missing parts.
struct PartialContribution {
    trainer: TrainerId,
    call: CallId,
    round: Round,
    /// How many parts there are in all.
    count: u32,
    /// The received parts, by number. It grows with received parts, not with the announced count.
    parts: Vec<(u32, RowsLease)>,
    closing: Option<(Option<PeerId>, Head)>,
    /// Time of the latest part.
    since: Now,
}

/// A contribution dropped because parts are missing.
pub(super) struct AbandonedContribution {
    pub(super) trainer: TrainerId,
    pub(super) call: CallId,
    pub(super) there: usize,
    pub(super) count: usize,
    /// The part with the highest number, if received, which awaits an answer.
    pub(super) closing: Option<(Option<PeerId>, Head)>,
}

/// The rows of one bucket.
pub(super) struct Bucket {
    buckets: Buckets,
    /// Index of this bucket.
    index: ChunkIndex,
    /// Most rows of this bucket.
    rows_max: u64,
    table: RowTable,
    /// Progress of the replay of missed updates before an update: contribution and row.
    caught_up: Option<(usize, usize)>,
    /// Progress of the replay of all rows' missed updates before a set of their count: a page of the table's index.
    settled: u32,
    gathering: Vec<PartialContribution>,
    /// The last dropped call of each trainer; later parts of it are refused until it starts anew.
    given_up: Vec<(TrainerId, CallId)>,
}

/// Scratch memory shared by all buckets of a shard.
#[derive(Default)]
pub(super) struct RowsWorkspace {
    pub(super) work: RowWorkspace,
    merge: RowMerge,
    /// The sums of some rows, for a reduction of them.
    sums: Vec<u8>,
}

/// Tensors of a bucket for a checkpoint.
pub(super) struct BucketTensors(TableCopy);

impl RowsPlan {
    /// The plan of a sparse declaration; `None` for a dense one.
    pub(super) fn of(
        declaration: &Declaration,
        rule: &Rule,
        sparse: Option<SparseSettings>,
    ) -> Result<Option<Self>, Failure> {
        let name = declaration.name.as_str();
        let refused = |text: String| Err(Failure::call(format!("parameter \"{name}\": {text}")));
        let (buckets, sparse, layout) = match (declaration.buckets, sparse, row_layout(declaration)?) {
            (None, None, None) => return Ok(None),
            (Some(buckets), Some(sparse), Some(layout)) => (buckets, sparse, layout),
            _ => {
                return refused(
                    "its declaration and its configuration differ in being sparse; expected both or neither".to_owned(),
                );
            }
        };
        if !rule.is_row_wise() {
            return refused(NOT_ROW_WISE.to_owned());
        }
        sparse.initializer.validate_for(declaration.element_type)?;
        Ok(Some(Self { layout, buckets, sparse }))
    }

    /// Checks an entry that replaces rows, which are of the parameter's own type.
    pub(super) fn check_set(&self, name: &str, entry: &Entry) -> Result<(), Refusal> {
        let (found, expected) = (entry.element_type, self.layout.element_type());
        if found == expected && entry.bytes > 0 {
            return self.check_entry(name, entry);
        }
        let text = format!("{} bytes of rows of {found} to set; expected rows of {expected}", entry.bytes);
        Err(Refusal::invalid(format!("parameter \"{name}\": {text}")))
    }

    /// Checks length and element type of an entry.
    pub(super) fn check_entry(&self, name: &str, entry: &Entry) -> Result<(), Refusal> {
        if !entry.element_type.is_gradient_for(self.layout.element_type()) {
            return Err(Refusal::invalid(format!(
                "parameter \"{name}\": rows of {} were sent for a parameter of {}",
                entry.element_type,
                self.layout.element_type()
            )));
        }
        let row = u64::from(self.layout.width()) * entry.element_type.bytes() + size_of::<u64>() as u64;
        let rest = u64::from(entry.bytes).checked_sub(RowsPart::BYTES as u64);
        if entry.bytes == 0 || rest.is_some_and(|rest| rest % row == 0) {
            return Ok(());
        }
        Err(Refusal::invalid(format!(
            "parameter \"{name}\" bucket {}: {} bytes were sent, expected {} and a multiple of {row}, an id and {} \
             elements each",
            entry.id.chunk,
            entry.bytes,
            RowsPart::BYTES,
            self.layout.width()
        )))
    }

    /// Most bytes of contributions in flight to one bucket: for each trainer the open round, one ahead and its posted
    /// receives. Slots are powers of two.
    pub(super) fn bytes_in_flight(&self, trainers: u64, receives: u64) -> u64 {
        let row = self.layout.row_bytes() as u64 + size_of::<u64>() as u64;
        let each = self.buckets.rows_in_each().saturating_mul(row).saturating_add(64);
        let on_their_way = trainers.saturating_mul(receives.saturating_add(2)).saturating_mul(2);
        each.saturating_mul(on_their_way).saturating_add(64 * 1024 * 1024)
    }
}

impl Bucket {
    /// An empty bucket with memory for its most rows.
    pub(super) fn new(plan: &RowsPlan, index: ChunkIndex, rule: &Arc<Prepared>) -> Result<Self, Failure> {
        let SparseSettings { seed, first, initializer, .. } = plan.sparse;
        let settings = TableSettings {
            layout: plan.layout,
            rule: Arc::clone(rule),
            initializer,
            seed: seed.unwrap_or_default(),
            first,
            catch_up: plan.sparse.catch_up(),
        };
        let states = rule.states().len();
        let pieces = pieces(plan.buckets.rows_in_each(), plan.layout.row_bytes() as u64 * (states as u64 + 1) + 8)?;
        // With every id allowed the height is the bound; a hashed bucket has its statistical share.
        let is_all = plan.layout.height() == Height::Rows(plan.buckets.rows);
        let rows_max = if is_all { u64::MAX } else { plan.buckets.rows_in_each() };
        let table = RowTable::new(settings, pieces)?;
        let (gathering, given_up) = (Vec::new(), Vec::new());
        let (caught_up, settled) = (None, 0);
        Ok(Self { buckets: plan.buckets, index, rows_max, table, caught_up, settled, gathering, given_up })
    }

    pub(super) fn element_type(&self) -> ElementType {
        self.table.layout().element_type()
    }

    /// Replaces the rule, before the first update.
    pub(super) fn replace_rule(&mut self, rule: &Arc<Prepared>, plan: &RowsPlan) -> Result<(), Failure> {
        if self.table.settings().rule == *rule {
            return Ok(());
        }
        let mut fresh = Self::new(plan, self.index, rule)?;
        let sorted = self.table.sorted();
        let mut work = RowWorkspace::default();
        let row_bytes = self.table.layout().row_bytes();
        for index in 0..sorted.len() {
            let Record { id, content, .. } = self.table.record(&sorted, index);
            let rows = [id];
            let rows = RowsView::new(self.table.layout(), &rows, &content[..row_bytes])?;
            fresh.table.set(&mut work, &mut Plain, &rows, 0)?;
        }
        *self = fresh;
        Ok(())
    }

    /// Bytes of a row, without its states.
    pub(super) fn row_bytes(&self) -> u64 {
        self.table.layout().row_bytes() as u64
    }

    /// Bytes of the existing rows, without their states.
    pub(super) fn value_bytes(&self) -> u64 {
        self.row_count() * self.row_bytes()
    }

    /// How many rows there are.
    pub(super) fn row_count(&self) -> u64 {
        self.table.usage().rows
    }

    /// The bucket's share of the rows that were declared.
    pub(super) fn declared_rows(&self) -> u64 {
        self.buckets.rows.div_ceil(self.buckets.count.into())
    }

    /// Checks that a payload is rows.
    pub(super) fn check(&self, entry: &Entry, payload: &[u8]) -> Result<(), Failure> {
        self.view(entry.element_type, payload).map(drop)
    }

    /// Checks that a payload is rows, and reserves room for new ones.
    pub(super) fn reserve(&mut self, room: &mut RowsWorkspace, entry: &Entry, payload: &[u8]) -> Result<(), Failure> {
        let ids = self.view(entry.element_type, payload)?.ids();
        let there = self.table.usage().rows;
        // No lookup is needed while all rows could be new.
        if self.rows_max.saturating_sub(there) < ids.len() as u64 {
            let new = self.table.missing(ids);
            if self.rows_max.saturating_sub(there) < new {
                return Err(Failure::call(format!(
                    "{new} new rows for bucket {}, which has {there}; expected at most {} in all, its share of the {} \
                     that were declared",
                    self.index, self.rows_max, self.buckets.rows
                )));
            }
        }
        self.table.reserve(&mut room.work, ids)
    }

    /// Checks that a payload is ids.
    pub(super) fn check_ids(&self, payload: &[u8]) -> Result<(), Failure> {
        let ids = Ids::parse(self.table.layout(), payload)?;
        self.check_own(ids)?;
        let most = FRAME_PAYLOAD_BYTES_MAX as usize / self.table.layout().row_bytes();
        if ids.len() <= most {
            return Ok(());
        }
        Err(Failure::call(format!("a pull of {} rows; expected at most {most}, which fill an answer", ids.len())))
    }

    /// Checks that a payload is a request to list ids.
    pub(super) fn check_list(payload: &[u8]) -> Result<(), Failure> {
        let most = u64::from(LISTED_IDS_MAX);
        match list_question(payload) {
            Some((_, count)) if (1..=most).contains(&count) => Ok(()),
            Some((_, count)) => Err(Failure::call(format!("a list request for {count} ids; expected 1 to {most}"))),
            None => {
                let found = payload.len();
                Err(Failure::call(format!(
                    "a list request of {found} bytes; expected 16: the first id to list, and the number of ids"
                )))
            }
        }
    }

    /// Checks that a payload is changes of the learning rate in so many updates.
    pub(super) fn check_rates(payload: &[u8], updates: u64) -> Result<(), Failure> {
        let refuse = |text: String| Err(Failure::call(format!("the learning rates of earlier updates: {text}")));
        let (numbers, rest) = payload.as_chunks::<RATE_BYTES>();
        if !rest.is_empty() {
            return refuse(format!("{} bytes; expected a multiple of {RATE_BYTES}", payload.len()));
        }
        let changes: Vec<_> = numbers.iter().map(RateChanges::decode).collect();
        if let Some((version, Some(rate))) = changes.iter().find(|(_, rate)| !rate.is_none_or(is_rate)) {
            return refuse(format!("{rate} since update {version}; expected a finite number that is not negative"));
        }
        if changes.is_sorted_by(|one, next| one.0 < next.0) && changes.last().is_none_or(|last| last.0.0 <= updates) {
            return Ok(());
        }
        refuse(format!("expected ascending updates, at most {updates}"))
    }

    /// Replays missed updates of the rows of a set before it; false when the allowance ends first.
    pub(super) fn settle_set(
        &mut self,
        room: &mut RowsWorkspace,
        kernels: &mut dyn Kernels,
        payload: &[u8],
        left: &mut u64,
    ) -> Result<bool, Failure> {
        let (_, rows) = RowsPart::decode(payload)?;
        let ids = RowsView::parse(self.table.layout(), rows)?.ids();
        Ok(self.table.catch_up(&mut room.work, kernels, ids, &mut 0, left))
    }

    /// Replays missed updates of all rows before a set of their count; false when the allowance ends first, and a later
    /// call continues.
    pub(super) fn settle_all(&mut self, room: &mut RowsWorkspace, kernels: &mut dyn Kernels, left: &mut u64) -> bool {
        let is_over = self.table.catch_up_all(&mut room.work, kernels, &mut self.settled, left);
        if is_over {
            self.settled = 0;
        }
        is_over
    }

    /// Replaces rows of a tensor: 0 is the weights, then each state.
    pub(super) fn replace(
        &mut self,
        room: &mut RowsWorkspace,
        kernels: &mut dyn Kernels,
        rows: &RowsLease,
        tensor: usize,
    ) -> Result<(), Failure> {
        let rows = rows.view(self.table.layout())?;
        self.table.set(&mut room.work, kernels, &rows, tensor)
    }

    /// Replaces the count of updates, and the rates of those before it.
    pub(super) fn renumber(
        &mut self,
        room: &mut RowsWorkspace,
        kernels: &mut dyn Kernels,
        updates: u64,
        rates: RateChanges,
    ) {
        self.table.renumber(&mut room.work, kernels, Version(updates), rates);
    }

    /// Changes of the learning rate, from an index on; the rest is all ones.
    pub(super) fn list_rates(&self, pool: &mut Pool, wish: &RowsRequest) -> Result<Option<Value>, Failure> {
        let Some((from, count)) = list_question(wish.bytes()) else { return Ok(None) };
        let bytes = u32::try_from(count.saturating_mul(RATE_BYTES as u64));
        let bytes = bytes.map_err(|_| Failure::call(format!("a list request for {count} rates")))?;
        let mut value = Value::new(pool.take_for_rows(bytes)?, bytes);
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        let changes = self.table.rates_of_absent().iter().skip(from).copied().map(RateChanges::encode);
        let places = value.bytes_mut().chunks_exact_mut(RATE_BYTES);
        for (place, change) in places.zip(changes.chain(std::iter::repeat([u8::MAX; RATE_BYTES]))) {
            place.copy_from_slice(&change);
        }
        Ok(Some(value))
    }

    /// Sets initial rows.
    pub(super) fn set(&mut self, room: &mut RowsWorkspace, entry: &Entry, payload: &[u8]) -> Result<(), Failure> {
        if entry.element_type != self.element_type() {
            let (found, expected) = (entry.element_type, self.element_type());
            return Err(Failure::call(format!("rows of {found}; expected {expected}")));
        }
        let rows = self.view(entry.element_type, payload)?;
        // Before the first update no row has missed one, so no kernel is used.
        self.table.set(&mut room.work, &mut Plain, &rows, 0)
    }

    /// Makes the next version: merges the contributions' rows in order and applies the rule. False when the replay of
    /// missed updates exceeds `left`; a later call continues.
    pub(super) fn update<'a>(
        &mut self,
        room: &mut RowsWorkspace,
        kernels: &mut dyn Kernels,
        (step, reduced): (&Step, &[f64]),
        rows: impl Iterator<Item = &'a RowsLease>,
        left: &mut u64,
    ) -> Result<bool, Failure> {
        let layout = self.table.layout();
        let views = rows.map(|rows| rows.view(layout)).collect::<Result<Vec<_>, _>>()?;
        if !self.catch_up(room, kernels, &views, left) {
            return Ok(false);
        }
        let merged = room.merge.unite(layout, &views)?;
        self.table.apply(&mut room.work, kernels, &merged, step, reduced).map(|()| true)
    }

    /// Passes the sums of contributions' rows to a reduction that reads gradients alone, some rows at a time, in
    /// ascending order of their ids.
    pub(super) fn reduce<'a>(
        &self,
        room: &mut RowsWorkspace,
        rows: impl Iterator<Item = &'a RowsLease>,
        reduce: &mut dyn FnMut(ReducedPiece<'_, '_>),
    ) -> Result<(), Failure> {
        let layout = self.table.layout();
        let views = rows.map(|rows| rows.view(layout)).collect::<Result<Vec<_>, _>>()?;
        let RowsWorkspace { merge, sums, .. } = room;
        let merged = merge.unite(layout, &views)?;
        let states = self.table.settings().rule.states().len();
        let rows_at_once = (REDUCED_BYTES / layout.row_bytes()).max(1);
        // The gradients, and zeros in place of the tensors that the reduction does not read.
        let bytes = rows_at_once * layout.row_bytes();
        sums.resize(bytes * (states + 2), 0);
        let (gradient, unread) = sums.split_at_mut(bytes);
        unread.fill(0);
        for start in (0..merged.len()).step_by(rows_at_once) {
            let end = merged.len().min(start + rows_at_once);
            let bytes_now = (end - start) * layout.row_bytes();
            merged.sum(start..end, &mut gradient[..bytes_now]);
            let mut unread = unread.chunks_exact_mut(bytes).map(|tensor| &mut tensor[..bytes_now]);
            let parameter = unread.next().expect("there is one for the weights");
            let mut states: SmallVec<[&mut [u8]; STATES_MAX]> = unread.collect();
            let (element_type, gradient) = (layout.element_type(), &gradient[..bytes_now]);
            reduce(ReducedPiece { element_type, parameter, states: &mut states, gradient });
        }
        Ok(())
    }

    /// Replays the updates that the rows of contributions missed; false when a later call continues. Within the budget
    /// the update itself does it.
    fn catch_up(
        &mut self,
        room: &mut RowsWorkspace,
        kernels: &mut dyn Kernels,
        views: &[RowsView<'_>],
        left: &mut u64,
    ) -> bool {
        let mut rest = *left;
        if self.caught_up.is_none() && views.iter().all(|view| self.table.may_catch_up(view.ids(), &mut rest)) {
            *left = rest;
            return true;
        }
        let (at, place) = self.caught_up.get_or_insert((0, 0));
        while let Some(view) = views.get(*at) {
            if !self.table.catch_up(&mut room.work, kernels, view.ids(), place, left) {
                return false;
            }
            (*at, *place) = (*at + 1, 0);
        }
        self.caught_up = None;
        true
    }

    /// A value for the requested rows; `None` when none are requested.
    pub(super) fn begin_read(&self, pool: &mut Pool, wish: &RowsRequest) -> Result<Option<Value>, Failure> {
        let ids = Ids::parse(self.table.layout(), wish.bytes())?;
        let bytes = u32::try_from(ids.len() * self.table.layout().row_bytes()).ok().filter(|bytes| *bytes > 0);
        bytes.map(|bytes| Ok(Value::new(pool.take_for_rows(bytes)?, bytes))).transpose()
    }

    /// Writes the requested rows in the order of their ids. False when the replay of missed updates exceeds `left`; a
    /// later call continues.
    pub(super) fn read(
        &mut self,
        room: &mut RowsWorkspace,
        kernels: &mut dyn Kernels,
        wish: &RowsRequest,
        answer: &mut RowsAnswer,
        left: &mut u64,
    ) -> bool {
        let ids = Ids::parse(self.table.layout(), wish.bytes()).expect("the ids were checked");
        self.table.read(&mut room.work, kernels, ids, &mut answer.read, left, answer.value.bytes_mut())
    }

    /// Lists existing ids in table order, after the id below the requested one, or from the first for zero. All ones
    /// end the list; the rest is all ones too, or zeros where the id of all ones exists.
    pub(super) fn list(&self, pool: &mut Pool, wish: &RowsRequest) -> Result<Option<Value>, Failure> {
        let Some((from, count)) = list_question(wish.bytes()) else { return Ok(None) };
        let bytes = u32::try_from(count.saturating_mul(ID_BYTES as u64));
        let bytes = bytes.map_err(|_| Failure::call(format!("a list request for {count} ids")))?;
        let mut value = Value::new(pool.take_for_rows(bytes)?, bytes);
        let ids = self.table.ids_after(from.checked_sub(1), (bytes as usize) / ID_BYTES);
        let rest = if self.table.has_largest() { 0 } else { u64::MAX };
        let ids = ids.into_iter().chain([u64::MAX]).chain(std::iter::repeat(rest));
        for (place, id) in value.bytes_mut().chunks_exact_mut(ID_BYTES).zip(ids) {
            place.copy_from_slice(&id.to_le_bytes());
        }
        Ok(Some(value))
    }

    /// Adds a part. A duplicate or a part of an earlier call changes nothing. Parts of a call arrive in order, in
    /// resends too: a part with other rows than the stored one replaces it and drops the later ones, because the sender
    /// then cuts the rows differently and sends all again.
    pub(super) fn gather(&mut self, part: RowsPart, rows: RowsLease, one: &Contribution, now: Now) -> GatherOutcome {
        self.given_up.retain(|(trainer, _)| *trainer != one.trainer);
        let at = self.gathering.iter().position(|gathering| gathering.trainer == one.trainer);
        let at = at.unwrap_or_else(|| {
            self.gathering.push(PartialContribution::new(one, part.count, now));
            self.gathering.len() - 1
        });
        let gathering = &mut self.gathering[at];
        if one.sending.call < gathering.call {
            return GatherOutcome::Some;
        }
        if gathering.call != one.sending.call || gathering.count != part.count {
            *gathering = PartialContribution::new(one, part.count, now);
        }
        gathering.since = now;
        if part.index + 1 == part.count {
            gathering.closing = Some((one.sending.peer, one.sending.head));
        }
        let layout = self.table.layout();
        let parts = &mut gathering.parts;
        match parts.binary_search_by_key(&part.index, |(index, _)| *index) {
            Ok(place) if parts[place].1.has_rows_of(&rows, layout) => {}
            Ok(place) => {
                parts.truncate(place);
                parts.push((part.index, rows));
            }
            Err(place) => parts.insert(place, (part.index, rows)),
        }
        if parts.len() < part.count as usize {
            return GatherOutcome::Some;
        }
        let PartialContribution { parts, closing, .. } = self.gathering.swap_remove(at);
        GatherOutcome::All { parts: parts.into_iter().map(|(_, rows)| rows).collect(), closing }
    }

    /// Drops the parts of a trainer's finished calls.
    pub(super) fn forget(&mut self, trainer: TrainerId, is_over: impl Fn(CallId) -> bool) {
        self.gathering.retain(|gathering| gathering.trainer != trainer || !is_over(gathering.call));
    }

    /// Drops contributions whose last part is too old: they would hold the journal forever.
    pub(super) fn give_up(&mut self, is_overdue: impl Fn(Now) -> bool) -> Vec<AbandonedContribution> {
        let over: Vec<AbandonedContribution> =
            self.gathering.extract_if(.., |one| is_overdue(one.since)).map(PartialContribution::given_up).collect();
        for one in &over {
            self.given_up.retain(|(trainer, _)| *trainer != one.trainer);
            self.given_up.push((one.trainer, one.call));
        }
        over
    }

    /// Whether a part belongs to a dropped call. The first part of a call starts it anew.
    pub(super) fn is_given_up(&self, part: RowsPart, trainer: TrainerId, call: CallId) -> bool {
        0 < part.index && self.given_up.contains(&(trainer, call))
    }

    /// Time of the oldest partial contribution.
    pub(super) fn waits_since(&self) -> Option<Now> {
        self.gathering.iter().map(|one| one.since).min()
    }

    /// Whether no contribution is partial.
    pub(super) fn is_whole(&self) -> bool {
        self.gathering.is_empty()
    }

    /// The parts of partial contributions, each with its trainer, its call and its round.
    pub(super) fn gathered(&self) -> impl Iterator<Item = (TrainerId, CallId, Round, &RowsLease)> {
        self.gathering.iter().flat_map(|one| {
            let (trainer, call, round) = (one.trainer, one.call, one.round);
            one.parts.iter().map(move |(_, rows)| (trainer, call, round, rows))
        })
    }

    /// Learning rates sent with updates, for the checkpoint.
    pub(super) fn rates(&self) -> &RateChanges {
        self.table.rates()
    }

    /// Descriptions of the checkpoint tensors, without lengths.
    pub(super) fn state_layouts(&self) -> Vec<StateLayout> {
        let layout = |name: &str, element_type| StateLayout { name: Arc::from(name), element_type, bytes: 0 };
        let states = self.table.settings().rule.states().iter().map(|state| layout(&state.name, self.element_type()));
        states.chain([layout(IDS, ElementType::Uint64), layout(LASTS, ElementType::Uint64)]).collect()
    }

    /// The existing rows in ascending order of ids.
    pub(super) fn tensors(&self) -> BucketTensors {
        BucketTensors(self.table.copy())
    }

    /// Begins a copy of the rows as they are now, for a checkpoint.
    pub(super) fn begin_copy(&mut self) {
        self.table.begin_copy();
    }

    /// Copies about `left` bytes; returns the copy when it is complete.
    pub(super) fn copy_on(&mut self, left: &mut u64) -> Option<BucketTensors> {
        self.table.copy_on(left).map(BucketTensors)
    }

    /// Drops an unfinished copy.
    pub(super) fn stop_copy(&mut self) {
        self.table.stop_copy();
    }

    /// Restores a bucket from a checkpoint.
    pub(super) fn restore(
        &mut self,
        version: Version,
        rates: RateChanges,
        value: &[u8],
        states: &[&[u8]],
    ) -> Result<(), Failure> {
        let damaged = || Failure::call("the rows, their states, their ids and their versions are not as many");
        let [states @ .., ids, lasts] = states else { return Err(damaged()) };
        let row_bytes = self.table.layout().row_bytes();
        let (ids, lasts) = (ids.as_chunks().0, lasts.as_chunks().0);
        let is_whole = |tensor: &[u8]| tensor.len() == ids.len() * row_bytes;
        let count = self.table.settings().rule.states().len();
        if states.len() != count
            || lasts.len() != ids.len()
            || !is_whole(value)
            || !states.iter().all(|one| is_whole(one))
        {
            return Err(damaged());
        }
        self.table.resume(version, rates);
        let mut work = RowWorkspace::default();
        let mut content = Vec::new();
        for (index, (id, last)) in ids.iter().zip(lasts).enumerate() {
            content.clear();
            for tensor in std::iter::once(&value).chain(states) {
                content.extend_from_slice(&tensor[index * row_bytes..][..row_bytes]);
            }
            let (id, last) = (u64::from_le_bytes(*id), Version(u64::from_le_bytes(*last)));
            self.table.restore(&mut work, Record { id, last, content: &content })?;
        }
        Ok(())
    }

    /// Refuses rows of another bucket: no pull would find them here.
    fn check_own(&self, ids: Ids<'_>) -> Result<(), Failure> {
        match ids.iter().find(|id| u64::from(self.buckets.of(*id)) != self.index.0) {
            None => Ok(()),
            Some(id) => {
                let (found, owner) = (self.index, self.buckets.of(id));
                Err(Failure::call(format!("row {id} came to bucket {found}; expected bucket {owner}")))
            }
        }
    }

    fn view<'a>(&self, element_type: ElementType, payload: &'a [u8]) -> Result<RowsView<'a>, Failure> {
        let (part, rows) = RowsPart::decode(payload)?;
        let rows = RowsView::parse(self.table.layout().of(element_type)?, rows)?;
        self.check_own(rows.ids())?;
        // Each part but the last has a row, which bounds the number of parts.
        let most = PARTS_MAX.min(self.buckets.rows.saturating_add(1));
        if most < u64::from(part.count) {
            return Err(Failure::call(format!("{} parts; expected at most {most}", part.count)));
        }
        if rows.ids().is_empty() && part.index + 1 < part.count {
            let (index, count) = (part.index, part.count);
            return Err(Failure::call(format!("part {index} of {count} without a row; only the last may have none")));
        }
        Ok(rows)
    }
}

impl BucketTensors {
    /// The value, then the states, as a record of a checkpoint has them.
    pub(super) fn parts(&self) -> (&[u8], Vec<&[u8]>) {
        let (value, states) = self.0.contents.split_first().expect("there are weights");
        let rest = [self.0.ids.as_slice(), self.0.lasts.as_slice()];
        (value, states.iter().map(Vec::as_slice).chain(rest).collect())
    }
}

impl PartialContribution {
    fn given_up(self) -> AbandonedContribution {
        let Self { trainer, call, count, parts, closing, .. } = self;
        AbandonedContribution { trainer, call, there: parts.len(), count: count as usize, closing }
    }

    fn new(one: &Contribution, count: u32, since: Now) -> Self {
        let (trainer, round, call) = (one.trainer, one.round, one.sending.call);
        Self { trainer, call, round, count, parts: Vec::new(), closing: None, since }
    }
}

/// The changes of the learning rate in a payload that was checked.
pub(super) fn rates_of(payload: &[u8]) -> RateChanges {
    let mut rates = RateChanges::default();
    for (version, rate) in payload.as_chunks::<RATE_BYTES>().0.iter().map(RateChanges::decode) {
        rates.note(version, rate);
    }
    rates
}

fn is_rate(rate: f64) -> bool {
    rate.is_finite() && rate >= 0.0
}

/// The fields of a request to list ids: zero, or one above the last known id; and the count.
fn list_question(payload: &[u8]) -> Option<(u64, u64)> {
    let [from, count] = payload.as_chunks().0 else { return None };
    (payload.len() == 2 * ID_BYTES).then(|| (u64::from_le_bytes(*from), u64::from_le_bytes(*count)))
}

/// Memory for records of a size and their index. It is mapped, and resident only when touched.
fn pieces(rows: u64, record_bytes: u64) -> Result<TablePieces, Failure> {
    // A table may align records to cache lines.
    let stride = (record_bytes + record_bytes / 16).next_multiple_of(8);
    let least = (16 * stride).next_power_of_two().max(INDEX_PAGE_BYTES);
    let piece = (rows.saturating_mul(stride) / 16).clamp(least, PIECE_BYTES.max(least)).next_power_of_two();
    let bytes = u32::try_from(piece).map_err(|_| Failure::call(format!("rows of {record_bytes} bytes")))?;
    let records = rows.div_ceil(piece / stride);
    let index = (rows / INDEX_PAGE_ROWS + 4).saturating_mul(INDEX_PAGE_BYTES).div_ceil(piece);
    let mut budget = Budget::new();
    budget.line("rows with their states", bytes, records);
    budget.line("where rows are", bytes, index);
    // A small table would leave most of a large page unused.
    let is_large = LARGE_BYTES <= budget.bytes();
    let arena = if is_large { Arena::of_large_pages(&budget) } else { Arena::new(&budget) };
    Ok(TablePieces::new(arena?, bytes))
}

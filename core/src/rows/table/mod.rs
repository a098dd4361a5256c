//! Table of the existing rows of one parameter, or of one server's part of it.
//!
//! An update touches only the rows that it was sent. Yet the values are bit for bit those of a dense parameter with the
//! same initial values: see `rest`.
//!
//! Not here: removal of rows. A table grows until its memory is used up, and then returns an error.
//!
//! A row exists after it was first updated or set. An absent row reads as its initial value with the missed updates
//! replayed; reading never creates it, so that random reads do not fill the table, and lists and checkpoints hold
//! pushed rows only. Under a rule that changes rows by a gradient of zero (decay, for example) each read of an absent
//! row replays all updates. No value depends on whether a row exists.
//!
//! A row that has missed a million updates takes a million kernel calls, so the work is divided: [`RowTable::read`] and
//! [`RowTable::catch_up`] stop when an allowance is used up, and resume there.
//!
//! `pieces` (memory), `index` (id to slot), `records` (slot to bytes), `tile` (the rows of one kernel call), `rest`
//! (missed updates), `reading` (progress of a read), `copy` (a snapshot of the table, for a checkpoint), `replacing`
//! (rows and counts that are set).

mod copy;
mod index;
mod pieces;
mod reading;
mod records;
mod replacing;
mod rest;
mod settings;
mod tile;

use std::ops::Range;

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::ids::Version;
use crate::memory::prefetch;
use crate::optim::{self, Step};
use crate::port::Kernels;

use super::layout::{RowLayout, element_bytes};
use super::merge::Merged;
use super::selected::{Ids, RowsView};

use copy::Copying;
use index::Index;
use records::RowRecords;
use rest::{IdleRows, Past};
use tile::{Tile, TileRow, TileShape};

pub use copy::TableCopy;
pub use pieces::TablePieces;
pub use reading::PartialRead;
pub use rest::{RateChanges, check_step_settings};
pub use settings::{CatchUp, TableSettings};

/// Bytes of a row's last version.
const HEAD_BYTES: usize = size_of::<u64>();
/// Ids that are looked up together, so that their cache misses overlap.
const GROUP: usize = 64;

/// Rows by id, with the optimizer state of each.
#[derive(Debug)]
pub struct RowTable {
    settings: TableSettings,
    rest: IdleRows,
    shape: TileShape,
    index: Index,
    records: RowRecords,
    version: Version,
    rates: RateChanges,
    /// The copy in progress, if any.
    copying: Option<Box<Copying>>,
}

/// Working buffers, shared by any number of tables in sequence.
#[derive(Debug, Default)]
pub struct RowWorkspace {
    tile: Tile,
    slots: Vec<u32>,
}

/// Memory use of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableUsage {
    /// Existing rows.
    pub rows: u64,
    /// Bytes of the pieces that hold them.
    pub record_bytes: u64,
    /// Bytes of the pieces of the index.
    pub index_bytes: u64,
}

/// A stored row, for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The row.
    pub id: u64,
    /// The version of the last update that the row has seen; the table's own when no update can be missed.
    pub last: Version,
    /// The weight, then each state.
    pub content: &'a [u8],
}

/// The rows that existed at some moment, in ascending order of their ids.
#[derive(Debug)]
pub struct Sorted {
    rows: Vec<(u64, u32)>,
}

impl RowTable {
    /// An empty table at version zero.
    ///
    /// # Errors
    /// As [`TableSettings::validate`], and when a piece is too small for a row or none is free.
    pub fn new(settings: TableSettings, pieces: TablePieces) -> Result<Self, Failure> {
        settings.validate()?;
        let rest = match settings.catch_up {
            CatchUp::Exact => IdleRows::of(settings.rule.rule(), settings.layout.element_type()),
            CatchUp::Lazy => IdleRows::Always,
        };
        let shape = TileShape { row_bytes: settings.layout.row_bytes(), states: settings.rule.states().len() };
        let head_bytes = if rest == IdleRows::Always { 0 } else { HEAD_BYTES };
        let record_bytes = head_bytes + shape.row_bytes * (shape.states + 1);
        Ok(Self {
            rest,
            shape,
            index: Index::new(pieces.clone())?,
            records: RowRecords::new(pieces, record_bytes)?,
            version: Version(0),
            rates: RateChanges::default(),
            copying: None,
            settings,
        })
    }

    /// The settings of the table.
    #[must_use]
    pub fn settings(&self) -> &TableSettings {
        &self.settings
    }

    /// The layout of its rows.
    #[must_use]
    pub fn layout(&self) -> RowLayout {
        self.settings.layout
    }

    /// The number of updates so far.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The learning rates that steps specified. A checkpoint consists of them, the version and the records. The history
    /// is empty under rules that never replay an update or have no rate.
    #[must_use]
    pub fn rates(&self) -> &RateChanges {
        &self.rates
    }

    /// Its memory use.
    #[must_use]
    pub fn usage(&self) -> TableUsage {
        TableUsage {
            rows: u64::from(self.records.len()),
            record_bytes: self.records.bytes(),
            index_bytes: self.index.bytes(),
        }
    }

    /// Reserves memory for rows, so that an update of them cannot fail for lack of memory. No value changes.
    ///
    /// # Errors
    /// When memory runs out; names the bytes and the existing rows. Memory for some of the rows may have been reserved.
    pub fn reserve(&mut self, work: &mut RowWorkspace, ids: Ids<'_>) -> Result<(), Failure> {
        self.claim(&mut work.slots, ids.iter())
    }

    /// One update of the table, by the sums of the sent rows; every other row gets a gradient of zero when it is next
    /// used. `reduced` has the values of the rule's reductions, as [`reduce`](crate::optim::reduce()) gave them.
    ///
    /// # Errors
    /// When memory runs out, and when the step's rate or scale is negative or not finite. Then neither a value nor the
    /// version has changed.
    ///
    /// # Panics
    /// When the rows are not of the table's layout, or the step is not the next one.
    pub fn apply(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        merged: &Merged<'_>,
        step: &Step,
        reduced: &[f64],
    ) -> Result<(), Failure> {
        assert_eq!(merged.layout(), self.settings.layout, "rows of this table");
        assert_eq!(step.version.0, self.version.0 + 1, "updates come one after another");
        check_step(step)?;
        self.claim(&mut work.slots, merged.ids())?;
        let rows = self.shape.rows();
        for start in (0..merged.len()).step_by(rows) {
            let end = merged.len().min(start + rows);
            self.update_tile(work, kernels, merged, start..end, (step, reduced));
        }
        if self.rest != IdleRows::Always && !self.settings.rule.rule().algorithm.is_exact() {
            self.rates.note(step.version, step.rate);
        }
        self.version = step.version;
        Ok(())
    }

    /// Whether the missed updates of rows fit the allowance `left`, in bytes of updated weights; subtracts them if they
    /// do. The estimate is an upper bound: a row that stops changing costs less.
    pub fn may_catch_up(&self, ids: Ids<'_>, left: &mut u64) -> bool {
        if self.rest == IdleRows::Always {
            return true;
        }
        let row_bytes = self.shape.row_bytes as u64;
        let most = (ids.len() as u64 * row_bytes).saturating_mul(self.version.0);
        // In a young table no row can have missed more than the allowance, so no row is looked up.
        if most <= *left {
            *left -= most;
            return true;
        }
        let mut missed = 0_u64;
        let mut slots = [None; GROUP];
        self.ask_for(ids, 0..GROUP);
        for start in (0..ids.len()).step_by(GROUP) {
            let places = start..ids.len().min(start + GROUP);
            self.find(ids, places.clone(), &mut slots);
            self.ask_for(ids, places.end..places.end + GROUP);
            for slot in slots[..places.len()].iter().flatten() {
                let behind = self.version.0 - self.last(*slot).0;
                let is_one = behind > 1 && self.rest == IdleRows::AfterOne && self.is_fresh(Some(*slot));
                missed = missed.saturating_add(if is_one { row_bytes } else { behind.saturating_mul(row_bytes) });
            }
        }
        let is_allowed = missed <= *left;
        if is_allowed {
            *left -= missed;
        }
        is_allowed
    }

    /// Replays missed updates of existing rows, from index `from` on, ahead of an update of them; stops when the
    /// allowance `left` is used up. Returns true when no row has missed an update; else the next call resumes at
    /// `from`.
    pub fn catch_up(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        ids: Ids<'_>,
        from: &mut usize,
        left: &mut u64,
    ) -> bool {
        if self.rest == IdleRows::Always {
            return true;
        }
        work.tile.begin(self.shape);
        let mut slots = [None; GROUP];
        self.ask_for(ids, *from..*from + GROUP);
        for start in (*from..ids.len()).step_by(GROUP) {
            let places = start..ids.len().min(start + GROUP);
            self.find(ids, places.clone(), &mut slots);
            self.ask_for(ids, places.end..places.end + GROUP);
            for (place, slot) in places.zip(slots) {
                let Some(last) = slot.map(|slot| self.last(slot)).filter(|last| *last < self.version) else { continue };
                work.tile.rows.push(TileRow { id: ids.get(place), slot, last, place });
                if work.tile.rows.len() == self.shape.rows() && !self.catch_up_tile(work, kernels, from, left) {
                    return false;
                }
            }
        }
        self.catch_up_tile(work, kernels, from, left)
    }

    /// Writes the weights of rows, row after row in the ids' order; ids may repeat.
    ///
    /// # Panics
    /// When `into` does not hold a row for each id.
    pub fn pull(&mut self, work: &mut RowWorkspace, kernels: &mut dyn Kernels, ids: Ids<'_>, into: &mut [u8]) {
        let (mut reading, mut left) = (PartialRead::default(), u64::MAX);
        let is_over = self.read(work, kernels, ids, &mut reading, &mut left, into);
        assert!(is_over, "no table is so long");
    }

    /// As [`pull`](Self::pull), of the tensor that `reading` begins with, within the allowance `left` of
    /// [`catch_up`](Self::catch_up). True when every row is written; else the next call continues at `reading` with the
    /// same `ids` and `into`. Each row then has its values of some version since the read began; if the table was
    /// updated meanwhile, versions of rows may differ.
    ///
    /// # Panics
    /// When `into` does not hold a row for each id.
    // tidy: allow parameters: a resumable read has its progress and its allowance beside the parameters of `pull`.
    pub fn read(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        ids: Ids<'_>,
        reading: &mut PartialRead,
        left: &mut u64,
        into: &mut [u8],
    ) -> bool {
        let row_bytes = self.shape.row_bytes;
        assert_eq!(into.len(), ids.len() * row_bytes, "a row for each id");
        work.tile.begin(self.shape);
        let mut slots = [None; GROUP];
        self.ask_for(ids, reading.next..reading.next + GROUP);
        for start in (reading.next..ids.len()).step_by(GROUP) {
            let places = start..ids.len().min(start + GROUP);
            self.find(ids, places.clone(), &mut slots);
            self.ask_for(ids, places.end..places.end + GROUP);
            for (place, slot) in places.zip(slots) {
                let (id, row) = (ids.get(place), &mut into[place * row_bytes..][..row_bytes]);
                if let Some(last) = self.read_row(id, slot, reading.tensor, row) {
                    let last = if slot.is_none() { reading.seen(id).unwrap_or(last) } else { last };
                    work.tile.rows.push(TileRow { id, slot, last, place });
                }
                if work.tile.rows.len() == self.shape.rows()
                    && !self.read_tile(&mut work.tile, kernels, reading, left, into)
                {
                    return false;
                }
            }
        }
        self.read_tile(&mut work.tile, kernels, reading, left, into)
    }
}

impl RowTable {
    /// The existing rows, in ascending order of their ids. Rows never move, so a checkpoint may read some of them now
    /// and others later, with their values at that time.
    #[must_use]
    pub fn sorted(&self) -> Sorted {
        let mut rows: Vec<_> = self.index.entries().collect();
        rows.sort_unstable();
        Sorted { rows }
    }

    /// Some ids of existing rows: those that follow `after`, which need not exist, or the first ones. Their order does
    /// not change when the table grows, so a listing that resumes after the last id of a page finds every row that
    /// existed when it began. The cost is proportional to the number of ids returned. The largest number, which ends
    /// lists on the wire, is left out ([`has_largest`](Self::has_largest)).
    #[must_use]
    pub fn ids_after(&self, after: Option<u64>, most: usize) -> Vec<u64> {
        self.index.ids_after(after, most)
    }

    /// Whether the row of the largest number exists.
    #[must_use]
    pub fn has_largest(&self) -> bool {
        self.index.find(u64::MAX).is_some()
    }

    /// One of these rows, with its current values.
    ///
    /// # Panics
    /// When the index is out of bounds, or the rows are another table's.
    #[must_use]
    pub fn record(&self, sorted: &Sorted, index: usize) -> Record<'_> {
        let (id, slot) = sorted.rows[index];
        Record { id, last: self.last(slot), content: &self.records.get(slot)[self.head_bytes()..] }
    }

    /// Restores a row of a checkpoint, replacing an existing one.
    ///
    /// # Errors
    /// When the id, the version or the length does not fit this table, naming which, and when memory runs out.
    pub fn restore(&mut self, work: &mut RowWorkspace, record: Record<'_>) -> Result<(), Failure> {
        let Record { id, last, content } = record;
        let expected = self.shape.row_bytes * (self.shape.states + 1);
        self.settings.layout.check(id)?;
        if content.len() != expected {
            return Err(Failure::call(format!("row {id} has {} bytes; expected {expected}", content.len())));
        }
        if self.version < last {
            return Err(Failure::call(format!("row {id} is of version {last}; expected at most {}", self.version)));
        }
        self.claim(&mut work.slots, std::iter::once(id))?;
        let slot = work.slots[0];
        let head = self.head_bytes();
        self.records.get_mut(slot)[head..].copy_from_slice(content);
        self.set_last(slot, last);
        Ok(())
    }

    /// Restores a checkpoint's version and rates; its rows follow with [`restore`](Self::restore).
    ///
    /// # Panics
    /// When the table has seen updates or rows.
    pub fn resume(&mut self, version: Version, rates: RateChanges) {
        assert_eq!((self.version, self.records.len()), (Version(0), 0), "an unused table");
        self.version = version;
        self.rates = rates;
    }
}

impl Sorted {
    /// How many rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Their ids.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u64> {
        self.rows.iter().map(|(id, _)| *id)
    }
}

impl RowTable {
    /// Finds or makes a slot for each id.
    fn claim(&mut self, slots: &mut Vec<u32>, ids: impl ExactSizeIterator<Item = u64> + Clone) -> Result<(), Failure> {
        slots.clear();
        slots.reserve(ids.len());
        let mut ahead = ids.clone();
        ahead.by_ref().take(GROUP).for_each(|id| self.index.prefetch(id));
        for id in ids {
            if let Some(id) = ahead.next() {
                self.index.prefetch(id);
            }
            slots.push(match self.index.find(id) {
                Some(slot) => slot,
                None => self.add(id)?,
            });
        }
        Ok(())
    }

    /// Creates an absent row with its initial values.
    fn add(&mut self, id: u64) -> Result<u32, Failure> {
        let room = self.records.reserve().and_then(|slot| self.index.insert(id, slot).map(|()| slot));
        let slot = room.map_err(|why| {
            let TableUsage { rows, record_bytes, index_bytes } = self.usage();
            Failure::call(format!(
                "no room for row {id}: {rows} rows take {record_bytes} bytes, their index {index_bytes}; {why}"
            ))
        })?;
        let TableSettings { layout, rule, .. } = &self.settings;
        let head = if self.rest == IdleRows::Always { 0 } else { HEAD_BYTES };
        let record = self.records.add();
        record.fill(0);
        let (weight, states) = record[head..].split_at_mut(self.shape.row_bytes);
        self.settings.begin(id, weight);
        for (declared, state) in rule.states().iter().zip(states.chunks_exact_mut(self.shape.row_bytes)) {
            optim::fill(layout.element_type(), state, declared.initial);
        }
        Ok(slot)
    }

    /// Prefetches the index entries of some ids, within bounds.
    fn ask_for(&self, ids: Ids<'_>, places: Range<usize>) {
        let places = places.start..places.end.min(ids.len());
        places.for_each(|place| self.index.prefetch(ids.get(place)));
    }

    /// Finds the slots of some ids, and prefetches their records.
    fn find(&self, ids: Ids<'_>, places: Range<usize>, slots: &mut [Option<u32>; GROUP]) {
        for (place, slot) in places.zip(slots) {
            *slot = self.index.find(ids.get(place));
            if let Some(slot) = *slot {
                prefetch(&self.records.get(slot)[..self.head_bytes() + self.shape.row_bytes]);
            }
        }
    }

    /// One update of some existing rows.
    fn update_tile(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        merged: &Merged<'_>,
        places: Range<usize>,
        (step, reduced): (&Step, &[f64]),
    ) {
        let RowWorkspace { tile, slots } = work;
        tile.begin(self.shape);
        for place in places {
            let slot = slots[place];
            tile.rows.push(TileRow { id: merged.id(place), slot: Some(slot), last: self.last(slot), place });
        }
        self.settle_whole(tile, kernels);
        for index in 0..tile.rows.len() {
            let place = tile.rows[index].place;
            // One record at a time: the processor has a limited number of outstanding cache misses.
            if let Some(ahead) = slots.get(place + self.shape.rows()) {
                prefetch(self.records.get(*ahead));
            }
            merged.sum(place..place + 1, tile.gradient(index));
        }
        tile.update(kernels, self.past(), step, reduced);
        tile.rows.iter_mut().for_each(|row| row.last = step.version);
        self.store(tile);
    }

    /// Reads the rows of a tile after replaying their missed updates, and writes them back; false when the allowance
    /// ended first, and the read resumes with them.
    fn read_tile(
        &mut self,
        tile: &mut Tile,
        kernels: &mut dyn Kernels,
        reading: &mut PartialRead,
        left: &mut u64,
        into: &mut [u8],
    ) -> bool {
        self.settle(tile, kernels, reading, left);
        self.store(tile);
        let is_over = tile.has_seen(self.version);
        if is_over {
            for index in 0..tile.rows.len() {
                let (place, row) = (tile.rows[index].place, tile.row(reading.tensor, index));
                into[place * self.shape.row_bytes..][..self.shape.row_bytes].copy_from_slice(row);
            }
        } else {
            reading.stop_at(tile);
        }
        tile.rows.clear();
        is_over
    }

    /// Replays the missed updates of a tile's rows as far as `left` allows, and stores the rows. False when some are
    /// still missed; the next call resumes at `from`, the first such row.
    fn catch_up_tile(
        &mut self,
        work: &mut RowWorkspace,
        kernels: &mut dyn Kernels,
        from: &mut usize,
        left: &mut u64,
    ) -> bool {
        let tile = &mut work.tile;
        self.settle(tile, kernels, &PartialRead::default(), left);
        self.store(tile);
        let is_over = tile.has_seen(self.version);
        if !is_over {
            *from = tile.first_place().unwrap_or(*from);
        }
        tile.rows.clear();
        is_over
    }

    /// Loads the rows of a tile and replays all their missed updates.
    fn settle_whole(&self, tile: &mut Tile, kernels: &mut dyn Kernels) {
        let mut left = u64::MAX;
        self.settle(tile, kernels, &PartialRead::default(), &mut left);
    }

    /// Loads the rows of a tile and replays their missed updates, as far as `left` allows. State of absent rows comes
    /// from the read in progress.
    fn settle(&self, tile: &mut Tile, kernels: &mut dyn Kernels, reading: &PartialRead, left: &mut u64) {
        let version = self.version;
        if self.rest != IdleRows::Always {
            for row in &mut tile.rows {
                // One update is then equivalent to all missed ones.
                if self.rest == IdleRows::AfterOne && row.last < version && self.is_fresh(row.slot) {
                    row.last = Version(version.0 - 1);
                }
            }
            tile.rows.sort_by_key(|row| row.last);
        }
        for index in 0..tile.rows.len() {
            match tile.rows[index] {
                TileRow { slot: Some(slot), .. } => tile.load(index, &self.records.get(slot)[self.head_bytes()..]),
                TileRow { slot: None, id, .. } => match reading.content(id) {
                    Some(content) => tile.load(index, content),
                    None => {
                        tile.begin_states(index, self.past());
                        self.settings.begin(id, tile.weight(index));
                    }
                },
            }
        }
        if self.rest != IdleRows::Always {
            tile.catch_up(kernels, self.past(), version, left);
        }
    }

    /// Stores the rows of a tile that have a record.
    fn store(&mut self, tile: &mut Tile) {
        for index in 0..tile.rows.len() {
            if let TileRow { slot: Some(slot), id, last, .. } = tile.rows[index] {
                self.keep(id, slot);
                let head = self.head_bytes();
                tile.store(index, &mut self.records.get_mut(slot)[head..]);
                self.set_last(slot, last);
            }
        }
    }

    /// Whether a row's states are zero and its weight is finite, as in a new row.
    fn is_fresh(&self, slot: Option<u32>) -> bool {
        let Some(slot) = slot else { return true };
        let (weight, states) = self.records.get(slot)[self.head_bytes()..].split_at(self.shape.row_bytes);
        states.iter().all(|byte| *byte == 0) && is_finite(self.settings.layout, weight)
    }

    fn past(&self) -> Past<'_> {
        Past { rule: &self.settings.rule, element_type: self.settings.layout.element_type(), rates: &self.rates }
    }

    /// Bytes of a record before its weight: its last version, when rows have one.
    fn head_bytes(&self) -> usize {
        if self.rest == IdleRows::Always { 0 } else { HEAD_BYTES }
    }

    /// The version of the last update that a row has seen.
    fn last(&self, slot: u32) -> Version {
        if self.rest == IdleRows::Always {
            return self.version;
        }
        let head = self.records.get(slot).first_chunk().expect("a record begins with its version");
        Version(u64::from_le_bytes(*head))
    }

    fn set_last(&mut self, slot: u32, version: Version) {
        if self.rest != IdleRows::Always {
            self.records.get_mut(slot)[..HEAD_BYTES].copy_from_slice(&version.0.to_le_bytes());
        }
    }

    /// Reads a row that has missed no update; for any other row returns the last version it has seen.
    fn read_row(&self, id: u64, slot: Option<u32>, tensor: usize, row: &mut [u8]) -> Option<Version> {
        let last = slot.map_or(Version(0), |slot| self.last(slot));
        if self.rest != IdleRows::Always && last < self.version {
            return Some(last);
        }
        match (slot, tensor.checked_sub(1)) {
            (Some(slot), _) => {
                let start = self.head_bytes() + tensor * self.shape.row_bytes;
                row.copy_from_slice(&self.records.get(slot)[start..][..self.shape.row_bytes]);
            }
            (None, None) => self.settings.begin(id, row),
            (None, Some(state)) => {
                let TableSettings { layout, rule, .. } = &self.settings;
                optim::fill(layout.element_type(), row, rule.states()[state].initial);
            }
        }
        None
    }
}

/// Refuses a step under which a gradient of zero would not stay zero.
fn check_step(step: &Step) -> Result<(), Failure> {
    for (name, value) in [("rate", step.rate.unwrap_or(0.0)), ("scale", step.scale)] {
        if !(value.is_finite() && value >= 0.0) {
            return Err(Failure::call(format!("a step's {name} is {value}; expected a finite number, zero or above")));
        }
    }
    Ok(())
}

fn is_finite(layout: RowLayout, row: &[u8]) -> bool {
    let elements = row.chunks_exact(element_bytes(layout.element_type()));
    match layout.element_type() {
        ElementType::Float32 => elements.into_iter().all(|bytes| f32::from_le_bytes(array(bytes)).is_finite()),
        ElementType::Float64 => elements.into_iter().all(|bytes| f64::from_le_bytes(array(bytes)).is_finite()),
        _ => true,
    }
}

fn array<const BYTES: usize>(bytes: &[u8]) -> [u8; BYTES] {
    bytes.try_into().expect("an element has its type's bytes")
}

impl RowTable {
    /// The number of these rows that do not exist, each counted once.
    pub fn missing(&self, ids: Ids<'_>) -> u64 {
        let mut missing: Vec<u64> = ids.iter().filter(|id| self.index.find(*id).is_none()).collect();
        missing.sort_unstable();
        missing.dedup();
        missing.len() as u64
    }
}

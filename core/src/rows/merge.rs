//! Merge of contributions into unique rows: sort, segment, sum.
//!
//! The sum of a row equals that of its dense form: each contribution is scattered into zeros in order of appearance,
//! and the contributions are added in trainer order, all in the parameter's own type. So the bits do not depend on
//! whether a trainer merges its rows, leaves that to the server, or sends a dense gradient. A merged element is never a
//! negative zero, because zero plus negative zero is zero.

use std::ops::{Add, Range};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::memory::prefetch;
use crate::partition::Buckets;

use super::layout::RowLayout;
use super::selected::{Ids, RowsView, SelectedRows};

/// Bits of a radix digit: the counts of its values fit the first-level cache.
const DIGIT_BITS: u32 = 11;
const DIGIT_VALUES: usize = 1 << DIGIT_BITS;
const DIGITS: usize = u64::BITS.div_ceil(DIGIT_BITS) as usize;

/// Buffers of a merge, reused by the next one. They grow to the largest merge so far and never shrink.
#[derive(Debug, Default)]
pub struct RowMerge {
    places: Vec<ContributionRow>,
    /// The second buffer of the radix sort.
    spare: Vec<ContributionRow>,
    /// The index in `places` at which each unique id begins, and the end of the last one.
    starts: Vec<u32>,
}

/// Rows of contributions to prefetch ahead of the summed one.
const ROWS_AHEAD: usize = 16;

/// A row of a contribution.
#[derive(Clone, Copy, Debug, Default)]
struct ContributionRow {
    id: u64,
    contribution: u32,
    row: u32,
}

/// Contributions as unique rows in ascending order of their ids. Sums are computed on demand and not stored.
#[derive(Clone, Copy, Debug)]
pub struct Merged<'a> {
    layout: RowLayout,
    contributions: &'a [RowsView<'a>],
    unique: Unique<'a>,
}

/// Unique ids, and the rows of each.
#[derive(Clone, Copy, Debug)]
pub struct Unique<'a> {
    places: &'a [ContributionRow],
    starts: &'a [u32],
}

impl RowMerge {
    /// Buffers for merges of this many rows, repeated ones included.
    #[must_use]
    pub fn with_capacity(rows: usize) -> Self {
        let starts = Vec::with_capacity(rows.saturating_add(1));
        Self { places: Vec::with_capacity(rows), spare: Vec::with_capacity(rows), starts }
    }

    /// Groups rows by id. `layout` is the parameter's; contributions are in trainer order, at most one of each trainer,
    /// and may be of any type that is a gradient for it.
    ///
    /// # Errors
    /// When a contribution's rows do not fit the parameter's, naming both, and when there are 2^32 rows or more.
    pub fn unite<'a>(
        &'a mut self,
        layout: RowLayout,
        contributions: &'a [RowsView<'a>],
    ) -> Result<Merged<'a>, Failure> {
        self.take(layout, contributions)?;
        if let [alone] = contributions
            && is_ascending(alone)
        {
            // Already unique and ascending, as trainers send them: nothing to sort.
            self.starts.clear();
            self.starts.extend((0..=u32::MAX).take(alone.len() + 1));
        } else {
            self.sort();
            self.segment();
        }
        let Self { places, starts, .. } = self;
        Ok(Merged { layout, contributions, unique: Unique { places, starts } })
    }

    /// As [`unite`](Self::unite), with the rows ordered by bucket, and within a bucket by ascending ids.
    ///
    /// # Errors
    /// As [`unite`](Self::unite).
    pub fn partition_by_bucket<'a>(
        &'a mut self,
        layout: RowLayout,
        contributions: &'a [RowsView<'a>],
        buckets: Buckets,
    ) -> Result<Merged<'a>, Failure> {
        self.take(layout, contributions)?;
        self.sort();
        self.sort_by_bucket(buckets);
        self.segment();
        let Self { places, starts, .. } = self;
        Ok(Merged { layout, contributions, unique: Unique { places, starts } })
    }

    /// Groups equal ids, and orders them by bucket, ascending within a bucket.
    ///
    /// # Errors
    /// When there are 2^32 ids or more.
    pub fn deal_ids(&mut self, ids: Ids<'_>, buckets: Buckets) -> Result<Unique<'_>, Failure> {
        check_count(ids.len())?;
        self.places.clear();
        self.places.extend((0..).zip(ids.iter()).map(|(row, id)| ContributionRow { id, contribution: 0, row }));
        self.sort();
        self.sort_by_bucket(buckets);
        self.segment();
        Ok(Unique { places: &self.places, starts: &self.starts })
    }
}

impl RowMerge {
    /// Collects the rows of contributions, after checking that they fit the layout.
    fn take(&mut self, layout: RowLayout, contributions: &[RowsView<'_>]) -> Result<(), Failure> {
        for (index, rows) in contributions.iter().enumerate() {
            check(layout, index, rows.layout())?;
        }
        check_count(contributions.iter().map(RowsView::len).fold(contributions.len(), usize::saturating_add))?;
        self.places.clear();
        for (contribution, rows) in (0..).zip(contributions) {
            let places = (0..).zip(rows.ids().iter()).map(|(row, id)| ContributionRow { id, contribution, row });
            self.places.extend(places);
        }
        Ok(())
    }

    /// Radix sort by id, from the lowest digit; rows with equal ids keep their order. A digit that all ids share costs
    /// only its count.
    fn sort(&mut self) {
        let most = self.places.iter().fold(0, |bits, place| bits | place.id);
        let digits = DIGITS.min((u64::BITS - most.leading_zeros()).div_ceil(DIGIT_BITS) as usize);
        self.spare.clear();
        self.spare.resize(self.places.len(), ContributionRow::default());
        let mut nexts = [0; DIGIT_VALUES];
        for shift in (0..digits).map(|digit| digit * DIGIT_BITS as usize) {
            let digit = |id: u64| usize::try_from(id >> shift & (DIGIT_VALUES as u64 - 1)).expect("11 bits");
            self.scatter(&mut nexts, digit);
        }
    }

    /// Groups sorted rows by bucket, stably.
    fn sort_by_bucket(&mut self, buckets: Buckets) {
        self.scatter(&mut vec![0; buckets.count as usize], |id| buckets.of(id) as usize);
    }

    /// One pass of the radix sort; nothing moves when all ids have the same digit. `nexts` has an entry for every
    /// digit, and `spare` has room for all rows.
    fn scatter(&mut self, nexts: &mut [u32], digit: impl Fn(u64) -> usize) {
        nexts.fill(0);
        self.places.iter().for_each(|place| nexts[digit(place.id)] += 1);
        if nexts.iter().any(|count| *count as usize == self.places.len()) {
            return;
        }
        let mut start = 0;
        for next in nexts.iter_mut() {
            start += std::mem::replace(next, start);
        }
        for place in &self.places {
            let next = &mut nexts[digit(place.id)];
            self.spare[*next as usize] = *place;
            *next += 1;
        }
        std::mem::swap(&mut self.places, &mut self.spare);
    }

    fn segment(&mut self) {
        self.starts.clear();
        let mut before = None;
        for (start, place) in (0..).zip(&self.places) {
            if before != Some(place.id) {
                self.starts.push(start);
                before = Some(place.id);
            }
        }
        self.starts.push(u32::try_from(self.places.len()).expect("more rows were refused"));
    }
}

/// Whether each row's id is above that of the row before.
fn is_ascending(rows: &RowsView<'_>) -> bool {
    let ids = rows.ids().iter();
    ids.clone().zip(ids.skip(1)).all(|(id, next)| id < next)
}

fn check_count(rows: usize) -> Result<(), Failure> {
    match u32::try_from(rows) {
        Ok(rows) if rows < u32::MAX => Ok(()),
        _ => Err(Failure::call(format!("{rows} rows in one merge; expected fewer than 2^32"))),
    }
}

fn check(layout: RowLayout, index: usize, found: RowLayout) -> Result<(), Failure> {
    let fits = found.element_type().is_gradient_for(layout.element_type());
    if fits && (found.width(), found.height()) == (layout.width(), layout.height()) {
        return Ok(());
    }
    Err(Failure::call(format!(
        "contribution {index} has rows of {} {} with {}; expected {} {} with {}",
        found.width(),
        found.element_type(),
        found.height(),
        layout.width(),
        layout.element_type(),
        layout.height()
    )))
}

impl Unique<'_> {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ids, in order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u64> + Clone {
        self.starts[..self.len()].iter().map(|start| self.places[*start as usize].id)
    }

    /// Writes for each row the index of its id.
    ///
    /// # Panics
    /// When `into` is shorter than the rows.
    pub fn number_rows(&self, into: &mut [u32]) {
        for (number, run) in (0..).zip(self.starts.windows(2)) {
            let rows = &self.places[run[0] as usize..run[1] as usize];
            rows.iter().for_each(|place| into[place.row as usize] = number);
        }
    }
}

impl Merged<'_> {
    /// How many unique rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.unique.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.unique.is_empty()
    }

    /// Whether these are the rows of a single contribution, none of which repeats.
    #[must_use]
    pub fn is_without_repetition(&self) -> bool {
        matches!(self.contributions, [alone] if alone.len() == self.len())
    }

    /// The layout of the rows; the type is the parameter's.
    #[must_use]
    pub fn layout(&self) -> RowLayout {
        self.layout
    }

    /// The unique ids, in order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u64> + Clone {
        self.unique.ids()
    }

    /// One of the unique ids.
    ///
    /// # Panics
    /// When the index is out of bounds.
    #[must_use]
    pub fn id(&self, index: usize) -> u64 {
        assert!(index < self.len(), "row {index} of {}", self.len());
        self.unique.places[self.unique.starts[index] as usize].id
    }

    /// Copies the rows of a single contribution in its own type. When no row repeats, this equals the sum except for
    /// the sign of zeros.
    ///
    /// # Panics
    /// When `into` is not as long as these rows, and when there are several contributions.
    pub fn copy(&self, rows: Range<usize>, into: &mut [u8]) {
        let [alone] = self.contributions else { panic!("{} contributions", self.contributions.len()) };
        let row_bytes = alone.layout().row_bytes();
        assert_eq!(into.len(), rows.len() * row_bytes, "as long as its rows");
        for (index, into) in rows.zip(into.chunks_exact_mut(row_bytes)) {
            let at = self.unique.starts[index] as usize;
            self.ask_for(at + ROWS_AHEAD);
            into.copy_from_slice(self.row(self.unique.places[at]));
        }
    }

    /// Writes the sums of some of the unique rows, row after row, in the parameter's type.
    ///
    /// # Panics
    /// When `into` is not as long as these rows.
    pub fn sum(&self, rows: Range<usize>, into: &mut [u8]) {
        assert_eq!(into.len(), rows.len() * self.layout.row_bytes(), "as long as its rows");
        match self.layout.element_type() {
            ElementType::Int32 => self.sum_rows::<i32>(rows, into),
            ElementType::Uint32 => self.sum_rows::<u32>(rows, into),
            ElementType::Int64 => self.sum_rows::<i64>(rows, into),
            ElementType::Uint64 => self.sum_rows::<u64>(rows, into),
            ElementType::Float32 => self.sum_rows::<f32>(rows, into),
            ElementType::Float64 => self.sum_rows::<f64>(rows, into),
            half @ (ElementType::Float16 | ElementType::Bfloat16) => unreachable!("{half} is for gradients"),
        }
    }

    /// All unique rows with their sums.
    #[must_use]
    pub fn to_selected_rows(&self) -> SelectedRows {
        let ids: Vec<u64> = self.ids().collect();
        let mut values = vec![0; ids.len() * self.layout.row_bytes()];
        self.sum(0..ids.len(), &mut values);
        SelectedRows::new(self.layout, &ids, &values).expect("the ids were checked, and each has a row")
    }
}

/// Elements that are widened at once: a few vector registers, and little stack.
const BLOCK: usize = 64;

impl Merged<'_> {
    fn sum_rows<E: RowElement>(&self, rows: Range<usize>, into: &mut [u8]) {
        let mut own = Vec::new();
        for (index, sum) in rows.zip(into.chunks_exact_mut(self.layout.row_bytes())) {
            let [start, end] = [index, index + 1].map(|at| self.unique.starts[at] as usize);
            self.sum_row::<E>(start..end, sum, &mut own);
        }
    }

    /// Sums each contribution's rows separately, then these sums in order; `own` is a buffer for one of them. A sum
    /// that begins with zero is never a negative zero, so addends need not begin with zero.
    fn sum_row<E: RowElement>(&self, mut run: Range<usize>, into: &mut [u8], own: &mut Vec<u8>) {
        self.sum_group::<E>(&mut run, into);
        while !run.is_empty() {
            let contribution = |at: usize| self.unique.places[at].contribution;
            if run.len() == 1 || contribution(run.start) != contribution(run.start + 1) {
                self.put::<E>(run.start, into, E::add_row);
                run.start += 1;
                continue;
            }
            own.resize(into.len(), 0);
            self.sum_group::<E>(&mut run, own);
            E::add_row(own, into);
        }
    }

    /// Removes the rows of one contribution from the front of a run, which has some, and sums them.
    fn sum_group<E: RowElement>(&self, run: &mut Range<usize>, into: &mut [u8]) {
        let contribution = self.unique.places[run.start].contribution;
        self.put::<E>(run.start, into, E::begin_row);
        run.start += 1;
        while run.start < run.end && self.unique.places[run.start].contribution == contribution {
            self.put::<E>(run.start, into, E::add_row);
            run.start += 1;
        }
    }

    /// Adds a row of a contribution to a sum, and prefetches a later one.
    #[inline]
    fn put<E: RowElement>(&self, at: usize, into: &mut [u8], put: impl Fn(&[u8], &mut [u8])) {
        self.ask_for(at + ROWS_AHEAD);
        let place = self.unique.places[at];
        let row = self.row(place);
        match self.contributions[place.contribution as usize].element_type() {
            half @ (ElementType::Float16 | ElementType::Bfloat16) => put_halves::<E>(half, row, into, put),
            _ => put(row, into),
        }
    }

    #[inline]
    fn row(&self, place: ContributionRow) -> &[u8] {
        self.contributions[place.contribution as usize].row(place.row as usize)
    }

    /// Prefetches a row that will soon be summed or copied, if there is one.
    #[inline]
    fn ask_for(&self, at: usize) {
        if let Some(place) = self.unique.places.get(at) {
            prefetch(self.row(*place));
        }
    }
}

#[inline(never)]
fn put_halves<E: RowElement>(element_type: ElementType, row: &[u8], into: &mut [u8], put: impl Fn(&[u8], &mut [u8])) {
    for (from, into) in row.chunks(BLOCK * 2).zip(into.chunks_mut(BLOCK * E::BYTES)) {
        put(widen::<E>(element_type, from, &mut [0; BLOCK * 8]), into);
    }
}

/// Widens a block of a half-precision gradient. Blocks, because the conversion tests the processor's features once per
/// call.
fn widen<'a, E: RowElement>(element_type: ElementType, bytes: &[u8], into: &'a mut [u8; BLOCK * 8]) -> &'a [u8] {
    let count = bytes.len() / 2;
    let mut singles = [0.0; BLOCK];
    let singles = &mut singles[..count];
    let bits = bytes.chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    if element_type == ElementType::Float16 {
        let mut halves = [f16::ZERO; BLOCK];
        halves.iter_mut().zip(bits).for_each(|(half, bits)| *half = f16::from_bits(bits));
        halves[..count].convert_to_f32_slice(singles);
    } else {
        singles.iter_mut().zip(bits).for_each(|(single, bits)| *single = bf16::from_bits(bits).to_f32());
    }
    let into = &mut into[..count * E::BYTES];
    let values = into.chunks_exact_mut(E::BYTES).zip(singles);
    values.for_each(|(bytes, single)| E::widen(*single).write(bytes));
    into
}

/// A type that rows are summed in.
trait RowElement: Copy {
    const BYTES: usize = size_of::<Self>();
    const ZERO: Self;

    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    /// Floats round, integers wrap.
    fn plus(self, other: Self) -> Self;
    /// The value of a half.
    fn widen(value: f32) -> Self;

    /// The sum of one row: zero plus the row, as in the dense form.
    #[inline(never)]
    fn begin_row(row: &[u8], into: &mut [u8]) {
        for (sum, bytes) in into.chunks_exact_mut(Self::BYTES).zip(row.chunks_exact(Self::BYTES)) {
            Self::ZERO.plus(Self::read(bytes)).write(sum);
        }
    }

    /// Adds one more row.
    #[inline(never)]
    fn add_row(row: &[u8], into: &mut [u8]) {
        for (sum, bytes) in into.chunks_exact_mut(Self::BYTES).zip(row.chunks_exact(Self::BYTES)) {
            Self::read(sum).plus(Self::read(bytes)).write(sum);
        }
    }
}

macro_rules! number {
    ($type:ty, $zero:literal, $plus:path, $widen:expr) => {
        impl RowElement for $type {
            const ZERO: Self = $zero;

            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("an element has its type's bytes"))
            }

            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }

            fn plus(self, other: Self) -> Self {
                $plus(self, other)
            }

            fn widen(value: f32) -> Self {
                $widen(value)
            }
        }
    };
}

number!(i32, 0, i32::wrapping_add, refuse_half);
number!(u32, 0, u32::wrapping_add, refuse_half);
number!(i64, 0, i64::wrapping_add, refuse_half);
number!(u64, 0, u64::wrapping_add, refuse_half);
number!(f32, 0.0, Add::add, Self::from);
number!(f64, 0.0, Add::add, Self::from);

fn refuse_half<T>(_: f32) -> T {
    unreachable!("a half is no gradient of integers, which was checked")
}

//! Contributions become unique rows: sort, segment, sum.
//!
//! The sum of a row is that of its dense form: each contribution is scattered into zeros in order of appearance, and
//! the contributions are added in the order given, which is the trainers'; all in the parameter's own type. So it makes
//! no difference to any bit whether a trainer merges what it sends or leaves it to the server, or sends it dense. A
//! merged element is never a negative zero, because zero plus negative zero is zero.

use std::ops::{Add, Range};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::memory::prefetch;

use super::layout::RowLayout;
use super::selected::{RowsView, SelectedRows};

/// A digit of an id, in bits: the counts of its values stay in the first-level cache.
const DIGIT_BITS: u32 = 11;
const DIGIT_VALUES: usize = 1 << DIGIT_BITS;
const DIGITS: usize = u64::BITS.div_ceil(DIGIT_BITS) as usize;

/// Room to merge in, which is kept from one merge to the next. It grows to the largest merge there was, and stays so.
#[derive(Debug, Default)]
pub struct Merge {
    places: Vec<Place>,
    /// The other half of a sort that moves from one to the other.
    spare: Vec<Place>,
    /// Where in `places` each unique id begins, and where the last one ends.
    starts: Vec<u32>,
}

/// Rows of contributions that are asked for ahead of the one that is summed.
const ROWS_AHEAD: usize = 16;

/// A row of a contribution.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    id: u64,
    contribution: u32,
    row: u32,
}

/// Contributions as unique rows in ascending order of their ids. What a row sums to is reckoned when it is asked for,
/// so that it need not be kept.
#[derive(Clone, Copy, Debug)]
pub struct Merged<'a> {
    layout: RowLayout,
    contributions: &'a [RowsView<'a>],
    places: &'a [Place],
    starts: &'a [u32],
}

impl Merge {
    /// Room for merges of so many rows, each counted as often as it comes.
    #[must_use]
    pub fn with_capacity(rows: usize) -> Self {
        let starts = Vec::with_capacity(rows.saturating_add(1));
        Self { places: Vec::with_capacity(rows), spare: Vec::with_capacity(rows), starts }
    }

    /// Finds out which rows are the same. `layout` is the parameter's; contributions are in trainer order, with at most
    /// one of each trainer, and may be of a type that is a gradient for it.
    ///
    /// # Errors
    /// When a contribution's rows do not fit the parameter's, naming both, and when there are 2^32 rows or more.
    pub fn unite<'a>(
        &'a mut self,
        layout: RowLayout,
        contributions: &'a [RowsView<'a>],
    ) -> Result<Merged<'a>, Failure> {
        for (index, rows) in contributions.iter().enumerate() {
            check(layout, index, rows.layout())?;
        }
        let rows = contributions.iter().map(RowsView::len).fold(0, usize::saturating_add);
        if u32::try_from(rows).is_err() || u32::try_from(contributions.len()).is_err() {
            return Err(Failure::call(format!("{rows} rows in one merge; expected fewer than 2^32")));
        }
        self.places.clear();
        for (contribution, rows) in (0..).zip(contributions) {
            let places = (0..).zip(rows.ids().iter()).map(|(row, id)| Place { id, contribution, row });
            self.places.extend(places);
        }
        if let [alone] = contributions
            && is_ascending(alone)
        {
            // As trainers send them: there is nothing to sort.
            self.starts.clear();
            self.starts.extend(0..=u32::try_from(rows).expect("it was compared"));
        } else {
            self.sort();
            self.segment();
        }
        let Self { places, starts, .. } = self;
        Ok(Merged { layout, contributions, places, starts })
    }

    /// Sorts by id, digit after digit from the lowest; rows with one id keep their order. A digit that all ids share
    /// costs nothing but its count.
    fn sort(&mut self) {
        let most = self.places.iter().fold(0, |bits, place| bits | place.id);
        let digits = DIGITS.min((u64::BITS - most.leading_zeros()).div_ceil(DIGIT_BITS) as usize);
        self.spare.clear();
        self.spare.resize(self.places.len(), Place::default());
        for shift in (0..digits).map(|digit| digit * DIGIT_BITS as usize) {
            if scatter(&self.places, &mut self.spare, shift) {
                std::mem::swap(&mut self.places, &mut self.spare);
            }
        }
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

/// Moves places to where a digit of their ids puts them. False, and nothing was moved, when all have the same digit.
fn scatter(from: &[Place], to: &mut [Place], shift: usize) -> bool {
    let digit = |place: &Place| usize::try_from(place.id >> shift & (DIGIT_VALUES as u64 - 1)).expect("11 bits");
    let mut nexts = [0_u32; DIGIT_VALUES];
    from.iter().for_each(|place| nexts[digit(place)] += 1);
    if nexts.iter().any(|count| *count as usize == from.len()) {
        return false;
    }
    let mut start = 0;
    for next in &mut nexts {
        start += std::mem::replace(next, start);
    }
    for place in from {
        let next = &mut nexts[digit(place)];
        to[*next as usize] = *place;
        *next += 1;
    }
    true
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

impl Merged<'_> {
    /// How many unique rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the rows have in common; the type is the parameter's.
    #[must_use]
    pub fn layout(&self) -> RowLayout {
        self.layout
    }

    /// The unique ids, ascending.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u64> + Clone {
        self.starts[..self.len()].iter().map(|start| self.places[*start as usize].id)
    }

    /// One of the unique ids.
    ///
    /// # Panics
    /// When there are not so many.
    #[must_use]
    pub fn id(&self, index: usize) -> u64 {
        assert!(index < self.len(), "row {index} of {}", self.len());
        self.places[self.starts[index] as usize].id
    }

    /// Where in its contribution the first of the rows is that a unique one is made of.
    #[must_use]
    pub fn first_row(&self, index: usize) -> usize {
        self.places[self.starts[index] as usize].row as usize
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

/// Elements that are widened at a time: a few vector registers, and small on the stack.
const BLOCK: usize = 64;

impl Merged<'_> {
    fn sum_rows<E: Number>(&self, rows: Range<usize>, into: &mut [u8]) {
        let mut own = Vec::new();
        for (index, sum) in rows.zip(into.chunks_exact_mut(self.layout.row_bytes())) {
            let run = self.starts[index] as usize..self.starts[index + 1] as usize;
            self.sum_row::<E>(run, sum, &mut own);
        }
    }

    /// Sums each contribution's rows by themselves, and these sums in order; `own` is room for one of them. A sum that
    /// begins with zero is never a negative zero, so it makes no difference whether what is added to it was begun so.
    fn sum_row<E: Number>(&self, mut run: Range<usize>, into: &mut [u8], own: &mut Vec<u8>) {
        self.sum_group::<E>(&mut run, into);
        while !run.is_empty() {
            let contribution = |at: usize| self.places[at].contribution;
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

    /// Sums the rows that one contribution has of those in a run, which must have some, and takes them out of it.
    fn sum_group<E: Number>(&self, run: &mut Range<usize>, into: &mut [u8]) {
        let contribution = self.places[run.start].contribution;
        self.put::<E>(run.start, into, E::begin_row);
        run.start += 1;
        while !run.is_empty() && self.places[run.start].contribution == contribution {
            self.put::<E>(run.start, into, E::add_row);
            run.start += 1;
        }
    }

    /// Puts a row of a contribution to a sum, and asks for one that will follow.
    #[inline]
    fn put<E: Number>(&self, at: usize, into: &mut [u8], put: impl Fn(&[u8], &mut [u8])) {
        if let Some(ahead) = self.places.get(at + ROWS_AHEAD) {
            prefetch(self.contributions[ahead.contribution as usize].row(ahead.row as usize));
        }
        let place = self.places[at];
        let rows = &self.contributions[place.contribution as usize];
        let row = rows.row(place.row as usize);
        match rows.element_type() {
            half @ (ElementType::Float16 | ElementType::Bfloat16) => put_halves::<E>(half, row, into, put),
            _ => put(row, into),
        }
    }
}

#[inline(never)]
fn put_halves<E: Number>(element_type: ElementType, row: &[u8], into: &mut [u8], put: impl Fn(&[u8], &mut [u8])) {
    for (from, into) in row.chunks(BLOCK * 2).zip(into.chunks_mut(BLOCK * E::BYTES)) {
        put(widen::<E>(element_type, from, &mut [0; BLOCK * 8]), into);
    }
}

/// Widens a block of a gradient in halves. They are converted together, because what the processor can do is asked once
/// for each call.
fn widen<'a, E: Number>(element_type: ElementType, bytes: &[u8], into: &'a mut [u8; BLOCK * 8]) -> &'a [u8] {
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
trait Number: Copy {
    const BYTES: usize = size_of::<Self>();
    const ZERO: Self;

    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    /// Floats round, integers wrap.
    fn plus(self, other: Self) -> Self;
    /// The value of a half.
    fn widen(value: f32) -> Self;

    /// A sum of one row: in the dense form there is a zero that it is added to.
    #[inline(never)]
    fn begin_row(row: &[u8], into: &mut [u8]) {
        for (sum, bytes) in into.chunks_exact_mut(Self::BYTES).zip(row.chunks_exact(Self::BYTES)) {
            Self::ZERO.plus(Self::read(bytes)).write(sum);
        }
    }

    /// One row more.
    #[inline(never)]
    fn add_row(row: &[u8], into: &mut [u8]) {
        for (sum, bytes) in into.chunks_exact_mut(Self::BYTES).zip(row.chunks_exact(Self::BYTES)) {
            Self::read(sum).plus(Self::read(bytes)).write(sum);
        }
    }
}

macro_rules! number {
    ($type:ty, $zero:literal, $plus:path, $widen:expr) => {
        impl Number for $type {
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

//! Contributions become unique rows: sort, segment, sum.
//!
//! The sum of a row is that of its dense form: each contribution is scattered into zeros in order of appearance, and
//! the contributions are added in the order given, which is the trainers'; all in the parameter's own type. So it makes
//! no difference to any bit whether a trainer merges what it sends or leaves it to the server, or sends it dense. A
//! merged element is never a negative zero, because zero plus negative zero is zero.

use std::ops::{Add, Range};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use smallvec::SmallVec;

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::memory::prefetch;

use super::layout::{RowLayout, element_bytes};
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
    /// The unique ids by the places where they come first, and room to find that out.
    appearance: Vec<u32>,
    firsts: Vec<u32>,
}

/// Rows of one id that are asked for ahead.
const ROWS_AHEAD: usize = 4;
/// No unique id.
const NOBODY: u32 = u32::MAX;

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
    appearance: &'a [u32],
}

impl Merge {
    /// Room for merges of so many rows, each counted as often as it comes.
    #[must_use]
    pub fn with_capacity(rows: usize) -> Self {
        let starts = Vec::with_capacity(rows.saturating_add(1));
        let (appearance, firsts) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        Self { places: Vec::with_capacity(rows), spare: Vec::with_capacity(rows), starts, appearance, firsts }
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
        self.sort();
        self.segment();
        self.order(contributions);
        let Self { places, starts, appearance, .. } = self;
        Ok(Merged { layout, contributions, places, starts, appearance })
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

impl Merge {
    /// Puts the unique ids in the order in which they come first.
    fn order(&mut self, contributions: &[RowsView<'_>]) {
        let lengths = contributions.iter().map(RowsView::len);
        let begins: SmallVec<[usize; 16]> = lengths
            .scan(0, |end, length| {
                *end += length;
                Some(*end - length)
            })
            .collect();
        self.firsts.clear();
        self.firsts.resize(self.places.len(), NOBODY);
        for (index, start) in (0..).zip(&self.starts[..self.starts.len() - 1]) {
            let place = self.places[*start as usize];
            self.firsts[begins[place.contribution as usize] + place.row as usize] = index;
        }
        self.appearance.clear();
        self.appearance.extend(self.firsts.iter().filter(|index| **index != NOBODY));
    }
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

    /// The unique rows, by number, in the order in which they come first: so contributions are read from their
    /// beginning to their end, as far as rows do not repeat.
    pub(super) fn appearance(&self) -> &[u32] {
        self.appearance
    }

    /// Asks for some of the rows that a unique one is made of, which will soon be summed; the first is the one that the
    /// processor sees coming.
    pub(super) fn prefetch(&self, index: usize) {
        let repeated = self.starts[index] as usize + 1..self.starts[index + 1] as usize;
        for place in self.places[repeated].iter().take(ROWS_AHEAD) {
            prefetch(self.contributions[place.contribution as usize].row(place.row as usize));
        }
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
        for (index, sum) in rows.zip(into.chunks_exact_mut(self.layout.row_bytes())) {
            let places = &self.places[self.starts[index] as usize..self.starts[index + 1] as usize];
            match self.layout.element_type() {
                ElementType::Int32 => self.sum_row::<i32>(places, sum),
                ElementType::Uint32 => self.sum_row::<u32>(places, sum),
                ElementType::Int64 => self.sum_row::<i64>(places, sum),
                ElementType::Uint64 => self.sum_row::<u64>(places, sum),
                ElementType::Float32 => self.sum_row::<f32>(places, sum),
                ElementType::Float64 => self.sum_row::<f64>(places, sum),
                half @ (ElementType::Float16 | ElementType::Bfloat16) => unreachable!("{half} is for gradients"),
            }
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

/// Elements that are summed at a time: a few vector registers, and small on the stack.
const BLOCK: usize = 64;

impl Merged<'_> {
    fn sum_row<E: Number>(&self, places: &[Place], into: &mut [u8]) {
        let width = self.layout.width() as usize;
        let mut block = [E::ZERO; BLOCK];
        for start in (0..width).step_by(BLOCK) {
            let elements = start..width.min(start + BLOCK);
            let block = &mut block[..elements.len()];
            self.sum_block(places, elements.clone(), block);
            for (value, bytes) in block.iter().zip(into[start * E::BYTES..].chunks_exact_mut(E::BYTES)) {
                // In the dense form there is always a zero that is added: the one that a row is scattered into.
                value.plus(E::ZERO).write(bytes);
            }
        }
    }

    /// Sums each contribution's rows by themselves, and these sums in order.
    fn sum_block<E: Number>(&self, places: &[Place], elements: Range<usize>, total: &mut [E]) {
        if let [lone] = places {
            return self.read(*lone, elements, total);
        }
        let mut scratch = [E::ZERO; BLOCK];
        let scratch = &mut scratch[..elements.len()];
        let mut own = [E::ZERO; BLOCK];
        let own = &mut own[..elements.len()];
        for (index, group) in places.chunk_by(|one, next| one.contribution == next.contribution).enumerate() {
            for (nth, place) in group.iter().enumerate() {
                if nth == 0 {
                    self.read(*place, elements.clone(), own);
                } else {
                    self.read(*place, elements.clone(), scratch);
                    add(own, scratch);
                }
            }
            if index == 0 {
                total.copy_from_slice(own);
            } else {
                add(total, own);
            }
        }
    }

    fn read<E: Number>(&self, place: Place, elements: Range<usize>, into: &mut [E]) {
        let rows = &self.contributions[place.contribution as usize];
        let row = rows.row(place.row as usize);
        let element_type = rows.element_type();
        let each = element_bytes(element_type);
        let bytes = &row[elements.start * each..elements.end * each];
        if matches!(element_type, ElementType::Float16 | ElementType::Bfloat16) {
            return widen(element_type, bytes, into);
        }
        for (value, bytes) in into.iter_mut().zip(bytes.chunks_exact(E::BYTES)) {
            *value = E::read(bytes);
        }
    }
}

fn add<E: Number>(into: &mut [E], from: &[E]) {
    for (value, other) in into.iter_mut().zip(from) {
        *value = value.plus(*other);
    }
}

/// Reads a block of a gradient in halves. They are converted together, because what the processor can do is asked once
/// for each call.
fn widen<E: Number>(element_type: ElementType, bytes: &[u8], into: &mut [E]) {
    let mut singles = [0.0; BLOCK];
    let singles = &mut singles[..into.len()];
    let bits = bytes.chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    if element_type == ElementType::Float16 {
        let mut halves = [f16::ZERO; BLOCK];
        halves.iter_mut().zip(bits).for_each(|(half, bits)| *half = f16::from_bits(bits));
        halves[..into.len()].convert_to_f32_slice(singles);
    } else {
        singles.iter_mut().zip(bits).for_each(|(single, bits)| *single = bf16::from_bits(bits).to_f32());
    }
    into.iter_mut().zip(singles).for_each(|(value, single)| *value = E::widen(*single));
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

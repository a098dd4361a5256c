//! What the kernels take: for every entry point one structure, passed by value as its only parameter.
//!
//! The layouts are those of C, with `u64` for every address on the device; zero is no address. `kernels/cu/base.cu` has
//! the same structures. They are plain numbers (`bytemuck::Pod`, all zeros to begin with), so making one is safe;
//! launching a kernel on one is not.

use bytemuck::{Pod, Zeroable};
use pserver_core::dtype::ElementType;
use pserver_core::limits::STATES_MAX;

/// The gradients that one launch adds. Whoever has more adds them beforehand with [`sum_entry`], which changes no bit.
pub const GRADIENTS_MAX: usize = 64;

/// The threads of a block, for every kernel. Kernels use no dynamic shared memory.
pub const BLOCK_THREADS: u32 = 256;

/// An address on the device; zero is none. It is a multiple of the element's size; one that is a multiple of 16 is read
/// and written 16 bytes at a time, if all tensors of the launch are.
pub type Address = u64;

/// How elements lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Kind {
    /// binary32
    Float32 = 0,
    /// binary64
    Float64 = 1,
    /// IEEE binary16
    Float16 = 2,
    /// bfloat16
    Bfloat16 = 3,
    /// Whole numbers of 32 bits, of either sign: their sums are the same.
    Word = 4,
    /// Whole numbers of 64 bits, of either sign.
    Long = 5,
}

impl Kind {
    /// Of this element type.
    #[must_use]
    pub const fn of(element_type: ElementType) -> Self {
        match element_type {
            ElementType::Float32 => Self::Float32,
            ElementType::Float64 => Self::Float64,
            ElementType::Float16 => Self::Float16,
            ElementType::Bfloat16 => Self::Bfloat16,
            ElementType::Int32 | ElementType::Uint32 => Self::Word,
            ElementType::Int64 | ElementType::Uint64 => Self::Long,
        }
    }

    /// How entry points of this type of parameter are called; none for halves, which are no parameters.
    #[must_use]
    pub const fn suffix(self) -> Option<&'static str> {
        match self {
            Self::Float32 => Some("f32"),
            Self::Float64 => Some("f64"),
            Self::Word => Some("u32"),
            Self::Long => Some("u64"),
            Self::Float16 | Self::Bfloat16 => None,
        }
    }

    /// The number that kernels are handed.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }
}

/// What `pserver_sum_*` does with the sum `s` of the gradients, the parameter `w` and the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Merge {
    /// `w = s`
    Sum = 0,
    /// `w = w + s * scale`: [`Formula::Add`](pserver_core::optim::Formula::Add).
    Add = 1,
    /// `w = s * scale`: [`Formula::Sum`](pserver_core::optim::Formula::Sum).
    Scale = 2,
}

/// Taken by `pserver_update_<type>_<key>` and `pserver_sum_<type>`.
///
/// The sum is `sum`, where there is one, plus the gradients in order, in the parameter's own type; it starts from the
/// first of them, and is zero when there is none. `weights`, `states` and `copy` are each the launch's alone; `sum` and
/// a gradient of the parameter's own type may be `weights` in `pserver_sum_*`, which makes it `w += g`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct UpdateArguments {
    /// How many elements every tensor has; any number.
    pub elements: u64,
    /// The parameter, updated in place.
    pub weights: Address,
    /// The states of the rule in its order, updated in place.
    pub states: [Address; STATES_MAX],
    /// A sum so far, of the parameter's type, or none.
    pub sum: Address,
    /// The rule's scalars as [`Emitted::pack`](super::Emitted::pack) lays them out, of the parameter's type. For
    /// `pserver_sum_*` one number of the parameter's type, the scale, rounded to nearest; none for whole numbers and
    /// for [`Merge::Sum`].
    pub scalars: Address,
    /// A `u32`: unless it is zero the kernel does nothing at all. Or none.
    pub skip: Address,
    /// Where the new weights go once more, as halves of `copy_kind`; or none.
    pub copy: Address,
    /// How many gradients there are, from 0 to [`GRADIENTS_MAX`].
    pub count: u32,
    /// The [`Kind`] of all gradients: the parameter's own, or a half for a parameter of floats.
    pub gradient_kind: u32,
    /// The [`Kind`] of the copy: a half. Not for whole numbers.
    pub copy_kind: u32,
    /// A [`Merge`], for `pserver_sum_*`.
    pub merge: u32,
    /// The gradients in trainer order.
    pub gradients: [Address; GRADIENTS_MAX],
}

/// Taken by `pserver_squares_f32` and `pserver_squares_f64`: one thread for every block of
/// [`SQUARE_BLOCK_BYTES`](pserver_core::optim::SQUARE_BLOCK_BYTES).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SquaresArguments {
    /// A whole gradient, or a chunk of one that begins at a multiple of the block.
    pub values: Address,
    /// How many elements.
    pub elements: u64,
    /// As many `f64` as there are blocks, the last perhaps short: what
    /// [`square_sums`](pserver_core::optim::square_sums) hands out.
    pub squares: Address,
}

/// Taken by `pserver_total`, one block: `*total = *total + squares[0] + squares[1] + ...`, left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TotalArguments {
    /// The sums of blocks, `f64`.
    pub squares: Address,
    /// How many.
    pub count: u64,
    /// An `f64`, the total so far: zero before the first chunk.
    pub total: Address,
}

/// Taken by `pserver_finite`: writes one to `flag` when an element of a gradient is infinite or not a number, and
/// nothing when all are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FiniteArguments {
    /// How many elements every gradient has.
    pub elements: u64,
    /// A `u32`, zero before.
    pub flag: Address,
    /// How many gradients there are.
    pub count: u32,
    /// Their [`Kind`], a float.
    pub kind: u32,
    /// The gradients.
    pub gradients: [Address; GRADIENTS_MAX],
}

/// Taken by `pserver_cast`: every float in another type, rounded once to nearest even.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CastArguments {
    /// How many elements.
    pub elements: u64,
    /// What is read.
    pub from: Address,
    /// What is written.
    pub into: Address,
    /// The [`Kind`] of what is read, a float.
    pub from_kind: u32,
    /// The [`Kind`] of what is written, a float.
    pub into_kind: u32,
}

/// The pairs that one block of the sort and of the segments looks at.
pub const SORT_TILE: u32 = 2048;

/// The counts that a tile has in a pass of the sort: one for each value of a digit.
pub const SORT_DIGITS: u32 = 256;

/// Taken by `pserver_sort_count`, `pserver_sort_scatter`, `pserver_segment_count` and `pserver_segment_write`, each
/// with one block for each [`SORT_TILE`] pairs, and one where there are no pairs.
///
/// A pass sorts by eight bits of the key and keeps the order of equal ones. From the lowest digit to the highest that
/// any key has: count, scan ([`ScanArguments`] over `counts`), scatter, exchange the two sides.
/// Then the segments: count, scan over `counts` (one for each tile), write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SortArguments {
    /// How many pairs, fewer than 2^32.
    pub pairs: u64,
    /// `u64`: the keys (ids or slots) as they are before the pass; sorted, for the segments.
    pub keys: Address,
    /// `u32`: where each pair stood at first, or none in the first pass, where that is where it stands.
    pub places: Address,
    /// `u64`: the keys after the pass. For `pserver_segment_write`: the unique keys, ascending.
    pub keys_after: Address,
    /// `u32`: the places after the pass. For `pserver_segment_write`: where in the sorted pairs each unique key begins,
    /// and behind the last one where it ends, `unique + 1` of them.
    pub places_after: Address,
    /// `u32`, zeroed by nobody: for the sort `SORT_DIGITS * tiles`, digit by digit; for the segments one for each tile.
    pub counts: Address,
    /// `u32`: how many unique keys there are; written by `pserver_segment_write`.
    pub unique: Address,
    /// The lowest bit of the digit.
    pub shift: u32,
    /// Zero.
    pub reserved: u32,
}

/// Taken by `pserver_scan`, one block: every count becomes the sum of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ScanArguments {
    /// `u32`.
    pub counts: Address,
    /// How many.
    pub count: u64,
}

/// Taken by `pserver_rows_<type>_<key>`: for every unique row the sum of its contributions, as
/// [`Merge`](pserver_core::rows::Merge) has it, and the rule on the sum. Any grid; a warp takes a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RowsArguments {
    /// `u32` on the device: how many unique rows there are, as `pserver_segment_write` left it.
    pub unique: Address,
    /// `u64`: the unique keys.
    pub keys: Address,
    /// `u32`: where in `places` each unique row begins, and where the last one ends.
    pub starts: Address,
    /// `u32`: places of rows among all contributions, one contribution's rows behind the other's.
    pub places: Address,
    /// `u32`: which record a unique row is kept in, for each of `keys`; or none where the key itself is the record.
    pub slots: Address,
    /// Records: a row's weights, the states behind them, at `records + slot * stride`.
    pub records: Address,
    /// From one record to the next, in bytes; a multiple of the element's size.
    pub stride: u64,
    /// From a row's weights to its first state and from a state to the next, in bytes; a multiple of the element's
    /// size. For separate tensors this is the length of a tensor, and `stride` that of a row.
    pub state_stride: u64,
    /// As in [`UpdateArguments`].
    pub scalars: Address,
    /// As in [`UpdateArguments`].
    pub skip: Address,
    /// The elements of a row.
    pub width: u32,
    /// How many contributions there are, from 1 to [`GRADIENTS_MAX`].
    pub count: u32,
    /// The [`Kind`] of all contributions.
    pub gradient_kind: u32,
    /// Zero.
    pub reserved: u32,
    /// Which place is the first of each contribution, in trainer order.
    pub firsts: [u32; GRADIENTS_MAX],
    /// Each contribution's rows, one behind the other.
    pub gradients: [Address; GRADIENTS_MAX],
}

/// One operation of a rule's scalars as `pserver_scalars` reads it; [`scalar_code`](super::scalars::scalar_code) makes
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ScalarCode {
    /// Which operation.
    pub operation: u32,
    /// Its operands, as places before it.
    pub operands: [u32; 3],
    /// A constant's value.
    pub value: f64,
}

/// What differs between updates, in device memory, where the host or a captured step writes it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ScalarValues {
    /// [`ScalarInput::Rate`](pserver_core::rule::ssa::ScalarInput::Rate)
    pub rate: f64,
    /// [`ScalarInput::Count`](pserver_core::rule::ssa::ScalarInput::Count)
    pub count: f64,
    /// The merge's factor, by which the sum of the gradients is multiplied.
    pub scale: f64,
    /// The bound of the norm; infinite when there is none.
    pub clip_norm: f64,
}

/// Taken by `pserver_scalars`, one block: reckons a rule's scalars, so that a captured step need not be told them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ScalarsArguments {
    /// [`ScalarValues`].
    pub values: Address,
    /// An `f64`, the sum of the squares of the summed gradient before it is scaled, as `pserver_total` leaves it; or
    /// none, when there is no `clip_norm`.
    pub total: Address,
    /// A `u32`: unless it is zero the count is not advanced; or none.
    pub skip: Address,
    /// [`ScalarCode`], as many as `operations`.
    pub code: Address,
    /// `u32`: which scalars are handed on, as many as `used`.
    pub places: Address,
    /// Where they go, in the parameter's type.
    pub scalars: Address,
    /// How many operations; at most [`RULE_SCALARS_MAX`](pserver_core::limits::RULE_SCALARS_MAX).
    pub operations: u32,
    /// How many scalars are handed on.
    pub used: u32,
    /// The [`Kind`] of the parameter: a float of 32 or 64 bits.
    pub kind: u32,
    /// One: `count` in `values` is one more afterwards.
    pub advances: u32,
}

/// The entry point of whole-number and float sums for a parameter's type; none for halves.
#[must_use]
pub fn sum_entry(element_type: ElementType) -> Option<&'static str> {
    match Kind::of(element_type) {
        Kind::Float32 => Some("pserver_sum_f32"),
        Kind::Float64 => Some("pserver_sum_f64"),
        Kind::Word => Some("pserver_sum_u32"),
        Kind::Long => Some("pserver_sum_u64"),
        Kind::Float16 | Kind::Bfloat16 => None,
    }
}

/// The entry point of the sums of squares of a sum of this type; none for what is no float of 32 or 64 bits.
#[must_use]
pub fn squares_entry(element_type: ElementType) -> Option<&'static str> {
    match Kind::of(element_type) {
        Kind::Float32 => Some("pserver_squares_f32"),
        Kind::Float64 => Some("pserver_squares_f64"),
        Kind::Word | Kind::Long | Kind::Float16 | Kind::Bfloat16 => None,
    }
}

const _: () = assert!(size_of::<UpdateArguments>() == 640, "kernels/cu/base.cu has the same numbers");
const _: () = assert!(size_of::<RowsArguments>() == 864);
const _: () = assert!(size_of::<FiniteArguments>() == 536 && size_of::<SortArguments>() == 64);
const _: () = assert!(size_of::<ScalarCode>() == 24 && size_of::<ScalarsArguments>() == 64);

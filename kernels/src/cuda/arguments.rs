//! Argument structures: every entry point takes one structure, passed by value as its only parameter.
//!
//! The layouts are those of C, with `u64` for every device address; zero is no address. `kernels/cu/base.cu` declares
//! the same structures. They are plain numbers (`bytemuck::Pod`, initialised with zeros), so building one is safe;
//! launching a kernel on one is not.

use bytemuck::{Pod, Zeroable, bytes_of_mut};
use pserver_core::dtype::ElementType;
use pserver_core::limits::{RULE_SCALARS_MAX, STATES_MAX};

/// Gradients that one launch adds. A caller with more adds the others beforehand with [`sum_entry`], which changes no
/// bit.
pub const GRADIENTS_MAX: usize = 64;

/// Threads of a block, for every kernel. Kernels use no dynamic shared memory.
pub const BLOCK_THREADS: u32 = 256;

/// A device address; zero is none. It is a multiple of the element's size. Loads and stores are 16 bytes wide if all
/// tensors of the launch begin at multiples of 16.
pub type DeviceAddress = u64;

/// The element type of a tensor in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum ElementKind {
    /// binary32
    Float32 = 0,
    /// binary64
    Float64 = 1,
    /// IEEE binary16
    Float16 = 2,
    /// bfloat16
    Bfloat16 = 3,
    /// 32-bit integers, signed or not: the sums are the same.
    Word = 4,
    /// 64-bit integers, signed or not.
    Long = 5,
}

impl ElementKind {
    /// The kind for this element type.
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

    /// The suffix of entry points for this type of parameter; none for half precision, which is no parameter type.
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

    /// The number that kernels receive.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }
}

/// The operation of `pserver_sum_*` on the sum `s` of the gradients, the parameter `w` and the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SumMode {
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
// tidy: allow fields: the arguments of a kernel, whose layout is that of `kernels/cu/base.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct UpdateArguments {
    /// How many elements every tensor has; any number.
    pub elements: u64,
    /// The parameter, updated in place.
    pub weights: DeviceAddress,
    /// The states of the rule in its order, updated in place.
    pub states: [DeviceAddress; STATES_MAX],
    /// A partial sum of the parameter's type, or none.
    pub sum: DeviceAddress,
    /// The numbers where a kernel has computed them; none where they are in `numbers`.
    pub scalars: DeviceAddress,
    /// A `u32` or none: the kernel does nothing unless it is zero.
    pub skip: DeviceAddress,
    /// A second destination of the new weights, converted to `copy_kind`; or none.
    pub copy: DeviceAddress,
    /// How many gradients there are, from 0 to [`GRADIENTS_MAX`].
    pub count: u32,
    /// The [`ElementKind`] of all gradients: the parameter's own, or half precision for a parameter of floats.
    pub gradient_kind: u32,
    /// The [`ElementKind`] of the copy, half precision. Not for integers.
    pub copy_kind: u32,
    /// A [`SumMode`], for `pserver_sum_*`.
    pub merge: u32,
    /// The gradients in trainer order.
    pub gradients: [DeviceAddress; GRADIENTS_MAX],
    /// The rule's scalars as [`Emitted::pack`](super::Emitted::pack) lays them out, of the parameter's type. For
    /// `pserver_sum_*` one number of the parameter's type, the scale, rounded to nearest; none for integers and for
    /// [`SumMode::Sum`].
    pub numbers: [u64; RULE_SCALARS_MAX],
}

impl UpdateArguments {
    /// Sets the numbers to these bytes.
    ///
    /// # Panics
    /// With more than a rule has.
    pub fn set_numbers(&mut self, packed: &[u8]) {
        bytes_of_mut(&mut self.numbers)[..packed.len()].copy_from_slice(packed);
    }
}

/// Taken by `pserver_squares_f32` and `pserver_squares_f64`: one thread for every block of
/// [`SQUARE_BLOCK_BYTES`](pserver_core::optim::SQUARE_BLOCK_BYTES).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SquaresArguments {
    /// A whole gradient, or a chunk of one that begins at a multiple of the block.
    pub values: DeviceAddress,
    /// How many elements.
    pub elements: u64,
    /// One `f64` for each block, of which the last may be short: the output of
    /// [`square_sums`](pserver_core::optim::square_sums).
    pub squares: DeviceAddress,
}

/// Taken by `pserver_total`, one block: `*total = *total + squares[0] + squares[1] + ...`, left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TotalArguments {
    /// The sums of blocks, `f64`.
    pub squares: DeviceAddress,
    /// How many.
    pub count: u64,
    /// An `f64`, the total so far: zero before the first chunk.
    pub total: DeviceAddress,
}

/// Taken by `pserver_finite`: writes one to `flag` when an element of a gradient is infinite or not a number, and
/// nothing when all are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FiniteArguments {
    /// How many elements every gradient has.
    pub elements: u64,
    /// A `u32`, zero before.
    pub flag: DeviceAddress,
    /// How many gradients there are.
    pub count: u32,
    /// Their [`ElementKind`], a float.
    pub kind: u32,
    /// The gradients.
    pub gradients: [DeviceAddress; GRADIENTS_MAX],
}

/// Taken by `pserver_cast`: every float in another type, rounded once to nearest even.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CastArguments {
    /// How many elements.
    pub elements: u64,
    /// The source.
    pub from: DeviceAddress,
    /// The destination.
    pub into: DeviceAddress,
    /// The [`ElementKind`] of the source, a float.
    pub from_kind: u32,
    /// The [`ElementKind`] of the destination, a float.
    pub into_kind: u32,
}

/// Pairs that one block of the sort and segment kernels processes.
pub const SORT_TILE: u32 = 2048;

/// Counts of a tile in one pass of the sort: one for each value of a digit.
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
    pub keys: DeviceAddress,
    /// `u32`: the original index of each pair; none in the first pass, where it equals the current index.
    pub places: DeviceAddress,
    /// `u64`: the keys after the pass. For `pserver_segment_write`: the unique keys, ascending.
    pub keys_after: DeviceAddress,
    /// `u32`: the original indices after the pass. For `pserver_segment_write`: where in the sorted pairs each unique
    /// key begins, then the end of the last one; `unique + 1` entries.
    pub places_after: DeviceAddress,
    /// `u32`, not initialised by the caller: for the sort `SORT_DIGITS * tiles`, digit by digit; for the segments one
    /// for each tile.
    pub counts: DeviceAddress,
    /// `u32`: how many unique keys there are; written by `pserver_segment_write`.
    pub unique: DeviceAddress,
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
    pub counts: DeviceAddress,
    /// How many.
    pub count: u64,
}

/// Taken by `pserver_rows_<type>_<key>`: for every unique row the sum of its contributions, as
/// [`RowMerge`](pserver_core::rows::RowMerge) computes it, and the rule on the sum. Any grid; a warp takes a row.
// tidy: allow fields: the arguments of a kernel, whose layout is that of `kernels/cu/rows.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RowsArguments {
    /// `u32` on the device: the number of unique rows, as `pserver_segment_write` left it.
    pub unique: DeviceAddress,
    /// `u64`: the unique keys.
    pub keys: DeviceAddress,
    /// `u32`: where in `places` each unique row begins, and where the last one ends.
    pub starts: DeviceAddress,
    /// `u32`: places of rows among all contributions, one contribution's rows behind the other's.
    pub places: DeviceAddress,
    /// `u32`: the record of a unique row, for each of `keys`; none where the key itself is the record.
    pub slots: DeviceAddress,
    /// Records: a row's weights, the states behind them, at `records + slot * stride`.
    pub records: DeviceAddress,
    /// From one record to the next, in bytes; a multiple of the element's size.
    pub stride: u64,
    /// From a row's weights to its first state and from a state to the next, in bytes; a multiple of the element's
    /// size. For separate tensors this is the length of a tensor, and `stride` that of a row.
    pub state_stride: u64,
    /// The rule's scalars, as [`UpdateArguments::numbers`] has them.
    pub scalars: DeviceAddress,
    /// As in [`UpdateArguments`].
    pub skip: DeviceAddress,
    /// The elements of a row.
    pub width: u32,
    /// How many contributions there are, from 1 to [`GRADIENTS_MAX`].
    pub count: u32,
    /// The [`ElementKind`] of all contributions.
    pub gradient_kind: u32,
    /// Zero.
    pub reserved: u32,
    /// Which place is the first of each contribution, in trainer order.
    pub firsts: [u32; GRADIENTS_MAX],
    /// Each contribution's rows, one behind the other.
    pub gradients: [DeviceAddress; GRADIENTS_MAX],
}

/// One operation of a rule's scalars as `pserver_scalars` reads it; [`scalar_code`](super::scalars::scalar_code) makes
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ScalarCode {
    /// Which operation.
    pub operation: u32,
    /// Its operands, as indices of earlier operations.
    pub operands: [u32; 3],
    /// A constant's value.
    pub value: f64,
}

/// Inputs that differ between updates, in device memory, where the host or a captured graph writes them.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ScalarValues {
    /// [`ScalarInput::Rate`](pserver_core::rule::ssa::ScalarInput::Rate)
    pub rate: f64,
    /// [`ScalarInput::Count`](pserver_core::rule::ssa::ScalarInput::Count)
    pub count: f64,
    /// The merge's factor of the sum of the gradients.
    pub scale: f64,
    /// The bound of the norm; infinite when there is none.
    pub clip_norm: f64,
}

/// Taken by `pserver_scalars`, one block: computes a rule's scalars, so that a captured graph needs no host input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ScalarsArguments {
    /// [`ScalarValues`].
    pub values: DeviceAddress,
    /// An `f64`, the sum of the squares of the summed gradient before it is scaled, as `pserver_total` leaves it; or
    /// none, when there is no `clip_norm`.
    pub total: DeviceAddress,
    /// A `u32` or none: unless it is zero the count is not incremented.
    pub skip: DeviceAddress,
    /// [`ScalarCode`], as many as `operations`.
    pub code: DeviceAddress,
    /// `u32`: the indices of the scalars to store, `used` of them.
    pub places: DeviceAddress,
    /// The destination, in the parameter's type.
    pub scalars: DeviceAddress,
    /// How many operations; at most [`RULE_SCALARS_MAX`].
    pub operations: u32,
    /// The number of scalars to store.
    pub used: u32,
    /// The [`ElementKind`] of the parameter: a float of 32 or 64 bits.
    pub kind: u32,
    /// One: `count` in `values` is incremented afterwards.
    pub advances: u32,
}

/// The entry point of integer and float sums for a parameter's type; none for half precision.
#[must_use]
pub fn sum_entry(element_type: ElementType) -> Option<&'static str> {
    match ElementKind::of(element_type) {
        ElementKind::Float32 => Some("pserver_sum_f32"),
        ElementKind::Float64 => Some("pserver_sum_f64"),
        ElementKind::Word => Some("pserver_sum_u32"),
        ElementKind::Long => Some("pserver_sum_u64"),
        ElementKind::Float16 | ElementKind::Bfloat16 => None,
    }
}

/// The entry point of the sums of squares of a sum of this type; none for other types than f32 and f64.
#[must_use]
pub fn squares_entry(element_type: ElementType) -> Option<&'static str> {
    match ElementKind::of(element_type) {
        ElementKind::Float32 => Some("pserver_squares_f32"),
        ElementKind::Float64 => Some("pserver_squares_f64"),
        ElementKind::Word | ElementKind::Long | ElementKind::Float16 | ElementKind::Bfloat16 => None,
    }
}

const _: () = assert!(size_of::<UpdateArguments>() == 2688, "kernels/cu/base.cu has the same numbers");
const _: () = assert!(size_of::<RowsArguments>() == 864);
const _: () = assert!(size_of::<FiniteArguments>() == 536 && size_of::<SortArguments>() == 64);
const _: () = assert!(size_of::<ScalarCode>() == 24 && size_of::<ScalarsArguments>() == 64);

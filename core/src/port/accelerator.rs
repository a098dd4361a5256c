//! Interface of an accelerator: a device with its own memory that sums gradients and updates parameters asynchronously.
//!
//! A chunk on an accelerator has a *slot* with the parameter and the rule's states. The slot is the source of the next
//! update; readers use a host copy, which every update returns.
//!
//! ```text
//! adopt      a chunk gets a slot, and code for its rule, or an error that says why it cannot
//! Load       the slot gets the parameter, and the states
//! Update     gradients in, the rule runs in the slot, the parameter's new bytes out
//! Store      the states come out, for a checkpoint
//! ```
//!
//! A rule that needs the norm of a gradient spread over several chunks takes two steps:
//!
//! ```text
//! Sum        gradients in, their sum stays with the slot, its sums of squares out
//! Update     the rule runs on that sum, with numbers that the host made of all chunks' squares
//! ```
//!
//! **One at a time.** A slot has at most one piece of work in flight; work of different slots completes in any order.
//!
//! **By value.** Work is submitted and returned as a whole, with all its leases, also on failure. Returned work has
//! happened or has not (see [`Done::outcome`]): its bytes are visible to host and device, and the device no longer
//! accesses its leases.
//!
//! **The same bits.** An update gives what [`Plain`](super::Plain) gives for the same parameter, states and gradients,
//! bit for bit: sums in the order given, in the parameter's type, every operation rounded once.

mod faulty;
mod simulated;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::dtype::ElementType;
use crate::error::Failure;
use crate::memory::{Arena, Lease, Value};
use crate::optim::{Formula, Gradient, SQUARE_BLOCK_BYTES};
use crate::rule::ssa::Lowered;

pub use faulty::{Fault, FaultyAccelerator};
pub use simulated::Simulated;

/// A chunk's slot on an accelerator. Slots are counted from zero, and reused only after [`Accelerator::clear`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceSlot(pub u32);

impl fmt::Display for DeviceSlot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// Properties of an accelerator at the time of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name in logs and errors: `cuda:0 (NVIDIA H200, driver 580)`.
    pub name: String,
    /// Bytes that chunks can still take there.
    pub bytes_free: u64,
    /// Chunks shorter than this are faster on the processor, and are not offered.
    pub bytes_least: u32,
}

/// Code of a chunk, fixed while it is on an accelerator.
#[derive(Clone, Debug)]
pub enum DeviceCode {
    /// [`Formula::Add`]
    Add,
    /// [`Formula::Sum`]
    Sum,
    /// [`Formula::Rule`]. Chunks of one rule have the same code behind the same `Arc`.
    Rule(Arc<Lowered>),
}

impl DeviceCode {
    /// Count of states, each as long as the parameter.
    #[must_use]
    pub fn states(&self) -> usize {
        match self {
            Self::Add | Self::Sum => 0,
            Self::Rule(code) => code.states().len(),
        }
    }

    /// One update's formula from its numbers (see [`Work::Update`]).
    ///
    /// # Panics
    /// When there is not one number for [`DeviceCode::Add`] and [`DeviceCode::Sum`].
    #[must_use]
    pub fn formula<'a>(&'a self, numbers: &'a [f64]) -> Formula<'a> {
        match (self, numbers) {
            (Self::Add, &[scale]) => Formula::Add { scale },
            (Self::Sum, &[scale]) => Formula::Sum { scale },
            (Self::Rule(code), scalars) => Formula::Rule { code, scalars },
            (Self::Add | Self::Sum, _) => panic!("found {} numbers for a sum; expected one, the scale", numbers.len()),
        }
    }
}

/// Requirements of a chunk on an accelerator.
#[derive(Clone, Debug)]
pub struct Resident {
    /// The type of parameter and states.
    pub element_type: ElementType,
    /// The parameter's length; each state has the same.
    pub bytes: u32,
    /// Its code.
    pub code: DeviceCode,
    /// Whether it needs room for a kept sum, for [`Work::Sum`].
    pub keeps_sum: bool,
}

impl Resident {
    /// Bytes of parameter, states and, where one is kept, the sum with its sums of squares.
    #[must_use]
    pub fn bytes_total(&self) -> u64 {
        let sum = if self.keeps_sum { u64::from(self.bytes) + u64::from(self.squares_bytes()) } else { 0 };
        u64::from(self.bytes) * (1 + self.code.states() as u64) + sum
    }

    /// Bytes of the sums of squares of a sum: an `f64` for each [`SQUARE_BLOCK_BYTES`], the last perhaps short.
    #[must_use]
    pub fn squares_bytes(&self) -> u32 {
        squares_bytes(self.bytes)
    }
}

/// Bytes of the sums of squares of a sum of so many bytes, which are fewer unless the sum is shorter than one of them.
#[must_use]
pub fn squares_bytes(bytes: u32) -> u32 {
    const SQUARE_BYTES: u32 = 8;
    bytes.div_ceil(SQUARE_BLOCK_BYTES) * SQUARE_BYTES
}

/// Reason why a chunk cannot be on an accelerator; other chunks may be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NotAdopted {
    /// The accelerator does not take such a chunk, cannot run its rule, or is lost. The text says which, and what was
    /// expected.
    #[error("{0}")]
    Unfit(String),
    /// The device's memory is full. The text has the bytes requested and the bytes free.
    #[error("{0}")]
    Full(String),
}

impl From<Failure> for NotAdopted {
    fn from(failure: Failure) -> Self {
        Self::Unfit(failure.to_string())
    }
}

impl From<NotAdopted> for Failure {
    fn from(why: NotAdopted) -> Self {
        Self::Call(why.to_string())
    }
}

/// One trainer's gradient, or the sum of the first ones.
#[derive(Debug)]
pub struct GradientLease {
    /// Its lease, which may be a view of another process's memory: read-only and not pinned.
    pub lease: Lease,
    /// The number of the lease's bytes that are used.
    pub bytes: u32,
    /// The parameter's type, or a half for a parameter of floats.
    pub element_type: ElementType,
}

impl GradientLease {
    /// The gradient in the form that kernels take.
    #[must_use]
    pub fn gradient(&self) -> Gradient<'_> {
        Gradient { bytes: &self.lease.bytes()[..self.bytes as usize], element_type: self.element_type }
    }
}

/// Work for an accelerator.
#[derive(Debug)]
pub enum Work {
    /// Host to device: the parameter, and the states unless there are none here. A slot that has states gets them with
    /// its first load; later ones may bring the parameter alone.
    Load {
        /// The slot.
        slot: DeviceSlot,
        /// The published value, which readers may hold.
        parameter: Arc<Value>,
        /// In the order of [`Lowered::states`]; each holds the parameter's length.
        states: Vec<Lease>,
    },
    /// Sums the gradients in the order given; the sum stays with the slot until its next load or update. Then device to
    /// host: the sums of squares. Only of floats, and of a chunk that keeps a sum.
    Sum {
        /// The slot.
        slot: DeviceSlot,
        /// The gradients, as for an update.
        gradients: Vec<GradientLease>,
        /// Destination of the results of [`square_sums`](crate::optim::square_sums) for the sum: consecutive
        /// little-endian `f64` from the lease's beginning.
        squares: Lease,
    },
    /// Sums the gradients in the order given and runs the slot's code, in place; then device to host: the parameter.
    Update {
        /// The slot.
        slot: DeviceSlot,
        /// The scalars of a rule from [`Lowered::evaluate`]; otherwise one number, the scale.
        numbers: Vec<f64>,
        /// The gradients in trainer order; none are a gradient of zero.
        gradients: Vec<GradientLease>,
        /// Whether the slot keeps the sum of these gradients from a [`Work::Sum`] after its last load and update. The
        /// device then ignores the gradients; a fallback on the processor needs them.
        is_summed: bool,
        /// Destination of the parameter's new bytes, from the lease's beginning.
        into: Lease,
    },
    /// Device to host: the states.
    Store {
        /// The slot.
        slot: DeviceSlot,
        /// Destinations, one for each state in order, from each lease's beginning.
        states: Vec<Lease>,
    },
}

impl Work {
    /// Its slot.
    #[must_use]
    pub fn slot(&self) -> DeviceSlot {
        match self {
            Self::Load { slot, .. } | Self::Sum { slot, .. } | Self::Update { slot, .. } | Self::Store { slot, .. } => {
                *slot
            }
        }
    }

    /// Name of the work, for error texts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Load { .. } => "load",
            Self::Sum { .. } => "sum",
            Self::Update { .. } => "update",
            Self::Store { .. } => "store",
        }
    }
}

/// Completed work.
#[derive(Debug)]
pub struct Done {
    /// The work as it was submitted, its leases filled where it says so.
    pub work: Work,
    /// `Ok` when it has happened. [`Failure::Call`] when it has not, and the slot is unchanged. After
    /// [`Failure::Device`] the slot's contents are undefined, and it takes no more work.
    pub outcome: Result<(), Failure>,
}

/// A device that updates chunks while the shard's loop goes on; owned by one thread. Nothing here blocks but
/// [`Accelerator::wait`] and [`Accelerator::clear`].
///
/// A lease whose work the device may still be doing when it is dropped is forgotten, not freed.
pub trait Accelerator: Send {
    /// Its properties.
    fn capabilities(&self) -> DeviceFacts;

    /// Offers an arena whose leases will be submitted. The accelerator may lock its pages for the device, at once,
    /// piece by piece as leases are submitted, or not at all. A clone of the arena keeps locked pages mapped until
    /// [`Accelerator::clear`]. Leases of other memory work too, more slowly.
    ///
    /// An arena is mapped for the largest need, and much of it is never touched: locking all of it makes all of it
    /// resident.
    ///
    /// # Errors
    /// [`Failure::Call`] when the pages cannot be locked, with the number of bytes. The arena then counts as not
    /// offered.
    fn pin(&mut self, arena: &Arena) -> Result<(), Failure>;

    /// Makes room for a chunk's parameter, its states and the sum that it keeps, and code for its rule. The slot holds
    /// nothing before its first [`Work::Load`].
    ///
    /// # Errors
    /// When the chunk cannot live there.
    fn adopt(&mut self, resident: &Resident) -> Result<DeviceSlot, NotAdopted>;

    /// Waits for work in flight, drops queued work, and forgets all slots and arenas. The work is not returned: its
    /// leases are dropped.
    fn clear(&mut self);

    /// Takes work in order; the rest stays in the queue, which is back-pressure.
    ///
    /// # Errors
    /// [`Failure::Device`] when the device as a whole is lost: submitted work is not returned.
    ///
    /// # Panics
    /// When work does not match its slot, or the slot has work in flight: the caller checks both.
    fn submit(&mut self, queue: &mut VecDeque<Work>) -> Result<(), Failure>;

    /// Collects completions without waiting.
    ///
    /// # Errors
    /// As [`Accelerator::submit`].
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Failure>;

    /// Waits until [`Accelerator::poll`] may have a completion, or `limit` has passed.
    fn wait(&mut self, limit: Duration);
}

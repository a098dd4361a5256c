//! Work in flight on a device: its progress, its memory, and its results.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::{DeviceSlot, Done, Work};

use super::arguments::UpdateArguments;
use super::checked::DriverError;
use super::safe::{CudaEvent, DeviceRange, Ticket};

/// The kind of work, after the streams took ownership of it.
#[derive(Clone, Copy)]
pub(super) enum WorkKind {
    Load { states: usize },
    Sum,
    Update,
    Store,
}

/// Progress of a submission, which advances as far as the staging ring has free pieces.
pub(super) struct Submission {
    pub(super) ticket: Ticket,
    /// The index of the slot.
    pub(super) index: usize,
    /// The number of its events.
    pub(super) place: usize,
    pub(super) task: WorkKind,
    /// The kernel's arguments.
    pub(super) launch: UpdateArguments,
    pub(super) group: GradientGroup,
    pub(super) copy: CopyProgress,
    /// Whether its slot has been written.
    pub(super) is_written: bool,
}

/// The group of gradients that is copied to the device.
#[derive(Default)]
pub(super) struct GradientGroup {
    /// Indices of its gradients.
    pub(super) range: Range<usize>,
    pub(super) bank: usize,
    /// The bytes of the bank in use.
    pub(super) filled: u64,
}

/// Progress of the copies to the device.
#[derive(Default)]
pub(super) struct CopyProgress {
    /// The next tensor to copy.
    pub(super) item: usize,
    /// The bytes of it that are submitted.
    pub(super) offset: u64,
    /// Pieces of the ring that the submission may still use in this turn.
    pub(super) allowed: usize,
}

/// Buffers that describe the work that is being submitted. They are kept to avoid allocations.
pub(super) struct PreparedWork {
    /// The numbers of an update.
    pub(super) packed: Vec<u8>,
    /// Length and type of each gradient.
    pub(super) gradients: Vec<(u32, ElementType)>,
    /// For each copy to the device, in order: whether its source is pinned.
    pub(super) is_pinned: Vec<bool>,
    /// Copies of pinned memory that go in one call: which, and the place on the device.
    pub(super) pinned: Vec<(usize, DeviceRange)>,
    /// The kernels' arguments of updates that are submitted together.
    pub(super) launches: Vec<UpdateArguments>,
}

/// Events of work in flight.
pub(super) struct WorkEvents {
    /// By number: recorded behind the kernel of one piece of work.
    pub(super) reached: Vec<CudaEvent>,
    /// The events of work that is not in flight.
    pub(super) free: Vec<FreeEvents>,
}

/// Results that the caller has not polled yet.
pub(super) struct WorkOutcomes {
    /// Work that was not submitted in full.
    pub(super) failed: Vec<FailedWork>,
    /// Completed work.
    pub(super) completed: Vec<Done>,
}

/// The events of work that is not in flight: the number of one, and the one of its end. And an empty list for it.
pub(super) struct FreeEvents {
    pub(super) place: usize,
    pub(super) end: CudaEvent,
    pub(super) works: Vec<Work>,
}

/// Work in flight: one piece, or updates that were submitted together.
pub(super) struct SubmittedWork {
    pub(super) works: Vec<Work>,
    pub(super) place: usize,
}

/// Work that was not submitted in full.
pub(super) struct FailedWork {
    pub(super) ticket: Ticket,
    pub(super) refused: DriverError,
    /// The first pieces of it, which were.
    pub(super) complete: usize,
    /// The first pieces of it, whose slots were written.
    pub(super) written: usize,
}

impl FailedWork {
    /// The outcome of the piece of this number, which is of this slot.
    pub(super) fn outcome(&self, number: usize, slot: DeviceSlot) -> Result<(), Failure> {
        if number < self.complete {
            return Ok(());
        }
        if number < self.written {
            return Err(Failure::Device(format!("slot {slot} is broken: {}", self.refused)));
        }
        Err(Failure::call(format!("slot {slot}: {}", self.refused)))
    }
}

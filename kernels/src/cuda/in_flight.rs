//! Work in flight on a device: its progress, its memory, and its results.

use std::ops::Range;

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::port::{Done, Work};

use super::arguments::UpdateArguments;
use super::safe::{CudaEvent, DeviceRange, PinnedRange, Ticket};

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
    pub(super) scratch: usize,
    pub(super) task: WorkKind,
    /// The kernel's arguments.
    pub(super) launch: UpdateArguments,
    pub(super) group: GradientGroup,
    pub(super) copy: CopyProgress,
    /// Whether the copy of its numbers has been submitted.
    pub(super) is_begun: bool,
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
    /// Copies of pinned gradients that go in one call: which, and where to.
    pub(super) pinned: Vec<(usize, DeviceRange)>,
}

/// Memory and events for the numbers of work in flight.
pub(super) struct ScratchMemory {
    pub(super) device: Vec<DeviceScratch>,
    /// The host's half, of work that is not in flight.
    pub(super) free: Vec<HostScratch>,
}

/// Results that the caller has not polled yet.
pub(super) struct WorkOutcomes {
    /// Work that was not submitted in full, and the reason.
    pub(super) failed: Vec<(Ticket, Failure)>,
    /// Completed work.
    pub(super) completed: Vec<Done>,
}

/// Device memory and event of one piece of work in flight.
pub(super) struct DeviceScratch {
    pub(super) numbers: DeviceRange,
    /// Recorded first after the copy in (work without gradients) and later after the kernel. A wait refers to the last
    /// record before it, so one event serves both.
    pub(super) reached: CudaEvent,
}

/// Pinned memory and event of one piece of work in flight.
pub(super) struct HostScratch {
    pub(super) scratch: usize,
    pub(super) numbers: PinnedRange,
    pub(super) end: CudaEvent,
}

/// A piece of work in flight.
pub(super) struct SubmittedWork {
    pub(super) work: Work,
    pub(super) scratch: usize,
    pub(super) numbers: PinnedRange,
}

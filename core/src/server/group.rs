//! Units of update: a chunk alone, or the group of a parameter's chunks whose rule needs the whole gradient.
//!
//! Not here: the update of a group (`update::grouped`).

use std::sync::Arc;

use smallvec::SmallVec;

use crate::ids::TrainerId;
use crate::memory::Lease;

/// The place of a chunk in its shard's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SlotIndex(u32);

impl SlotIndex {
    pub(super) const FIRST: Self = Self(0);

    pub(super) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    pub(super) fn new(place: usize) -> Self {
        Self(u32::try_from(place).expect("a shard's chunks are counted in 32 bits"))
    }

    #[inline]
    pub(super) fn place(self) -> usize {
        self.0 as usize
    }
}

/// Chunks that are advanced together, most often one.
pub(super) type SlotIndices = SmallVec<[SlotIndex; 4]>;

/// The chunks that one update replaces.
pub(super) enum UpdateUnit {
    /// A chunk alone, by its slot index.
    One(SlotIndex),
    /// The chunks of a group, in chunk order.
    Group(GroupIndex, Arc<[SlotIndex]>),
}

impl UpdateUnit {
    /// The slot indices of its chunks.
    #[inline]
    pub(super) fn slot_indices(&self) -> &[SlotIndex] {
        match self {
            Self::One(slot_index) => std::slice::from_ref(slot_index),
            Self::Group(_, slot_indices) => slot_indices,
        }
    }
}

/// The place of a group in its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupIndex(u32);

impl GroupIndex {
    pub(super) fn new(place: usize) -> Self {
        Self(u32::try_from(place).expect("a shard's parameters are counted in 32 bits"))
    }

    #[inline]
    pub(super) fn place(self) -> usize {
        self.0 as usize
    }
}

/// The chunks of a parameter whose rule needs the whole gradient.
pub(super) struct Group {
    /// Slot indices in chunk order, then that of its total.
    pub(super) chunks: Arc<[SlotIndex]>,
    /// The trainer whose gradient is open, in modes where each gradient is a round.
    pub(super) owner: Option<TrainerId>,
    /// The update in progress on a device.
    pub(super) update: Option<Box<GroupedUpdate>>,
    /// The number of several parameters that its rule reads, if it reads one.
    pub(super) total: Option<TotalSlots>,
}

/// The slot indices of a group's share and of its total.
#[derive(Clone, Copy)]
pub(super) struct TotalSlots {
    pub(super) share: SlotIndex,
    pub(super) total: SlotIndex,
}

impl Group {
    pub(super) fn new(members: &[SlotIndex], total: Option<TotalSlots>) -> Self {
        let chunks = members.iter().copied().chain(total.map(|slots| slots.total)).collect();
        Self { chunks, owner: None, update: None, total }
    }

    /// The slot indices of the chunks that gradients are sent to.
    pub(super) fn parameter_chunks(&self) -> &[SlotIndex] {
        &self.chunks[..self.chunks.len() - usize::from(self.total.is_some())]
    }
}

/// A grouped update in progress on a device.
pub(super) struct GroupedUpdate {
    /// Work in flight that the next step waits for.
    pub(super) awaited: usize,
    /// Norm of the whole gradient, once all sums are there.
    pub(super) norm: Option<f64>,
    /// Leases for the values of the processor's chunks.
    pub(super) room: Vec<Lease>,
}

//! A budget: the sum of reasons for memory, computed before mapping.

use crate::limits::CHUNK_BYTES_MAX;

/// The smallest slot: one cache line, so that two slots never share one.
pub(super) const SLOT_BYTES_MIN: u32 = 64;
/// How many sizes of slot there are: the powers of two from [`SLOT_BYTES_MIN`] to [`CHUNK_BYTES_MAX`].
pub(super) const CLASSES: usize = (CHUNK_BYTES_MAX.ilog2() - SLOT_BYTES_MIN.ilog2() + 1) as usize;

const _: () = assert!(SLOT_BYTES_MIN.is_power_of_two() && SLOT_BYTES_MIN <= CHUNK_BYTES_MAX);
const _: () = assert!(usize::BITS >= 64, "an offset into the arena is 64 bits");

/// One reason for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetLine {
    /// The use of the slots.
    pub reason: &'static str,
    /// The bytes one slot must hold.
    pub bytes: u32,
    /// How many slots.
    pub count: u64,
}

impl BudgetLine {
    /// The bytes that its slots take, each at the size of its class.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        u64::from(slot_bytes(class_of(self.bytes))).saturating_mul(self.count)
    }
}

/// A sum of reasons. Each use of slots adds a line, and the arena maps the sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    lines: Vec<BudgetLine>,
}

impl Budget {
    /// A budget without a line.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `count` slots of at least `bytes` bytes each. Sizes that cannot be are refused by
    /// [`Arena::new`](super::Arena::new).
    pub fn line(&mut self, reason: &'static str, bytes: u32, count: u64) {
        self.lines.push(BudgetLine { reason, bytes, count });
    }

    /// The lines, in the order in which they were added.
    pub fn lines(&self) -> impl Iterator<Item = &BudgetLine> {
        self.lines.iter()
    }

    /// The bytes an arena of this budget maps: every slot at the size of its class.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lines.iter().map(BudgetLine::mapped_bytes).fold(0, u64::saturating_add)
    }
}

/// The class of the smallest slot that holds `bytes`; the largest class for what no slot holds.
pub(super) fn class_of(bytes: u32) -> usize {
    let slot = bytes.clamp(SLOT_BYTES_MIN, CHUNK_BYTES_MAX).next_power_of_two();
    (slot.ilog2() - SLOT_BYTES_MIN.ilog2()) as usize
}

/// The bytes of a slot of this class.
pub(super) fn slot_bytes(class: usize) -> u32 {
    SLOT_BYTES_MIN << class
}

//! Free slots of one class: a lock-free stack of slot numbers.
//!
//! A stack and not a queue: the slot that was returned last is still in the cache, and slots beyond the peak use are
//! never touched, so they never become resident. A queue would cycle through all slots.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// The low bits of the head that hold a slot number; the rest count changes. A thread that stalled between
/// reading the head and exchanging it is fooled only if exactly a multiple of 2^36 changes went by meanwhile:
/// at ten million a second, a stall of two hours that ends on the right one.
const SLOT_BITS: u32 = 28;
/// The slot number that stands for no slot.
const NONE: u32 = (1 << SLOT_BITS) - 1;

/// How many slots one class may have.
pub(super) const SLOTS_MAX: u32 = NONE;

/// A set of slot numbers. Any thread takes and returns slots without waiting.
pub(super) struct FreeSlots {
    /// The changes so far (high bits) and the slot on top (low bits).
    head: AtomicU64,
    /// For a slot in the stack, the one beneath it.
    beneath: Box<[AtomicU32]>,
}

impl FreeSlots {
    /// All of `count` slots, the lowest on top.
    pub(super) fn full(count: u32) -> Self {
        assert!(count <= SLOTS_MAX, "{count} slots do not fit {SLOT_BITS} bits");
        let beneath = (1..=count).map(|next| AtomicU32::new(if next == count { NONE } else { next })).collect();
        let top = if count == 0 { NONE } else { 0 };
        Self { head: AtomicU64::new(u64::from(top)), beneath }
    }

    /// Takes the slot on top, if there is one.
    pub(super) fn take(&self) -> Option<u32> {
        let mut head = self.head.load(Acquire);
        loop {
            let slot = top(head);
            // The entry past the end stands for "none". Another thread may take the slot after this read; then
            // the head has changed, and what was read here is not used.
            let beneath = self.beneath.get(slot as usize)?.load(Relaxed);
            // Acquire: the thread that returned the slot has finished with its bytes. Release: preserves that for the
            // slots beneath, which other threads returned with earlier heads.
            match self.head.compare_exchange_weak(head, changed(head, beneath), AcqRel, Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => head = now,
            }
        }
    }

    /// Takes the slots on top by one change, at most as many as `into` has room for. Returns their number.
    pub(super) fn take_many(&self, into: &mut [u32]) -> usize {
        let mut head = self.head.load(Acquire);
        loop {
            let (mut next, mut count) = (top(head), 0);
            // As in `take`: while the head is unchanged, so are the slots beneath it. A concurrent change is read and
            // discarded.
            while count < into.len()
                && let Some(beneath) = self.beneath.get(next as usize)
            {
                into[count] = next;
                (next, count) = (beneath.load(Relaxed), count + 1);
            }
            if count == 0 {
                return 0;
            }
            match self.head.compare_exchange_weak(head, changed(head, next), AcqRel, Acquire) {
                Ok(_) => return count,
                Err(now) => head = now,
            }
        }
    }

    /// Gives back a slot that came from [`FreeSlots::take`].
    pub(super) fn give_back(&self, slot: u32) {
        let mut head = self.head.load(Relaxed);
        loop {
            self.beneath[slot as usize].store(top(head), Relaxed);
            match self.head.compare_exchange_weak(head, changed(head, slot), AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// How many slots there are, taken or free.
    pub(super) fn slots(&self) -> u64 {
        self.beneath.len() as u64
    }
}

/// The slot on top.
fn top(head: u64) -> u32 {
    u32::try_from(head & u64::from(NONE)).expect("the mask leaves 28 bits")
}

/// The head after one more change, with `slot` on top.
fn changed(head: u64, slot: u32) -> u64 {
    ((head >> SLOT_BITS).wrapping_add(1) << SLOT_BITS) | u64::from(slot)
}

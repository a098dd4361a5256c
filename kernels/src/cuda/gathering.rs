//! Grouping of an update's gradients on the device.
//!
//! Holding all gradients and summing them in the kernel that runs the rule moves the fewest bytes: with Adam and eight
//! binary16 gradients 42 bytes per element, where adding each gradient to a sum as it arrives moves 98. Where memory
//! does not hold all of them, they come in groups as large as a bank, and each group but the last is added to a partial
//! sum. Both give the same bits, since the order of additions is the same.

use std::sync::Arc;

use super::arguments::GRADIENTS_MAX;
use super::checked::DriverError;
use super::safe::{CudaContext, CudaEvent, DeviceRange};

/// Groups of gradients that are copied or summed at the same time.
pub(super) const BANKS: usize = 4;

/// Alignment of every tensor on the device: at least the unit of a memory transaction.
pub(super) const ALIGNMENT: u64 = 256;

/// How the gradients of one update are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatherPlan {
    /// All are held, and one kernel sums them and computes the update.
    HoldAll,
    /// Groups: each is added to a partial sum, and the last one in the kernel that computes the update.
    Streaming {
        /// Gradients in a group.
        at_once: usize,
    },
}

impl GatherPlan {
    /// The plan for `count` gradients of `bytes` bytes each, where a bank has `chunk_memory` bytes.
    ///
    /// # Panics
    /// When a bank has no room for one gradient.
    #[must_use]
    pub fn of(count: usize, bytes: u64, room: u64) -> Self {
        let at_once = room
            .checked_div(aligned(bytes))
            .map_or(GRADIENTS_MAX, |fit| usize::try_from(fit).unwrap_or(GRADIENTS_MAX).min(GRADIENTS_MAX));
        assert!(0 < at_once, "a gradient of {bytes} bytes was let through for a room of {room}");
        if count <= at_once { Self::HoldAll } else { Self::Streaming { at_once } }
    }

    /// The most gradients in a group.
    #[must_use]
    pub fn at_once(self) -> usize {
        match self {
            Self::HoldAll => GRADIENTS_MAX,
            Self::Streaming { at_once } => at_once,
        }
    }
}

/// A length rounded up to the alignment.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Device memory for one group.
pub(super) struct Bank {
    pub(super) part: DeviceRange,
    /// Happens when the group has been copied.
    pub(super) filled: CudaEvent,
    /// Happens when the group has been summed and the bank is free.
    pub(super) used: CudaEvent,
}

/// The banks, used in turn.
pub(super) struct Banks {
    banks: Vec<Bank>,
    next: usize,
}

impl Banks {
    /// Cuts memory into banks.
    pub(super) fn new(context: &Arc<CudaContext>, part: &DeviceRange) -> Result<Self, DriverError> {
        let bytes = part.bytes() / BANKS as u64 / ALIGNMENT * ALIGNMENT;
        let bank = |index: u64| {
            let part = part.part(index * bytes..(index + 1) * bytes);
            Ok(Bank { part, filled: CudaEvent::new(context, false)?, used: CudaEvent::new(context, false)? })
        };
        Ok(Self { banks: (0..BANKS as u64).map(bank).collect::<Result<_, _>>()?, next: 0 })
    }

    /// Bytes of one bank.
    pub(super) fn room(&self) -> u64 {
        self.banks[0].part.bytes()
    }

    /// The index of the next bank. Its content may still be in use; the caller waits for `used` before it fills the
    /// bank.
    pub(super) fn turn(&mut self) -> usize {
        let turn = self.next;
        self.next = (turn + 1) % self.banks.len();
        turn
    }

    pub(super) fn bank(&self, number: usize) -> &Bank {
        &self.banks[number]
    }
}

#[cfg(test)]
mod tests {
    use super::GatherPlan::{self, HoldAll, Streaming};

    #[test]
    fn gradients_are_held_as_long_as_there_is_room() {
        let check = |count, bytes, room, expected| assert_eq!(GatherPlan::of(count, bytes, room), expected);
        check(0, 1024, 1024, HoldAll);
        check(1, 1024, 1024, HoldAll);
        check(2, 1024, 1024, Streaming { at_once: 1 });
        check(8, 1 << 20, 8 << 20, HoldAll);
        check(9, 1 << 20, 8 << 20, Streaming { at_once: 8 });
        // The padding between two gradients counts, and so does the limit of a kernel.
        check(8, (1 << 20) + 4, 8 << 20, Streaming { at_once: 7 });
        check(64, 4, 8 << 20, HoldAll);
        check(65, 4, 8 << 20, Streaming { at_once: 64 });
    }
}

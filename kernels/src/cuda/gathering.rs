//! How the gradients of one update come together on the device.
//!
//! Holding all of them and summing them in the kernel that runs the rule moves the fewest bytes: of eight binary16
//! gradients 42 bytes an element with Adam, where adding each to a sum as it arrives moves 98. It takes room for all of
//! them at once. Where there is not as much, they come in groups as large as there is room for, and each group but the
//! last is added to a sum. Both give the same bits, since additions are in the order given.

use std::sync::Arc;

use super::arguments::GRADIENTS_MAX;
use super::checked::Refused;
use super::safe::{Context, Event, Part};

/// Groups of gradients that are on their way or being summed at the same time.
pub(super) const BANKS: usize = 4;

/// Every tensor on the device begins at a multiple of this: what a memory controller moves at once, and then some.
pub(super) const ALIGNMENT: u64 = 256;

/// What is done with the gradients of one update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gathering {
    /// All are held, and one kernel sums them and computes the update.
    HoldAll,
    /// So many at a time: each group is added to a sum, and the last one in the kernel that computes the update.
    Streaming {
        /// Gradients of a group.
        at_once: usize,
    },
}

impl Gathering {
    /// Of `count` gradients of `bytes` bytes each, where `room` bytes are there for a group.
    ///
    /// # Panics
    /// When there is no room for one.
    #[must_use]
    pub fn of(count: usize, bytes: u64, room: u64) -> Self {
        let at_once = room
            .checked_div(aligned(bytes))
            .map_or(GRADIENTS_MAX, |fit| usize::try_from(fit).unwrap_or(GRADIENTS_MAX).min(GRADIENTS_MAX));
        assert!(0 < at_once, "a gradient of {bytes} bytes was let through for a room of {room}");
        if count <= at_once { Self::HoldAll } else { Self::Streaming { at_once } }
    }

    /// The gradients of a group at most.
    #[must_use]
    pub fn at_once(self) -> usize {
        match self {
            Self::HoldAll => GRADIENTS_MAX,
            Self::Streaming { at_once } => at_once,
        }
    }
}

/// A length with what is left free behind it.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Room for one group.
pub(super) struct Bank {
    pub(super) part: Part,
    /// The group is there.
    pub(super) filled: Event,
    /// The group has been summed, and another may come.
    pub(super) used: Event,
}

/// The rooms for groups, used in turns.
pub(super) struct Banks {
    banks: Vec<Bank>,
    next: usize,
}

impl Banks {
    /// Cuts memory into banks.
    pub(super) fn new(context: &Arc<Context>, part: &Part) -> Result<Self, Refused> {
        let bytes = part.bytes() / BANKS as u64 / ALIGNMENT * ALIGNMENT;
        let bank = |index: u64| {
            let part = part.part(index * bytes..(index + 1) * bytes);
            Ok(Bank { part, filled: Event::new(context, false)?, used: Event::new(context, false)? })
        };
        Ok(Self { banks: (0..BANKS as u64).map(bank).collect::<Result<_, _>>()?, next: 0 })
    }

    /// Bytes of a bank.
    pub(super) fn room(&self) -> u64 {
        self.banks[0].part.bytes()
    }

    /// The bank whose turn it is, by its number. What is in it may still be needed: `used` says so to whoever fills it.
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
    use super::Gathering::{self, HoldAll, Streaming};

    #[test]
    fn gradients_are_held_as_long_as_there_is_room() {
        let check = |count, bytes, room, expected| assert_eq!(Gathering::of(count, bytes, room), expected);
        check(0, 1024, 1024, HoldAll);
        check(1, 1024, 1024, HoldAll);
        check(2, 1024, 1024, Streaming { at_once: 1 });
        check(8, 1 << 20, 8 << 20, HoldAll);
        check(9, 1 << 20, 8 << 20, Streaming { at_once: 8 });
        // What lies between two gradients counts, and so does what a kernel takes.
        check(8, (1 << 20) + 4, 8 << 20, Streaming { at_once: 7 });
        check(64, 4, 8 << 20, HoldAll);
        check(65, 4, 8 << 20, Streaming { at_once: 64 });
    }
}

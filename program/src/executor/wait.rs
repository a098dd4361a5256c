//! Reasons why a unit is not ready.

/// The reason why a unit cannot run after its predecessors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A value from another program's `send`.
    Arrival,
    /// Room at another program's `recv`.
    Destination,
    /// Memory, which is released outside the program.
    Memory,
    /// Space in a queue.
    Space {
        /// Items that it holds, which is its capacity.
        held: usize,
    },
    /// Items in a queue.
    Items {
        /// The number present.
        held: usize,
        /// The number needed.
        needed: usize,
    },
    /// Room in an accumulator whose merged value is not taken yet.
    Room {
        /// Pieces that it holds, which are all of a merged gradient.
        held: usize,
    },
    /// Pieces in an accumulator.
    Pieces {
        /// The number present.
        held: usize,
        /// The number needed.
        needed: usize,
    },
}

impl Wait {
    /// Whether an event outside the program ends the wait: then it is no deadlock.
    #[must_use]
    pub const fn is_outside(self) -> bool {
        matches!(self, Self::Arrival | Self::Destination | Self::Memory)
    }
}

impl std::fmt::Display for Wait {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Arrival => formatter.write_str("waits for a value to be sent"),
            Self::Destination => formatter.write_str("waits for room at its destination"),
            Self::Memory => formatter.write_str("waits for memory"),
            Self::Space { held } => write!(formatter, "waits for space in its queue, which holds {held}, all it can"),
            Self::Items { held, needed } => {
                write!(formatter, "waits for items in its queue, which holds {held} of {needed}")
            }
            Self::Room { held } => write!(formatter, "waits for its accumulator, which holds {held}, to give them"),
            Self::Pieces { held, needed } => {
                write!(formatter, "waits for pieces, of which it holds {held} of {needed}")
            }
        }
    }
}

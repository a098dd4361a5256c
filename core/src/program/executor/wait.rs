//! Why a unit is not ready, and what it means when none is.

use super::marking::{Marking, Port};
use super::plan::Plan;
use crate::error::Failure;

/// What a unit waits for beyond the units before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// For somebody else's `send`.
    Arrival,
    /// For somebody else's `recv` to make room.
    Destination,
    /// For memory, which somebody outside gives back.
    Memory,
    /// For space in a queue.
    Space {
        /// Items that it holds, as many as it can.
        held: usize,
    },
    /// For items in a queue.
    Items {
        /// Those that are there.
        held: usize,
        /// Those that must be there.
        needed: usize,
    },
    /// For an accumulator to give what it holds.
    Room {
        /// Pieces that it holds, as many as make one.
        held: usize,
    },
    /// For pieces in an accumulator.
    Pieces {
        /// Those that are there.
        held: usize,
        /// Those that must be there.
        needed: usize,
    },
}

impl Wait {
    /// Whether somebody outside ends it: then nothing is wrong.
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
                write!(formatter, "waits for pieces, of which {held} of {needed} are there")
            }
        }
    }
}

/// How a program stands when no unit is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Every op has run, and there is no loop.
    Ended,
    /// Somebody outside must send something, or make room.
    Awaits,
    /// It may go on: the units that it was allowed have run.
    Runs,
}

/// How a program stands that has no ready unit.
///
/// # Errors
/// When nothing is awaited from outside and the program has not ended: it never will, and the error says which ops wait
/// for what.
pub fn standing<P: Port>(plan: &Plan, marking: &Marking, port: &mut P) -> Result<Standing, Failure> {
    if marking.has_ended() {
        return Ok(Standing::Ended);
    }
    let waiting = marking.waiting(plan, port);
    if waiting.iter().any(|(_, wait)| wait.is_outside()) {
        return Ok(Standing::Awaits);
    }
    let words = waiting.iter().map(|(unit, wait)| format!("{} {wait}", plan.label(&plan.units()[unit.place()])));
    let words: Vec<String> = words.collect();
    Err(Failure::call(format!("deadlock: no op is ready and nothing is awaited from outside: {}", words.join("; "))))
}

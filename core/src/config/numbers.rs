//! Numbers of modes and merges on the wire and on disk.

use super::{Merge, Mode};

impl Mode {
    /// The mode's number, and the bound where it has one.
    #[must_use]
    pub fn numbers(self) -> (u32, u32) {
        match self {
            Self::Sync => (0, 0),
            Self::Async => (1, 0),
            Self::Staleness { bound } => (2, bound),
            Self::Delta => (3, 0),
        }
    }

    /// The mode with these numbers, if there is one.
    #[must_use]
    pub fn from_numbers(mode: u32, bound: u32) -> Option<Self> {
        match mode {
            0 => Some(Self::Sync),
            1 => Some(Self::Async),
            2 => Some(Self::Staleness { bound }),
            3 => Some(Self::Delta),
            _ => None,
        }
    }
}

impl Merge {
    /// The merge's number.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Mean => 0,
            Self::Sum => 1,
        }
    }

    /// The merge with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Mean),
            1 => Some(Self::Sum),
            _ => None,
        }
    }
}

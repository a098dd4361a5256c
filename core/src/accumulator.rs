//! Gradient accumulator: how many pieces make one gradient, how they are merged, and when a sender's next piece is
//! taken. A server's shard and the executor of programs share these types.

use smallvec::SmallVec;

use crate::config::{Merge, Mode};

/// The fate of a gradient that comes when its round was completed without it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LateGradients {
    /// It counts in no round.
    #[default]
    Drop,
    /// It counts in the round that is open then.
    NextRound,
}

/// Attributes of an accumulator, which depend on the mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccumulatorSettings {
    /// The number of pieces in one merged gradient.
    pub count: u32,
    /// How pieces are merged.
    pub merge: Merge,
    /// The number of pieces that a sender may be ahead of the slowest one; none is no bound.
    pub staleness: Option<u32>,
    /// The fate of pieces that a merged gradient did not wait for.
    pub late: LateGradients,
}

impl AccumulatorSettings {
    /// The attributes in a mode. A gradient that is an update alone is its own mean and sum, and is added.
    #[must_use]
    pub fn of(mode: Mode, merge: Merge, trainers: u32) -> Self {
        let (count, merge, staleness) = match mode {
            Mode::Sync => (trainers, merge, Some(0)),
            Mode::Async | Mode::Delta => (1, Merge::Sum, None),
            Mode::Staleness { bound } => (1, Merge::Sum, Some(bound)),
        };
        Self { count, merge, staleness, late: LateGradients::Drop }
    }

    /// The same without the slowest trainers of each round.
    #[must_use]
    pub fn without(self, backup_trainers: u32) -> Self {
        Self { count: self.count.saturating_sub(backup_trainers).max(1), ..self }
    }
}

/// When an accumulator takes a piece of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccumulatorPace {
    /// Any piece at any time.
    Any,
    /// One piece of every sender in each merged gradient.
    Rounds,
    /// A piece whose sender would be at most this many pieces ahead of the slowest sender, this piece included.
    Bounded(u32),
}

impl AccumulatorPace {
    /// The pace of a staleness bound: none accepts everything, and a bound of zero means rounds.
    #[must_use]
    pub const fn of(staleness: Option<u32>) -> Self {
        match staleness {
            None => Self::Any,
            Some(0) => Self::Rounds,
            Some(bound) => Self::Bounded(bound),
        }
    }

    /// Whether a sender's next piece may be taken: `has_piece` when the open round has one of its pieces, `given` the
    /// number of its pieces in earlier merged gradients, `fewest` the lowest such number of all active senders.
    pub fn admits(self, has_piece: bool, given: u64, fewest: impl FnOnce() -> u64) -> bool {
        match self {
            Self::Any => true,
            Self::Rounds => !has_piece,
            Self::Bounded(bound) => given < fewest().saturating_add(bound.into()),
        }
    }
}

/// A piece whose sender is known.
pub trait Sent {
    /// The type by which senders are distinguished and ordered.
    type Sender: Ord + Copy;

    /// The sender of this piece.
    fn sender(&self) -> Self::Sender;
}

/// Pieces in the order of their senders; of one sender, in the order of arrival. Memory is kept when the list is
/// emptied. A single piece is stored inline, because most of a million accumulators have one sender.
#[derive(Clone, Debug)]
pub struct PieceList<T> {
    held: SmallVec<[T; 1]>,
}

impl<T> Default for PieceList<T> {
    fn default() -> Self {
        Self { held: SmallVec::new() }
    }
}

impl<T: Sent> PieceList<T> {
    /// The pieces in order.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        &self.held
    }

    /// The pieces in order, to change; their senders must stay the same.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.held
    }

    /// The first piece of a sender.
    #[must_use]
    #[inline]
    pub fn of(&self, sender: T::Sender) -> Option<&T> {
        self.held.get(self.first_not_before(sender)).filter(|one| one.sender() == sender)
    }

    /// The first piece of a sender, to change; its sender must stay the same.
    #[must_use]
    pub fn of_mut(&mut self, sender: T::Sender) -> Option<&mut T> {
        let at = self.first_not_before(sender);
        self.held.get_mut(at).filter(|one| one.sender() == sender)
    }

    /// Puts a piece in its place, where it can be changed.
    #[inline]
    pub fn put(&mut self, piece: T) -> &mut T {
        let sender = piece.sender();
        let at = self.held.partition_point(|one| one.sender() <= sender);
        if at == self.held.len() {
            self.held.push(piece);
        } else {
            self.held.insert(at, piece);
        }
        &mut self.held[at]
    }

    /// Takes the first piece of a sender.
    pub fn take(&mut self, sender: T::Sender) -> Option<T> {
        let at = self.first_not_before(sender);
        (self.held.get(at)?.sender() == sender).then(|| self.held.remove(at))
    }

    /// Takes all pieces, in order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.held.drain(..)
    }

    /// Drops all pieces.
    #[inline]
    pub fn clear(&mut self) {
        self.held.clear();
    }

    #[inline]
    fn first_not_before(&self, sender: T::Sender) -> usize {
        self.held.partition_point(|one| one.sender() < sender)
    }
}

//! Storage of flow ops: items in a queue, pieces in an accumulator, and the order in which senders' pieces are
//! accepted.

use std::collections::VecDeque;

use smallvec::SmallVec;

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

/// Something with a sender.
pub trait Sent {
    /// The type by which senders are distinguished and ordered.
    type Sender: Ord + Copy;

    /// The sender of this piece.
    fn sender(&self) -> Self::Sender;
}

/// Pieces in the order of their senders; of one sender, in the order of arrival. Their memory stays, and a lone one
/// needs none of its own: of a million accumulators most have a lone sender.
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

    /// The pieces in order, to change all but their senders.
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

    /// The first piece of a sender, to change all but that.
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

/// Items that wait, oldest first, and no more than a bound.
#[derive(Clone, Debug)]
pub struct Queue<T> {
    items: VecDeque<T>,
    capacity: usize,
}

impl<T> Queue<T> {
    /// An empty queue. Its capacity is a claim of the program's, so memory comes with the items.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { items: VecDeque::new(), capacity }
    }

    /// How many items it holds at most.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// How many items it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether the queue is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.items.len() >= self.capacity
    }

    /// Adds an item.
    ///
    /// # Panics
    ///
    /// When the queue is full: nothing is ever dropped, so the caller checks first.
    pub fn put(&mut self, item: T) {
        assert!(!self.is_full(), "an item for a full queue");
        self.items.push_back(item);
    }

    /// Takes the oldest item.
    pub fn take(&mut self) -> Option<T> {
        self.items.pop_front()
    }
}

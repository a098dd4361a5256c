//! Queue of an `enqueue` and a `dequeue`: items in order of arrival, up to a bound.

use std::collections::VecDeque;

/// Items in order of arrival, up to a bound.
#[derive(Clone, Debug)]
pub struct Queue<T> {
    items: VecDeque<T>,
    capacity: usize,
}

impl<T> Queue<T> {
    /// An empty queue. Memory is allocated for items as they arrive, because a program's capacity is unchecked.
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

    /// The items, the oldest first.
    pub fn items(&self) -> impl Iterator<Item = &T> {
        self.items.iter()
    }

    /// Adds an item.
    ///
    /// # Panics
    ///
    /// When the queue is full: no item is dropped, so the caller checks first.
    pub fn put(&mut self, item: T) {
        assert!(!self.is_full(), "an item for a full queue");
        self.items.push_back(item);
    }

    /// Takes the oldest item.
    pub fn take(&mut self) -> Option<T> {
        self.items.pop_front()
    }
}

//! Requests that wait for a version of a chunk, indexed by version and by time. Access takes logarithmic time: an
//! update costs what is due, however many requests wait.

use std::collections::{BTreeMap, BTreeSet};

use crate::dtype::Half;
use crate::ids::{PeerId, Version};
use crate::memory::Lease;
use crate::time::Now;
use crate::wire::Head;

/// A request that waits for a version: a pull, or a push whose round is open.
pub(super) struct Waiter {
    pub(super) peer: PeerId,
    pub(super) head: Head,
    pub(super) version: Version,
    pub(super) since: Now,
    /// Half-precision type of the answer, where requested.
    pub(super) half: Option<Half>,
    /// Request for rows; `None` for a dense value.
    pub(super) wish: Option<RowsRequest>,
}

/// A request for rows of a bucket: their ids, or none to learn the version only.
pub(super) struct RowsRequest {
    pub(super) ids: Option<Lease>,
    pub(super) bytes: u32,
}

/// The waiting requests of one chunk; no allocation while it is empty.
#[derive(Default)]
pub(super) struct Waiters(Option<Box<WaiterIndex>>);

#[derive(Default)]
struct WaiterIndex {
    /// By awaited version, then by arrival.
    wanted: BTreeMap<(Version, u64), Waiter>,
    /// By time of arrival, with the keys above.
    since: BTreeSet<(Now, u64, Version)>,
    /// Count of arrivals.
    asked: u64,
}

impl Waiter {
    /// A waiter for an acknowledgement without a value.
    pub(super) fn new(peer: PeerId, head: Head, version: Version, since: Now) -> Self {
        Self { peer, head, version, since, half: None, wish: None }
    }
}

impl RowsRequest {
    /// The ids, or the question that lists them.
    pub(super) fn bytes(&self) -> &[u8] {
        self.ids.as_ref().map_or(&[], |lease| &lease.bytes()[..self.bytes as usize])
    }
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn add(&mut self, waiter: Waiter) {
        let all = self.0.get_or_insert_default();
        all.asked += 1;
        all.since.insert((waiter.since, all.asked, waiter.version));
        all.wanted.insert((waiter.version, all.asked), waiter);
    }

    /// Arrival of the oldest waiter.
    pub(super) fn first_since(&self) -> Option<Now> {
        self.0.as_ref()?.since.first().map(|(since, ..)| *since)
    }

    /// Takes the waiters for `version` or earlier ones, in arrival order.
    pub(super) fn take_due(&mut self, version: Version) -> Vec<Waiter> {
        let mut due = self.change(|all| all.take_due(version));
        due.sort_unstable_by_key(|(order, _)| *order);
        due.into_iter().map(|(_, waiter)| waiter).collect()
    }

    /// Takes up to `most` overdue waiters, in arrival order.
    pub(super) fn take_overdue(&mut self, is_overdue: impl Fn(Now) -> bool, most: usize) -> Vec<Waiter> {
        self.change(|all| all.take_overdue(is_overdue, most))
    }

    /// Takes up to `most` waiters for later versions, in arrival order.
    pub(super) fn take_beyond(&mut self, version: Version, most: usize) -> Vec<Waiter> {
        let mut beyond = self.change(|all| all.take_beyond(version, most));
        beyond.sort_unstable_by_key(|(order, _)| *order);
        beyond.into_iter().map(|(_, waiter)| waiter).collect()
    }

    /// Whether any waiter belongs to this connection.
    pub(super) fn has_any_of(&self, peer: PeerId) -> bool {
        self.0.iter().flat_map(|all| all.wanted.values()).any(|waiter| waiter.peer == peer)
    }

    /// Removes the waiters of a closed connection; returns their number.
    pub(super) fn forget(&mut self, peer: PeerId) -> usize {
        self.change(|all| all.forget(peer))
    }

    fn change<T: Default>(&mut self, change: impl FnOnce(&mut WaiterIndex) -> T) -> T {
        let Some(all) = &mut self.0 else { return T::default() };
        let changed = change(all);
        self.0.take_if(|all| all.wanted.is_empty());
        changed
    }
}

impl WaiterIndex {
    fn take_due(&mut self, version: Version) -> Vec<(u64, Waiter)> {
        let mut due = Vec::new();
        while let Some(first) = self.wanted.first_entry().filter(|first| first.key().0 <= version) {
            let ((version, order), waiter) = first.remove_entry();
            self.since.remove(&(waiter.since, order, version));
            due.push((order, waiter));
        }
        due
    }

    fn take_beyond(&mut self, version: Version, most: usize) -> Vec<(u64, Waiter)> {
        let from = (Version(version.0.saturating_add(1)), 0);
        let keys: Vec<(Version, u64)> = self.wanted.range(from..).map(|(key, _)| *key).take(most).collect();
        let beyond = keys.into_iter().filter_map(|key| Some((key.1, self.wanted.remove(&key)?))).collect::<Vec<_>>();
        for (order, waiter) in &beyond {
            self.since.remove(&(waiter.since, *order, waiter.version));
        }
        beyond
    }

    fn take_overdue(&mut self, is_overdue: impl Fn(Now) -> bool, most: usize) -> Vec<Waiter> {
        let mut overdue = Vec::new();
        while overdue.len() < most
            && let Some((_, order, version)) = self.since.first().filter(|(since, ..)| is_overdue(*since)).copied()
        {
            self.since.pop_first();
            overdue.extend(self.wanted.remove(&(version, order)));
        }
        overdue
    }

    fn forget(&mut self, peer: PeerId) -> usize {
        let before = self.wanted.len();
        let Self { wanted, since, .. } = self;
        wanted.retain(|(version, order), waiter| {
            let stays = waiter.peer != peer;
            if !stays {
                since.remove(&(waiter.since, *order, *version));
            }
            stays
        });
        before - self.wanted.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Ticket;
    use crate::wire::Kind;

    fn waiters(all: &[(u64, u64, u64)]) -> Waiters {
        let mut waiters = Waiters::default();
        for (number, (peer, version, since)) in (0..).zip(all) {
            let head = Head { request: Ticket(number), ..Head::new(Kind::Pull) };
            waiters.add(Waiter::new(PeerId(*peer), head, Version(*version), Now(*since)));
        }
        waiters
    }

    fn numbers(taken: &[Waiter]) -> Vec<u64> {
        taken.iter().map(|waiter| waiter.head.request.0).collect()
    }

    #[test]
    fn due_waiters_are_returned_in_order_of_request() {
        let mut all = waiters(&[(1, 5, 10), (2, 3, 10), (1, 4, 20), (1, 9, 20), (2, 3, 30)]);
        assert!(all.take_due(Version(2)).is_empty());
        assert_eq!(numbers(&all.take_due(Version(5))), [0, 1, 2, 4]);
        assert_eq!(all.first_since(), Some(Now(20)));
        assert!(all.take_beyond(Version(9), 9).is_empty() && all.take_beyond(Version(0), 0).is_empty());
        assert_eq!(numbers(&all.take_beyond(Version(8), 1)), [3]);
        assert!(all.is_empty() && all.first_since().is_none());
    }

    #[test]
    fn overdue_waiters_are_taken_in_order_and_waiters_end_with_their_connection() {
        let mut all = waiters(&[(1, 5, 10), (2, 3, 10), (1, 4, 20), (2, 9, 20), (2, 3, 30)]);
        assert_eq!(numbers(&all.take_overdue(|since| since <= Now(10), 1)), [0]);
        assert_eq!(numbers(&all.take_overdue(|since| since <= Now(10), 9)), [1]);
        assert_eq!(all.forget(PeerId(2)), 2);
        assert_eq!(all.first_since(), Some(Now(20)));
        assert_eq!(numbers(&all.take_due(Version(9))), [2]);
        assert!(all.first_since().is_none());
    }
}

//! Index of the requests that a shard's chunks let wait, by time and by connection, and the waits that the log has
//! reported.
//!
//! Not here: the requests of one chunk (`waiters`), their expiry (`waits`), the lines of the log (`watch`).

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{PeerId, Version};
use crate::time::Now;

/// The pending requests of a shard.
#[derive(Default)]
pub(super) struct WaitIndex {
    /// Chunks with a pending request, each once, by the time of its oldest one.
    pub(super) by_time: BTreeSet<(Now, usize)>,
    /// Pending requests per connection.
    pub(super) per_peer: BTreeMap<PeerId, usize>,
    /// Time of the last search for waits on lost trainers.
    pub(super) lost_checked_at: Now,
    /// Waits that the log has reported.
    pub(super) log: StallLog,
}

/// Reported waits.
#[derive(Debug, Default)]
pub(super) struct StallLog {
    /// The reported wait that has not ended.
    pub(super) open: Option<ReportedWait>,
    /// Earliest time of the next report.
    pub(super) next: Now,
}

/// A wait that the log has reported.
#[derive(Debug)]
pub(super) struct ReportedWait {
    pub(super) slot_index: usize,
    pub(super) version: Version,
    pub(super) since: Now,
}

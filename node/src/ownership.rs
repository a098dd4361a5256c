//! Looks whether this process still owns the directories of a shard that it leads: the server's, and the shard's.
//!
//! A record is acknowledged after a look of its own (`core::checkpoint::owner`). Without these looks a process that
//! stood still, and was replaced meanwhile, would go on answering pulls with old values to clients that are still
//! connected.

use std::time::Duration;

use pserver_core::checkpoint::DirectoryOwner;
use pserver_core::error::Failure;
use pserver_core::time::Now;

/// The longest time between a look and an answer.
const OWNER_LOOK: Duration = Duration::from_millis(250);

/// The time of the last look whether another process has replaced this one.
pub(super) struct LastLook(pub(super) Now);

impl LastLook {
    /// Whether the last look is old; if so, another one is due now.
    pub(super) fn is_old(&mut self, now: Now) -> bool {
        let is_old = self.0 + OWNER_LOOK <= now;
        if is_old {
            self.0 = now;
        }
        is_old
    }
}

/// The ownership of a shard's process.
pub(super) struct Ownership {
    owners: Vec<DirectoryOwner>,
    last_look: LastLook,
}

impl Ownership {
    /// The ownership of directories; of none without a checkpoint directory.
    pub(super) fn new(owners: Vec<DirectoryOwner>, now: Now) -> Self {
        Self { owners, last_look: LastLook(now) }
    }

    /// Looks again when the last look is old. Call it before the answers of a turn leave.
    ///
    /// # Errors
    /// When another process owns one of the directories. A disk that does not answer is no such reason.
    pub(super) fn look(&mut self, now: Now) -> Result<(), Failure> {
        if !self.last_look.is_old(now) {
            return Ok(());
        }
        self.owners.iter().try_for_each(|owner| match owner.check() {
            Err(replaced @ Failure::Node(_)) => Err(replaced),
            _ => Ok(()),
        })
    }
}

//! Looks whether this process still owns its checkpoint directory.
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

/// The ownership of a session's process.
pub(super) struct Ownership {
    owner: Option<DirectoryOwner>,
    looked: Now,
}

impl Ownership {
    /// The ownership of a directory, if there is one.
    pub(super) fn new(owner: Option<DirectoryOwner>, now: Now) -> Self {
        Self { owner, looked: now }
    }

    /// Looks again when the last look is old. Call it before the answers of a turn leave.
    ///
    /// # Errors
    /// When another process owns the directory. A disk that does not answer is no such reason.
    pub(super) fn look(&mut self, now: Now) -> Result<(), Failure> {
        let Some(owner) = self.owner.as_ref().filter(|_| self.looked + OWNER_LOOK <= now) else { return Ok(()) };
        self.looked = now;
        match owner.check() {
            Err(replaced @ Failure::Node(_)) => Err(replaced),
            _ => Ok(()),
        }
    }
}

//! Registered room of this side's own, for payloads whose memory the other side, or the card, cannot be told of.

use pserver_core::limits::{FRAME_PAYLOAD_BYTES_MAX, LANDINGS_MAX};
use pserver_core::memory::{Arena, Budget, Lease};

use super::Ended;
use super::registry::Registry;

/// What the slots of one size come to; only what is used takes memory.
const BYTES: u32 = 64 * 1024 * 1024;
/// There are so many slots of a size at least: more than one frame needs, whatever its payloads' lengths.
const SLOTS_MIN: u32 = 4;

const _: () = assert!(LANDINGS_MAX * FRAME_PAYLOAD_BYTES_MAX as usize <= BYTES as usize, "what lands at once fits");

/// An arena for each size of slot that was ever needed, and its registration.
pub(super) struct Staging {
    arenas: Vec<(u32, Arena)>,
    registry: Registry,
}

impl Staging {
    pub(super) fn new(registry: Registry) -> Self {
        Self { arenas: Vec::new(), registry }
    }

    /// What is registered like staging.
    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A slot for `bytes` bytes, or nothing when all of that size are in use.
    pub(super) fn take(&mut self, bytes: u32) -> Result<Option<Lease>, Ended> {
        let slot = bytes.next_power_of_two();
        let arena = match self.arenas.iter().find(|(size, _)| *size == slot) {
            Some((_, arena)) => arena,
            None => {
                let mut budget = Budget::new();
                budget.line("payloads on their way over verbs", slot, (BYTES / slot).max(SLOTS_MIN).into());
                let arena = Arena::new(&budget).map_err(|failure| Ended::Device(failure.to_string()))?;
                self.arenas.push((slot, arena));
                &self.arenas.last().expect("it was just added").1
            }
        };
        Ok(arena.take(bytes).ok())
    }
}

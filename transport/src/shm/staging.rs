//! Staging memory of a shared-memory connection: slots that the peer can read, for payloads of private memory.

use pserver_core::error::Failure;
use pserver_core::memory::{Arena, Budget, Lease};

use super::TOKENS;

/// Bytes of all slots of one size; untouched ones take no memory.
pub(super) const BYTES: u32 = 64 * 1024 * 1024;
/// Slots of each size, at least.
const SLOTS_MIN: u32 = 4;

/// One arena for each slot size that was needed.
#[derive(Default)]
pub(super) struct ShmStaging {
    arenas: Vec<(u32, Arena)>,
}

impl ShmStaging {
    /// A slot for `bytes` bytes; nothing when all slots of that size are in use.
    pub(super) fn take(&mut self, bytes: u32) -> Result<Option<Lease>, Failure> {
        let slot = bytes.next_power_of_two();
        let arena = match self.arenas.iter().find(|(size, _)| *size == slot) {
            Some((_, arena)) => arena,
            None => {
                let mut budget = Budget::new();
                budget.line("payloads on their way to another process", slot, slots(slot).into());
                self.arenas.push((slot, Arena::shared(&budget)?));
                &self.arenas.last().expect("it was just added").1
            }
        };
        Ok(arena.take(bytes).ok())
    }
}

fn slots(slot: u32) -> u32 {
    (BYTES / slot).clamp(SLOTS_MIN, TOKENS)
}

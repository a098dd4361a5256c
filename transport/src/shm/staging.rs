//! Room of this side's own that the other side may read: where payloads of ordinary memory are put before they are
//! sent.

use pserver_core::error::Failure;
use pserver_core::memory::{Arena, Budget, Lease};

use super::TOKENS;

/// What the slots of one size come to; only what is used takes memory.
const BYTES: u32 = 64 * 1024 * 1024;
/// There are so many slots of a size at least.
const SLOTS_MIN: u32 = 4;

/// An arena for each size of slot that was ever needed.
#[derive(Default)]
pub(super) struct Staging {
    arenas: Vec<(u32, Arena)>,
}

impl Staging {
    /// A slot for `bytes` bytes, or nothing when all of that size are in use.
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

//! Staging memory of a verbs connection: registered slots for payloads whose own memory the card or the peer cannot
//! use.

use pserver_core::limits::{FRAME_PAYLOAD_BYTES_MAX, RECEIVES_MAX};
use pserver_core::memory::{Arena, Budget, Lease};
use pserver_core::port::Incoming;

use super::ConnectionError;
use super::registry::MemoryRegistry;
use super::wire_format::RemoteBuffer;

/// Bytes of all slots of one size; untouched ones take no memory.
const BYTES: u32 = 64 * 1024 * 1024;
/// Slots of each size, at least: more than one frame needs, whatever its payloads' lengths.
const SLOTS_MIN: u32 = 4;

const _: () = assert!(RECEIVES_MAX * FRAME_PAYLOAD_BYTES_MAX as usize <= BYTES as usize, "what lands at once fits");

/// One arena for each slot size that was needed, and its registry.
pub(super) struct VerbsStaging {
    arenas: Vec<(u32, Arena)>,
    registry: MemoryRegistry,
}

impl VerbsStaging {
    pub(super) fn new(registry: MemoryRegistry) -> Self {
        Self { arenas: Vec::new(), registry }
    }

    /// The registry of staging and of memory registered like it.
    pub(super) fn registry(&self) -> &MemoryRegistry {
        &self.registry
    }

    /// A slot for `bytes` bytes; nothing when all slots of that size are in use.
    pub(super) fn take(&mut self, bytes: u32) -> Result<Option<Lease>, ConnectionError> {
        let slot = bytes.next_power_of_two();
        let arena = match self.arenas.iter().find(|(size, _)| *size == slot) {
            Some((_, arena)) => arena,
            None => {
                let mut budget = Budget::new();
                budget.line("payloads on their way over verbs", slot, (BYTES / slot).max(SLOTS_MIN).into());
                let arena = Arena::new(&budget).map_err(|failure| ConnectionError::Device(failure.to_string()))?;
                self.arenas.push((slot, arena));
                &self.arenas.last().expect("it was just added").1
            }
        };
        Ok(arena.take(bytes).ok())
    }

    /// A buffer that the peer can write directly; nothing when it needs staging.
    pub(super) fn in_place(&self, place: &mut Incoming) -> Result<Option<RemoteBuffer>, ConnectionError> {
        let Incoming::Loan(loan) = place else { return Ok(None) };
        let Some((memory, offset)) = loan.mapped() else { return Ok(None) };
        let key = self.registry().remote_key_within(memory, offset)?;
        Ok(key.map(|key| RemoteBuffer::of(place.bytes_mut(), key)))
    }
}

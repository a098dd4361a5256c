//! A frame as a journal record: the encoded head, and the payloads after it.
//!
//! The journal computes a checksum over a record's parts and then writes them, so they must not change in between. A
//! payload in its sender's memory may change: its private copy is checksummed and written.

use crate::port::Incoming;

/// Private memory for the payloads of one record, reused; at most as long as the longest payload of a frame. It stays
/// in the processor's cache, which is cheaper than reading a sender's memory twice
/// (`docs/decisions/lent-and-viewed.md`).
#[derive(Default)]
pub(super) struct PrivateCopy(Vec<u8>);

impl PrivateCopy {
    /// The parts of the record of a frame with this head and these payloads.
    pub(super) fn parts<'a>(&'a mut self, head: &'a [u8], body: &'a [Incoming]) -> Vec<&'a [u8]> {
        let foreign: usize = body.iter().filter_map(foreign_bytes).sum();
        if self.0.len() < foreign {
            self.0.resize(foreign, 0);
        }
        let mut room = self.0.as_mut_slice();
        let mut parts = Vec::with_capacity(1 + body.len());
        parts.push(head);
        for place in body {
            parts.push(match (foreign_bytes(place), place) {
                (Some(bytes), Incoming::Chunk { lease, .. }) => {
                    let (copy, rest) = room.split_at_mut(bytes);
                    lease.copy_to(copy);
                    room = rest;
                    copy
                }
                _ => place.bytes(),
            });
        }
        parts
    }
}

/// Length of a payload in its sender's memory.
fn foreign_bytes(place: &Incoming) -> Option<usize> {
    match place {
        Incoming::Chunk { lease, bytes } => lease.is_foreign().then_some(*bytes as usize),
        Incoming::Loan(_) | Incoming::Discard { .. } => None,
    }
}

#[cfg(test)]
mod tests;

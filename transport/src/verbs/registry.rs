//! Which memory is registered in a domain.
//!
//! A mapping is registered in pieces of [`PIECE_BYTES`], each when something in it is first used: an arena is mapped
//! for the most that can be needed, and what is registered is resident. Slots are given out again from the top of a
//! stack, so after the first steps nothing new is registered.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::{Lease, Mapped};

use super::provider::{Access, Domain, Fault, Region};

/// What is registered at once. No slot lies across a multiple of it.
const PIECE_BYTES: usize = 2 * CHUNK_BYTES_MAX as usize;

const _: () = assert!(PIECE_BYTES.is_multiple_of(CHUNK_BYTES_MAX as usize));

/// What went through verbs. Any thread may read it.
#[derive(Debug, Default)]
pub struct Counters {
    /// Payload bytes that were copied, from or into staging, or through messages.
    pub copied_bytes: AtomicU64,
    /// Payload bytes that a device moved between memory of the two sides.
    pub moved_bytes: AtomicU64,
    /// Pieces of memory that were registered.
    pub registrations: AtomicU64,
    /// Connections that were made this way.
    pub connections: AtomicU64,
}

impl Counters {
    pub(super) fn copied(&self, bytes: usize) {
        self.copied_bytes.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn connected(&self) {
        self.connections.fetch_add(1, Relaxed);
    }

    pub(super) fn moved(&self, bytes: usize) {
        self.moved_bytes.fetch_add(bytes as u64, Relaxed);
    }
}

/// What is registered of a domain for one kind of access. Clones are the same registry.
#[derive(Clone)]
pub(super) struct Registry(Arc<Mutex<Registered>>);

struct Registered {
    /// Before the domain, whose regions they are.
    known: Vec<Known>,
    domain: Arc<dyn Domain>,
    access: Access,
    counters: Arc<Counters>,
}

struct Known {
    address: usize,
    /// Before the memory, which they are regions of.
    pieces: Vec<Option<Box<dyn Region>>>,
    memory: Mapped,
}

impl Registry {
    pub(super) fn new(domain: &Arc<dyn Domain>, access: Access, counters: &Arc<Counters>) -> Self {
        let (domain, counters) = (Arc::clone(domain), Arc::clone(counters));
        Self(Arc::new(Mutex::new(Registered { known: Vec::new(), domain, access, counters })))
    }

    /// The key for this side's work with a lease; nothing when it is not memory of ours.
    pub(super) fn key_of(&self, lease: &Lease) -> Result<Option<u32>, Fault> {
        let mut registered = self.lock();
        Ok(registered.region_of(lease)?.map(Region::near_key))
    }

    /// The other side's key for a lease of this side's staging.
    pub(super) fn far_key_of(&self, lease: &Lease) -> Result<u32, Fault> {
        let mut registered = self.lock();
        Ok(registered.region_of(lease)?.expect("staging is memory of ours").far_key())
    }

    /// The other side's key for a buffer, which is registered whole: all of it is in use, and a slice may lie anywhere.
    pub(super) fn far_key_within(&self, memory: Mapped) -> Result<u32, Fault> {
        let mut registered = self.lock();
        let place = registered.place(memory.address()).unwrap_or_else(|| registered.add(memory, usize::MAX));
        Ok(registered.region(place, 0)?.far_key())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registered> {
        // What is registered is whole after every operation, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    fn region_of(&mut self, lease: &Lease) -> Result<Option<&dyn Region>, Fault> {
        let Some((address, offset)) = lease.position() else { return Ok(None) };
        let place = match (self.place(address), lease.mapped()) {
            (Some(place), _) => place,
            (None, Some(memory)) => self.add(memory, PIECE_BYTES),
            (None, None) => return Ok(None),
        };
        self.region(place, offset / PIECE_BYTES).map(Some)
    }

    fn place(&self, address: usize) -> Option<usize> {
        self.known.iter().position(|known| known.address == address)
    }

    fn add(&mut self, memory: Mapped, piece_bytes: usize) -> usize {
        // What nobody else keeps cannot be used again.
        self.known.retain(|known| !known.memory.is_last());
        let pieces = std::iter::repeat_with(|| None).take(memory.len().div_ceil(piece_bytes)).collect();
        self.known.push(Known { address: memory.address(), pieces, memory });
        self.known.len() - 1
    }

    fn region(&mut self, place: usize, number: usize) -> Result<&dyn Region, Fault> {
        let Known { memory, pieces, .. } = &mut self.known[place];
        let length = if pieces.len() == 1 { memory.len() } else { PIECE_BYTES };
        let piece = &mut pieces[number];
        if piece.is_none() {
            let begin = number * PIECE_BYTES;
            *piece = Some(self.domain.register(memory, (begin, length.min(memory.len() - begin)), self.access)?);
            self.counters.registrations.fetch_add(1, Relaxed);
        }
        Ok(piece.as_deref().expect("it was just put there"))
    }
}

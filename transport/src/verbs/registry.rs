//! Which memory is registered in a domain.
//!
//! A mapping is registered in pieces of [`PIECE_BYTES`], each when something in it is first used: an arena is mapped
//! for the most that can be needed, and what is registered is resident. Slots are given out again from the top of a
//! stack, so after the first steps nothing new is registered. Where the system limits what can be registered, a
//! session's arena is registered whole when the first of it is used: what will not do is then known before the job is
//! under way. What cannot be deregistered stays mapped, and is given to nobody.

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
    /// Whether what does not fit should be known early.
    is_limited: bool,
    counters: Arc<Counters>,
}

struct Known {
    address: usize,
    /// Before the memory, which they are regions of and do not keep.
    pieces: Vec<Option<Box<dyn Region>>>,
    memory: Mapped,
    /// Whether some of it could not be deregistered.
    is_lost: bool,
}

impl Known {
    /// Deregisters it; whether that was done. What cannot be deregistered stays mapped for good.
    fn end(&mut self) -> bool {
        for mut region in self.pieces.drain(..).flatten() {
            if let Err(fault) = region.close() {
                tracing::error!(%fault, "memory could not be deregistered; it is not used again");
                std::mem::forget((self.memory.clone(), region));
                self.is_lost = true;
            }
        }
        !self.is_lost
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.end();
    }
}

impl Registry {
    pub(super) fn new(domain: &Arc<dyn Domain>, access: Access, counters: &Arc<Counters>) -> Self {
        let (domain, counters) = (Arc::clone(domain), Arc::clone(counters));
        let registered = Registered { known: Vec::new(), domain, access, is_limited: false, counters };
        Self(Arc::new(Mutex::new(registered)))
    }

    /// One for memory of which the system lets only so much be registered.
    pub(super) fn limited(domain: &Arc<dyn Domain>, access: Access, counters: &Arc<Counters>) -> Self {
        let registry = Self::new(domain, access, counters);
        registry.lock().is_limited = true;
        registry
    }

    /// The key for this side's work with a session's lease; nothing when it is not memory of ours.
    pub(super) fn key_of(&self, lease: &Lease) -> Result<Option<u32>, Fault> {
        let mut registered = self.lock();
        if registered.is_limited {
            registered.register_all(lease)?;
        }
        Ok(registered.region_of(lease)?.map(Region::near_key))
    }

    /// The key for this side's work with a lease of this side's own.
    pub(super) fn own_key_of(&self, lease: &Lease) -> Result<u32, Fault> {
        let mut registered = self.lock();
        Ok(registered.region_of(lease)?.expect("it is memory of ours").near_key())
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

    /// Deregisters everything; whether no device can touch it any more.
    pub(super) fn end(&self) -> bool {
        let mut known = std::mem::take(&mut self.lock().known);
        // All of them are ended, also behind one that cannot be.
        known.iter_mut().map(Known::end).filter(|is_done| !is_done).count() == 0
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

    /// Registers everything that a lease's arena has, or nothing.
    fn register_all(&mut self, lease: &Lease) -> Result<(), Fault> {
        let Some((address, _)) = lease.position() else { return Ok(()) };
        if self.place(address).is_some() {
            return Ok(());
        }
        let Some(memory) = lease.mapped() else { return Ok(()) };
        let bytes = memory.len();
        let place = self.add(memory, PIECE_BYTES);
        for number in 0..self.known[place].pieces.len() {
            if let Err(Fault(text)) = self.region(place, number).map(drop) {
                self.known.remove(place);
                let done = number * PIECE_BYTES;
                return Err(Fault(format!("of {bytes} bytes for chunks {done} could be registered: {text}")));
            }
        }
        Ok(())
    }

    fn place(&self, address: usize) -> Option<usize> {
        self.known.iter().position(|known| known.address == address)
    }

    fn add(&mut self, memory: Mapped, piece_bytes: usize) -> usize {
        // What nobody else keeps cannot be used again.
        self.known.retain(|known| !known.memory.is_last());
        let pieces = std::iter::repeat_with(|| None).take(memory.len().div_ceil(piece_bytes)).collect();
        self.known.push(Known { address: memory.address(), pieces, memory, is_lost: false });
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use pserver_core::memory::{Arena, Budget};

    use super::super::plain::Plain;
    use super::super::provider::Provider;
    use super::super::rough::{Mischief, Plot, Rough};
    use super::*;

    /// A registry that knows a slot of an arena of three pieces; whether somebody keeps the arena's memory afterwards.
    fn keeps(mischief: Option<Mischief>, end: impl FnOnce(Registry)) -> bool {
        let device = Rough::new(Arc::new(Plain::new()));
        let domain = device.station().expect("a station").domain().expect("a domain");
        let mut budget = Budget::new();
        budget.line("slots", CHUNK_BYTES_MAX, 3);
        let arena = Arena::new(&budget).expect("an arena");
        let lease = arena.take(1).expect("a slot");
        let memory = lease.mapped().expect("it is a slot");
        let registry = Registry::new(&domain, Access::FarWrites, &Arc::default());
        registry.far_key_of(&lease).expect("it is registered");
        device.plot(mischief.map(|mischief| Plot { mischief, is_open: true, after: 0 }));
        end(registry);
        drop((lease, arena));
        !memory.is_last()
    }

    #[test]
    fn what_is_not_deregistered_stays_mapped() {
        let all_is_well = |registry: Registry| assert!(registry.end());
        let some_is_not = |registry: Registry| assert!(!registry.end());
        assert!(!keeps(None, drop));
        assert!(!keeps(None, all_is_well));
        assert!(keeps(Some(Mischief::KeepsMemory), drop));
        assert!(keeps(Some(Mischief::KeepsMemory), some_is_not));
    }

    #[test]
    fn where_memory_is_limited_an_arena_is_registered_whole_or_not_at_all() {
        let check = |is_limited: bool, limit: u64, expected: Result<u64, &str>| {
            let device = Rough::new(Arc::new(Plain::new()));
            let domain = device.station().expect("a station").domain().expect("a domain");
            let mut budget = Budget::new();
            budget.line("slots", CHUNK_BYTES_MAX, 5);
            let arena = Arena::new(&budget).expect("an arena");
            let lease = arena.take(1).expect("a slot");
            let make = if is_limited { Registry::limited } else { Registry::new };
            let counters = Arc::<Counters>::default();
            let registry = make(&domain, Access::Near, &counters);
            let mischief = Mischief::Limit(limit);
            device.plot(Some(Plot { mischief, is_open: false, after: 0 }));
            match (registry.key_of(&lease), expected) {
                (Ok(Some(_)), Ok(pieces)) => assert_eq!(counters.registrations.load(Relaxed), pieces),
                (Err(Fault(text)), Err(expected)) => {
                    assert!(text.contains(expected), "{text}");
                    let is_free = registry.lock().known.iter().all(|known| known.pieces.iter().all(Option::is_none));
                    assert!(is_free, "what was registered is free for others");
                }
                (found, expected) => panic!("{found:?}, expected {expected:?}"),
            }
        };
        check(false, u64::MAX, Ok(1));
        check(false, 2, Ok(1));
        check(true, u64::MAX, Ok(3));
        check(true, 3, Ok(3));
        check(true, 2, Err("of 83886080 bytes for chunks 67108864 could be registered: "));
        check(false, 0, Err("so much memory cannot be registered"));
    }
}

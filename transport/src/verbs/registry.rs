//! Registered memory of a protection domain.
//!
//! An arena is registered in pieces of [`PIECE_BYTES`], each on first use: an arena maps the most that may be needed,
//! and registered memory is resident. Slots are reused from the top of a stack, so nothing is registered after the
//! first steps. Where the system limits registered memory, a session's arena is registered whole on first use, so that
//! the limit is hit before the job runs. Memory that cannot be deregistered stays mapped and is never reused.
//!
//! A buffer, and the caller's own memory, is registered in pieces that overlap by a chunk, so that every payload lies
//! in one piece. The caller's own memory is registered whole on first use, or copied if the device refuses any part of
//! it, and is deregistered when the caller asks.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::{Lease, LetGo, Mapped};

use super::provider::{MemoryRegion, ProtectionDomain, RegionAccess};
use super::reasons::VerbsError;

/// Bytes of an arena registered at once. No slot crosses a multiple of it.
const PIECE_BYTES: usize = 2 * CHUNK_BYTES_MAX as usize;
/// Pieces of borrowed memory begin at multiples of this, and are a chunk longer.
const BORROWED_STEP_BYTES: usize = 8 * CHUNK_BYTES_MAX as usize;

const _: () = assert!(PIECE_BYTES.is_multiple_of(CHUNK_BYTES_MAX as usize));

/// Counters of verbs traffic. Any thread may read them.
#[derive(Debug, Default)]
pub struct VerbsCounters {
    /// Payload bytes copied into or out of staging, or through messages.
    pub copied_bytes: AtomicU64,
    /// Payload bytes that a device moved between the two sides' memory.
    pub moved_bytes: AtomicU64,
    /// Registered pieces of memory.
    pub registrations: AtomicU64,
    /// Connections made over verbs.
    pub connections: AtomicU64,
}

impl VerbsCounters {
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

/// A domain's registered memory for one kind of access. Clones share the registry.
#[derive(Clone)]
pub(super) struct MemoryRegistry(Arc<Mutex<RegistryState>>);

struct RegistryState {
    /// Declared before the domain, which must outlive its regions: arenas, and borrowed memory by its start address.
    memories: Vec<RegisteredMemory>,
    borrowed: BTreeMap<usize, RegisteredMemory>,
    registrar: Registrar,
    /// Whether an arena is registered whole on first use.
    is_limited: bool,
}

/// The parameters of a registration.
struct Registrar {
    domain: Arc<dyn ProtectionDomain>,
    access: RegionAccess,
    counters: Arc<VerbsCounters>,
}

struct RegisteredMemory {
    address: usize,
    /// Declared before the memory: regions refer to it and do not keep it alive.
    pieces: Vec<Option<Box<dyn MemoryRegion>>>,
    /// The distance between the starts of pieces, and their length.
    step: usize,
    reach: usize,
    memory: Mapped,
    /// Whether a part could not be deregistered.
    is_quarantined: bool,
    /// Whether the device refused a part of the caller's memory.
    is_refused: bool,
    /// The callback by which the caller has it deregistered; kept as long as the entry.
    let_go: Option<Arc<LetGo>>,
}

impl Registrar {
    fn register(&self, memory: &Mapped, piece: (usize, usize)) -> Result<Box<dyn MemoryRegion>, VerbsError> {
        let region = self.domain.register(memory, piece, self.access)?;
        self.counters.registrations.fetch_add(1, Relaxed);
        Ok(region)
    }
}

impl RegisteredMemory {
    fn new(memory: Mapped, (step, reach): (usize, usize)) -> Self {
        let pieces = std::iter::repeat_with(|| None).take(memory.len().div_ceil(step)).collect();
        let address = memory.address();
        Self { address, pieces, step, reach, memory, is_quarantined: false, is_refused: false, let_go: None }
    }

    /// The region of the piece that contains `offset`, registered on first use.
    fn region(&mut self, offset: usize, registrar: &Registrar) -> Result<&dyn MemoryRegion, VerbsError> {
        let number = offset / self.step;
        let piece = &mut self.pieces[number];
        if piece.is_none() {
            let begin = number * self.step;
            *piece = Some(registrar.register(&self.memory, (begin, self.reach.min(self.memory.len() - begin)))?);
        }
        Ok(piece.as_deref().expect("it was just put there"))
    }

    /// Registers all pieces; on failure the bytes registered so far and the error.
    fn register_all(&mut self, registrar: &Registrar) -> Result<(), (usize, VerbsError)> {
        // Pieces are registered in order, so the last one tells whether all are.
        if self.pieces.last().is_none_or(Option::is_some) {
            return Ok(());
        }
        let step = self.step;
        (0..self.pieces.len())
            .map(|number| number * step)
            .try_for_each(|begin| self.region(begin, registrar).map(drop).map_err(|fault| (begin, fault)))
    }

    /// Deregisters the memory; whether all of it was. A part that cannot be deregistered stays mapped for good, and its
    /// release callback reports failure.
    fn end(&mut self) -> bool {
        for mut region in self.pieces.drain(..).flatten() {
            if let Err(fault) = region.close() {
                tracing::error!(%fault, "memory could not be deregistered; it is not used again");
                let stays: Arc<LetGo> = Arc::new(|| false);
                self.memory.until(&stays);
                std::mem::forget((self.memory.clone(), region, stays));
                self.is_quarantined = true;
            }
        }
        !self.is_quarantined
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        self.end();
    }
}

impl MemoryRegistry {
    pub(super) fn new(domain: &Arc<dyn ProtectionDomain>, access: RegionAccess, counters: &Arc<VerbsCounters>) -> Self {
        let (domain, counters) = (Arc::clone(domain), Arc::clone(counters));
        let registrar = Registrar { domain, access, counters };
        let registered =
            RegistryState { memories: Vec::new(), borrowed: BTreeMap::new(), registrar, is_limited: false };
        Self(Arc::new(Mutex::new(registered)))
    }

    /// A registry for a system that limits registered memory.
    pub(super) fn limited(
        domain: &Arc<dyn ProtectionDomain>,
        access: RegionAccess,
        counters: &Arc<VerbsCounters>,
    ) -> Self {
        let registry = Self::new(domain, access, counters);
        registry.lock().is_limited = true;
        registry
    }

    /// The local key of a session's lease; nothing when the lease is not in this process's arenas.
    pub(super) fn local_key_of(&self, lease: &Lease) -> Result<Option<u32>, VerbsError> {
        let mut registered = self.lock();
        if registered.is_limited {
            registered.register_all(lease)?;
        }
        Ok(registered.region_of(lease)?.map(MemoryRegion::local_key))
    }

    /// The local key of a lease of the transport's own.
    pub(super) fn local_key_of_own(&self, lease: &Lease) -> Result<u32, VerbsError> {
        let mut registered = self.lock();
        Ok(registered.region_of(lease)?.expect("it is memory of ours").local_key())
    }

    /// The remote key of a lease of staging.
    pub(super) fn remote_key_of(&self, lease: &Lease) -> Result<u32, VerbsError> {
        let mut registered = self.lock();
        Ok(registered.region_of(lease)?.expect("staging is memory of ours").remote_key())
    }

    /// The remote key at `offset` of borrowed memory; nothing when it is the caller's own and the device refuses it.
    pub(super) fn remote_key_within(&self, memory: Mapped, offset: usize) -> Result<Option<u32>, VerbsError> {
        let mut registered = self.lock();
        let RegistryState { borrowed, registrar, .. } = &mut *registered;
        let address = memory.address();
        if borrowed.get(&address).is_none_or(|memories| !memories.memory.is(&memory)) {
            // Memory with no other owner cannot be used again.
            borrowed.retain(|_, memories| !memories.memory.is_last());
            borrowed.insert(address, self.borrowed(memory));
        }
        let memories = borrowed.get_mut(&address).expect("it was just put there");
        if memories.is_refused {
            return Ok(None);
        }
        if memories.memory.is_callers()
            && let Err((_, fault)) = memories.register_all(registrar)
        {
            tracing::warn!(%fault, memory = ?memories.memory, "the caller's memory is copied");
            // The peer was told no key of it yet. The freed registrations are for staging.
            memories.end();
            memories.is_refused = true;
            return Ok(None);
        }
        memories.region(offset, registrar).map(MemoryRegion::remote_key).map(Some)
    }

    /// An entry of borrowed memory with nothing registered.
    fn borrowed(&self, memory: Mapped) -> RegisteredMemory {
        let mut memories =
            RegisteredMemory::new(memory, (BORROWED_STEP_BYTES, BORROWED_STEP_BYTES + CHUNK_BYTES_MAX as usize));
        let (registry, address) = (Arc::downgrade(&self.0), memories.address);
        let let_go = move || registry.upgrade().is_none_or(|registry| Self(registry).let_go(address));
        let let_go = memories.let_go.insert(Arc::new(let_go));
        memories.memory.until(let_go);
        memories
    }

    /// Deregisters the memory at this address; whether no device can access it any more.
    fn let_go(&self, address: usize) -> bool {
        let memories = self.lock().borrowed.remove(&address);
        memories.is_none_or(|mut memories| memories.end())
    }

    /// Deregisters everything; whether no device can access it any more.
    pub(super) fn end(&self) -> bool {
        let mut registered = self.lock();
        let (mut memories, mut borrowed) =
            (std::mem::take(&mut registered.memories), std::mem::take(&mut registered.borrowed));
        drop(registered);
        // Every entry is deregistered, also after one that fails.
        memories.iter_mut().chain(borrowed.values_mut()).map(RegisteredMemory::end).filter(|is_done| !is_done).count()
            == 0
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RegistryState> {
        // Every operation leaves the state consistent, so a panic elsewhere does no harm.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RegistryState {
    fn region_of(&mut self, lease: &Lease) -> Result<Option<&dyn MemoryRegion>, VerbsError> {
        let Some((address, offset)) = lease.position() else { return Ok(None) };
        let index_of = match (self.index_of(address), lease.mapped()) {
            (Some(index_of), _) => index_of,
            (None, Some(memory)) => self.add(memory),
            (None, None) => return Ok(None),
        };
        self.region(index_of, offset).map(Some)
    }

    /// Registers a lease's whole arena, or nothing.
    fn register_all(&mut self, lease: &Lease) -> Result<(), VerbsError> {
        let Some((address, _)) = lease.position() else { return Ok(()) };
        if self.index_of(address).is_some() {
            return Ok(());
        }
        let Some(memory) = lease.mapped() else { return Ok(()) };
        let bytes = memory.len();
        let index_of = self.add(memory);
        self.memories[index_of].register_all(&self.registrar).map_err(|(done, VerbsError(text))| {
            self.memories.remove(index_of);
            VerbsError(format!("of {bytes} bytes for chunks {done} could be registered: {text}"))
        })
    }

    fn index_of(&self, address: usize) -> Option<usize> {
        self.memories.iter().position(|memories| memories.address == address)
    }

    fn add(&mut self, memory: Mapped) -> usize {
        // Memory with no other owner cannot be used again.
        self.memories.retain(|memories| !memories.memory.is_last());
        self.memories.push(RegisteredMemory::new(memory, (PIECE_BYTES, PIECE_BYTES)));
        self.memories.len() - 1
    }

    fn region(&mut self, index: usize, offset: usize) -> Result<&dyn MemoryRegion, VerbsError> {
        self.memories[index].region(offset, &self.registrar)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use pserver_core::memory::{Arena, Budget, Buffer, Mapping, lend};

    use super::super::faulty_device::{DeviceFault, FaultInjection, FaultyDevice};
    use super::super::provider::RdmaDevice;
    use super::super::software_device::SoftwareDevice;
    use super::*;

    /// Ends a registry that knows a slot of an arena of three pieces; whether the arena's memory stays mapped.
    fn keeps_mapped(fault: Option<DeviceFault>, end: impl FnOnce(MemoryRegistry)) -> bool {
        let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
        let domain = device.completion_channel().expect("a completion channel").domain().expect("a domain");
        let mut budget = Budget::new();
        budget.line("slots", CHUNK_BYTES_MAX, 3);
        let arena = Arena::new(&budget).expect("an arena");
        let lease = arena.take(1).expect("a slot");
        let memory = lease.mapped().expect("it is a slot");
        let registry = MemoryRegistry::new(&domain, RegionAccess::Remote, &Arc::default());
        registry.remote_key_of(&lease).expect("it is registered");
        device.inject(fault.map(|fault| FaultInjection { fault, is_open: true, after: 0 }));
        end(registry);
        drop((lease, arena));
        !memory.is_last()
    }

    #[test]
    fn memory_that_cannot_be_deregistered_stays_mapped() {
        let all_is_well = |registry: MemoryRegistry| assert!(registry.end());
        let some_is_not = |registry: MemoryRegistry| assert!(!registry.end());
        assert!(!keeps_mapped(None, drop));
        assert!(!keeps_mapped(None, all_is_well));
        assert!(keeps_mapped(Some(DeviceFault::DeregistrationFails), drop));
        assert!(keeps_mapped(Some(DeviceFault::DeregistrationFails), some_is_not));
    }

    #[test]
    fn with_limited_memory_an_arena_is_registered_whole_or_not_at_all() {
        let check = |is_limited: bool, limit: u64, expected: Result<u64, &str>| {
            let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
            let domain = device.completion_channel().expect("a completion channel").domain().expect("a domain");
            let mut budget = Budget::new();
            budget.line("slots", CHUNK_BYTES_MAX, 5);
            let arena = Arena::new(&budget).expect("an arena");
            let lease = arena.take(1).expect("a slot");
            let make = if is_limited { MemoryRegistry::limited } else { MemoryRegistry::new };
            let counters = Arc::<VerbsCounters>::default();
            let registry = make(&domain, RegionAccess::Local, &counters);
            let fault = DeviceFault::RegistrationLimit(limit);
            device.inject(Some(FaultInjection { fault, is_open: false, after: 0 }));
            match (registry.local_key_of(&lease), expected) {
                (Ok(Some(_)), Ok(pieces)) => assert_eq!(counters.registrations.load(Relaxed), pieces),
                (Err(VerbsError(text)), Err(expected)) => {
                    assert!(text.contains(expected), "{text}");
                    let is_free =
                        registry.lock().memories.iter().all(|memories| memories.pieces.iter().all(Option::is_none));
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
        check(false, 0, Err("memory of this size cannot be registered"));
    }

    /// The piece of borrowed memory of this key.
    fn piece(software_device: &SoftwareDevice, start: usize, key: u32) -> (usize, usize) {
        let regions = software_device.regions();
        let (_, address, bytes) = regions.into_iter().find(|(one, ..)| *one == key).expect("it is registered");
        let number = |number: u64| usize::try_from(number).expect("it is this process's");
        (number(address) - start, number(bytes))
    }

    #[test]
    fn a_payload_in_lent_memory_lies_in_one_piece() {
        const WHOLE: usize = 300 * 1024 * 1024;
        let software_device = SoftwareDevice::new();
        let domain = software_device.completion_channel().expect("a completion channel").domain().expect("a domain");
        let counters = Arc::<VerbsCounters>::default();
        let registry = MemoryRegistry::new(&domain, RegionAccess::Remote, &counters);
        // Untouched pages take no memory.
        let buffer = Buffer::new(WHOLE).expect("this system shares memory");
        let begins =
            [0, 100, BORROWED_STEP_BYTES - 4, BORROWED_STEP_BYTES, WHOLE - CHUNK_BYTES_MAX as usize, WHOLE - 1];
        for (begin, registered) in begins.into_iter().zip([1, 1, 1, 2, 3, 3]) {
            let payload = &buffer[begin..WHOLE.min(begin + CHUNK_BYTES_MAX as usize)];
            let key = lend(|book| {
                let (memory, offset) = book.read(payload).within(buffer.mapping()).mapped().expect("it lies there");
                registry.remote_key_within(memory, offset).expect("it is registered").expect("it is the library's")
            });
            let (start, bytes) = piece(&software_device, buffer.start().addr(), key);
            assert!(start <= begin && begin + payload.len() <= start + bytes, "{begin}: {start} and {bytes}");
            assert_eq!(counters.registrations.load(Relaxed), registered, "each when it is used");
        }
    }

    #[test]
    fn callers_memory_is_registered_whole_or_not_at_all() {
        let check = |limit: u64, expected: u64| {
            let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
            let domain = device.completion_channel().expect("a completion channel").domain().expect("a domain");
            let counters = Arc::<VerbsCounters>::default();
            let registry = MemoryRegistry::new(&domain, RegionAccess::Remote, &counters);
            // Three pieces of untouched memory.
            let own = vec![0_u8; 2 * BORROWED_STEP_BYTES + 1];
            let mapping = Arc::new(Mapping::of_caller(own.as_ptr().addr(), own.len()).expect("it is some bytes"));
            device.inject(Some(FaultInjection {
                fault: DeviceFault::RegistrationLimit(limit),
                is_open: true,
                after: 0,
            }));
            let key = lend(|book| {
                let borrowed = book.read(&own[..100]).within(&mapping).mapped();
                let (memory, offset) = borrowed.expect("it lies there");
                registry.remote_key_within(memory, offset)
            });
            assert_eq!(key.expect("it is registered or copied").is_some(), limit >= 3, "{limit} pieces");
            assert_eq!(counters.registrations.load(Relaxed), expected, "{limit} pieces");
            let held = registry.lock().borrowed.values().flat_map(|memories| &memories.pieces).flatten().count();
            assert_eq!(held, if limit >= 3 { 3 } else { 0 }, "{limit} pieces: nothing is kept of what is copied");
        };
        check(0, 0);
        check(1, 1);
        check(2, 2);
        check(3, 3);
    }

    #[test]
    fn callers_memory_that_the_device_refuses_is_copied_and_not_retried() {
        let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
        let domain = device.completion_channel().expect("a completion channel").domain().expect("a domain");
        let registry = MemoryRegistry::new(&domain, RegionAccess::Remote, &Arc::default());
        let (own, buffer) = ([0; 100], Buffer::new(100).expect("this system shares memory"));
        let mapping = Arc::new(Mapping::of_caller(own.as_ptr().addr(), 100).expect("it is some bytes"));
        let key = |bytes: &[u8], mapping| {
            let borrowed = lend(|book| book.read(bytes).within(mapping).mapped());
            let (memory, offset) = borrowed.expect("it lies there");
            registry.remote_key_within(memory, offset)
        };
        device.inject(Some(FaultInjection { fault: DeviceFault::RegistrationFails, is_open: true, after: 0 }));
        assert!(matches!(key(&own, &mapping), Ok(None)), "it is copied");
        assert!(key(&buffer, buffer.mapping()).is_err(), "a buffer is the library's own, and is a card's");
        device.inject(None);
        assert!(matches!(key(&own, &mapping), Ok(None)), "it stays so on this connection");
        mapping.let_go().expect("there is nothing to let go of");
        assert!(matches!(key(&own, &mapping), Ok(Some(_))), "the caller gave it anew");
        device.inject(Some(FaultInjection { fault: DeviceFault::DeregistrationFails, is_open: true, after: 0 }));
        drop(registry);
        device.inject(None);
        assert!(mapping.let_go().is_err(), "also when the connection is over");
    }
}

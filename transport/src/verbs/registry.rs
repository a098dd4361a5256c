//! Which memory is registered in a domain.
//!
//! An arena is registered in pieces of [`PIECE_BYTES`], each when something in it is first used: it is mapped for the
//! most that can be needed, and what is registered is resident. Slots are given out again from the top of a stack, so
//! after the first steps nothing new is registered. Where the system limits what can be registered, a session's arena
//! is registered whole when the first of it is used: what will not do is then known before the job is under way. What
//! cannot be deregistered stays mapped, and is given to nobody.
//!
//! A buffer, and memory of the caller's, is registered in pieces too, which lie over one another by a chunk, so that
//! every payload lies in one of them. Memory of the caller's is registered whole when it is first used, or is copied
//! if the device refuses any of it; what is registered of it is let go of when the caller asks.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::{Lease, LetGo, Mapped};

use super::provider::{Access, Domain, Fault, Region};

/// What is registered of an arena at once. No slot lies across a multiple of it.
const PIECE_BYTES: usize = 2 * CHUNK_BYTES_MAX as usize;
/// A piece of what is lent begins at each multiple of this, and has a chunk more.
const LENT_BYTES: usize = 8 * CHUNK_BYTES_MAX as usize;

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
    /// Before the domain, whose regions they are: arenas, and what is lent by where it begins.
    known: Vec<Known>,
    lent: BTreeMap<usize, Known>,
    how: How,
    /// Whether what does not fit should be known early.
    is_limited: bool,
}

/// How memory is registered.
struct How {
    domain: Arc<dyn Domain>,
    access: Access,
    counters: Arc<Counters>,
}

struct Known {
    address: usize,
    /// Before the memory, which they are regions of and do not keep.
    pieces: Vec<Option<Box<dyn Region>>>,
    /// Where pieces begin, and how long they are.
    step: usize,
    reach: usize,
    memory: Mapped,
    /// Whether some of it could not be deregistered.
    is_lost: bool,
    /// Whether the device refused some of it, which is the caller's.
    is_refused: bool,
    /// How its caller has it let go of; kept for as long as it is known.
    let_go: Option<Arc<LetGo>>,
}

impl How {
    fn register(&self, memory: &Mapped, piece: (usize, usize)) -> Result<Box<dyn Region>, Fault> {
        let region = self.domain.register(memory, piece, self.access)?;
        self.counters.registrations.fetch_add(1, Relaxed);
        Ok(region)
    }
}

impl Known {
    fn new(memory: Mapped, (step, reach): (usize, usize)) -> Self {
        let pieces = std::iter::repeat_with(|| None).take(memory.len().div_ceil(step)).collect();
        let address = memory.address();
        Self { address, pieces, step, reach, memory, is_lost: false, is_refused: false, let_go: None }
    }

    /// The region of the piece that begins at or before `offset`.
    fn region(&mut self, offset: usize, how: &How) -> Result<&dyn Region, Fault> {
        let number = offset / self.step;
        let piece = &mut self.pieces[number];
        if piece.is_none() {
            let begin = number * self.step;
            *piece = Some(how.register(&self.memory, (begin, self.reach.min(self.memory.len() - begin)))?);
        }
        Ok(piece.as_deref().expect("it was just put there"))
    }

    /// Registers every piece that is not; else how many bytes could be, and why no more.
    fn register_all(&mut self, how: &How) -> Result<(), (usize, Fault)> {
        // They are registered in order, so the last one says whether all are.
        if self.pieces.last().is_none_or(Option::is_some) {
            return Ok(());
        }
        let step = self.step;
        (0..self.pieces.len())
            .map(|number| number * step)
            .try_for_each(|begin| self.region(begin, how).map(drop).map_err(|fault| (begin, fault)))
    }

    /// Deregisters it; whether that was done. What cannot be deregistered stays mapped for good, and who asks whether
    /// it was let go of is told that it was not.
    fn end(&mut self) -> bool {
        for mut region in self.pieces.drain(..).flatten() {
            if let Err(fault) = region.close() {
                tracing::error!(%fault, "memory could not be deregistered; it is not used again");
                let stays: Arc<LetGo> = Arc::new(|| false);
                self.memory.until(&stays);
                std::mem::forget((self.memory.clone(), region, stays));
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
        let how = How { domain, access, counters };
        let registered = Registered { known: Vec::new(), lent: BTreeMap::new(), how, is_limited: false };
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

    /// The other side's key for what begins at `offset` of memory that is lent; nothing when it is the caller's and
    /// the device refuses it.
    pub(super) fn far_key_within(&self, memory: Mapped, offset: usize) -> Result<Option<u32>, Fault> {
        let mut registered = self.lock();
        let Registered { lent, how, .. } = &mut *registered;
        let address = memory.address();
        if lent.get(&address).is_none_or(|known| !known.memory.is(&memory)) {
            // What nobody else keeps cannot be used again.
            lent.retain(|_, known| !known.memory.is_last());
            lent.insert(address, self.lent(memory));
        }
        let known = lent.get_mut(&address).expect("it was just put there");
        if known.is_refused {
            return Ok(None);
        }
        if known.memory.is_callers()
            && let Err((_, fault)) = known.register_all(how)
        {
            tracing::warn!(%fault, memory = ?known.memory, "memory of the caller's is copied");
            // Nobody was told a key of it yet. What it took is for what it is copied into.
            known.end();
            known.is_refused = true;
            return Ok(None);
        }
        known.region(offset, how).map(Region::far_key).map(Some)
    }

    /// Something that is lent, of which nothing is registered yet.
    fn lent(&self, memory: Mapped) -> Known {
        let mut known = Known::new(memory, (LENT_BYTES, LENT_BYTES + CHUNK_BYTES_MAX as usize));
        let (registry, address) = (Arc::downgrade(&self.0), known.address);
        let let_go = move || registry.upgrade().is_none_or(|registry| Self(registry).let_go(address));
        let let_go = known.let_go.insert(Arc::new(let_go));
        known.memory.until(let_go);
        known
    }

    /// Deregisters what begins there; whether no device can touch it any more.
    fn let_go(&self, address: usize) -> bool {
        let known = self.lock().lent.remove(&address);
        known.is_none_or(|mut known| known.end())
    }

    /// Deregisters everything; whether no device can touch it any more.
    pub(super) fn end(&self) -> bool {
        let mut registered = self.lock();
        let (mut known, mut lent) = (std::mem::take(&mut registered.known), std::mem::take(&mut registered.lent));
        drop(registered);
        // All of them are ended, also behind one that cannot be.
        known.iter_mut().chain(lent.values_mut()).map(Known::end).filter(|is_done| !is_done).count() == 0
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
            (None, Some(memory)) => self.add(memory),
            (None, None) => return Ok(None),
        };
        self.region(place, offset).map(Some)
    }

    /// Registers everything that a lease's arena has, or nothing.
    fn register_all(&mut self, lease: &Lease) -> Result<(), Fault> {
        let Some((address, _)) = lease.position() else { return Ok(()) };
        if self.place(address).is_some() {
            return Ok(());
        }
        let Some(memory) = lease.mapped() else { return Ok(()) };
        let bytes = memory.len();
        let place = self.add(memory);
        self.known[place].register_all(&self.how).map_err(|(done, Fault(text))| {
            self.known.remove(place);
            Fault(format!("of {bytes} bytes for chunks {done} could be registered: {text}"))
        })
    }

    fn place(&self, address: usize) -> Option<usize> {
        self.known.iter().position(|known| known.address == address)
    }

    fn add(&mut self, memory: Mapped) -> usize {
        // What nobody else keeps cannot be used again.
        self.known.retain(|known| !known.memory.is_last());
        self.known.push(Known::new(memory, (PIECE_BYTES, PIECE_BYTES)));
        self.known.len() - 1
    }

    fn region(&mut self, place: usize, offset: usize) -> Result<&dyn Region, Fault> {
        self.known[place].region(offset, &self.how)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use pserver_core::memory::{Arena, Budget, Buffer, Mapping, lend};

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

    /// The piece of lent memory that a key stands for.
    fn piece(plain: &Plain, start: usize, key: u32) -> (usize, usize) {
        let regions = plain.regions();
        let (_, address, bytes) = regions.into_iter().find(|(one, ..)| *one == key).expect("it is registered");
        let number = |number: u64| usize::try_from(number).expect("it is this process's");
        (number(address) - start, number(bytes))
    }

    #[test]
    fn a_payload_in_lent_memory_lies_in_one_piece() {
        const WHOLE: usize = 300 * 1024 * 1024;
        let plain = Plain::new();
        let domain = plain.station().expect("a station").domain().expect("a domain");
        let counters = Arc::<Counters>::default();
        let registry = Registry::new(&domain, Access::FarReads, &counters);
        // What nobody touches takes no memory.
        let buffer = Buffer::new(WHOLE).expect("this system shares memory");
        let begins = [0, 100, LENT_BYTES - 4, LENT_BYTES, WHOLE - CHUNK_BYTES_MAX as usize, WHOLE - 1];
        for (begin, registered) in begins.into_iter().zip([1, 1, 1, 2, 3, 3]) {
            let payload = &buffer[begin..WHOLE.min(begin + CHUNK_BYTES_MAX as usize)];
            let key = lend(|book| {
                let (memory, offset) = book.read(payload).within(buffer.mapping()).mapped().expect("it lies there");
                registry.far_key_within(memory, offset).expect("it is registered").expect("it is the library's")
            });
            let (start, bytes) = piece(&plain, buffer.start().addr(), key);
            assert!(start <= begin && begin + payload.len() <= start + bytes, "{begin}: {start} and {bytes}");
            assert_eq!(counters.registrations.load(Relaxed), registered, "each when it is used");
        }
    }

    #[test]
    fn memory_of_the_callers_is_registered_whole_or_not_at_all() {
        let check = |limit: u64, expected: u64| {
            let device = Rough::new(Arc::new(Plain::new()));
            let domain = device.station().expect("a station").domain().expect("a domain");
            let counters = Arc::<Counters>::default();
            let registry = Registry::new(&domain, Access::FarReads, &counters);
            // Three pieces, of which nothing is touched.
            let own = vec![0_u8; 2 * LENT_BYTES + 1];
            let mapping = Arc::new(Mapping::of_caller(own.as_ptr().addr(), own.len()).expect("it is some bytes"));
            device.plot(Some(Plot { mischief: Mischief::Limit(limit), is_open: true, after: 0 }));
            let key = lend(|book| {
                let lent = book.read(&own[..100]).within(&mapping).mapped();
                let (memory, offset) = lent.expect("it lies there");
                registry.far_key_within(memory, offset)
            });
            assert_eq!(key.expect("it is registered or copied").is_some(), limit >= 3, "{limit} pieces");
            assert_eq!(counters.registrations.load(Relaxed), expected, "{limit} pieces");
            let held = registry.lock().lent.values().flat_map(|known| &known.pieces).flatten().count();
            assert_eq!(held, if limit >= 3 { 3 } else { 0 }, "{limit} pieces: nothing is kept of what is copied");
        };
        check(0, 0);
        check(1, 1);
        check(2, 2);
        check(3, 3);
    }

    #[test]
    fn memory_of_the_callers_that_the_device_refuses_is_copied_and_tried_no_more() {
        let device = Rough::new(Arc::new(Plain::new()));
        let domain = device.station().expect("a station").domain().expect("a domain");
        let registry = Registry::new(&domain, Access::FarReads, &Arc::default());
        let (own, buffer) = ([0; 100], Buffer::new(100).expect("this system shares memory"));
        let mapping = Arc::new(Mapping::of_caller(own.as_ptr().addr(), 100).expect("it is some bytes"));
        let key = |bytes: &[u8], mapping| {
            let lent = lend(|book| book.read(bytes).within(mapping).mapped());
            let (memory, offset) = lent.expect("it lies there");
            registry.far_key_within(memory, offset)
        };
        device.plot(Some(Plot { mischief: Mischief::RegistersNothing, is_open: true, after: 0 }));
        assert!(matches!(key(&own, &mapping), Ok(None)), "it is copied");
        assert!(key(&buffer, buffer.mapping()).is_err(), "a buffer is the library's own, and is a card's");
        device.plot(None);
        assert!(matches!(key(&own, &mapping), Ok(None)), "it stays so on this connection");
        mapping.let_go().expect("there is nothing to let go of");
        assert!(matches!(key(&own, &mapping), Ok(Some(_))), "the caller gave it anew");
        device.plot(Some(Plot { mischief: Mischief::KeepsMemory, is_open: true, after: 0 }));
        drop(registry);
        device.plot(None);
        assert!(mapping.let_go().is_err(), "also when the connection is over");
    }
}

//! Memory of the caller that the client knows: buffers that the library allocated, and memory that the caller
//! registered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pserver_core::error::Failure;
use pserver_core::memory::{Buffer, Mapping};
use pserver_kernels::cuda::{ForeignClaim, ForeignMemory, ForeignStream, MemoryOwner};

use super::Client;

/// The path of a gradient to servers of the same machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferPath {
    /// Servers read it in the caller's buffer.
    InPlace,
    /// It is copied into shared memory.
    Copied,
}

/// Known ranges of the caller's memory, by address.
#[derive(Default)]
pub(super) struct CallerMemory(Mutex<BTreeMap<usize, KnownMemory>>);

/// A range of the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    address: usize,
    bytes: usize,
}

impl Extent {
    /// `bytes` bytes from an address on.
    #[must_use]
    pub fn new(address: usize, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// The memory of a slice.
    pub fn of<T>(slice: &[T]) -> Self {
        Self::new(slice.as_ptr().addr(), size_of_val(slice))
    }
}

/// Keeps buffers from being freed while a call uses them.
#[derive(Default)]
#[must_use = "the buffers are held as long as this is"]
pub struct HeldBuffers(#[expect(dead_code, reason = "it is held, and dropped with its call")] Vec<Arc<Mapping>>);

struct KnownMemory {
    bytes: usize,
    origin: MemoryOrigin,
}

/// Reason for a refused `unregister`.
const USED: &str = "is used by a call that is in progress or was not waited for";

/// Kind and owner of known memory.
enum MemoryOrigin {
    /// A buffer that the library allocated.
    Buffer(Weak<Mapping>),
    /// Registered host memory: network cards reach it, other processes do not.
    Host(Arc<Mapping>),
    /// Registered managed memory. The driver migrates its pages, so that a network card's mapping would become stale.
    Managed,
    /// Registered device memory.
    Device(Arc<ForeignMemory>),
    /// Device memory that is a replica of the memory registered at this address.
    Replica(usize),
}

impl KnownMemory {
    fn is_gone(&self) -> bool {
        matches!(&self.origin, MemoryOrigin::Buffer(mapping) if mapping.strong_count() == 0)
    }

    fn mapping(&self) -> Option<Arc<Mapping>> {
        match &self.origin {
            MemoryOrigin::Buffer(mapping) => mapping.upgrade(),
            MemoryOrigin::Host(mapping) => Some(Arc::clone(mapping)),
            MemoryOrigin::Device(_) | MemoryOrigin::Replica(_) | MemoryOrigin::Managed => None,
        }
    }
}

impl Client {
    /// Allocates a buffer for gradients. Servers that are connected through shared memory read a gradient in place when
    /// it begins at a multiple of 64 bytes and is sent with [`Client::push_pull`] or [`Client::push_pull_view`].
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, Failure> {
        let buffer = Buffer::new(bytes)?;
        let mapping = Arc::downgrade(buffer.mapping());
        self.buffers().add(buffer.start().addr(), buffer.mapping().len(), MemoryOrigin::Buffer(mapping))?;
        Ok(buffer)
    }

    /// The path of gradients in this memory to servers of the same machine; none for unknown memory.
    #[must_use]
    pub fn path(&self, address: usize) -> Option<TransferPath> {
        self.buffers().path(address)
    }

    /// Notes memory of the caller's own, of the host or of a device. A network card that moves gradients and values
    /// reads and writes memory of the host where it is; through shared memory and over TCP it is copied. It stays where
    /// it is until [`Client::unregister`] or the end of the client, which is the caller's to see to. Memory of a device
    /// is read and written in the order of `stream`, or of its context's default stream.
    ///
    /// # Errors
    /// When some of it is known already, or it is no memory.
    pub fn register(&self, address: usize, bytes: usize, stream: Option<ForeignStream>) -> Result<(), Failure> {
        let origin = match ForeignMemory::find(address, bytes)? {
            MemoryOwner::Device(memory) => MemoryOrigin::Device(memory.in_stream(stream.unwrap_or_default())),
            MemoryOwner::Managed => MemoryOrigin::Managed,
            MemoryOwner::Host => MemoryOrigin::Host(Arc::new(Mapping::of_caller(address, bytes)?)),
        };
        self.buffers().add(address, bytes, origin)
    }

    /// Says that memory is one with memory of a device that was registered as a whole from `of` on: a gradient is the
    /// sum of both, and of all others that are, and a value is written to all. It stays until `of` is forgotten.
    ///
    /// # Errors
    /// When nothing on a device was registered there, or a call uses it; when the other is not on a device, has another
    /// length, or shares bytes with what there is.
    pub fn register_replica(&self, of: usize, address: usize, bytes: usize) -> Result<(), Failure> {
        self.buffers().replicate(of, address, bytes)
    }

    /// Memory of a device that was registered, for one call; nothing for all other memory.
    ///
    /// # Errors
    /// When not all of it is registered, or another call has some of it.
    pub fn claim(&self, address: usize, bytes: usize) -> Result<Option<ForeignClaim>, Failure> {
        self.buffers().claim(address, bytes)
    }

    /// Removes registered memory, and its registration with network cards.
    ///
    /// # Errors
    /// When it is not known, or a call uses it; when a card does not let go of it.
    pub fn unregister(&self, address: usize) -> Result<(), Failure> {
        self.buffers().forget(address)
    }

    /// Holds the buffers that a call reads or writes, before it takes the client lock.
    pub fn hold(&self, memory: impl IntoIterator<Item = Extent>) -> HeldBuffers {
        self.buffers().hold(memory)
    }

    /// Frees a buffer, or returns it while a call uses it.
    pub fn free(&self, buffer: Buffer) -> Result<(), (Buffer, Failure)> {
        self.buffers().free(buffer)
    }
}

impl CallerMemory {
    /// Marks buffers whose descriptors the program has closed, so that they are copied.
    pub(super) fn hide_closed(&self) {
        self.known().values().filter_map(KnownMemory::mapping).for_each(|mapping| mapping.hide_closed());
    }

    fn add(&self, address: usize, bytes: usize, origin: MemoryOrigin) -> Result<(), Failure> {
        let mut known = self.known();
        known.retain(|_, one| !one.is_gone());
        let end = address.checked_add(bytes).filter(|end| *end > address);
        let end = end.ok_or_else(|| Failure::call(format!("{bytes} bytes at {address:#x}; expected 1 or more")))?;
        if let Some((start, other)) = known.range(..end).next_back()
            && start + other.bytes > address
        {
            return Err(Failure::call(format!(
                "{bytes} bytes at {address:#x} overlap {} bytes at {start:#x}, which are memory of this client already",
                other.bytes
            )));
        }
        known.insert(address, KnownMemory { bytes, origin });
        Ok(())
    }

    fn forget(&self, address: usize) -> Result<(), Failure> {
        let mut known = self.known();
        let wrong = |what: &str| Err(Failure::call(format!("{address:#x} {what}")));
        match known.get(&address).map(|one| &one.origin) {
            None => wrong("is not registered with this client; expected the start of registered memory"),
            Some(MemoryOrigin::Replica(of)) => {
                wrong(&format!("is a replica of memory at {of:#x}; expected {of:#x}, which also forgets its replicas"))
            }
            Some(MemoryOrigin::Buffer(_)) => wrong("is a buffer of this library; expected registered memory"),
            // Every claim and every loan holds a copy of the `Arc`, taken under this lock.
            Some(MemoryOrigin::Device(memory)) if 1 < Arc::strong_count(memory) => wrong(USED),
            Some(MemoryOrigin::Host(memory)) if 1 < Arc::strong_count(memory) => wrong(USED),
            Some(MemoryOrigin::Host(_) | MemoryOrigin::Device(_) | MemoryOrigin::Managed) => {
                let forgotten = known.remove(&address).map(|one| one.origin);
                known.retain(|_, one| !matches!(one.origin, MemoryOrigin::Replica(of) if of == address));
                match forgotten {
                    Some(MemoryOrigin::Host(memory)) => memory.let_go(),
                    _ => Ok(()),
                }
            }
        }
    }

    fn replicate(&self, of: usize, address: usize, bytes: usize) -> Result<(), Failure> {
        let memory = match self.known().get(&of).map(|one| &one.origin) {
            Some(MemoryOrigin::Device(memory)) => Arc::clone(memory),
            _ => {
                let text = format!("{of:#x} is not the start of registered device memory");
                return Err(Failure::Call(text));
            }
        };
        self.add(address, bytes, MemoryOrigin::Replica(of))?;
        memory.replicate(address, bytes).inspect_err(|_| {
            self.known().remove(&address);
        })
    }

    fn claim(&self, address: usize, bytes: usize) -> Result<Option<ForeignClaim>, Failure> {
        let known = self.known();
        let Some((start, one)) = known.range(..=address).next_back() else { return Ok(None) };
        match &one.origin {
            MemoryOrigin::Device(memory) if address - start < one.bytes => {
                memory.claim(address - start, bytes).map(Some)
            }
            MemoryOrigin::Replica(of) if address - start < one.bytes => Err(Failure::call(format!(
                "{address:#x} lies in a replica of memory at {of:#x}; expected {of:#x}, which stands for all replicas"
            ))),
            _ => Ok(None),
        }
    }

    fn free(&self, buffer: Buffer) -> Result<(), (Buffer, Failure)> {
        let mut known = self.known();
        // Every loan holds a copy of the `Arc`, taken under this lock.
        if Arc::strong_count(buffer.mapping()) > 1 {
            let text = format!(
                "the buffer at {:p} is used by a call that is in progress or was not waited for",
                buffer.start()
            );
            return Err((buffer, Failure::Call(text)));
        }
        known.remove(&buffer.start().addr());
        Ok(())
    }

    fn path(&self, address: usize) -> Option<TransferPath> {
        let known = self.known();
        let (start, one) = known.range(..=address).next_back()?;
        if address - start >= one.bytes {
            return None;
        }
        match &one.origin {
            MemoryOrigin::Host(_) | MemoryOrigin::Device(_) | MemoryOrigin::Replica(_) | MemoryOrigin::Managed => {
                Some(TransferPath::Copied)
            }
            MemoryOrigin::Buffer(mapping) => {
                let is_in_place = mapping.upgrade()?.is_in_place();
                Some(if is_in_place { TransferPath::InPlace } else { TransferPath::Copied })
            }
        }
    }

    fn hold(&self, memory: impl IntoIterator<Item = Extent>) -> HeldBuffers {
        let known = self.known();
        let mut held: Vec<Arc<Mapping>> = Vec::new();
        for Extent { address, bytes } in memory {
            let before_end = known.range(..address.saturating_add(bytes)).rev();
            let touched = before_end.take_while(|(start, one)| **start + one.bytes > address);
            for mapping in touched.filter_map(|(_, one)| one.mapping()) {
                if !held.iter().any(|other| Arc::ptr_eq(other, &mapping)) {
                    held.push(mapping);
                }
            }
        }
        HeldBuffers(held)
    }

    /// Whether no memory is known.
    pub(super) fn is_empty(&self) -> bool {
        self.known().is_empty()
    }

    /// The mapping that contains a slice.
    pub(super) fn around(&self, slice: &[u8]) -> Option<Arc<Mapping>> {
        let known = self.known();
        let (_, one) = known.range(..=slice.as_ptr().addr()).next_back()?;
        let mapping = one.mapping()?;
        mapping.offset_of(slice).map(|_| mapping)
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<usize, KnownMemory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use pserver_core::memory::{LetGo, lend};

    use super::*;

    fn check<T>(outcome: Result<T, Failure>, expected: &str) {
        let text = outcome.err().expect(expected).to_string();
        assert!(text.contains(expected), "{text}; expected {expected}");
    }

    #[test]
    fn overlapping_memory_is_registered_only_once() {
        let known = CallerMemory::default();
        let add = |address, bytes| {
            let mapping = Mapping::of_caller(address, bytes)?;
            known.add(address, bytes, MemoryOrigin::Host(Arc::new(mapping)))
        };
        add(1000, 100).expect("nobody has it");
        check(add(1000, 100), "overlap 100 bytes at 0x3e8");
        check(add(1099, 1), "overlap");
        check(add(900, 101), "overlap");
        check(add(900, 1000), "overlap");
        check(add(500, 0), "memory at 0x1f4 has 0 bytes; expected 1 or more");
        check(add(usize::MAX, 2), "expected 1 or more");
        add(1100, 1).expect("it begins where the other ends");
        assert_eq!(
            (known.path(999), known.path(1000), known.path(1099)),
            (None, Some(TransferPath::Copied), Some(TransferPath::Copied))
        );
        check(known.forget(1001), "is not registered");
        known.forget(1000).expect("it was registered");
        check(known.forget(1000), "is not registered");
        add(900, 150).expect("it is free again");
    }

    #[test]
    fn memory_of_the_caller_is_deregistered_when_no_call_uses_it() {
        let memory = [0; 100];
        let address = memory.as_ptr().addr();
        let known = CallerMemory::default();
        let mapping = Mapping::of_caller(address, 90).expect("it is some bytes");
        known.add(address, 90, MemoryOrigin::Host(Arc::new(mapping))).expect("nobody has it");
        assert!(known.around(&memory[..91]).is_none(), "not all of it lies there");
        let used = known.around(&memory[10..90]).expect("it lies there");
        assert_eq!(used.offset_of(&memory[10..]), None);
        check(known.forget(address), "used by a call that is in progress");
        drop(used);
        let held = known.hold([Extent::of(&memory[20..30])]);
        check(known.forget(address), "used by a call that is in progress");
        drop(held);
        known.forget(address).expect("no call uses it");
        assert!(known.around(&memory[10..90]).is_none());
    }

    #[test]
    fn memory_that_a_device_does_not_release_is_deregistered_with_an_error() {
        let memory = [0; 100];
        let (address, known) = (memory.as_ptr().addr(), CallerMemory::default());
        let mapping = Arc::new(Mapping::of_caller(address, 100).expect("it is some bytes"));
        let keeps: Arc<LetGo> = Arc::new(|| false);
        lend(|book| {
            let (memory, _) = book.read(&memory).within(&mapping).mapped().expect("it lies there");
            memory.until(&keeps);
        });
        known.add(address, 100, MemoryOrigin::Host(mapping)).expect("nobody has it");
        check(known.forget(address), "a device does not release 100 bytes at");
        check(known.forget(address), "is not registered");
    }

    #[test]
    fn a_buffer_is_freed_when_no_call_uses_it() {
        let known = CallerMemory::default();
        let buffer = Buffer::new(100).expect("a page");
        let address = buffer.start().addr();
        known.add(address, 4096, MemoryOrigin::Buffer(Arc::downgrade(buffer.mapping()))).expect("nobody has it");
        assert_eq!(known.path(address + 4095), Some(TransferPath::InPlace));
        check(known.forget(address), "expected registered memory");
        let used = known.around(&buffer[10..]).expect("it lies there");
        let (buffer, failure) = known.free(buffer).expect_err("it is used");
        assert!(failure.to_string().contains("used by a call"), "{failure}");
        drop(used);
        let held = known.hold([Extent::new(address - 8, 8), Extent::new(address + 4092, 8), Extent::of(&buffer[..4])]);
        let (buffer, failure) = known.free(buffer).expect_err("it is held");
        assert!(failure.to_string().contains("used by a call"), "{failure}");
        drop(held);
        let beside = known.hold([Extent::new(address - 8, 8), Extent::new(address + 4096, 8)]);
        known.free(buffer).expect("nobody uses it");
        drop(beside);
        assert_eq!(known.path(address), None);
    }

    #[test]
    fn a_buffer_that_a_device_knows_is_freed_when_no_call_uses_it() {
        let known = CallerMemory::default();
        let buffer = Buffer::new(100).expect("a page");
        let address = buffer.start().addr();
        known.add(address, 4096, MemoryOrigin::Buffer(Arc::downgrade(buffer.mapping()))).expect("nobody has it");
        let registered = lend(|book| {
            let loan = book.read(&buffer).within(buffer.mapping());
            let (memory, _) = loan.mapped().expect("it lies in a buffer");
            memory
        });
        assert!(!registered.is_last(), "the buffer is there");
        known.free(buffer).expect("no call uses it");
        assert_eq!(known.path(address), None);
        assert_eq!((registered.address(), registered.len()), (address, 4096), "it stays mapped for the device");
        assert!(registered.is_last(), "and for nobody else");
    }
}

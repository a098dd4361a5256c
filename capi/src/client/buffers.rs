//! Memory of the caller's that the client knows: buffers of the library's making, and what the caller registered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pserver_core::error::Failure;
use pserver_core::memory::{Buffer, Mapping};
use pserver_kernels::cuda::{Claim, Foreign};

use super::Client;

/// How what is sent from some memory gets to servers of the same machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// They read it where it is.
    InPlace,
    /// It is copied to where they read it.
    Copied,
}

/// What a client knows of its caller's memory, by address.
#[derive(Default)]
pub(super) struct Buffers(Mutex<BTreeMap<usize, Known>>);

/// Some bytes of the caller's, as an address and a length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    address: usize,
    bytes: usize,
}

impl Extent {
    pub(crate) fn new(address: usize, bytes: usize) -> Self {
        Self { address, bytes }
    }

    pub(crate) fn of<T>(slice: &[T]) -> Self {
        Self::new(slice.as_ptr().addr(), size_of_val(slice))
    }
}

/// Buffers that are not freed as long as this is there.
#[derive(Default)]
#[must_use = "the buffers are held as long as this is"]
pub(crate) struct Held(#[expect(dead_code, reason = "it is held, and dropped with its call")] Vec<Arc<Mapping>>);

struct Known {
    bytes: usize,
    origin: Origin,
}

/// Whose it is.
enum Origin {
    /// A buffer of the library's making, as long as it is there.
    Buffer(Weak<Mapping>),
    /// The caller's, registered.
    Host,
    /// The caller's on a device, registered.
    Device(Arc<Foreign>),
}

impl Known {
    fn is_gone(&self) -> bool {
        matches!(&self.origin, Origin::Buffer(mapping) if mapping.strong_count() == 0)
    }

    fn mapping(&self) -> Option<Arc<Mapping>> {
        if let Origin::Buffer(mapping) = &self.origin { mapping.upgrade() } else { None }
    }
}

impl Client {
    /// A buffer for gradients. What lies in it at a multiple of 64 bytes, and is sent with [`Client::push_pull`] or
    /// [`Client::push_pull_view`], servers of this machine read where it is, if they are reached through shared memory.
    /// Everything else about it is like any other memory.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, Failure> {
        let buffer = Buffer::new(bytes)?;
        let mapping = Arc::downgrade(buffer.mapping());
        self.buffers().add(buffer.start().addr(), buffer.mapping().len(), Origin::Buffer(mapping))?;
        Ok(buffer)
    }

    /// How what is sent from this memory gets to servers of the same machine; nothing for memory that the client does
    /// not know.
    #[must_use]
    pub fn path(&self, address: usize) -> Option<Path> {
        self.buffers().path(address)
    }

    /// Notes memory of the caller's own, of the host or of a device.
    pub(crate) fn register(&self, address: usize, bytes: usize) -> Result<(), Failure> {
        let origin = Foreign::find(address, bytes)?.map_or(Origin::Host, Origin::Device);
        self.buffers().add(address, bytes, origin)
    }

    /// Memory of a device that was registered, for one call; nothing for all other memory.
    ///
    /// # Errors
    /// When not all of it is registered, or another call has some of it.
    pub(crate) fn claim(&self, address: usize, bytes: usize) -> Result<Option<Claim>, Failure> {
        self.buffers().claim(address, bytes)
    }

    /// Forgets memory that was registered.
    pub(crate) fn unregister(&self, address: usize) -> Result<(), Failure> {
        self.buffers().forget(address)
    }

    /// Keeps the buffers that a call reads from or writes to, before it waits for its turn.
    pub(crate) fn hold(&self, memory: impl IntoIterator<Item = Extent>) -> Held {
        self.buffers().hold(memory)
    }

    /// Frees a buffer, unless a call uses it: then it comes back.
    pub(crate) fn free(&self, buffer: Buffer) -> Result<(), (Buffer, Failure)> {
        self.buffers().free(buffer)
    }
}

impl Buffers {
    fn add(&self, address: usize, bytes: usize, origin: Origin) -> Result<(), Failure> {
        let mut known = self.known();
        known.retain(|_, one| !one.is_gone());
        let end = address.checked_add(bytes).filter(|end| *end > address);
        let end = end.ok_or_else(|| Failure::call(format!("{bytes} bytes at {address:#x}; expected 1 or more")))?;
        if let Some((start, other)) = known.range(..end).next_back()
            && start + other.bytes > address
        {
            return Err(Failure::call(format!(
                "{bytes} bytes at {address:#x} overlap {} bytes at {start:#x}, which this client knows already",
                other.bytes
            )));
        }
        known.insert(address, Known { bytes, origin });
        Ok(())
    }

    fn forget(&self, address: usize) -> Result<(), Failure> {
        let mut known = self.known();
        let wrong = |what: &str| Err(Failure::call(format!("{address:#x} {what}")));
        match known.get(&address).map(|one| &one.origin) {
            None => wrong("was not registered with this client, or not any more"),
            Some(Origin::Buffer(_)) => wrong("is a buffer of the library's; expected to be freed"),
            // Every claim has a copy, and whoever claims asks for it under this lock.
            Some(Origin::Device(memory)) if 1 < Arc::strong_count(memory) => {
                wrong("is used by a call that is not over, or not waited for")
            }
            Some(Origin::Host | Origin::Device(_)) => {
                known.remove(&address);
                Ok(())
            }
        }
    }

    fn claim(&self, address: usize, bytes: usize) -> Result<Option<Claim>, Failure> {
        let known = self.known();
        let Some((start, one)) = known.range(..=address).next_back() else { return Ok(None) };
        match &one.origin {
            Origin::Device(memory) if address - start < one.bytes => memory.claim(address - start, bytes).map(Some),
            _ => Ok(None),
        }
    }

    fn free(&self, buffer: Buffer) -> Result<(), (Buffer, Failure)> {
        let mut known = self.known();
        // Whoever lends some of it asks for it under this lock.
        if Arc::strong_count(buffer.mapping()) > 1 {
            let text =
                format!("the buffer at {:p} is used by a call that is not over, or not waited for", buffer.start());
            return Err((buffer, Failure::Call(text)));
        }
        known.remove(&buffer.start().addr());
        Ok(())
    }

    fn path(&self, address: usize) -> Option<Path> {
        let known = self.known();
        let (start, one) = known.range(..=address).next_back()?;
        if address - start >= one.bytes {
            return None;
        }
        match &one.origin {
            Origin::Host | Origin::Device(_) => Some(Path::Copied),
            Origin::Buffer(mapping) => {
                let is_in_place = mapping.upgrade()?.is_in_place();
                Some(if is_in_place { Path::InPlace } else { Path::Copied })
            }
        }
    }

    fn hold(&self, memory: impl IntoIterator<Item = Extent>) -> Held {
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
        Held(held)
    }

    /// Whether there is none: then no slice lies in one.
    pub(super) fn is_empty(&self) -> bool {
        self.known().is_empty()
    }

    /// The buffer that a slice lies in.
    pub(super) fn around(&self, slice: &[u8]) -> Option<Arc<Mapping>> {
        let known = self.known();
        let (_, one) = known.range(..=slice.as_ptr().addr()).next_back()?;
        let mapping = one.mapping()?;
        mapping.offset_of(slice).map(|_| mapping)
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<usize, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use pserver_core::memory::lend;

    use super::*;

    fn check<T>(outcome: Result<T, Failure>, expected: &str) {
        let text = outcome.err().expect(expected).to_string();
        assert!(text.contains(expected), "{text}; expected {expected}");
    }

    #[test]
    fn memory_is_known_once_and_never_twice() {
        let known = Buffers::default();
        known.add(1000, 100, Origin::Host).expect("nobody has it");
        check(known.add(1000, 100, Origin::Host), "overlap 100 bytes at 0x3e8");
        check(known.add(1099, 1, Origin::Host), "overlap");
        check(known.add(900, 101, Origin::Host), "overlap");
        check(known.add(900, 1000, Origin::Host), "overlap");
        check(known.add(500, 0, Origin::Host), "0 bytes at 0x1f4; expected 1 or more");
        check(known.add(usize::MAX, 2, Origin::Host), "expected 1 or more");
        known.add(1100, 1, Origin::Host).expect("it begins where the other ends");
        assert_eq!(
            (known.path(999), known.path(1000), known.path(1099)),
            (None, Some(Path::Copied), Some(Path::Copied))
        );
        check(known.forget(1001), "was not registered");
        known.forget(1000).expect("it was registered");
        check(known.forget(1000), "not any more");
        known.add(900, 150, Origin::Host).expect("it is free again");
    }

    #[test]
    fn a_buffer_is_freed_when_no_call_uses_it() {
        let known = Buffers::default();
        let buffer = Buffer::new(100).expect("a page");
        let address = buffer.start().addr();
        known.add(address, 4096, Origin::Buffer(Arc::downgrade(buffer.mapping()))).expect("nobody has it");
        assert_eq!(known.path(address + 4095), Some(Path::InPlace));
        check(known.forget(address), "expected to be freed");
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
        let known = Buffers::default();
        let buffer = Buffer::new(100).expect("a page");
        let address = buffer.start().addr();
        known.add(address, 4096, Origin::Buffer(Arc::downgrade(buffer.mapping()))).expect("nobody has it");
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

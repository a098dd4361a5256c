//! Device memory, and pinned host memory.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pserver_core::memory::Arena;
use pserver_core::memory::shared::ReadOnly;

use super::CudaContext;
use crate::cuda::checked::DriverError;
use crate::cuda::sys::{CUdeviceptr, PORTABLE, READ_ONLY};

/// One allocation of device memory. It is not from a pool, so that a network card can register it.
pub(in crate::cuda) struct DeviceMemory {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
    bytes: u64,
}

/// A range of an allocation; it keeps the allocation.
#[derive(Clone)]
pub(in crate::cuda) struct DeviceRange {
    memory: Arc<DeviceMemory>,
    offset: u64,
    bytes: u64,
}

/// Pinned host memory from the driver, cached as usual (not write-combined), because the processor reads it too.
pub(in crate::cuda) struct PinnedMemory {
    context: Arc<CudaContext>,
    start: NonNull<u8>,
    bytes: usize,
}

/// A range of pinned memory that has one owner. It keeps the memory.
pub(in crate::cuda) struct PinnedRange {
    memory: Arc<PinnedMemory>,
    offset: usize,
    bytes: usize,
}

/// Memory of the host that is mapped as long as this exists.
pub(in crate::cuda) enum HostMapping {
    /// An arena of this process.
    Arena(Arena),
    /// Another process's memory, which is read and not written.
    View(Arc<ReadOnly>),
}

/// A pinned range of a mapping. It keeps the mapping.
pub(in crate::cuda) struct RegisteredRange {
    context: Arc<CudaContext>,
    start: *mut c_void,
    mapping: Arc<HostMapping>,
}

// SAFETY: pinned memory is ordinary memory, freed by whichever thread drops it; its bytes are reached through pieces.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; a shared reference reaches no bytes.
unsafe impl Sync for PinnedMemory {}

impl DeviceMemory {
    pub(in crate::cuda) fn new(context: &Arc<CudaContext>, bytes: u64) -> Result<Arc<Self>, DriverError> {
        context.enter()?;
        let length = usize::try_from(bytes).expect("an address has 64 bits");
        let mut address = 0;
        // SAFETY: `address` is there to be written.
        let code = unsafe { (context.driver.cuMemAlloc_v2)(&raw mut address, length) };
        context.called("cuMemAlloc", code)?;
        Ok(Arc::new(Self { context: Arc::clone(context), address, bytes }))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// # Panics
    /// When the range is not inside.
    pub(in crate::cuda) fn part(self: &Arc<Self>, range: Range<u64>) -> DeviceRange {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        DeviceRange { memory: Arc::clone(self), offset: range.start, bytes: range.end - range.start }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return; // the device is gone, and its memory with it
        }
        // SAFETY: `new` allocated it, and this is its one owner; the driver waits for what works on it.
        let code = unsafe { (self.context.driver.cuMemFree_v2)(self.address) };
        self.context.dropped("cuMemFree", code);
    }
}

impl DeviceRange {
    /// The device address.
    pub(in crate::cuda) fn address(&self) -> u64 {
        self.memory.address + self.offset
    }

    pub(in crate::cuda) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// # Panics
    /// When the range is not inside.
    pub(in crate::cuda) fn part(&self, range: Range<u64>) -> Self {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        let offset = self.offset + range.start;
        Self { memory: Arc::clone(&self.memory), offset, bytes: range.end - range.start }
    }
}

impl PinnedMemory {
    /// Zeroed memory.
    pub(in crate::cuda) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Arc<Self>, DriverError> {
        context.enter()?;
        let mut start = ptr::null_mut();
        // SAFETY: `start` is there to be written.
        let code = unsafe { (context.driver.cuMemHostAlloc)(&raw mut start, bytes, PORTABLE) };
        context.called("cuMemHostAlloc", code)?;
        let start = NonNull::new(start.cast::<u8>()).expect("the driver said that it gave memory");
        // SAFETY: the driver gave `bytes` bytes from `start` on, and no other reference to them exists yet.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Arc::new(Self { context: Arc::clone(context), start, bytes }))
    }

    /// Divides the memory into pieces of one size, each with one owner; a remainder is unused.
    pub(in crate::cuda) fn pieces(self: Arc<Self>, bytes: usize) -> Vec<PinnedRange> {
        let count = self.bytes / bytes;
        (0..count).map(|index| PinnedRange { memory: Arc::clone(&self), offset: index * bytes, bytes }).collect()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return; // the device is gone, and may still write: the pages stay
        }
        // SAFETY: `new` got it from the driver, and no piece is left.
        let code = unsafe { (self.context.driver.cuMemFreeHost)(self.start.as_ptr().cast::<c_void>()) };
        self.context.dropped("cuMemFreeHost", code);
    }
}

impl PinnedRange {
    pub(in crate::cuda) fn bytes(&self) -> &[u8] {
        // SAFETY: `pieces` cut the range out of the memory, which is kept.
        let start = unsafe { self.memory.start.add(self.offset) };
        // SAFETY: the range is inside the memory, was zeroed, and has this one owner, whose `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.bytes) }
    }

    pub(in crate::cuda) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `pieces` cut the range out of the memory, which is kept.
        let start = unsafe { self.memory.start.add(self.offset) };
        // SAFETY: the range is inside the memory, was zeroed, and has this one owner, borrowed here alone.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.bytes) }
    }
}

impl HostMapping {
    /// The range of all its bytes.
    pub(in crate::cuda) fn all(&self) -> NonNull<[u8]> {
        match self {
            Self::Arena(arena) => arena.mapping(),
            Self::View(memory) => memory.mapping(),
        }
    }

    /// Whether nobody else has it mapped any more: its trainer has gone.
    pub(in crate::cuda) fn is_last(&self) -> bool {
        matches!(self, Self::View(memory) if Arc::strong_count(memory) == 1)
    }
}

// SAFETY: the address is handed back to the driver and never followed.
unsafe impl Send for RegisteredRange {}

impl RegisteredRange {
    /// Pins a range of the mapping, in bytes from its start. No byte is touched.
    ///
    /// # Panics
    /// When the range is out of bounds.
    pub(in crate::cuda) fn new(
        context: &Arc<CudaContext>,
        mapping: &Arc<HostMapping>,
        range: Range<usize>,
    ) -> Result<Self, DriverError> {
        context.enter()?;
        let all = mapping.all();
        assert!(range.start < range.end && range.end <= all.len(), "{range:?} of {} bytes", all.len());
        let start = all.as_ptr().cast::<u8>().wrapping_add(range.start).cast::<c_void>();
        let flags = match **mapping {
            HostMapping::Arena(_) => PORTABLE,
            HostMapping::View(_) => PORTABLE | READ_ONLY,
        };
        // SAFETY: the range is inside the mapping, which is kept until it is unregistered; no byte changes.
        let code = unsafe { (context.driver.cuMemHostRegister_v2)(start, range.len(), flags) };
        context.called("cuMemHostRegister", code)?;
        Ok(Self { context: Arc::clone(context), start, mapping: Arc::clone(mapping) })
    }
}

impl Drop for RegisteredRange {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            // The device is lost, and may still write: the pages are leaked.
            std::mem::forget(Arc::clone(&self.mapping));
            return;
        }
        // SAFETY: `new` registered this address, once, and it is still mapped.
        let code = unsafe { (self.context.driver.cuMemHostUnregister)(self.start) };
        self.context.dropped("cuMemHostUnregister", code);
    }
}

//! Device memory that another library in this process allocated, with a pinned host buffer of the same size.
//!
//! The driver is used only if it is already loaded: a process without it has no device memory. The caller may have any
//! context current on a thread, so ours is pushed and popped around every call.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::region::{DeviceAllocation, DeviceRegion, warn};
use super::replicas::Replicas;
use crate::cuda::checked::{DriverError, called};
use crate::cuda::sys::{
    self, CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUpointer_attribute as Attribute, CUstream, Driver,
    ERRORS_OF_STRANGERS, KIND_DEVICE, KIND_HOST, PORTABLE,
};

/// A range of device memory and a host buffer of the same size, through which its bytes are transferred. They are equal
/// only when a [`ForeignClaim::begin_fetch`] or a [`ForeignClaim::begin_store`] has settled.
pub struct ForeignMemory {
    /// Replicas on other devices.
    replicas: Mutex<Replicas>,
    pinned: NonNull<u8>,
    stream: ForeignStream,
    claimed: Mutex<Vec<Range<usize>>>,
    place: DeviceRegion,
}

/// Exclusive access to a part of such memory, for one call.
pub struct ForeignClaim {
    memory: Arc<ForeignMemory>,
    range: Range<usize>,
    stream: ForeignStream,
    /// Whether a copy was begun whose end was not waited for.
    is_in_flight: bool,
}

/// A stream of the caller's, in whose order memory of the device is read and written. By default it is the default
/// stream of the memory's context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForeignStream(usize);

impl ForeignStream {
    /// The stream of this number, as CUDA's libraries say it: its handle, or 0 or 1 for the default stream.
    ///
    /// # Safety
    /// The stream is there as long as claims use it, in the context of their memory.
    #[must_use]
    pub unsafe fn of(number: usize) -> Self {
        Self(if number == 1 { 0 } else { number })
    }

    fn handle(self) -> CUstream {
        ptr::with_exposed_provenance_mut(self.0)
    }
}

/// The owner of a range of memory.
pub enum MemoryOwner {
    /// The host: the processor reads it directly.
    Host,
    /// Managed memory: the driver migrates its pages, so a property of them may not last.
    Managed,
    /// A device.
    Device(Arc<ForeignMemory>),
}

/// The driver's classification of an address.
enum AddressKind {
    /// Host memory, pageable or pinned.
    Host,
    Managed,
    Device(DeviceAllocation),
}

/// The content of a range of addresses.
enum RangeKind {
    Host,
    Managed,
    Device(Box<DeviceRegion>),
}

// SAFETY: handles that the driver lets every thread use; the pinned bytes are reached through claims, which do not
// overlap.
unsafe impl Send for ForeignMemory {}
// SAFETY: as above.
unsafe impl Sync for ForeignMemory {}

impl ForeignMemory {
    /// Classifies a range of addresses. If the driver is not loaded, it is host memory.
    ///
    /// # Errors
    /// [`Failure::Call`] for another kind of memory, for a range that is not entirely of one device, or when the host
    /// has no memory for the buffer; names the found and the expected memory.
    pub fn find(address: usize, bytes: usize) -> Result<MemoryOwner, Failure> {
        match find(address, bytes)? {
            RangeKind::Host => Ok(MemoryOwner::Host),
            RangeKind::Managed => Ok(MemoryOwner::Managed),
            RangeKind::Device(place) => Self::new(*place).map(MemoryOwner::Device).map_err(|refused| {
                Failure::call(format!(
                    "{bytes} bytes of the host's memory for those at {address:#x} on a device: {refused}"
                ))
            }),
        }
    }

    fn new(place: DeviceRegion) -> Result<Arc<Self>, DriverError> {
        let mut start = ptr::null_mut();
        {
            let _entered = place.enter()?;
            // SAFETY: `start` is there to be written.
            let code = unsafe { (place.driver.cuMemHostAlloc)(&raw mut start, place.bytes, PORTABLE) };
            called(&place.driver, "cuMemHostAlloc", code)?;
        }
        let pinned = NonNull::new(start.cast::<u8>()).expect("the driver said that it gave memory");
        // SAFETY: the driver gave as many bytes from there on, and no other reference to them exists yet.
        unsafe { pinned.write_bytes(0, place.bytes) };
        let (stream, claimed, replicas) = (ForeignStream::default(), Mutex::default(), Mutex::default());
        Ok(Arc::new(Self { replicas, pinned, stream, claimed, place }))
    }

    /// Memory that nobody else has yet, of which claims use this stream.
    #[must_use]
    pub fn in_stream(mut self: Arc<Self>, stream: ForeignStream) -> Arc<Self> {
        if let Some(memory) = Arc::get_mut(&mut self) {
            memory.stream = stream;
        }
        self
    }

    /// Adds a replica, usually on another device: [`ForeignClaim::begin_fetch_sum`] reads the sum of all replicas, and
    /// [`ForeignClaim::begin_store`] writes to all.
    ///
    /// # Errors
    /// [`Failure::Call`] when a call is using this memory, when the replica is no device memory, has another length or
    /// overlaps existing ones, or when there are too many.
    pub fn replicate(&self, address: usize, bytes: usize) -> Result<(), Failure> {
        let refused = |why: &str| Err(Failure::call(format!("{bytes} bytes at {address:#x} as a replica: {why}")));
        let RangeKind::Device(place) = find(address, bytes)? else {
            return refused("it is not device memory; expected memory of a CUDA device");
        };
        if bytes != self.place.bytes {
            return refused(&format!("expected {}, as there are at {:#x}", self.place.bytes, self.place.address));
        }
        let claimed = self.claimed();
        if !claimed.is_empty() {
            return refused("the memory is used by a call that is in progress or was not waited for");
        }
        let mut replicas = self.replicas();
        let mut places = std::iter::once(&self.place).chain(replicas.places());
        if let Some(other) = places.find(|other| other.overlaps(&place)) {
            return refused(&format!("it overlaps a replica at {:#x}", other.address));
        }
        drop(places);
        replicas.add(*place)
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "memory of no bytes is refused")]
    pub fn len(&self) -> usize {
        self.place.bytes
    }

    /// The device address.
    #[cfg(test)]
    pub(in crate::cuda) fn address(&self) -> u64 {
        self.place.address
    }

    /// Claims a part from `offset` on, until the claim is dropped.
    ///
    /// # Errors
    /// [`Failure::Call`] when it is out of bounds, or overlaps another claim.
    pub fn claim(self: &Arc<Self>, offset: usize, bytes: usize) -> Result<ForeignClaim, Failure> {
        let range = offset..offset.saturating_add(bytes);
        if self.place.bytes < range.end {
            let left = self.place.bytes.saturating_sub(offset);
            let text = format!("{bytes} bytes of a device's memory, of which {left} are registered; expected all");
            return Err(Failure::Call(text));
        }
        let mut claimed = self.claimed();
        if claimed.iter().any(|other| other.start < range.end && range.start < other.end) {
            return Err(Failure::call(format!(
                "{bytes} bytes of a device's memory are used by a call that is in progress or was not waited for"
            )));
        }
        claimed.push(range.clone());
        Ok(ForeignClaim { memory: Arc::clone(self), range, stream: self.stream, is_in_flight: false })
    }

    fn claimed(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replicas(&self) -> MutexGuard<'_, Replicas> {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        // The replicas' device objects are dropped before their context, or with it.
        let replicas = std::mem::take(self.replicas.get_mut().unwrap_or_else(PoisonError::into_inner));
        let Ok(_entered) = self.place.enter() else { return std::mem::forget(replicas) };
        drop(replicas);
        // SAFETY: `new` got it from the driver, and no claim is left.
        let code = unsafe { (self.place.driver.cuMemFreeHost)(self.pinned.as_ptr().cast::<c_void>()) };
        warn(called(&self.place.driver, "cuMemFreeHost", code));
    }
}

impl ForeignClaim {
    /// The claim in the order of another stream, which its caller keeps until the claim is dropped.
    pub fn set_stream(&mut self, stream: ForeignStream) {
        self.stream = stream;
    }

    /// Begins to copy from the device to the host buffer, behind all earlier work on the stream. The buffer has the
    /// bytes after [`ForeignClaim::settle`]. Replicas are not read.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's error.
    pub fn begin_fetch(&mut self) -> Result<(), Failure> {
        let (start, length) = (self.start().as_ptr().cast::<c_void>(), self.range.len());
        let (address, stream) = (self.address(), self.stream.handle());
        self.begin("reading", |driver| {
            // SAFETY: both ranges are whole, by `claim`, and the host's has this one owner, which gives no access to it
            // and is not dropped before the copy is over.
            let code = unsafe { (driver.cuMemcpyDtoHAsync_v2)(start, address, length, stream) };
            called(driver, "cuMemcpyDtoHAsync", code)
        })
    }

    /// Submits a copy to the stream.
    fn begin(&mut self, doing: &str, submit: impl FnOnce(&Driver) -> Result<(), DriverError>) -> Result<(), Failure> {
        self.settle()?;
        let place = &self.memory.place;
        let begun = place.enter().and_then(|_entered| submit(&place.driver));
        self.is_in_flight = begun.is_ok();
        let bytes = self.range.len();
        begun.map_err(|refused| Failure::call(format!("{doing} {bytes} bytes of a device's memory: {refused}")))
    }

    /// Waits until the copy that was begun is over, if there is one.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's error.
    pub fn settle(&mut self) -> Result<(), Failure> {
        if !self.is_in_flight {
            return Ok(());
        }
        let place = &self.memory.place;
        let waited = place.enter().and_then(|_entered| {
            // SAFETY: the caller keeps the stream until the claim is dropped.
            let code = unsafe { (place.driver.cuStreamSynchronize)(self.stream.handle()) };
            called(&place.driver, "cuStreamSynchronize", code)
        });
        // After an error the copy may still be under way.
        self.is_in_flight = waited.is_err();
        let bytes = self.range.len();
        waited.map_err(|refused| Failure::call(format!("copying {bytes} bytes of a device's memory: {refused}")))
    }

    /// As [`ForeignClaim::begin_fetch`], of the sum of this memory and its replicas, in the order in which they were
    /// added: half precision is summed in binary32 and rounded once. The first device computes it, and no replica
    /// changes.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's error, or when the memory does not consist of whole elements.
    pub fn begin_fetch_sum(&mut self, element_type: ElementType) -> Result<(), Failure> {
        let memory = Arc::clone(&self.memory);
        let mut replicas = memory.replicas();
        if replicas.is_empty() {
            return self.begin_fetch();
        }
        self.check_stream_of(true)?;
        let (place, range) = (&memory.place, self.range.clone());
        let _entered = place.enter().map_err(|refused| Failure::call(refused.to_string()))?;
        replicas.sum(place, range, element_type, self.bytes_mut())
    }

    /// Whether it has replicas.
    #[must_use]
    pub fn has_replicas(&self) -> bool {
        !self.memory.replicas().is_empty()
    }

    /// Begins to copy the host buffer to the device, and copies it to its replicas. The device has the bytes after
    /// [`ForeignClaim::settle`].
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's error; then some of them may have been written.
    pub fn begin_store(&mut self) -> Result<(), Failure> {
        let memory = Arc::clone(&self.memory);
        let replicas = memory.replicas();
        self.check_stream_of(!replicas.is_empty())?;
        let (start, length) = (self.start().as_ptr().cast::<c_void>(), self.range.len());
        let (address, stream, range) = (self.address(), self.stream.handle(), self.range.clone());
        self.begin("writing", |driver| {
            // SAFETY: as in `begin_fetch`.
            let code = unsafe { (driver.cuMemcpyHtoDAsync_v2)(address, start, length, stream) };
            called(driver, "cuMemcpyHtoDAsync", code)?;
            if replicas.is_empty() { Ok(()) } else { replicas.spread(&memory.place, &range) }
        })
    }

    /// Refuses another stream than the default one for memory with replicas: each device has its own.
    ///
    /// # Errors
    /// [`Failure::Call`] says that no stream was expected.
    pub fn check_stream(&self) -> Result<(), Failure> {
        self.check_stream_of(self.has_replicas())
    }

    fn check_stream_of(&self, has_replicas: bool) -> Result<(), Failure> {
        if self.stream == ForeignStream::default() || !has_replicas {
            return Ok(());
        }
        let text = "a stream for memory with replicas, which are read behind the default stream of each device";
        Err(Failure::call(format!("{text}; expected none")))
    }

    /// The host buffer, while no copy is in flight.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        assert!(!self.is_in_flight, "nobody reads what a device writes");
        // SAFETY: the range is inside the pinned bytes, which were zeroed, and has this one owner.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.range.len()) }
    }

    /// The host buffer, mutable.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.is_in_flight, "nobody writes what a device reads");
        // SAFETY: as above, and the owner is borrowed here alone.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.range.len()) }
    }

    /// The start of the host buffer. The caller keeps the claim while it accesses the buffer.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        // SAFETY: the range is inside the pinned bytes, by `claim`.
        unsafe { self.memory.pinned.add(self.range.start) }
    }

    fn address(&self) -> CUdeviceptr {
        self.memory.place.address + self.range.start as u64
    }
}

impl Drop for ForeignClaim {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::warn!(%error, "a copy may be under way after a call; its memory is not used again");
            std::mem::forget(Arc::clone(&self.memory));
            return;
        }
        self.memory.claimed().retain(|other| *other != self.range);
    }
}

/// Classifies a range. If the driver is not loaded, it is host memory.
fn find(address: usize, bytes: usize) -> Result<RangeKind, Failure> {
    // A driver that lacks one of these functions is older than any supported one.
    let driver = sys::driver_of_process().and_then(|library| Driver::load(library).ok());
    let Some(driver) = driver else { return Ok(RangeKind::Host) };
    let start = address as CUdeviceptr;
    let first = match kind(&driver, start)? {
        AddressKind::Host => return Ok(RangeKind::Host),
        AddressKind::Managed => return Ok(RangeKind::Managed),
        AddressKind::Device(first) => first,
    };
    let wanted = start.checked_add(bytes as u64).filter(|end| start < *end);
    let wanted = wanted.ok_or_else(|| Failure::call(format!("{bytes} bytes at {address:#x}; expected 1 or more")))?;
    let mut end = first.end;
    while end < wanted {
        // Memory that is mapped piece by piece continues in the next allocation.
        match kind(&driver, end)? {
            AddressKind::Device(next) if next.ordinal == first.ordinal && end < next.end => end = next.end,
            _ => {
                return Err(Failure::call(format!(
                    "{bytes} bytes at {address:#x}, of which CUDA device {} has {}; expected all of them there",
                    first.ordinal,
                    end - start
                )));
            }
        }
    }
    DeviceRegion::new(driver, &first, start, bytes).map(|place| RangeKind::Device(Box::new(place))).map_err(|refused| {
        Failure::call(format!("{bytes} bytes at {address:#x} of CUDA device {}: {refused}", first.ordinal))
    })
}

/// The driver's classification of an address.
fn kind(driver: &Driver, address: CUdeviceptr) -> Result<AddressKind, Failure> {
    let mut number = 0_u32;
    let asked = ask(driver, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address, &mut number);
    match asked {
        Err(refused) if ERRORS_OF_STRANGERS.contains(&refused.code) => return Ok(AddressKind::Host),
        other => other.map_err(|refused| unknown(address, &refused.to_string()))?,
    }
    let is_managed = is_managed(driver, address);
    if number == KIND_HOST {
        return Ok(if is_managed.unwrap_or(false) { AddressKind::Managed } else { AddressKind::Host });
    }
    if number != KIND_DEVICE {
        return Err(unknown(address, &format!("the driver says that it is of kind {number}")));
    }
    let found = match is_managed {
        Ok(true) => return Ok(AddressKind::Managed),
        Ok(false) => allocation(driver, address),
        Err(refused) => Err(refused),
    };
    found.map(AddressKind::Device).map_err(|refused| unknown(address, &refused.to_string()))
}

/// Whether an address is in managed memory.
fn is_managed(driver: &Driver, address: CUdeviceptr) -> Result<bool, DriverError> {
    let mut managed = 0_u32;
    ask(driver, Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, address, &mut managed)?;
    Ok(managed != 0)
}

/// The allocation that contains a device address.
fn allocation(driver: &Driver, address: CUdeviceptr) -> Result<DeviceAllocation, DriverError> {
    let mut bytes = 0_usize;
    let mut found = DeviceAllocation { context: ptr::null_mut(), ordinal: 0, end: 0 };
    match ask(driver, Attribute::CU_POINTER_ATTRIBUTE_CONTEXT, address, &mut found.context) {
        // Memory of a pool, or mapped through the virtual memory API, has no context.
        Err(refused) if refused.code == CUDA_ERROR_INVALID_VALUE => found.context = ptr::null_mut(),
        asked => asked?,
    }
    ask(driver, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address, &mut found.ordinal)?;
    ask(driver, Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address, &mut found.end)?;
    ask(driver, Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address, &mut bytes)?;
    found.end += bytes as u64;
    Ok(found)
}

fn unknown(address: CUdeviceptr, why: &str) -> Failure {
    Failure::call(format!(
        "memory at {address:#x}: {why}; expected the host's memory (kind 1) or a CUDA device's (kind 2)"
    ))
}

/// Reads one attribute of an address, whose type in C is `T`, or shorter.
fn ask<T: Copy>(driver: &Driver, what: Attribute, address: CUdeviceptr, into: &mut T) -> Result<(), DriverError> {
    // SAFETY: the attribute's value is no longer than `T`, by the callers; the function follows no address.
    let code = unsafe { (driver.cuPointerGetAttribute)(ptr::from_mut(into).cast::<c_void>(), what, address) };
    called(driver, "cuPointerGetAttribute", code)
}

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
    self, CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUpointer_attribute as Attribute, Driver, ERRORS_OF_STRANGERS,
    KIND_DEVICE, KIND_HOST, PORTABLE,
};

/// A range of device memory and a host buffer of the same size, through which its bytes are transferred. They are equal
/// only after [`ForeignClaim::fetch`] and [`ForeignClaim::store`].
pub struct ForeignMemory {
    /// Replicas on other devices.
    replicas: Mutex<Replicas>,
    pinned: NonNull<u8>,
    claimed: Mutex<Vec<Range<usize>>>,
    place: DeviceRegion,
}

/// Exclusive access to a part of such memory, for one call.
pub struct ForeignClaim {
    memory: Arc<ForeignMemory>,
    range: Range<usize>,
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
        Ok(Arc::new(Self { place, pinned, claimed: Mutex::default(), replicas: Mutex::default() }))
    }

    /// Adds a replica, usually on another device: [`ForeignClaim::fetch_sum`] reads the sum of all replicas, and
    /// [`ForeignClaim::store`] writes to all.
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
        Ok(ForeignClaim { memory: Arc::clone(self), range })
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
    /// Copies from the device to the host buffer, after all earlier work on the device's default stream. Replicas are
    /// not read.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's error.
    pub fn fetch(&mut self) -> Result<(), Failure> {
        let (place, start, length) = (&self.memory.place, self.start().as_ptr().cast::<c_void>(), self.range.len());
        let copied = place.enter().and_then(|_entered| {
            // SAFETY: both ranges are whole, by `claim`, and the host's has this one owner, borrowed here alone.
            let code = unsafe { (place.driver.cuMemcpyDtoH_v2)(start, self.address(), length) };
            called(&place.driver, "cuMemcpyDtoH", code)
        });
        copied.map_err(|refused| Failure::call(format!("reading {length} bytes of a device's memory: {refused}")))
    }

    /// As [`ForeignClaim::fetch`], of the sum of this memory and its replicas, in the order in which they were added:
    /// half precision is summed in binary32 and rounded once. The first device computes it, and no replica changes.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's error, or when the memory does not consist of whole elements.
    pub fn fetch_sum(&mut self, element_type: ElementType) -> Result<(), Failure> {
        let memory = Arc::clone(&self.memory);
        let mut replicas = memory.replicas();
        if replicas.is_empty() {
            return self.fetch();
        }
        let (place, range) = (&memory.place, self.range.clone());
        let _entered = place.enter().map_err(|refused| Failure::call(refused.to_string()))?;
        replicas.sum(place, range, element_type, self.bytes_mut())
    }

    /// Whether it has replicas.
    #[must_use]
    pub fn has_replicas(&self) -> bool {
        !self.memory.replicas().is_empty()
    }

    /// Copies the host buffer to the device, and to its replicas.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's error; then some of them may have been written.
    pub fn store(&mut self) -> Result<(), Failure> {
        let (place, start, length) = (&self.memory.place, self.start().as_ptr().cast::<c_void>(), self.range.len());
        let copied = place.enter().and_then(|_entered| {
            // SAFETY: both ranges are whole, by `claim`, and the host's has this one owner, borrowed here alone.
            let code = unsafe { (place.driver.cuMemcpyHtoD_v2)(self.address(), start, length) };
            called(&place.driver, "cuMemcpyHtoD", code)?;
            let replicas = self.memory.replicas();
            if replicas.is_empty() { Ok(()) } else { replicas.spread(place, &self.range) }
        });
        copied.map_err(|refused| Failure::call(format!("writing {length} bytes of a device's memory: {refused}")))
    }

    /// The host buffer.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is inside the pinned bytes, which were zeroed, and has this one owner.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.range.len()) }
    }

    /// The host buffer, mutable.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
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

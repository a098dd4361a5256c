//! Memory of a device that somebody else in this process allocated, and pinned pages of the host that stand for it.
//!
//! The driver is asked only where it is there already: a process that has not loaded it has no memory of a device.
//! Whose context is current on a thread is the caller's affair, so ours is pushed and popped around every call.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;

use super::replicas::Replicas;
use crate::cuda::checked::{Refused, called};
use crate::cuda::sys::{
    self, CUDA_ERROR_INVALID_VALUE, CUcontext, CUdevice, CUdeviceptr, CUpointer_attribute as Attribute, Driver,
    ERRORS_OF_STRANGERS, KIND_DEVICE, KIND_HOST, PORTABLE,
};

/// Memory of a device, and as much of the host's: bytes pass through the second on their way from and to the first.
/// The two are alike only after [`Claim::fetch`] and [`Claim::store`].
pub struct Foreign {
    /// Memory of other devices that is one with this.
    replicas: Mutex<Replicas>,
    pinned: NonNull<u8>,
    claimed: Mutex<Vec<Range<usize>>>,
    place: Place,
}

/// Where memory of a device is.
pub(super) struct Place {
    pub(super) driver: Driver,
    pub(super) context: CUcontext,
    /// The device whose primary context was retained for this, when the memory has no context of its own.
    retained: Option<CUdevice>,
    pub(super) ordinal: i32,
    pub(super) address: CUdeviceptr,
    pub(super) bytes: usize,
}

/// Some of such memory, for one call alone.
pub struct Claim {
    memory: Arc<Foreign>,
    range: Range<usize>,
}

/// A context that is this thread's current one, above the one that was.
pub(super) struct Entered<'a>(&'a Driver);

/// Whose memory something is.
pub enum Whose {
    /// The processor's, which reads it where it is.
    Host,
    /// Either's: the driver moves it to whoever touches it, so what holds for its pages now may not hold later.
    Managed,
    /// A device's.
    Device(Arc<Foreign>),
}

/// What the driver knows of an address.
enum Kind {
    /// The processor's: ordinary or pinned.
    Host,
    Managed,
    Device(Allocation),
}

/// What lies in a range of addresses.
enum Found {
    Host,
    Managed,
    Device(Box<Place>),
}

/// What a device's address lies in.
struct Allocation {
    context: CUcontext,
    ordinal: i32,
    end: CUdeviceptr,
}

// SAFETY: handles that the driver lets every thread use; the pinned bytes are reached through claims, which do not
// overlap.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

impl Foreign {
    /// What lies at an address. Where nobody has loaded the driver it is the host's.
    ///
    /// # Errors
    /// [`Failure::Call`] when it is memory of another kind, when not all of it is of one device, or when the host has
    /// no pages to stand for it; names what was found and what was expected.
    pub fn find(address: usize, bytes: usize) -> Result<Whose, Failure> {
        match find(address, bytes)? {
            Found::Host => Ok(Whose::Host),
            Found::Managed => Ok(Whose::Managed),
            Found::Device(place) => Self::new(*place).map(Whose::Device).map_err(|refused| {
                Failure::call(format!(
                    "{bytes} bytes of the host's memory for those at {address:#x} on a device: {refused}"
                ))
            }),
        }
    }

    fn new(place: Place) -> Result<Arc<Self>, Refused> {
        let mut start = ptr::null_mut();
        {
            let _entered = place.enter()?;
            // SAFETY: `start` is there to be written.
            let code = unsafe { (place.driver.cuMemHostAlloc)(&raw mut start, place.bytes, PORTABLE) };
            called(&place.driver, "cuMemHostAlloc", code)?;
        }
        let pinned = NonNull::new(start.cast::<u8>()).expect("the driver said that it gave memory");
        // SAFETY: the driver gave as many bytes from there on, and nobody else has them yet.
        unsafe { pinned.write_bytes(0, place.bytes) };
        Ok(Arc::new(Self { place, pinned, claimed: Mutex::default(), replicas: Mutex::default() }))
    }

    /// Adds memory of a device, as a rule another one, that is one with this: [`Claim::fetch_sum`] reads the sum of
    /// all, and [`Claim::store`] writes to all.
    ///
    /// # Errors
    /// [`Failure::Call`] when a call uses this memory, when the other is not a device's, has another length or shares
    /// bytes with what there is, or when there are too many.
    pub fn replicate(&self, address: usize, bytes: usize) -> Result<(), Failure> {
        let refused = |why: &str| Err(Failure::call(format!("{bytes} bytes at {address:#x} as a replica: {why}")));
        let Found::Device(place) = find(address, bytes)? else {
            return refused("the memory is not a device's alone; expected that of a CUDA device");
        };
        if bytes != self.place.bytes {
            return refused(&format!("expected {}, as there are at {:#x}", self.place.bytes, self.place.address));
        }
        let claimed = self.claimed();
        if !claimed.is_empty() {
            return refused("what it is to be one with is used by a call that is not over, or not waited for");
        }
        let mut replicas = self.replicas();
        let mut places = std::iter::once(&self.place).chain(replicas.places());
        if let Some(other) = places.find(|other| other.overlaps(&place)) {
            return refused(&format!("it shares bytes with what is one already, at {:#x}", other.address));
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

    /// Where it begins, as the device counts.
    #[cfg(test)]
    pub(in crate::cuda) fn address(&self) -> u64 {
        self.place.address
    }

    /// Some of it, from `offset` on, until the claim is dropped.
    ///
    /// # Errors
    /// [`Failure::Call`] when it is not all there, or when some of it is claimed.
    pub fn claim(self: &Arc<Self>, offset: usize, bytes: usize) -> Result<Claim, Failure> {
        let range = offset..offset.saturating_add(bytes);
        if self.place.bytes < range.end {
            let left = self.place.bytes.saturating_sub(offset);
            let text = format!("{bytes} bytes of a device's memory, of which {left} are registered; expected all");
            return Err(Failure::Call(text));
        }
        let mut claimed = self.claimed();
        if claimed.iter().any(|other| other.start < range.end && range.start < other.end) {
            return Err(Failure::call(format!(
                "{bytes} bytes of a device's memory are used by a call that is not over, or not waited for"
            )));
        }
        claimed.push(range.clone());
        Ok(Claim { memory: Arc::clone(self), range })
    }

    fn claimed(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replicas(&self) -> MutexGuard<'_, Replicas> {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    fn new(driver: Driver, found: &Allocation, address: CUdeviceptr, bytes: usize) -> Result<Self, Refused> {
        let mut new = Self { driver, context: found.context, retained: None, ordinal: found.ordinal, address, bytes };
        if new.context.is_null() {
            let mut device = 0;
            // SAFETY: `device` is there to be written.
            let code = unsafe { (new.driver.cuDeviceGet)(&raw mut device, found.ordinal) };
            called(&new.driver, "cuDeviceGet", code)?;
            // SAFETY: the context is there to be written, and the device is one that `cuDeviceGet` gave.
            let code = unsafe { (new.driver.cuDevicePrimaryCtxRetain)(&raw mut new.context, device) };
            called(&new.driver, "cuDevicePrimaryCtxRetain", code)?;
            new.retained = Some(device);
        }
        Ok(new)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.address < other.address + other.bytes as u64 && other.address < self.address + self.bytes as u64
    }

    pub(super) fn enter(&self) -> Result<Entered<'_>, Refused> {
        // SAFETY: the context is the memory's own, which its owner keeps, or was retained by `new`.
        let code = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.context) };
        called(&self.driver, "cuCtxPushCurrent", code)?;
        Ok(Entered(&self.driver))
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // What they have on the device goes before its context does, or with it.
        let replicas = std::mem::take(self.replicas.get_mut().unwrap_or_else(PoisonError::into_inner));
        let Ok(_entered) = self.place.enter() else { return std::mem::forget(replicas) };
        drop(replicas);
        // SAFETY: `new` got it from the driver, and no claim is left.
        let code = unsafe { (self.place.driver.cuMemFreeHost)(self.pinned.as_ptr().cast::<c_void>()) };
        warn(called(&self.place.driver, "cuMemFreeHost", code));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            // SAFETY: `new` retained it once, and this gives it back.
            let code = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(device) };
            warn(called(&self.driver, "cuDevicePrimaryCtxRelease", code));
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: `context` is there to be written; what is popped was pushed when this was made.
        let code = unsafe { (self.0.cuCtxPopCurrent_v2)(&raw mut context) };
        warn(called(self.0, "cuCtxPopCurrent", code));
    }
}

impl Claim {
    /// Device to host. What the device's default stream was told before has happened by then. Replicas are not read.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    pub fn fetch(&mut self) -> Result<(), Failure> {
        let (place, start, length) = (&self.memory.place, self.start().as_ptr().cast::<c_void>(), self.range.len());
        let copied = place.enter().and_then(|_entered| {
            // SAFETY: both ranges are whole, by `claim`, and the host's has this one owner, borrowed here alone.
            let code = unsafe { (place.driver.cuMemcpyDtoH_v2)(start, self.address(), length) };
            called(&place.driver, "cuMemcpyDtoH", code)
        });
        copied.map_err(|refused| Failure::call(format!("reading {length} bytes of a device's memory: {refused}")))
    }

    /// As [`Claim::fetch`], of the sum of this memory and its replicas, in the order in which they were added: of
    /// halves in binary32, rounded once. It is reckoned on the first one's device, and changes no replica.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused, or when the memory is not of whole elements.
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

    /// Whether there is more than one place for it.
    #[must_use]
    pub fn has_replicas(&self) -> bool {
        !self.memory.replicas().is_empty()
    }

    /// Host to device, and to its replicas.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused; then some of these may have it.
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

    /// The host's bytes that stand for it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is inside the pinned bytes, which were zeroed, and has this one owner.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.range.len()) }
    }

    /// The same, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the owner is borrowed here alone.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.range.len()) }
    }

    /// Where those begin, for who keeps the claim as long as it reads or writes there.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        // SAFETY: the range is inside the pinned bytes, by `claim`.
        unsafe { self.memory.pinned.add(self.range.start) }
    }

    fn address(&self) -> CUdeviceptr {
        self.memory.place.address + self.range.start as u64
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.memory.claimed().retain(|other| *other != self.range);
    }
}

/// What a destructor does with a refusal: it is said, and nothing more.
fn warn(outcome: Result<(), Refused>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "an object of the CUDA driver was not given back");
    }
}

/// What lies there. Where nobody has loaded the driver it is the host's.
fn find(address: usize, bytes: usize) -> Result<Found, Failure> {
    // A driver that lacks one of these functions is older than any that programs run with.
    let driver = sys::driver_of_process().and_then(|library| Driver::load(library).ok());
    let Some(driver) = driver else { return Ok(Found::Host) };
    let start = address as CUdeviceptr;
    let first = match kind(&driver, start)? {
        Kind::Host => return Ok(Found::Host),
        Kind::Managed => return Ok(Found::Managed),
        Kind::Device(first) => first,
    };
    let wanted = start.checked_add(bytes as u64).filter(|end| start < *end);
    let wanted = wanted.ok_or_else(|| Failure::call(format!("{bytes} bytes at {address:#x}; expected 1 or more")))?;
    let mut end = first.end;
    while end < wanted {
        // What is mapped piece by piece goes on in the next piece.
        match kind(&driver, end)? {
            Kind::Device(next) if next.ordinal == first.ordinal && end < next.end => end = next.end,
            _ => {
                return Err(Failure::call(format!(
                    "{bytes} bytes at {address:#x}, of which CUDA device {} has {}; expected all of them there",
                    first.ordinal,
                    end - start
                )));
            }
        }
    }
    Place::new(driver, &first, start, bytes).map(|place| Found::Device(Box::new(place))).map_err(|refused| {
        Failure::call(format!("{bytes} bytes at {address:#x} of CUDA device {}: {refused}", first.ordinal))
    })
}

/// What the driver knows of an address.
fn kind(driver: &Driver, address: CUdeviceptr) -> Result<Kind, Failure> {
    let mut number = 0_u32;
    let asked = ask(driver, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address, &mut number);
    match asked {
        Err(refused) if ERRORS_OF_STRANGERS.contains(&refused.code) => return Ok(Kind::Host),
        other => other.map_err(|refused| unknown(address, &refused.to_string()))?,
    }
    let is_managed = is_managed(driver, address);
    if number == KIND_HOST {
        return Ok(if is_managed.unwrap_or(false) { Kind::Managed } else { Kind::Host });
    }
    if number != KIND_DEVICE {
        return Err(unknown(address, &format!("the driver says that it is of kind {number}")));
    }
    let found = match is_managed {
        Ok(true) => return Ok(Kind::Managed),
        Ok(false) => allocation(driver, address),
        Err(refused) => Err(refused),
    };
    found.map(Kind::Device).map_err(|refused| unknown(address, &refused.to_string()))
}

/// Whether the driver moves what lies there.
fn is_managed(driver: &Driver, address: CUdeviceptr) -> Result<bool, Refused> {
    let mut managed = 0_u32;
    ask(driver, Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, address, &mut managed)?;
    Ok(managed != 0)
}

/// What a device's address lies in.
fn allocation(driver: &Driver, address: CUdeviceptr) -> Result<Allocation, Refused> {
    let mut bytes = 0_usize;
    let mut found = Allocation { context: ptr::null_mut(), ordinal: 0, end: 0 };
    match ask(driver, Attribute::CU_POINTER_ATTRIBUTE_CONTEXT, address, &mut found.context) {
        // Memory of a pool, or mapped by hand, which no context allocated.
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

/// One attribute of an address, whose type in C is `T`, or shorter.
fn ask<T: Copy>(driver: &Driver, what: Attribute, address: CUdeviceptr, into: &mut T) -> Result<(), Refused> {
    // SAFETY: the attribute's value is no longer than `T`, by the callers; the function follows no address.
    let code = unsafe { (driver.cuPointerGetAttribute)(ptr::from_mut(into).cast::<c_void>(), what, address) };
    called(driver, "cuPointerGetAttribute", code)
}

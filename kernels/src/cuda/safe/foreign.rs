//! Memory of a device that somebody else in this process allocated, and pinned pages of the host that stand for it.
//!
//! The driver is asked only where it is there already: a process that has not loaded it has no memory of a device.
//! Whose context is current on a thread is the caller's affair, so ours is pushed and popped around every call.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::error::Failure;

use crate::cuda::checked::{Refused, called};
use crate::cuda::sys::{
    self, CUDA_ERROR_INVALID_VALUE, CUcontext, CUdevice, CUdeviceptr, CUpointer_attribute as Attribute, Driver,
    ERRORS_OF_STRANGERS, KIND_DEVICE, KIND_HOST, PORTABLE,
};

/// Memory of a device, and as much of the host's: bytes pass through the second on their way from and to the first.
/// The two are alike only after [`Claim::fetch`] and [`Claim::store`].
pub struct Foreign {
    driver: Driver,
    context: CUcontext,
    /// The device whose primary context was retained for this, when the memory has no context of its own.
    retained: Option<CUdevice>,
    address: CUdeviceptr,
    bytes: usize,
    pinned: NonNull<u8>,
    claimed: Mutex<Vec<Range<usize>>>,
}

/// Some of such memory, for one call alone.
pub struct Claim {
    memory: Arc<Foreign>,
    range: Range<usize>,
}

/// A context that is this thread's current one, above the one that was.
struct Entered<'a>(&'a Driver);

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
        // A driver that lacks one of these functions is older than any that programs run with.
        let driver = sys::driver_of_process().and_then(|library| Driver::load(library).ok());
        let Some(driver) = driver else { return Ok(Whose::Host) };
        let start = address as CUdeviceptr;
        let first = match kind(&driver, start)? {
            Kind::Host => return Ok(Whose::Host),
            Kind::Managed => return Ok(Whose::Managed),
            Kind::Device(first) => first,
        };
        let wanted = start.checked_add(bytes as u64).filter(|end| start < *end);
        let wanted =
            wanted.ok_or_else(|| Failure::call(format!("{bytes} bytes at {address:#x}; expected 1 or more")))?;
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
        Self::new(driver, &first, start, bytes).map(Whose::Device).map_err(|refused| {
            Failure::call(format!(
                "{bytes} bytes of the host's memory for those at {address:#x} on a device: {refused}"
            ))
        })
    }

    fn new(driver: Driver, found: &Allocation, address: CUdeviceptr, bytes: usize) -> Result<Arc<Self>, Refused> {
        let (mut context, mut retained) = (found.context, None);
        if context.is_null() {
            let mut device = 0;
            // SAFETY: `device` is there to be written.
            called(&driver, "cuDeviceGet", unsafe { (driver.cuDeviceGet)(&raw mut device, found.ordinal) })?;
            // SAFETY: `context` is there to be written, and the device is one that `cuDeviceGet` gave.
            let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
            called(&driver, "cuDevicePrimaryCtxRetain", code)?;
            retained = Some(device);
        }
        // From here on it gives back by itself what it has.
        let claimed = Mutex::default();
        let mut new = Self { driver, context, retained, address, bytes, pinned: NonNull::dangling(), claimed };
        let mut start = ptr::null_mut();
        let allocated = new.enter().and_then(|_entered| {
            // SAFETY: `start` is there to be written.
            let code = unsafe { (new.driver.cuMemHostAlloc)(&raw mut start, bytes, PORTABLE) };
            called(&new.driver, "cuMemHostAlloc", code)
        });
        if let Err(refused) = allocated {
            new.bytes = 0;
            return Err(refused);
        }
        new.pinned = NonNull::new(start.cast::<u8>()).expect("the driver said that it gave memory");
        // SAFETY: the driver gave `bytes` bytes from there on, and nobody else has them yet.
        unsafe { new.pinned.write_bytes(0, bytes) };
        Ok(Arc::new(new))
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "memory of no bytes is refused")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Some of it, from `offset` on, until the claim is dropped.
    ///
    /// # Errors
    /// [`Failure::Call`] when it is not all there, or when some of it is claimed.
    pub fn claim(self: &Arc<Self>, offset: usize, bytes: usize) -> Result<Claim, Failure> {
        let range = offset..offset.saturating_add(bytes);
        if self.bytes < range.end {
            let left = self.bytes.saturating_sub(offset);
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

    fn enter(&self) -> Result<Entered<'_>, Refused> {
        // SAFETY: the context is the memory's own, which its owner keeps, or was retained by `new`.
        let code = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.context) };
        called(&self.driver, "cuCtxPushCurrent", code)?;
        Ok(Entered(&self.driver))
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if 0 < self.bytes
            && let Ok(_entered) = self.enter()
        {
            // SAFETY: `new` got it from the driver, and no claim is left.
            let code = unsafe { (self.driver.cuMemFreeHost)(self.pinned.as_ptr().cast::<c_void>()) };
            warn(called(&self.driver, "cuMemFreeHost", code));
        }
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
    /// Device to host. What the device's default stream was told before has happened by then.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    pub fn fetch(&mut self) -> Result<(), Failure> {
        let (memory, start, length) = (&self.memory, self.start().as_ptr().cast::<c_void>(), self.range.len());
        let copied = memory.enter().and_then(|_entered| {
            // SAFETY: both ranges are whole, by `claim`, and the host's has this one owner, borrowed here alone.
            let code = unsafe { (memory.driver.cuMemcpyDtoH_v2)(start, self.address(), length) };
            called(&memory.driver, "cuMemcpyDtoH", code)
        });
        copied.map_err(|refused| Failure::call(format!("reading {length} bytes of a device's memory: {refused}")))
    }

    /// Host to device.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    pub fn store(&mut self) -> Result<(), Failure> {
        let (memory, start, length) = (&self.memory, self.start().as_ptr().cast::<c_void>(), self.range.len());
        let copied = memory.enter().and_then(|_entered| {
            // SAFETY: both ranges are whole, by `claim`, and the host's has this one owner, borrowed here alone.
            let code = unsafe { (memory.driver.cuMemcpyHtoD_v2)(self.address(), start, length) };
            called(&memory.driver, "cuMemcpyHtoD", code)
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
        self.memory.address + self.range.start as u64
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

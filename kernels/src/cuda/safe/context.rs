//! Driver library, device and primary context.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::{Arc, OnceLock};

use crate::cuda::checked::{DriverError, called};
use crate::cuda::sys::{
    self, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
    CUDA_ERROR_SYSTEM_NOT_READY, CUDA_ERROR_UNKNOWN, CUcontext, CUdevice, CUdevice_attribute as Attribute, Driver,
};

/// The oldest supported driver, 12.4, which is the version of the committed PTX. In the driver's encoding.
const DRIVER_MIN: c_int = 12_040;

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Properties {
    pub(in crate::cuda) ordinal: u32,
    pub(in crate::cuda) name: String,
    /// The compute capability: (9, 0) is `sm_90`.
    pub(in crate::cuda) capability: (u32, u32),
    pub(in crate::cuda) multiprocessors: u32,
    /// Whether memory that this process may only read can be pinned.
    pub(in crate::cuda) pins_read_only: bool,
    /// The driver's CUDA version: (12, 4).
    pub(in crate::cuda) driver: (u32, u32),
}

/// A device's primary context, retained as long as this lives; or the context of another library in this process.
pub(in crate::cuda) struct CudaContext {
    pub(super) driver: Driver,
    /// The device, where the context was retained.
    device: Option<CUdevice>,
    handle: CUcontext,
    properties: Properties,
}

// SAFETY: the driver's functions may be called from any thread, and a context is no thread's own.
unsafe impl Send for CudaContext {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for CudaContext {}

impl CudaContext {
    /// The context of device `ordinal`, or a text with the reason why there is none.
    pub(in crate::cuda) fn open(ordinal: u32) -> Result<Arc<Self>, String> {
        let driver = driver()?;
        let refused = |error: DriverError| error.to_string();
        // SAFETY: it takes a number, which must be zero.
        let begun = called(&driver, "cuInit", unsafe { (driver.cuInit)(0) });
        begun.map_err(|error| match error.code {
            CUDA_ERROR_NO_DEVICE => "no CUDA device: the driver is loaded and reports none".to_owned(),
            code => match remedy(code) {
                Some(remedy) => format!("{error}: {remedy}"),
                None => error.to_string(),
            },
        })?;
        let count = count(&driver).map_err(refused)?;
        if count == 0 {
            return Err("no CUDA device: the driver is loaded and reports none".to_owned());
        }
        let wanted = c_int::try_from(ordinal).ok().filter(|wanted| *wanted < count).ok_or_else(|| {
            format!("CUDA device {ordinal} does not exist: there are {count}, numbered 0 to {}", count - 1)
        })?;
        let mut device = 0;
        // SAFETY: `device` is there to be written.
        called(&driver, "cuDeviceGet", unsafe { (driver.cuDeviceGet)(&raw mut device, wanted) }).map_err(refused)?;
        let properties = properties(&driver, device, ordinal).map_err(refused)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is there to be written, and the device is one that `cuDeviceGet` gave.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut handle, device) };
        called(&driver, "cuDevicePrimaryCtxRetain", code).map_err(|error| match error.code {
            CUDA_ERROR_OUT_OF_MEMORY => {
                let total = total(&driver, device).map_or_else(|_| String::new(), |bytes| format!(" of {bytes} bytes"));
                format!(
                    "memory of CUDA device {ordinal}: a context, which takes some hundred MiB{total}, found no room; \
                     other processes have the rest: {error}"
                )
            }
            _ => error.to_string(),
        })?;
        Ok(Arc::new(Self { driver, device: Some(device), handle, properties }))
    }

    /// Wraps a context that another library owns and keeps alive longer than this. Objects in it are used, and dropped,
    /// only while the context is pushed: [`CudaContext::enter`] then does not change the context beneath.
    pub(super) fn of_somebody(driver: Driver, handle: CUcontext, ordinal: c_int) -> Result<Arc<Self>, DriverError> {
        let mut device = 0;
        // SAFETY: `device` is there to be written.
        called(&driver, "cuDeviceGet", unsafe { (driver.cuDeviceGet)(&raw mut device, ordinal) })?;
        let properties = properties(&driver, device, u32::try_from(ordinal).unwrap_or(0))?;
        Ok(Arc::new(Self { driver, device: None, handle, properties }))
    }

    /// The device's properties.
    pub(in crate::cuda) fn properties(&self) -> &Properties {
        &self.properties
    }

    /// Makes this the calling thread's current context. Required before driver calls of a thread.
    pub(in crate::cuda) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the handle was retained by `open` and is released by `drop`, or is kept by its owner.
        self.called("cuCtxSetCurrent", unsafe { (self.driver.cuCtxSetCurrent)(self.handle) })
    }

    /// Free and total bytes of the device's memory.
    pub(in crate::cuda) fn memory(&self) -> Result<(u64, u64), DriverError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are there to be written.
        let code = unsafe { (self.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.called("cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    pub(super) fn called(&self, call: &'static str, code: sys::ResultCode) -> Result<(), DriverError> {
        called(&self.driver, call, code)
    }

    /// Logs an error in a destructor.
    pub(super) fn dropped(&self, call: &'static str, code: sys::ResultCode) {
        if let Err(error) = self.called(call, code) {
            tracing::warn!(%error, "an object of the CUDA driver was not released");
        }
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        let Some(device) = self.device else { return };
        // SAFETY: `open` retained it once; every object of it keeps it, so none is left.
        let code = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(device) };
        self.dropped("cuDevicePrimaryCtxRelease", code);
    }
}

/// The cause of a refused `cuInit` and its remedy, for codes that are the machine's.
fn remedy(code: sys::ResultCode) -> Option<&'static str> {
    match code {
        CUDA_ERROR_SYSTEM_NOT_READY => Some(
            "the machine is not ready; where GPUs are joined by NVSwitch, nvidia-fabricmanager must run, and takes up \
             to a minute after a start",
        ),
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => Some(
            "libcuda and the kernel's driver have different versions; install both from one package, then load the \
             kernel's driver anew or restart the machine",
        ),
        CUDA_ERROR_UNKNOWN => Some(
            "often /dev/nvidia-uvm is missing or this process may not open it: run nvidia-modprobe -u, or give the \
             container the device",
        ),
        _ => None,
    }
}

/// The library's functions, loaded once.
fn driver() -> Result<Driver, String> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(load).clone()
}

fn load() -> Result<Driver, String> {
    let library = sys::driver().ok_or_else(|| {
        let [name, _] = sys::DRIVER_NAMES;
        format!("{name} not found: the NVIDIA driver is not installed, or not in the loader's path")
    })?;
    let least = version_text(DRIVER_MIN);
    let driver = Driver::load(library).map_err(|symbol| {
        format!("the NVIDIA driver is too old: it has no {symbol}; expected one of CUDA {least} or newer")
    })?;
    let found = version(&driver).map_err(|error| error.to_string())?;
    if found < DRIVER_MIN {
        let found = version_text(found);
        return Err(format!("the NVIDIA driver is too old: it is of CUDA {found}; expected {least} or newer"));
    }
    Ok(driver)
}

fn version(driver: &Driver) -> Result<c_int, DriverError> {
    let mut version = 0;
    // SAFETY: `version` is there to be written.
    called(driver, "cuDriverGetVersion", unsafe { (driver.cuDriverGetVersion)(&raw mut version) })?;
    Ok(version)
}

/// The CUDA version of the installed driver.
pub(super) fn driver_version() -> Option<(u32, u32)> {
    let found = version(&driver().ok()?).ok()?;
    u32::try_from(found).ok().map(|version| (version / 1000, version % 1000 / 10))
}

fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn count(driver: &Driver) -> Result<c_int, DriverError> {
    let mut count = 0;
    // SAFETY: `count` is there to be written.
    called(driver, "cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&raw mut count) })?;
    Ok(count)
}

/// Bytes of a device's memory; it needs no context.
fn total(driver: &Driver, device: CUdevice) -> Result<usize, DriverError> {
    let mut bytes = 0;
    // SAFETY: `bytes` is there to be written, and the device is one that `cuDeviceGet` gave.
    called(driver, "cuDeviceTotalMem", unsafe { (driver.cuDeviceTotalMem_v2)(&raw mut bytes, device) })?;
    Ok(bytes)
}

fn properties(driver: &Driver, device: CUdevice, ordinal: u32) -> Result<Properties, DriverError> {
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: `value` is there to be written, and the device is one that `cuDeviceGet` gave.
        let code = unsafe { (driver.cuDeviceGetAttribute)(&raw mut value, which, device) };
        called(driver, "cuDeviceGetAttribute", code)?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0; 128];
    // SAFETY: the driver writes at most as many bytes as it is told there are.
    let code = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr().cast::<c_char>(), 128, device) };
    called(driver, "cuDeviceGetName", code)?;
    let name = CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |name| name.to_string_lossy().into());
    let version = u32::try_from(version(driver)?).unwrap_or(0);
    Ok(Properties {
        ordinal,
        name,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        pins_read_only: attribute(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)? != 0,
        driver: (version / 1000, version % 1000 / 10),
    })
}

//! Bindings to libcuda and libnvrtc, loaded on first use.
//!
//! Types are cudarc's. Its functions are not used: they panic when a symbol is missing, and they read a result into an
//! enumeration that the codes of a newer driver do not fit. A compile-time check compares our signatures with cudarc's.
//! Its library search is not used either: it does not know the compiler of CUDA 13.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys as cuda;
pub(super) use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUfunction, CUgraph, CUgraphExec,
    CUmodule, CUpointer_attribute, CUstream, CUstream_flags,
};
use cudarc::nvrtc::sys as nvrtc;
pub(super) use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::{Library, os::unix};

/// The result of a call: zero, or an error code.
pub(super) type ResultCode = c_uint;

pub(super) const CUDA_SUCCESS: ResultCode = cuda::CUresult::CUDA_SUCCESS as ResultCode;
pub(super) const CUDA_ERROR_INVALID_VALUE: ResultCode = cuda::CUresult::CUDA_ERROR_INVALID_VALUE as ResultCode;
pub(super) const CUDA_ERROR_NOT_FOUND: ResultCode = cuda::CUresult::CUDA_ERROR_NOT_FOUND as ResultCode;
pub(super) const CUDA_ERROR_OUT_OF_MEMORY: ResultCode = cuda::CUresult::CUDA_ERROR_OUT_OF_MEMORY as ResultCode;
pub(super) const CUDA_ERROR_NOT_SUPPORTED: ResultCode = cuda::CUresult::CUDA_ERROR_NOT_SUPPORTED as ResultCode;
pub(super) const CUDA_ERROR_NO_DEVICE: ResultCode = cuda::CUresult::CUDA_ERROR_NO_DEVICE as ResultCode;
pub(super) const CUDA_ERROR_NOT_READY: ResultCode = cuda::CUresult::CUDA_ERROR_NOT_READY as ResultCode;
pub(super) const CUDA_ERROR_SYSTEM_NOT_READY: ResultCode = cuda::CUresult::CUDA_ERROR_SYSTEM_NOT_READY as ResultCode;
pub(super) const CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: ResultCode =
    cuda::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as ResultCode;
pub(super) const CUDA_ERROR_UNKNOWN: ResultCode = cuda::CUresult::CUDA_ERROR_UNKNOWN as ResultCode;
/// Errors that concern the call alone: the device works and cannot meet the request.
pub(super) const ERRORS_OF_CALLS: [ResultCode; 13] = [
    cuda::CUresult::CUDA_ERROR_INVALID_VALUE as ResultCode,
    CUDA_ERROR_OUT_OF_MEMORY,
    cuda::CUresult::CUDA_ERROR_INVALID_IMAGE as ResultCode,
    cuda::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as ResultCode,
    cuda::CUresult::CUDA_ERROR_INVALID_PTX as ResultCode,
    cuda::CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND as ResultCode,
    cuda::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as ResultCode,
    cuda::CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED as ResultCode,
    cuda::CUresult::CUDA_ERROR_NOT_FOUND as ResultCode,
    cuda::CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES as ResultCode,
    cuda::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as ResultCode,
    cuda::CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as ResultCode,
    CUDA_ERROR_NOT_SUPPORTED,
];
/// Errors of the driver for an address that it did not allocate.
pub(super) const ERRORS_OF_STRANGERS: [ResultCode; 6] = [
    cuda::CUresult::CUDA_ERROR_INVALID_VALUE as ResultCode,
    cuda::CUresult::CUDA_ERROR_NOT_INITIALIZED as ResultCode,
    cuda::CUresult::CUDA_ERROR_DEINITIALIZED as ResultCode,
    cuda::CUresult::CUDA_ERROR_STUB_LIBRARY as ResultCode,
    cuda::CUresult::CUDA_ERROR_INVALID_CONTEXT as ResultCode,
    CUDA_ERROR_NO_DEVICE,
];
/// Kinds of memory.
pub(super) const KIND_HOST: c_uint = cuda::CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
pub(super) const KIND_DEVICE: c_uint = cuda::CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
/// A capture that calls of other threads do not invalidate.
pub(super) const CAPTURE_OF_THREAD: c_uint = cuda::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint;
pub(super) const PORTABLE: c_uint = cuda::CU_MEMHOSTALLOC_PORTABLE;
/// Memory that is registered and that the device only reads.
pub(super) const READ_ONLY: c_uint = cuda::CU_MEMHOSTREGISTER_READ_ONLY;
const _: () = assert!(PORTABLE == cuda::CU_MEMHOSTREGISTER_PORTABLE, "one flag serves both");

/// The driver's library names, in search order. The second may be a linker stub.
pub(super) const DRIVER_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// The compiler's library names.
pub(super) const COMPILER_NAMES: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];

/// The driver's library, loaded once and never unloaded.
pub(super) fn driver() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| first(&DRIVER_NAMES)).as_ref()
}

/// The driver's library if this process has already loaded it. It is not loaded here: without it there is no device
/// memory in the process.
pub(super) fn driver_of_process() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    // RTLD_NOLOAD of `dlfcn.h`: succeeds only for a loaded library.
    const NO_LOAD: c_int = 4;
    if let Some(library) = LIBRARY.get() {
        return Some(library);
    }
    let flags = unix::RTLD_NOW | NO_LOAD;
    // SAFETY: nothing is loaded by this, so no initialiser runs.
    let found = DRIVER_NAMES.iter().find_map(|name| unsafe { unix::Library::open(Some(name), flags) }.ok())?;
    Some(LIBRARY.get_or_init(|| found.into()))
}

/// The compiler's libraries that exist, opened one by one.
pub(super) fn compilers() -> impl Iterator<Item = Library> {
    COMPILER_NAMES.iter().filter_map(|name| open(name))
}

fn first(names: &[&str]) -> Option<Library> {
    names.iter().find_map(|name| open(name))
}

fn open(name: &str) -> Option<Library> {
    // SAFETY: it loads a library of one of the names above, whose initialisers are the vendor's.
    unsafe { Library::new(name) }.ok()
}

/// A library's functions; loading fails if one is missing.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident from $library:ident, which returns $result:ident {
        $($name:ident($($argument:ty),*);)*
    } and with numbers for enumerations {
        $($other:ident($($other_argument:ty),*);)*
    }) => {
        $(#[$about])*
        #[expect(non_snake_case, reason = "the names are the library's")]
        #[derive(Clone, Copy)]
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> ResultCode,)*
            $(pub(super) $other: unsafe extern "C" fn($($other_argument),*) -> ResultCode,)*
        }

        impl $table {
            /// All functions, or the name of one that the library lacks.
            pub(super) fn load(library: &'static Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        type Signature = unsafe extern "C" fn($($argument),*) -> ResultCode;
                        // SAFETY: the signature is that of cudarc's binding for this name, compared below; nobody
                        // unloads it.
                        let found = unsafe { library.get::<Signature>(stringify!($name).as_bytes()) };
                        *found.map_err(|_| stringify!($name))?
                    },)*
                    $($other: {
                        type Signature = unsafe extern "C" fn($($other_argument),*) -> ResultCode;
                        // SAFETY: the signature is that of cudarc's binding, with a number of the same size in place
                        // of an enumeration.
                        let found = unsafe { library.get::<Signature>(stringify!($other).as_bytes()) };
                        *found.map_err(|_| stringify!($other))?
                    },)*
                })
            }
        }

        $(const _: unsafe fn($($argument),*) -> $library::$result = $library::$name;)*
        const _: () = assert!(size_of::<$library::$result>() == size_of::<ResultCode>(), "a result is a number");
    };
}

functions! {
    /// The driver.
    Driver from cuda, which returns CUresult {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxSetCurrent(CUcontext);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamDestroy_v2(CUstream);
        cuStreamSynchronize(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventDestroy_v2(CUevent);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        cuModuleLoadData(*mut CUmodule, *const c_void);
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void
        );
    } and with numbers for enumerations {
        cuGetErrorName(ResultCode, *mut *const c_char);
    }
}

functions! {
    /// The driver's graph functions, loaded on the first capture.
    Graphs from cuda, which returns CUresult {
        cuStreamEndCapture(CUstream, *mut CUgraph);
        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        cuGraphLaunch(CUgraphExec, CUstream);
        cuGraphDestroy(CUgraph);
        cuGraphExecDestroy(CUgraphExec);
    } and with numbers for enumerations {
        cuStreamBeginCapture_v2(CUstream, c_uint);
    }
}

functions! {
    /// The driver's copies in one call, from CUDA 13.0 on.
    Batches from cuda, which returns CUresult {
    } and with numbers for enumerations {
        cuMemcpyBatchAsync_v2(
            *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CopyAttributes, *mut usize, usize, CUstream
        );
    }
}

/// `CUmemcpyAttributes`: how the copies of a batch access memory.
#[repr(C)]
pub(super) struct CopyAttributes {
    /// When sources are read.
    pub(super) order: c_uint,
    /// Kinds and numbers of the places of source and target, of managed memory alone.
    pub(super) hints: [c_int; 4],
    pub(super) flags: c_uint,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in the stream's order.
pub(super) const ORDER_OF_STREAM: c_uint = 1;

functions! {
    /// The compiler.
    Compiler from nvrtc, which returns nvrtcResult {
        nvrtcVersion(*mut c_int, *mut c_int);
        nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        nvrtcDestroyProgram(*mut nvrtcProgram);
        nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
        nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
    } and with numbers for enumerations {
    }
}

//! Loaded modules and their kernels.

use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use super::CudaContext;
use crate::cuda::arguments::BLOCK_THREADS;
use crate::cuda::checked::DriverError;
use crate::cuda::sys::{CUfunction, CUmodule, CUstream};

/// A loaded module.
pub(in crate::cuda) struct CudaModule {
    context: Arc<CudaContext>,
    handle: CUmodule,
}

/// A kernel of a module; it keeps the module.
#[derive(Clone)]
pub(in crate::cuda) struct KernelFunction {
    _module: Arc<CudaModule>,
    pub(super) handle: CUfunction,
    resident: u32,
}

/// Blocks of a launch, and threads of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Grid {
    /// In x and in y.
    pub(in crate::cuda) blocks: (u32, u32),
    pub(in crate::cuda) threads: u32,
    /// Bytes of shared memory that a launch adds.
    pub(in crate::cuda) shared: u32,
}

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for CudaModule {}
// SAFETY: as above.
unsafe impl Sync for CudaModule {}
// SAFETY: as above.
unsafe impl Send for KernelFunction {}
// SAFETY: as above.
unsafe impl Sync for KernelFunction {}

/// Elements per thread and iteration of a kernel over elements.
pub(in crate::cuda) const ELEMENTS_AT_ONCE: u64 = 8;

impl CudaModule {
    /// Loads a cubin, or PTX, which the driver compiles. PTX is a text; a zero is appended.
    pub(in crate::cuda) fn load(context: &Arc<CudaContext>, image: &[u8]) -> Result<Arc<Self>, DriverError> {
        context.enter()?;
        // A cubin says how long it is; a text ends at the zero. Eight-byte words, because a cubin is read as such.
        let mut words = vec![0_u64; image.len() / 8 + 1];
        for (word, bytes) in words.iter_mut().zip(image.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is there to be written; the image is whole, aligned and ends with a zero.
        let code = unsafe { (context.driver.cuModuleLoadData)(&raw mut handle, words.as_ptr().cast::<c_void>()) };
        context.called("cuModuleLoadData", code)?;
        Ok(Arc::new(Self { context: Arc::clone(context), handle }))
    }

    /// The kernel of this name.
    pub(in crate::cuda) fn entry(self: &Arc<Self>, name: &str) -> Result<KernelFunction, DriverError> {
        self.context.enter()?;
        let text = CString::new(name).expect("the names of kernels are ours");
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is there to be written, the name ends with a zero, and the module is loaded.
        let code = unsafe { (self.context.driver.cuModuleGetFunction)(&raw mut handle, self.handle, text.as_ptr()) };
        self.context.called("cuModuleGetFunction", code)?;
        let mut resident = 0;
        let threads = c_int::try_from(BLOCK_THREADS).expect("a block has at most 1024 threads");
        let ask = self.context.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor;
        // SAFETY: `resident` is there to be written, and the function is one that the module has.
        let code = unsafe { ask(&raw mut resident, handle, threads, 0) };
        self.context.called("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(KernelFunction { _module: Arc::clone(self), handle, resident: u32::try_from(resident).unwrap_or(0).max(1) })
    }
}

impl KernelFunction {
    /// Blocks of it, of [`BLOCK_THREADS`] threads, that are resident on a multiprocessor at once.
    pub(in crate::cuda) fn resident(&self) -> u32 {
        self.resident
    }

    /// Launches it on a stream, or, with none, on the default one. Its one parameter is a structure of these bytes, in
    /// which addresses are of the device.
    pub(in crate::cuda) fn launch(
        &self,
        context: &CudaContext,
        grid: Grid,
        argument: &[u8],
        stream: CUstream,
    ) -> Result<(), DriverError> {
        const END: *mut c_void = ptr::null_mut();
        const POINTER: *mut c_void = ptr::without_provenance_mut(1);
        const SIZE: *mut c_void = ptr::without_provenance_mut(2);
        let mut size = argument.len();
        let start = argument.as_ptr().cast_mut().cast::<c_void>();
        let mut extra = [POINTER, start, SIZE, (&raw mut size).cast::<c_void>(), END];
        let Grid { blocks: (wide, high), threads, shared } = grid;
        // SAFETY: the module is loaded; the driver copies the argument before it returns. The kernel
        // writes memory of the device only, which Rust does not access.
        let code = unsafe {
            (context.driver.cuLaunchKernel)(
                self.handle,
                wide,
                high,
                1,
                threads,
                1,
                1,
                shared,
                stream,
                ptr::null_mut(),
                extra.as_mut_ptr(),
            )
        };
        context.called("cuLaunchKernel", code)
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return; // the device is gone, and its code with it
        }
        // SAFETY: `load` loaded it, and no entry is left.
        let code = unsafe { (self.context.driver.cuModuleUnload)(self.handle) };
        self.context.dropped("cuModuleUnload", code);
    }
}

/// Enough blocks for the elements, at most the number that is resident at once: more would only queue.
pub(in crate::cuda) fn grid(context: &CudaContext, entry: &KernelFunction, elements: u64) -> Grid {
    let worth = elements.div_ceil(ELEMENTS_AT_ONCE * u64::from(BLOCK_THREADS)).max(1);
    let most = u64::from(context.properties().multiprocessors.max(1) * entry.resident());
    let blocks = u32::try_from(worth.min(most)).expect("a device has fewer multiprocessors than that");
    Grid { blocks: (blocks, 1), threads: BLOCK_THREADS, shared: 0 }
}

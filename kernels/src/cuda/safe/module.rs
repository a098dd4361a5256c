//! Loaded modules and their kernels.

use std::ffi::{CString, c_void};
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

/// Elements of a pack of four bytes each: what a thread takes at once. Of those of eight bytes it takes two packs.
const PACK_ELEMENTS: u64 = 4;
/// The most blocks of a launch.
const BLOCKS_MAX: u32 = i32::MAX.cast_unsigned();

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
        Ok(KernelFunction { _module: Arc::clone(self), handle })
    }
}

impl KernelFunction {
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

/// A thread for each pack of elements. Where those are more blocks than a device runs at once, the others queue: the
/// memory that is in use at a time lies closer together than with fewer blocks that go on (`docs/reports/cuda.md`).
pub(in crate::cuda) fn grid(elements: u64) -> Grid {
    grid_of(elements.div_ceil(PACK_ELEMENTS))
}

/// Enough blocks for so many threads; a kernel goes on where a launch has no more.
pub(in crate::cuda) fn grid_of(threads: u64) -> Grid {
    let blocks = threads.div_ceil(u64::from(BLOCK_THREADS)).clamp(1, BLOCKS_MAX.into());
    let blocks = u32::try_from(blocks).expect("it was clamped");
    Grid { blocks: (blocks, 1), threads: BLOCK_THREADS, shared: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_has_a_thread_for_each_pack() {
        let blocks = |elements| grid(elements).blocks;
        assert_eq!((blocks(0), blocks(1024), blocks(1025)), ((1, 1), (1, 1), (2, 1)));
        assert_eq!(blocks(u64::MAX), (BLOCKS_MAX, 1), "a launch has no more");
    }
}

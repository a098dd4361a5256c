//! Launcher of single kernels on device memory, for tests of kernels.
//!
//! Not here: guards around buffers and the checks of their content (`kernels/tests/cuda`).

use std::path::Path;
use std::sync::Arc;

use pserver_core::error::Failure;

use super::arguments::BLOCK_THREADS;
use super::checked::DriverError;
use super::code::{CompiledModules, ShippedImage, load_shipped};
use super::safe::{
    CapturedGraph, CudaContext, CudaEvent, CudaModule, DeviceMemory, DeviceRange, Grid, KernelFunction, StreamId,
    StreamSet,
};
use super::source;

/// A device whose kernels are launched one by one. The lengths in an argument structure are not checked: a wrong one
/// makes a kernel access memory outside its buffers, though only on the device, since all addresses lie there.
pub struct KernelLauncher {
    streams: StreamSet<Vec<u8>>,
    /// The shipped module and the compiled ones.
    modules: Vec<Arc<CudaModule>>,
    image: ShippedImage,
    made: CompiledModules,
    buffers: Vec<DeviceRange>,
    context: Arc<CudaContext>,
}

/// One launch: the kernel's name, the grid's blocks in x and y, and the bytes of the argument structure.
pub type KernelLaunch<'a> = (&'a str, (u32, u32), &'a [u8]);

/// Launches captured as one graph, which keeps the memory of all buffers that existed.
pub struct LaunchGraph(CapturedGraph);

/// Device memory, valid until [`KernelLauncher::clear`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchBuffer(usize);

impl KernelLauncher {
    /// Opens a device and loads the shipped kernels: this image of them, or the one that servers load. Compiled kernels
    /// are cached in this folder.
    ///
    /// # Errors
    /// [`Failure::Call`] with what was missing.
    pub fn open(ordinal: u32, folder: &Path, image: Option<ShippedImage>) -> Result<Self, Failure> {
        let context = CudaContext::open(ordinal).map_err(Failure::call)?;
        let streams = StreamSet::new(&context, 1).map_err(failure)?;
        let (shipped, image) = load_shipped(&context, image)?;
        let made = CompiledModules::new(&context, Some(folder));
        Ok(Self { streams, modules: vec![shipped], image, made, buffers: Vec::new(), context })
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.context.properties().name
    }

    /// The shipped binary that the driver took.
    #[must_use]
    pub fn image(&self) -> ShippedImage {
        self.image
    }

    /// Compiles a module, unless it is cached, and loads it after the existing ones.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no compiler, or it refuses the source.
    pub fn add(&mut self, module: &source::ModuleSource) -> Result<(), Failure> {
        let made = self.made.of(module).map_err(|why| Failure::call(format!("the module cannot be {why}")))?;
        self.modules.push(made);
        Ok(())
    }

    /// Whether there is a kernel of this name.
    #[must_use]
    pub fn has(&self, entry: &str) -> bool {
        self.entry(entry).is_ok()
    }

    /// Allocates memory with this content, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's refusal.
    pub fn buffer(&mut self, content: &[u8]) -> Result<LaunchBuffer, Failure> {
        let bytes = content.len() as u64;
        let memory = DeviceMemory::new(&self.context, bytes.max(1)).map_err(failure)?;
        self.buffers.push(memory.part(0..bytes));
        let buffer = LaunchBuffer(self.buffers.len() - 1);
        self.write(buffer, 0, content)?;
        Ok(buffer)
    }

    /// The device address of a buffer.
    ///
    /// # Panics
    /// When it was cleared.
    #[must_use]
    pub fn address(&self, buffer: LaunchBuffer) -> u64 {
        self.buffers[buffer.0].address()
    }

    /// Writes bytes to a buffer.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's refusal.
    ///
    /// # Panics
    /// When they do not fit, or the buffer was cleared.
    pub fn write(&mut self, buffer: LaunchBuffer, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        if bytes.is_empty() {
            return Ok(());
        }
        let part = self.buffers[buffer.0].part(offset..offset + bytes.len() as u64);
        let end = CudaEvent::new(&self.context, false).map_err(failure)?;
        let ticket = self.streams.hold(bytes.to_vec(), end);
        let copied = self.streams.copy_in(ticket, |held| held, &part);
        copied.and_then(|()| self.streams.close(StreamId::In, ticket)).map_err(failure)?;
        self.streams.empty(|_, _| ()).map_err(failure)
    }

    /// The whole content of a buffer.
    ///
    /// # Errors
    /// [`Failure::Call`] with the driver's refusal.
    ///
    /// # Panics
    /// When the buffer was cleared.
    pub fn read(&mut self, buffer: LaunchBuffer) -> Result<Vec<u8>, Failure> {
        let part = self.buffers[buffer.0].clone();
        let mut bytes = vec![0; usize::try_from(part.bytes()).expect("an address has 64 bits")];
        if bytes.is_empty() {
            return Ok(bytes);
        }
        let end = CudaEvent::new(&self.context, false).map_err(failure)?;
        let ticket = self.streams.hold(bytes, end);
        bytes = Vec::new();
        let copied = self.streams.copy_out(ticket, &part, |held| held);
        copied.and_then(|()| self.streams.close(StreamId::Out, ticket)).map_err(failure)?;
        self.streams.empty(|held, _| bytes = held).map_err(failure)?;
        Ok(bytes)
    }

    /// Runs a kernel on a grid of this many blocks in x and y, and waits for its end.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no such kernel, or with the error of the driver or the kernel.
    pub fn launch(&mut self, entry: &str, blocks: (u32, u32), arguments: &[u8]) -> Result<(), Failure> {
        let found = self.entry(entry)?;
        let grid = Grid { blocks, threads: BLOCK_THREADS, shared: 0 };
        let launched = self.streams.launch_bytes(&found, grid, arguments);
        launched.and_then(|()| self.streams.synchronize()).map_err(|why| Failure::call(format!("{entry}: {why}")))
    }

    /// Captures launches as one graph, in their order, without running them.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no such kernel, or with the driver's refusal.
    pub fn capture(&mut self, launches: &[KernelLaunch<'_>]) -> Result<LaunchGraph, Failure> {
        let entries = launches.iter().map(|(name, ..)| self.entry(name)).collect::<Result<Vec<_>, _>>()?;
        let captured = self.streams.capture(entries, self.buffers.clone(), |streams, entries| {
            launches.iter().zip(entries).try_for_each(|((_, blocks, arguments), entry)| {
                streams.launch_bytes(entry, Grid { blocks: *blocks, threads: BLOCK_THREADS, shared: 0 }, arguments)
            })
        });
        captured.map(LaunchGraph).map_err(Failure::Call)
    }

    /// Runs a captured graph, and waits for its end.
    ///
    /// # Errors
    /// [`Failure::Call`] with the error of the driver or of a kernel.
    pub fn replay(&mut self, step: &LaunchGraph) -> Result<(), Failure> {
        self.context.enter().map_err(failure)?;
        self.streams.replay(&step.0).and_then(|()| self.streams.synchronize()).map_err(failure)
    }

    /// Frees all buffers.
    pub fn clear(&mut self) {
        self.buffers.clear();
    }

    fn entry(&self, name: &str) -> Result<KernelFunction, Failure> {
        let found = self.modules.iter().find_map(|module| module.entry(name).ok());
        found.ok_or_else(|| Failure::call(format!("there is no kernel {name}")))
    }
}

fn failure(refused: DriverError) -> Failure {
    Failure::call(refused.to_string())
}

//! Any kernel on memory of a device, one launch at a time: what tests of kernels do.
//!
//! Not here: guards around buffers and what a kernel must leave in them (`kernels/tests/cuda`).

use std::path::Path;
use std::sync::Arc;

use pserver_core::error::Failure;

use super::arguments::BLOCK_THREADS;
use super::checked::Refused;
use super::code::{Made, load_shipped};
use super::safe::{Captured, Context, Entry, Event, Grid, Lane, Lanes, Memory, Module as Loaded, Part};
use super::source;

/// A device whose kernels are launched by hand. A structure's lengths are believed: one that says too much makes a
/// kernel leave its buffers, though not the device's memory, for all addresses that it is handed lie there.
pub struct Direct {
    lanes: Lanes<Vec<u8>>,
    /// What is shipped, and what was compiled.
    modules: Vec<Arc<Loaded>>,
    made: Made,
    buffers: Vec<Part>,
    context: Arc<Context>,
}

/// A launch of a step: a kernel's name, a grid of so many blocks across and so many high, and what it takes.
pub type DirectLaunch<'a> = (&'a str, (u32, u32), &'a [u8]);

/// Launches that were captured as one graph. It keeps the memory of all buffers that there were.
pub struct DirectStep(Captured);

/// Memory of the device, until [`Direct::clear`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectBuffer(usize);

impl Direct {
    /// Opens a device and loads the kernels that are shipped. What is compiled beside them is kept in this folder.
    ///
    /// # Errors
    /// [`Failure::Call`] with what was missing.
    pub fn open(ordinal: u32, folder: &Path) -> Result<Self, Failure> {
        let context = Context::open(ordinal).map_err(Failure::call)?;
        let lanes = Lanes::new(&context, 1).map_err(failure)?;
        let modules = vec![load_shipped(&context)?];
        Ok(Self { lanes, modules, made: Made::new(&context, Some(folder)), buffers: Vec::new(), context })
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.context.properties().name
    }

    /// Compiles a module, unless it was kept, and loads it, behind those that there are.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no compiler, or it refuses the text.
    pub fn add(&mut self, module: &source::Module) -> Result<(), Failure> {
        let made = self.made.of(module).map_err(|why| Failure::call(format!("the module cannot be {why}")))?;
        self.modules.push(made);
        Ok(())
    }

    /// Whether there is a kernel of this name.
    #[must_use]
    pub fn has(&self, entry: &str) -> bool {
        self.entry(entry).is_ok()
    }

    /// Memory with this content, at a multiple of 256.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    pub fn buffer(&mut self, content: &[u8]) -> Result<DirectBuffer, Failure> {
        let bytes = content.len() as u64;
        let memory = Memory::new(&self.context, bytes.max(1)).map_err(failure)?;
        self.buffers.push(memory.part(0..bytes));
        let buffer = DirectBuffer(self.buffers.len() - 1);
        self.write(buffer, 0, content)?;
        Ok(buffer)
    }

    /// Where a buffer begins, as the device counts.
    ///
    /// # Panics
    /// When it was cleared.
    #[must_use]
    pub fn address(&self, buffer: DirectBuffer) -> u64 {
        self.buffers[buffer.0].address()
    }

    /// Puts bytes into a buffer.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    ///
    /// # Panics
    /// When they do not fit, or the buffer was cleared.
    pub fn write(&mut self, buffer: DirectBuffer, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        if bytes.is_empty() {
            return Ok(());
        }
        let part = self.buffers[buffer.0].part(offset..offset + bytes.len() as u64);
        let end = Event::new(&self.context, false).map_err(failure)?;
        let ticket = self.lanes.hold(bytes.to_vec(), end);
        let copied = self.lanes.copy_in(ticket, |held| held, &part);
        copied.and_then(|()| self.lanes.close(Lane::In, ticket)).map_err(failure)?;
        self.lanes.empty(|_, _| ()).map_err(failure)
    }

    /// Everything that a buffer holds.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused.
    ///
    /// # Panics
    /// When the buffer was cleared.
    pub fn read(&mut self, buffer: DirectBuffer) -> Result<Vec<u8>, Failure> {
        let part = self.buffers[buffer.0].clone();
        let mut bytes = vec![0; usize::try_from(part.bytes()).expect("an address has 64 bits")];
        if bytes.is_empty() {
            return Ok(bytes);
        }
        let end = Event::new(&self.context, false).map_err(failure)?;
        let ticket = self.lanes.hold(bytes, end);
        bytes = Vec::new();
        let copied = self.lanes.copy_out(ticket, &part, |held| held);
        copied.and_then(|()| self.lanes.close(Lane::Out, ticket)).map_err(failure)?;
        self.lanes.empty(|held, _| bytes = held).map_err(failure)?;
        Ok(bytes)
    }

    /// Runs a kernel on a grid of so many blocks across and so many high, and waits for its end.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no such kernel, or with what the driver refused or the kernel broke.
    pub fn launch(&mut self, entry: &str, blocks: (u32, u32), arguments: &[u8]) -> Result<(), Failure> {
        let found = self.entry(entry)?;
        let grid = Grid { blocks, threads: BLOCK_THREADS, shared: 0 };
        let launched = self.lanes.launch_bytes(&found, grid, arguments);
        launched.and_then(|()| self.lanes.synchronize()).map_err(|why| Failure::call(format!("{entry}: {why}")))
    }

    /// Captures launches as one graph, in their order; none of them runs.
    ///
    /// # Errors
    /// [`Failure::Call`] when there is no such kernel, or with what the driver refused.
    pub fn capture(&mut self, launches: &[DirectLaunch<'_>]) -> Result<DirectStep, Failure> {
        let entries = launches.iter().map(|(name, ..)| self.entry(name)).collect::<Result<Vec<_>, _>>()?;
        let captured = self.lanes.capture(entries, self.buffers.clone(), |lanes, entries| {
            launches.iter().zip(entries).try_for_each(|((_, blocks, arguments), entry)| {
                lanes.launch_bytes(entry, Grid { blocks: *blocks, threads: BLOCK_THREADS, shared: 0 }, arguments)
            })
        });
        captured.map(DirectStep).map_err(Failure::Call)
    }

    /// Runs what was captured, and waits for its end.
    ///
    /// # Errors
    /// [`Failure::Call`] with what the driver refused or a kernel broke.
    pub fn replay(&mut self, step: &DirectStep) -> Result<(), Failure> {
        self.context.enter().map_err(failure)?;
        self.lanes.replay(&step.0).and_then(|()| self.lanes.synchronize()).map_err(failure)
    }

    /// Gives all buffers back.
    pub fn clear(&mut self) {
        self.buffers.clear();
    }

    fn entry(&self, name: &str) -> Result<Entry, Failure> {
        let found = self.modules.iter().find_map(|module| module.entry(name).ok());
        found.ok_or_else(|| Failure::call(format!("there is no kernel {name}")))
    }
}

fn failure(refused: Refused) -> Failure {
    Failure::call(refused.to_string())
}

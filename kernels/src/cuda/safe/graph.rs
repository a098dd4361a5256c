//! CUDA graphs: launches that are captured once and replayed.

use std::ptr;
use std::sync::Arc;

use super::{CudaContext, DeviceRange, KernelFunction, StreamSet};
use crate::cuda::checked::DriverError;
use crate::cuda::sys::{self, CAPTURE_OF_THREAD, CUgraph, CUgraphExec, CUstream, Graphs};

/// An instantiated graph. It keeps its kernels and the memory that they access.
pub(in crate::cuda) struct CapturedGraph {
    context: Arc<CudaContext>,
    graphs: Graphs,
    handle: CUgraphExec,
    _entries: Vec<KernelFunction>,
    _parts: Vec<DeviceRange>,
}

/// A captured graph before its instantiation.
struct UninstantiatedGraph {
    context: Arc<CudaContext>,
    graphs: Graphs,
    handle: CUgraph,
}

// SAFETY: a handle that the driver lets every thread use, one at a time.
unsafe impl Send for CapturedGraph {}

impl Drop for UninstantiatedGraph {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return; // the capture failed, and there is none
        }
        // SAFETY: the driver gave it when the capture ended, and this is its one owner.
        let code = unsafe { (self.graphs.cuGraphDestroy)(self.handle) };
        self.context.dropped("cuGraphDestroy", code);
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return; // the device is gone, and its graphs with it
        }
        // SAFETY: `capture` made it, once; the driver keeps what a stream still needs of it.
        let code = unsafe { (self.graphs.cuGraphExecDestroy)(self.handle) };
        self.context.dropped("cuGraphExecDestroy", code);
    }
}

impl<W> StreamSet<W> {
    /// Captures the launches on the compute stream during the call, without running them. `entries` and `parts` are the
    /// kernels and the memory that they access.
    ///
    /// # Errors
    /// The driver's error, or that it has no graphs.
    pub(in crate::cuda) fn capture(
        &mut self,
        entries: Vec<KernelFunction>,
        parts: Vec<DeviceRange>,
        launch: impl FnOnce(&mut Self, &[KernelFunction]) -> Result<(), DriverError>,
    ) -> Result<CapturedGraph, String> {
        let library = sys::driver().expect("the streams have a driver");
        let graphs = Graphs::load(library).map_err(|symbol| format!("the NVIDIA driver has no {symbol}"))?;
        let (context, stream) = (Arc::clone(self.context()), self.compute());
        let drawn = draw(&context, graphs, stream, || launch(self, &entries)).map_err(|refused| refused.to_string())?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is there to be written, and the graph is whole.
        let code = unsafe { (graphs.cuGraphInstantiateWithFlags)(&raw mut handle, drawn.handle, 0) };
        context.called("cuGraphInstantiate", code).map_err(|refused| refused.to_string())?;
        Ok(CapturedGraph { context, graphs, handle, _entries: entries, _parts: parts })
    }

    /// Launches the graph on the compute stream.
    pub(in crate::cuda) fn replay(&mut self, captured: &CapturedGraph) -> Result<(), DriverError> {
        // SAFETY: the graph is ready and kept, and so is what it touches; no memory of the host is.
        let code = unsafe { (captured.graphs.cuGraphLaunch)(captured.handle, self.compute()) };
        captured.context.called("cuGraphLaunch", code)
    }
}

/// Captures the work that is submitted to a stream. The capture ends in any case.
fn draw(
    context: &Arc<CudaContext>,
    graphs: Graphs,
    stream: CUstream,
    submit: impl FnOnce() -> Result<(), DriverError>,
) -> Result<UninstantiatedGraph, DriverError> {
    // SAFETY: the stream is there, and no other stream takes part.
    context.called("cuStreamBeginCapture", unsafe { (graphs.cuStreamBeginCapture_v2)(stream, CAPTURE_OF_THREAD) })?;
    let submitted = submit();
    let mut drawn = UninstantiatedGraph { context: Arc::clone(context), graphs, handle: ptr::null_mut() };
    // SAFETY: the capture of this stream has begun above, and the handle is there to be written.
    let ended = unsafe { (graphs.cuStreamEndCapture)(stream, &raw mut drawn.handle) };
    submitted.and(context.called("cuStreamEndCapture", ended))?;
    Ok(drawn)
}

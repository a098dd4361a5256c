//! Kernels that are captured once and launched together as often as wanted.

use std::ptr;
use std::sync::Arc;

use super::{Context, Entry, Lanes, Part};
use crate::cuda::checked::Refused;
use crate::cuda::sys::{self, CAPTURE_OF_THREAD, CUgraph, CUgraphExec, CUstream, Graphs};

/// Kernels as one graph. It keeps what they run and what they touch.
pub(in crate::cuda) struct Captured {
    context: Arc<Context>,
    graphs: Graphs,
    handle: CUgraphExec,
    _entries: Vec<Entry>,
    _parts: Vec<Part>,
}

/// A graph that is not made ready yet.
struct Drawn {
    context: Arc<Context>,
    graphs: Graphs,
    handle: CUgraph,
}

// SAFETY: a handle that the driver lets every thread use, one at a time.
unsafe impl Send for Captured {}

impl Drop for Drawn {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return; // the capture failed, and there is none
        }
        // SAFETY: the driver gave it when the capture ended, and this is its one owner.
        let code = unsafe { (self.graphs.cuGraphDestroy)(self.handle) };
        self.context.dropped("cuGraphDestroy", code);
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return; // the device is gone, and its graphs with it
        }
        // SAFETY: `capture` made it, once; the driver keeps what a stream still needs of it.
        let code = unsafe { (self.graphs.cuGraphExecDestroy)(self.handle) };
        self.context.dropped("cuGraphExecDestroy", code);
    }
}

impl<W> Lanes<W> {
    /// Captures what is launched on the compute lane meanwhile; nothing of it runs. It runs these entries, on these
    /// parts.
    ///
    /// # Errors
    /// What the driver refused, or that it has no graphs.
    pub(in crate::cuda) fn capture(
        &mut self,
        entries: Vec<Entry>,
        parts: Vec<Part>,
        launch: impl FnOnce(&mut Self, &[Entry]) -> Result<(), Refused>,
    ) -> Result<Captured, String> {
        let library = sys::driver().expect("the lanes have a driver");
        let graphs = Graphs::load(library).map_err(|symbol| format!("the NVIDIA driver has no {symbol}"))?;
        let (context, stream) = (Arc::clone(self.context()), self.compute());
        let drawn = draw(&context, graphs, stream, || launch(self, &entries)).map_err(|refused| refused.to_string())?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is there to be written, and the graph is whole.
        let code = unsafe { (graphs.cuGraphInstantiateWithFlags)(&raw mut handle, drawn.handle, 0) };
        context.called("cuGraphInstantiate", code).map_err(|refused| refused.to_string())?;
        Ok(Captured { context, graphs, handle, _entries: entries, _parts: parts })
    }

    /// Launches all of it, in its order, as the compute lane's next piece of work.
    pub(in crate::cuda) fn replay(&mut self, captured: &Captured) -> Result<(), Refused> {
        // SAFETY: the graph is ready and kept, and so is what it touches; no memory of the host is.
        let code = unsafe { (captured.graphs.cuGraphLaunch)(captured.handle, self.compute()) };
        captured.context.called("cuGraphLaunch", code)
    }
}

/// What is submitted to a stream, drawn as a graph. The capture ends whatever happens.
fn draw(
    context: &Arc<Context>,
    graphs: Graphs,
    stream: CUstream,
    submit: impl FnOnce() -> Result<(), Refused>,
) -> Result<Drawn, Refused> {
    // SAFETY: the stream is there, and no other stream takes part.
    context.called("cuStreamBeginCapture", unsafe { (graphs.cuStreamBeginCapture_v2)(stream, CAPTURE_OF_THREAD) })?;
    let submitted = submit();
    let mut drawn = Drawn { context: Arc::clone(context), graphs, handle: ptr::null_mut() };
    // SAFETY: the capture of this stream has begun above, and the handle is there to be written.
    let ended = unsafe { (graphs.cuStreamEndCapture)(stream, &raw mut drawn.handle) };
    submitted.and(context.called("cuStreamEndCapture", ended))?;
    Ok(drawn)
}

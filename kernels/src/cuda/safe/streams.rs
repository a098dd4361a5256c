//! CUDA streams, with ownership of the memory that they read and write.
//!
//! Host memory of a copy is inside a value that [`StreamSet`] owns, from [`StreamSet::hold`] until
//! [`StreamSet::release`] finds that the event of its end has happened. So no memory is freed, moved or accessed while
//! a stream works on it, and a copy takes an accessor to the bytes within the value, never an address.
//!
//! When the driver fails in the middle, the state of a stream is unknown: the values are then leaked.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::Arc;

use bytemuck::{Pod, bytes_of};

use super::{CudaContext, DeviceRange, Grid, KernelFunction, PinnedRange};
use crate::cuda::checked::DriverError;
use crate::cuda::sys::{
    self, Batches, CUDA_ERROR_NOT_READY, CUDA_ERROR_NOT_SUPPORTED, CUevent, CUevent_flags, CUstream, CUstream_flags,
    CopyAttributes, ORDER_OF_STREAM, ResultCode,
};

/// The streams. They run concurrently; each runs in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum StreamId {
    /// Copies from the host.
    In,
    /// Kernels.
    Compute,
    /// Copies to the host.
    Out,
}

/// A point in a stream's work. It can be recorded again, on any stream; a wait refers to the last record before it.
pub(in crate::cuda) struct CudaEvent {
    context: Arc<CudaContext>,
    handle: CUevent,
}

struct Stream {
    context: Arc<CudaContext>,
    handle: CUstream,
}

/// Three streams, and the values whose memory they access.
pub(in crate::cuda) struct StreamSet<W> {
    context: Arc<CudaContext>,
    /// Copies in one call, where the driver has them for this device.
    batches: Option<Batches>,
    /// The copies of such a call, kept to avoid allocations.
    copies: CopyBatch,
    /// In the order of [`StreamId`].
    streams: [Stream; 3],
    /// Never longer than its initial capacity, so that a value does not move.
    held: Vec<Option<InFlight<W>>>,
    free: Vec<usize>,
    /// By stream: the values that end there, the oldest first. The events of one stream happen in order.
    closed: [VecDeque<usize>; 3],
}

/// Copies of one call: addresses of the device or of the host.
#[derive(Default)]
struct CopyBatch {
    targets: Vec<u64>,
    sources: Vec<u64>,
    lengths: Vec<usize>,
}

impl CopyBatch {
    fn clear(&mut self) {
        self.targets.clear();
        self.sources.clear();
        self.lengths.clear();
    }

    fn add(&mut self, target: u64, source: u64, length: usize) {
        self.targets.push(target);
        self.sources.push(source);
        self.lengths.push(length);
    }
}

/// A value in use by a stream, and the event of its end.
struct InFlight<W> {
    value: W,
    end: CudaEvent,
    /// Whether the last copy is submitted and `end` recorded behind it.
    is_closed: bool,
}

/// Pinned staging pieces for copies to the device from memory that is not pinned. They are used in turn; a piece in use
/// is polled, never waited for.
pub(in crate::cuda) struct Ring {
    pieces: Vec<RingPiece>,
    next: usize,
}

struct RingPiece {
    /// None only while it is dropped.
    piece: Option<PinnedRange>,
    /// Happens when its bytes are on the device.
    copied: CudaEvent,
    is_free: bool,
}

/// The handle of a value in use by streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Ticket(usize);

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Send for Stream {}

impl CudaEvent {
    /// An event without timing. `timed` ones have timestamps.
    pub(in crate::cuda) fn new(context: &Arc<CudaContext>, timed: bool) -> Result<Self, DriverError> {
        let flags = if timed { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is there to be written.
        let code = unsafe { (context.driver.cuEventCreate)(&raw mut handle, flags as u32) };
        context.called("cuEventCreate", code)?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// Whether it has happened; an event that was never recorded has.
    pub(in crate::cuda) fn has_happened(&self) -> Result<bool, DriverError> {
        // SAFETY: the event was made by `new` and is destroyed by `drop`.
        let code = unsafe { (self.context.driver.cuEventQuery)(self.handle) };
        if code == CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        self.context.called("cuEventQuery", code)?;
        Ok(true)
    }

    /// Records the event behind all work submitted to the stream so far.
    pub(super) fn record_on(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: stream and event are there.
        self.context.called("cuEventRecord", unsafe { (self.context.driver.cuEventRecord)(self.handle, stream) })
    }

    /// Makes later work of the stream wait for the event's last record.
    pub(super) fn awaited_by(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: stream and event are there, and the flags are zero.
        let code = unsafe { (self.context.driver.cuStreamWaitEvent)(stream, self.handle, 0) };
        self.context.called("cuStreamWaitEvent", code)
    }

    /// Seconds from an earlier event to this one. Both are timed and have happened.
    pub(in crate::cuda) fn seconds_since(&self, earlier: &Self) -> Result<f64, DriverError> {
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is there to be written, and both events are.
        let code =
            unsafe { (self.context.driver.cuEventElapsedTime)(&raw mut milliseconds, earlier.handle, self.handle) };
        self.context.called("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return; // the device is gone, and its events with it
        }
        // SAFETY: `new` made it, once; the driver keeps what streams still need of it.
        let code = unsafe { (self.context.driver.cuEventDestroy_v2)(self.handle) };
        self.context.dropped("cuEventDestroy", code);
    }
}

impl Stream {
    fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let mut handle = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `handle` is there to be written.
        context.called("cuStreamCreate", unsafe { (context.driver.cuStreamCreate)(&raw mut handle, flags) })?;
        Ok(Self { context: Arc::clone(context), handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return; // the device is gone, and its streams with it
        }
        // SAFETY: `new` made it, once; the driver lets it end what it has begun.
        let code = unsafe { (self.context.driver.cuStreamDestroy_v2)(self.handle) };
        self.context.dropped("cuStreamDestroy", code);
    }
}

impl Ring {
    /// A ring of these pieces.
    pub(in crate::cuda) fn new(context: &Arc<CudaContext>, pieces: Vec<PinnedRange>) -> Result<Self, DriverError> {
        let piece =
            |piece| Ok(RingPiece { piece: Some(piece), copied: CudaEvent::new(context, false)?, is_free: true });
        Ok(Self { pieces: pieces.into_iter().map(piece).collect::<Result<_, _>>()?, next: 0 })
    }

    /// The next piece of the ring, if it is free.
    fn turn(&mut self) -> Result<Option<&mut RingPiece>, DriverError> {
        let turn = self.next;
        let next = (turn + 1) % self.pieces.len();
        let one = &mut self.pieces[turn];
        if !one.is_free && !one.copied.has_happened()? {
            return Ok(None);
        }
        one.is_free = true;
        self.next = next;
        Ok(Some(one))
    }
}

impl Drop for RingPiece {
    fn drop(&mut self) {
        if !self.is_free && !self.copied.has_happened().unwrap_or(false) {
            mem::forget(self.piece.take()); // a stream may still read it
        }
    }
}

impl<W> StreamSet<W> {
    /// Streams that own at most `most` values.
    pub(in crate::cuda) fn new(context: &Arc<CudaContext>, most: usize) -> Result<Self, DriverError> {
        context.enter()?;
        let streams = [Stream::new(context)?, Stream::new(context)?, Stream::new(context)?];
        let held = (0..most).map(|_| None).collect();
        Ok(Self {
            context: Arc::clone(context),
            batches: sys::driver().and_then(|library| Batches::load(library).ok()),
            copies: CopyBatch::default(),
            streams,
            held,
            free: (0..most).rev().collect(),
            closed: Default::default(),
        })
    }

    /// Whether another value can be held.
    pub(in crate::cuda) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// The number of values held.
    pub(in crate::cuda) fn len(&self) -> usize {
        self.held.len() - self.free.len()
    }

    /// Takes ownership of a value, until `end` has happened behind the work that will be submitted for it.
    ///
    /// # Panics
    /// When there is no room.
    pub(in crate::cuda) fn hold(&mut self, value: W, end: CudaEvent) -> Ticket {
        let index = self.free.pop().expect("the caller checked has_room");
        self.held[index] = Some(InFlight { value, end, is_closed: false });
        Ticket(index)
    }

    /// Copies bytes of a value to the device. The value is not closed yet.
    pub(in crate::cuda) fn copy_in(
        &mut self,
        ticket: Ticket,
        from: impl for<'a> FnOnce(&'a W) -> &'a [u8],
        to: &DeviceRange,
    ) -> Result<(), DriverError> {
        let bytes = from(&self.open(ticket).value);
        assert_eq!(bytes.len() as u64, to.bytes(), "a copy has one length");
        let (start, length) = (bytes.as_ptr().cast::<c_void>(), bytes.len());
        // SAFETY: the bytes are inside a value that is owned by `held`, which neither moves it nor gives access to it
        // before the event that `close` records behind this copy; the part keeps itself in bounds and is kept.
        let code = unsafe {
            (self.context.driver.cuMemcpyHtoDAsync_v2)(to.address(), start, length, self.stream(StreamId::In))
        };
        self.context.called("cuMemcpyHtoDAsync", code)
    }

    /// Copies parts of a value, each with its number, to places of the device, and leaves no part in the list: in one
    /// call where the driver has such calls, since it pauses between calls. The value is not closed yet.
    pub(in crate::cuda) fn copy_all_in(
        &mut self,
        ticket: Ticket,
        parts: &mut Vec<(usize, DeviceRange)>,
        from: impl for<'a> Fn(&'a W, usize) -> &'a [u8],
    ) -> Result<(), DriverError> {
        let mut copies = mem::take(&mut self.copies);
        copies.clear();
        let held = &self.open(ticket).value;
        for (number, to) in parts.iter() {
            let bytes = from(held, *number);
            assert_eq!(bytes.len() as u64, to.bytes(), "a copy has one length");
            copies.add(to.address(), bytes.as_ptr().expose_provenance() as u64, bytes.len());
        }
        // SAFETY: the bytes are inside a value that is owned by `held`, which neither moves it nor gives access to it
        // before the event that `close` records behind these copies; the places are kept as those of `copy_in`.
        let begun = unsafe { self.copy_batch(&mut copies, StreamId::In) };
        self.copies = copies;
        if begun? {
            parts.clear();
        }
        parts.drain(..).try_for_each(|(number, to)| self.copy_in(ticket, |held| from(held, number), &to))
    }

    /// As [`StreamSet::copy_all_in`], from the device into the first bytes of parts of a value.
    pub(in crate::cuda) fn copy_all_out(
        &mut self,
        ticket: Ticket,
        parts: &mut Vec<(usize, DeviceRange)>,
        into: impl for<'a> Fn(&'a mut W, usize) -> &'a mut [u8],
    ) -> Result<(), DriverError> {
        let length = |part: &DeviceRange| usize::try_from(part.bytes()).expect("an address has 64 bits");
        let mut copies = mem::take(&mut self.copies);
        copies.clear();
        let held = &mut self.open(ticket).value;
        for (number, from) in parts.iter() {
            let bytes = &mut into(held, *number)[..length(from)];
            copies.add(bytes.as_mut_ptr().expose_provenance() as u64, from.address(), bytes.len());
        }
        // SAFETY: as in `copy_all_in`.
        let begun = unsafe { self.copy_batch(&mut copies, StreamId::Out) };
        self.copies = copies;
        if begun? {
            parts.clear();
        }
        parts.drain(..).try_for_each(|(number, from)| {
            self.copy_out(ticket, &from, |held| &mut into(held, number)[..length(&from)])
        })
    }

    /// Submits several copies to a stream in one call; false where the driver has no such call or refuses this one, or
    /// there is one copy.
    ///
    /// # Safety
    /// The memory of each is there until the stream has done them.
    unsafe fn copy_batch(&mut self, copies: &mut CopyBatch, stream: StreamId) -> Result<bool, DriverError> {
        let Some(batches) = self.batches.filter(|_| 1 < copies.lengths.len()) else { return Ok(false) };
        let mut attributes = CopyAttributes { order: ORDER_OF_STREAM, hints: [0; 4], flags: 0 };
        let mut first_with_them = 0;
        // SAFETY: the caller's, and the driver reads the lists before it returns.
        let code = unsafe {
            (batches.cuMemcpyBatchAsync_v2)(
                copies.targets.as_mut_ptr(),
                copies.sources.as_mut_ptr(),
                copies.lengths.as_mut_ptr(),
                copies.lengths.len(),
                &raw mut attributes,
                &raw mut first_with_them,
                1,
                self.stream(stream),
            )
        };
        if code == CUDA_ERROR_NOT_SUPPORTED {
            self.batches = None;
            return Ok(false);
        }
        match self.context.called("cuMemcpyBatchAsync", code) {
            // Single copies say which one is refused.
            Err(refused) if refused.is_of_the_call() => Ok(false),
            called => called.map(|()| true),
        }
    }

    /// Copies the first of a value's bytes to the device through one piece of the ring; returns the number of bytes,
    /// and none when no piece is free.
    pub(in crate::cuda) fn copy_through(
        &mut self,
        ring: &mut Ring,
        ticket: Ticket,
        from: impl for<'a> FnOnce(&'a W) -> &'a [u8],
        to: &DeviceRange,
    ) -> Result<usize, DriverError> {
        let stream = self.stream(StreamId::In);
        let Some(RingPiece { piece, copied, is_free }) = ring.turn()? else { return Ok(0) };
        let place = piece.as_mut().expect("the ring is there").bytes_mut();
        let bytes = from(&self.open(ticket).value);
        assert_eq!(bytes.len() as u64, to.bytes(), "a copy has one length");
        let length = bytes.len().min(place.len());
        place[..length].copy_from_slice(&bytes[..length]);
        let start = place.as_ptr().cast::<c_void>();
        *is_free = false;
        // SAFETY: the piece is written again, or freed, only when the event that is recorded behind this copy has
        // happened; the part keeps itself in bounds and is kept.
        let code = unsafe { (self.context.driver.cuMemcpyHtoDAsync_v2)(to.address(), start, length, stream) };
        self.context.called("cuMemcpyHtoDAsync", code)?;
        self.record(StreamId::In, copied)?;
        Ok(length)
    }

    /// Copies from the device into bytes of a value. The value is not closed yet.
    pub(in crate::cuda) fn copy_out(
        &mut self,
        ticket: Ticket,
        from: &DeviceRange,
        into: impl for<'a> FnOnce(&'a mut W) -> &'a mut [u8],
    ) -> Result<(), DriverError> {
        let stream = self.stream(StreamId::Out);
        let bytes = into(&mut self.open(ticket).value);
        assert_eq!(bytes.len() as u64, from.bytes(), "a copy has one length");
        let (start, length) = (bytes.as_mut_ptr().cast::<c_void>(), bytes.len());
        // SAFETY: the bytes are inside a value that is owned by `held`, which neither moves it nor gives access to it
        // before the event that `close` records behind this copy; the part keeps itself in bounds and is kept.
        let code = unsafe { (self.context.driver.cuMemcpyDtoHAsync_v2)(start, from.address(), length, stream) };
        self.context.called("cuMemcpyDtoHAsync", code)
    }

    /// Copies within the device, on this stream.
    pub(in crate::cuda) fn copy(
        &mut self,
        stream: StreamId,
        from: &DeviceRange,
        to: &DeviceRange,
    ) -> Result<(), DriverError> {
        assert_eq!(from.bytes(), to.bytes(), "a copy has one length");
        let length = usize::try_from(to.bytes()).expect("an address has 64 bits");
        // SAFETY: both are inside allocations of the device; no memory of the host is touched.
        let code = unsafe {
            (self.context.driver.cuMemcpyDtoDAsync_v2)(to.address(), from.address(), length, self.stream(stream))
        };
        self.context.called("cuMemcpyDtoDAsync", code)
    }

    /// Fills with a byte, on this stream.
    pub(in crate::cuda) fn fill(&mut self, stream: StreamId, part: &DeviceRange, byte: u8) -> Result<(), DriverError> {
        let length = usize::try_from(part.bytes()).expect("an address has 64 bits");
        // SAFETY: the part is inside an allocation of the device; no memory of the host is touched.
        let code = unsafe { (self.context.driver.cuMemsetD8Async)(part.address(), byte, length, self.stream(stream)) };
        self.context.called("cuMemsetD8Async", code)
    }

    /// Launches a kernel on the compute stream with this structure as its one parameter. Addresses in it are of the
    /// device.
    pub(in crate::cuda) fn launch<A: Pod>(
        &mut self,
        entry: &KernelFunction,
        grid: Grid,
        argument: &A,
    ) -> Result<(), DriverError> {
        self.launch_bytes(entry, grid, bytes_of(argument))
    }

    /// As [`StreamSet::launch`], with a structure's bytes.
    pub(in crate::cuda) fn launch_bytes(
        &mut self,
        entry: &KernelFunction,
        grid: Grid,
        argument: &[u8],
    ) -> Result<(), DriverError> {
        entry.launch(&self.context, grid, argument, self.stream(StreamId::Compute))
    }

    /// Records the event behind all work submitted to the stream so far.
    pub(in crate::cuda) fn record(&mut self, stream: StreamId, event: &CudaEvent) -> Result<(), DriverError> {
        self.context.called("cuEventRecord", self.record_handle(stream, event.handle))
    }

    /// Makes later work of the stream wait for the event's last record.
    pub(in crate::cuda) fn wait(&mut self, stream: StreamId, event: &CudaEvent) -> Result<(), DriverError> {
        event.awaited_by(self.stream(stream))
    }

    /// Ends the submission for a value: it is released when the stream, which waits for all other copies of the value,
    /// has done the work submitted so far.
    pub(in crate::cuda) fn close(&mut self, stream: StreamId, ticket: Ticket) -> Result<(), DriverError> {
        let handle = self.open(ticket).end.handle;
        self.context.called("cuEventRecord", self.record_handle(stream, handle))?;
        self.open(ticket).is_closed = true;
        self.closed[stream as usize].push_back(ticket.0);
        Ok(())
    }

    /// Waits for all streams, and closes a value whose work could not be submitted completely. Its copies have ended
    /// then.
    pub(in crate::cuda) fn close_early(&mut self, ticket: Ticket) -> Result<(), DriverError> {
        self.synchronize()?;
        self.close(StreamId::Out, ticket)
    }

    /// Waits for all streams.
    pub(in crate::cuda) fn synchronize(&mut self) -> Result<(), DriverError> {
        for stream in &self.streams {
            // SAFETY: the stream was made by `new` and is destroyed by `drop`.
            let code = unsafe { (self.context.driver.cuStreamSynchronize)(stream.handle) };
            self.context.called("cuStreamSynchronize", code)?;
        }
        Ok(())
    }

    /// Releases every value whose end has happened, with its event. Of each stream one event more is asked.
    pub(in crate::cuda) fn release(&mut self, mut give: impl FnMut(Ticket, W, CudaEvent)) -> Result<(), DriverError> {
        for closed in &mut self.closed {
            while let Some(&index) = closed.front() {
                if !self.held[index].as_ref().expect("a value is released once").end.has_happened()? {
                    break;
                }
                closed.pop_front();
                let InFlight { value, end, .. } = self.held[index].take().expect("it was there");
                self.free.push(index);
                give(Ticket(index), value, end);
            }
        }
        Ok(())
    }

    /// Releases every value when no work is in flight: after [`StreamSet::synchronize`].
    pub(in crate::cuda) fn empty(&mut self, mut give: impl FnMut(W, CudaEvent)) -> Result<(), DriverError> {
        while 0 < self.len() {
            self.synchronize()?;
            self.release(|_, value, end| give(value, end))?;
        }
        Ok(())
    }

    /// A value for which no copy back was submitted yet.
    pub(in crate::cuda) fn value(&self, ticket: Ticket) -> &W {
        &self.held[ticket.0].as_ref().expect("a ticket is good until its value is released").value
    }

    fn open(&mut self, ticket: Ticket) -> &mut InFlight<W> {
        let held = self.held[ticket.0].as_mut().expect("a ticket is good until its value is released");
        assert!(!held.is_closed, "nothing is submitted for a value that is closed");
        held
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(super) fn compute(&self) -> CUstream {
        self.stream(StreamId::Compute)
    }

    fn stream(&self, stream: StreamId) -> CUstream {
        self.streams[stream as usize].handle
    }

    fn record_handle(&self, stream: StreamId, event: CUevent) -> ResultCode {
        // SAFETY: stream and event are there.
        unsafe { (self.context.driver.cuEventRecord)(event, self.stream(stream)) }
    }
}

impl<W> Drop for StreamSet<W> {
    fn drop(&mut self) {
        let left = self.held.iter_mut().filter_map(Option::take);
        // A stream may still read or write them.
        let count = left.map(mem::forget).count();
        if 0 < count {
            tracing::warn!(count, "work was in flight on a CUDA device that is released; its memory is not used again");
        }
    }
}

//! Streams, and who owns what they read and write.
//!
//! Whatever a copy touches on the host is inside a value that the lanes own, from [`Lanes::hold`] until
//! [`Lanes::release`] finds that the event of its end has happened. So no memory is freed, moved or looked at while a
//! stream works on it, and a copy takes a way to the bytes within the value, never an address.
//!
//! When the driver fails in the middle, nobody can say what a stream still does: the values are then forgotten.

use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::Arc;

use bytemuck::{Pod, bytes_of};

use super::{Context, Entry, Grid, Part, Piece};
use crate::cuda::checked::Refused;
use crate::cuda::sys::{CUDA_ERROR_NOT_READY, CUevent, CUevent_flags, CUstream, CUstream_flags, Code};

/// Which stream. They run beside each other; within one, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Lane {
    /// Copies from the host.
    In,
    /// Kernels.
    Compute,
    /// Copies to the host.
    Out,
}

/// Something that has happened when a lane has come so far. It can be recorded again, on any lane; who waits, waits for
/// the last time it was recorded before.
pub(in crate::cuda) struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

struct Stream {
    context: Arc<Context>,
    handle: CUstream,
}

/// Three streams, and the values whose memory they work on.
pub(in crate::cuda) struct Lanes<W> {
    context: Arc<Context>,
    /// In the order of [`Lane`].
    streams: [Stream; 3],
    /// Never longer than it was made, so that a value stays where it is.
    held: Vec<Option<Held<W>>>,
    free: Vec<usize>,
}

/// A value, and when it comes back.
struct Held<W> {
    value: W,
    end: Event,
    /// Whether the last copy is submitted and `end` recorded behind it.
    is_closed: bool,
}

/// Pinned pieces that bytes go through on their way to the device, when they lie where it does not reach by itself.
/// They are used in turns; one whose bytes are still on their way is waited for by asking, never by standing still.
pub(in crate::cuda) struct Ring {
    pieces: Vec<RingPiece>,
    next: usize,
}

struct RingPiece {
    /// Nothing only while it is dropped.
    piece: Option<Piece>,
    /// Its bytes are on the device.
    copied: Event,
    is_free: bool,
}

/// A value that lanes own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Ticket(usize);

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Send for Stream {}

impl Event {
    /// One that takes no time: it says that, not when. `timed` ones can be subtracted.
    pub(in crate::cuda) fn new(context: &Arc<Context>, timed: bool) -> Result<Self, Refused> {
        let flags = if timed { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is there to be written.
        let code = unsafe { (context.driver.cuEventCreate)(&raw mut handle, flags as u32) };
        context.called("cuEventCreate", code)?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// Whether it has happened; one that was never recorded has.
    pub(in crate::cuda) fn has_happened(&self) -> Result<bool, Refused> {
        // SAFETY: the event was made by `new` and is destroyed by `drop`.
        let code = unsafe { (self.context.driver.cuEventQuery)(self.handle) };
        if code == CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        self.context.called("cuEventQuery", code)?;
        Ok(true)
    }

    /// It happens when the stream has done what was submitted to it so far.
    pub(super) fn record_on(&self, stream: CUstream) -> Result<(), Refused> {
        // SAFETY: stream and event are there.
        self.context.called("cuEventRecord", unsafe { (self.context.driver.cuEventRecord)(self.handle, stream) })
    }

    /// What is submitted to the stream from now on begins when this, as it was last recorded, has happened.
    pub(super) fn awaited_by(&self, stream: CUstream) -> Result<(), Refused> {
        // SAFETY: stream and event are there, and the flags are zero.
        let code = unsafe { (self.context.driver.cuStreamWaitEvent)(stream, self.handle, 0) };
        self.context.called("cuStreamWaitEvent", code)
    }

    /// Seconds from an earlier event to this one. Both are timed and have happened.
    pub(in crate::cuda) fn seconds_since(&self, earlier: &Self) -> Result<f64, Refused> {
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is there to be written, and both events are.
        let code =
            unsafe { (self.context.driver.cuEventElapsedTime)(&raw mut milliseconds, earlier.handle, self.handle) };
        self.context.called("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
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
    fn new(context: &Arc<Context>) -> Result<Self, Refused> {
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
    pub(in crate::cuda) fn new(context: &Arc<Context>, pieces: Vec<Piece>) -> Result<Self, Refused> {
        let piece = |piece| Ok(RingPiece { piece: Some(piece), copied: Event::new(context, false)?, is_free: true });
        Ok(Self { pieces: pieces.into_iter().map(piece).collect::<Result<_, _>>()?, next: 0 })
    }

    /// The piece whose turn it is, if it is free.
    fn turn(&mut self) -> Result<Option<&mut RingPiece>, Refused> {
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

impl<W> Lanes<W> {
    /// Lanes that own at most `most` values.
    pub(in crate::cuda) fn new(context: &Arc<Context>, most: usize) -> Result<Self, Refused> {
        context.enter()?;
        let streams = [Stream::new(context)?, Stream::new(context)?, Stream::new(context)?];
        let held = (0..most).map(|_| None).collect();
        Ok(Self { context: Arc::clone(context), streams, held, free: (0..most).rev().collect() })
    }

    /// Whether another value can be held.
    pub(in crate::cuda) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Values that are held.
    pub(in crate::cuda) fn len(&self) -> usize {
        self.held.len() - self.free.len()
    }

    /// Takes a value, until `end` has happened behind what will be submitted for it.
    ///
    /// # Panics
    /// When there is no room.
    pub(in crate::cuda) fn hold(&mut self, value: W, end: Event) -> Ticket {
        let index = self.free.pop().expect("whoever holds has asked for room");
        self.held[index] = Some(Held { value, end, is_closed: false });
        Ticket(index)
    }

    /// Copies bytes of a value to the device. The value is not closed yet.
    pub(in crate::cuda) fn copy_in(
        &mut self,
        ticket: Ticket,
        from: impl for<'a> FnOnce(&'a W) -> &'a [u8],
        to: &Part,
    ) -> Result<(), Refused> {
        let bytes = from(&self.open(ticket).value);
        assert_eq!(bytes.len() as u64, to.bytes(), "a copy has one length");
        let (start, length) = (bytes.as_ptr().cast::<c_void>(), bytes.len());
        // SAFETY: the bytes are inside a value that is owned by `held`, which neither moves it nor lets anybody at it
        // before the event that `close` records behind this copy; the part keeps itself in bounds and is kept.
        let code =
            unsafe { (self.context.driver.cuMemcpyHtoDAsync_v2)(to.address(), start, length, self.stream(Lane::In)) };
        self.context.called("cuMemcpyHtoDAsync", code)
    }

    /// Copies the first of a value's bytes to the device through a piece of the ring, as many as it holds; how many,
    /// and none when no piece is free.
    pub(in crate::cuda) fn copy_through(
        &mut self,
        ring: &mut Ring,
        ticket: Ticket,
        from: impl for<'a> FnOnce(&'a W) -> &'a [u8],
        to: &Part,
    ) -> Result<usize, Refused> {
        let stream = self.stream(Lane::In);
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
        self.record(Lane::In, copied)?;
        Ok(length)
    }

    /// Copies from the device into bytes of a value. The value is not closed yet.
    pub(in crate::cuda) fn copy_out(
        &mut self,
        ticket: Ticket,
        from: &Part,
        into: impl for<'a> FnOnce(&'a mut W) -> &'a mut [u8],
    ) -> Result<(), Refused> {
        let stream = self.stream(Lane::Out);
        let bytes = into(&mut self.open(ticket).value);
        assert_eq!(bytes.len() as u64, from.bytes(), "a copy has one length");
        let (start, length) = (bytes.as_mut_ptr().cast::<c_void>(), bytes.len());
        // SAFETY: the bytes are inside a value that is owned by `held`, which neither moves it nor lets anybody at it
        // before the event that `close` records behind this copy; the part keeps itself in bounds and is kept.
        let code = unsafe { (self.context.driver.cuMemcpyDtoHAsync_v2)(start, from.address(), length, stream) };
        self.context.called("cuMemcpyDtoHAsync", code)
    }

    /// Copies within the device, as the lane's next piece of work.
    pub(in crate::cuda) fn copy(&mut self, lane: Lane, from: &Part, to: &Part) -> Result<(), Refused> {
        assert_eq!(from.bytes(), to.bytes(), "a copy has one length");
        let length = usize::try_from(to.bytes()).expect("an address has 64 bits");
        // SAFETY: both are inside allocations of the device; no memory of the host is touched.
        let code = unsafe {
            (self.context.driver.cuMemcpyDtoDAsync_v2)(to.address(), from.address(), length, self.stream(lane))
        };
        self.context.called("cuMemcpyDtoDAsync", code)
    }

    /// Fills with a byte, as the lane's next piece of work.
    pub(in crate::cuda) fn fill(&mut self, lane: Lane, part: &Part, byte: u8) -> Result<(), Refused> {
        let length = usize::try_from(part.bytes()).expect("an address has 64 bits");
        // SAFETY: the part is inside an allocation of the device; no memory of the host is touched.
        let code = unsafe { (self.context.driver.cuMemsetD8Async)(part.address(), byte, length, self.stream(lane)) };
        self.context.called("cuMemsetD8Async", code)
    }

    /// Starts a kernel, on the compute lane, whose one parameter is this structure. Addresses in it are of the device.
    pub(in crate::cuda) fn launch<A: Pod>(&mut self, entry: &Entry, grid: Grid, argument: &A) -> Result<(), Refused> {
        self.launch_bytes(entry, grid, bytes_of(argument))
    }

    /// As [`Lanes::launch`], of a structure's bytes.
    pub(in crate::cuda) fn launch_bytes(&mut self, entry: &Entry, grid: Grid, argument: &[u8]) -> Result<(), Refused> {
        entry.launch(&self.context, grid, argument, self.stream(Lane::Compute))
    }

    /// The event happens when the lane has done what was submitted to it so far.
    pub(in crate::cuda) fn record(&mut self, lane: Lane, event: &Event) -> Result<(), Refused> {
        self.context.called("cuEventRecord", self.record_handle(lane, event.handle))
    }

    /// What is submitted to the lane from now on begins when the event, as it was last recorded, has happened.
    pub(in crate::cuda) fn wait(&mut self, lane: Lane, event: &Event) -> Result<(), Refused> {
        event.awaited_by(self.stream(lane))
    }

    /// Nothing more is submitted for the value: it comes back when the lane, whose work waits for all other copies of
    /// the value, has done what was submitted so far.
    pub(in crate::cuda) fn close(&mut self, lane: Lane, ticket: Ticket) -> Result<(), Refused> {
        let handle = self.open(ticket).end.handle;
        self.context.called("cuEventRecord", self.record_handle(lane, handle))?;
        self.open(ticket).is_closed = true;
        Ok(())
    }

    /// Waits for every lane, and closes a value whose work could not be submitted whole. Its copies are then over.
    pub(in crate::cuda) fn close_early(&mut self, ticket: Ticket) -> Result<(), Refused> {
        self.synchronize()?;
        self.close(Lane::Out, ticket)
    }

    /// Waits for every lane.
    pub(in crate::cuda) fn synchronize(&mut self) -> Result<(), Refused> {
        for stream in &self.streams {
            // SAFETY: the stream was made by `new` and is destroyed by `drop`.
            let code = unsafe { (self.context.driver.cuStreamSynchronize)(stream.handle) };
            self.context.called("cuStreamSynchronize", code)?;
        }
        Ok(())
    }

    /// Hands out every value whose end has happened, with its event.
    pub(in crate::cuda) fn release(&mut self, mut give: impl FnMut(Ticket, W, Event)) -> Result<(), Refused> {
        for index in 0..self.held.len() {
            let Some(held) = &self.held[index] else { continue };
            if held.is_closed && held.end.has_happened()? {
                let Held { value, end, .. } = self.held[index].take().expect("it was there");
                self.free.push(index);
                give(Ticket(index), value, end);
            }
        }
        Ok(())
    }

    /// Hands out every value, when nothing is under way any more: after [`Lanes::synchronize`].
    pub(in crate::cuda) fn empty(&mut self, mut give: impl FnMut(W, Event)) -> Result<(), Refused> {
        while 0 < self.len() {
            self.synchronize()?;
            self.release(|_, value, end| give(value, end))?;
        }
        Ok(())
    }

    fn open(&mut self, ticket: Ticket) -> &mut Held<W> {
        let held = self.held[ticket.0].as_mut().expect("a ticket is good until its value is released");
        assert!(!held.is_closed, "nothing is submitted for a value that is closed");
        held
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn compute(&self) -> CUstream {
        self.stream(Lane::Compute)
    }

    fn stream(&self, lane: Lane) -> CUstream {
        self.streams[lane as usize].handle
    }

    fn record_handle(&self, lane: Lane, event: CUevent) -> Code {
        // SAFETY: stream and event are there.
        unsafe { (self.context.driver.cuEventRecord)(event, self.stream(lane)) }
    }
}

impl<W> Drop for Lanes<W> {
    fn drop(&mut self) {
        let left = self.held.iter_mut().filter_map(Option::take);
        // A stream may still read or write them.
        let count = left.map(mem::forget).count();
        if 0 < count {
            tracing::warn!(count, "work was under way on a CUDA device that is given up; its memory is not used again");
        }
    }
}

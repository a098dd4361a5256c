//! A connection in process: two pipes under one lock, which is not held while a payload is copied.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::ids::Ticket;
use pserver_core::limits::UNREAD_BYTES_MAX;
use pserver_core::port::Payloads;
use pserver_core::wire::Frame;

use super::signal::Signal;
use crate::payload::held_bytes;

/// Frames in one pipe at most.
const FRAMES_MAX: usize = 64;

/// Bodies on their way back, with their tickets.
pub(super) type ReturnedBodies = Vec<(Ticket, Payloads)>;

/// A frame in a pipe. Its payload stays in the sender's memory until it is received.
pub(super) struct PipeFrame {
    /// None for a refusal, which the transport itself sends.
    pub(super) ticket: Option<Ticket>,
    pub(super) frame: Frame,
    pub(super) body: Payloads,
}

/// One end of a connection.
pub(super) struct LinkEnd {
    link: Arc<LoopbackLink>,
    /// Zero for the connecting side, one for the listening side.
    side: usize,
}

struct LoopbackLink {
    state: Mutex<LinkState>,
    signals: [Arc<Signal>; 2],
}

#[derive(Default)]
struct LinkState {
    /// By sender.
    pipes: [Pipe; 2],
    /// The reason for the end.
    over: Option<String>,
}

#[derive(Default)]
struct Pipe {
    frames: VecDeque<PipeFrame>,
    /// Whether the receiver is copying the payload of a frame that it took.
    copying: bool,
    /// Bodies whose payload was copied.
    returned: ReturnedBodies,
}

impl LinkEnd {
    /// The two ends of a new connection.
    pub(super) fn pair(near: &Arc<Signal>, far: &Arc<Signal>) -> (Self, Self) {
        let signals = [Arc::clone(near), Arc::clone(far)];
        let link = Arc::new(LoopbackLink { state: Mutex::default(), signals });
        (Self { link: Arc::clone(&link), side: 0 }, Self { link, side: 1 })
    }

    /// Appends a frame to the pipe, or returns it when the pipe is full. On an ended connection it comes back with the
    /// others.
    pub(super) fn send(&self, frame: PipeFrame) -> Option<PipeFrame> {
        let mut state = self.lock();
        let over = state.over.is_some();
        let pipe = &mut state.pipes[self.side];
        if pipe.frames.len() >= FRAMES_MAX && frame.ticket.is_some() && !over {
            return Some(frame);
        }
        pipe.frames.push_back(frame);
        self.signal_other();
        None
    }

    /// Whether the connecting side leaves too many answers unread.
    pub(super) fn is_unread(&self) -> bool {
        let state = self.lock();
        let frames = &state.pipes[self.side].frames;
        let bytes = || frames.iter().map(|frame| held_bytes(&frame.frame, &frame.body)).sum::<u64>();
        self.side == 1 && (frames.len() >= FRAMES_MAX || bytes() >= UNREAD_BYTES_MAX)
    }

    /// Whether everything sent was received.
    pub(super) fn is_drained(&self) -> bool {
        let state = self.lock();
        let pipe = &state.pipes[self.side];
        pipe.frames.is_empty() && !pipe.copying
    }

    /// The head of an incoming frame, `behind` the next one.
    pub(super) fn peek(&self, behind: usize) -> Option<Frame> {
        self.lock().pipes[1 - self.side].frames.get(behind).map(|frame| frame.frame.clone())
    }

    /// Takes the next frame to copy its payload; [`LinkEnd::put_back`] must follow.
    pub(super) fn take(&self) -> Option<PipeFrame> {
        let mut state = self.lock();
        let pipe = &mut state.pipes[1 - self.side];
        let frame = pipe.frames.pop_front()?;
        pipe.copying = true;
        Some(frame)
    }

    /// Returns the body of a taken frame to its sender.
    pub(super) fn put_back(&self, frame: PipeFrame) {
        let mut state = self.lock();
        let pipe = &mut state.pipes[1 - self.side];
        pipe.copying = false;
        pipe.returned.extend(frame.ticket.map(|ticket| (ticket, frame.body)));
        self.signal_other();
    }

    /// Bodies that were received.
    pub(super) fn sent(&self) -> ReturnedBodies {
        std::mem::take(&mut self.lock().pipes[self.side].returned)
    }

    /// Withdraws the frames that were not taken.
    pub(super) fn give_up(&self) -> ReturnedBodies {
        returned_bodies(&mut self.lock().pipes[self.side])
    }

    /// Ends the connection for both sides.
    pub(super) fn finish(&self, reason: &str) {
        let mut state = self.lock();
        state.over.get_or_insert_with(|| reason.to_owned());
        self.signal_other();
    }

    /// The reason for the end and the unsent bodies, once the receiver holds none.
    pub(super) fn over(&self) -> Option<(String, ReturnedBodies)> {
        let mut state = self.lock();
        let reason = state.over.clone()?;
        let pipe = &mut state.pipes[self.side];
        (!pipe.copying).then(|| (reason, returned_bodies(pipe)))
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        // Only moves happen under the lock, so a panic elsewhere leaves the state consistent.
        self.link.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal_other(&self) {
        self.link.signals[1 - self.side].set();
    }
}

fn returned_bodies(pipe: &mut Pipe) -> ReturnedBodies {
    pipe.frames.drain(..).filter_map(|frame| frame.ticket.map(|ticket| (ticket, frame.body))).collect()
}

//! One connection in process: two pipes under one lock, which is never held while a payload is copied.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::ids::Ticket;
use pserver_core::port::Outgoing;
use pserver_core::wire::Frame;

use super::bell::Bell;

/// The frames that have left one end and have not landed at the other.
const FRAMES_MAX: usize = 64;

/// Parcels that are on their way back, with the ticket they were sent under.
pub(super) type Returned = Vec<(Ticket, Vec<Outgoing>)>;

/// A frame in a pipe. Its payload stays in its owner's memory until it lands.
pub(super) struct Shipment {
    /// None for a refusal, which nobody submitted.
    pub(super) ticket: Option<Ticket>,
    pub(super) frame: Frame,
    pub(super) body: Vec<Outgoing>,
}

/// One end of a connection.
pub(super) struct End {
    link: Arc<Link>,
    /// Zero connected, one was listening.
    side: usize,
}

struct Link {
    state: Mutex<State>,
    bells: [Arc<Bell>; 2],
}

#[derive(Default)]
struct State {
    /// By sender.
    pipes: [Pipe; 2],
    /// Why it is over.
    over: Option<String>,
}

#[derive(Default)]
struct Pipe {
    frames: VecDeque<Shipment>,
    /// Whether the receiver is copying the payload of a frame it took out.
    copying: bool,
    /// Parcels whose payload was copied.
    returned: Returned,
}

impl End {
    /// The two ends of a new connection.
    pub(super) fn pair(near: &Arc<Bell>, far: &Arc<Bell>) -> (Self, Self) {
        let bells = [Arc::clone(near), Arc::clone(far)];
        let link = Arc::new(Link { state: Mutex::default(), bells });
        (Self { link: Arc::clone(&link), side: 0 }, Self { link, side: 1 })
    }

    /// Puts a frame into the pipe, or gives it back when the pipe is full. On a connection that is over the
    /// parcels come back with the rest.
    pub(super) fn send(&self, shipment: Shipment) -> Option<Shipment> {
        let mut state = self.lock();
        let over = state.over.is_some();
        let pipe = &mut state.pipes[self.side];
        if pipe.frames.len() >= FRAMES_MAX && shipment.ticket.is_some() && !over {
            return Some(shipment);
        }
        pipe.frames.push_back(shipment);
        self.ring_other();
        None
    }

    /// Whether everything sent has landed.
    pub(super) fn is_drained(&self) -> bool {
        let state = self.lock();
        let pipe = &state.pipes[self.side];
        pipe.frames.is_empty() && !pipe.copying
    }

    /// A frame on its way here, the next or one behind it; its payload, if any, is still at its owner's.
    pub(super) fn peek(&self, behind: usize) -> Option<Frame> {
        self.lock().pipes[1 - self.side].frames.get(behind).map(|shipment| shipment.frame.clone())
    }

    /// Takes the next frame out to copy its payload; [`End::put_back`] must follow.
    pub(super) fn take(&self) -> Option<Shipment> {
        let mut state = self.lock();
        let pipe = &mut state.pipes[1 - self.side];
        let shipment = pipe.frames.pop_front()?;
        pipe.copying = true;
        Some(shipment)
    }

    /// Sends the parcels of a shipment that was taken back to their owner.
    pub(super) fn put_back(&self, shipment: Shipment) {
        let mut state = self.lock();
        let pipe = &mut state.pipes[1 - self.side];
        pipe.copying = false;
        pipe.returned.extend(shipment.ticket.map(|ticket| (ticket, shipment.body)));
        self.ring_other();
    }

    /// The parcels that came back as sent.
    pub(super) fn sent(&self) -> Returned {
        std::mem::take(&mut self.lock().pipes[self.side].returned)
    }

    /// Gives up the frames that nobody has taken out.
    pub(super) fn give_up(&self) -> Returned {
        returned(&mut self.lock().pipes[self.side])
    }

    /// Ends the connection for both sides.
    pub(super) fn finish(&self, reason: &str) {
        let mut state = self.lock();
        state.over.get_or_insert_with(|| reason.to_owned());
        self.ring_other();
    }

    /// When the connection is over and nobody holds parcels of ours: why, and those that did not leave.
    pub(super) fn over(&self) -> Option<(String, Returned)> {
        let mut state = self.lock();
        let reason = state.over.clone()?;
        let pipe = &mut state.pipes[self.side];
        (!pipe.copying).then(|| (reason, returned(pipe)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only moves happen under the lock, so a panic elsewhere leaves it whole.
        self.link.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring_other(&self) {
        self.link.bells[1 - self.side].ring();
    }
}

fn returned(pipe: &mut Pipe) -> Returned {
    pipe.frames.drain(..).filter_map(|shipment| shipment.ticket.map(|ticket| (ticket, shipment.body))).collect()
}

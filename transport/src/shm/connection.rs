//! A connection through shared memory: rings, control socket, sender and receiver.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::task::Waker;

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::memory::shared::Board;
use pserver_core::port::{Event, Payloads, ReceiveBuffers};
use pserver_core::wire::Frame;
use socket2::SockRef;
use tokio::net::UnixStream;

use super::control_socket::{ControlMessage, ControlReceiver};
use super::receive::{ShmReceiveProgress, ShmReceiver};
use super::rings::{ShmRings, WakeFor};
use super::send::ShmSender;
use super::{ConnectionError, ConnectionSide};
use crate::connection::{Connection, ReturnedBuffers, SendProgress, TicketedBody, UnreadLimit};
use crate::turn_budget::{TURN_BYTES, TURN_FRAMES};

/// Unread wake-ups after which the socket is read. Reading costs a system call and is not needed for each, but each
/// unread byte takes about a kilobyte of the socket's buffer.
const WAKEUPS_PER_READ: u32 = 64;
/// The socket's buffer: a multiple of what may stay unread. The system doubles it, within its limits.
const SOCKET_BYTES: usize = 256 * 1024;

/// A connection through shared memory.
pub(crate) struct ShmConnection {
    stream: UnixStream,
    rings: ShmRings,
    control: ControlReceiver,
    sender: ShmSender,
    receiver: ShmReceiver,
    /// Whether the runtime may have news of the socket.
    must_poll_socket: bool,
    /// Whether the last turn read nothing because the peer leaves its answers unread.
    is_paused: bool,
    /// Sleeps, and so possible wake-ups, since the socket was read.
    unread_wakeups: u32,
    control_messages: Vec<ControlMessage>,
}

impl ShmConnection {
    /// A connection after its handshake.
    pub(crate) fn new(stream: UnixStream, board: Board, side: ConnectionSide) -> io::Result<Self> {
        SockRef::from(&stream).set_send_buffer_size(SOCKET_BYTES)?;
        let rings = ShmRings::new(board, side, stream.as_fd().try_clone_to_owned()?);
        Ok(Self {
            stream,
            rings,
            control: ControlReceiver::default(),
            sender: ShmSender::new(side == ConnectionSide::Connecting),
            receiver: ShmReceiver::new(),
            must_poll_socket: true,
            is_paused: false,
            unread_wakeups: 0,
            control_messages: Vec::new(),
        })
    }

    /// Bytes of the frames that were not returned to the caller.
    fn held(&self) -> u64 {
        self.sender.held()
    }

    fn read(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<ShmReceiveProgress, ConnectionError> {
        let budget = (TURN_BYTES, TURN_FRAMES);
        let read = self.receiver.turn(peer, &mut self.rings, budget, events)?;
        if read != ShmReceiveProgress::MissingArena {
            return Ok(read);
        }
        // The descriptor was sent before the reference was written, so it has arrived.
        self.control.read_socket_now(&self.stream, &mut self.control_messages)?;
        self.handle_control(peer, events)?;
        match self.receiver.turn(peer, &mut self.rings, budget, events)? {
            ShmReceiveProgress::MissingArena => {
                Err(ConnectionError::Broken("a reference to an arena that was not announced".to_owned()))
            }
            read => Ok(read),
        }
    }

    fn poll_socket(&mut self, peer: PeerId, waker: &Waker, events: &mut Vec<Event>) -> Result<(), ConnectionError> {
        if !std::mem::take(&mut self.must_poll_socket) {
            return Ok(());
        }
        let (reads, count_message) = (self.unread_wakeups >= WAKEUPS_PER_READ, self.rings.signals().peer_messages());
        self.control.poll_socket(&self.stream, waker, (reads, count_message), &mut self.control_messages)?;
        if reads {
            self.unread_wakeups = 0;
        }
        self.handle_control(peer, events)
    }

    fn handle_control(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<(), ConnectionError> {
        for message in self.control_messages.drain(..) {
            match message {
                ControlMessage::Arena { descriptor, holds_payloads } => {
                    self.receiver.add_arena(&descriptor, holds_payloads, &self.rings)?
                }
                ControlMessage::Gone(number) => self.receiver.drop_arena(number),
                ControlMessage::Refused(frame) => {
                    events.push(Event::Received { peer, frame, body: ReceiveBuffers::new() })
                }
            }
        }
        Ok(())
    }
}

impl Connection for ShmConnection {
    fn len(&self) -> usize {
        self.sender.len()
    }

    fn is_paused(&self) -> bool {
        self.is_paused
    }

    fn send(&mut self, ticket: Option<Ticket>, frame: Frame, body: Payloads) {
        self.sender.push(ticket, &frame, body);
    }

    fn post_receive(&mut self, places: ReceiveBuffers) {
        self.receiver.post_receive(places);
    }

    fn take_unbegun(&mut self) -> Vec<TicketedBody> {
        self.sender.take_unbegun()
    }

    fn into_buffers(mut self: Box<Self>) -> ReturnedBuffers {
        self.rings.signals().end();
        let (frames, unfilled) = (self.sender.take_all(), self.receiver.take_unfilled());
        ReturnedBuffers { frames, unfilled, ..ReturnedBuffers::default() }
    }

    fn flush(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, ConnectionError> {
        let Self { rings, stream, sender, .. } = self;
        Ok(sender.turn(peer, rings, stream, TURN_BYTES, events)? == SendProgress::BudgetSpent)
    }

    fn turn(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        unread: Option<UnreadLimit>,
        events: &mut Vec<Event>,
    ) -> Result<bool, ConnectionError> {
        self.poll_socket(peer, waker, events)?;
        self.sender.collect_returned(peer, &self.rings, events)?;
        let more = self.flush(peer, events)?;
        self.is_paused =
            !self.control.is_closed && unread.is_some_and(|unread| unread.is_reached(self.len(), self.held()));
        if self.is_paused {
            return Ok(more);
        }
        let read = self.read(peer, events)?;
        if self.control.is_closed && read == ShmReceiveProgress::Empty {
            return Err(self.receiver.end(&mut self.rings));
        }
        Ok(more || read == ShmReceiveProgress::BudgetSpent)
    }

    fn turn_closing(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> Result<(bool, bool), ConnectionError> {
        self.poll_socket(peer, waker, events)?;
        self.sender.collect_returned(peer, &self.rings, events)?;
        let written = self.sender.turn(peer, &mut self.rings, &self.stream, TURN_BYTES, events)?;
        if written == SendProgress::All {
            // Either side may have closed the socket.
            let _ = SockRef::from(&self.stream).shutdown(Shutdown::Write);
        }
        Ok((self.control.is_closed, written == SendProgress::BudgetSpent))
    }

    fn socket_woken(&mut self) {
        self.must_poll_socket = true;
    }

    fn needs_readiness(&self) -> bool {
        false
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn has_work(&mut self) -> bool {
        self.must_poll_socket
            || !self.is_paused && self.rings.has_arrived()
            || self.rings.signals().has_returned()
            || self.sender.must_report_gone()
            || !self.sender.is_empty() && self.rings.has_room()
    }

    fn request_wakeup(&mut self) {
        self.unread_wakeups = self.unread_wakeups.saturating_add(1);
        let wants = match (self.is_paused, self.sender.is_empty()) {
            (true, _) => WakeFor::SPACE,
            (false, true) => WakeFor::DATA,
            (false, false) => WakeFor::DATA.and(WakeFor::SPACE),
        };
        self.rings.signals().request_wakeup(wants);
    }

    fn cancel_wakeup(&mut self) {
        self.rings.signals().cancel_wakeup();
    }

    fn has_borrowed(&self) -> bool {
        self.sender.has_borrowed()
    }
}

impl Drop for ShmConnection {
    fn drop(&mut self) {
        self.rings.signals().end();
        // Leases that outlive the connection keep the socket's descriptor, and must not keep it open.
        let _ = SockRef::from(&self.stream).shutdown(Shutdown::Both);
    }
}

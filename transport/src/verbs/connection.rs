//! A connection over verbs: sender, receiver, queue pair and the TCP socket that signals its end.

use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Incoming, Outgoing, Payloads, ReceiveBuffers};
use pserver_core::wire::{Frame, HEADER_BYTES, Kind, Prefix};

use super::credits::CreditedMessages;
use super::device_health::DeviceHealth;
use super::receive::{VerbsReceiveProgress, VerbsReceiver};
use super::registry::{MemoryRegistry, VerbsCounters};
use super::send::VerbsSender;
use super::staging::VerbsStaging;
use super::wire_format::{MessageKind, PREFIX_BYTES};
use super::work_requests::{InFlightRequest, RequestOutcome};
use super::{ConnectionError, ConnectionSide};
use crate::connection::{Connection, ReturnedBuffers, SendProgress, TicketedBody, UnreadLimit};
use crate::tls::TcpChannel;
use crate::turn_budget::{TURN_BYTES, TURN_FRAMES};

/// The longest refusal that is read from the socket, after its header.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// A connection over verbs.
pub(crate) struct VerbsConnection {
    /// Declared first: the queue pair must close before its memory is freed.
    messages: CreditedMessages,
    sender: VerbsSender,
    receiver: VerbsReceiver,
    /// Keeps the message slots registered.
    _local_registry: MemoryRegistry,
    side: ConnectionSide,
    /// Whether the peer has reported that it is ready.
    is_ready: bool,
    /// Whether any message or refusal arrived.
    has_received: bool,
    /// Whether the last turn read no frame because the peer leaves its answers unread.
    is_paused: bool,
    health: Arc<DeviceHealth>,
    /// Whether the queue pair knows the waker that its completions call.
    has_waker: bool,
    socket: ControlSocket,
    outcomes: Vec<RequestOutcome>,
}

/// The TCP connection, which signals the end and carries refusals.
pub(super) struct ControlSocket {
    channel: TcpChannel,
    /// Whether the runtime may have news of the socket.
    must_poll_socket: bool,
    is_closed: bool,
    bytes: Vec<u8>,
}

/// The parts of a connection after the handshake.
pub(super) struct ConnectionParts {
    pub(super) messages: CreditedMessages,
    pub(super) local_registry: MemoryRegistry,
    pub(super) side: ConnectionSide,
    pub(super) send_staging: VerbsStaging,
    pub(super) receive_staging: VerbsStaging,
    pub(super) counters: Arc<VerbsCounters>,
    pub(super) health: Arc<DeviceHealth>,
    /// Whether payloads carry checksums.
    pub(super) is_checked: bool,
    /// The outcomes that came before the connection was made.
    pub(super) outcomes: Vec<RequestOutcome>,
}

impl VerbsConnection {
    pub(super) fn new(socket: ControlSocket, parts: ConnectionParts) -> Self {
        Self {
            sender: VerbsSender::new(parts.side, parts.is_checked, parts.send_staging, &parts.counters),
            receiver: VerbsReceiver::new(parts.side, parts.is_checked, parts.receive_staging, &parts.counters),
            messages: parts.messages,
            _local_registry: parts.local_registry,
            side: parts.side,
            is_ready: parts.side == ConnectionSide::Connecting,
            has_received: false,
            is_paused: false,
            health: parts.health,
            has_waker: false,
            socket,
            outcomes: parts.outcomes,
        }
    }

    /// Payload bytes of the frames that were not returned to the caller.
    fn held(&self) -> u64 {
        self.sender.held()
    }

    /// Queues a frame. A request names where the values of its answer go, and an answer is written there.
    fn push(&mut self, ticket: Ticket, mut frame: Frame, body: Payloads) {
        let Self { sender, receiver, .. } = self;
        let destinations = receiver.answers.named.take(&frame);
        let named = receiver.answers.posted.name(&mut frame, sender.staging());
        sender.push(ticket, frame, body, (named, destinations));
    }

    /// Closes the queue pair; whether the device confirms that it accesses no memory any more.
    fn close(&mut self) -> bool {
        let closed = self.messages.work_requests.close();
        let is_closed = closed.is_ok();
        for flight in closed.unwrap_or_default() {
            if let InFlightRequest::Read { index, place, staged } = flight {
                self.receiver.read_completed(index, place, staged, false);
            }
        }
        is_closed
    }

    /// A queue pair also fails when the peer closes it; the socket tells these cases apart.
    fn with_socket_cause(&mut self, error: ConnectionError) -> ConnectionError {
        match error {
            ConnectionError::Failed(status) if !status.is_peers_fault() && self.socket.is_closed => {
                ConnectionError::Cut
            }
            other => other,
        }
    }

    /// Handles the device's completions.
    fn collect_completions(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<(), ConnectionError> {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        // Requests that completed before a failure count as complete.
        let collected = self.messages.work_requests.collect(&mut outcomes);
        let mut noted = Ok(());
        for outcome in outcomes.drain(..) {
            // After the error that ends the connection, memory is still reclaimed.
            if noted.is_ok() || matches!(outcome, RequestOutcome::Completed(_)) {
                noted = noted.and(self.handle_outcome(peer, outcome, events));
            }
        }
        self.outcomes = outcomes;
        noted.and(collected)
    }

    fn handle_outcome(
        &mut self,
        peer: PeerId,
        outcome: RequestOutcome,
        events: &mut Vec<Event>,
    ) -> Result<(), ConnectionError> {
        match outcome {
            RequestOutcome::Message(message) => {
                (self.is_ready, self.has_received) = (true, true);
                let (prefix, control) = self.messages.accept_message(message)?;
                self.sender.borrowed_returned(peer, prefix.taken, events)?;
                if let Some(control) = control {
                    if prefix.kind == MessageKind::Destinations {
                        self.sender.granted(&control.slot.bytes()[PREFIX_BYTES..control.bytes])?;
                    }
                    self.messages.control_read(control.slot)?;
                }
            }
            RequestOutcome::Immediate(number, slot) => {
                if self.side == ConnectionSide::Accepting {
                    return Err(ConnectionError::Broken(format!(
                        "immediate data {number} came with a write to the accepting side, which takes none"
                    )));
                }
                self.messages.control_read(slot)?;
                self.receiver.writes_arrived(number)?;
            }
            RequestOutcome::Completed(InFlightRequest::Message(slot)) => self.messages.reclaim_slot(slot),
            RequestOutcome::Completed(InFlightRequest::Read { index, place, staged }) => {
                self.receiver.read_completed(index, place, staged, true)
            }
            RequestOutcome::Completed(InFlightRequest::Write { is_last, .. }) => {
                if is_last {
                    self.sender.write_completed(peer, events);
                }
            }
        }
        Ok(())
    }

    fn poll_socket(&mut self, peer: PeerId, waker: &Waker, events: &mut Vec<Event>) -> Result<(), ConnectionError> {
        if !std::mem::replace(&mut self.has_waker, true) {
            self.messages.work_requests.pair().set_waker(waker);
        }
        self.socket.poll_socket(waker).map_err(|error| ConnectionError::Lost(format!("reading: {error}")))?;
        if let Some(frame) = self.socket.refusal()? {
            self.has_received = true;
            events.push(Event::Received { peer, frame, body: ReceiveBuffers::new() });
        }
        Ok(())
    }
}

impl Connection for VerbsConnection {
    fn len(&self) -> usize {
        self.sender.len()
    }

    fn is_paused(&self) -> bool {
        self.is_paused
    }

    fn send(&mut self, ticket: Option<Ticket>, frame: Frame, body: Payloads) {
        match ticket {
            Some(ticket) => self.push(ticket, frame, body),
            // The connection ends with or without this refusal.
            None => drop(self.socket.send(&frame.encode())),
        }
    }

    fn post_receive(&mut self, places: ReceiveBuffers) {
        self.receiver.post_receive(places);
    }

    fn takes_answers(&self) -> bool {
        self.side == ConnectionSide::Connecting
    }

    fn post_answer(&mut self, request: Ticket, into: ReceiveBuffers) {
        self.receiver.answers.posted.post(request, into);
    }

    fn take_unbegun(&mut self) -> Vec<TicketedBody> {
        self.sender.take_unbegun()
    }

    fn into_buffers(mut self: Box<Self>) -> ReturnedBuffers {
        let is_closed = self.close();
        let frames = self.sender.take_all();
        let unfilled = self.receiver.take_unfilled();
        let answers = self.receiver.answers.posted.take_all();
        // The peer can access memory that it was told of as long as that is registered.
        let is_open = !is_closed && self.side == ConnectionSide::Connecting;
        if is_open {
            // Memory that other connections use is deregistered with theirs.
            self.health.fail("a queue pair could not be destroyed".to_owned());
        }
        if is_open && !self.sender.end_memory() {
            for parcel in frames.iter().flat_map(|(_, body)| body) {
                if let Outgoing::Loan(loan) = parcel {
                    loan.tear();
                }
            }
            for place in unfilled.iter().chain(answers.iter().flat_map(|(_, into)| into)) {
                if let Incoming::Loan(loan) = place {
                    loan.tear();
                }
            }
        }
        ReturnedBuffers { frames, unfilled, answers }
    }

    fn flush(&mut self, peer: PeerId, events: &mut Vec<Event>) -> Result<bool, ConnectionError> {
        if !self.is_ready {
            return Ok(false);
        }
        let written = self.sender.turn(peer, &mut self.messages, TURN_BYTES, events)?;
        self.messages.send_owed()?;
        Ok(written == SendProgress::BudgetSpent || self.messages.must_turn())
    }

    fn turn(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        unread: Option<UnreadLimit>,
        events: &mut Vec<Event>,
    ) -> Result<bool, ConnectionError> {
        self.poll_socket(peer, waker, events)?;
        if let Some(failure) = self.health.failure() {
            return Err(ConnectionError::Lost(format!("verbs: {failure}")));
        }
        let is_closed = self.socket.is_closed;
        if is_closed {
            // Messages that arrived before the end are in the device's queue by now.
            self.messages.work_requests.pair().collect().map_err(ConnectionError::from)?;
        }
        self.collect_completions(peer, events).map_err(|error| self.with_socket_cause(error))?;
        self.is_paused = !is_closed && unread.is_some_and(|unread| unread.is_reached(self.len(), self.held()));
        if self.is_paused {
            return self.flush(peer, events);
        }
        let read = self.receiver.turn(peer, &mut self.messages, (TURN_BYTES, TURN_FRAMES), events)?;
        let more = self.flush(peer, events)?;
        // Messages sent before the end arrived before the end was observed.
        if is_closed && read == VerbsReceiveProgress::Empty && !self.messages.work_requests.has_news() {
            return Err(if self.receiver.is_between(&self.messages) {
                ConnectionError::Closed
            } else {
                ConnectionError::Cut
            });
        }
        Ok(more || read == VerbsReceiveProgress::BudgetSpent)
    }

    fn turn_closing(
        &mut self,
        peer: PeerId,
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> Result<(bool, bool), ConnectionError> {
        self.poll_socket(peer, waker, events)?;
        if self.socket.is_closed {
            return Ok((true, false));
        }
        if let Some(failure) = self.health.failure() {
            return Err(ConnectionError::Lost(format!("verbs: {failure}")));
        }
        self.collect_completions(peer, events)?;
        let more = self.flush(peer, events)?;
        if self.sender.len() == 0 && self.messages.work_requests.is_empty() {
            // Either side may have closed the socket.
            let _ = self.socket.channel.end();
        }
        Ok((false, more))
    }

    fn socket_woken(&mut self) {
        self.socket.must_poll_socket = true;
    }

    fn needs_readiness(&self) -> bool {
        false
    }

    fn is_stalled(&mut self, now: Instant, limit: Duration) -> bool {
        self.messages.work_requests.is_stalled(now, limit)
    }

    fn has_received(&self) -> bool {
        self.has_received
    }
}

impl Drop for VerbsConnection {
    fn drop(&mut self) {
        self.close();
    }
}

impl ControlSocket {
    pub(super) fn new(channel: TcpChannel) -> Self {
        Self::with_bytes(channel, Vec::new())
    }

    /// A socket of which these bytes were read.
    pub(super) fn with_bytes(channel: TcpChannel, bytes: Vec<u8>) -> Self {
        Self { channel, must_poll_socket: true, is_closed: false, bytes }
    }

    pub(super) fn into_channel(self) -> TcpChannel {
        self.channel
    }

    pub(super) fn socket_woken(&mut self) {
        self.must_poll_socket = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Bytes that were read from the socket and not consumed.
    pub(super) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Sends a short message whole, or fails.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.channel.send_now(bytes)
    }

    /// Reads from the socket and registers `waker` for more.
    pub(super) fn poll_socket(&mut self, waker: &Waker) -> io::Result<()> {
        self.poll_socket_until(waker, HEADER_BYTES + REFUSAL_BYTES_MAX)
    }

    /// Like [`ControlSocket::poll_socket`], up to `bytes_max` bytes: later bytes belong to another reader.
    pub(super) fn poll_socket_until(&mut self, waker: &Waker, bytes_max: usize) -> io::Result<()> {
        if !std::mem::take(&mut self.must_poll_socket) {
            return Ok(());
        }
        let mut context = Context::from_waker(waker);
        while !self.is_closed && self.bytes.len() < bytes_max {
            if !self.channel.has_received() && self.channel.socket().poll_read_ready(&mut context)?.is_pending() {
                return Ok(());
            }
            let mut some = [0; 1024];
            let room = some.len().min(bytes_max - self.bytes.len());
            match self.channel.receive(&mut [IoSliceMut::new(&mut some[..room])]) {
                Ok((0, _)) => self.is_closed = true,
                Ok((read, _)) => self.bytes.extend_from_slice(&some[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // A reset counts as closed, and so does a TLS session without its last message: no data comes here.
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof) => {
                    self.is_closed = true;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The refusal in the read bytes, once it is complete.
    fn refusal(&mut self) -> Result<Option<Frame>, ConnectionError> {
        let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let prefix = Prefix::decode(header)?;
        if prefix.head().kind != Kind::Refused || prefix.rest_bytes() > REFUSAL_BYTES_MAX {
            return Err(ConnectionError::Broken("a frame on the socket is not a refusal".to_owned()));
        }
        let Some(rest) = self.bytes[HEADER_BYTES..].get(..prefix.rest_bytes()) else { return Ok(None) };
        let frame = prefix.finish(rest)?;
        self.bytes.clear();
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use pserver_core::memory::{Arena, Budget};

    use super::super::credits::slots;
    use super::super::provider::{RdmaDevice, RegionAccess};
    use super::super::software_device::SoftwareDevice;
    use super::super::work_requests::InFlightRequests;
    use super::super::{INLINE_BYTES_MAX, SLOT_BYTES};
    use super::*;
    use crate::conformance::rig::push;
    use crate::verbs::wire_format::MessagePrefix as Before;
    use crate::verbs::work_requests::{ReceiveIndex, ReceivedMessage};

    #[test]
    fn a_receive_buffer_filled_after_a_failure_is_returned() {
        let bytes = INLINE_BYTES_MAX + 1;
        let mut budget = Budget::new();
        budget.line("places and messages", bytes.max(SLOT_BYTES), 4);
        let arena = Arena::new(&budget).expect("an arena");
        let domain =
            SoftwareDevice::new().completion_channel().expect("a completion channel").domain().expect("a domain");
        let counters = Arc::default();
        let local_registry = MemoryRegistry::new(&domain, RegionAccess::Local, &counters);
        let pair = domain.pair(&InFlightRequests::capacity(false)).expect("a pair");
        let mut messages =
            CreditedMessages::new(InFlightRequests::new(pair, 0), &Arena::new(&slots()).expect("an arena"))
                .expect("slots");
        let mut slot = arena.take(SLOT_BYTES).expect("a slot");
        let frame = push(0, &[&vec![0; bytes as usize]]).encode();
        Before { kind: MessageKind::Bulk, taken: 0, number: 0, bulk: 0, note: 0 }.encode(slot.bytes_mut());
        slot.bytes_mut()[PREFIX_BYTES..PREFIX_BYTES + frame.len()].copy_from_slice(&frame);
        messages.accept_message(ReceivedMessage { slot, bytes: PREFIX_BYTES + frame.len() }).expect("there is room");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
        let _inside = runtime.enter();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let stream = std::net::TcpStream::connect(listener.local_addr().expect("a port")).expect("it listens");
        stream.set_nonblocking(true).expect("a socket");
        let socket = ControlSocket::new(tokio::net::TcpStream::from_std(stream).expect("a socket").into());
        let (send_staging, receive_staging) =
            (VerbsStaging::new(local_registry.clone()), VerbsStaging::new(local_registry.clone()));
        let (side, health) = (ConnectionSide::Accepting, Arc::default());
        let parts = ConnectionParts {
            messages,
            local_registry,
            side,
            send_staging,
            receive_staging,
            counters,
            health,
            is_checked: false,
            outcomes: Vec::new(),
        };
        let mut connection = VerbsConnection::new(socket, parts);
        let (peer, mut events) = (PeerId(1), Vec::new());
        assert!(
            connection.receiver.turn(peer, &mut connection.messages, (1 << 20, 8), &mut events).expect("a head")
                == VerbsReceiveProgress::AwaitingBuffers
        );
        connection.post_receive(vec![Incoming::Discard { bytes }].into());
        let place = Incoming::Chunk { lease: arena.take(bytes).expect("a slot"), bytes };
        let number = RequestOutcome::Immediate(0, arena.take(SLOT_BYTES).expect("a slot"));
        let index = ReceiveIndex { posted: 0, place: 0 };
        connection.outcomes =
            vec![number, RequestOutcome::Completed(InFlightRequest::Read { index, place, staged: None })];
        connection.collect_completions(peer, &mut events).expect_err("nobody asked for a number");
        let places = Box::new(connection).into_buffers().unfilled;
        assert!(matches!(places[..], [Incoming::Chunk { .. }]), "the place itself, and not what stands for it");
    }
}

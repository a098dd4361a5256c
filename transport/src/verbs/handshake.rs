//! Handshake that turns a TCP connection into one over verbs.
//!
//! The client adds an offer, the address of its queue pair, to its hello. The server answers with the address of its
//! own, or with a reason, before any frame; with a reason the connection stays on TCP. `device_context` makes and
//! connects queue pairs on threads that may block.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Payloads};
use pserver_core::wire::{ErrorCode, Frame, Kind, OfferMessage, Scheme};
use tokio::task::JoinHandle;

use super::ConnectionError;
use super::connection::{ControlSocket, VerbsConnection};
use super::device_context::{DeviceContext, OfferAnswer, PairEndpoint};
use super::provider::PairAddress;
use super::wire_format::{HANDSHAKE_BYTES, HandshakeMessage};
use crate::refusal::refusal;
use crate::tls::TcpChannel;

/// A TCP connection that has offered verbs.
pub(crate) struct VerbsHandshake {
    fixtures: HandshakeStage,
    /// Whether the address allows verbs only.
    requires_verbs: bool,
    has_sent_hello: bool,
    /// The hello that was sent, until it is reported.
    sent: Option<(Ticket, Payloads)>,
    waiting: WaitingFrames,
    send_error: Option<io::Error>,
}

enum HandshakeStage {
    /// The server's answer is outstanding.
    Offered(ControlSocket, Box<PairEndpoint>),
    /// The queue pair is being connected to the server's.
    Connecting(ControlSocket, JoinHandle<Result<PairEndpoint, ConnectionError>>),
    Finished,
}

/// The server's answer.
enum OfferReply {
    Yes(ControlSocket, Box<PairEndpoint>, PairAddress),
    /// The stream that stays TCP, the bytes that were read from it, and the reason.
    No(TcpChannel, Vec<u8>, String),
}

/// Frames that wait for the connection.
pub(crate) type WaitingFrames = Vec<(Ticket, Frame, Payloads)>;

/// The outcome of a handshake.
pub(crate) enum HandshakeResult {
    /// A connection over verbs.
    Verbs(Box<VerbsConnection>),
    /// A TCP stream, the bytes that were read from it, and the reason why it has no verbs.
    Tcp(TcpChannel, Vec<u8>, String),
}

impl VerbsHandshake {
    /// A handshake that offers `endpoint` over `stream`.
    pub(crate) fn new(channel: TcpChannel, endpoint: Box<PairEndpoint>, scheme: Scheme) -> Self {
        Self {
            fixtures: HandshakeStage::Offered(ControlSocket::new(channel), endpoint),
            requires_verbs: scheme == Scheme::Verbs,
            has_sent_hello: false,
            sent: None,
            waiting: Vec::new(),
            send_error: None,
        }
    }

    /// Sends the hello with the offer at once; later frames wait.
    pub(crate) fn send(&mut self, ticket: Option<Ticket>, mut frame: Frame, body: Payloads) {
        let (Some(ticket), HandshakeStage::Offered(socket, endpoint)) = (ticket, &mut self.fixtures) else {
            // Only a refusal has no ticket, and nothing can be refused yet.
            return self.waiting.extend(ticket.map(|ticket| (ticket, frame, body)));
        };
        if self.has_sent_hello || frame.head.kind != Kind::Hello {
            self.waiting.push((ticket, frame, body));
            return;
        }
        self.has_sent_hello = true;
        OfferMessage::add(&mut frame.control, HandshakeMessage::Yes(endpoint.end()).encode().to_vec());
        self.sent = Some((ticket, body));
        self.send_error = socket.send(&frame.encode()).err();
    }

    /// Frames that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn take_waiting(&mut self) -> Vec<(Ticket, Payloads)> {
        self.waiting.drain(..).map(|(ticket, _, body)| (ticket, body)).collect()
    }

    /// Returns the frames that the handshake holds.
    pub(crate) fn into_buffers(mut self) -> Vec<(Ticket, Payloads)> {
        self.sent.take().into_iter().chain(self.take_waiting()).collect()
    }

    /// The waker of the socket was called.
    pub(crate) fn socket_woken(&mut self) {
        if let HandshakeStage::Offered(socket, _) = &mut self.fixtures {
            socket.socket_woken();
        }
    }

    /// Makes progress; returns the outcome and the waiting frames once it is known.
    ///
    /// # Errors
    /// A wrong answer, a failed device, or the reason for no verbs where the address allows nothing else.
    pub(crate) fn turn(
        &mut self,
        (peer, device_context): (PeerId, &DeviceContext),
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> Result<Option<(HandshakeResult, WaitingFrames)>, ConnectionError> {
        if let Some(error) = self.send_error.take() {
            return Err(ConnectionError::Lost(format!("saying hello: {error}")));
        }
        if let Some((ticket, body)) = self.sent.take() {
            events.push(Event::Sent { peer, ticket, body });
        }
        let became = match std::mem::replace(&mut self.fixtures, HandshakeStage::Finished) {
            HandshakeStage::Finished => None,
            HandshakeStage::Offered(mut socket, endpoint) => {
                if is_answered(&mut socket, waker)? {
                    self.handle_answer(socket, endpoint, (device_context, waker))?
                } else {
                    self.fixtures = HandshakeStage::Offered(socket, endpoint);
                    None
                }
            }
            HandshakeStage::Connecting(socket, task) => self.poll_connecting(socket, task, waker)?,
        };
        Ok(became.map(|became| (became, std::mem::take(&mut self.waiting))))
    }

    fn handle_answer(
        &mut self,
        socket: ControlSocket,
        endpoint: Box<PairEndpoint>,
        (device_context, waker): (&DeviceContext, &Waker),
    ) -> Result<Option<HandshakeResult>, ConnectionError> {
        match self.read_answer(socket, endpoint, device_context)? {
            OfferReply::Yes(socket, endpoint, there) => {
                let task = device_context.runtime().spawn_blocking(move || endpoint.connect(&there));
                self.poll_connecting(socket, task, waker)
            }
            OfferReply::No(channel, bytes, reason) => Ok(Some(HandshakeResult::Tcp(channel, bytes, reason))),
        }
    }

    /// Reads the complete answer.
    fn read_answer(
        &self,
        mut socket: ControlSocket,
        endpoint: Box<PairEndpoint>,
        device_context: &DeviceContext,
    ) -> Result<OfferReply, ConnectionError> {
        let bytes = std::mem::take(socket.bytes());
        // More bytes, or the end, may already be there.
        socket.socket_woken();
        if HandshakeMessage::begins(&bytes) {
            let answer = HandshakeMessage::decode(&bytes).map_err(ConnectionError::Broken)?;
            if let HandshakeMessage::No(reason) = &answer {
                device_context.note_lacking(&endpoint, reason);
            }
            return match answer {
                HandshakeMessage::Yes(there) => Ok(OfferReply::Yes(socket, endpoint, there)),
                HandshakeMessage::No(reason) if self.requires_verbs => Err(ConnectionError::Device(reason)),
                HandshakeMessage::No(reason) => Ok(OfferReply::No(socket.into_channel(), Vec::new(), reason)),
            };
        }
        let is_refused = bytes.get(KIND_AT) == Some(&(Kind::Refused as u8));
        let reason = "the server answers with frames only".to_owned();
        if self.requires_verbs && !is_refused {
            return Err(ConnectionError::Device(reason));
        }
        Ok(OfferReply::No(socket.into_channel(), bytes, reason))
    }

    fn poll_connecting(
        &mut self,
        socket: ControlSocket,
        mut task: JoinHandle<Result<PairEndpoint, ConnectionError>>,
        waker: &Waker,
    ) -> Result<Option<HandshakeResult>, ConnectionError> {
        match Pin::new(&mut task).poll(&mut Context::from_waker(waker)) {
            Poll::Pending => {
                self.fixtures = HandshakeStage::Connecting(socket, task);
                Ok(None)
            }
            Poll::Ready(joined) => {
                let endpoint =
                    joined.map_err(|error| ConnectionError::Lost(format!("connecting a pair: {error}")))??;
                Ok(Some(HandshakeResult::Verbs(Box::new(endpoint.into_connection(socket)))))
            }
        }
    }
}

/// Whether the answer can be read: all of a handshake message, or the kind of a frame.
fn is_answered(socket: &mut ControlSocket, waker: &Waker) -> Result<bool, ConnectionError> {
    socket
        .poll_socket_until(waker, HANDSHAKE_BYTES)
        .map_err(|error| ConnectionError::Lost(format!("reading: {error}")))?;
    let bytes = socket.bytes();
    // A frame is told apart by its kind.
    let is_there =
        if HandshakeMessage::begins(bytes) { HandshakeMessage::is_there(bytes) } else { bytes.len() > KIND_AT };
    if !is_there && socket.is_closed() {
        return Err(ConnectionError::Closed);
    }
    Ok(is_there)
}

/// The offset of the kind in a frame's header.
const KIND_AT: usize = 5;

/// The outcome of accepting a connection.
pub(crate) enum AcceptedTransport {
    /// A connection over verbs.
    Verbs(Box<VerbsConnection>),
    /// A TCP connection without an offer, or whose offer was refused.
    Tcp(TcpChannel),
}

/// Sends the answer to a client's offer, if it made one. `scheme` is the listener's.
///
/// # Errors
/// A socket error; or a missing device where the listener allows verbs only, which the client is told.
pub(crate) fn accept_offer(
    channel: TcpChannel,
    answer: Option<OfferAnswer>,
    scheme: Scheme,
) -> io::Result<AcceptedTransport> {
    let mut socket = ControlSocket::new(channel);
    match answer {
        None if scheme == Scheme::Verbs => Err(refuse(&mut socket, "this server takes connections over verbs only")),
        None => Ok(AcceptedTransport::Tcp(socket.into_channel())),
        Some(Ok(endpoint)) => {
            socket.send(&HandshakeMessage::Yes(endpoint.end()).encode())?;
            tracing::debug!("a connection goes over verbs");
            Ok(AcceptedTransport::Verbs(Box::new(endpoint.into_connection(socket))))
        }
        Some(Err(reason)) => {
            socket.send(&HandshakeMessage::No(reason.clone()).encode())?;
            if scheme == Scheme::Verbs {
                return Err(io::Error::other(reason));
            }
            tracing::info!(reason, "a connection stays on TCP");
            Ok(AcceptedTransport::Tcp(socket.into_channel()))
        }
    }
}

/// Tells the client the reason, and returns it.
fn refuse(socket: &mut ControlSocket, reason: &str) -> io::Error {
    // The connection ends with or without this refusal.
    drop(socket.send(&refusal(ErrorCode::Invalid, reason).encode()));
    io::Error::other(reason)
}

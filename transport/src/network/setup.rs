//! Setup of a connection that this side makes: connecting, then the handshake of verbs where the address allows it.
//!
//! Here, and in [`accepted`], is the only choice among TCP, shared memory and verbs; a peer then has a [`Connection`].

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Payloads, ReceiveBuffers};
use pserver_core::wire::{Address, Frame, Scheme};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::checks::ChecksumPolicy;
use super::failures::ConnectFailure;
use super::handoff::AcceptedStream;
use super::socket::ConnectedStream;
use super::tcp::TcpConnection;
use crate::connection::{Connection, ConnectionError, ConnectionSide, TicketedBody};
use crate::shm::ShmConnection;
use crate::tls::TcpChannel;
use crate::verbs::{self, AcceptedTransport, DeviceContext, HandshakeResult, VerbsHandshake, WaitingFrames};

/// A connection that is being made, and the frames for it.
pub(super) struct ConnectionSetup {
    stage: SetupStage,
    checks: ChecksumPolicy,
    /// The address that was offered verbs and also allows TCP.
    offered: Option<Address>,
    waiting: WaitingFrames,
}

enum SetupStage {
    Connecting(JoinHandle<Result<ConnectedStream, ConnectFailure>>),
    /// A TCP connection that has offered verbs.
    Handshake(Box<VerbsHandshake>),
}

/// The progress of a setup.
pub(super) enum SetupProgress {
    /// The waker is registered.
    Pending,
    /// The connection, with the waiting frames queued, and the address to deny verbs to if it fails.
    Established(Box<dyn Connection>, Option<Address>),
    /// The setup failed for this reason.
    Failed(String),
}

impl ConnectionSetup {
    pub(super) fn new(task: JoinHandle<Result<ConnectedStream, ConnectFailure>>, checks: ChecksumPolicy) -> Self {
        Self { stage: SetupStage::Connecting(task), checks, offered: None, waiting: Vec::new() }
    }

    /// Frames that wait for the connection.
    pub(super) fn len(&self) -> usize {
        match &self.stage {
            SetupStage::Connecting(_) => self.waiting.len(),
            SetupStage::Handshake(handshake) => handshake.len(),
        }
    }

    /// Queues a frame; the handshake sends a hello at once.
    pub(super) fn send(&mut self, ticket: Ticket, frame: Frame, body: Payloads) {
        match &mut self.stage {
            SetupStage::Connecting(_) => self.waiting.push((ticket, frame, body)),
            SetupStage::Handshake(handshake) => handshake.send(Some(ticket), frame, body),
        }
    }

    /// Records that the waker was called.
    pub(super) fn socket_woken(&mut self) {
        if let SetupStage::Handshake(handshake) = &mut self.stage {
            handshake.socket_woken();
        }
    }

    /// Abandons the setup, and returns its frames.
    pub(super) fn into_frames(self) -> Vec<TicketedBody> {
        match self.stage {
            SetupStage::Connecting(task) => {
                task.abort();
                self.waiting.into_iter().map(|(ticket, _, body)| (ticket, body)).collect()
            }
            SetupStage::Handshake(handshake) => handshake.into_buffers(),
        }
    }

    /// Makes progress without blocking.
    pub(super) fn poll(
        &mut self,
        peer: PeerId,
        device_context: &DeviceContext,
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> SetupProgress {
        if let SetupStage::Connecting(task) = &mut self.stage {
            let connected = match Pin::new(task).poll(&mut Context::from_waker(waker)) {
                Poll::Pending => return SetupProgress::Pending,
                Poll::Ready(Err(error)) => return SetupProgress::Failed(format!("connecting: {error}")),
                Poll::Ready(Ok(Err(ConnectFailure::Failed(reason)))) => return SetupProgress::Failed(reason),
                Poll::Ready(Ok(Err(ConnectFailure::Refused(frame)))) => {
                    events.extend([
                        Event::Connected { peer },
                        Event::Received { peer, frame, body: ReceiveBuffers::new() },
                    ]);
                    return SetupProgress::Failed("refused before the hello".to_owned());
                }
                Poll::Ready(Ok(Ok(connected))) => connected,
            };
            match self.connected(peer, connected, events) {
                Ok(Some(progress)) => return progress,
                Ok(None) => {}
                Err(reason) => return SetupProgress::Failed(reason),
            }
        }
        self.poll_handshake(peer, device_context, waker, events)
    }

    /// The socket is connected: the connection, or nothing when the handshake of verbs follows.
    fn connected(
        &mut self,
        peer: PeerId,
        connected: ConnectedStream,
        events: &mut Vec<Event>,
    ) -> Result<Option<SetupProgress>, String> {
        let connection: Box<dyn Connection> = match connected {
            ConnectedStream::Tcp(channel) => Box::new(TcpConnection::new(channel, self.checks)),
            ConnectedStream::Shm(endpoint) => {
                let connection = ShmConnection::new(endpoint.stream, endpoint.board, ConnectionSide::Connecting);
                Box::new(connection.map_err(|error| format!("connecting: {error}"))?)
            }
            ConnectedStream::VerbsOffer(channel, address, Ok(endpoint)) => {
                self.offered = (address.scheme == Scheme::Auto).then(|| address.clone());
                let mut handshake = Box::new(VerbsHandshake::new(channel, endpoint, address.scheme));
                for (ticket, frame, body) in self.waiting.drain(..) {
                    handshake.send(Some(ticket), frame, body);
                }
                self.stage = SetupStage::Handshake(handshake);
                events.push(Event::Connected { peer });
                return Ok(None);
            }
            ConnectedStream::VerbsOffer(_, address, Err(reason)) if address.scheme == Scheme::Verbs => {
                return Err(format!("connecting to {address}: {reason}"));
            }
            ConnectedStream::VerbsOffer(channel, address, Err(reason)) => {
                tracing::info!(%address, carried_by = carried_by(&channel), "connected over TCP; {reason}");
                self.offered = (address.scheme == Scheme::Auto).then(|| address.clone());
                Box::new(TcpConnection::new(channel, self.checks))
            }
        };
        let waiting = std::mem::take(&mut self.waiting);
        let progress = self.established(connection, waiting);
        events.push(Event::Connected { peer });
        Ok(Some(progress))
    }

    fn poll_handshake(
        &mut self,
        peer: PeerId,
        device_context: &DeviceContext,
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> SetupProgress {
        let SetupStage::Handshake(handshake) = &mut self.stage else { return SetupProgress::Pending };
        let (result, waiting) = match handshake.turn((peer, device_context), waker, events) {
            Ok(Some(finished)) => finished,
            Ok(None) => return SetupProgress::Pending,
            Err(error) => {
                // The server has made its end by then, and would fail again.
                let is_of_verbs = matches!(
                    error,
                    ConnectionError::Device(_) | ConnectionError::Broken(_) | ConnectionError::Failed(_)
                );
                if let Some(address) = self.offered.as_ref().filter(|_| is_of_verbs) {
                    device_context.deny(Some(address), &error.to_string());
                }
                return SetupProgress::Failed(error.to_string());
            }
        };
        let connection: Box<dyn Connection> = match result {
            HandshakeResult::Verbs(connection) => {
                tracing::info!(peer = peer.0, carried_by = "verbs", "connected over verbs");
                connection
            }
            HandshakeResult::Tcp(channel, bytes, reason) => {
                let carried_by = carried_by(&channel);
                tracing::info!(peer = peer.0, carried_by, "connected over TCP; no verbs: {reason}");
                Box::new(TcpConnection::with_read_bytes(channel, self.checks, &bytes))
            }
        };
        self.established(connection, waiting)
    }

    fn established(&mut self, mut connection: Box<dyn Connection>, waiting: WaitingFrames) -> SetupProgress {
        for (ticket, frame, body) in waiting {
            connection.send(Some(ticket), frame, body);
        }
        SetupProgress::Established(connection, self.offered.take())
    }
}

/// The name of the carrier of a connection over TCP, for the log.
fn carried_by(channel: &TcpChannel) -> String {
    channel.suite().map_or_else(|| "tcp".to_owned(), |suite| format!("tls: {suite}"))
}

/// The connection over an accepted socket. The caller is inside the runtime.
pub(super) fn accepted(
    stream: AcceptedStream,
    scheme: Scheme,
    checks: ChecksumPolicy,
) -> io::Result<Box<dyn Connection>> {
    Ok(match stream {
        AcceptedStream::Tcp(channel, answer) => match verbs::accept_offer(channel.attach()?, answer, scheme)? {
            AcceptedTransport::Verbs(connection) => connection,
            AcceptedTransport::Tcp(channel) => Box::new(TcpConnection::new(channel, checks)),
        },
        AcceptedStream::Shm(stream, board) => {
            Box::new(ShmConnection::new(UnixStream::from_std(stream)?, board, ConnectionSide::Accepting)?)
        }
    })
}

//! Return of a connection from TCP to verbs, between two frames.
//!
//! A client that may choose, and whose connection goes over TCP, makes a queue pair after a while and offers it in an
//! [`Kind::Offer`] frame. The connection goes on over TCP until the new pair has proved that it carries messages:
//!
//! ```text
//!  client                                              server
//!   offer: its queue pair           ---- TCP ---->      makes a queue pair, connects it
//!   connects its own, proves it     <--- TCP ----       yes: its queue pair, or no: the reason
//!   switch, its last frame over TCP ---- TCP ---->      sends the frames of its queue
//!                                   <--- TCP ----       switch, its last frame over TCP
//!   frames                          <-- verbs -->       frames
//! ```
//!
//! Not here: the verbs of a new connection (`verbs::handshake`), and the time for which an address is denied
//! (`verbs::denials`).

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pserver_core::ids::Ticket;
use pserver_core::port::Payloads;
use pserver_core::wire::{Address, Frame, Head, Kind, Scheme};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::socket;
use crate::connection::{Connection, ConnectionError, TicketedBody};
use crate::verbs::{DeviceContext, HandshakeMessage, OfferAnswer, PairEndpoint, RETRY_FIRST, WaitingFrames, longer};

/// The way of one connection from TCP to verbs.
pub(super) struct Upgrade {
    stage: UpgradeStage,
    side: UpgradeSide,
    /// Frames of this side behind its switch.
    held: WaitingFrames,
}

enum UpgradeSide {
    /// The client: the address, which allows verbs, and the delay before the next offer.
    Client(Address, Duration),
    /// The server: the scheme of its listener.
    Server(Scheme),
}

enum UpgradeStage {
    /// Nothing is in progress.
    Idle,
    /// The client waits, then makes a queue pair; nothing on a machine without any device.
    Preparing(JoinHandle<Option<OfferAnswer>>),
    /// The client has offered this queue pair.
    Offered(Box<PairEndpoint>),
    /// The client connects it and proves that it carries messages.
    Proving(JoinHandle<Result<PairEndpoint, ConnectionError>>),
    /// The server makes and connects a queue pair.
    Answering(JoinHandle<OfferAnswer>),
    /// The server has answered with this queue pair.
    Answered(Box<PairEndpoint>),
    /// The client has queued its switch, and awaits the server's.
    Switching(Box<PairEndpoint>),
    /// The peer has switched. This side does when its queue is sent.
    Draining(Box<PairEndpoint>),
}

/// The progress of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpgradeProgress {
    /// The waker is registered.
    Pending,
    /// A frame was queued, which the next turn of the connection sends.
    Queued,
    /// The connection goes over verbs.
    Switched,
}

impl Upgrade {
    /// The upgrade of a client's connection to an address that allows both.
    pub(super) fn of_client(address: Address, connection: &dyn Connection, device_context: &DeviceContext) -> Self {
        let mut upgrade =
            Self { stage: UpgradeStage::Idle, side: UpgradeSide::Client(address, RETRY_FIRST), held: Vec::new() };
        upgrade.prepare(connection, device_context);
        upgrade
    }

    /// The upgrade of an accepted connection.
    pub(super) fn of_server(scheme: Scheme) -> Self {
        Self { stage: UpgradeStage::Idle, side: UpgradeSide::Server(scheme), held: Vec::new() }
    }

    /// Whether this side's frames wait for the switch.
    pub(super) fn is_holding(&self) -> bool {
        matches!(self.stage, UpgradeStage::Switching(_) | UpgradeStage::Draining(_))
    }

    /// Frames that wait for the switch.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Keeps a frame until the switch.
    pub(super) fn hold(&mut self, ticket: Ticket, frame: Frame, body: Payloads) {
        self.held.push((ticket, frame, body));
    }

    /// The frames that wait, of an upgrade that is abandoned.
    pub(super) fn take_held(&mut self) -> impl Iterator<Item = TicketedBody> + '_ {
        self.held.drain(..).map(|(ticket, _, body)| (ticket, body))
    }

    /// Makes progress without blocking. At the end `connection` becomes one over verbs.
    ///
    /// # Errors
    /// The peer's offer, answer or switch is out of order or malformed, or the stream cannot be taken over.
    pub(super) fn turn(
        &mut self,
        connection: &mut Box<dyn Connection>,
        device_context: &DeviceContext,
        waker: &Waker,
    ) -> Result<UpgradeProgress, ConnectionError> {
        let mut has_queued = false;
        let offer = connection.take_offer();
        if offer.is_none() && matches!(self.stage, UpgradeStage::Idle) {
            return Ok(UpgradeProgress::Pending);
        }
        if let Some(bytes) = offer {
            has_queued = self.receive(bytes, connection.as_mut(), device_context)?;
        }
        has_queued |= self.poll(connection.as_mut(), device_context, waker)?;
        match std::mem::replace(&mut self.stage, UpgradeStage::Idle) {
            UpgradeStage::Draining(endpoint) if connection.len() == 0 => {
                self.switch(connection, *endpoint, device_context)?;
                Ok(UpgradeProgress::Switched)
            }
            stage => {
                self.stage = stage;
                Ok(if has_queued { UpgradeProgress::Queued } else { UpgradeProgress::Pending })
            }
        }
    }

    /// Handles a frame of the peer's upgrade; whether one was queued.
    fn receive(
        &mut self,
        bytes: Vec<u8>,
        connection: &mut dyn Connection,
        device_context: &DeviceContext,
    ) -> Result<bool, ConnectionError> {
        let message = if bytes.is_empty() { None } else { Some(HandshakeMessage::decode(&bytes)) };
        let message = message.transpose().map_err(ConnectionError::Broken)?;
        let is_client = matches!(self.side, UpgradeSide::Client(..));
        let (stage, has_queued) = match (std::mem::replace(&mut self.stage, UpgradeStage::Idle), message, &self.side) {
            (UpgradeStage::Idle, Some(HandshakeMessage::Yes(_)), UpgradeSide::Server(scheme)) => {
                let (context, scheme, local) = (device_context.clone(), *scheme, local(connection));
                let answer = move || context.answer(&bytes, scheme, local);
                (UpgradeStage::Answering(device_context.runtime().spawn_blocking(answer)), false)
            }
            (UpgradeStage::Answered(_), Some(HandshakeMessage::No(reason)), _) => {
                tracing::info!(reason, "a connection stays on TCP");
                (UpgradeStage::Idle, false)
            }
            (UpgradeStage::Answered(endpoint), None, _) => {
                connection.send(None, frame(Vec::new()), Payloads::new());
                (UpgradeStage::Draining(endpoint), true)
            }
            (UpgradeStage::Offered(endpoint), Some(HandshakeMessage::Yes(there)), _) => {
                let prove = move || endpoint.connect(&there);
                (UpgradeStage::Proving(device_context.runtime().spawn_blocking(prove)), false)
            }
            (UpgradeStage::Offered(endpoint), Some(HandshakeMessage::No(reason)), _) => {
                device_context.note_lacking(&endpoint, &reason);
                self.fail(&reason, connection, device_context);
                return Ok(false);
            }
            (UpgradeStage::Switching(endpoint), None, _) => (UpgradeStage::Draining(endpoint), false),
            _ => {
                let (from, of) = if is_client { ("server", "answer") } else { ("client", "offer") };
                return Err(ConnectionError::Broken(format!("the {from} sends an {of} of verbs out of order")));
            }
        };
        self.stage = stage;
        Ok(has_queued)
    }

    /// Looks whether this side's work is done; whether a frame was queued.
    fn poll(
        &mut self,
        connection: &mut dyn Connection,
        device_context: &DeviceContext,
        waker: &Waker,
    ) -> Result<bool, ConnectionError> {
        let (stage, message) = match &mut self.stage {
            UpgradeStage::Preparing(task) => match outcome(task, waker)? {
                None => return Ok(false),
                Some(None) => {
                    self.stage = UpgradeStage::Idle;
                    return Ok(false);
                }
                Some(Some(Err(_))) => {
                    self.prepare_again(connection, device_context);
                    return self.poll(connection, device_context, waker);
                }
                Some(Some(Ok(endpoint))) => {
                    let offer = HandshakeMessage::Yes(endpoint.end());
                    (UpgradeStage::Offered(endpoint), Some(offer))
                }
            },
            UpgradeStage::Proving(task) => match outcome(task, waker)? {
                None => return Ok(false),
                Some(Ok(endpoint)) => (UpgradeStage::Switching(Box::new(endpoint)), None),
                Some(Err(error)) => {
                    let reason = error.to_string();
                    self.fail(&reason, connection, device_context);
                    connection.send(None, frame(HandshakeMessage::No(reason).encode().to_vec()), Payloads::new());
                    return Ok(true);
                }
            },
            UpgradeStage::Answering(task) => match outcome(task, waker)? {
                None => return Ok(false),
                Some(Ok(endpoint)) => {
                    let answer = HandshakeMessage::Yes(endpoint.end());
                    (UpgradeStage::Answered(endpoint), Some(answer))
                }
                Some(Err(reason)) => (UpgradeStage::Idle, Some(HandshakeMessage::No(reason))),
            },
            _ => return Ok(false),
        };
        let control = message.map_or_else(Vec::new, |message| message.encode().to_vec());
        connection.send(None, frame(control), Payloads::new());
        self.stage = stage;
        Ok(true)
    }

    /// The client offers again later.
    fn fail(&mut self, reason: &str, connection: &dyn Connection, device_context: &DeviceContext) {
        if let UpgradeSide::Client(address, _) = &self.side {
            tracing::info!(%address, "a connection stays on TCP: {reason}");
        }
        self.prepare_again(connection, device_context);
    }

    /// Waits longer than before, and then makes another queue pair.
    fn prepare_again(&mut self, connection: &dyn Connection, device_context: &DeviceContext) {
        if let UpgradeSide::Client(_, delay) = &mut self.side {
            *delay = longer(*delay);
        }
        self.prepare(connection, device_context);
    }

    /// Begins to wait, and then to make a queue pair.
    fn prepare(&mut self, connection: &dyn Connection, device_context: &DeviceContext) {
        let UpgradeSide::Client(address, delay) = &self.side else { return };
        let (context, address, delay, local) = (device_context.clone(), address.clone(), *delay, local(connection));
        self.stage = UpgradeStage::Preparing(device_context.runtime().spawn(async move {
            tokio::time::sleep(delay).await;
            let offer =
                move || Some(context.offer(&address, local)).filter(|made| made.is_ok() || context.has_devices());
            tokio::task::spawn_blocking(offer).await.ok().flatten()
        }));
    }

    fn switch(
        &mut self,
        connection: &mut Box<dyn Connection>,
        endpoint: PairEndpoint,
        device_context: &DeviceContext,
    ) -> Result<(), ConnectionError> {
        let _inside = device_context.runtime().enter();
        let stream = duplicate(connection.tcp_stream())?;
        let mut over_verbs = endpoint.take_over(stream.into(), connection.take_unread());
        for (ticket, frame, body) in self.held.drain(..) {
            over_verbs.send(Some(ticket), frame, body);
        }
        *connection = over_verbs;
        Ok(())
    }
}

impl Drop for Upgrade {
    fn drop(&mut self) {
        if let UpgradeStage::Preparing(task) = &self.stage {
            task.abort();
        }
    }
}

/// A frame of an upgrade. One without a message is the switch.
fn frame(control: Vec<u8>) -> Frame {
    Frame { control, ..Frame::bare(Head::new(Kind::Offer)) }
}

fn local(connection: &dyn Connection) -> Option<IpAddr> {
    socket::ip(connection.tcp_stream()?.local_addr())
}

/// Another descriptor of the stream: the old connection is dropped with its own.
fn duplicate(stream: Option<&TcpStream>) -> Result<TcpStream, ConnectionError> {
    let made = stream.map(|stream| {
        let descriptor = rustix::io::fcntl_dupfd_cloexec(stream, 0)?;
        TcpStream::from_std(std::net::TcpStream::from(descriptor))
    });
    let lost = |error| ConnectionError::Lost(format!("taking over a socket for verbs: {error}"));
    made.unwrap_or_else(|| Err(std::io::ErrorKind::Unsupported.into())).map_err(lost)
}

/// The outcome of a task, once it is over; until then the waker is registered.
fn outcome<T>(task: &mut JoinHandle<T>, waker: &Waker) -> Result<Option<T>, ConnectionError> {
    match Pin::new(task).poll(&mut Context::from_waker(waker)) {
        Poll::Pending => Ok(None),
        Poll::Ready(Ok(outcome)) => Ok(Some(outcome)),
        Poll::Ready(Err(error)) => Err(ConnectionError::Lost(format!("making a queue pair: {error}"))),
    }
}

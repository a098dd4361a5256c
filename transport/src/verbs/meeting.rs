//! How a TCP connection becomes one over verbs.
//!
//! Who connects adds an offer, its end of a pair, to its hello. Who accepts answers with its own end, or with why it
//! has none, before anything else; then the connection stays what it was. Ends are made and connected (`hall`) where
//! nobody waits for them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Outgoing};
use pserver_core::wire::{ErrorCode, Frame, Kind, OfferMessage, Scheme};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::Ended;
use super::hall::{Answer, Half, Hall};
use super::letters::{LETTER_BYTES, Letter};
use super::line::{Line, Socket};
use super::provider::End;
use crate::network::Checks;
use crate::refusal::refusal;

/// A connection that was made, and offers more.
pub(crate) struct Meeting {
    stage: Stage,
    /// Whether nothing but verbs will do.
    must: bool,
    checks: Checks,
    has_greeted: bool,
    /// The hello, once it has left.
    sent: Option<(Ticket, Vec<Outgoing>)>,
    waiting: Waiting,
    broken: Option<io::Error>,
}

enum Stage {
    /// The other side's answer is to come.
    Asked(Socket, Box<Half>),
    /// It is there, and the pair is being connected to the other's.
    Joining(Socket, JoinHandle<Result<Half, Ended>>),
    Over,
}

/// What an answer says.
enum Answered {
    Yes(Socket, Box<Half>, End),
    /// What it stays, what came over it, and why.
    No(TcpStream, Vec<u8>, String),
}

/// Frames that wait for a connection.
pub(crate) type Waiting = Vec<(Ticket, Frame, Vec<Outgoing>)>;

/// What became of a meeting.
pub(crate) enum Became {
    /// A connection over verbs.
    Line(Box<Line>),
    /// What it was before, what came over it, and why.
    Tcp(TcpStream, Vec<u8>, String),
}

impl Meeting {
    /// Offers this side's end over `stream`.
    pub(crate) fn new(stream: TcpStream, half: Box<Half>, scheme: Scheme, checks: Checks) -> Self {
        Self {
            stage: Stage::Asked(Socket::new(stream), half),
            must: scheme == Scheme::Verbs,
            checks,
            has_greeted: false,
            sent: None,
            waiting: Vec::new(),
            broken: None,
        }
    }

    /// The hello leaves at once, with the offer; what follows waits.
    pub(crate) fn send(&mut self, ticket: Option<Ticket>, mut frame: Frame, body: Vec<Outgoing>) {
        let (Some(ticket), Stage::Asked(socket, half)) = (ticket, &self.stage) else {
            // What has no ticket is a refusal, and nothing was refused yet.
            return self.waiting.extend(ticket.map(|ticket| (ticket, frame, body)));
        };
        if self.has_greeted || frame.head.kind != Kind::Hello {
            self.waiting.push((ticket, frame, body));
            return;
        }
        self.has_greeted = true;
        OfferMessage::add(&mut frame.control, Letter::Yes(half.end()).encode().to_vec());
        self.sent = Some((ticket, body));
        self.broken = socket.send(&frame.encode()).err();
    }

    /// How payloads are checked if it stays on TCP.
    pub(crate) fn checks(&self) -> Checks {
        self.checks
    }

    /// Frames that have not left.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn take_waiting(&mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        self.waiting.drain(..).map(|(ticket, _, body)| (ticket, body)).collect()
    }

    /// What it still holds.
    pub(crate) fn into_parcels(mut self) -> Vec<(Ticket, Vec<Outgoing>)> {
        self.sent.take().into_iter().chain(self.take_waiting()).collect()
    }

    /// The socket may have something to say.
    pub(crate) fn woken(&mut self) {
        if let Stage::Asked(socket, _) = &mut self.stage {
            socket.woken();
        }
    }

    /// What became of it, once that is known, and the frames that wait for it.
    ///
    /// # Errors
    /// What is wrong with the answer, or with the device; and why there are no verbs, when nothing else will do.
    pub(crate) fn turn(
        &mut self,
        (peer, hall): (PeerId, &Hall),
        waker: &Waker,
        events: &mut Vec<Event>,
    ) -> Result<Option<(Became, Waiting)>, Ended> {
        if let Some(error) = self.broken.take() {
            return Err(Ended::Lost(format!("saying hello: {error}")));
        }
        if let Some((ticket, body)) = self.sent.take() {
            events.push(Event::Sent { peer, ticket, body });
        }
        let became = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Over => None,
            Stage::Asked(mut socket, half) => {
                if is_answered(&mut socket, waker)? {
                    self.answered(socket, half, (hall, waker))?
                } else {
                    self.stage = Stage::Asked(socket, half);
                    None
                }
            }
            Stage::Joining(socket, task) => self.joining(socket, task, waker)?,
        };
        Ok(became.map(|became| (became, std::mem::take(&mut self.waiting))))
    }

    fn answered(
        &mut self,
        socket: Socket,
        half: Box<Half>,
        (hall, waker): (&Hall, &Waker),
    ) -> Result<Option<Became>, Ended> {
        match self.read(socket, half)? {
            Answered::Yes(socket, half, there) => {
                let task = hall.runtime().spawn_blocking(move || half.join(&there));
                self.joining(socket, task, waker)
            }
            Answered::No(stream, bytes, reason) => Ok(Some(Became::Tcp(stream, bytes, reason))),
        }
    }

    /// Reads the answer, which is there.
    fn read(&self, mut socket: Socket, half: Box<Half>) -> Result<Answered, Ended> {
        let bytes = std::mem::take(socket.bytes());
        // There may be more than was looked for, or the end.
        socket.woken();
        if Letter::begins(&bytes) {
            return match Letter::decode(&bytes).map_err(Ended::Broken)? {
                Letter::Yes(there) => Ok(Answered::Yes(socket, half, there)),
                Letter::No(reason) if self.must => Err(Ended::Device(reason)),
                Letter::No(reason) => Ok(Answered::No(socket.into_stream(), Vec::new(), reason)),
            };
        }
        let is_refused = bytes.get(KIND_AT) == Some(&(Kind::Refused as u8));
        let reason = "the server answers with frames only".to_owned();
        if self.must && !is_refused {
            return Err(Ended::Device(reason));
        }
        Ok(Answered::No(socket.into_stream(), bytes, reason))
    }

    fn joining(
        &mut self,
        socket: Socket,
        mut task: JoinHandle<Result<Half, Ended>>,
        waker: &Waker,
    ) -> Result<Option<Became>, Ended> {
        match Pin::new(&mut task).poll(&mut Context::from_waker(waker)) {
            Poll::Pending => {
                self.stage = Stage::Joining(socket, task);
                Ok(None)
            }
            Poll::Ready(joined) => {
                let half = joined.map_err(|error| Ended::Lost(format!("connecting a pair: {error}")))??;
                Ok(Some(Became::Line(Box::new(half.into_line(socket)?))))
            }
        }
    }
}

/// Whether the answer is there: a letter, or the beginning of a frame.
fn is_answered(socket: &mut Socket, waker: &Waker) -> Result<bool, Ended> {
    socket.look_for(waker, LETTER_BYTES).map_err(|error| Ended::Lost(format!("reading: {error}")))?;
    let bytes = socket.bytes();
    // Of a frame, the kind must be there.
    let is_there = if Letter::begins(bytes) { Letter::is_there(bytes) } else { bytes.len() > KIND_AT };
    if !is_there && socket.is_over() {
        return Err(Ended::Closed);
    }
    Ok(is_there)
}

/// Where a frame's header has its kind.
const KIND_AT: usize = 5;

/// What becomes of a connection that was accepted.
pub(crate) enum Welcomed {
    /// A connection over verbs.
    Line(Box<Line>),
    /// A TCP connection, to which nothing else was offered, or which cannot have it.
    Tcp(TcpStream),
}

/// Tells the other side what is answered to the offer that it made, if it made one. `scheme` is what the server listens
/// by.
///
/// # Errors
/// What is wrong with the socket; that there are no verbs where nothing else will do, which the other side is told.
pub(crate) fn welcome(stream: TcpStream, answer: Option<Answer>, scheme: Scheme) -> io::Result<Welcomed> {
    let socket = Socket::new(stream);
    match answer {
        None if scheme == Scheme::Verbs => Err(refuse(&socket, "this server takes connections over verbs only")),
        None => Ok(Welcomed::Tcp(socket.into_stream())),
        Some(Ok(half)) => {
            socket.send(&Letter::Yes(half.end()).encode())?;
            tracing::debug!("a connection goes over verbs");
            Ok(Welcomed::Line(Box::new(half.into_line(socket).map_err(io::Error::other)?)))
        }
        Some(Err(reason)) => {
            socket.send(&Letter::No(reason.clone()).encode())?;
            if scheme == Scheme::Verbs {
                return Err(io::Error::other(reason));
            }
            tracing::info!(reason, "a connection stays on TCP");
            Ok(Welcomed::Tcp(socket.into_stream()))
        }
    }
}

/// Tells the other side why it goes no further.
fn refuse(socket: &Socket, reason: &str) -> io::Error {
    // Nothing depends on whether it listens.
    drop(socket.send(&refusal(ErrorCode::Invalid, reason).encode()));
    io::Error::other(reason)
}

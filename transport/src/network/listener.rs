//! Where a server listens: on one port, and for processes of its machine under a name that goes with the port.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::wire::{Address, ErrorCode, Frame, HEADER_BYTES, Kind, OfferMessage, Prefix, Scheme};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::adopter::{Adopted, Caller};
use super::makers::Makers;
use super::token::{self, Token};
use super::{Adopter, Engine, NetworkOptions, socket};
use crate::refusal::refusal;
use crate::shm;
use crate::verbs::Answer;

/// Connections that have not said hello; beyond it the oldest one is dropped.
const PENDING_MAX: usize = 256;
/// Connections that the system accepts before we look.
const BACKLOG: u32 = 1024;
/// After a failure to accept, such as no descriptors left, others get this long to give some back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections for every lane of a server.
pub struct Listener {
    /// The port, if somebody may connect to it.
    socket: Option<std::net::TcpListener>,
    /// Where processes of this machine connect, if they may.
    near: Option<std::os::unix::net::UnixListener>,
    /// Keeps the number of a port that nobody may connect to.
    _reserved: Option<socket2::Socket>,
    local: Address,
    options: NetworkOptions,
}

/// Ends a [`Listener::run`], from any thread. Clones end the same one.
#[derive(Clone)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Stop {
    /// One that has not been used.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Ends it.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    async fn stopped(&self) {
        // The sender is held right here, so the channel cannot be closed.
        let _ = self.0.subscribe().wait_for(|stopped| *stopped).await;
    }
}

impl Default for Stop {
    fn default() -> Self {
        Self::new()
    }
}

impl Listener {
    /// Listens on `address`: on its port, for processes of this machine that share memory, or both, as its scheme
    /// says. Port zero takes a free one, which [`Listener::local_address`] names. Blocks while a name is resolved.
    ///
    /// # Errors
    /// [`Failure::Node`] when the address cannot be had, naming it and what to look for.
    pub fn bind(address: &Address, options: NetworkOptions) -> Result<Self, Failure> {
        let refused = |error: &dyn std::fmt::Display| Failure::Node(format!("listening on {address}: {error}"));
        if address.scheme == Scheme::Loopback {
            return Err(refused(&"this listener is for other processes"));
        }
        let engine = Engine::new()?;
        let listen = async {
            let mut failed = io::Error::other("the name has no address");
            for number in socket::resolve(address).await? {
                match Self::take(address.scheme, number, &options) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        };
        engine.runtime().block_on(listen).map_err(|error| refused(&explained(&error, address)))
    }

    fn take(scheme: Scheme, number: SocketAddr, options: &NetworkOptions) -> io::Result<Self> {
        // Where both are known, the near one comes first: who finds it missing goes over the port for good.
        let mut near = if number.port() > 0 { listen_near(scheme, number)? } else { None };
        let (socket, reserved) = match scheme {
            Scheme::Shm => (None, Some(reserve(number)?)),
            _ => (Some(listen(number, options)?.into_std()?), None),
        };
        let found = match (&socket, &reserved) {
            (Some(socket), _) => socket.local_addr()?,
            (_, reserved) => reserved.as_ref().and_then(|one| one.local_addr().ok()?.as_socket()).unwrap_or(number),
        };
        if number.port() == 0 {
            near = listen_near(scheme, found)?;
        }
        let local = Address { scheme, host: found.ip().to_string(), port: found.port() };
        Ok(Self { socket, near, _reserved: reserved, local, options: options.clone() })
    }

    /// Whether processes of this machine can share memory with the server.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        self.near.is_some()
    }

    /// Where it listens, with the port that was found.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.local.clone()
    }

    /// Accepts until `stop`. A hello's sequence number is its lane, and the connection goes to that place of
    /// `lanes`; whatever is not a hello, and a lane that is not there, is refused with the reason. Needs a thread
    /// of its own.
    ///
    /// # Errors
    /// [`Failure::Node`] when the system has no descriptors for it.
    pub fn run(self, lanes: Vec<Option<Adopter>>, stop: Stop) -> Result<(), Failure> {
        let engine = Engine::new()?;
        let Self { socket, near, local, options, _reserved } = self;
        let failed = |error: io::Error| Failure::Node(format!("listening on {local}: {error}"));
        engine.runtime().block_on(async {
            let socket = socket.map(TcpListener::from_std).transpose().map_err(failed)?;
            let near = near.map(UnixListener::from_std).transpose().map_err(failed)?;
            let doors = Doors { socket, near };
            let reception = Arc::new(Reception { lanes, options, scheme: local.scheme, makers: Makers::new() });
            tokio::select! {
                () = stop.stopped() => Ok(()),
                () = accept(&doors, &reception) => Ok(()),
            }
        })
    }
}

/// Where connections come from.
struct Doors {
    socket: Option<TcpListener>,
    near: Option<UnixListener>,
}

/// Somebody who has connected.
enum Guest {
    Tcp(TcpStream),
    Shm(UnixStream),
}

impl Doors {
    /// The next guest, and where from.
    async fn next(&self) -> io::Result<(Guest, String)> {
        tokio::select! {
            Some(accepted) = maybe(self.socket.as_ref().map(TcpListener::accept)) => {
                accepted.map(|(stream, number)| (Guest::Tcp(stream), socket::origin(number)))
            }
            Some(accepted) = maybe(self.near.as_ref().map(shm::accept)) => {
                accepted.map(|(stream, origin)| (Guest::Shm(stream), origin))
            }
            else => std::future::pending().await,
        }
    }
}

async fn maybe<T>(future: Option<impl Future<Output = T>>) -> Option<T> {
    match future {
        Some(future) => Some(future.await),
        None => None,
    }
}

/// What greeting a connection needs.
struct Reception {
    lanes: Vec<Option<Adopter>>,
    options: NetworkOptions,
    scheme: Scheme,
    makers: Makers,
}

/// Why a connection goes no further.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: ErrorCode,
    pub(super) text: String,
}

impl Refusal {
    pub(super) fn invalid(text: impl ToString) -> Self {
        Self { code: ErrorCode::Invalid, text: text.to_string() }
    }
}

async fn accept(doors: &Doors, reception: &Arc<Reception>) {
    let mut pending: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        match doors.next().await {
            Ok((guest, origin)) => {
                pending.retain(|task| !task.is_finished());
                if pending.len() >= PENDING_MAX
                    && let Some(oldest) = pending.pop_front()
                {
                    oldest.abort();
                }
                let reception = Arc::clone(reception);
                let greeting = async move {
                    match guest {
                        Guest::Tcp(stream) => greet(stream, origin, reception).await,
                        Guest::Shm(stream) => greet_near(stream, origin, reception).await,
                    }
                };
                pending.push_back(tokio::spawn(greeting).abort_handle());
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn greet(mut stream: TcpStream, origin: String, reception: Arc<Reception>) {
    let refused = match reception.hello(&mut stream).await {
        Err(refused) => Some((stream, refused)),
        Ok((mut hello, lane)) => {
            let answer = reception.answer(&mut hello, lane, &stream).await;
            let configured = socket::configure(&stream, &reception.options).and_then(|()| stream.into_std());
            let Some(stream) = kept(configured, &origin) else { return };
            match hand_over(Caller::Tcp(stream, answer), hello, (&origin, reception.scheme), lane) {
                Some((Caller::Tcp(stream, _), refused)) => TcpStream::from_std(stream).ok().map(|one| (one, refused)),
                _ => None,
            }
        }
    };
    if let Some((stream, refused)) = refused {
        reception.refuse(stream, &origin, refused).await;
    }
}

/// As [`greet`], for a process of this machine, which brings its memory first.
async fn greet_near(mut stream: UnixStream, origin: String, reception: Arc<Reception>) {
    let met = tokio::time::timeout(reception.options.hello_timeout, shm::Met::receive(&stream)).await;
    let met = met.map_err(|_| reception.no_hello()).and_then(|met| met.map_err(Refusal::invalid));
    let refused = match met {
        Err(refused) => Some((stream, refused)),
        Ok(board) => match reception.hello(&mut stream).await {
            Err(refused) => Some((stream, refused)),
            Ok((hello, lane)) => {
                let Some(stream) = kept(stream.into_std(), &origin) else { return };
                match hand_over(Caller::Shm(stream, board), hello, (&origin, reception.scheme), lane) {
                    Some((Caller::Shm(stream, _), refused)) => {
                        UnixStream::from_std(stream).ok().map(|one| (one, refused))
                    }
                    _ => None,
                }
            }
        },
    };
    if let Some((stream, refused)) = refused {
        reception.refuse(stream, &origin, refused).await;
    }
}

fn kept<T>(stream: io::Result<T>, origin: &str) -> Option<T> {
    stream.inspect_err(|error| tracing::warn!(origin, %error, "connection lost before it was handed to its lane")).ok()
}

/// Hands the connection to its lane, or gives it back with the reason why not.
fn hand_over(
    caller: Caller,
    hello: Frame,
    (origin, scheme): (&str, Scheme),
    lane: &Adopter,
) -> Option<(Caller, Refusal)> {
    let (adopted, code, text) = lane.adopt(Adopted { caller, hello, origin: origin.to_owned(), scheme })?;
    Some((adopted.caller, Refusal { code, text: text.to_owned() }))
}

/// Reads a hello and not one byte more, so that the connection can be handed on; before it the token, if there is one.
async fn hello(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), token: Option<&Token>) -> Result<Frame, Refusal> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await.map_err(Refusal::invalid)?;
    token::ask(token, stream, &mut header).await?;
    let prefix = Prefix::decode(&header).map_err(Refusal::invalid)?;
    if prefix.head().kind != Kind::Hello {
        let kind = prefix.head().kind;
        return Err(Refusal::invalid(format!("the first frame is a {kind:?}, expected a Hello")));
    }
    let mut rest = vec![0; prefix.rest_bytes()];
    stream.read_exact(&mut rest).await.map_err(Refusal::invalid)?;
    prefix.finish(&rest).map_err(Refusal::invalid)
}

impl Reception {
    /// The guest's hello and the lane it is for.
    async fn hello(&self, stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<(Frame, &Adopter), Refusal> {
        let hello = hello(stream, self.options.token.as_ref());
        let hello = tokio::time::timeout(self.options.hello_timeout, hello).await;
        let hello = hello.unwrap_or_else(|_| Err(self.no_hello()))?;
        let lane = self.lane(&hello)?;
        Ok((hello, lane))
    }

    /// What is answered to the offer of verbs in a hello, which it is taken out of; nothing without one.
    async fn answer(&self, hello: &mut Frame, lane: &Adopter, stream: &TcpStream) -> Option<Answer> {
        let offer = OfferMessage::take(&mut hello.control)?;
        let ip = |number: io::Result<SocketAddr>| number.ok().map(|number| number.ip().to_canonical());
        let (local, host) = (ip(stream.local_addr()), ip(stream.peer_addr()));
        let (hall, scheme) = (lane.hall().clone(), self.scheme);
        let made = self.makers.run(host, move || hall.answer(&offer, scheme, local));
        let limit = self.options.connect_timeout;
        Some(match tokio::time::timeout(limit, made).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Err(format!("the server: making a pair: {error}")),
            Err(_) => Err(format!("the server: no pair within {limit:?}")),
        })
    }

    fn no_hello(&self) -> Refusal {
        Refusal::invalid(format!("no hello within {:?}", self.options.hello_timeout))
    }

    /// Tells the peer why, if it listens; nothing depends on it.
    async fn refuse(&self, stream: impl AsyncRead + AsyncWrite + Unpin, origin: &str, refused: Refusal) {
        tracing::warn!(origin, reason = refused.text, "connection refused");
        let _ = tokio::time::timeout(self.options.linger, refuse(stream, refused)).await;
    }

    fn lane(&self, hello: &Frame) -> Result<&Adopter, Refusal> {
        let wanted = hello.head.sequence.0;
        let lane = usize::try_from(wanted).ok().and_then(|lane| self.lanes.get(lane)?.as_ref());
        lane.ok_or_else(|| {
            let present = self.lanes.iter().enumerate().filter(|(_, lane)| lane.is_some());
            let present: Vec<_> = present.map(|(lane, _)| lane.to_string()).collect();
            Refusal::invalid(format!("this server has no lane {wanted}, only {}", present.join(", ")))
        })
    }
}

/// Says why, and waits for the peer to close: closing over unread bytes would destroy the answer.
async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin, refused: Refusal) -> io::Result<()> {
    stream.write_all(&refusal(refused.code, refused.text).encode()).await?;
    stream.shutdown().await?;
    let mut forgotten = [0; 1024];
    while stream.read(&mut forgotten).await? > 0 {}
    Ok(())
}

fn listen(number: SocketAddr, options: &NetworkOptions) -> io::Result<TcpListener> {
    let socket = socket::open(number, options)?;
    socket.set_reuseaddr(true)?;
    socket.bind(number)?;
    socket.listen(BACKLOG)
}

/// Listens for processes of this machine, where `scheme` has them. A system without such memory is no reason not to
/// serve others, unless nobody else may come; a name that is taken is, because who looks for us would find another.
fn listen_near(scheme: Scheme, number: SocketAddr) -> io::Result<Option<std::os::unix::net::UnixListener>> {
    if matches!(scheme, Scheme::Tcp | Scheme::Verbs) {
        return Ok(None);
    }
    match shm::listen(number) {
        Err(error) if scheme != Scheme::Shm && error.kind() != io::ErrorKind::AddrInUse => {
            tracing::warn!("no shared memory with processes of this machine: {error}");
            Ok(None)
        }
        near => near.map(Some),
    }
}

/// Takes a port without listening on it.
fn reserve(number: SocketAddr) -> io::Result<socket2::Socket> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(number), socket2::Type::STREAM, None)?;
    socket.bind(&number.into())?;
    Ok(socket)
}

fn explained(error: &io::Error, address: &Address) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "{error}; another program listens there, perhaps a server that still runs (ss -ltnp 'sport = :{}')",
            address.port
        ),
        io::ErrorKind::AddrNotAvailable => {
            format!("{error}; this machine does not have that address")
        }
        _ => error.to_string(),
    }
}

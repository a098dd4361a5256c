//! The one listening socket of a server.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::wire::{Address, ErrorCode, Frame, HEADER_BYTES, Kind, Prefix, Scheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::adopter::Adopted;
use super::{Adopter, Engine, TcpOptions, socket};
use crate::refusal::refusal;

/// Connections that have not said hello; beyond it the oldest one is dropped.
const PENDING_MAX: usize = 256;
/// Connections that the system accepts before we look.
const BACKLOG: u32 = 1024;
/// After a failure to accept, such as no descriptors left, others get this long to give some back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections for every lane of a server.
pub struct Listener {
    socket: std::net::TcpListener,
    local: Address,
    options: TcpOptions,
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
    /// Listens on `address`; port zero takes a free one, which [`Listener::local_address`] names. Blocks while a
    /// name is resolved.
    ///
    /// # Errors
    /// [`Failure::Node`] when the address cannot be had, naming it and what to look for.
    pub fn bind(address: &Address, options: TcpOptions) -> Result<Self, Failure> {
        let refused = |error: &dyn std::fmt::Display| Failure::Node(format!("listening on {address}: {error}"));
        if address.scheme != Scheme::Tcp {
            return Err(refused(&"this listener takes tcp:// only"));
        }
        let engine = Engine::new()?;
        let listen = async {
            let mut failed = io::Error::other("the name has no address");
            for number in socket::resolve(address).await? {
                match listen(number, &options) {
                    Ok(socket) => return socket.into_std(),
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        };
        let socket = engine.runtime().block_on(listen).map_err(|error| refused(&explained(&error, address)))?;
        let number = socket.local_addr().map_err(|error| refused(&error))?;
        let local = Address { scheme: Scheme::Tcp, host: number.ip().to_string(), port: number.port() };
        Ok(Self { socket, local, options })
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
        let Self { socket, local, options } = self;
        let failed = |error: io::Error| Failure::Node(format!("listening on {local}: {error}"));
        engine.runtime().block_on(async {
            let socket = TcpListener::from_std(socket).map_err(failed)?;
            let reception = Arc::new(Reception { lanes, options });
            tokio::select! {
                () = stop.stopped() => Ok(()),
                () = accept(&socket, &reception) => Ok(()),
            }
        })
    }
}

/// What greeting a connection needs.
struct Reception {
    lanes: Vec<Option<Adopter>>,
    options: TcpOptions,
}

/// Why a connection goes no further.
struct Refusal {
    code: ErrorCode,
    text: String,
}

impl Refusal {
    fn invalid(text: impl ToString) -> Self {
        Self { code: ErrorCode::Invalid, text: text.to_string() }
    }
}

async fn accept(socket: &TcpListener, reception: &Arc<Reception>) {
    let mut pending: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        match socket.accept().await {
            Ok((stream, number)) => {
                pending.retain(|task| !task.is_finished());
                if pending.len() >= PENDING_MAX
                    && let Some(oldest) = pending.pop_front()
                {
                    oldest.abort();
                }
                let greeting = greet(stream, socket::origin(number), Arc::clone(reception));
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
    let timeout = reception.options.hello_timeout;
    let hello = tokio::time::timeout(timeout, hello(&mut stream)).await;
    let hello = hello.unwrap_or_else(|_| Err(Refusal::invalid(format!("no hello within {timeout:?}"))));
    let refused = match hello.and_then(|hello| reception.lane(&hello).map(|lane| (hello, lane))) {
        Err(refused) => Some((stream, refused)),
        Ok((hello, lane)) => reception.hand_over(stream, hello, &origin, lane),
    };
    if let Some((stream, refused)) = refused {
        tracing::warn!(origin, reason = refused.text, "connection refused");
        // The peer is told if it listens; nothing depends on it.
        let _ = tokio::time::timeout(reception.options.linger, refuse(stream, refused)).await;
    }
}

/// Reads a hello and not one byte more, so that the connection can be handed on.
async fn hello(stream: &mut TcpStream) -> Result<Frame, Refusal> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await.map_err(Refusal::invalid)?;
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
    fn lane(&self, hello: &Frame) -> Result<&Adopter, Refusal> {
        let wanted = hello.head.sequence.0;
        let lane = usize::try_from(wanted).ok().and_then(|lane| self.lanes.get(lane)?.as_ref());
        lane.ok_or_else(|| {
            let present = self.lanes.iter().enumerate().filter(|(_, lane)| lane.is_some());
            let present: Vec<_> = present.map(|(lane, _)| lane.to_string()).collect();
            Refusal::invalid(format!("this server has no lane {wanted}, only {}", present.join(", ")))
        })
    }

    /// Hands the connection to its lane, or gives it back with the reason why not.
    fn hand_over(&self, stream: TcpStream, hello: Frame, origin: &str, lane: &Adopter) -> Option<(TcpStream, Refusal)> {
        let stream = match socket::configure(&stream, &self.options).and_then(|()| stream.into_std()) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(origin, %error, "connection lost before it was handed to its lane");
                return None;
            }
        };
        let adopted = Adopted { stream, hello, origin: origin.to_owned() };
        let (adopted, code, text) = lane.adopt(adopted)?;
        let stream = TcpStream::from_std(adopted.stream).ok()?;
        Some((stream, Refusal { code, text: text.to_owned() }))
    }
}

/// Says why, and waits for the peer to close: closing over unread bytes would destroy the answer.
async fn refuse(mut stream: TcpStream, refused: Refusal) -> io::Result<()> {
    stream.write_all(&refusal(refused.code, refused.text).encode()).await?;
    stream.shutdown().await?;
    let mut forgotten = [0; 1024];
    while stream.read(&mut forgotten).await? > 0 {}
    Ok(())
}

fn listen(number: std::net::SocketAddr, options: &TcpOptions) -> io::Result<TcpListener> {
    let socket = socket::open(number, options)?;
    socket.set_reuseaddr(true)?;
    socket.bind(number)?;
    socket.listen(BACKLOG)
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

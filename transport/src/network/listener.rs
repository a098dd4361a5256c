//! Listener of a server: a TCP port, and a name for processes of the same machine.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::wire::{Address, ErrorCode, Frame, HEADER_BYTES, Kind, OfferMessage, Prefix, Scheme};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::blocking_pool::BlockingPool;
use super::failures::HelloRefusal;
use super::handoff::{AcceptedConnection, AcceptedStream};
use super::local_token::LocalToken;
use super::socket::{self, SocketOptions};
use super::token::{self, JobToken};
use super::{ConnectionSender, IoRuntime, NetworkOptions};
use crate::refusal::refusal;
use crate::shm;
use crate::tls::{ChannelBinding, Encryption, HANDSHAKE_BYTE, TcpChannel};
use crate::verbs::OfferAnswer;

/// Connections without a hello; a further one drops the oldest.
const PENDING_MAX: usize = 256;
/// Time to make the queue pair of a connection: many trainers may connect at once, each to every shard.
const PAIR_TIMEOUT: Duration = Duration::from_secs(30);
/// The refusal of a client that encrypts.
const TLS_UNEXPECTED: &str = "the client speaks TLS, and this server has encrypt = off; expected a server with \
                              encrypt = tcp or required";
/// The backlog of connections that were not accepted.
const BACKLOG: u32 = 1024;
/// Delay after a failed accept, for example without descriptors, so that others can be closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections for every lane of a server.
pub struct Listener {
    /// The token for clients of this user. Declared first: its name must be free before the address is.
    local_token: Option<LocalToken>,
    /// The TCP socket, unless the scheme excludes TCP.
    tcp_listener: Option<std::net::TcpListener>,
    /// The socket for processes of this machine, unless the scheme excludes them.
    shm_listener: Option<std::os::unix::net::UnixListener>,
    /// Reserves the port when the scheme excludes TCP.
    _reserved: Option<socket2::Socket>,
    local: Address,
    options: NetworkOptions,
}

/// The lanes of a server, by number, each with the transport that serves it. Clones share them.
#[derive(Clone, Default)]
pub struct Lanes(Arc<RwLock<BTreeMap<u64, ConnectionSender>>>);

impl<const N: usize> From<[(u64, ConnectionSender); N]> for Lanes {
    fn from(lanes: [(u64, ConnectionSender); N]) -> Self {
        Self(Arc::new(RwLock::new(BTreeMap::from(lanes))))
    }
}

impl Lanes {
    /// From now on this transport gets the connections of a lane.
    pub fn open(&self, lane: u64, transport: ConnectionSender) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(lane, transport);
    }

    /// From now on connections of a lane are refused.
    pub fn close(&self, lane: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&lane);
    }

    /// The transport of a lane, or the refusal of its connections. A shard's lane may be another server's by now.
    fn find(&self, lane: u64) -> Result<ConnectionSender, HelloRefusal> {
        let lanes = self.0.read().unwrap_or_else(PoisonError::into_inner);
        lanes.get(&lane).cloned().ok_or_else(|| {
            let present: Vec<_> = lanes.keys().map(u64::to_string).collect();
            let text = format!("this server has no lane {lane}, only {}", present.join(", "));
            let code = if lane == 0 { ErrorCode::Invalid } else { ErrorCode::Moved };
            HelloRefusal { code, text }
        })
    }
}

/// Ends a [`Listener::run`] from any thread. Clones end the same one.
#[derive(Clone)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Stop {
    /// A stop that was not used.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Ends the listener.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    async fn stopped(&self) {
        // `self` holds the sender, so the channel cannot be closed.
        let _ = self.0.subscribe().wait_for(|stopped| *stopped).await;
    }
}

/// The token for clients of this user, where the server has no other token and listens on loopback.
fn local_token_at(at: SocketAddr, options: &NetworkOptions) -> Result<Option<LocalToken>, Failure> {
    let is_wanted = options.local_token && options.token.is_none() && at.ip().to_canonical().is_loopback();
    if is_wanted { LocalToken::bind(at).map(Some) } else { Ok(None) }
}

impl Default for Stop {
    fn default() -> Self {
        Self::new()
    }
}

impl Listener {
    /// Binds to `address`: its port, a name for processes of this machine, or both, as its scheme says. Port zero
    /// selects a free port, which [`Listener::local_address`] returns. Blocks while a name is resolved.
    ///
    /// # Errors
    /// [`Failure::Node`] when the address cannot be bound; the text names it and the likely cause.
    pub fn bind(address: &Address, options: NetworkOptions) -> Result<Self, Failure> {
        let refused = |error: &dyn std::fmt::Display| Failure::Node(format!("listening on {address}: {error}"));
        if address.scheme == Scheme::Loopback {
            return Err(refused(
                &"this listener takes no loopback:// address; expected tcp://, shm:// or verbs://, or no scheme",
            ));
        }
        let runtime = IoRuntime::new()?;
        let listen = async {
            let mut failed = io::Error::other("the name has no address");
            for number in socket::resolve(address).await? {
                // A client of a restarted server may connect as soon as the socket listens, and asks for the token. A
                // port that the system chooses is known to no client yet.
                let kept = (number.port() > 0).then(|| local_token_at(number, &options));
                match Self::take(address.scheme, number, &options) {
                    Ok(listener) => return Ok((listener, kept)),
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        };
        let listening = runtime.tokio().block_on(listen);
        let (mut listener, kept) = listening.map_err(|error| refused(&explained(&error, address)))?;
        let Ok(ip) = listener.local.host.parse::<IpAddr>() else { return Ok(listener) };
        let at = SocketAddr::new(ip, listener.local.port);
        if let Some(local_token) = kept.unwrap_or_else(|| local_token_at(at, &listener.options))? {
            (listener.options.token, listener.local_token) = (Some(local_token.token()), Some(local_token));
        }
        listener.check_encryption(address)?;
        Ok(listener)
    }

    /// Refuses encryption without anything by which a client could know the server, and verbs alone where they are
    /// refused.
    fn check_encryption(&self, address: &Address) -> Result<(), Failure> {
        let Some(encryption) = &self.options.encryption else { return Ok(()) };
        let wrong = |text: &str| Err(Failure::Node(format!("listening on {address}: {text}")));
        if !encryption.is_certified() && self.options.token.is_none() {
            return wrong("encrypt needs a certificate or a token_file, by which clients know the server");
        }
        if encryption.is_required() && address.scheme == Scheme::Verbs {
            return wrong("encrypt = required refuses verbs, as they are not encrypted; expected another address");
        }
        Ok(())
    }

    fn take(scheme: Scheme, number: SocketAddr, options: &NetworkOptions) -> io::Result<Self> {
        // The shared-memory socket is bound first: a client that finds it missing stays on TCP.
        let mut shm_listener = if number.port() > 0 { listen_shm(scheme, number)? } else { None };
        let (tcp_listener, reserved) = match scheme {
            Scheme::Shm => (None, Some(reserve(number)?)),
            _ => (Some(listen(number, &options.socket)?.into_std()?), None),
        };
        let found = match (&tcp_listener, &reserved) {
            (Some(tcp_listener), _) => tcp_listener.local_addr()?,
            (_, reserved) => reserved.as_ref().and_then(|one| one.local_addr().ok()?.as_socket()).unwrap_or(number),
        };
        if number.port() == 0 {
            shm_listener = listen_shm(scheme, found)?;
        }
        let local = Address { scheme, host: found.ip().to_string(), port: found.port() };
        Ok(Self { local_token: None, tcp_listener, shm_listener, _reserved: reserved, local, options: options.clone() })
    }

    /// Whether processes of this machine can connect through shared memory.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        self.shm_listener.is_some()
    }

    /// The bound address, with the actual port.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.local.clone()
    }

    /// Accepts until `stop`. A hello's sequence number is that of its lane. Other first frames and absent lanes are
    /// refused with the reason. Needs a thread of its own.
    ///
    /// # Errors
    /// [`Failure::Node`] when the system has no descriptors for it.
    pub fn run(self, lanes: Lanes, stop: Stop) -> Result<(), Failure> {
        let runtime = IoRuntime::new()?;
        let Self { local_token, tcp_listener, shm_listener, local, options, _reserved } = self;
        let failed = |error: io::Error| Failure::Node(format!("listening on {local}: {error}"));
        runtime.tokio().block_on(async {
            let tcp_listener = tcp_listener.map(TcpListener::from_std).transpose().map_err(failed)?;
            let shm_listener = shm_listener.map(UnixListener::from_std).transpose().map_err(failed)?;
            let sockets = ListenSockets { tcp_listener, shm_listener };
            let context =
                Arc::new(HelloContext { lanes, options, scheme: local.scheme, blocking_pool: BlockingPool::new() });
            tokio::select! {
                () = stop.stopped() => Ok(()),
                () = accept(&sockets, &context) => Ok(()),
                Some(ended) = maybe(local_token.map(LocalToken::serve)) => ended.map_err(failed),
            }
        })
    }
}

/// The bound sockets.
struct ListenSockets {
    tcp_listener: Option<TcpListener>,
    shm_listener: Option<UnixListener>,
}

/// An accepted socket before its hello.
enum IncomingSocket {
    Tcp(TcpStream),
    Shm(UnixStream),
}

impl ListenSockets {
    /// The next accepted socket, and its origin.
    async fn next(&self) -> io::Result<(IncomingSocket, String)> {
        tokio::select! {
            Some(accepted) = maybe(self.tcp_listener.as_ref().map(TcpListener::accept)) => {
                accepted.map(|(stream, number)| (IncomingSocket::Tcp(stream), socket::origin(number)))
            }
            Some(accepted) = maybe(self.shm_listener.as_ref().map(shm::accept)) => {
                accepted.map(|(stream, origin)| (IncomingSocket::Shm(stream), origin))
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

/// The state that handling a hello needs.
struct HelloContext {
    lanes: Lanes,
    options: NetworkOptions,
    scheme: Scheme,
    blocking_pool: BlockingPool,
}

/// A connection whose hello is awaited.
struct PendingHello {
    task: AbortHandle,
    /// Whether its hello has come.
    is_greeted: Arc<AtomicBool>,
}

async fn accept(sockets: &ListenSockets, context: &Arc<HelloContext>) {
    let mut pending: VecDeque<PendingHello> = VecDeque::new();
    loop {
        match sockets.next().await {
            Ok((incoming, origin)) => {
                pending.retain(|one| !one.task.is_finished() && !one.is_greeted.load(Ordering::Relaxed));
                if pending.len() >= PENDING_MAX
                    && let Some(oldest) = pending.pop_front()
                {
                    oldest.task.abort();
                }
                let (context, is_greeted) = (Arc::clone(context), Arc::new(AtomicBool::new(false)));
                let greeted = Arc::clone(&is_greeted);
                let greeting = async move {
                    match incoming {
                        IncomingSocket::Tcp(stream) => handle_tcp(stream, origin, context, &greeted).await,
                        IncomingSocket::Shm(stream) => handle_shm(stream, origin, context).await,
                    }
                };
                pending.push_back(PendingHello { task: tokio::spawn(greeting).abort_handle(), is_greeted });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn handle_tcp(stream: TcpStream, origin: String, context: Arc<HelloContext>, is_greeted: &AtomicBool) {
    let mut first = [0];
    // A probe of the port connects and closes; that is no client.
    if let Ok(Ok(0) | Err(_)) = tokio::time::timeout(context.options.hello_timeout, stream.peek(&mut first)).await {
        tracing::debug!(origin, "a connection was closed before its first byte");
        return;
    }
    let mut channel = TcpChannel::from(stream);
    let is_tls = first == [HANDSHAKE_BYTE];
    let refused = match context.timely(context.encrypted_hello(&mut channel, is_tls)).await {
        Err(refused) => Some((channel, refused)),
        Ok((mut hello, lane)) => {
            // It is authenticated. Its queue pair may take a while.
            is_greeted.store(true, Ordering::Relaxed);
            let answer = context.answer(&mut hello, &lane, &channel).await;
            let configured =
                socket::configure(channel.socket(), &context.options.socket).and_then(|()| channel.detach());
            let Some(channel) = into_std_or_log(configured, &origin) else { return };
            match hand_over(AcceptedStream::Tcp(channel, answer), hello, (&origin, context.scheme), &lane) {
                Some((AcceptedStream::Tcp(channel, _), refused)) => channel.attach().ok().map(|one| (one, refused)),
                _ => None,
            }
        }
    };
    match refused {
        // The client has an alert, and reads no frame outside of a session.
        Some((channel, refused)) if is_tls && !channel.is_encrypted() && context.options.encryption.is_some() => {
            context.end(channel, &origin, &refused).await;
        }
        Some((channel, refused)) => context.refuse(channel, &origin, refused).await,
        None => {}
    }
}

/// Like [`handle_tcp`], for a process of this machine, which sends its shared memory first.
async fn handle_shm(mut stream: UnixStream, origin: String, context: Arc<HelloContext>) {
    if let Err(reason) = shm::check_user(&stream, "client") {
        // The client sees it too, and goes on over TCP: that is the connection to be warned of, if it is refused.
        tracing::debug!(origin, %reason, "no connection through shared memory");
        return;
    }
    let setup = async { shm::ShmEndpoint::receive(&stream).await.map_err(HelloRefusal::invalid) };
    let refused = match context.timely(setup).await {
        Err(refused) => Some((stream, refused)),
        Ok(board) => match context.timely(context.hello(&mut stream, ChannelBinding::default())).await {
            Err(refused) => Some((stream, refused)),
            Ok((hello, lane)) => {
                let Some(stream) = into_std_or_log(stream.into_std(), &origin) else { return };
                match hand_over(AcceptedStream::Shm(stream, board), hello, (&origin, context.scheme), &lane) {
                    Some((AcceptedStream::Shm(stream, _), refused)) => {
                        UnixStream::from_std(stream).ok().map(|one| (one, refused))
                    }
                    _ => None,
                }
            }
        },
    };
    if let Some((stream, refused)) = refused {
        context.refuse(stream, &origin, refused).await;
    }
}

fn into_std_or_log<T>(stream: io::Result<T>, origin: &str) -> Option<T> {
    stream.inspect_err(|error| tracing::warn!(origin, %error, "connection lost before it was handed to its lane")).ok()
}

/// Hands the connection to its lane, or returns it with the reason for the refusal.
fn hand_over(
    stream: AcceptedStream,
    hello: Frame,
    (origin, scheme): (&str, Scheme),
    lane: &ConnectionSender,
) -> Option<(AcceptedStream, HelloRefusal)> {
    let (accepted, code, text) =
        lane.accept(AcceptedConnection { stream, hello, origin: origin.to_owned(), scheme })?;
    Some((accepted.stream, HelloRefusal { code, text: text.to_owned() }))
}

/// Authenticates the client and reads its hello, exactly, so that the lane reads the next byte.
async fn hello(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    token: Option<&JobToken>,
    binding: ChannelBinding,
) -> Result<Frame, HelloRefusal> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await.map_err(HelloRefusal::invalid)?;
    token::authenticate_client(token, stream, (&mut header, binding)).await?;
    let prefix = Prefix::decode(&header).map_err(HelloRefusal::invalid)?;
    if prefix.head().kind != Kind::Hello {
        let kind = prefix.head().kind;
        return Err(HelloRefusal::invalid(format!("the first frame is a {kind:?}, expected a Hello")));
    }
    let mut rest = vec![0; prefix.rest_bytes()];
    stream.read_exact(&mut rest).await.map_err(HelloRefusal::invalid)?;
    prefix.finish(&rest).map_err(HelloRefusal::invalid)
}

impl HelloContext {
    /// The client's hello and its lane, over TLS where this server encrypts.
    async fn encrypted_hello(
        &self,
        channel: &mut TcpChannel,
        is_tls: bool,
    ) -> Result<(Frame, ConnectionSender), HelloRefusal> {
        let unauthenticated = |text| HelloRefusal { code: ErrorCode::Unauthenticated, text };
        match &self.options.encryption {
            Some(encryption) if is_tls => {
                let session = encryption.accept().map_err(HelloRefusal::invalid)?;
                let encrypted = channel.encrypt(session).await;
                encrypted.map_err(|failure| unauthenticated(encryption.explain_client(&failure)))?;
            }
            Some(encryption) => return Err(unauthenticated(not_encrypted(encryption))),
            None if is_tls => return Err(unauthenticated(TLS_UNEXPECTED.to_owned())),
            None => {}
        }
        let binding = channel.binding().map_err(HelloRefusal::invalid)?;
        self.hello(channel, binding).await
    }

    /// A part of the greeting, within the time limit.
    async fn timely<T>(&self, part: impl Future<Output = Result<T, HelloRefusal>>) -> Result<T, HelloRefusal> {
        let limit = self.options.hello_timeout;
        let in_time = tokio::time::timeout(limit, part).await;
        in_time.unwrap_or_else(|_| Err(HelloRefusal::invalid(format!("no hello within {limit:?}"))))
    }

    /// The client's hello and its lane.
    async fn hello(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        binding: ChannelBinding,
    ) -> Result<(Frame, ConnectionSender), HelloRefusal> {
        let hello = hello(stream, self.options.token.as_ref(), binding).await?;
        let lane = self.lanes.find(hello.head.sequence.0)?;
        Ok((hello, lane))
    }

    /// The answer to the offer of verbs in a hello, which loses it; nothing without an offer.
    async fn answer(&self, hello: &mut Frame, lane: &ConnectionSender, channel: &TcpChannel) -> Option<OfferAnswer> {
        let offer = OfferMessage::take(&mut hello.control)?;
        if self.options.encryption.as_ref().is_some_and(Encryption::is_required) {
            return Some(Err(format!("the server: {}", socket::VERBS_REFUSED)));
        }
        let (local, host) = channel.ips();
        let (device_context, scheme) = (lane.device_context().clone(), self.scheme);
        let made = self.blocking_pool.run(host, move || device_context.answer(&offer, scheme, local));
        Some(match tokio::time::timeout(PAIR_TIMEOUT, made).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Err(format!("the server: making a pair: {error}")),
            Err(_) => Err(format!("the server: no pair within {PAIR_TIMEOUT:?}")),
        })
    }

    /// Sends the reason to the client. The connection ends with or without it.
    async fn refuse(&self, stream: impl AsyncRead + AsyncWrite + Unpin, origin: &str, refused: HelloRefusal) {
        tracing::warn!(origin, reason = refused.text, "connection refused");
        let _ = tokio::time::timeout(self.options.linger, refuse(stream, refused)).await;
    }

    /// Ends a connection whose handshake failed.
    async fn end(&self, channel: TcpChannel, origin: &str, refused: &HelloRefusal) {
        tracing::warn!(origin, reason = refused.text, "connection refused");
        let _ = tokio::time::timeout(self.options.linger, wait_for_end(channel)).await;
    }
}

/// The refusal of a client that does not encrypt.
fn not_encrypted(encryption: &Encryption) -> String {
    let policy = encryption.policy();
    format!(
        "the client does not speak TLS, and this server has encrypt = {policy}; expected a client with encrypt = tcp \
         or required"
    )
}

/// Sends the reason and waits until the client closes: closing over unread bytes would discard the reason.
async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin, refused: HelloRefusal) -> io::Result<()> {
    stream.write_all(&refusal(refused.code, refused.text).encode()).await?;
    wait_for_end(stream).await
}

/// Ends this direction, and waits until the client closes.
async fn wait_for_end(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    stream.flush().await?;
    stream.shutdown().await?;
    let mut forgotten = [0; 1024];
    while stream.read(&mut forgotten).await? > 0 {}
    Ok(())
}

fn listen(number: SocketAddr, options: &SocketOptions) -> io::Result<TcpListener> {
    let tcp_listener = socket::open(number, options)?;
    tcp_listener.set_reuseaddr(true)?;
    tcp_listener.bind(number)?;
    tcp_listener.listen(BACKLOG)
}

/// Listens for processes of this machine if `scheme` allows it. Missing shared memory is an error only if the scheme
/// has no alternative. A name in use is always one, because clients would reach the other server.
fn listen_shm(scheme: Scheme, number: SocketAddr) -> io::Result<Option<std::os::unix::net::UnixListener>> {
    if matches!(scheme, Scheme::Tcp | Scheme::Verbs) {
        return Ok(None);
    }
    match shm::listen(number) {
        Err(error) if scheme != Scheme::Shm && error.kind() != io::ErrorKind::AddrInUse => {
            tracing::warn!("no shared memory with processes of this machine: {error}");
            Ok(None)
        }
        shm_listener => shm_listener.map(Some),
    }
}

/// Binds a port without listening on it.
fn reserve(number: SocketAddr) -> io::Result<socket2::Socket> {
    let tcp_listener = socket2::Socket::new(socket2::Domain::for_address(number), socket2::Type::STREAM, None)?;
    tcp_listener.bind(&number.into())?;
    Ok(tcp_listener)
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

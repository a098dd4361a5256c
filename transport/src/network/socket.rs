//! Sockets: creation, options, connecting, and name resolution.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use pserver_core::wire::{Address, ErrorCode, Scheme};
use rustix::process::geteuid;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};

use super::failures::ConnectFailure;
use super::listening_user::listening_user;
use super::token::JobToken;
use super::{NetworkOptions, local_token};
use crate::refusal::refusal;
use crate::shm::{self, ShmEndpoint};
use crate::tls::{ChannelBinding, Encryption, TcpChannel, TlsFailure};
use crate::verbs::{DeviceContext, OfferAnswer};

/// The reason for no verbs where everything that leaves the host is to be encrypted.
pub(super) const VERBS_REFUSED: &str = "no verbs: encrypt = required refuses them, as they are not encrypted";
/// The error of a client that could verify no server.
pub(super) const UNVERIFIED: &str = "encrypt needs a certificate_authority or a token_file, by which the server is \
                                     verified; expected one of them";
/// Unanswered probes after which a connection ends.
const KEEPALIVE_PROBES: u32 = 3;

/// Options of TCP sockets.
#[derive(Clone, Debug)]
pub struct SocketOptions {
    /// The socket's send buffer in bytes; the system's own choice, which grows with need, when absent.
    pub send_buffer_bytes: Option<u32>,
    /// The socket's receive buffer in bytes; the system's own choice, which grows with need, when absent.
    pub receive_buffer_bytes: Option<u32>,
    /// Idle time before the connection is probed; three unanswered probes end it.
    pub keepalive_idle: Duration,
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self { send_buffer_bytes: None, receive_buffer_bytes: None, keepalive_idle: Duration::from_secs(10) }
    }
}

/// A connected socket, by kind.
pub(super) enum ConnectedStream {
    Tcp(TcpChannel),
    Shm(ShmEndpoint),
    /// A TCP stream to this address, with the local queue pair to offer, or the reason for none.
    VerbsOffer(TcpChannel, Address, OfferAnswer),
}

/// A connected socket, before the queue pair for an offer is made.
enum ReachedStream {
    ConnectedStream(ConnectedStream),
    /// A TCP stream that may offer verbs.
    VerbsOffer(TcpChannel),
}

/// Connects to the first address of `address` that answers. The error lists the failure of each.
pub(super) async fn connect(
    address: Address,
    options: NetworkOptions,
    device_context: DeviceContext,
) -> Result<ConnectedStream, ConnectFailure> {
    let failed = |why: &dyn Display| ConnectFailure::Failed(format!("connecting to {address}: {why}"));
    if address.scheme == Scheme::Verbs && options.encryption.as_ref().is_some_and(Encryption::is_required) {
        return Err(refused_here(format!("connecting to {address}: {VERBS_REFUSED}; expected another address")));
    }
    let (mut refusals, mut refused) = (Vec::new(), None);
    for address_number in resolve(&address).await.map_err(|error| failed(&error))? {
        let attempt =
            tokio::time::timeout(options.connect_timeout, connect_one(&address, address_number, &options)).await;
        match attempt {
            Ok(Ok(ReachedStream::ConnectedStream(made))) => return Ok(made),
            Ok(Ok(ReachedStream::VerbsOffer(channel))) => return Ok(with_offer(channel, address, device_context).await),
            Ok(Err(ConnectFailure::Failed(error))) => refusals.push(format!("{address_number}: {error}")),
            // Another server may listen at the next address.
            Ok(Err(ConnectFailure::Refused(frame))) => refused = Some(frame),
            Err(_) => refusals.push(format!("{address_number}: no answer within {:?}", options.connect_timeout)),
        }
    }
    Err(refused.map_or_else(|| failed(&refusals.join("; ")), ConnectFailure::Refused))
}

/// Connects by the address's scheme, and logs the choice of `auto`.
async fn connect_one(
    address: &Address,
    address_number: SocketAddr,
    options: &NetworkOptions,
) -> Result<ReachedStream, ConnectFailure> {
    match address.scheme {
        Scheme::Auto | Scheme::Shm => match connect_shm(address_number).await {
            Ok(mut endpoint) => {
                let token = known_token(address_number, options).await?;
                authenticate(address_number, (options, token), &mut endpoint.stream, ChannelBinding::default()).await?;
                let carried_by = if options.encryption.is_some() { "shm, not encrypted" } else { "shm" };
                tracing::info!(%address, carried_by, "connected through shared memory");
                Ok(ReachedStream::ConnectedStream(ConnectedStream::Shm(endpoint)))
            }
            Err(error) if address.scheme == Scheme::Shm => Err(error.into()),
            Err(error) => {
                let channel = connect_tcp(address, address_number, options).await?;
                tracing::info!(%address, not_by = "shm", "no shared memory: {error}");
                if options.encryption.as_ref().is_some_and(Encryption::is_required) {
                    tracing::info!(%address, carried_by = channel.suite(), "connected over TLS; {VERBS_REFUSED}");
                    return Ok(ReachedStream::ConnectedStream(ConnectedStream::Tcp(channel)));
                }
                Ok(ReachedStream::VerbsOffer(channel))
            }
        },
        Scheme::Tcp => {
            let channel = connect_tcp(address, address_number, options).await?;
            Ok(ReachedStream::ConnectedStream(ConnectedStream::Tcp(channel)))
        }
        _ => Ok(ReachedStream::VerbsOffer(connect_tcp(address, address_number, options).await?)),
    }
}

/// An authenticated TCP connection, which is encrypted where this side encrypts. A server that does not is refused.
async fn connect_tcp(
    address: &Address,
    address_number: SocketAddr,
    options: &NetworkOptions,
) -> Result<TcpChannel, ConnectFailure> {
    // A server that is not there yet has no token, and is tried again.
    let mut channel = TcpChannel::from(connect_to(address_number, &options.socket).await?);
    let token = known_token(address_number, options).await?;
    if token.is_none() && options.encryption.as_ref().is_some_and(|encryption| !encryption.verifies()) {
        return Err(refused_here(format!("connecting to {address}: {UNVERIFIED}")));
    }
    if let Some(encryption) = &options.encryption {
        let session = encryption.connect(address).map_err(refused_here)?;
        channel.encrypt(session).await.map_err(|failure| match failure {
            TlsFailure::Lost(_) => ConnectFailure::Failed(encryption.explain(&failure, address)),
            _ => refused_here(encryption.explain(&failure, address)),
        })?;
    }
    let binding = channel.binding()?;
    let authenticated = authenticate(address_number, (options, token), &mut channel, binding).await;
    let authenticated = authenticated.map_err(|failure| match failure {
        ConnectFailure::Failed(text) => {
            let refused = channel.refusal(&format!("the server at {address}"), &text);
            refused.map_or(ConnectFailure::Failed(text), ConnectFailure::Refused)
        }
        refused @ ConnectFailure::Refused(_) => refused,
    });
    authenticated.map(|()| channel)
}

/// The job's token, or the one that a loopback server of this user gives. It is asked for each time, because a
/// restarted server has another.
async fn known_token(address_number: SocketAddr, options: &NetworkOptions) -> Result<Option<JobToken>, ConnectFailure> {
    match &options.token {
        Some(token) => Ok(Some(token.clone())),
        None => Ok(local_token::find(address_number).await?),
    }
}

/// Authenticates with the token that is known for this address.
async fn authenticate(
    address_number: SocketAddr,
    (options, token): (&NetworkOptions, Option<JobToken>),
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    binding: ChannelBinding,
) -> Result<(), ConnectFailure> {
    match token {
        Some(token) => token.authenticate_to_server(stream, binding).await,
        None if options.own_user_alone => check_user(address_number),
        None => Ok(()),
    }
}

/// The failure of a connection that this side refuses for good.
fn refused_here(text: String) -> ConnectFailure {
    ConnectFailure::Refused(refusal(ErrorCode::Unauthenticated, text))
}

/// Refuses a server of another user, which is not the one of the caller's job.
fn check_user(address_number: SocketAddr) -> Result<(), ConnectFailure> {
    let here = geteuid().as_raw();
    let there = listening_user(address_number).filter(|there| *there != here);
    there.map_or(Ok(()), |there| {
        let text = format!(
            "found a server of user {there} at {address_number}, which is the default address; expected one of user \
             {here}, as this process, or the address by name (coordinator, PSERVER_COORDINATOR) where that server is \
             the job's"
        );
        Err(refused_here(text))
    })
}

/// The IP of an end of a socket, if the system tells it.
pub(super) fn ip(address_number: io::Result<SocketAddr>) -> Option<IpAddr> {
    address_number.ok().map(|address_number| address_number.ip().to_canonical())
}

/// Makes the queue pair for an offer, on a thread that may block.
async fn with_offer(channel: TcpChannel, address: Address, device_context: DeviceContext) -> ConnectedStream {
    let local = channel.ips().0;
    let there = address.clone();
    let made = tokio::task::spawn_blocking(move || device_context.offer(&there, local)).await;
    let offer = made.unwrap_or_else(|error| Err(format!("making a pair: {error}")));
    ConnectedStream::VerbsOffer(channel, address, offer)
}

async fn connect_shm(address_number: SocketAddr) -> io::Result<ShmEndpoint> {
    // A bind succeeds only for this machine's addresses.
    if let Err(error) = std::net::UdpSocket::bind((address_number.ip(), 0)) {
        let text = format!("{} is no address of this machine ({error})", address_number.ip());
        return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
    }
    let unmet = |error: io::Error| io::Error::new(error.kind(), format!("no server of this machine there: {error}"));
    shm::connect(address_number).await.map_err(unmet)
}

/// The socket addresses of an address; names are resolved.
pub(super) async fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address_number) = address.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address_number, address.port)]);
    }
    let found: Vec<_> = tokio::net::lookup_host((address.host.as_str(), address.port)).await?.collect();
    if found.is_empty() {
        return Err(io::Error::other("the name has no address"));
    }
    Ok(found)
}

/// A socket with the buffer sizes of `options`, which must be set before it connects or listens.
pub(super) fn open(address_number: SocketAddr, options: &SocketOptions) -> io::Result<TcpSocket> {
    let socket = if address_number.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    if let Some(bytes) = options.send_buffer_bytes {
        socket.set_send_buffer_size(bytes)?;
    }
    if let Some(bytes) = options.receive_buffer_bytes {
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(socket)
}

/// Sets the options of every connection: no delay of small frames, and keepalive probes.
pub(super) fn configure(stream: &TcpStream, options: &SocketOptions) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(options.keepalive_idle)
        .with_interval(options.keepalive_idle)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// The origin of an accepted connection, for error texts.
pub(super) fn origin(address_number: impl Display) -> String {
    format!("tcp://{address_number}")
}

async fn connect_to(address_number: SocketAddr, options: &SocketOptions) -> io::Result<TcpStream> {
    let stream = open(address_number, options)?.connect(address_number).await?;
    // On loopback, the connecting socket may get the very port that it connects to, and TCP then connects it to itself.
    if stream.local_addr()? == address_number {
        return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "no server listens there"));
    }
    configure(&stream, options)?;
    Ok(stream)
}

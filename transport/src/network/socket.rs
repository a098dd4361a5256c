//! Sockets: made, configured, connected. Names are resolved here and nowhere else.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};

use pserver_core::wire::{Address, Frame, Scheme};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};

use super::NetworkOptions;
use crate::shm::{self, Met};
use crate::verbs::{Answer, Hall};

/// Probes without an answer after which a connection is over.
const KEEPALIVE_PROBES: u32 = 3;

/// What a connection was made of.
pub(super) enum Made {
    Tcp(TcpStream),
    Shm(Met),
    /// One to this address, and this side's end of a pair to offer there, or why there is none.
    Rising(TcpStream, Address, Answer),
}

/// Why there is no connection.
pub(super) enum Unmade {
    Lost(String),
    /// The server refused it, or this side the server.
    Refused(Frame),
}

impl From<io::Error> for Unmade {
    fn from(error: io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

/// What an address was reached by.
enum Reached {
    Made(Made),
    /// A connection that may become more.
    Rising(TcpStream),
}

/// Connects to the first of the addresses behind `address` that answers. The error names each and what the
/// system said.
pub(super) async fn connect(address: Address, options: NetworkOptions, hall: Hall) -> Result<Made, Unmade> {
    let lost = |why: &dyn Display| Unmade::Lost(format!("connecting to {address}: {why}"));
    let (mut refusals, mut refused) = (Vec::new(), None);
    for number in resolve(&address).await.map_err(|error| lost(&error))? {
        let attempt = tokio::time::timeout(options.connect_timeout, reach(&address, number, &options)).await;
        match attempt {
            Ok(Ok(Reached::Made(made))) => return Ok(made),
            Ok(Ok(Reached::Rising(stream))) => return Ok(rise(stream, address, hall).await),
            Ok(Err(Unmade::Lost(error))) => refusals.push(format!("{number}: {error}")),
            // Somebody else may listen at another of the addresses.
            Ok(Err(Unmade::Refused(frame))) => refused = Some(frame),
            Err(_) => refusals.push(format!("{number}: no answer within {:?}", options.connect_timeout)),
        }
    }
    Err(refused.map_or_else(|| lost(&refusals.join("; ")), Unmade::Refused))
}

/// Connects by what the address's scheme says, and says what it was when that was a choice.
async fn reach(address: &Address, number: SocketAddr, options: &NetworkOptions) -> Result<Reached, Unmade> {
    match address.scheme {
        Scheme::Auto | Scheme::Shm => match meet(number).await {
            Ok(mut met) => {
                show(options, &mut met.stream).await?;
                tracing::info!(%address, carried_by = "shm", "connected through shared memory");
                Ok(Reached::Made(Made::Shm(met)))
            }
            Err(error) if address.scheme == Scheme::Shm => Err(error.into()),
            Err(error) => {
                let stream = cross(number, options).await?;
                tracing::info!(%address, not_by = "shm", "no shared memory: {error}");
                Ok(Reached::Rising(stream))
            }
        },
        Scheme::Tcp => Ok(Reached::Made(Made::Tcp(cross(number, options).await?))),
        _ => Ok(Reached::Rising(cross(number, options).await?)),
    }
}

/// A TCP connection to who has the job's token.
async fn cross(number: SocketAddr, options: &NetworkOptions) -> Result<TcpStream, Unmade> {
    let mut stream = connect_to(number, options).await?;
    show(options, &mut stream).await?;
    Ok(stream)
}

/// Shows the job's token, if it has one.
async fn show(options: &NetworkOptions, stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<(), Unmade> {
    match &options.token {
        Some(token) => token.show(stream).await,
        None => Ok(()),
    }
}

/// Makes an end of a pair for a connection, on a thread that may wait for it.
async fn rise(stream: TcpStream, address: Address, hall: Hall) -> Made {
    let local = stream.local_addr().ok().map(|number| number.ip().to_canonical());
    let there = address.clone();
    let made = tokio::task::spawn_blocking(move || hall.offer(&there, local)).await;
    let offer = made.unwrap_or_else(|error| Err(format!("making a pair: {error}")));
    Made::Rising(stream, address, offer)
}

async fn meet(number: SocketAddr) -> io::Result<Met> {
    // A socket can be bound to this machine's addresses only.
    if let Err(error) = std::net::UdpSocket::bind((number.ip(), 0)) {
        let text = format!("{} is no address of this machine ({error})", number.ip());
        return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
    }
    let unmet = |error: io::Error| io::Error::new(error.kind(), format!("no server of this machine there: {error}"));
    shm::connect(number).await.map_err(unmet)
}

/// The numbers behind an address; a number is its own.
pub(super) async fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
    if let Ok(number) = address.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(number, address.port)]);
    }
    let found: Vec<_> = tokio::net::lookup_host((address.host.as_str(), address.port)).await?.collect();
    if found.is_empty() {
        return Err(io::Error::other("the name has no address"));
    }
    Ok(found)
}

/// A socket for `number` with the buffers of `options`, which count only before it connects or listens.
pub(super) fn open(number: SocketAddr, options: &NetworkOptions) -> io::Result<TcpSocket> {
    let socket = if number.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    if let Some(bytes) = options.send_buffer_bytes {
        socket.set_send_buffer_size(bytes)?;
    }
    if let Some(bytes) = options.receive_buffer_bytes {
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(socket)
}

/// What every connection gets: no delay of small frames, and probes that find a dead peer.
pub(super) fn configure(stream: &TcpStream, options: &NetworkOptions) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(options.keepalive_idle)
        .with_interval(options.keepalive_idle)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// The origin of an accepted connection, for error texts.
pub(super) fn origin(number: impl Display) -> String {
    format!("tcp://{number}")
}

async fn connect_to(number: SocketAddr, options: &NetworkOptions) -> io::Result<TcpStream> {
    let stream = open(number, options)?.connect(number).await?;
    // On loopback, a port that nobody listens on may be given to the very socket that tries to reach it, and TCP then
    // connects it to itself.
    if stream.local_addr()? == number {
        return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens there"));
    }
    configure(&stream, options)?;
    Ok(stream)
}

//! Sockets: made, configured, connected. Names are resolved here and nowhere else.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};

use pserver_core::wire::Address;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpSocket, TcpStream};

use super::TcpOptions;

/// Probes without an answer after which a connection is over.
const KEEPALIVE_PROBES: u32 = 3;

/// Connects to the first of the addresses behind `address` that answers. The error names each and what the
/// system said.
pub(super) async fn connect(address: Address, options: TcpOptions) -> Result<TcpStream, String> {
    let mut refusals = Vec::new();
    for number in resolve(&address).await.map_err(|error| format!("connecting to {address}: {error}"))? {
        let attempt = tokio::time::timeout(options.connect_timeout, connect_to(number, &options)).await;
        match attempt {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => refusals.push(format!("{number}: {error}")),
            Err(_) => refusals.push(format!("{number}: no answer within {:?}", options.connect_timeout)),
        }
    }
    Err(format!("connecting to {address}: {}", refusals.join("; ")))
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
pub(super) fn open(number: SocketAddr, options: &TcpOptions) -> io::Result<TcpSocket> {
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
pub(super) fn configure(stream: &TcpStream, options: &TcpOptions) -> io::Result<()> {
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

async fn connect_to(number: SocketAddr, options: &TcpOptions) -> io::Result<TcpStream> {
    let stream = open(number, options)?.connect(number).await?;
    // On loopback, a port that nobody listens on may be given to the very socket that tries to reach it, and TCP then
    // connects it to itself.
    if stream.local_addr()? == number {
        return Err(io::Error::new(io::ErrorKind::ConnectionRefused, "nobody listens there"));
    }
    configure(&stream, options)?;
    Ok(stream)
}

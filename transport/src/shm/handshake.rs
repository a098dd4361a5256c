//! Handshake of a shared-memory connection: two processes of one machine connect and check each other's user.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::shared::Board;
use pserver_core::memory::{Arena, Budget};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::rings::BOARD_BYTES;
use super::staging::BYTES as STAGED_BYTES;
use super::{INLINE_BYTES_MAX, RING_BYTES, control_socket};

/// The first message, sent with the board's descriptor. Other versions differ in it.
const SETUP_BYTES: usize = 16;

/// A connection after its handshake.
pub(crate) struct ShmEndpoint {
    pub(crate) stream: UnixStream,
    pub(crate) board: Board,
}

/// The abstract socket name of a server that listens on `address`. It needs no file and disappears with the process.
pub(crate) fn name(address: SocketAddr) -> String {
    let host = if address.ip().is_unspecified() { "any".to_owned() } else { address.ip().to_string() };
    format!("pserver-{host}-{}", address.port())
}

/// Listens under the name of `address`.
pub(crate) fn listen(address: SocketAddr) -> io::Result<std::os::unix::net::UnixListener> {
    // Missing shared memory is an error here, rather than with the first trainer.
    Board::create(BOARD_BYTES).map_err(io::Error::other)?;
    check_staging()?;
    let name = std::os::unix::net::SocketAddr::from_abstract_name(name(address))?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&name)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Refuses shared memory where this process cannot have the memory in which a connection stages payloads: beyond a
/// limit of file sizes every payload would end the connection.
fn check_staging() -> io::Result<()> {
    let mut budget = Budget::new();
    budget.line("payloads that are staged", CHUNK_BYTES_MAX, u64::from(STAGED_BYTES / CHUNK_BYTES_MAX));
    Arena::shared(&budget).map(drop).map_err(io::Error::other)
}

/// Accepts the next connection; its origin is for error texts.
pub(crate) async fn accept(listener: &UnixListener) -> io::Result<(UnixStream, String)> {
    let (stream, _) = listener.accept().await?;
    let process = stream.peer_cred().ok().and_then(|there| there.pid()).unwrap_or(0);
    Ok((stream, format!("shm://process-{process}")))
}

impl ShmEndpoint {
    /// Receives the first message of a client, whose user was [checked](check_user).
    ///
    /// # Errors
    /// Another message.
    pub(crate) async fn receive(stream: &UnixStream) -> Result<Board, String> {
        let (mut setup, mut descriptors) = ([0; SETUP_BYTES], VecDeque::new());
        let receive = || control_socket::receive(stream.as_fd(), &mut setup, &mut descriptors);
        let received = stream.async_io(Interest::READABLE, receive).await.map_err(|error| error.to_string())?;
        if setup != self::setup() || received != SETUP_BYTES {
            return Err(format!("the set-up is {:02x?}, expected {:02x?}", &setup[..received], self::setup()));
        }
        let descriptor = descriptors.pop_front().ok_or("the set-up brings no shared memory")?;
        Board::open(&descriptor, BOARD_BYTES).map_err(|failure| failure.to_string())
    }
}

/// Connects to the server that listens on `address` on this machine.
///
/// # Errors
/// The reason why it cannot.
pub(crate) async fn connect(address: SocketAddr) -> io::Result<ShmEndpoint> {
    check_staging()?;
    let stream = match connect_name(&name(address)).await {
        Ok(stream) => stream,
        // A server on all addresses has one name, of the unspecified address.
        Err(_) => {
            let everywhere: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            connect_name(&name(SocketAddr::new(everywhere, address.port()))).await?
        }
    };
    check_user(&stream, "server")?;
    let (board, descriptor) = Board::create(BOARD_BYTES).map_err(io::Error::other)?;
    let descriptor: OwnedFd = descriptor;
    control_socket::send(stream.as_fd(), &setup(), Some(descriptor.as_fd()))?;
    Ok(ShmEndpoint { stream, board })
}

async fn connect_name(name: &str) -> io::Result<UnixStream> {
    UnixStream::connect(format!("\0{name}")).await
}

/// Checks that the peer's process, a client or server, is of this user.
///
/// # Errors
/// Names both users.
pub(crate) fn check_user(stream: &UnixStream, peer: &str) -> io::Result<()> {
    let (there, here) = (stream.peer_cred()?, rustix::process::geteuid().as_raw());
    if there.uid() == here {
        return Ok(());
    }
    let text = format!("the {peer}'s process runs as user {}; expected user {here}, as this process", there.uid());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// The version, and the sizes that both sides must agree on.
fn setup() -> [u8; SETUP_BYTES] {
    let mut bytes = *b"PSHM\x04\0\0\0........";
    bytes[8..12].copy_from_slice(&u32::try_from(RING_BYTES).expect("a ring is short").to_le_bytes());
    bytes[12..].copy_from_slice(&INLINE_BYTES_MAX.to_le_bytes());
    bytes
}

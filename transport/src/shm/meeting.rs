//! How two processes of one machine find each other, and make sure of each other, before the first frame.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;

use pserver_core::memory::shared::Board;
use pserver_core::memory::{Arena, Budget};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::rings::BOARD_BYTES;
use super::{INLINE_BYTES_MAX, RING_BYTES, post};

/// What the connecting side says first, with the descriptor of the board. Whoever speaks another form of it is another
/// version.
const SETUP_BYTES: usize = 16;

/// Two sides that have met.
pub(crate) struct Met {
    pub(crate) stream: UnixStream,
    pub(crate) board: Board,
}

/// The name under which a server that listens on `number` is found by processes of its machine. It is of the kind that
/// needs no file and goes with the process.
pub(crate) fn name(number: SocketAddr) -> String {
    let host = if number.ip().is_unspecified() { "any".to_owned() } else { number.ip().to_string() };
    format!("pserver-{host}-{}", number.port())
}

/// Listens under the name of `number`.
pub(crate) fn listen(number: SocketAddr) -> io::Result<std::os::unix::net::UnixListener> {
    // Whether shared memory can be had is found out here, and not with the first trainer.
    Board::create(BOARD_BYTES).map_err(io::Error::other)?;
    Arena::shared(&Budget::new()).map_err(io::Error::other)?;
    let name = std::os::unix::net::SocketAddr::from_abstract_name(name(number))?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&name)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Takes the next connection of `listener`, whoever's it is; where from, for error texts.
pub(crate) async fn accept(listener: &UnixListener) -> io::Result<(UnixStream, String)> {
    let (stream, _) = listener.accept().await?;
    let process = stream.peer_cred().ok().and_then(|there| there.pid()).unwrap_or(0);
    Ok((stream, format!("shm://process-{process}")))
}

impl Met {
    /// What the connecting side says first, once it is sure whose it is.
    ///
    /// # Errors
    /// Whose it is, or what it said instead.
    pub(crate) async fn receive(stream: &UnixStream) -> Result<Board, String> {
        check_user(stream).map_err(|error| error.to_string())?;
        let (mut setup, mut descriptors) = ([0; SETUP_BYTES], VecDeque::new());
        let receive = || post::receive(stream.as_fd(), &mut setup, &mut descriptors);
        let received = stream.async_io(Interest::READABLE, receive).await.map_err(|error| error.to_string())?;
        if setup != self::setup() || received != SETUP_BYTES {
            return Err(format!("the set-up is {:02x?}, expected {:02x?}", &setup[..received], self::setup()));
        }
        let descriptor = descriptors.pop_front().ok_or("the set-up brings no shared memory")?;
        Board::open(&descriptor, BOARD_BYTES).map_err(|failure| failure.to_string())
    }
}

/// Connects to the server that listens on `number` on this machine.
///
/// # Errors
/// Why not.
pub(crate) async fn connect(number: SocketAddr) -> io::Result<Met> {
    let stream = match find(&name(number)).await {
        Ok(stream) => stream,
        // A server on every address of the machine has no name for each.
        Err(_) => {
            let everywhere: IpAddr = if number.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            find(&name(SocketAddr::new(everywhere, number.port()))).await?
        }
    };
    check_user(&stream)?;
    let (board, descriptor) = Board::create(BOARD_BYTES).map_err(io::Error::other)?;
    let descriptor: OwnedFd = descriptor;
    post::send(stream.as_fd(), &setup(), Some(descriptor.as_fd()))?;
    Ok(Met { stream, board })
}

async fn find(name: &str) -> io::Result<UnixStream> {
    UnixStream::connect(format!("\0{name}")).await
}

/// Makes sure that the process at the other end is this user's.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let (there, here) = (stream.peer_cred()?, rustix::process::geteuid().as_raw());
    if there.uid() == here {
        return Ok(());
    }
    let text = format!("the process there is user {}'s, and this one user {here}'s", there.uid());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// Version 3, and what both sides must agree on.
fn setup() -> [u8; SETUP_BYTES] {
    let mut bytes = *b"PSHM\x03\0\0\0........";
    bytes[8..12].copy_from_slice(&u32::try_from(RING_BYTES).expect("a ring is short").to_le_bytes());
    bytes[12..].copy_from_slice(&INLINE_BYTES_MAX.to_le_bytes());
    bytes
}

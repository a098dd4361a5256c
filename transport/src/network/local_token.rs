//! Token of a server on loopback without a configured one: processes of its user get it, other local users are refused.
//!
//! The server listens on a socket whose abstract name is made of its address, and sends the token to each process of
//! its user that connects there. Either side learns the other's user from the kernel, because every process can take
//! such a name. The name needs no file, and is gone with the server's process, however that ends.

use std::io;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixName, UnixListener as StdUnixListener};
use std::path::Path;
use std::time::Duration;

use pserver_core::error::Failure;
use rustix::process::geteuid;
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};

use super::IoRuntime;
use super::token::JobToken;

/// Random bytes of a token, written as twice as many hexadecimal digits.
const RANDOM_BYTES: usize = 32;
/// The bytes that a client reads at most.
const TOKEN_BYTES_MAX: u64 = 4096;
/// Delay after a failed accept, for example without descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The token of a server, and the name under which its user's processes get it. Dropping it releases the name.
#[derive(Debug)]
pub(super) struct LocalToken {
    listener: StdUnixListener,
    token: JobToken,
}

impl LocalToken {
    /// A new token for the server at this loopback address.
    ///
    /// # Errors
    /// The reason why the name cannot be had, and the alternatives.
    pub(super) fn bind(at: SocketAddr) -> Result<Self, Failure> {
        let made = || -> io::Result<Self> {
            let listener = StdUnixListener::bind_addr(&UnixName::from_abstract_name(name(at))?)?;
            listener.set_nonblocking(true)?;
            let mut random = [0; RANDOM_BYTES];
            getrandom::fill(&mut random).map_err(io::Error::other)?;
            let secret: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
            let token = JobToken::new(secret.as_bytes()).map_err(|failure| io::Error::other(failure.to_string()))?;
            Ok(Self { listener, token })
        };
        made().map_err(|error| {
            Failure::Node(format!(
                "the name {} of the token for clients of this user: {error}; expected it free (ss -xlp), or \
                 --token-file, or --insecure to let every local user join",
                name(at)
            ))
        })
    }

    pub(super) fn token(&self) -> JobToken {
        self.token.clone()
    }

    /// Sends the token to each process of this user that connects.
    ///
    /// # Errors
    /// The socket cannot be waited for.
    pub(super) async fn serve(self) -> io::Result<()> {
        let listener = UnixListener::from_std(self.listener)?;
        loop {
            match listener.accept().await {
                // A new socket has room for a token. A client that is gone needs none.
                Ok((stream, _)) if is_ours(&stream) => drop(stream.try_write(&self.token.text())),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "accepting a client that asks for the token failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// The token of the running server at this address, if the address is loopback and the server is of this user and has
/// one.
///
/// # Errors
/// A server of this user is there and sent no token, because it is ending or has too many clients.
pub(super) async fn find(at: SocketAddr) -> io::Result<Option<JobToken>> {
    if !at.ip().to_canonical().is_loopback() {
        return Ok(None);
    }
    let stream = match UnixStream::connect(format!("\0{}", name(at))).await {
        Ok(stream) => stream,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(None),
        Err(error) => return Err(error),
    };
    if !is_ours(&stream) {
        return Ok(None);
    }
    let mut secret = Vec::new();
    stream.take(TOKEN_BYTES_MAX).read_to_end(&mut secret).await?;
    let token = JobToken::new(&secret);
    token.map(Some).map_err(|failure| io::Error::other(format!("the server on loopback sent no token: {failure}")))
}

/// Gives the token in a file of this process, called `/proc/PID/fd/N`, to processes of its user that cannot open that
/// path because they are in a container. A thread does so until the process ends.
///
/// # Errors
/// The name is taken, or there is no thread.
pub fn share_token(path: &Path, token: &JobToken) -> io::Result<()> {
    let listener = StdUnixListener::bind_addr(&UnixName::from_abstract_name(shared_name(path))?)?;
    listener.set_nonblocking(true)?;
    let shared = LocalToken { listener, token: token.clone() };
    let runtime = IoRuntime::new().map_err(|failure| io::Error::other(failure.to_string()))?;
    let serve = move || runtime.tokio().block_on(shared.serve());
    std::thread::Builder::new().name("pserver-token".to_owned()).spawn(serve).map(drop)
}

/// The token that another process of this user [shares](share_token) for a path that this one cannot open.
#[must_use]
pub fn shared_token(path: &Path) -> Option<Vec<u8>> {
    let asked = async {
        let stream = UnixStream::connect(format!("\0{}", shared_name(path))).await.ok().filter(is_ours)?;
        let mut secret = Vec::new();
        stream.take(TOKEN_BYTES_MAX).read_to_end(&mut secret).await.ok()?;
        (!secret.is_empty()).then_some(secret)
    };
    IoRuntime::new().ok()?.tokio().block_on(asked)
}

/// The abstract name for a path. It is in the namespace of the network, which containers of a job share.
fn shared_name(path: &Path) -> String {
    format!("pserver-token-{}", path.display())
}

/// Whether the other side's process is of this user.
fn is_ours(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|there| there.uid() == geteuid().as_raw())
}

/// The abstract name at which a server gives its token. It is in the namespace of the network, as the address.
fn name(at: SocketAddr) -> String {
    format!("pserver-token-{}-{}", at.ip().to_canonical(), at.port())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use pserver_core::wire::Address;

    use super::super::listener::Listener;
    use super::super::{IoRuntime, NetworkOptions};
    use super::*;

    fn found(at: SocketAddr) -> io::Result<Option<JobToken>> {
        IoRuntime::new().expect("a runtime").tokio().block_on(find(at))
    }

    /// Serves a token until the returned function is called.
    fn serve(token: LocalToken) -> impl FnOnce() {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = thread::spawn(move || {
            IoRuntime::new().expect("a runtime").tokio().block_on(async {
                tokio::select! {
                    ended = token.serve() => panic!("{ended:?}"),
                    _ = stopped => {}
                }
            });
        });
        move || {
            drop(stop);
            thread.join().expect("it does not panic");
        }
    }

    /// Addresses without a server: port 1 needs privileges.
    fn place(last: u8) -> SocketAddr {
        SocketAddr::from(([127, 77, 77, last], 1))
    }

    #[test]
    fn a_server_gives_its_token_to_its_user_until_it_ends() {
        let at = place(1);
        assert!(found(at).is_ok_and(|found| found.is_none()), "no server is there");
        let server = LocalToken::bind(at).expect("the name is free");
        let token = server.token();
        assert!(LocalToken::bind(at).is_err_and(|failure| failure.to_string().contains("in use")), "one server has it");
        let stop = serve(server);
        assert!(found(at).expect("a token") == Some(token.clone()), "a client has the same one");
        let mapped = format!("[::ffff:{}]:1", at.ip()).parse().expect("an address");
        assert!(found(mapped).expect("a token") == Some(token.clone()), "the address has two forms");
        assert!(found(SocketAddr::from(([192, 0, 2, 1], 1))).is_ok_and(|found| found.is_none()), "it is for loopback");
        stop();
        assert!(found(at).is_ok_and(|found| found.is_none()), "the server has ended");
        assert!(LocalToken::bind(at).expect("the name is free").token() != token, "every server has its own");
    }

    #[test]
    fn a_token_is_shared_with_a_process_that_cannot_open_its_path() {
        let path = Path::new("/proc/4294967295/fd/7");
        assert_eq!(shared_token(path), None, "no process shares it");
        let token = JobToken::new(b"0123456789abcdef").expect("it is long enough");
        share_token(path, &token).expect("the name is free");
        assert_eq!(shared_token(path), Some(token.text()));
        let taken = share_token(path, &token).expect_err("one process has the name");
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_server_that_ends_before_it_sent_the_token_is_tried_again() {
        let at = place(2);
        let silent = StdUnixListener::bind_addr(&UnixName::from_abstract_name(name(at)).expect("it is short"));
        let silent = silent.expect("the name is free");
        let server = thread::spawn(move || drop(silent.accept()));
        let error = found(at).expect_err("without a token the server would refuse this client for good");
        assert!(error.to_string().contains("sent no token"), "{error}");
        server.join().expect("it does not panic");
    }

    #[test]
    fn a_server_that_starts_again_has_its_name_before_clients_can_connect() {
        let free = TcpListener::bind("127.77.77.4:0").and_then(|one| one.local_addr()).expect("a port is free");
        let before = LocalToken::bind(free).expect("the name is free");
        let address = Address::parse(&format!("tcp://{free}")).expect("it is an address");
        let options = NetworkOptions { local_token: true, ..NetworkOptions::default() };
        let refused = Listener::bind(&address, options.clone()).err().expect("a server there would have another token");
        assert!(refused.to_string().contains("pserver-token-127.77.77.4-"), "{refused}");
        assert!(std::net::TcpStream::connect(free).is_err(), "it does not listen");
        drop(before);
        let _listener = Listener::bind(&address, options).expect("the port is free");
        assert!(LocalToken::bind(free).is_err(), "it has the name");
    }
}

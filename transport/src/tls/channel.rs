//! Byte stream of a connection over TCP: plain, or encrypted.

use std::fmt::Display;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pserver_core::wire::{ErrorCode, Frame};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::calls::{receive_from, send_directly, send_to};
use super::session::{ChannelBinding, TlsFailure, TlsSession};
use crate::refusal::refusal;

/// The stream of a connection over TCP.
pub(crate) struct TcpChannel {
    stream: TcpStream,
    session: Option<Box<TlsSession>>,
}

/// A channel between two runtimes.
pub(crate) struct DetachedChannel {
    stream: std::net::TcpStream,
    session: Option<Box<TlsSession>>,
}

impl From<TcpStream> for TcpChannel {
    fn from(stream: TcpStream) -> Self {
        Self { stream, session: None }
    }
}

impl TcpChannel {
    /// Encrypts the stream from now on.
    ///
    /// # Errors
    /// The reason why the handshake fails. The stream then stays, so that the other side can be waited for.
    pub(crate) async fn encrypt(&mut self, mut session: TlsSession) -> Result<(), TlsFailure> {
        session.handshake(&self.stream).await?;
        self.session = Some(Box::new(session));
        Ok(())
    }

    /// Whether TLS encrypts what goes over the stream.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.session.is_some()
    }

    /// The cipher suite of an encrypted stream.
    pub(crate) fn suite(&self) -> Option<String> {
        self.session.as_ref().map(|session| session.suite())
    }

    /// The bytes that a proof of the token covers besides random numbers.
    pub(crate) fn binding(&self) -> io::Result<ChannelBinding> {
        let binding = self.session.as_ref().map(|session| session.binding());
        binding.unwrap_or(Ok(ChannelBinding::default())).map_err(io::Error::other)
    }

    /// The refusal by `server`, if one side has refused the other's records, which no later connection changes: a
    /// server verifies a client's certificate after the client's handshake, and sends an alert alone.
    pub(crate) fn refusal(&self, server: &str, error: &dyn Display) -> Option<Frame> {
        let has_failed = self.session.as_ref().is_some_and(|session| session.has_failed());
        has_failed.then(|| {
            let text = format!(
                "{server} refuses this session: {error}; where it demands certificates, expected certificate and \
                 private_key of its certificate_authority"
            );
            refusal(ErrorCode::Unauthenticated, text)
        })
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// The socket of a stream that is not encrypted, which another transport may take over.
    pub(crate) fn plain_socket(&self) -> Option<&TcpStream> {
        self.session.is_none().then_some(&self.stream)
    }

    /// The IP of this end and of the other, where the system tells them.
    pub(crate) fn ips(&self) -> (Option<IpAddr>, Option<IpAddr>) {
        let ip = |end: io::Result<SocketAddr>| end.ok().map(|end| end.ip().to_canonical());
        (ip(self.stream.local_addr()), ip(self.stream.peer_addr()))
    }

    /// Takes the stream out of its runtime.
    pub(crate) fn detach(self) -> io::Result<DetachedChannel> {
        Ok(DetachedChannel { stream: self.stream.into_std()?, session: self.session })
    }

    /// Reads into `slices`; the bytes, and whether nothing more is there. Zero bytes are the end. An error of kind
    /// `WouldBlock` means that the socket is to be waited for.
    pub(crate) fn receive(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<(usize, bool)> {
        match &mut self.session {
            None => receive_from(&self.stream, slices),
            Some(session) => session.receive(&self.stream, slices),
        }
    }

    /// Whether something was received that no call has returned, so that a wait for the socket may last for ever.
    pub(crate) fn has_received(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.has_received())
    }

    /// Sends `slices` as far as the socket takes them; how much was taken, and an error of kind `WouldBlock` when the
    /// socket is full.
    pub(crate) fn send(&mut self, slices: &[IoSlice<'_>]) -> (usize, io::Result<()>) {
        match &mut self.session {
            None => send_to(&self.stream, slices),
            Some(session) => session.send(&self.stream, slices),
        }
    }

    /// Sends a short message whole, or fails. The runtime need not know that the socket has room.
    pub(crate) fn send_now(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.session {
            None => {
                let sent = send_directly(&self.stream, &[IoSlice::new(bytes)])?;
                if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
            }
            Some(session) => session.send_now(&self.stream, bytes),
        }
    }

    /// Whether bytes that were taken wait for the socket.
    pub(crate) fn has_unsent(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.has_unsent())
    }

    /// Sends bytes that were taken; an error of kind `WouldBlock` when the socket is full.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.session.as_mut().map_or(Ok(()), |session| session.flush(&self.stream))
    }

    /// Tells the other side that nothing follows, and shuts sending down; an error of kind `WouldBlock` when the
    /// socket is full.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        if let Some(session) = &mut self.session {
            session.end(&self.stream)?;
        }
        SockRef::from(&self.stream).shutdown(Shutdown::Write)
    }
}

impl DetachedChannel {
    /// The channel in the runtime of the caller.
    pub(crate) fn attach(self) -> io::Result<TcpChannel> {
        Ok(TcpChannel { stream: TcpStream::from_std(self.stream)?, session: self.session })
    }

    /// The cipher suite of an encrypted stream.
    pub(crate) fn suite(&self) -> Option<String> {
        self.session.as_ref().map(|session| session.suite())
    }
}

impl AsyncRead for TcpChannel {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let channel = self.get_mut();
        loop {
            match channel.receive(&mut [IoSliceMut::new(buffer.initialize_unfilled())]) {
                Ok((read, _)) => {
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(channel.stream.poll_read_ready(context))?;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for TcpChannel {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let channel = self.get_mut();
        loop {
            match channel.send(&[IoSlice::new(bytes)]) {
                (0, Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(channel.stream.poll_write_ready(context))?;
                }
                (0, Err(error)) => return Poll::Ready(Err(error)),
                // A flush sends the rest.
                (taken, _) => return Poll::Ready(Ok(taken)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let channel = self.get_mut();
        loop {
            match channel.flush() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(channel.stream.poll_write_ready(context))?;
                }
                outcome => return Poll::Ready(outcome),
            }
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let channel = self.get_mut();
        loop {
            match channel.end() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(channel.stream.poll_write_ready(context))?;
                }
                outcome => return Poll::Ready(outcome),
            }
        }
    }
}

//! Session of TLS over one socket: handshake, records in both directions, and the end.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, Connection, ServerConfig};
use tokio::net::TcpStream;

use super::calls::{receive_from, send_directly, send_to};

/// Plaintext that one call encrypts. More would wait for the socket anyway, outside of the cache.
const CALL_BYTES: usize = 64 * 1024;
/// The buffer of received bytes at first, and at most: it doubles when one read fills it.
const RECEIVE_BYTES_MIN: usize = 32 * 1024;
const RECEIVE_BYTES_MAX: usize = 256 * 1024;
/// Names the use of the exporter (RFC 9266 has the idea, RFC 8446 the bytes).
const EXPORTER_LABEL: &[u8] = b"EXPERIMENTAL-pserver-token";
/// The types of the records of a handshake: alert and handshake.
const RECORD_TYPES: [u8; 2] = [0x15, 0x16];

/// Bytes that only the two ends of one TLS session know; none for a connection without TLS. A proof of the token
/// covers them, so that it is worth nothing in another session, such as that of a relay.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ChannelBinding(pub(crate) Option<[u8; 32]>);

/// The reason why a handshake failed.
#[derive(Debug)]
pub(crate) enum TlsFailure {
    /// The connection ended, or the system reports an error.
    Lost(io::Error),
    /// The other side's first byte is of no TLS.
    NoTls,
    /// One side refuses the other.
    Refused(rustls::Error),
}

/// A TLS session.
pub(crate) struct TlsSession {
    connection: Connection,
    /// Received records. Those that were not decrypted are `start..end`.
    received: Vec<u8>,
    start: usize,
    end: usize,
    /// Whether the last call filled its slices, so that more may be there.
    may_have_more: bool,
    has_ended: bool,
    peer_has_ended: bool,
    /// Whether a record was refused. The error comes again with the next call.
    has_failed: bool,
}

impl TlsSession {
    /// The session of a client with the server of this name.
    pub(crate) fn of_client(config: &Arc<ClientConfig>, name: ServerName<'static>) -> Result<Self, rustls::Error> {
        let connection = rustls::ClientConnection::new(Arc::clone(config), name)?;
        Ok(Self::new(connection.into()))
    }

    /// The session of a server.
    pub(crate) fn of_server(config: &Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        Ok(Self::new(rustls::ServerConnection::new(Arc::clone(config))?.into()))
    }

    fn new(mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(CALL_BYTES));
        let received = vec![0; RECEIVE_BYTES_MIN];
        Self {
            connection,
            received,
            start: 0,
            end: 0,
            may_have_more: false,
            has_ended: false,
            peer_has_ended: false,
            has_failed: false,
        }
    }

    /// Completes the handshake. Of a failure the other side is told by an alert.
    pub(super) async fn handshake(&mut self, stream: &TcpStream) -> Result<(), TlsFailure> {
        let outcome = self.exchange(stream).await;
        if matches!(outcome, Err(TlsFailure::Refused(_))) {
            // The connection ends with or without it.
            let _ = self.flush(stream);
        }
        outcome
    }

    async fn exchange(&mut self, stream: &TcpStream) -> Result<(), TlsFailure> {
        let mut has_begun = false;
        loop {
            match self.flush(stream) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    stream.writable().await.map_err(TlsFailure::Lost)?;
                    continue;
                }
                Err(error) => return Err(TlsFailure::Lost(error)),
            }
            if !self.connection.is_handshaking() {
                return Ok(());
            }
            if self.start < self.end {
                if !std::mem::replace(&mut has_begun, true) && !RECORD_TYPES.contains(&self.received[self.start]) {
                    return Err(TlsFailure::NoTls);
                }
                self.decrypt().map_err(TlsFailure::Refused)?;
                continue;
            }
            match self.fill(stream) {
                Ok((0, _)) => return Err(TlsFailure::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    stream.readable().await.map_err(TlsFailure::Lost)?;
                }
                Err(error) => return Err(TlsFailure::Lost(error)),
            }
        }
    }

    /// The bytes that only the two ends of this session know, once the handshake is complete.
    pub(crate) fn binding(&self) -> Result<ChannelBinding, rustls::Error> {
        self.connection.export_keying_material([0; 32], EXPORTER_LABEL, None).map(|bytes| ChannelBinding(Some(bytes)))
    }

    /// The name of the cipher suite, such as `TLS13_AES_128_GCM_SHA256`.
    pub(crate) fn suite(&self) -> String {
        self.connection.negotiated_cipher_suite().map_or_else(String::new, |suite| format!("{:?}", suite.suite()))
    }

    /// Reads into `slices`; the bytes, and whether the socket is empty and nothing that was received is left. Zero
    /// bytes are the end that the other side has declared.
    pub(super) fn receive(&mut self, stream: &TcpStream, slices: &mut [IoSliceMut<'_>]) -> io::Result<(usize, bool)> {
        let asked: usize = slices.iter().map(|slice| slice.len()).sum();
        let (mut filled, mut is_drained) = (0, false);
        loop {
            filled += self.deliver(slices, filled)?;
            self.may_have_more = filled == asked;
            if self.may_have_more {
                return Ok((filled, false));
            }
            match self.more(stream, &mut is_drained) {
                Ok(true) => {}
                Ok(false) => return Ok((filled, false)),
                Err(error) if filled == 0 => return Err(error),
                // The bytes before the error are handled first. It comes again with the next call.
                Err(error) => return Ok((filled, error.kind() == io::ErrorKind::WouldBlock)),
            }
        }
    }

    /// Decrypts, or else reads from the socket; false at the end.
    fn more(&mut self, stream: &TcpStream, is_drained: &mut bool) -> io::Result<bool> {
        if self.peer_has_ended {
            return Ok(false);
        }
        if self.start < self.end || self.has_failed {
            return match self.decrypt() {
                Ok(()) => Ok(true),
                Err(error) => {
                    // The connection ends with or without the alert.
                    let _ = self.flush(stream);
                    Err(refused(&error))
                }
            };
        }
        if *is_drained {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        match self.fill(stream)? {
            (0, _) => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the connection was cut: it ended without the message that ends a TLS session (close_notify)",
            )),
            (_, is_short) => {
                *is_drained = is_short;
                Ok(true)
            }
        }
    }

    /// Whether something was received that no call has returned.
    pub(super) fn has_received(&self) -> bool {
        self.may_have_more || self.start < self.end || self.has_failed
    }

    /// Whether a record was refused, or said that the other side refuses this one.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Copies plaintext into the slices behind their first `skipped` bytes; how much.
    fn deliver(&mut self, slices: &mut [IoSliceMut<'_>], mut skipped: usize) -> io::Result<usize> {
        let (mut reader, mut delivered) = (self.connection.reader(), 0);
        for slice in slices {
            if slice.len() <= skipped {
                skipped -= slice.len();
                continue;
            }
            let room = &mut slice[std::mem::take(&mut skipped)..];
            let read = match reader.read(room) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) => return Err(error),
            };
            delivered += read;
            if read < room.len() {
                break;
            }
        }
        Ok(delivered)
    }

    /// Hands received bytes to the record layer, which decrypts whole records.
    fn decrypt(&mut self) -> Result<(), rustls::Error> {
        let mut bytes = &self.received[self.start..self.end];
        let taken = if self.has_failed { Ok(0) } else { self.connection.read_tls(&mut bytes) };
        let decrypted = match taken {
            Ok(taken) => {
                self.start += taken;
                self.connection.process_new_packets().map(|state| self.peer_has_ended = state.peer_has_closed())
            }
            Err(error) => Err(rustls::Error::General(error.to_string())),
        };
        self.has_failed = decrypted.is_err();
        decrypted
    }

    /// Reads from the socket; the bytes, and whether it is empty.
    fn fill(&mut self, stream: &TcpStream) -> io::Result<(usize, bool)> {
        (self.start, self.end) = (0, 0);
        let asked = self.received.len();
        let (bytes, is_empty) = receive_from(stream, &mut [IoSliceMut::new(&mut self.received)])?;
        self.end = bytes;
        if bytes == asked && asked < RECEIVE_BYTES_MAX {
            self.received.resize(asked * 2, 0);
        }
        Ok((bytes, is_empty))
    }

    /// Encrypts `slices` as far as one call should, and sends; the bytes that were encrypted, and whether all of them
    /// are sent.
    pub(super) fn send(&mut self, stream: &TcpStream, slices: &[IoSlice<'_>]) -> (usize, io::Result<()>) {
        if let Err(error) = self.flush(stream) {
            return (0, Err(error));
        }
        match self.connection.writer().write_vectored(slices) {
            Ok(taken) => (taken, self.flush(stream)),
            Err(error) => (0, Err(error)),
        }
    }

    /// Sends a short message whole, or fails.
    pub(super) fn send_now(&mut self, stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        self.connection.writer().write_all(bytes)?;
        while self.connection.wants_write() {
            self.connection.write_tls(&mut SocketWriter(stream, send_directly))?;
        }
        Ok(())
    }

    /// Whether encrypted bytes wait for the socket.
    pub(super) fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    /// Sends encrypted bytes; an error of kind `WouldBlock` when the socket is full.
    pub(super) fn flush(&mut self, stream: &TcpStream) -> io::Result<()> {
        while self.connection.wants_write() {
            // A short write is reported by the next one.
            let send = |stream: &TcpStream, slices: &[IoSlice<'_>]| match send_to(stream, slices) {
                (0, outcome) => outcome.map(|()| 0),
                (sent, _) => Ok(sent),
            };
            self.connection.write_tls(&mut SocketWriter(stream, send))?;
        }
        Ok(())
    }

    /// Tells the other side that nothing follows; an error of kind `WouldBlock` when the socket is full.
    pub(super) fn end(&mut self, stream: &TcpStream) -> io::Result<()> {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.connection.send_close_notify();
        }
        self.flush(stream)
    }
}

fn refused(error: &rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {error}"))
}

/// Sends records to a socket.
struct SocketWriter<'a, F>(&'a TcpStream, F);

impl<F: Fn(&TcpStream, &[IoSlice<'_>]) -> io::Result<usize>> Write for SocketWriter<'_, F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.1(self.0, slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

//! System calls of a stream: vectored reads and writes that keep the runtime's knowledge of the socket up to date.

use std::io::{self, IoSlice, IoSliceMut, Read};

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Reads from a socket; the bytes, and whether it is empty.
pub(super) fn receive_from(stream: &TcpStream, slices: &mut [IoSliceMut<'_>]) -> io::Result<(usize, bool)> {
    let asked: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut read = None;
    let outcome = stream.try_io(Interest::READABLE, || {
        let bytes = (&*SockRef::from(stream)).read_vectored(slices)?;
        read = Some(bytes);
        // A short read emptied the socket. Reporting it saves the call that would find that out.
        if 0 < bytes && bytes < asked { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    });
    match read {
        Some(bytes) => Ok((bytes, bytes < asked)),
        None => outcome.map(|()| (0, true)),
    }
}

/// Writes to a socket; the bytes, and an error of kind `WouldBlock` when it is full.
pub(super) fn send_to(stream: &TcpStream, slices: &[IoSlice<'_>]) -> (usize, io::Result<()>) {
    let asked: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut sent = 0;
    let outcome = stream.try_io(Interest::WRITABLE, || {
        sent = send_directly(stream, slices)?;
        match sent {
            0 => Err(io::ErrorKind::WriteZero.into()),
            // A short write filled the socket. Reporting it saves the call that would find that out.
            _ if sent < asked => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(()),
        }
    });
    (sent, outcome)
}

/// One system call. A program that links the library may not ignore SIGPIPE.
pub(super) fn send_directly(stream: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(sendmsg(stream, slices, &mut SendAncillaryBuffer::default(), flags)?)
}

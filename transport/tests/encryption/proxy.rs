//! Proxies between a client and a server: one that changes records, and a relay that speaks TLS with both.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use pserver_core::wire::Address;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConfig, ServerConnection};

use crate::authority::{of_client, of_server};

/// Bytes before the content of a record.
const RECORD_HEADER: usize = 5;

/// The reaction of a proxy to a record.
pub(crate) enum RecordAction {
    Forward,
    /// These bytes go instead.
    Replace(Vec<u8>),
    /// The connection to the server ends.
    Cut,
}

pub(crate) fn connect(address: &Address) -> TcpStream {
    TcpStream::connect((address.host.as_str(), address.port)).expect("it listens")
}

/// A proxy for one connection. `action` decides for each record of the client, by its number.
pub(crate) fn changing(
    server: &Address,
    mut action: impl FnMut(usize, &[u8]) -> RecordAction + Send + 'static,
) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it listens").port();
    let server = server.clone();
    thread::spawn(move || {
        let (mut near, _) = listener.accept().expect("a client comes");
        let mut far = connect(&server);
        let (mut back, mut from) = (near.try_clone().expect("a socket"), far.try_clone().expect("a socket"));
        thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut back);
            let _ = back.shutdown(Shutdown::Both);
        });
        for number in 0.. {
            let mut record = vec![0; RECORD_HEADER];
            if near.read_exact(&mut record).is_err() {
                break;
            }
            let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
            record.resize(RECORD_HEADER + length, 0);
            if near.read_exact(&mut record[RECORD_HEADER..]).is_err() {
                break;
            }
            let bytes = match action(number, &record) {
                RecordAction::Forward => record,
                RecordAction::Replace(bytes) => bytes,
                RecordAction::Cut => break,
            };
            if far.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = far.shutdown(Shutdown::Write);
    });
    Address { port, ..Address::parse("tcp://127.0.0.1:1").expect("an address") }
}

/// A relay that ends TLS with the client, and speaks TLS, or nothing, with the server.
pub(crate) fn relaying(server: &Address, encrypts: bool) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("it listens").port();
    let server = server.clone();
    thread::spawn(move || {
        let (near, _) = listener.accept().expect("a client comes");
        let far = connect(&server);
        let near = rustls::StreamOwned::new(ServerConnection::new(own_server()).expect("a session"), near);
        if encrypts {
            let far = rustls::StreamOwned::new(unverifying(), far);
            relay((near, |side| &mut side.sock), (far, |side| &mut side.sock));
        } else {
            relay((near, |side| &mut side.sock), (far, |side| side));
        }
    });
    Address { port, ..Address::parse("tcp://127.0.0.1:1").expect("an address") }
}

/// Passes bytes on in both directions until one ends.
fn relay<A: Read + Write, B: Read + Write>(
    (mut near, near_socket): (A, fn(&mut A) -> &mut TcpStream),
    (mut far, far_socket): (B, fn(&mut B) -> &mut TcpStream),
) {
    let mut bytes = [0; 4096];
    loop {
        // Messages of the token have 64 bytes, so that one thread can wait for a side in turn.
        let limit = std::time::Duration::from_millis(20);
        near_socket(&mut near).set_read_timeout(Some(limit)).expect("a socket");
        far_socket(&mut far).set_read_timeout(Some(limit)).expect("a socket");
        match near.read(&mut bytes) {
            Ok(0) => return,
            Ok(read) => {
                if far.write_all(&bytes[..read]).and_then(|()| far.flush()).is_err() {
                    return;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
        match far.read(&mut bytes) {
            Ok(0) => return,
            Ok(read) => {
                if near.write_all(&bytes[..read]).and_then(|()| near.flush()).is_err() {
                    return;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}

/// A server's configuration with a certificate of its own.
pub(crate) fn own_server() -> Arc<ServerConfig> {
    of_server(None, None).expect("it encrypts").http_config()
}

/// A client's session that verifies no certificate.
pub(crate) fn unverifying() -> ClientConnection {
    let config = of_client(None, None).expect("it encrypts").client_config();
    ClientConnection::new(config, ServerName::try_from("anybody").expect("a name")).expect("a session")
}

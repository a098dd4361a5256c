//! Tests of hostile and broken clients: each is told its error, and other clients are not affected.

mod server;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use prost::Message;
use pserver_core::checksum::checksum;
use pserver_core::wire::{Address, ErrorMessage, Flags, Frame, HEADER_BYTES, Kind, Prefix};
use pserver_transport::network::{ChecksumPolicy, JobToken, Listener, NetworkOptions};

use server::{AnsweringServer, hello, push};

fn start(options: NetworkOptions) -> AnsweringServer {
    AnsweringServer::start("tcp://127.0.0.1:0", options)
}

/// Clients that write raw bytes.
trait RawClients {
    fn connect(&self) -> RawTcpClient;

    /// A connection whose hello was accepted.
    fn greeted(&self) -> RawTcpClient;
}

impl RawClients for AnsweringServer {
    fn connect(&self) -> RawTcpClient {
        let stream = TcpStream::connect((self.address.host.as_str(), self.address.port)).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
        RawTcpClient(stream)
    }

    fn greeted(&self) -> RawTcpClient {
        let mut raw = self.connect();
        raw.send(&hello(1).encode());
        raw.works();
        raw
    }
}

/// A client that writes raw bytes.
struct RawTcpClient(TcpStream);

impl RawTcpClient {
    fn send(&mut self, bytes: &[u8]) {
        // A server that has refused may have closed; the refusal is read later.
        let _ = self.0.write_all(bytes);
    }

    fn frame(&mut self) -> Option<Frame> {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).ok()?;
        let prefix = Prefix::decode(&header).expect("the server speaks our language");
        let mut rest = vec![0; prefix.rest_bytes()];
        self.0.read_exact(&mut rest).ok()?;
        Some(prefix.finish(&rest).expect("the server speaks our language"))
    }

    /// One push is answered.
    fn works(&mut self) {
        let payload = [7; 1000];
        self.send(&push(&payload).encode());
        self.send(&payload);
        assert_eq!(self.frame().map(|frame| frame.head.kind), Some(Kind::Done));
    }

    /// The connection was refused with this text, and is closed.
    fn must_be_refused(mut self, expected: &str) {
        let refused = self.frame().expect("the connection ends with a refusal");
        assert_eq!(refused.head.kind, Kind::Refused);
        let message = ErrorMessage::decode(refused.control.as_slice()).expect("a refusal holds an error");
        assert!(message.text.contains(expected), "found \"{}\", expected \"{expected}\"", message.text);
        assert_eq!(self.0.read(&mut [0]).expect("a clean end"), 0, "nothing follows a refusal");
    }
}

/// The frame with changed bytes and correct checksums.
fn changed(frame: &Frame, at: usize, change: &[u8]) -> Vec<u8> {
    let mut bytes = frame.encode();
    bytes[at..at + change.len()].copy_from_slice(change);
    let rest = checksum(&bytes[HEADER_BYTES..]);
    bytes[56..60].copy_from_slice(&rest.to_le_bytes());
    let header = checksum(&bytes[..60]);
    bytes[60..64].copy_from_slice(&header.to_le_bytes());
    bytes
}

fn spoiled(frame: &Frame, at: usize) -> Vec<u8> {
    let mut bytes = frame.encode();
    bytes[at] ^= 0x40;
    bytes
}

#[test]
fn an_unknown_client_gets_its_error_and_other_clients_go_on() {
    let server = start(NetworkOptions::default());
    let mut other = server.greeted();
    let mut check = |bytes: &[u8], expected: &str| {
        let mut raw = server.connect();
        raw.send(bytes);
        raw.must_be_refused(expected);
        other.works();
    };
    check(format!("GET / HTTP/1.1\r\n{}", "Accept: everything\r\n".repeat(9)).as_bytes(), "not a pserver frame");
    check(&[0; 4 << 20], "not a pserver frame: it begins with 0x00000000");
    check(&changed(&hello(1), 4, &[9]), "protocol version 9 is not supported; this side speaks version 2");
    check(&spoiled(&hello(1), 20), "checksum of the header");
    check(&spoiled(&hello(1), 70), "checksum of the entries");
    check(&push(&[1]).encode(), "the first frame is a Push, expected a Hello");
    check(&changed(&hello(1), 48, &[0xff; 4]), "the control message's length 4294967295 is over the limit of 4096");
    check(&changed(&hello(1), 44, &[1]), "the number of entries 1 is over the limit of 0");
    check(&hello(0).encode(), "this server has no lane 0, only 1");
    check(&hello(u64::MAX).encode(), "this server has no lane 18446744073709551615, only 1");
}

#[test]
fn a_client_without_a_token_is_refused_and_learns_nothing_of_lanes() {
    let token = JobToken::new(b"nobody can guess this").ok();
    let server =
        start(NetworkOptions { token, hello_timeout: Duration::from_millis(200), ..NetworkOptions::default() });
    let check = |bytes: &[u8], expected: &str| {
        let mut raw = server.connect();
        raw.send(bytes);
        raw.must_be_refused(expected);
    };
    let card = [b"PSTOKEN1".as_slice(), &[3; 56]].concat();
    check(&hello(1).encode(), "the client shows no token, and this job has one");
    check(&hello(7).encode(), "the client shows no token, and this job has one");
    check(&[0; 64], "not a pserver frame: it begins with 0x00000000");
    check(&card[..63], "no hello within 200ms");
    let mut silent = server.connect();
    silent.send(&card);
    silent.0.read_exact(&mut [0; 64]).expect("the server shows that it has the token");
    silent.must_be_refused("no hello within 200ms");
    let open = start(NetworkOptions::default());
    let mut raw = open.connect();
    raw.send(&card);
    raw.must_be_refused("the client shows a token, and this server has none");
    open.greeted().works();
}

#[test]
fn a_broken_client_gets_its_error_and_other_clients_go_on() {
    let server = start(NetworkOptions::default());
    let mut other = server.greeted();
    let mut check = |bytes: &[u8], expected: &str| {
        let mut raw = server.greeted();
        raw.send(bytes);
        raw.must_be_refused(expected);
        other.works();
    };
    check(&[b'x'; 200], "not a pserver frame: it begins with 0x78787878");
    check(&[0xff; 16 << 20], "not a pserver frame");
    check(&changed(&push(&[1]), 4, &[0]), "protocol version 0 is not supported");
    check(&changed(&push(&[1]), 5, &[200]), "kind 200 has no meaning");
    check(&changed(&push(&[1]), 44, &[0xff; 4]), "the number of entries 4294967295 is over the limit of 4096");
    check(&changed(&push(&[1]), 48, &[0xff; 4]), "the control message's length 4294967295 is over the limit");
    check(&changed(&push(&[1]), 84, &[0xff; 4]), "an entry's payload 4294967295 is over the limit of 16777216");
    check(&spoiled(&push(&[1]), 70), "checksum of the entries");
    check(&[push(&[1]).encode(), vec![2]].concat(), "checksum of the payload");
    check(&[push(&[1]).encode(), vec![1], vec![b'y'; 64]].concat()[..], "not a pserver frame");
}

#[test]
fn payloads_without_checksums_are_refused_where_checksums_are_required() {
    let mut frame = push(&[7; 1000]);
    frame.head.flags = Flags::UNCHECKED;
    frame.entries[0].checksum = 0;
    let bytes = [frame.encode(), vec![7; 1000]].concat();
    let strict = start(NetworkOptions { checks: ChecksumPolicy::Always, ..NetworkOptions::default() });
    let mut raw = strict.greeted();
    raw.send(&bytes);
    raw.must_be_refused("payloads without checksums; this side checks always");
    let server = start(NetworkOptions::default());
    let mut raw = server.greeted();
    raw.send(&bytes);
    assert_eq!(raw.frame().map(|frame| frame.head.kind), Some(Kind::Done), "elsewhere they are taken");
}

#[test]
fn a_peer_that_closes_in_the_middle_does_not_affect_others() {
    let server = start(NetworkOptions::default());
    let mut other = server.greeted();
    let whole = [push(&[7; 1000]).encode(), vec![7; 1000]].concat();
    for length in [1, 63, 64, 65, 95, 96, 97, 1000, whole.len() - 1] {
        let mut raw = server.greeted();
        raw.send(&whole[..length]);
        raw.0.shutdown(Shutdown::Write).expect("a socket");
        assert!(raw.frame().is_none(), "nothing answers {length} bytes of a frame");
        other.works();
    }
}

#[test]
fn a_silent_client_is_refused_in_time() {
    let hello_timeout = Duration::from_millis(20);
    let server = start(NetworkOptions { hello_timeout, ..NetworkOptions::default() });
    server.connect().must_be_refused("no hello within 20ms");
    let mut slow = server.connect();
    slow.send(&hello(1).encode()[..HEADER_BYTES + 3]);
    slow.must_be_refused("no hello within 20ms");
    let mut half = server.connect();
    half.send(&hello(1).encode()[..10]);
    half.0.shutdown(Shutdown::Write).expect("a socket");
    half.must_be_refused("early eof");
}

#[test]
fn many_silent_connections_do_not_keep_other_clients_out() {
    let hello_timeout = Duration::from_secs(60);
    let server = start(NetworkOptions { hello_timeout, ..NetworkOptions::default() });
    let mut crowd: Vec<_> = (0..300).map(|_| server.connect()).collect();
    server.greeted().works();
    assert!(crowd[0].frame().is_none(), "the oldest made room");
}

#[test]
fn a_port_in_use_is_named_with_the_command_that_finds_its_owner() {
    let server = start(NetworkOptions::default());
    let error = Listener::bind(&server.address, NetworkOptions::default()).err().expect("in use").to_string();
    assert!(error.starts_with(&format!("listening on {}: ", server.address)), "{error}");
    assert!(error.contains(&format!("ss -ltnp 'sport = :{}'", server.address.port)), "{error}");
    let foreign = Address::parse("tcp://192.0.2.1:0").expect("an address");
    let error = Listener::bind(&foreign, NetworkOptions::default()).err().expect("not ours").to_string();
    assert!(error.contains("this machine does not have that address"), "{error}");
}

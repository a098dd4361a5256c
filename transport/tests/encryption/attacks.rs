//! Attacks: each is refused with its reason, and the lane sees nothing of it.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pserver_core::port::Event;
use pserver_core::wire::{Address, HEADER_BYTES, Kind, Scheme};
use pserver_transport::network::{Listener, NetworkOptions};
use pserver_transport::tls::{EncryptPolicy, Encryption, EncryptionSettings};
use pserver_transport::verbs::{VerbsDevice, VerbsDevices};
use rustls::StreamOwned;

use crate::authority::{Authority, CertifiedFiles, NOW, of_client, of_server};
use crate::proxy::{RecordAction, changing, connect, own_server, relaying, unverifying};
use crate::target::{GreetingClient, Shared, TOKEN, Target, hello, impatient, token};

const LOCAL: &str = "127.0.0.1";
/// Numbers of a client's records: its hello, a constant one, the end of the handshake, the token's messages, and the
/// hello of this project.
const GREETING: usize = 3;
const PROOF: usize = 4;
const HELLO: usize = 5;

/// Options of a side with a token.
fn with_token(secret: &[u8]) -> NetworkOptions {
    NetworkOptions { token: token(secret), ..NetworkOptions::default() }
}

/// A server without a certificate of its own, and its token.
fn plain_target() -> Target {
    Target::start(impatient(NetworkOptions { encryption: of_server(None, None), ..with_token(TOKEN) }))
}

/// The options of a client of that server.
fn right_client() -> NetworkOptions {
    NetworkOptions { encryption: of_client(None, None), ..with_token(TOKEN) }
}

/// The server and the client say this, and the lane sees nothing.
fn check(what: &str, target: &mut Target, client: GreetingClient, (served, connected): (&str, &str)) {
    let found = client.refusal();
    assert!(found.contains(connected), "{what}: the client says \"{found}\"; expected \"{connected}\"");
    check_server(what, target, served);
}

/// The server says this, and the lane sees nothing.
fn check_server(what: &str, target: &mut Target, served: &str) {
    if !served.is_empty() {
        let found = target.refusal();
        assert!(found.contains(served), "{what}: the server says \"{found}\"; expected \"{served}\"");
    }
    let seen = target.events();
    assert!(seen.is_empty(), "{what}: the lane sees {} events", seen.len());
}

/// The lane gets the hello of this client.
fn works(target: &mut Target, client: &mut GreetingClient) {
    target.until(client, |event| match event {
        Event::Received { frame, .. } => (frame.head.kind == Kind::Hello).then_some(()),
        _ => None,
    });
}

#[test]
fn clients_of_both_kinds_reach_their_server() {
    let authority = Authority::new();
    let (server, trainer) = (authority.certify("server", LOCAL, NOW), authority.certify("trainer", "trainer", NOW));
    let certified = |authority: Option<&Authority>| NetworkOptions {
        encryption: of_server(Some(&server), authority),
        ..NetworkOptions::default()
    };
    let cases = [
        (NetworkOptions { encryption: of_server(None, None), ..with_token(TOKEN) }, right_client()),
        (
            certified(None),
            NetworkOptions { encryption: of_client(None, Some(&authority)), ..NetworkOptions::default() },
        ),
        (
            NetworkOptions { token: token(TOKEN), ..certified(Some(&authority)) },
            NetworkOptions { encryption: of_client(Some(&trainer), Some(&authority)), ..with_token(TOKEN) },
        ),
    ];
    for (server, client) in cases {
        let mut target = Target::start(server);
        let mut client = GreetingClient::connect(&target.address.clone(), client);
        let transport = target.until(&mut client, |event| match event {
            Event::Accepted { transport, .. } => Some(transport),
            _ => None,
        });
        assert!(transport.starts_with("tls: TLS13_AES_128_GCM_SHA256; "), "{transport}");
        client.close();
    }
}

#[test]
fn transports_that_are_not_encrypted_say_so_or_are_refused() {
    let (tcp, required) = (EncryptPolicy::Tcp, EncryptPolicy::Required);
    let devices = || VerbsDevices::This(VerbsDevice::in_process());
    let with = |policy: EncryptPolicy| {
        let settings = EncryptionSettings { policy, ..EncryptionSettings::default() };
        let encryption = Encryption::of_server(&settings).expect("there is no file to be wrong");
        NetworkOptions { encryption, devices: devices(), ..with_token(TOKEN) }
    };
    let check = |scheme: Scheme, (served, connected): (EncryptPolicy, EncryptPolicy), expected: &str| {
        let bind = if scheme == Scheme::Shm { "shm://127.0.0.1:0" } else { "127.0.0.1:0" };
        let mut target = Target::start_at(bind, with(served));
        let address = Address { scheme, ..target.address.clone() };
        let mut client = GreetingClient::connect(&address, with(connected));
        let transport = target.until(&mut client, |event| match event {
            Event::Accepted { transport, .. } => Some(transport),
            _ => None,
        });
        assert!(transport.contains(expected), "{transport}; expected {expected}");
        client.close();
    };
    check(Scheme::Shm, (tcp, tcp), "shm: the peer is on this machine; not encrypted");
    check(Scheme::Shm, (required, required), "shm: the peer is on this machine; not encrypted");
    check(Scheme::Verbs, (tcp, tcp), "verbs: the peer offers them; not encrypted");
    let mut target = Target::start_at("127.0.0.1:0", with(required));
    let verbs = Address { scheme: Scheme::Verbs, ..target.address.clone() };
    let refused = GreetingClient::connect(&verbs, with(required)).refusal();
    assert!(refused.contains("encrypt = required refuses them, as they are not encrypted"), "{refused}");
    // The client would use verbs, and the server does not.
    let refused = GreetingClient::connect(&verbs, with(tcp)).refusal_while(|| drop(target.events()));
    assert!(refused.contains("the server: no verbs: encrypt = required refuses them"), "{refused}");
    let listening = Address::parse("verbs://127.0.0.1:0").expect("an address");
    let refused = Listener::bind(&listening, with(required)).err().expect("it has nothing else").to_string();
    assert!(refused.contains("encrypt = required refuses verbs"), "{refused}");
}

#[test]
fn certificates_of_servers_are_verified() {
    let (authority, foreign) = (Authority::new(), Authority::new());
    let check = |what: &str, shown: Option<&CertifiedFiles>, expected: &str| {
        let options = NetworkOptions { encryption: of_server(shown, None), ..with_token(TOKEN) };
        let mut target = Target::start(options);
        let options = NetworkOptions { encryption: of_client(None, Some(&authority)), ..with_token(TOKEN) };
        let client = GreetingClient::connect(&target.address, options);
        check(what, &mut target, client, ("the client refuses TLS with this server: received fatal alert", expected));
    };
    check("another authority", Some(&foreign.certify("a", LOCAL, NOW)), "invalid peer certificate: UnknownIssuer");
    check("expired", Some(&authority.certify("b", LOCAL, (2020, 2021))), "certificate expired");
    check("not yet valid", Some(&authority.certify("c", LOCAL, (2098, 2099))), "certificate not valid yet");
    check("another name", Some(&authority.certify("d", "10.0.0.1", NOW)), "certificate not valid for name");
    check("self-made", None, "is refused: invalid peer certificate");
}

#[test]
fn certificates_of_clients_are_verified() {
    let (authority, foreign) = (Authority::new(), Authority::new());
    let server = authority.certify("server", LOCAL, NOW);
    let check = |what: &str, shown: Option<&CertifiedFiles>, expected: (&str, &str)| {
        for is_token in [true, false] {
            let token = token(TOKEN).filter(|_| is_token);
            let encryption = of_server(Some(&server), Some(&authority));
            let mut target = Target::start(NetworkOptions { encryption, token: token.clone(), ..Default::default() });
            let encryption = of_client(shown, Some(&authority));
            let options = NetworkOptions { encryption, token, ..NetworkOptions::default() };
            let client = GreetingClient::connect(&target.address, options);
            check(what, &mut target, client, expected);
        }
    };
    check("no certificate", None, ("the client shows no certificate", "expected certificate and private_key"));
    let other = foreign.certify("a", "trainer", NOW);
    check("another authority", Some(&other), ("the client's certificate is refused", "received fatal alert"));
    let old = authority.certify("b", "trainer", (2020, 2021));
    check("expired", Some(&old), ("certificate expired", "received fatal alert"));
}

#[test]
fn the_token_authenticates_where_certificates_do_not() {
    let mut target = plain_target();
    let address = target.address.clone();
    let mut check = |what: &str, options: NetworkOptions, expected: (&str, &str)| {
        check(what, &mut target, GreetingClient::connect(&address, options), expected);
    };
    let none = NetworkOptions { encryption: of_client(None, None), ..NetworkOptions::default() };
    check("no token", none, ("", "encrypt needs a certificate_authority or a token_file"));
    let other = NetworkOptions { encryption: of_client(None, None), ..with_token(b"correct horse battery stapler") };
    check("another token", other, ("it has another token, or was lost", "the server has another token than this side"));
    let authority = Authority::new();
    let server = authority.certify("server", LOCAL, NOW);
    let options = NetworkOptions { encryption: of_server(Some(&server), None), ..with_token(TOKEN) };
    let mut target = Target::start(options);
    let options = NetworkOptions { encryption: of_client(None, Some(&authority)), ..NetworkOptions::default() };
    let client = GreetingClient::connect(&target.address, options);
    let expected = "the client shows no token, and this job has one";
    super::attacks::check("a certificate without the token", &mut target, client, (expected, expected));
}

#[test]
fn neither_side_falls_back_to_plain_bytes() {
    let mut target = plain_target();
    let client = GreetingClient::connect(&target.address, with_token(TOKEN));
    let expected = "the client does not speak TLS, and this server has encrypt = tcp";
    check("a plain client with the token", &mut target, client, (expected, expected));
    let client = GreetingClient::connect(&target.address, NetworkOptions::default());
    check("a plain client", &mut target, client, (expected, expected));
    let mut plain = Target::start(with_token(TOKEN));
    let client = GreetingClient::connect(&plain.address, right_client());
    let expected =
        ("the client speaks TLS, and this server has encrypt = off", "does not speak TLS; expected one with");
    check("a plain server", &mut plain, client, expected);
    let mut raw = connect(&target.address);
    raw.write_all(&tls12_hello()).expect("it listens");
    check_server("a client of TLS 1.2", &mut target, "expected TLS 1.3");
}

/// A client hello of TLS 1.2, which names no later version.
fn tls12_hello() -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    // No session, two suites, no compression; curves and signatures.
    body.extend([0, 0, 4, 0xc0, 0x2f, 0xc0, 0x30, 1, 0]);
    body.extend([0, 18, 0, 10, 0, 4, 0, 2, 0, 29, 0, 13, 0, 6, 0, 4, 4, 3, 8, 4]);
    let mut message = vec![1, 0, 0, u8::try_from(body.len()).expect("it is short")];
    message.extend(body);
    let mut record = vec![22, 3, 1, 0, u8::try_from(message.len()).expect("it is short")];
    record.extend(message);
    record
}

#[test]
fn a_relay_between_two_sessions_fails() {
    let mut target = plain_target();
    let relay = relaying(&target.address, true);
    let client = GreetingClient::connect(&relay, right_client());
    let expected = ("it has another token, or was lost", "the server has another token than this side");
    check("a relay", &mut target, client, expected);
    let mut plain = Target::start(with_token(TOKEN));
    let relay = relaying(&plain.address, false);
    let client = GreetingClient::connect(&relay, right_client());
    check("a relay to a plain server", &mut plain, client, expected);
}

/// A client of the token's bytes over TLS, which sends its greeting and then `second` of the answer.
fn rogue(address: &Address, second: impl Fn([u8; HEADER_BYTES]) -> Vec<u8>) {
    let mut stream = StreamOwned::new(unverifying(), connect(address));
    let mut greeting = [7; HEADER_BYTES];
    greeting[..8].copy_from_slice(b"PSTOKEN1");
    let mut answer = [0; HEADER_BYTES];
    stream.write_all(&greeting).expect("it listens");
    stream.read_exact(&mut answer).expect("it answers");
    stream.write_all(&second(answer)).expect("it listens");
    // The server may have refused already.
    let _ = stream.write_all(&hello().encode());
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn messages_of_the_token_are_not_reflected() {
    let mut target = plain_target();
    rogue(&target.address, |answer| answer.to_vec());
    check_server("the server's answer, reflected", &mut target, "the client has another token than this server");
    rogue(&target.address, |_| hello().encode());
    check_server("no proof", &mut target, "the client has another token than this server");
    // A server that sends the greeting back.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = Address { port: listener.local_addr().expect("it listens").port(), ..target.address.clone() };
    let impostor = thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client comes");
        let session = rustls::ServerConnection::new(own_server()).expect("a session");
        let mut stream = StreamOwned::new(session, stream);
        let mut greeting = [0; HEADER_BYTES];
        stream.read_exact(&mut greeting).expect("it greets");
        stream.write_all(&greeting).expect("it reads");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let client = GreetingClient::connect(&address, right_client());
    check("the greeting, reflected", &mut target, client, ("", "the server has another token than this side"));
    impostor.join().expect("it does not panic");
}

#[test]
fn changed_records_are_refused() {
    let check = |what: &str, at: usize, change: fn(&[u8]) -> RecordAction, expected: (&str, &str)| {
        let mut target = plain_target();
        let proxy = changing(&target.address, move |number, record| match number == at {
            true => change(record),
            false => RecordAction::Forward,
        });
        check(what, &mut target, GreetingClient::connect(&proxy, right_client()), expected);
    };
    let flip = |record: &[u8]| {
        let mut bytes = record.to_vec();
        *bytes.last_mut().expect("it is no empty record") ^= 1;
        RecordAction::Replace(bytes)
    };
    let injected = |record: &[u8]| RecordAction::Replace([&[23, 3, 3, 0, 5], b"hello", record].concat());
    let dropped = |_: &[u8]| RecordAction::Replace(Vec::new());
    let doubled = |record: &[u8]| RecordAction::Replace([record, record].concat());
    let long = |record: &[u8]| RecordAction::Replace([&[23, 3, 3, 0xff, 0xff], record].concat());
    let decrypt = ("cannot decrypt", "received fatal alert: BadRecordMac");
    check("a flipped bit in the handshake", 2, flip, ("cannot decrypt", "received fatal alert"));
    check("a flipped bit in the greeting", GREETING, flip, decrypt);
    check("a flipped bit in the proof", PROOF, flip, ("cannot decrypt", "BadRecordMac"));
    check("a flipped bit in the hello", HELLO, flip, ("cannot decrypt", "BadRecordMac"));
    check("a plaintext record", GREETING, injected, decrypt);
    check("a record that is missing", PROOF, dropped, ("cannot decrypt", "BadRecordMac"));
    check("a record that comes twice", PROOF, doubled, ("cannot decrypt", "BadRecordMac"));
    check("a record that is too long", GREETING, long, ("MessageTooLarge", "received fatal alert"));
}

#[test]
fn a_replayed_session_is_refused() {
    let mut target = plain_target();
    let recorded: Shared<Vec<Vec<u8>>> = Arc::default();
    let record = Arc::clone(&recorded);
    let proxy = changing(&target.address, move |_, bytes| {
        record.lock().expect("no thread has panicked").push(bytes.to_vec());
        RecordAction::Forward
    });
    let mut client = GreetingClient::connect(&proxy, right_client());
    works(&mut target, &mut client);
    client.close();
    target.until(&mut client, |event| matches!(event, Event::Gone { .. }).then_some(()));
    let records = recorded.lock().expect("no thread has panicked").clone();
    assert!(records.len() > HELLO, "the session was recorded");
    let mut replay = connect(&target.address);
    replay.write_all(&records.concat()).expect("it listens");
    check_server("a recorded session", &mut target, "cannot decrypt");
    let mut replay = connect(&target.address);
    replay.write_all(&records[0]).expect("it listens");
    check_server("a recorded client hello", &mut target, "no hello within 300ms");
}

#[test]
fn a_cut_connection_is_distinguished_from_a_closed_one() {
    let mut target = plain_target();
    let gone = |target: &mut Target, client: &mut GreetingClient| {
        target.until(client, |event| match event {
            Event::Gone { reason, .. } => Some(reason),
            _ => None,
        })
    };
    let mut client = GreetingClient::connect(&target.address.clone(), right_client());
    works(&mut target, &mut client);
    client.close();
    assert_eq!(gone(&mut target, &mut client), "closed by the peer");
    let proxy = changing(&target.address, |number, _| match number <= HELLO {
        true => RecordAction::Forward,
        false => RecordAction::Cut,
    });
    let mut client = GreetingClient::connect(&proxy, right_client());
    works(&mut target, &mut client);
    // The message that ends the session is the next record, and the proxy withholds it.
    client.close();
    let reason = gone(&mut target, &mut client);
    assert!(reason.contains("ended without the message that ends a TLS session (close_notify)"), "{reason}");
}

#[test]
fn a_handshake_that_does_not_end_is_refused_in_time() {
    let mut target = plain_target();
    let mut raw = connect(&target.address);
    raw.write_all(&[22]).expect("it listens");
    check_server("one byte", &mut target, "no hello within 300ms");
    raw.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    raw.read_to_end(&mut Vec::new()).expect("the server ends it");
    let mut raw = connect(&target.address);
    raw.write_all(&[22, 3, 1, 0xff, 0xff]).expect("it listens");
    check_server("a record that is too long", &mut target, "MessageTooLarge");
    let mut raw = connect(&target.address);
    raw.write_all(&[&[22, 3, 1, 0, 4][..], &[9; 4]].concat()).expect("it listens");
    check_server("garbage", &mut target, "expected TLS 1.3");
    let _session = StreamOwned::new(unverifying(), connect(&target.address)).conn.wants_write();
    let mut silent = StreamOwned::new(unverifying(), connect(&target.address));
    silent.flush().expect("it listens");
    silent.conn.complete_io(&mut silent.sock).expect("the handshake is complete");
    check_server("silence after the handshake", &mut target, "no hello within 300ms");
}

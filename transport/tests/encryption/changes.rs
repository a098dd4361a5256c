//! Files that change while servers and clients use them.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use pserver_core::ids::Sequence;
use pserver_core::port::Event;
use pserver_core::wire::{Frame, Head, Kind};
use pserver_transport::network::{JobToken, NetworkOptions};
use rustls::StreamOwned;
use tempfile::TempDir;

use crate::authority::{Authority, NOW, of_client, of_server, replace};
use crate::proxy::{connect, unverifying};
use crate::target::{GreetingClient, Target};

/// The longest wait for a file that is read again.
const PATIENCE: Duration = Duration::from_secs(60);
const OLD: &str = "the token before, thirty-two bytes";
const NEW: &str = "the token afterwards, some bytes more";

/// A trainer that sends numbered frames over one connection.
struct LoadedConnection {
    client: GreetingClient,
    sent: u64,
    received: u64,
}

impl LoadedConnection {
    /// Sends some frames, and takes those that have arrived. New connections of others are let go.
    fn step(&mut self, target: &mut Target) {
        // The transport takes so many at once.
        while self.sent < self.received + 32 {
            let mut head = Head::new(Kind::Push);
            head.sequence = Sequence(self.sent);
            self.client.send(Frame::bare(head));
            self.sent += 1;
        }
        let ended = self.client.events().into_iter().any(|event| matches!(event, Event::Gone { .. }));
        assert!(!ended, "the connection lives on");
        for event in target.events() {
            if let Event::Received { frame, .. } = event
                && frame.head.kind == Kind::Push
            {
                assert_eq!(frame.head.sequence, Sequence(self.received), "frames come in order");
                self.received += 1;
            }
        }
    }
}

#[test]
fn a_certificate_changes_under_load() {
    let authority = Authority::new();
    let files = authority.certify("server", "127.0.0.1", NOW);
    let options = NetworkOptions { encryption: of_server(Some(&files), None), ..NetworkOptions::default() };
    let mut target = Target::start(options);
    let verifying = NetworkOptions { encryption: of_client(None, Some(&authority)), ..NetworkOptions::default() };
    let client = GreetingClient::connect(&target.address, verifying.clone());
    let mut load = LoadedConnection { client, sent: 0, received: 0 };
    let shown = |target: &Target| {
        let mut stream = StreamOwned::new(unverifying(), connect(&target.address));
        stream.conn.complete_io(&mut stream.sock).expect("the server shows a certificate");
        stream.conn.peer_certificates().expect("there is one")[0].to_vec()
    };
    let first = shown(&target);
    // A certificate without its key, and then text that is none: the server goes on with what it had.
    let began = Instant::now();
    let key = fs::read_to_string(&files.private_key).expect("it was written");
    let pem = fs::read_to_string(&files.certificate).expect("it was written");
    replace(&files.certificate, "no certificate");
    while began.elapsed() < Duration::from_millis(1500) {
        load.step(&mut target);
        assert_eq!(shown(&target), first);
    }
    replace(&files.certificate, &pem);
    let renewed = authority.certify("server", "127.0.0.1", NOW);
    assert_ne!(key, fs::read_to_string(&renewed.private_key).expect("it was written"), "it has another key");
    while shown(&target) == first {
        load.step(&mut target);
        assert!(began.elapsed() < PATIENCE, "the new certificate is shown");
    }
    // A client verifies the new one, and the old connection lives.
    let mut second = GreetingClient::connect(&target.address, verifying);
    target.until(&mut second, |event| match event {
        Event::Received { frame, .. } => (frame.head.kind == Kind::Hello).then_some(()),
        _ => None,
    });
    let known = load.received;
    while load.received < known + 100 {
        load.step(&mut target);
        assert!(began.elapsed() < PATIENCE, "frames arrive over the old connection");
    }
}

/// The result of a new connection: the refusal, if there is one.
fn refusal(target: &mut Target, options: NetworkOptions) -> Option<String> {
    let mut client = GreetingClient::connect(&target.address, options);
    let began = Instant::now();
    loop {
        for event in client.events() {
            match event {
                Event::Received { frame, .. } if frame.head.kind == Kind::Refused => {
                    return Some(String::from_utf8_lossy(&frame.control).into_owned());
                }
                Event::Gone { reason, .. } => return Some(reason),
                _ => {}
            }
        }
        for event in target.events() {
            if matches!(event, Event::Received { ref frame, .. } if frame.head.kind == Kind::Hello) {
                return None;
            }
        }
        assert!(began.elapsed() < PATIENCE, "the connection is made or refused");
    }
}

#[test]
fn a_token_changes_in_steps_without_a_refusal() {
    let folder = TempDir::new().expect("there is room");
    let [server, client, stranger] = ["server", "client", "stranger"].map(|name| folder.path().join(name));
    [&server, &client, &stranger].iter().for_each(|path| replace(path, OLD));
    let with = |path: &Path, encrypts: bool| NetworkOptions {
        token: JobToken::read(path).ok(),
        encryption: of_server(None, None).filter(|_| encrypts),
        ..NetworkOptions::default()
    };
    for encrypts in [false, true] {
        replace(&server, OLD);
        replace(&client, OLD);
        let mut target = Target::start(with(&server, encrypts));
        let trainer = with(&client, encrypts);
        let steps = [
            (&server, [OLD, NEW].join("\n")),
            (&client, [OLD, NEW].join("\n")),
            (&client, [NEW, OLD].join("\n")),
            (&server, [NEW, OLD].join("\n")),
            (&client, NEW.to_owned()),
            (&server, NEW.to_owned()),
        ];
        for (path, text) in steps {
            replace(path, &text);
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(1100) {
                assert_eq!(refusal(&mut target, trainer.clone()), None, "{} has {text}", path.display());
            }
        }
        let old = with(&stranger, encrypts);
        let began = Instant::now();
        while refusal(&mut target, old.clone()).is_none() {
            assert!(began.elapsed() < PATIENCE, "the old token is worth nothing any more");
        }
    }
}

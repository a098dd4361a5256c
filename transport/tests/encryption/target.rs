//! A server that is attacked, with what it logs, and a client.

use std::collections::VecDeque;
use std::fmt::{Debug, Write};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use prost::Message;
use pserver_core::ids::{PeerId, Sequence, Ticket};
use pserver_core::port::{Event, Payloads, Submit, Transport};
use pserver_core::wire::{Address, ErrorMessage, Frame, Head, HelloMessage, Kind};
use pserver_transport::network::{JobToken, Lanes, Listener, Network, NetworkOptions, Stop};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};

/// The longest wait for something that happens.
const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const TOKEN: &[u8] = b"correct horse battery staple";

pub(crate) fn token(secret: &[u8]) -> Option<JobToken> {
    JobToken::new(secret).ok()
}

/// A listener with one lane.
pub(crate) struct Target {
    pub(crate) address: Address,
    lane: Network,
    stop: Stop,
    listening: Option<JoinHandle<()>>,
    refusals: Receiver<String>,
}

impl Target {
    pub(crate) fn start(options: NetworkOptions) -> Self {
        Self::start_at("tcp://127.0.0.1:0", options)
    }

    pub(crate) fn start_at(address: &str, options: NetworkOptions) -> Self {
        let address = Address::parse(address).expect("an address");
        let lane = Network::new(options.clone()).expect("a transport");
        let listener = Listener::bind(&address, options).expect("a free port");
        let (address, stop) = (listener.local_address(), Stop::new());
        let (sender, refusals) = channel();
        let listening = {
            let (stop, lanes) = (stop.clone(), Lanes::from([(0, lane.connection_sender())]));
            let log = RefusalLog(Mutex::new(sender));
            move || {
                tracing::subscriber::with_default(log, || listener.run(lanes, stop)).expect("the listener runs");
            }
        };
        Self { address, lane, stop, listening: Some(thread::spawn(listening)), refusals }
    }

    /// The next reason for which the listener refuses a connection.
    pub(crate) fn refusal(&self) -> String {
        self.refusals.recv_timeout(PATIENCE).expect("a connection is refused")
    }

    /// The events that the lane has seen.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for _ in 0..4 {
            self.lane.wait(Duration::from_millis(1));
            self.lane.poll(&mut events).expect("the device works");
        }
        events
    }

    /// Polls the client and the lane until an event of the lane is of this kind.
    pub(crate) fn until<T>(&mut self, client: &mut GreetingClient, mut find: impl FnMut(Event) -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            client.events();
            if let Some(found) = self.events().into_iter().find_map(&mut find) {
                return found;
            }
            assert!(began.elapsed() < PATIENCE, "it happens");
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.listening.take() {
            let ended = thread.join();
            assert!(thread::panicking() || ended.is_ok(), "the listener is unharmed");
        }
    }
}

pub(crate) fn hello() -> Frame {
    let mut head = Head::new(Kind::Hello);
    head.sequence = Sequence(0);
    let host = "here".to_owned();
    Frame::with_control(
        head,
        &HelloMessage { role: 0, host, process: 1, absence_millis: None, run: 0, run_trainers: 0 },
    )
}

/// A client with a connection of which the hello is sent.
pub(crate) struct GreetingClient {
    network: Network,
    pub(crate) peer: PeerId,
}

impl GreetingClient {
    pub(crate) fn connect(address: &Address, options: NetworkOptions) -> Self {
        let mut network = Network::new(options).expect("a transport");
        let peer = network.connect(address).expect("the address is of this transport");
        let mut client = Self { network, peer };
        client.send(hello());
        client
    }

    pub(crate) fn send(&mut self, frame: Frame) {
        let send = Submit::Send { peer: self.peer, ticket: Ticket(0), frame, body: Payloads::new() };
        self.network.submit(&mut VecDeque::from([send])).expect("the device works");
    }

    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.network.wait(Duration::from_millis(1));
        self.network.poll(&mut events).expect("the device works");
        events
    }

    pub(crate) fn close(&mut self) {
        self.network.close(self.peer);
    }

    /// Why the connection was refused, by a frame or otherwise.
    pub(crate) fn refusal(self) -> String {
        self.refusal_while(|| {})
    }

    /// The same, while the server does something too.
    pub(crate) fn refusal_while(mut self, mut act: impl FnMut()) -> String {
        let began = Instant::now();
        loop {
            act();
            for event in self.events() {
                match event {
                    Event::Received { frame, .. } if frame.head.kind == Kind::Refused => {
                        return ErrorMessage::decode(frame.control.as_slice()).expect("a refusal").text;
                    }
                    Event::Gone { reason, .. } => return reason,
                    _ => {}
                }
            }
            assert!(began.elapsed() < PATIENCE, "the connection is refused");
        }
    }
}

/// Sends the reasons of refused connections.
struct RefusalLog(Mutex<Sender<String>>);

/// The field `reason` of an event.
#[derive(Default)]
struct ReasonField(Option<String>);

impl Visit for ReasonField {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "reason" {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "reason" {
            let mut text = String::new();
            write!(text, "{value:?}").expect("it is memory");
            self.0 = Some(text);
        }
    }
}

impl Subscriber for RefusalLog {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut reason = ReasonField::default();
        event.record(&mut reason);
        let sender = self.0.lock().expect("no thread has panicked");
        // The test may have seen enough.
        let _ = reason.0.map(|reason| sender.send(reason));
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Fast refusals of silence, for tests.
pub(crate) fn impatient(options: NetworkOptions) -> NetworkOptions {
    NetworkOptions { hello_timeout: Duration::from_millis(300), ..options }
}

/// Kept for a thread that ends with the test.
pub(crate) type Shared<T> = Arc<Mutex<T>>;

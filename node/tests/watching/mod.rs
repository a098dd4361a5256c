//! A job whose servers are watched over HTTP, its trainers, and a plain reader of HTTP.

#![allow(dead_code, reason = "every test program uses the part that it needs")]

pub(crate) mod browser;
pub(crate) mod program;
#[path = "../../../bench/tests/schema/mod.rs"]
pub(crate) mod schema;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pserver_client::{Client, ClientOptions, DestinationSlice, GradientSlice};
use pserver_core::config::OptimizerSettings;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::wire::Address;
use pserver_node::Server;
use pserver_node::settings::Settings;
use serde_json::Value;

/// The longest wait for anything.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
const PARAMETERS: [&str; 4] = ["a", "b", "c", "d"];

/// Servers and trainers in this process.
pub(crate) struct WatchedJob {
    servers: Vec<Server>,
    trainers: Vec<Arc<Client>>,
    round: Mutex<u64>,
}

impl WatchedJob {
    /// Bytes of all parameters.
    pub(crate) const BYTES: u32 = 4 * 4096;

    /// Starts servers with HTTP, and trainers that have initialised four parameters of one chunk each.
    pub(crate) fn start(servers: u16, trainers: u32, more: &[(&str, &str)]) -> Self {
        let servers = start_servers(servers, trainers, more);
        let coordinator = servers[0].address().clone();
        let trainers = (0..trainers).map(|rank| Arc::new(client(&coordinator, rank))).collect();
        let job = Self { servers, trainers, round: Mutex::new(0) };
        job.each(|client| initialise(&client));
        job
    }

    /// The address of a server's HTTP.
    pub(crate) fn http(&self, server: usize) -> SocketAddr {
        self.servers[server].http_address().expect("it serves HTTP")
    }

    pub(crate) fn coordinator(&self) -> &Address {
        self.servers[0].address()
    }

    /// Runs so many rounds of every trainer.
    pub(crate) fn train(&self, rounds: u32) {
        self.each(move |client| (0..rounds).for_each(|_| step(&client)));
        std::thread::sleep(Duration::from_millis(250)); // tidy: allow sleep: answers are kept for 200 ms
    }

    /// Lets trainer 0 step.
    pub(crate) fn step(&self) {
        step(&self.trainers[0]);
    }

    /// Lets trainer 0 step, which waits for trainer 1.
    pub(crate) fn push_of_one(&self) -> JoinHandle<()> {
        let client = Arc::clone(&self.trainers[0]);
        std::thread::spawn(move || step(&client))
    }

    /// Lets trainer 1 step, which ends the wait.
    pub(crate) fn push_of_the_other(&self, waiting: JoinHandle<()>) {
        step(&self.trainers[1]);
        waiting.join().expect("the step ends");
    }

    /// Reads server 0's status until it is as expected.
    pub(crate) fn wait_for(&self, is_as_expected: impl Fn(&Value) -> bool) -> Value {
        wait_for(self.http(0), is_as_expected)
    }

    pub(crate) fn stop(self) {
        drop(self.trainers);
        let stopping = self.servers.into_iter().map(|server| std::thread::spawn(move || server.stop()));
        for one in stopping.collect::<Vec<_>>() {
            one.join().expect("stopping does not panic").expect("a server stops without a failure");
        }
    }

    fn each(&self, work: impl Fn(Arc<Client>) + Copy + Send + 'static) {
        let _one_at_a_time = self.round.lock().unwrap_or_else(PoisonError::into_inner);
        let running = self.trainers.iter().map(|client| {
            let client = Arc::clone(client);
            std::thread::spawn(move || work(client))
        });
        running.collect::<Vec<_>>().into_iter().for_each(|one| one.join().expect("a trainer ends well"));
    }
}

/// Starts servers with HTTP on free ports.
pub(crate) fn start_servers(count: u16, trainers: u32, more: &[(&str, &str)]) -> Vec<Server> {
    let mut servers: Vec<Server> = Vec::new();
    for index in 0..count {
        let mut line = Vec::new();
        let mut add = |option: &str, value: String| line.extend([option.to_owned(), value]);
        add("--bind", "127.0.0.1:0".to_owned());
        add("--http", "127.0.0.1:0".to_owned());
        add("--device", "cpu".to_owned());
        add("--index", index.to_string());
        add("--servers", count.to_string());
        add("--shards", "1".to_owned());
        add("--trainers", trainers.to_string());
        if let Some(first) = servers.first() {
            add("--coordinator", first.address().to_string());
        }
        more.iter().for_each(|(option, value)| add(option, (*value).to_owned()));
        let settings = Settings::of_words(line).expect("the settings are right");
        servers.push(Server::start(settings).expect("a server starts on a free port"));
    }
    servers
}

/// A client of rank `rank`.
pub(crate) fn client(coordinator: &Address, rank: u32) -> Client {
    let options = ClientOptions { trainer: Some(rank), deadline: LIMIT, ..ClientOptions::new(coordinator.clone()) };
    Client::new(options).expect("this process can have another transport")
}

/// Initialises the parameters, or waits until another trainer has.
pub(crate) fn initialise(client: &Client) {
    if client.begin_init(&OptimizerSettings::default()).expect("the job answers") {
        let settings = OptimizerSettings::from_text("const_lr { learning_rate: 1.0 }").expect("it is a message");
        for name in PARAMETERS {
            client.init_param(name, Float32, &[], &[0; 4096], &settings).expect("it is taken");
        }
        client.finish_init().expect("it is taken");
    }
}

/// One round: gradients of ones, and the values after it.
pub(crate) fn step(client: &Client) {
    let gradient: Vec<u8> = std::iter::repeat_n(1_f32.to_le_bytes(), 1024).flatten().collect();
    let given = PARAMETERS.map(|name| GradientSlice { name, element_type: Float32, content: &gradient });
    let mut values = PARAMETERS.map(|_| vec![0; 4096]);
    let wanted = PARAMETERS.iter().zip(&mut values).map(|(name, value)| DestinationSlice::new(name, value));
    let mut wanted: Vec<DestinationSlice<'_>> = wanted.collect();
    client.push_pull(&given, None, &mut wanted).expect("the round ends");
}

/// Reads a server's status until it is as expected.
pub(crate) fn wait_for(at: SocketAddr, is_as_expected: impl Fn(&Value) -> bool) -> Value {
    let begun = Instant::now();
    loop {
        let status: Value = serde_json::from_str(&body(&get(at, "/status"))).expect("the status is JSON");
        if is_as_expected(&status) {
            return status;
        }
        assert!(begun.elapsed() < LIMIT, "{status:#}");
        std::thread::sleep(Duration::from_millis(50)); // tidy: allow sleep: the status is polled
    }
}

/// The whole answer to a GET.
pub(crate) fn get(at: SocketAddr, path: &str) -> String {
    request(at, format!("GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n").as_bytes())
}

/// The whole answer to a request.
pub(crate) fn request(at: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(at).expect("it listens");
    stream.set_read_timeout(Some(LIMIT)).expect("it is a time");
    stream.write_all(bytes).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    answer
}

/// The content of an answer that must be good.
pub(crate) fn body(answer: &str) -> String {
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    answer.split_once("\r\n\r\n").expect("a head ends with an empty line").1.to_owned()
}

/// So many rounds of one trainer with one parameter of 4 KiB, over whatever the address allows.
pub(crate) fn round_of_one(coordinator: &Address, times: u32) {
    let options = ClientOptions { trainer: Some(0), deadline: LIMIT, ..ClientOptions::new(coordinator.clone()) };
    let client = Client::new(options).expect("this process can have another transport");
    assert!(client.begin_init(&OptimizerSettings::default()).expect("the job answers"));
    let settings = OptimizerSettings::from_text("const_lr { learning_rate: 1.0 }").expect("it is a message");
    client.init_param("a", Float32, &[], &[0; 4096], &settings).expect("it is taken");
    client.finish_init().expect("it is taken");
    let (gradient, mut value) = ([0; 4096], vec![0; 4096]);
    for _ in 0..times {
        let given = [GradientSlice { name: "a", element_type: Float32, content: &gradient }];
        client.push_pull(&given, None, &mut [DestinationSlice::new("a", &mut value)]).expect("the round ends");
    }
}

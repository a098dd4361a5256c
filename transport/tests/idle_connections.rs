//! Cost of idle connections: instructions of a round on one connection over verbs, beside 255 that have nothing to do,
//! counted by callgrind.
//!
//! The test runs itself under callgrind. Two numbers of rounds leave out what starts and ends.

use std::collections::VecDeque;
use std::io::Write;
use std::process::Command;
use std::thread;
use std::time::Duration;

use pserver_core::ids::{PeerId, Ticket};
use pserver_core::port::{Event, Payloads, Submit, Transport};
use pserver_core::wire::{Address, Frame, Head, HelloMessage, Kind};
use pserver_transport::network::{Lanes, Listener, Network, NetworkOptions, PollPolicy, Stop};
use pserver_transport::verbs::{VerbsDevice, VerbsDevices};

/// The variable with the connections and the rounds of the counted process.
const COUNTED: &str = "PSERVER_TEST_COUNTED";
/// Connections in all, and rounds on the first.
const MANY: u64 = 256;
const ROUNDS: [u64; 2] = [100, 600];
/// Instructions with many connections beside those with one, at most.
const GOAL: f64 = 1.2;

/// A transport, and what has come to it.
struct Side {
    transport: Network,
    queue: VecDeque<Submit>,
    events: Vec<Event>,
    accepted: Vec<PeerId>,
    received: u64,
}

impl Side {
    fn new(options: &NetworkOptions) -> Self {
        let transport = Network::new(options.clone()).expect("a transport");
        Self { transport, queue: VecDeque::new(), events: Vec::new(), accepted: Vec::new(), received: 0 }
    }

    fn send(&mut self, peer: PeerId, ticket: u64, frame: Frame) {
        self.queue.push_back(Submit::Send { peer, ticket: Ticket(ticket), frame, body: Payloads::new() });
    }

    fn step(&mut self) {
        self.transport.submit(&mut self.queue).expect("the device works");
        self.transport.wait(Duration::from_micros(1));
        self.transport.poll(&mut self.events).expect("the device works");
        for event in self.events.drain(..) {
            match event {
                Event::Accepted { peer, .. } => self.accepted.push(peer),
                Event::Received { .. } => self.received += 1,
                Event::Gone { reason, .. } => panic!("a connection is over: {reason}"),
                _ => {}
            }
        }
    }
}

/// Makes so many connections, and so many rounds on the first.
fn run(connections: u64, rounds: u64) {
    let devices = VerbsDevices::This(VerbsDevice::in_process());
    let options = NetworkOptions { devices, poll: PollPolicy::Block, ..NetworkOptions::default() };
    let (mut near, mut far) = (Side::new(&options), Side::new(&options));
    let address = Address::parse("verbs://127.0.0.1:0").expect("an address");
    let listener = Listener::bind(&address, options).expect("a free port");
    let address = listener.local_address();
    let (lanes, stop) = (Lanes::from([(0, far.transport.connection_sender())]), Stop::new());
    let listening = thread::spawn({
        let stop = stop.clone();
        move || listener.run(lanes, stop).expect("the listener runs")
    });
    let hello =
        HelloMessage { role: 0, host: "here".to_owned(), process: 1, absence_millis: None, run: 0, run_trainers: 0 };
    let peers: Vec<PeerId> = (0..connections)
        .map(|number| {
            let peer = near.transport.connect(&address).expect("an address of this transport");
            near.send(peer, number, Frame::with_control(Head::new(Kind::Hello), &hello));
            while far.received <= number {
                near.step();
                far.step();
            }
            peer
        })
        .collect();
    for round in 0..rounds {
        let (here, there) = (near.received, far.received);
        near.send(peers[0], round, Frame::bare(Head::new(Kind::Leave)));
        while far.received == there {
            near.step();
            far.step();
        }
        far.send(far.accepted[0], round, Frame::bare(Head::new(Kind::Done)));
        while near.received == here {
            near.step();
            far.step();
        }
    }
    stop.stop();
    listening.join().expect("the listener ends well");
}

/// Instructions of one round beside so many connections.
fn instructions(connections: u64) -> f64 {
    let [few, many] = ROUNDS.map(|rounds| {
        let folder = tempfile::tempdir().expect("there is a folder for tests");
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=counted"]);
        command.arg(std::env::current_exe().expect("it runs")).arg("--exact").arg(TEST);
        command.current_dir(folder.path()).env(COUNTED, format!("{connections} {rounds}"));
        let output = command.output().expect("valgrind is there");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
        let line =
            said.lines().find_map(|line| line.split_once("Collected : ")).expect("callgrind says what it counted");
        line.1.trim().parse::<f64>().expect("a number")
    });
    (many - few) / (ROUNDS[1] - ROUNDS[0]) as f64
}

const TEST: &str = "a_round_costs_no_more_beside_idle_connections";

#[test]
fn a_round_costs_no_more_beside_idle_connections() {
    if let Ok(counted) = std::env::var(COUNTED) {
        let (connections, rounds) = counted.split_once(' ').expect("two numbers");
        return run(connections.parse().expect("a number"), rounds.parse().expect("a number"));
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        if let Ok(path) = std::env::var("PSERVER_SKIP_REPORT") {
            let report = std::fs::OpenOptions::new().append(true).create(true).open(path);
            writeln!(
                report.expect("the report opens"),
                "SKIPPED: valgrind: it is not installed, and the instructions beside idle connections are not counted"
            )
            .expect("the report is written");
        }
        return;
    }
    let (one, many) = (instructions(1), instructions(MANY));
    println!("instructions of a round: {one:.0} with one connection, {many:.0} with {MANY}");
    assert!(many < GOAL * one, "{many:.0} instructions with {MANY} connections, {one:.0} with one");
}

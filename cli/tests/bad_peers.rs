//! Misbehaving peers do not harm other trainers. With connections that request and never read, or that wait for a round
//! that never closes, the server's memory stays within its budget, and an honest trainer's pushes are about as fast as
//! without them, measured in alternation. `PSERVER_FULL=1` measures longer, and applies the documented latency bound.

mod cluster;

use std::collections::VecDeque;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cluster::asked::is_full;
use cluster::job::{Job, client};
use cluster::process::Processes;
use cluster::training::{Tensor, begin, push};
use pserver_client::Client;
use pserver_core::dtype::ElementType::Float32;
use pserver_core::ids::{ChunkId, ChunkIndex, NO_TRAINER, ParameterIndex, PeerId, Round, Sequence, Ticket};
use pserver_core::limits::UNREAD_BYTES_MAX;
use pserver_core::port::{Event, Payloads, Submit, Transport};
use pserver_core::wire::{Address, Entry, Frame, Head, HelloMessage, Kind, Role};
use pserver_transport::network::{Network, NetworkOptions};

const SGD: &str = "const_lr { learning_rate: 1.0 }";
/// Readers that a bad program opens.
const PEERS: usize = 3;
/// A round that no test reaches.
const NEVER: Round = Round(1 << 40);
const PATIENCE: Duration = Duration::from_secs(60);

/// A reader that sends pulls without end, and reads nothing after its welcome.
struct Reader {
    network: Network,
    peer: PeerId,
    welcome: Head,
    asked: u64,
}

impl Reader {
    fn connect(address: &Address) -> Self {
        let mut network = Network::new(NetworkOptions::default()).expect("a transport");
        let peer = network.connect(address).expect("an address");
        // Lane 1 is the first shard.
        let head = Head { trainer: NO_TRAINER, sequence: Sequence(1), ..Head::new(Kind::Hello) };
        let role = Role::Reader.into();
        let hello = HelloMessage {
            role,
            host: String::new(),
            process: std::process::id(),
            absence_millis: None,
            run: 0,
            run_trainers: 0,
        };
        let mut reader = Self { network, peer, welcome: head, asked: 0 };
        reader.submit(vec![Frame::with_control(head, &hello)]);
        let begun = Instant::now();
        reader.welcome = loop {
            assert!(begun.elapsed() < PATIENCE, "the server welcomes a reader");
            let found = reader.events().into_iter().find_map(|event| match event {
                Event::Received { frame, .. } => Some(frame.head),
                Event::Gone { reason, .. } => panic!("a reader is refused: {reason}"),
                _ => None,
            });
            if let Some(head) = found {
                break head;
            }
            reader.network.wait(Duration::from_millis(10));
        };
        assert_eq!(reader.welcome.kind, Kind::Welcome);
        reader
    }

    fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.network.poll(&mut events).expect("the device is well");
        events
    }

    /// Submits the frames that fit; the others are dropped.
    fn submit(&mut self, frames: Vec<Frame>) {
        let (peer, asked) = (self.peer, self.asked);
        let send =
            |(number, frame)| Submit::Send { peer, ticket: Ticket(asked + number), frame, body: Payloads::new() };
        let mut queue: VecDeque<Submit> = (0..).zip(frames).map(send).collect();
        let count = queue.len();
        self.network.submit(&mut queue).expect("the device is well");
        self.asked += (count - queue.len()) as u64;
    }

    /// Sends several pulls of a value of this round. No receive buffer is posted, so no answer is read. Returns false
    /// when the server has closed the connection.
    fn ask(&mut self, round: Round) -> bool {
        let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
        let request = Ticket(self.asked + 1);
        let head = Head { kind: Kind::Pull, trainer: NO_TRAINER, sequence: Sequence(0), request, ..self.welcome };
        let frame = Frame { entries: vec![Entry::bare(id, round, Float32)].into(), ..Frame::bare(head) };
        self.submit(vec![frame; 64]);
        !self.events().iter().any(|event| matches!(event, Event::Gone { .. }))
    }
}

/// Running misbehaving peers.
struct Foes {
    stop: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Foes {
    fn set_on(address: &Address) -> Self {
        let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let begin = |number: usize| {
            let (address, stop, asked) = (address.clone(), Arc::clone(&stop), Arc::clone(&asked));
            let round = if number.is_multiple_of(2) { Round(0) } else { NEVER };
            thread::spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    let mut reader = Reader::connect(&address);
                    while !stop.load(Ordering::Acquire) && reader.ask(round) {
                        reader.network.wait(Duration::from_millis(1));
                    }
                    asked.fetch_add(reader.asked, Ordering::Relaxed);
                }
            })
        };
        let threads = (0..PEERS).map(begin).collect();
        Self { stop, asked, threads }
    }

    /// The number of pulls sent.
    fn call_off(self) -> u64 {
        self.stop.store(true, Ordering::Release);
        self.threads.into_iter().for_each(|one| one.join().expect("a bad peer ends well"));
        self.asked.load(Ordering::Relaxed)
    }
}

fn resident_bytes(process: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("the server runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it is there");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// Successive pushes; returns the time of each.
fn pushes(client: &Client, tensors: &[Tensor], first: u64, count: u64) -> Vec<Duration> {
    let timed = |round| {
        let begun = Instant::now();
        push(client, tensors, 0, round).expect("an honest push is taken");
        begun.elapsed()
    };
    (first..first + count).map(timed).collect()
}

fn p99(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

#[test]
fn peers_that_never_read_cost_others_neither_memory_nor_time() {
    let (blocks, count) = if is_full() { (15, 400) } else { (4, 150) };
    let servers = Processes::start(Job { mode: "async", bind: "tcp://127.0.0.1:0", ..Job::new(1, 1) });
    let address = servers.coordinator();
    let honest = client(&address, 0);
    let tensors =
        vec![Tensor::new("w", Float32, 256 * 1024, SGD).zeroed(), Tensor::new("b", Float32, 16, SGD).zeroed()];
    begin(&honest, &tensors).expect("the parameters are initialised");
    let process = servers.running[0].as_ref().expect("it runs").id().as_raw();
    // The first pushes warm up and are not counted.
    drop(pushes(&honest, &tensors, 0, count));
    let (mut alone, mut beside, mut round) = (Vec::new(), Vec::new(), count);
    let own = resident_bytes(process);
    let (mut most, mut asked) = (own, 0);
    for _ in 0..blocks {
        alone.extend(pushes(&honest, &tensors, round, count));
        let foes = Foes::set_on(&address);
        beside.extend(pushes(&honest, &tensors, round + count, count));
        most = most.max(resident_bytes(process));
        asked += foes.call_off();
        round += 2 * count;
    }
    let (quiet, disturbed) = (p99(&mut alone), p99(&mut beside));
    let ratio = disturbed.as_secs_f64() / quiet.as_secs_f64();
    let more = most.saturating_sub(own);
    println!(
        "{PEERS} bad peers asked {asked} times: {} MiB beside the {} MiB of the server, p99 of {} pushes {quiet:?} \
         alone and {disturbed:?} beside them, {ratio:.2} times",
        more >> 20,
        own >> 20,
        beside.len()
    );
    assert!(asked > 1000, "they asked {asked} times");
    assert!(more <= UNREAD_BYTES_MAX * PEERS as u64, "{more} bytes more than the {own} of the server itself");
    assert!(ratio <= if is_full() { 2.0 } else { 10.0 }, "{quiet:?} alone, {disturbed:?} beside bad peers");
    servers.terminate();
}

//! A server that answers raw frames, and frames for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pserver_core::checksum::checksum;
use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, Round, Sequence, Ticket};
use pserver_core::memory::{Arena, Budget};
use pserver_core::port::{Doorbell, Event, Incoming, Payloads, Submit, Transport};
use pserver_core::wire::{Address, Entry, Frame, Head, Kind};
use pserver_transport::network::{Lanes, Listener, Network, NetworkOptions, Stop};

/// The largest payload that is not discarded.
const LARGEST: u32 = 64 * 1024;

/// A lane that receives everything and answers every push.
pub(crate) struct AnsweringServer {
    pub(crate) address: Address,
    stop: Stop,
    stopped: Arc<AtomicBool>,
    doorbell: Doorbell,
    threads: Vec<JoinHandle<()>>,
}

impl AnsweringServer {
    /// Starts a server with lane one and without lane zero.
    pub(crate) fn start(address: &str, options: NetworkOptions) -> Self {
        let address = Address::parse(address).expect("an address");
        let transport = Network::new(options.clone()).expect("a transport");
        let listener = Listener::bind(&address, options).expect("a free port");
        let (stop, stopped, doorbell) = (Stop::new(), Arc::new(AtomicBool::new(false)), transport.doorbell());
        let (address, lanes) = (listener.local_address(), Lanes::from([(1, transport.connection_sender())]));
        let listening = {
            let stop = stop.clone();
            move || listener.run(lanes, stop).expect("the listener runs")
        };
        let lane = {
            let stopped = Arc::clone(&stopped);
            move || serve(transport, &stopped)
        };
        let threads = vec![thread::spawn(listening), thread::spawn(lane)];
        Self { address, stop, stopped, doorbell, threads }
    }
}

impl Drop for AnsweringServer {
    fn drop(&mut self) {
        self.stop.stop();
        self.stopped.store(true, Relaxed);
        self.doorbell.ring();
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(thread::panicking() || ended.is_ok(), "the server is unharmed");
        }
    }
}

fn serve(mut transport: Network, stopped: &AtomicBool) {
    let mut budget = Budget::new();
    budget.line("payloads", LARGEST, 16);
    let arena = Arena::new(&budget).expect("a small arena");
    let (mut queue, mut events) = (VecDeque::new(), Vec::new());
    while !stopped.load(Relaxed) {
        transport.wait(Duration::from_secs(1));
        transport.poll(&mut events).expect("the device works");
        for event in events.drain(..) {
            match event {
                Event::Head { peer, frame } => {
                    let lengths = frame.entries.iter().map(|entry| entry.bytes).filter(|bytes| *bytes > 0);
                    let place = |bytes: u32| match arena.take(bytes.min(LARGEST)) {
                        Ok(lease) if bytes <= LARGEST => Incoming::Chunk { lease, bytes },
                        _ => Incoming::Discard { bytes },
                    };
                    queue.push_back(Submit::PostReceive { peer, into: lengths.map(place).collect() });
                }
                Event::Received { peer, frame, .. } if frame.head.kind == Kind::Push => {
                    let frame = Frame::bare(frame.head.answer(Kind::Done));
                    queue.push_back(Submit::Send { peer, ticket: Ticket(0), frame, body: Payloads::new() });
                }
                _ => {}
            }
        }
        transport.submit(&mut queue).expect("the device works");
    }
}

pub(crate) fn hello(lane: u64) -> Frame {
    let mut head = Head::new(Kind::Hello);
    head.sequence = Sequence(lane);
    Frame { control: vec![0; 10], ..Frame::bare(head) }
}

pub(crate) fn push(payload: &[u8]) -> Frame {
    let id = ChunkId { parameter: pserver_core::ids::ParameterIndex(0), chunk: pserver_core::ids::ChunkIndex(0) };
    let entry = Entry::with_payload(id, Round(1), ElementType::Float32, payload);
    let entry = Entry { checksum: checksum(payload), ..entry };
    Frame { entries: vec![entry].into(), ..Frame::bare(Head::new(Kind::Push)) }
}

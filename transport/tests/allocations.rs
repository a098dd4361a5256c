//! What frames over verbs allocate and register once a connection is warm: nothing but the frames themselves.
//!
//! A test binary of its own, because what it counts is the whole process's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, PeerId, Round, Ticket};
use pserver_core::memory::{Arena, Budget, Value};
use pserver_core::port::{Event, Incoming, Outgoing, Submit, Transport};
use pserver_core::wire::{Address, Entry, Frame, Head, HelloMessage, Kind};
use pserver_transport::network::{Listener, Network, NetworkOptions, Poll, Stop};
use pserver_transport::verbs::{Device, Devices};

/// The system's allocator, counted for the thread that asks it.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends is not counted any more.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps what `alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the pointer came from `alloc` above, with this layout.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One side, and what the transport allocated for it.
struct Side {
    transport: Network,
    queue: VecDeque<Submit>,
    events: Vec<Event>,
    arena: Arena,
    peer: Option<PeerId>,
    landed: u64,
    sent: u64,
    allocated: u64,
    polls: u64,
}

impl Side {
    fn new(transport: Network) -> Self {
        let mut budget = Budget::new();
        budget.line("payloads", 64 * 1024, 64);
        let arena = Arena::new(&budget).expect("an arena");
        let (queue, events) = (VecDeque::with_capacity(16), Vec::with_capacity(64));
        Self { transport, queue, events, arena, peer: None, landed: 0, sent: 0, allocated: 0, polls: 0 }
    }

    /// Sends a frame with payloads of these lengths.
    fn send(&mut self, lengths: &[u32]) {
        let payload = |bytes: u32| Value::new(self.arena.take_zeroed(bytes).expect("a slot"), bytes);
        let body = lengths.iter().map(|bytes| Outgoing::Value(Arc::new(payload(*bytes)))).collect();
        let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
        let entry = |bytes: &u32| Entry::with_payload(id, Round(1), ElementType::Float32, &vec![0; *bytes as usize]);
        let mut frame = Frame::bare(Head::new(Kind::Push));
        frame.entries.extend(lengths.iter().map(entry));
        let peer = self.peer.expect("it is connected");
        self.queue.push_back(Submit::Send { peer, ticket: Ticket(self.sent + 1), frame, body });
    }

    /// Lets the transport go on, and answers what it says.
    fn step(&mut self) {
        let before = ALLOCATIONS.get();
        self.transport.submit(&mut self.queue).expect("the device works");
        self.transport.wait(Duration::from_millis(1));
        self.transport.poll(&mut self.events).expect("the device works");
        self.allocated += ALLOCATIONS.get() - before;
        self.polls += 1;
        for event in self.events.drain(..) {
            match event {
                Event::Accepted { peer, .. } | Event::Connected { peer } => self.peer = Some(peer),
                Event::Head { peer, frame } => {
                    let place = |entry: &Entry| {
                        let bytes = entry.bytes;
                        Incoming::Chunk { lease: self.arena.take(bytes).expect("a slot"), bytes }
                    };
                    self.queue.push_back(Submit::Land { peer, into: frame.entries.iter().map(place).collect() });
                }
                Event::Landed { .. } => self.landed += 1,
                Event::Sent { .. } => self.sent += 1,
                Event::Left { .. } => {}
                Event::Gone { reason, .. } => panic!("the connection is over: {reason}"),
            }
        }
    }
}

/// Frames each way whose allocations are counted together.
const ROUNDS: u64 = 100;
/// As a transport has it whose connections are memory that is looked at.
const POLLS_PER_LOOK: u64 = 256;

/// What the two transports allocated in so many polls.
struct Block {
    allocated: [u64; 2],
    polls: [u64; 2],
}

/// How much both transports allocate for so many frames each way, and how much they register, once they are warm.
fn steady(lengths: &[u32]) -> (Vec<Block>, u64) {
    let devices = Devices::This(Device::in_process());
    let options = NetworkOptions { devices, poll: Poll::Block, ..NetworkOptions::default() };
    let address = Address::parse("verbs://127.0.0.1:0").expect("an address");
    let mut near = Side::new(Network::new(options.clone()).expect("a transport"));
    let mut far = Side::new(Network::new(options.clone()).expect("a transport"));
    let listener = Listener::bind(&address, options).expect("a free port");
    let (address, lanes, stop) = (listener.local_address(), vec![Some(far.transport.adopter())], Stop::new());
    let listening = thread::spawn({
        let stop = stop.clone();
        move || listener.run(lanes, stop).expect("the listener runs")
    });
    let peer = near.transport.connect(&address).expect("an address of this transport");
    let hello = HelloMessage { role: 0, host: "here".to_owned(), process: 1 };
    let hello = Frame::with_control(Head::new(Kind::Hello), &hello);
    near.queue.push_back(Submit::Send { peer, ticket: Ticket(0), frame: hello, body: Vec::new() });
    while far.landed == 0 || near.sent == 0 {
        near.step();
        far.step();
    }
    let mut exchange = || {
        (near.allocated, far.allocated, near.polls, far.polls) = (0, 0, 0, 0);
        for _ in 0..ROUNDS {
            let goal = [near.landed + 1, near.sent + 1, far.landed + 1, far.sent + 1];
            near.send(lengths);
            far.send(lengths);
            while [near.landed, near.sent, far.landed, far.sent] != goal {
                near.step();
                far.step();
            }
        }
        let registered = [&near, &far].map(|side| side.transport.verbs().registrations.load(Relaxed));
        let (allocated, polls) = ([near.allocated, far.allocated], [near.polls, far.polls]);
        (Block { allocated, polls }, registered.iter().sum::<u64>())
    };
    let (_, before) = exchange();
    let (blocks, registered): (Vec<_>, Vec<_>) = (0..3).map(|_| exchange()).unzip();
    stop.stop();
    listening.join().expect("the listener ends well");
    (blocks, registered[2] - before)
}

/// What is allocated for a frame with payloads: its entries, and again for the report of its head, which a session may
/// keep. The trainer says where long payloads go, which takes three lists more. Beyond that the runtime allocates once
/// for a look at the system, of which there is one in so many polls.
#[test]
fn a_warm_connection_allocates_its_frames_and_registers_nothing() {
    let check = |lengths: &[u32], expected: [u64; 2]| {
        let (blocks, registered) = steady(lengths);
        assert_eq!(registered, 0, "{lengths:?}");
        for Block { allocated, polls } in blocks {
            for ((allocated, polls), expected) in allocated.into_iter().zip(polls).zip(expected) {
                let beyond = allocated.checked_sub(expected * ROUNDS).expect("what a frame takes");
                assert!(beyond <= polls.div_ceil(POLLS_PER_LOOK), "{lengths:?}: {allocated} in {ROUNDS} rounds");
            }
        }
    };
    check(&[], [0, 0]);
    check(&[100], [2, 2]);
    check(&[64 * 1024], [5, 2]);
    check(&[64 * 1024, 100, 64 * 1024], [5, 2]);
}

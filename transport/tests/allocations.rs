//! Test of allocations, registrations and copies over verbs: a warm connection needs none beyond the frames themselves.
//!
//! A test binary of its own, because the allocator counts for the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, PeerId, Round, Ticket};
use pserver_core::memory::{Arena, Budget, LoanBook, Mapping, Value, lend};
use pserver_core::port::{Event, Incoming, Outgoing, Payloads, ReceiveBuffers, Submit, Transport};
use pserver_core::wire::{Address, Entry, Frame, Head, HelloMessage, Kind};
use pserver_transport::network::{Lanes, Listener, Network, NetworkOptions, PollPolicy, Stop};
use pserver_transport::verbs::{VerbsCounters, VerbsDevice, VerbsDevices};

/// The system's allocator, with a count for each thread.
struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // Allocations of a thread that ends are not counted.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for CountingAllocator {
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
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// One transport, with its allocations.
struct CountedTransport {
    transport: Network,
    queue: VecDeque<Submit>,
    events: Vec<Event>,
    arena: Arena,
    peer: Option<PeerId>,
    /// The next bodies to send, and the next receive buffers, when they are not leases.
    loans: VecDeque<Payloads>,
    places: VecDeque<ReceiveBuffers>,
    tickets: u64,
    landed: u64,
    sent: u64,
    allocated: u64,
    polls: u64,
}

impl CountedTransport {
    fn new(transport: Network) -> Self {
        let mut budget = Budget::new();
        budget.line("payloads", 64 * 1024, 64);
        let arena = Arena::new(&budget).expect("an arena");
        let (queue, events) = (VecDeque::with_capacity(16), Vec::with_capacity(64));
        let (loans, places) = (VecDeque::new(), VecDeque::new());
        let peer = None;
        let (tickets, landed, sent, allocated, polls) = (0, 0, 0, 0, 0);
        Self { transport, queue, events, arena, peer, loans, places, tickets, landed, sent, allocated, polls }
    }

    /// Sends a frame with payloads of these lengths.
    fn send(&mut self, lengths: &[u32]) {
        let payload = |bytes: u32| Value::new(self.arena.take_zeroed(bytes).expect("a slot"), bytes);
        let leases = || lengths.iter().map(|bytes| Outgoing::Value(Arc::new(payload(*bytes)))).collect();
        let body = self.loans.pop_front().unwrap_or_else(leases);
        let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
        let entry = |bytes: &u32| Entry::with_payload(id, Round(1), ElementType::Float32, &vec![0; *bytes as usize]);
        let mut frame = Frame::bare(Head::new(Kind::Push));
        frame.entries.extend(lengths.iter().map(entry));
        let peer = self.peer.expect("it is connected");
        self.tickets += 1;
        self.queue.push_back(Submit::Send { peer, ticket: Ticket(self.tickets), frame, body });
    }

    /// One submit, wait and poll, with answers to the events.
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
                    let leases = || frame.entries.iter().map(place).collect();
                    let into = self.places.pop_front().unwrap_or_else(leases);
                    self.queue.push_back(Submit::PostReceive { peer, into });
                }
                Event::Received { .. } => self.landed += 1,
                Event::Sent { .. } => self.sent += 1,
                Event::Moved { .. }
                | Event::Transmitted { .. }
                | Event::TakesAnswers { .. }
                | Event::AnswerReturned { .. } => {}
                Event::Gone { reason, .. } => panic!("the connection is over: {reason}"),
            }
        }
    }
}

/// Rounds that are measured together, and frames each way in a round: more than receives overlap.
const ROUNDS: u64 = 50;
const AT_ONCE: usize = 6;
const FRAMES: u64 = ROUNDS * AT_ONCE as u64;
/// As in a transport all of whose connections are polled.
const POLLS_PER_LOOK: u64 = 256;

/// Allocations of the two transports, their polls, and what they copied and registered.
struct RoundCosts {
    allocated: [u64; 2],
    polls: [u64; 2],
    copied: u64,
    registered: u64,
}

/// The trainer's own memory for the payloads of a round.
struct LentMemory(Vec<u8>, Arc<Mapping>);

impl LentMemory {
    fn new(lengths: &[u32]) -> Self {
        let bytes = vec![0; AT_ONCE * lengths.iter().sum::<u32>() as usize + 1];
        let mapping = Mapping::of_caller(bytes.as_ptr().addr(), bytes.len()).expect("it is some bytes");
        Self(bytes, Arc::new(mapping))
    }

    /// Lends it for sending.
    fn read<'env>(&'env self, lengths: &[u32], book: &LoanBook<'env>) -> VecDeque<Payloads> {
        let mut rest = self.0.as_slice();
        let mut next = |bytes: &u32| {
            let (one, after) = rest.split_at(*bytes as usize);
            rest = after;
            Outgoing::Loan(book.read(one).within(&self.1))
        };
        (0..AT_ONCE).map(|_| lengths.iter().map(&mut next).collect()).collect()
    }

    /// Lends it for receiving.
    fn write<'env>(&'env mut self, lengths: &[u32], book: &LoanBook<'env>) -> VecDeque<ReceiveBuffers> {
        let mut rest = self.0.as_mut_slice();
        let mut next = |bytes: &u32| {
            let (one, after) = std::mem::take(&mut rest).split_at_mut(*bytes as usize);
            rest = after;
            Incoming::Loan(book.write(one).within(&self.1))
        };
        (0..AT_ONCE).map(|_| lengths.iter().map(&mut next).collect()).collect()
    }
}

/// Registrations and copied bytes of both transports so far.
fn counted(near: &CountedTransport, far: &CountedTransport) -> [u64; 2] {
    let both = [near, far].map(|side| side.transport.verbs());
    let sum = |what: fn(&VerbsCounters) -> u64| both.iter().map(|side| what(side)).sum();
    [sum(|side| side.registrations.load(Relaxed)), sum(|side| side.copied_bytes.load(Relaxed))]
}

/// Measures rounds on warm transports. The trainer's payloads are in leases, or in memory of its own.
fn steady(lengths: &[u32], is_own: bool) -> Vec<RoundCosts> {
    let devices = VerbsDevices::This(VerbsDevice::in_process());
    let options = NetworkOptions { devices, poll: PollPolicy::Block, ..NetworkOptions::default() };
    let address = Address::parse("verbs://127.0.0.1:0").expect("an address");
    let mut near = CountedTransport::new(Network::new(options.clone()).expect("a transport"));
    let mut far = CountedTransport::new(Network::new(options.clone()).expect("a transport"));
    let listener = Listener::bind(&address, options).expect("a free port");
    let (address, lanes, stop) =
        (listener.local_address(), Lanes::from([(0, far.transport.connection_sender())]), Stop::new());
    let listening = thread::spawn({
        let stop = stop.clone();
        move || listener.run(lanes, stop).expect("the listener runs")
    });
    let peer = near.transport.connect(&address).expect("an address of this transport");
    let hello =
        HelloMessage { role: 0, host: "here".to_owned(), process: 1, absence_millis: None, run: 0, run_trainers: 0 };
    let hello = Frame::with_control(Head::new(Kind::Hello), &hello);
    near.queue.push_back(Submit::Send { peer, ticket: Ticket(0), frame: hello, body: Payloads::new() });
    while far.landed == 0 || near.sent == 0 {
        near.step();
        far.step();
    }
    let (from, mut to) = (LentMemory::new(lengths), LentMemory::new(lengths));
    let mut exchange = || {
        let before = counted(&near, &far);
        (near.allocated, far.allocated, near.polls, far.polls) = (0, 0, 0, 0);
        for _ in 0..ROUNDS {
            let goal = [near.landed, near.sent, far.landed, far.sent].map(|frames| frames + AT_ONCE as u64);
            lend(|book| {
                if is_own {
                    (near.loans, near.places) = (from.read(lengths, book), to.write(lengths, book));
                }
                for _ in 0..AT_ONCE {
                    near.send(lengths);
                    far.send(lengths);
                }
                while [near.landed, near.sent, far.landed, far.sent] != goal {
                    near.step();
                    far.step();
                }
            });
        }
        let [registered, copied] = counted(&near, &far);
        let (allocated, polls) = ([near.allocated, far.allocated], [near.polls, far.polls]);
        RoundCosts { allocated, polls, registered: registered - before[0], copied: copied - before[1] }
    };
    exchange();
    let blocks = (0..3).map(|_| exchange()).collect();
    stop.stop();
    listening.join().expect("the listener ends well");
    blocks
}

/// A frame with several payloads allocates its entries, and a copy of them for the report of its head: the session may
/// keep both. A frame with one payload allocates nothing. Beyond that the runtime allocates once for each request for
/// readiness, of which there is one in so many polls.
#[test]
fn a_warm_connection_allocates_its_frames_and_registers_nothing() {
    let check = |lengths: &[u32], expected: u64| {
        for is_own in [false, true] {
            let short = lengths.iter().filter(|bytes| **bytes <= 8 * 1024).sum::<u32>();
            let long = lengths.iter().sum::<u32>() - short;
            for RoundCosts { allocated, polls, copied, registered } in steady(lengths, is_own) {
                let here =
                    format!("{lengths:?}, {}: {allocated:?} for {FRAMES} frames", if is_own { "own" } else { "" });
                for (allocated, polls) in allocated.into_iter().zip(polls) {
                    let beyond = allocated.checked_sub(expected * FRAMES).expect("what a frame takes");
                    assert!(beyond <= polls.div_ceil(POLLS_PER_LOOK), "{here}");
                }
                assert_eq!(registered, 0, "{here}");
                // Short payloads are copied into and out of messages, both ways; long ones from leases through staging.
                let staged = if is_own { 0 } else { 2 * u64::from(long) };
                assert_eq!(copied, (4 * u64::from(short) + staged) * FRAMES, "{here}");
            }
        }
    };
    check(&[], 0);
    check(&[100], 0);
    check(&[64 * 1024], 0);
    check(&[64 * 1024, 100, 64 * 1024], 2);
}

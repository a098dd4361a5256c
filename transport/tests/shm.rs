//! Tests of shared memory: reading in place and its duration, discovery, and hostile or broken clients.

mod server;

use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use prost::Message;
use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, PeerId, Round, Ticket};
use pserver_core::memory::shared::{Board, Counters};
use pserver_core::memory::{Arena, Budget, Buffer, Lease, Value, lend};
use pserver_core::port::{Event, Incoming, Outgoing, Payloads, ReceiveBuffers, Submit, Transport};
use pserver_core::wire::{Address, Entry, ErrorMessage, Flags, Frame, HEADER_BYTES, Head, Kind, Prefix, Scheme};
use pserver_transport::network::{Lanes, Listener, Network, NetworkOptions, PollPolicy, Stop};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use server::{AnsweringServer, hello, push};

const PATIENCE: Duration = Duration::from_secs(30);

/// A transport with a listener.
struct ListeningTransport {
    transport: Network,
    address: Address,
    stop: Stop,
    thread: Option<thread::JoinHandle<()>>,
}

impl ListeningTransport {
    fn listen(address: &str) -> Self {
        let transport = Network::new(NetworkOptions::default()).expect("a transport");
        let address = Address::parse(address).expect("an address");
        let listener = Listener::bind(&address, NetworkOptions::default()).expect("a free port");
        let (address, lanes, stop) =
            (listener.local_address(), Lanes::from([(0, transport.connection_sender())]), Stop::new());
        let ends = stop.clone();
        let thread = Some(thread::spawn(move || listener.run(lanes, ends).expect("the listener runs")));
        Self { transport, address, stop, thread }
    }
}

impl Drop for ListeningTransport {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the listener ends well");
        }
    }
}

/// A transport that has sent its hello.
fn near(address: &Address) -> (Network, PeerId) {
    let mut transport = Network::new(NetworkOptions::default()).expect("a transport");
    let peer = transport.connect(address).expect("an address of this transport");
    submit(&mut transport, [send(peer, hello(0), Payloads::new())]);
    (transport, peer)
}

fn submit(transport: &mut Network, work: impl IntoIterator<Item = Submit>) {
    let mut queue: VecDeque<Submit> = work.into_iter().collect();
    transport.submit(&mut queue).expect("the device works");
    assert!(queue.is_empty(), "it takes so little at once");
}

fn send(peer: PeerId, frame: Frame, body: Payloads) -> Submit {
    Submit::Send { peer, ticket: Ticket(1), frame, body }
}

fn poll(transport: &mut Network) -> Vec<Event> {
    let mut events = Vec::new();
    transport.wait(Duration::from_millis(1));
    transport.poll(&mut events).expect("the device works");
    events
}

/// Polls both until `wanted` selects an event of the first.
fn until<T>(one: &mut Network, other: &mut Network, mut wanted: impl FnMut(Event) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        poll(other);
        if let Some(found) = poll(one).into_iter().find_map(&mut wanted) {
            return found;
        }
        assert!(Instant::now() < deadline, "it does not come");
    }
}

fn arena(bytes: u32, count: u64) -> Budget {
    let mut budget = Budget::new();
    budget.line("test", bytes, count);
    budget
}

fn chunk(arena: &Arena, bytes: u32, fill: u8) -> Arc<Value> {
    let mut lease = arena.take(bytes).expect("there is room");
    lease.bytes_mut().fill(fill);
    Arc::new(Value::new(lease, bytes))
}

fn outgoing(chunk: &Arc<Value>) -> Outgoing {
    Outgoing::Value(Arc::clone(chunk))
}

fn of_chunk(kind: Kind, index: u64, payload: &[u8]) -> Frame {
    let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(index) };
    let entry = Entry::with_payload(id, Round(1), ElementType::Float32, payload);
    Frame { entries: vec![entry].into(), ..Frame::bare(Head::new(kind)) }
}

fn place(arena: &Arena, frame: &Frame) -> ReceiveBuffers {
    let place = |bytes| Incoming::Chunk { lease: arena.take(bytes).expect("there is room"), bytes };
    frame.entries.iter().map(|entry| place(entry.bytes)).collect()
}

/// Receives one frame of `kind` with 100,000 bytes at `far`; its lease, and the sender.
fn landed(far: &mut ListeningTransport, kind: Kind) -> (Lease, Network) {
    let (mut near, peer) = near(&far.address);
    let own = Arena::new(&arena(128 * 1024, 2)).expect("a small arena");
    let payload = chunk(&own, 100_000, 7);
    submit(&mut near, [send(peer, of_chunk(kind, 0, payload.bytes()), vec![outgoing(&payload)].into())]);
    let (peer, frame) = until(&mut far.transport, &mut near, |event| match event {
        Event::Head { peer, frame } => Some((peer, frame)),
        _ => None,
    });
    submit(&mut far.transport, [Submit::PostReceive { peer, into: place(&own, &frame) }]);
    let lease = until(&mut far.transport, &mut near, |event| match event {
        Event::Received { mut body, .. } => match body.pop() {
            Some(Incoming::Chunk { lease, .. }) => Some(lease),
            _ => None,
        },
        _ => None,
    });
    (lease, near)
}

#[test]
fn a_gradient_is_read_in_place_and_outlives_its_sender() {
    let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
    let (lease, near) = landed(&mut far, Kind::Push);
    assert!(lease.is_foreign(), "nothing was copied at this side");
    drop(near);
    let deadline = Instant::now() + PATIENCE;
    while !poll(&mut far.transport).iter().any(|event| matches!(event, Event::Gone { .. })) {
        assert!(Instant::now() < deadline, "its end is noticed");
    }
    assert_eq!(lease.bytes(), [7; 100_000]);
}

#[test]
fn a_payload_that_becomes_a_value_is_copied() {
    let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
    for kind in [Kind::Set, Kind::Init] {
        let (lease, _near) = landed(&mut far, kind);
        assert!(!lease.is_foreign(), "{kind:?}");
        assert_eq!(lease.bytes()[..100_000], [7; 100_000]);
    }
}

#[test]
fn a_value_in_a_shared_arena_is_read_in_place_and_returned_afterwards() {
    let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
    let (mut near, _) = near(&far.address);
    let peer = until(&mut far.transport, &mut near, |event| match event {
        Event::Received { peer, .. } => Some(peer),
        _ => None,
    });
    let shared = Arena::shared(&arena(128 * 1024, 1)).expect("this system shares memory");
    let value = chunk(&shared, 100_000, 9);
    let mut into = vec![0; 100_000];
    lend(|book| {
        submit(
            &mut far.transport,
            [send(peer, of_chunk(Kind::Value, 0, value.bytes()), vec![outgoing(&value)].into())],
        );
        let from = until(&mut near, &mut far.transport, |event| match event {
            Event::Head { peer, .. } => Some(peer),
            _ => None,
        });
        assert_eq!(Arc::strong_count(&value), 2, "it is lent as long as it may be read");
        submit(
            &mut near,
            [Submit::PostReceive { peer: from, into: vec![Incoming::Loan(book.write(&mut into))].into() }],
        );
        until(&mut near, &mut far.transport, |event| matches!(event, Event::Received { .. }).then_some(()));
    });
    let deadline = Instant::now() + PATIENCE;
    while Arc::strong_count(&value) > 1 {
        poll(&mut far.transport);
        assert!(Instant::now() < deadline, "it comes back");
    }
    assert!(into == [9; 100_000]);
}

/// Two senders whose frames are held until both have sent theirs, in opposite orders. If held frames could block a
/// sender, the two would block each other.
#[test]
fn senders_in_different_orders_do_not_wait_for_each_other() {
    let check = |count: u64, bytes: u32| {
        let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
        let own = Arena::new(&arena(bytes, 2 * count + 2)).expect("address space");
        let payload = chunk(&own, bytes, 3);
        let mut senders =
            [near(&far.address), near(&far.address)].map(|(transport, peer)| (transport, peer, VecDeque::new()));
        for (index, (_, peer, queue)) in senders.iter_mut().enumerate() {
            let order = (0..count).map(|number| if index == 0 { number } else { count - 1 - number });
            let frames = order.map(|number| of_chunk(Kind::Push, number, payload.bytes()));
            queue.extend(frames.map(|frame| send(*peer, frame, vec![outgoing(&payload)].into())));
        }
        let mut held: BTreeMap<u64, ReceiveBuffers> = BTreeMap::new();
        let (mut landings, mut landed, deadline) = (VecDeque::new(), 0, Instant::now() + PATIENCE);
        while landed < 2 * count {
            for (transport, _, queue) in &mut senders {
                transport.submit(queue).expect("the device works");
                poll(transport);
            }
            for event in poll(&mut far.transport) {
                match event {
                    Event::Head { peer, frame } => {
                        landings.push_back(Submit::PostReceive { peer, into: place(&own, &frame) });
                    }
                    Event::Received { frame, body, .. } if frame.head.kind == Kind::Push => {
                        landed += 1;
                        let number = frame.entries[0].id.chunk.0;
                        let both = held.entry(number).or_default();
                        both.extend(body);
                        if both.len() == 2 {
                            held.remove(&number);
                        }
                    }
                    _ => {}
                }
            }
            far.transport.submit(&mut landings).expect("the device works");
            assert!(Instant::now() < deadline, "{landed} of {} landed", 2 * count);
        }
        assert!(held.is_empty(), "each had its counterpart");
    };
    check(160, 1024 * 1024);
    check(1200, 16 * 1024);
}

#[test]
fn a_server_of_this_machine_is_found_and_an_absent_one_is_named() {
    let check = |listening: &str, scheme: Scheme, expected: Option<&str>| {
        let mut far = ListeningTransport::listen(listening);
        let (mut near, _) = near(&Address { scheme, ..far.address.clone() });
        let reason = until(&mut near, &mut far.transport, |event| match event {
            Event::Gone { reason, .. } => Some(Some(reason)),
            Event::Sent { .. } => Some(None),
            _ => None,
        });
        match (reason, expected) {
            (None, None) => {}
            (Some(reason), Some(expected)) => assert!(reason.contains(expected), "{reason}"),
            (found, expected) => panic!("{listening} by {scheme:?}: found {found:?}, expected {expected:?}"),
        }
    };
    check("127.0.0.1:0", Scheme::Auto, None);
    check("127.0.0.1:0", Scheme::Tcp, None);
    check("127.0.0.1:0", Scheme::Shm, None);
    check("tcp://127.0.0.1:0", Scheme::Auto, None);
    check("tcp://127.0.0.1:0", Scheme::Shm, Some("no server of this machine there"));
    check("shm://127.0.0.1:0", Scheme::Auto, None);
    check("shm://127.0.0.1:0", Scheme::Tcp, Some("refused"));
    let (mut near, _) = near(&Address::parse("shm://192.0.2.1:7164").expect("an address"));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let reason = poll(&mut near).into_iter().find_map(|event| match event {
            Event::Gone { reason, .. } => Some(reason),
            _ => None,
        });
        if let Some(reason) = reason {
            assert!(reason.contains("192.0.2.1 is no address of this machine"), "{reason}");
            break;
        }
        assert!(Instant::now() < deadline, "it ends");
    }
}

/// A client that writes the board byte by byte.
struct RawShmClient {
    socket: UnixStream,
    board: Board,
    counters: Counters,
    written: u64,
    read: u64,
}

const RING: usize = 256 * 1024;
const OURS: usize = 0;
const THEIRS: usize = 1;
const TAIL: usize = 0;
const HEAD: usize = 2;
const WAITING: usize = 4;
const RETURNED: usize = 8;
const MESSAGES: usize = 10;

const SETUP: [u8; 16] = *b"PSHM\x04\0\0\0\0\0\x04\0\0\x20\0\0";

impl RawShmClient {
    fn connect(address: &Address) -> UnixStream {
        let name = format!("pserver-127.0.0.1-{}", address.port);
        let socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).expect("a name"));
        let socket = socket.expect("it listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        socket
    }

    /// A connection whose hello was accepted.
    fn greeted(server: &AnsweringServer) -> Self {
        let socket = Self::connect(&server.address);
        let (board, descriptor) = Board::create(2 * RING).expect("this system shares memory");
        pass(&socket, &SETUP, &[descriptor.as_fd()]);
        (&socket).write_all(&hello(1).encode()).expect("it listens");
        let counters = board.counters();
        let mut raw = Self { socket, board, counters, written: 0, read: 0 };
        raw.works();
        raw
    }

    fn counter(&self, kind: usize, side: usize) -> &std::sync::atomic::AtomicU64 {
        self.counters.get((kind + side) * 8)
    }

    fn wake(&self) {
        // A server that has refused may have closed.
        let _ = (&self.socket).write_all(b"w");
    }

    /// Sends a message on the socket, and counts it.
    fn post(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.counter(MESSAGES, OURS).fetch_add(1, SeqCst);
        pass(&self.socket, bytes, descriptors);
    }

    fn write(&mut self, bytes: &[u8]) {
        self.put(bytes);
        self.wake();
    }

    fn put(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let at = usize::try_from(self.written).expect("small") % RING;
            self.board.write(at, &[*byte]);
            self.written += 1;
        }
        self.counter(TAIL, OURS).store(self.written, SeqCst);
    }

    fn read(&mut self, bytes: usize) -> Vec<u8> {
        let deadline = Instant::now() + PATIENCE;
        while self.counter(TAIL, THEIRS).load(SeqCst) < self.read + bytes as u64 {
            assert!(Instant::now() < deadline, "nothing is answered");
            thread::yield_now();
        }
        let mut found = vec![0; bytes];
        for byte in &mut found {
            let at = usize::try_from(self.read).expect("small") % RING;
            self.board.read(RING + at, std::slice::from_mut(byte));
            self.read += 1;
        }
        self.counter(HEAD, THEIRS).store(self.read, SeqCst);
        found
    }

    fn frame(&mut self) -> Frame {
        let header = self.read(HEADER_BYTES);
        let prefix = Prefix::decode(header.first_chunk().expect("a header")).expect("it speaks our language");
        let rest = self.read(prefix.rest_bytes());
        prefix.finish(&rest).expect("it speaks our language")
    }

    /// One push is answered.
    fn works(&mut self) {
        let payload = [7; 1000];
        self.write(&[push(&payload).encode(), payload.to_vec()].concat());
        assert_eq!(self.frame().head.kind, Kind::Done);
    }

    /// Announces an arena, and sends a reference to 20,000 bytes of it.
    fn refer(&mut self, arena: Option<&OwnedFd>, number: u32, token: u32, offset: u64) {
        if let Some(arena) = arena {
            self.post(b"a", &[arena.as_fd()]);
        }
        let mut bytes = push(&[0; 20_000]).encode();
        bytes.extend(number.to_le_bytes());
        bytes.extend(token.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        self.write(&bytes);
    }

    fn must_be_refused(mut self, expected: &str) {
        let refused = self.frame();
        assert_eq!(refused.head.kind, Kind::Refused);
        assert_text(&refused, expected);
        // Unread wake-ups turn the close into a reset.
        let end = self.socket.read(&mut [0]);
        let is_over = matches!(&end, Ok(0)) || end.as_ref().is_err_and(|end| end.kind() == ErrorKind::ConnectionReset);
        assert!(is_over, "nothing follows a refusal: {end:?}");
    }
}

fn assert_text(refused: &Frame, expected: &str) {
    let message = ErrorMessage::decode(refused.control.as_slice()).expect("a refusal holds an error");
    assert!(message.text.contains(expected), "found \"{}\", expected \"{expected}\"", message.text);
}

fn pass(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "there is room");
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).expect("it listens");
}

const SEALED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let descriptor = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file in memory");
    ftruncate(&descriptor, bytes).expect("a size");
    fcntl_add_seals(&descriptor, seals).expect("seals");
    descriptor
}

#[test]
fn an_unknown_client_gets_its_error_and_other_clients_go_on() {
    let server = AnsweringServer::start("shm://127.0.0.1:0", NetworkOptions::default());
    let mut other = RawShmClient::greeted(&server);
    let mut check = |setup: &[u8], descriptor: Option<OwnedFd>, expected: &str| {
        let mut socket = RawShmClient::connect(&server.address);
        let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        pass(&socket, setup, &descriptors);
        // A server that has refused may have closed.
        let _ = socket.write_all(&hello(1).encode());
        let mut header = [0; HEADER_BYTES];
        socket.read_exact(&mut header).expect("the connection ends with a refusal");
        let prefix = Prefix::decode(&header).expect("it speaks our language");
        let mut rest = vec![0; prefix.rest_bytes()];
        socket.read_exact(&mut rest).expect("the whole of it");
        assert_text(&prefix.finish(&rest).expect("it speaks our language"), expected);
        other.works();
    };
    let board = 4096 + 2 * RING as u64;
    check(b"GET / HTTP/1.1\r\n", None, "the set-up is [47, 45,");
    check(&[0; 16], Some(memory(board, SEALED)), "the set-up is [00, 00,");
    check(&SETUP, None, "the set-up brings no shared memory");
    check(&SETUP, Some(std::fs::File::open("/dev/null").expect("a device").into()), "not a file in memory");
    check(&SETUP, Some(memory(board, SealFlags::SEAL)), "not sealed: found SealFlags(SEAL), expected");
    check(&SETUP, Some(memory(board, SEALED.difference(SealFlags::SHRINK))), "not sealed");
    check(&SETUP, Some(memory(board - 1, SEALED)), "its size: found 528383 bytes, expected 528384");
    check(&SETUP, Some(memory(1 << 40, SEALED)), "its size");
}

#[test]
fn a_broken_client_gets_its_error_and_other_clients_go_on() {
    let server = AnsweringServer::start("shm://127.0.0.1:0", NetworkOptions::default());
    let mut other = RawShmClient::greeted(&server);
    let mut check = |breaks: &dyn Fn(&mut RawShmClient), expected: &str| {
        let mut raw = RawShmClient::greeted(&server);
        breaks(&mut raw);
        raw.must_be_refused(expected);
        other.works();
    };
    let good = || memory(1 << 20, SEALED);
    check(&|raw| raw.write(&[b'x'; 200]), "not a pserver frame: it begins with 0x78787878");
    check(
        &|raw| {
            raw.counter(TAIL, OURS).store(u64::MAX / 2, SeqCst);
            raw.wake();
        },
        "the ring's counters are",
    );
    check(
        &|raw| {
            raw.counter(TAIL, OURS).store(raw.written - 1, SeqCst);
            raw.wake();
        },
        "the ring's counters are",
    );
    check(
        &|raw| {
            raw.counters.get(RETURNED * 8 + THEIRS * 8).store(4, SeqCst);
            raw.wake();
        },
        "token 2 was returned, which was not in use",
    );
    check(&|raw| raw.refer(None, 0, 0, 0), "a reference to an arena that was not announced");
    check(&|raw| raw.refer(Some(&good()), 1, 0, 0), "a reference to an arena that was not announced");
    check(&|raw| raw.refer(Some(&good()), 0, 512, 0), "token 512; expected one below 512");
    check(&|raw| raw.refer(Some(&good()), 0, 0, (1 << 20) - 19_999), "20000 bytes at 1028577 of arena 0");
    check(&|raw| raw.refer(Some(&good()), 0, 0, u64::MAX), "20000 bytes at 18446744073709551615 of arena 0");
    check(&|raw| raw.refer(Some(&good()), 0, 0, 4), "20000 bytes at 4 of arena 0");
    check(&|raw| raw.refer(Some(&memory(1 << 20, SealFlags::SEAL)), 0, 0, 0), "not sealed");
    check(&|raw| raw.post(b"a", &[]), "an arena was announced without its descriptor");
    check(&|raw| raw.post(b"!", &[]), "byte 0x21 on the socket has no meaning");
}

#[test]
fn wake_ups_that_are_left_on_the_socket_do_not_fill_it() {
    let options = NetworkOptions { poll: PollPolicy::Block, ..NetworkOptions::default() };
    let server = AnsweringServer::start("shm://127.0.0.1:0", options);
    let mut raw = RawShmClient::greeted(&server);
    raw.socket.set_nonblocking(true).expect("a socket");
    let payload = [7; 1000];
    let whole = [push(&payload).encode(), payload.to_vec()].concat();
    for round in 0..1000 {
        let deadline = Instant::now() + PATIENCE;
        while raw.counter(WAITING, THEIRS).load(SeqCst) == 0 {
            assert!(Instant::now() < deadline, "it sleeps when there is nothing to do");
            thread::yield_now();
        }
        raw.put(&whole);
        if raw.counter(WAITING, THEIRS).swap(0, SeqCst) != 0 {
            let woken = (&raw.socket).write(b"w");
            woken.unwrap_or_else(|error| panic!("round {round}: the socket takes no wake-up: {error}"));
        }
        assert_eq!(raw.frame().head.kind, Kind::Done);
    }
}

#[test]
fn a_message_behind_a_wake_up_is_read() {
    let options = NetworkOptions { poll: PollPolicy::Block, ..NetworkOptions::default() };
    let server = AnsweringServer::start("shm://127.0.0.1:0", options);
    let mut raw = RawShmClient::greeted(&server);
    let arena = memory(1 << 20, SEALED);
    let number = fstat(&arena).expect("it is a file").st_ino;
    raw.refer(Some(&arena), 0, 0, 0);
    assert_eq!(raw.frame().head.kind, Kind::Done);
    assert!(is_mapped(number), "it is read where it is");
    // The first byte is a wake-up; the message follows it.
    raw.works();
    raw.counter(MESSAGES, OURS).fetch_add(1, SeqCst);
    pass(&raw.socket, &[b'w', b'g', 0, 0, 0, 0], &[]);
    let deadline = Instant::now() + PATIENCE;
    while is_mapped(number) {
        assert!(Instant::now() < deadline, "the letter is not read");
        thread::yield_now();
    }
}

#[test]
fn a_peer_that_closes_in_the_middle_does_not_affect_others() {
    let server = AnsweringServer::start("shm://127.0.0.1:0", NetworkOptions::default());
    let mut other = RawShmClient::greeted(&server);
    let whole = [push(&[7; 1000]).encode(), vec![7; 1000]].concat();
    for length in [1, 63, 64, 65, 95, 96, 97, 1000, whole.len() - 1] {
        let mut raw = RawShmClient::greeted(&server);
        raw.write(&whole[..length]);
        drop(raw);
        other.works();
    }
}

#[test]
fn a_name_in_use_is_refused() {
    let server = AnsweringServer::start("shm://127.0.0.1:0", NetworkOptions::default());
    let error = Listener::bind(&server.address, NetworkOptions::default()).err().expect("in use").to_string();
    assert!(error.starts_with(&format!("listening on {}: ", server.address)), "{error}");
}

/// Receives one push of 8,192 floats from a buffer at `offset`; the sender's events before and after the reader is
/// done.
fn lent(flags: Flags, offset: usize) -> (Vec<&'static str>, Vec<&'static str>) {
    let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
    let (mut near, peer) = near(&far.address);
    let own = Arena::new(&arena(32 * 1024, 1)).expect("a small arena");
    let mut buffer = Buffer::new(64 * 1024).expect("this system shares memory");
    buffer.fill(5);
    lend(|book| {
        let payload = &buffer[offset..][..32 * 1024];
        let mut frame = of_chunk(Kind::Push, 0, payload);
        frame.head.flags = flags;
        let loan = book.read(payload).within(buffer.mapping());
        submit(&mut near, [send(peer, frame, vec![Outgoing::Loan(loan)].into())]);
        let mut seen = Vec::new();
        let mut note = |transport: &mut Network| {
            seen.extend(poll(transport).iter().filter_map(|event| match event {
                Event::Transmitted { .. } => Some("left"),
                Event::Sent { body, .. } if !body.is_empty() => Some("sent"),
                _ => None,
            }));
            seen.clone()
        };
        let mut landed = None;
        let deadline = Instant::now() + PATIENCE;
        while landed.is_none() {
            note(&mut near);
            for event in poll(&mut far.transport) {
                match event {
                    Event::Head { peer, frame } => {
                        submit(&mut far.transport, [Submit::PostReceive { peer, into: place(&own, &frame) }]);
                    }
                    Event::Received { body, .. } if !body.is_empty() => landed = Some(body),
                    _ => {}
                }
            }
            assert!(Instant::now() < deadline, "it lands");
        }
        assert_eq!(landed.iter().flatten().next().expect("there is one").bytes(), [5; 32 * 1024]);
        let before = (0..3).map(|_| note(&mut near)).last().expect("it was looked");
        drop(landed);
        while !note(&mut near).contains(&"sent") {
            assert!(Instant::now() < deadline, "it comes back");
        }
        (before, note(&mut near))
    })
}

#[test]
fn a_gradient_in_a_buffer_is_lent_in_place_if_its_answer_follows_its_use() {
    let (lent_on, copied) = ((vec!["left"], vec!["left", "sent"]), (vec!["sent"], vec!["sent"]));
    assert_eq!(lent(Flags::WANT_VALUE, 0), lent_on);
    assert_eq!(lent(Flags::WANT_VALUE, 64), lent_on);
    assert_eq!(lent(Flags::WANT_VALUE, 4), copied, "no view begins there");
    assert_eq!(lent(Flags::default(), 0), copied, "it is acknowledged while the server still reads it");
}

#[test]
fn an_unreturned_buffer_is_withdrawn_and_its_reader_keeps_the_sent_bytes() {
    let check = |is_withdrawn: bool| {
        let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
        let (mut near, peer) = near(&far.address);
        let own = Arena::new(&arena(32 * 1024, 1)).expect("a small arena");
        let mut buffer = Buffer::new(32 * 1024).expect("this system shares memory");
        buffer.fill(5);
        let lease = lend(|book| {
            let mut frame = of_chunk(Kind::Push, 0, &buffer);
            frame.head.flags = Flags::WANT_VALUE;
            let loan = book.read(&buffer).within(buffer.mapping());
            submit(&mut near, [send(peer, frame, vec![Outgoing::Loan(loan)].into())]);
            let (from, frame) = until(&mut far.transport, &mut near, |event| match event {
                Event::Head { peer, frame } => Some((peer, frame)),
                _ => None,
            });
            submit(&mut far.transport, [Submit::PostReceive { peer: from, into: place(&own, &frame) }]);
            let lease = until(&mut far.transport, &mut near, |event| match event {
                Event::Received { mut body, .. } => match body.pop() {
                    Some(Incoming::Chunk { lease, .. }) => Some(lease),
                    _ => None,
                },
                _ => None,
            });
            // However the connection ends, the loan is back, and its memory is still read.
            drop(near);
            lease
        });
        assert!(lease.is_foreign() && buffer.mapping().is_in_place());
        if is_withdrawn {
            buffer.mapping().withdraw().expect("the system maps it");
            assert!(!buffer.mapping().is_in_place());
        }
        assert!(buffer.iter().all(|byte| *byte == 5), "its owner sees no change");
        buffer.fill(6);
        assert!(buffer.iter().all(|byte| *byte == 6), "and writes it as before");
        assert_eq!(lease.bytes()[100], if is_withdrawn { 5 } else { 6 });
    };
    check(true);
    // Without the withdrawal the reader sees the writes, so the check above can fail.
    check(false);
}

#[test]
fn a_buffer_of_which_nothing_is_lent_stays_in_place() {
    let buffer = Buffer::new(1).expect("this system shares memory");
    buffer.mapping().withdraw().expect("there is nothing to do");
    assert!(buffer.mapping().is_in_place());
    assert_eq!(*buffer, [0]);
}

/// Sends values that fill a shared arena to a transport that keeps them; the inode of the arena's memory, and the
/// leases.
fn kept(far: &mut ListeningTransport, near: &mut Network) -> (u64, Vec<Lease>) {
    let peer = until(&mut far.transport, near, |event| match event {
        Event::Received { peer, .. } => Some(peer),
        _ => None,
    });
    let shared = Arena::shared(&arena(32 * 1024, 4)).expect("this system shares memory");
    let own = Arena::new(&arena(32 * 1024, 4)).expect("a small arena");
    let mut number = 0;
    let leases = (0..4).map(|index| {
        let value = chunk(&shared, 32 * 1024, 9);
        let file = value.lease().shared().expect("its arena is shared").file;
        number = fstat(file.descriptor()).expect("it is a file").st_ino;
        submit(
            &mut far.transport,
            [send(peer, of_chunk(Kind::Value, index, value.bytes()), vec![outgoing(&value)].into())],
        );
        let (from, frame) = until(near, &mut far.transport, |event| match event {
            Event::Head { peer, frame } => Some((peer, frame)),
            _ => None,
        });
        submit(near, [Submit::PostReceive { peer: from, into: place(&own, &frame) }]);
        until(near, &mut far.transport, |event| match event {
            Event::Received { mut body, .. } => match body.pop() {
                Some(Incoming::Chunk { lease, .. }) => Some(lease),
                _ => None,
            },
            _ => None,
        })
    });
    let leases: Vec<Lease> = leases.collect();
    assert!(shared.take(64).is_err(), "every slot is lent");
    (number, leases)
}

fn is_mapped(number: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("this is Linux");
    maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&number.to_string()))
}

#[test]
fn values_are_kept_in_place_while_the_connection_is_open() {
    let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
    let (mut near, _) = near(&far.address);
    let (_, leases) = kept(&mut far, &mut near);
    assert!(leases.iter().all(|lease| lease.is_foreign() && lease.is_kept()), "all of the arena, and not half of it");
    assert!(leases.iter().all(|lease| lease.bytes() == [9; 32 * 1024]));
    drop(far);
    assert!(!leases[0].is_kept(), "its owner may write it now");
}

#[test]
fn a_dropped_arena_is_not_kept_mapped() {
    let mut far = ListeningTransport::listen("shm://127.0.0.1:0");
    let (mut near, _) = near(&far.address);
    let (number, leases) = kept(&mut far, &mut near);
    assert!(is_mapped(number), "somebody reads it");
    drop(leases);
    let deadline = Instant::now() + PATIENCE;
    while is_mapped(number) {
        poll(&mut far.transport);
        poll(&mut near);
        assert!(Instant::now() < deadline, "both sides let go of it");
    }
}

//! Tests with a client that violates the protocol, or accesses memory that it must not.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use pserver_core::dtype::ElementType;
use pserver_core::ids::{ChunkId, ChunkIndex, ParameterIndex, Round};
use pserver_core::memory::{Arena, Budget, Lease};
use pserver_core::port::Doorbell;
use pserver_core::wire::{Address, Entry, Flags, Frame, Head, Kind, OfferMessage};

use super::fixtures::ends;
use crate::conformance::rig::{ConformanceRig, hello};
use crate::network::{NetworkOptions, PollPolicy};
use crate::verbs::FabricSettings;
use crate::verbs::answers::NAMED_MAX;
use crate::verbs::choice::ConnectionPlace;
use crate::verbs::credits::{CreditedMessages, slots};
use crate::verbs::memory_span::MemorySpan;
use crate::verbs::provider::{
    CompletionChannel, MemoryRegion, Operation, PairCapacity, ProtectionDomain, QueuePair, RdmaDevice, ReceiveRequest,
    RegionAccess, RemoteAddress, WorkCompletion, WorkRequest,
};
use crate::verbs::software_device::SoftwareDevice;
use crate::verbs::status::CompletionStatus;
use crate::verbs::wire_format::{
    HANDSHAKE_BYTES, HandshakeMessage, MessageKind, MessagePrefix, PREFIX_BYTES, REMOTE_BUFFER_BYTES,
};
use crate::verbs::work_requests::{InFlightRequests, ReceivedMessage};
use crate::verbs::{
    BULK_SLOTS, CONTROL_SLOTS, ConnectionError, ConnectionSide, DeviceContext, DeviceWatcher, SLOT_BYTES, VerbsDevice,
    VerbsDevices,
};

/// A client written by hand.
struct HostileClient {
    stream: TcpStream,
    pair: Box<dyn QueuePair>,
    /// Declared before the memory that it describes.
    region: Box<dyn MemoryRegion>,
    lease: Lease,
    _domain: Arc<dyn ProtectionDomain>,
    _station: Arc<dyn CompletionChannel>,
}

const PLAN: PairCapacity = PairCapacity { posted_max: 16, receives_max: 64, is_open: true };

impl HostileClient {
    fn new(software_device: &SoftwareDevice, address: &Address) -> Self {
        let completion_channel = software_device.completion_channel().expect("a completion channel");
        let domain = completion_channel.domain().expect("a domain");
        let mut budget = Budget::new();
        budget.line("a client's messages", SLOT_BYTES, 1);
        let mut lease = Arena::new(&budget).expect("an arena").take(SLOT_BYTES).expect("a slot");
        let mapped = lease.mapped().expect("a slot");
        let region = domain.register(&mapped, (0, mapped.len()), RegionAccess::Local).expect("a region");
        let mut pair = domain.pair(&PLAN).expect("a pair");
        let span = MemorySpan::of_mut(lease.bytes_mut(), region.local_key());
        let room: Vec<_> = (0..64).map(|id| ReceiveRequest { id, span }).collect();
        pair.receive(&room).expect("room");
        let mut stream = TcpStream::connect((address.host.as_str(), address.port)).expect("the server listens");
        let mut hello = hello(0);
        OfferMessage::add(&mut hello.control, HandshakeMessage::Yes(pair.here()).encode().to_vec());
        stream.write_all(&hello.encode()).expect("the server reads");
        Self { stream, pair, region, lease, _domain: domain, _station: completion_channel }
    }

    /// Reads the server's answer and connects the queue pair.
    fn meet(&mut self) {
        let mut message = [0; HANDSHAKE_BYTES];
        self.stream.read_exact(&mut message).expect("the server answers");
        let Ok(HandshakeMessage::Yes(there)) = HandshakeMessage::decode(&message) else { panic!("it has a device") };
        self.pair.connect(&there).expect("it connects");
    }

    fn send(&mut self, bytes: &[u8]) {
        self.lease.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let span = MemorySpan::of(&self.lease.bytes()[..bytes.len()], self.region.local_key());
        self.pair
            .post(&[WorkRequest { id: 0, operation: Operation::Send, span, is_signaled: false }])
            .expect("it is taken");
    }
}

/// A deterministic generator.
pub(super) struct TestRng(pub(super) u64);

impl TestRng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ (self.0 >> 29)
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 11).expect("64 bits") % limit
    }
}

fn rig(software_device: &Arc<SoftwareDevice>) -> ConformanceRig {
    let devices = VerbsDevices::This(VerbsDevice(Arc::clone(software_device) as Arc<_>));
    ConformanceRig::new(ends(
        "verbs://127.0.0.1:0",
        &NetworkOptions { devices, poll: PollPolicy::Block, ..NetworkOptions::default() },
    ))
}

/// Connects a hostile client, runs the action, and waits for the end of the connection; the server's reason. `waits`
/// says whether the server is to end it.
fn cut(
    rig: &mut ConformanceRig,
    software_device: &SoftwareDevice,
    waits: bool,
    operation: impl FnOnce(&mut HostileClient),
) -> String {
    let known = rig.far.accepted();
    let mut hostile_client = HostileClient::new(software_device, &rig.address);
    rig.until("the client is there", |rig| rig.far.accepted().len() > known.len());
    hostile_client.meet();
    operation(&mut hostile_client);
    let far = *rig.far.accepted().difference(&known).next().expect("it was accepted");
    hostile_client.stream.set_nonblocking(true).expect("a socket");
    let mut is_over = !waits;
    rig.until("it is cut", |rig| {
        is_over = is_over || matches!(hostile_client.stream.read(&mut [0; 4096]), Ok(0));
        if is_over {
            // The socket may be closed already.
            let _ = hostile_client.stream.shutdown(std::net::Shutdown::Both);
        }
        rig.far.gone(far).is_some()
    });
    rig.far.gone(far).unwrap_or_default().to_owned()
}

fn message(kind: MessageKind, number: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; PREFIX_BYTES];
    MessagePrefix { kind, taken: 0, number, bulk: 0, note: 0 }.encode(&mut bytes);
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn a_client_that_violates_the_protocol_is_cut_by_name() {
    let software_device = Arc::new(SoftwareDevice::new());
    let mut rig = rig(&software_device);
    let mut check = |bytes: &[u8], expected: &str| {
        let reason = cut(&mut rig, &software_device, true, |hostile_client| hostile_client.send(bytes));
        assert!(reason.contains(expected), "{reason}");
    };
    check(&[], "a message of 0 bytes, expected 16 or more");
    check(&[9; 16], "a message of kind 9");
    check(&message(MessageKind::CreditsOnly, 7, &[]), "a message with number 7, expected 0");
    check(&message(MessageKind::Destinations, 0, &[1; 16]), "a destination for a payload that was not offered");
    check(&message(MessageKind::Destinations, 0, &[1; 15]), "15 bytes of destinations");
    check(&message(MessageKind::Bulk, 0, &[1; 64]), "not a pserver frame");
    let mut taken = message(MessageKind::CreditsOnly, 0, &[]);
    taken[2] = 1;
    check(&taken, "the peer reports reading a payload that was not sent");
    let mut room = message(MessageKind::CreditsOnly, 0, &[]);
    room[8] = 1;
    check(&room, "1 bulk and 0 control credits were returned, more than were in use");
    let id = ChunkId { parameter: ParameterIndex(0), chunk: ChunkIndex(0) };
    let entry = Entry::bare(id, Round(0), ElementType::Float32);
    let mut frame = Frame::bare(Head { flags: Flags::NAMED, ..Head::new(Kind::Pull) });
    frame.entries.extend([entry; NAMED_MAX + 1]);
    let named = [frame.encode(), vec![1; (NAMED_MAX + 1) * REMOTE_BUFFER_BYTES]].concat();
    check(&message(MessageKind::Bulk, 0, &named), "65 destinations of answers were named at once; expected at most 64");
}

/// Messages are delivered one at a time, and no credit is returned.
#[test]
fn a_client_that_exceeds_its_credits_is_cut() {
    let software_device = SoftwareDevice::new();
    let domain = software_device.completion_channel().expect("a completion channel").domain().expect("a domain");
    let mut budget = Budget::new();
    budget.line("messages that arrive", SLOT_BYTES, 64);
    let arriving = Arena::new(&budget).expect("an arena");
    let slot = || arriving.take(SLOT_BYTES).expect("a slot");
    let messages = || {
        let work_requests = InFlightRequests::new(domain.pair(&PLAN).expect("a pair"), 0);
        CreditedMessages::new(work_requests, &Arena::new(&slots()).expect("an arena")).expect("slots")
    };
    let (mut notes, mut bulk) = (messages(), messages());
    let mut deliver = |number: u32| {
        let bytes = message(MessageKind::Bulk, number, &[1; 8]);
        let mut slot = slot();
        slot.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        bulk.accept_message(ReceivedMessage { slot, bytes: bytes.len() })?;
        bulk.take(&mut [0; 8]);
        Ok::<_, ConnectionError>(())
    };
    for number in 0..BULK_SLOTS.into() {
        deliver(number).expect("there is room");
    }
    let reason = deliver(BULK_SLOTS.into()).expect_err("there is no room").to_string();
    assert_eq!(reason, "more than 24 bulk messages without credit");
    for _ in 0..CONTROL_SLOTS {
        notes.control_read(slot()).expect("there is room");
    }
    let reason = notes.control_read(slot()).expect_err("there is no room").to_string();
    assert_eq!(reason, "more than 8 control messages without credit");
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let software_device = Arc::new(SoftwareDevice::new());
    let mut rig = rig(&software_device);
    let (honest, honest_far) = rig.connect();
    let mut numbers = TestRng(11);
    for _ in 0..300 {
        let mut bytes: Vec<u8> = (0..numbers.below(200)).map(|_| numbers.next().to_le_bytes()[0]).collect();
        // Half of it passes the prefix check.
        if numbers.below(2) == 0 {
            bytes = message([MessageKind::Bulk, MessageKind::Destinations][numbers.below(2)], 0, &bytes);
        }
        cut(&mut rig, &software_device, false, |hostile_client| hostile_client.send(&bytes));
    }
    assert!(rig.near.gone(honest).is_none() && rig.far.gone(honest_far).is_none());
}

/// Accesses to a server's memory by any connected client: addresses inside and around its regions, with the server's
/// keys, foreign keys and guesses. The server's ends and registry are made as in production.
#[test]
fn a_million_accesses_reach_nothing_of_the_server() {
    const WORLDS: u32 = 50;
    const TRIES: u32 = 20_000;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    let refused: u32 = (0..WORLDS).map(|rig| accesses_refused(rig.into(), TRIES, runtime.handle())).sum();
    assert_eq!(refused, WORLDS * TRIES, "every access is refused");
}

/// The number of accesses that one server refuses.
fn accesses_refused(seed: u64, tries: u32, runtime: &tokio::runtime::Handle) -> u32 {
    let software_device = Arc::new(SoftwareDevice::new());
    let watcher = DeviceWatcher { runtime: runtime.clone(), doorbell: Doorbell::new(|| {}) };
    let device_context = DeviceContext::new(
        (VerbsDevices::This(VerbsDevice(Arc::clone(&software_device) as Arc<_>)), 0),
        FabricSettings::default(),
        false,
        watcher,
    );
    let server = device_context
        .endpoint(
            &device_context.open_device(&ConnectionPlace::default()).expect("a device"),
            ConnectionSide::Accepting,
        )
        .expect("an end of the server's");
    let mut budget = Budget::new();
    budget.line("parameters", 4096, 16);
    let arena = Arena::new(&budget).expect("an arena");
    let leases: Vec<_> = (0..16).map(|_| arena.take_zeroed(4096).expect("a slot")).collect();
    let mapped = leases[0].mapped().expect("a slot");
    let registry = server.parts.send_staging.registry().clone();
    let server_key = registry.local_key_of(&leases[0]).expect("it is registered").expect("it is a slot");
    let foes = software_device.completion_channel().expect("a completion channel").domain().expect("a domain");
    let mut own = Arena::new(&budget).expect("an arena").take(4096).expect("a slot");
    let own_mapped = own.mapped().expect("a slot");
    let own_region = foes.register(&own_mapped, (0, own_mapped.len()), RegionAccess::Local).expect("a region");
    own.bytes_mut().fill(0xee);
    let mut hostile_client = foes.pair(&PLAN).expect("a pair");
    hostile_client.connect(&server.end()).expect("it connects");
    let server = server.join(&hostile_client.here()).expect("it connects");
    let (mut numbers, mut done, mut refused) = (TestRng(seed), Vec::<WorkCompletion>::new(), 0);
    for _ in 0..tries {
        let offset = numbers.below(mapped.len() + 8192) as u64;
        let address = (mapped.address() as u64).wrapping_add(offset).wrapping_sub(4096);
        let key = [server_key, own_region.remote_key(), u32::try_from(numbers.below(1 << 24)).expect("24 bits")];
        let place = RemoteAddress { address, key: key[numbers.below(3)] };
        let operation =
            [Operation::Read(place), Operation::Write(place, None), Operation::Write(place, Some(1))][numbers.below(3)];
        let span = MemorySpan::of_mut(&mut own.bytes_mut()[..1 + numbers.below(4095)], own_region.local_key());
        hostile_client.post(&[WorkRequest { id: 1, operation, span, is_signaled: true }]).expect("it is taken");
        hostile_client.poll(&mut done).expect("it completes");
        refused += u32::from(done.drain(..).all(|done| done.result == Err(CompletionStatus::REMOTE_ACCESS)));
        software_device.revive(hostile_client.here().number);
        software_device.revive(server.end().number);
    }
    assert!(leases.iter().all(|lease| lease.bytes().iter().all(|byte| *byte == 0)), "nothing was written");
    assert!(own.bytes().iter().all(|byte| *byte == 0xee), "nothing was read");
    refused
}

//! Somebody who connects and does not keep to the protocol, or to its own memory.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use pserver_core::memory::{Arena, Budget, Lease};
use pserver_core::port::Doorbell;
use pserver_core::wire::{Address, OfferMessage};

use super::stage::ends;
use crate::conformance::world::{World, hello};
use crate::network::{NetworkOptions, Poll};
use crate::verbs::flights::{Flights, Message, Span};
use crate::verbs::letters::{LETTER_BYTES, Letter, Matter, PREFIX_BYTES, Prefix};
use crate::verbs::mail::{Mail, slots};
use crate::verbs::plain::Plain;
use crate::verbs::provider::{
    Access, Act, Domain, Done, FarPlace, Pair, Plan, Provider, Receive, Region, Station, Work,
};
use crate::verbs::status::Status;
use crate::verbs::{BULK_SLOTS, Device, Devices, Ended, Hall, NOTE_SLOTS, SLOT_BYTES, Side, Watcher};

/// A hand-made client.
struct Foe {
    stream: TcpStream,
    pair: Box<dyn Pair>,
    /// Before the memory that it is of.
    region: Box<dyn Region>,
    lease: Lease,
    _domain: Arc<dyn Domain>,
    _station: Arc<dyn Station>,
}

const PLAN: Plan = Plan { posted_max: 16, receives_max: 64, is_open: true };

impl Foe {
    fn new(plain: &Plain, address: &Address) -> Self {
        let station = plain.station().expect("a station");
        let domain = station.domain().expect("a domain");
        let mut budget = Budget::new();
        budget.line("a foe's messages", SLOT_BYTES, 1);
        let mut lease = Arena::new(&budget).expect("an arena").take(SLOT_BYTES).expect("a slot");
        let mapped = lease.mapped().expect("a slot");
        let region = domain.register(&mapped, (0, mapped.len()), Access::Near).expect("a region");
        let mut pair = domain.pair(&PLAN).expect("a pair");
        let near = Span::of_mut(lease.bytes_mut(), region.near_key());
        let room: Vec<_> = (0..64).map(|id| Receive { id, near }).collect();
        pair.receive(&room).expect("room");
        let mut stream = TcpStream::connect((address.host.as_str(), address.port)).expect("the server listens");
        let mut hello = hello(0);
        OfferMessage::add(&mut hello.control, Letter::Yes(pair.here()).encode().to_vec());
        stream.write_all(&hello.encode()).expect("the server reads");
        Self { stream, pair, region, lease, _domain: domain, _station: station }
    }

    /// Reads the answer and connects.
    fn meet(&mut self) {
        let mut letter = [0; LETTER_BYTES];
        self.stream.read_exact(&mut letter).expect("the server answers");
        let Ok(Letter::Yes(there)) = Letter::decode(&letter) else { panic!("it has a device") };
        self.pair.connect(&there).expect("it connects");
    }

    fn send(&mut self, bytes: &[u8]) {
        self.lease.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let near = Span::of(&self.lease.bytes()[..bytes.len()], self.region.near_key());
        self.pair.post(&[Work { id: 0, act: Act::Send, near, is_told: false }]).expect("it is taken");
    }
}

/// A stream of numbers that is the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ (self.0 >> 29)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 11).expect("64 bits") % limit
    }
}

fn world(plain: &Arc<Plain>) -> World {
    let devices = Devices::This(Device(Arc::clone(plain) as Arc<_>));
    World::new(ends("verbs://127.0.0.1:0", &NetworkOptions { devices, poll: Poll::Block, ..NetworkOptions::default() }))
}

/// Lets somebody connect by hand and do what `act` does, until the connection is over; why. `waits` says whether it is
/// for the server to end it.
fn cut(world: &mut World, plain: &Plain, waits: bool, act: impl FnOnce(&mut Foe)) -> String {
    let known = world.far.accepted();
    let mut foe = Foe::new(plain, &world.address);
    world.until("the foe is there", |world| world.far.accepted().len() > known.len());
    foe.meet();
    act(&mut foe);
    let far = *world.far.accepted().difference(&known).next().expect("it was accepted");
    foe.stream.set_nonblocking(true).expect("a socket");
    let mut is_over = !waits;
    world.until("it is cut", |world| {
        is_over = is_over || matches!(foe.stream.read(&mut [0; 4096]), Ok(0));
        if is_over {
            // It may be over already.
            let _ = foe.stream.shutdown(std::net::Shutdown::Both);
        }
        world.far.gone(far).is_some()
    });
    world.far.gone(far).unwrap_or_default().to_owned()
}

fn message(matter: Matter, number: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; PREFIX_BYTES];
    Prefix { matter, taken: 0, number, bulk: 0, note: 0 }.encode(&mut bytes);
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn who_breaks_the_protocol_is_cut_by_name() {
    let plain = Arc::new(Plain::new());
    let mut world = world(&plain);
    let mut check = |bytes: &[u8], expected: &str| {
        let reason = cut(&mut world, &plain, true, |foe| foe.send(bytes));
        assert!(reason.contains(expected), "{reason}");
    };
    check(&[], "a message of 0 bytes, expected 16 or more");
    check(&[9; 16], "a message of kind 9");
    check(&message(Matter::Bare, 7, &[]), "a message with number 7, expected 0");
    check(&message(Matter::Grant, 0, &[1; 16]), "a place for a payload that was not offered");
    check(&message(Matter::Grant, 0, &[1; 15]), "15 bytes of places");
    check(&message(Matter::Bulk, 0, &[1; 64]), "not a pserver frame");
    let mut taken = message(Matter::Bare, 0, &[]);
    taken[2] = 1;
    check(&taken, "a payload was read that was not there to be read");
    let mut room = message(Matter::Bare, 0, &[]);
    room[8] = 1;
    check(&room, "1 and 0 slots were given back, which were not all in use");
}

/// Messages are let in one at a time, and none of the room that they took is given back.
#[test]
fn who_sends_more_than_there_is_room_for_is_cut() {
    let plain = Plain::new();
    let domain = plain.station().expect("a station").domain().expect("a domain");
    let mut budget = Budget::new();
    budget.line("messages that arrive", SLOT_BYTES, 64);
    let arriving = Arena::new(&budget).expect("an arena");
    let slot = || arriving.take(SLOT_BYTES).expect("a slot");
    let mail = || {
        let flights = Flights::new(domain.pair(&PLAN).expect("a pair"), 0);
        Mail::new(flights, &Arena::new(&slots()).expect("an arena")).expect("slots")
    };
    let (mut notes, mut bulk) = (mail(), mail());
    let mut deliver = |number: u32| {
        let bytes = message(Matter::Bulk, number, &[1; 8]);
        let mut slot = slot();
        slot.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        bulk.arrive(Message { slot, bytes: bytes.len() })?;
        bulk.take(&mut [0; 8]);
        Ok::<_, Ended>(())
    };
    for number in 0..BULK_SLOTS.into() {
        deliver(number).expect("there is room");
    }
    let reason = deliver(BULK_SLOTS.into()).expect_err("there is no room").to_string();
    assert_eq!(reason, "more than 24 messages that were not asked for");
    for _ in 0..NOTE_SLOTS {
        notes.read_note(slot()).expect("there is room");
    }
    let reason = notes.read_note(slot()).expect_err("there is no room").to_string();
    assert_eq!(reason, "more than 8 notes that were not asked for");
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let plain = Arc::new(Plain::new());
    let mut world = world(&plain);
    let (honest, honest_far) = world.connect();
    let mut numbers = Numbers(11);
    for _ in 0..300 {
        let mut bytes: Vec<u8> = (0..numbers.below(200)).map(|_| numbers.next().to_le_bytes()[0]).collect();
        // Half of it gets past the prefix.
        if numbers.below(2) == 0 {
            bytes = message([Matter::Bulk, Matter::Grant][numbers.below(2)], 0, &bytes);
        }
        cut(&mut world, &plain, false, |foe| foe.send(&bytes));
    }
    assert!(world.near.gone(honest).is_none() && world.far.gone(honest_far).is_none());
}

/// What the memory of a server is tried with, by whoever has a connection: addresses within its regions and around
/// them, its own keys, others' keys and guesses. The server's ends and its registry are those that a hall makes.
#[test]
fn a_million_accesses_reach_nothing_of_the_server() {
    const WORLDS: u32 = 50;
    const TRIES: u32 = 20_000;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    let refused: u32 = (0..WORLDS).map(|world| accesses_refused(world.into(), TRIES, runtime.handle())).sum();
    assert_eq!(refused, WORLDS * TRIES, "every access is refused");
}

/// How many of so many accesses one server refuses.
fn accesses_refused(seed: u64, tries: u32, runtime: &tokio::runtime::Handle) -> u32 {
    let plain = Arc::new(Plain::new());
    let watcher = Watcher { runtime: runtime.clone(), bell: Doorbell::new(|| {}) };
    let hall = Hall::new(Devices::This(Device(Arc::clone(&plain) as Arc<_>)), false, watcher);
    let server = hall.half(&hall.room(None).expect("a device"), Side::Accepting).expect("an end of the server's");
    let mut budget = Budget::new();
    budget.line("parameters", 4096, 16);
    let arena = Arena::new(&budget).expect("an arena");
    let leases: Vec<_> = (0..16).map(|_| arena.take_zeroed(4096).expect("a slot")).collect();
    let mapped = leases[0].mapped().expect("a slot");
    let registry = server.parts.outward.registry().clone();
    let server_key = registry.key_of(&leases[0]).expect("it is registered").expect("it is a slot");
    let foes = plain.station().expect("a station").domain().expect("a domain");
    let mut own = Arena::new(&budget).expect("an arena").take(4096).expect("a slot");
    let own_mapped = own.mapped().expect("a slot");
    let own_region = foes.register(&own_mapped, (0, own_mapped.len()), Access::Near).expect("a region");
    own.bytes_mut().fill(0xee);
    let mut foe = foes.pair(&PLAN).expect("a pair");
    foe.connect(&server.end()).expect("it connects");
    let server = server.join(&foe.here()).expect("it connects");
    let (mut numbers, mut done, mut refused) = (Numbers(seed), Vec::<Done>::new(), 0);
    for _ in 0..tries {
        let offset = numbers.below(mapped.len() + 8192) as u64;
        let address = (mapped.address() as u64).wrapping_add(offset).wrapping_sub(4096);
        let key = [server_key, own_region.far_key(), u32::try_from(numbers.below(1 << 24)).expect("24 bits")];
        let place = FarPlace { address, key: key[numbers.below(3)] };
        let act = [Act::Read(place), Act::Write(place, None), Act::Write(place, Some(1))][numbers.below(3)];
        let near = Span::of_mut(&mut own.bytes_mut()[..1 + numbers.below(4095)], own_region.near_key());
        foe.post(&[Work { id: 1, act, near, is_told: true }]).expect("it is taken");
        foe.poll(&mut done).expect("it completes");
        refused += u32::from(done.drain(..).all(|done| done.what == Err(Status::FAR_ACCESS)));
        plain.revive(foe.here().number);
        plain.revive(server.end().number);
    }
    assert!(leases.iter().all(|lease| lease.bytes().iter().all(|byte| *byte == 0)), "nothing was written");
    assert!(own.bytes().iter().all(|byte| *byte == 0xee), "nothing was read");
    refused
}

//! What is copied, and what is registered: nothing, once everything has been used once.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use pserver_core::memory::{Buffer, Mapping, lend};
use pserver_core::port::{Incoming, Outgoing, Transport};

use super::stage::{ends, transports};
use crate::conformance::Ends;
use crate::conformance::world::{Seen, World, bytes, push};
use crate::network::NetworkOptions;
use crate::trace::Trace;
use crate::verbs::plain::Plain;
use crate::verbs::{Device, Devices};

const LENGTH: usize = 1 << 20;

/// Memory of a trainer: a gradient's, or a parameter's.
enum Memory {
    Buffer(Buffer),
    /// Its own, which begins where it likes.
    Own(Vec<u8>, Arc<Mapping>),
}

impl Memory {
    fn buffer() -> Self {
        Self::Buffer(Buffer::new(LENGTH).expect("this system shares memory"))
    }

    fn own() -> Self {
        let bytes = vec![0; LENGTH + SKEW];
        let mapping = Mapping::of_caller(bytes[SKEW..].as_ptr().addr(), LENGTH).expect("it is some bytes");
        Self::Own(bytes, Arc::new(mapping))
    }

    fn mapping(&self) -> &Arc<Mapping> {
        match self {
            Self::Buffer(buffer) => buffer.mapping(),
            Self::Own(_, mapping) => mapping,
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Own(bytes, _) => &bytes[SKEW..],
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Own(bytes, _) => &mut bytes[SKEW..],
        }
    }
}

/// Memory of the trainer's own begins at no multiple of anything.
const SKEW: usize = 13;

/// Gradients go from the trainer's memory to the server's leases, and values from there to the trainer's memory.
fn nothing_is_copied(mut gradient: Memory, mut parameter: Memory) {
    let plain = Arc::new(Plain::new());
    let devices = Devices::This(Device(Arc::clone(&plain) as Arc<_>));
    let options = NetworkOptions { devices, ..NetworkOptions::default() };
    let (near, far, address, keep) = transports("verbs://127.0.0.1:0", &options);
    let (near, far) = (Trace::over(near), Trace::over(far));
    let counters = [near.counters(), far.counters()].map(|side| Arc::clone(&side.verbs));
    let count = |what: fn(&crate::verbs::Counters) -> u64| counters.iter().map(|side| what(side)).sum::<u64>();
    let mut world = World::new(Ends { keep, ..Ends::new(Box::new(near), Box::new(far), address) });
    let (near, far) = world.connect();
    gradient.bytes_mut().copy_from_slice(&bytes(LENGTH, 5));
    let (from, to) = (gradient.mapping().clone(), parameter.mapping().clone());
    let to_address = parameter.bytes().as_ptr().addr();
    let mut registered = 0;
    let arena = world.far.arena.take(1).expect("a slot").mapped().expect("it is a slot");
    let is_the_servers = |address: u64| {
        usize::try_from(address).is_ok_and(|address| address.wrapping_sub(arena.address()) < arena.len())
    };
    for round in 0..20 {
        lend(|book| {
            let (sent, push) = (gradient.bytes(), |number| push(number, &[gradient.bytes()]));
            let loan = book.read(sent).within(&from);
            world.near.send(near, &push(2 * round), vec![Outgoing::Loan(loan)]);
            world.until("it is there", |world| world.far.landed().count() == 2 + usize::try_from(round).expect("few"));
            world.near.held.insert(near);
            let heads = |seen: &[Seen]| seen.iter().filter(|one| matches!(one, Seen::Head(..))).count();
            let known = heads(&world.near.seen);
            let chunk = world.far.lease(sent);
            let value = chunk.bytes().as_ptr().addr() as u64;
            world.far.send(far, &push(2 * round + 1), vec![Outgoing::Value(chunk)]);
            world.until("its head is back", |world| heads(&world.near.seen) > known);
            let place = book.write(parameter.bytes_mut()).within(&to);
            world.near.land(near, vec![Incoming::Loan(place)]);
            world.until("it is back", |world| {
                let out = |side: &crate::conformance::world::Side| side.parcels_out + side.places_out;
                out(&world.near) + out(&world.far) == 0
            });
            let [read, written] = plain.take_moves()[..] else { panic!("the gradient, and the value") };
            assert!(read.is_read && read.far == sent.as_ptr().addr() as u64, "from the trainer's own memory");
            assert!(is_the_servers(read.near), "into the lease that the session answered with");
            let place = to_address as u64;
            assert_eq!((written.near, written.far, written.is_read), (value, place, false), "from value to tensor");
            assert_eq!([read.bytes, written.bytes].map(|bytes| bytes as usize), [LENGTH; 2]);
        });
        assert!(parameter.bytes() == gradient.bytes(), "what went there came back");
        parameter.bytes_mut().fill(0);
        let now = count(|side| side.registrations.load(Relaxed));
        assert!(round < 2 || now == registered, "round {round} registers memory");
        registered = now;
    }
    drop((from, to));
    let uses = [&gradient, &parameter].map(|memory| Arc::strong_count(memory.mapping()));
    assert_eq!(uses, [1, 1], "nobody uses the memory, so it can be freed, though it is registered");
    assert_eq!(count(|side| side.copied_bytes.load(Relaxed)), 0, "the device moves it all");
    assert_eq!(count(|side| side.moved_bytes.load(Relaxed)), 40 * LENGTH as u64);
    assert_eq!(count(|side| side.connections.load(Relaxed)), 2, "both sides count it");
    for memory in [&gradient, &parameter] {
        let is_reached = || plain.regions().iter().any(|(_, start, _)| *start == memory.bytes().as_ptr().addr() as u64);
        assert!(is_reached(), "the connection goes on");
        memory.mapping().let_go().expect("the device lets go of it");
        assert_eq!(is_reached(), matches!(memory, Memory::Buffer(_)), "what is the trainer's, it may now free");
    }
}

#[test]
fn between_a_buffer_and_leases_nothing_is_copied() {
    nothing_is_copied(Memory::buffer(), Memory::buffer());
}

#[test]
fn between_memory_of_the_trainers_own_and_leases_nothing_is_copied() {
    nothing_is_copied(Memory::own(), Memory::own());
    nothing_is_copied(Memory::own(), Memory::buffer());
}

/// What the trainer had registered, freed, and made again at the same address is other memory.
#[test]
fn memory_that_took_the_place_of_other_memory_is_registered_anew() {
    let plain = Arc::new(Plain::new());
    let devices = Devices::This(Device(Arc::clone(&plain) as Arc<_>));
    let options = NetworkOptions { devices, ..NetworkOptions::default() };
    let mut world = World::new(ends("verbs://127.0.0.1:0", &options));
    let (near, _) = world.connect();
    let Memory::Own(bytes, first) = Memory::own() else { unreachable!("it is its own") };
    let mut keys = Vec::new();
    let second = Mapping::of_caller(bytes[SKEW..].as_ptr().addr(), LENGTH).expect("it is some bytes");
    for (round, mapping) in [(0, first), (1, Arc::new(second))] {
        lend(|book| {
            let loan = book.read(&bytes[SKEW..]).within(&mapping);
            world.near.send(near, &push(round, &[&bytes[SKEW..]]), vec![Outgoing::Loan(loan)]);
            world.until("it is back", |world| world.near.parcels_out == 0);
        });
        let regions = plain.regions().into_iter();
        let known: Vec<_> = regions.filter(|(_, start, _)| *start == bytes[SKEW..].as_ptr().addr() as u64).collect();
        assert_eq!(known.len(), 1, "round {round}: nobody reaches the memory that was there before");
        keys.push(known[0].0);
    }
    assert_ne!(keys[0], keys[1]);
}

#[test]
fn from_other_memory_one_copy_is_made_and_counted() {
    let options = NetworkOptions { devices: Devices::This(Device::in_process()), ..NetworkOptions::default() };
    let (mut near, far, address, keep) = transports("verbs://127.0.0.1:0", &options);
    let counters = [near.verbs(), far.verbs()];
    let peer = near.connect(&address).expect("an address of this transport");
    let mut world = World::new(Ends { keep, ..Ends::new(Box::new(near), Box::new(far), address) });
    world.near.send(peer, &crate::conformance::world::hello(0), Vec::new());
    let payload = bytes(LENGTH, 1);
    let chunk = world.near.lease(&payload);
    world.near.send(peer, &push(1, &[&payload]), vec![Outgoing::Value(chunk)]);
    world.until("it is there", |world| world.far.landed().count() == 2);
    let copied = counters.each_ref().map(|side| side.copied_bytes.load(Relaxed));
    assert_eq!(copied, [LENGTH as u64, 0], "where it leaves");
}

/// A client hands a lane more when what it has handed over has left, so it always has announced more than can land.
#[test]
fn frames_leave_before_they_are_read() {
    let options = NetworkOptions { devices: Devices::This(Device::in_process()), ..NetworkOptions::default() };
    let mut world = World::new(ends("verbs://127.0.0.1:0", &options));
    let (near, _) = world.connect();
    world.far.holds_all = true;
    let gradient = Buffer::new(LENGTH).expect("this system shares memory");
    let from = gradient.mapping().clone();
    lend(|book| {
        for number in 0..12 {
            let loan = book.read(&gradient).within(&from);
            world.near.send(near, &push(number, &[&gradient]), vec![Outgoing::Loan(loan)]);
        }
        world.until("all have left", |world| world.near.left == 12);
        assert_eq!(world.near.parcels_out, 12, "none of them was read");
        world.far.release();
        world.until("they are back", |world| world.near.parcels_out == 0);
    });
}

/// Which way is taken is a choice by what there is; which was taken is known from what came of it.
#[test]
fn without_a_device_it_is_said_and_tcp_is_taken_or_nothing() {
    let check = |server: Devices, client: Devices, scheme: &str, expected: Result<(), &str>| {
        let listening = NetworkOptions { devices: server, ..NetworkOptions::default() };
        let (_, far, mut address, keep) = transports("verbs://127.0.0.1:0", &listening);
        let near = crate::network::Network::new(NetworkOptions { devices: client, ..NetworkOptions::default() });
        if scheme == "tcp" {
            address.scheme = pserver_core::wire::Scheme::Tcp;
        }
        let mut world =
            World::new(Ends { keep, ..Ends::new(Box::new(near.expect("a transport")), Box::new(far), address) });
        let address = world.address.clone();
        let peer = world.near.transport().connect(&address).expect("an address of this transport");
        world.near.send(peer, &crate::conformance::world::hello(0), Vec::new());
        match expected {
            Ok(()) => world.until("a hello lands", |world| world.far.landed().count() == 1),
            Err(words) => {
                world.until("it is refused", |world| world.near.gone(peer).is_some());
                let reason = world.near.gone(peer).unwrap_or_default().to_owned();
                let texts =
                    world.near.landed().map(|(_, frame, _)| String::from_utf8_lossy(&frame.control).into_owned());
                assert!(reason.contains(words) || texts.into_iter().any(|text| text.contains(words)), "{reason}");
            }
        }
    };
    let device = || Devices::This(Device::in_process());
    check(Devices::None, Devices::None, "verbs", Err("verbs are switched off"));
    check(Devices::None, device(), "verbs", Err("verbs are switched off"));
    check(device(), Devices::None, "tcp", Err("verbs only"));
    let one = device();
    check(one.clone(), one, "verbs", Ok(()));
    assert!(Device::find(&Devices::Named("none".parse().expect("a name"))).is_err());
}

//! Tests of copies and registrations: none, once all memory was used once.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use pserver_core::memory::{Buffer, Mapping, lend};
use pserver_core::port::{Incoming, Outgoing, Payloads, Transport};

use super::fixtures::{ends, transports};
use crate::conformance::TransportPair;
use crate::conformance::rig::{ConformanceRig, SeenEvent, bytes, push};
use crate::network::NetworkOptions;
use crate::trace::Trace;
use crate::verbs::software_device::SoftwareDevice;
use crate::verbs::{FabricSettings, VerbsDevice, VerbsDevices};

const LENGTH: usize = 1 << 20;

/// Memory of a trainer: a gradient's or a parameter's.
enum TrainerMemory {
    Buffer(Buffer),
    /// The trainer's own allocation, at any alignment.
    Own(Vec<u8>, Arc<Mapping>),
}

impl TrainerMemory {
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

/// The offset by which the trainer's own memory is unaligned.
const SKEW: usize = 13;

/// Gradients go from the trainer's memory to the server's leases, and values from there to the trainer's memory.
fn nothing_is_copied(mut gradient: TrainerMemory, mut parameter: TrainerMemory) {
    let software_device = Arc::new(SoftwareDevice::new());
    let devices = VerbsDevices::This(VerbsDevice(Arc::clone(&software_device) as Arc<_>));
    let options = NetworkOptions { devices, ..NetworkOptions::default() };
    let (near, far, address, keep) = transports("verbs://127.0.0.1:0", &options);
    let (near, far) = (Trace::over(near), Trace::over(far));
    let counters = [near.counters(), far.counters()].map(|side| Arc::clone(&side.verbs));
    let count = |result: fn(&crate::verbs::VerbsCounters) -> u64| counters.iter().map(|side| result(side)).sum::<u64>();
    let mut rig =
        ConformanceRig::new(TransportPair { keep, ..TransportPair::new(Box::new(near), Box::new(far), address) });
    let (near, far) = rig.connect();
    gradient.bytes_mut().copy_from_slice(&bytes(LENGTH, 5));
    let (from, to) = (gradient.mapping().clone(), parameter.mapping().clone());
    let to_address = parameter.bytes().as_ptr().addr();
    let mut registered = 0;
    let arena = rig.far.arena.take(1).expect("a slot").mapped().expect("it is a slot");
    let is_the_servers = |address: u64| {
        usize::try_from(address).is_ok_and(|address| address.wrapping_sub(arena.address()) < arena.len())
    };
    for round in 0..20 {
        lend(|book| {
            let (sent, push) = (gradient.bytes(), |number| push(number, &[gradient.bytes()]));
            let loan = book.read(sent).within(&from);
            rig.near.send(near, &push(2 * round), vec![Outgoing::Loan(loan)].into());
            rig.until("it is there", |rig| rig.far.landed().count() == 2 + usize::try_from(round).expect("few"));
            rig.near.held.insert(near);
            let heads = |seen: &[SeenEvent]| seen.iter().filter(|one| matches!(one, SeenEvent::Head(..))).count();
            let known = heads(&rig.near.seen);
            let chunk = rig.far.lease(sent);
            let value = chunk.bytes().as_ptr().addr() as u64;
            rig.far.send(far, &push(2 * round + 1), vec![Outgoing::Value(chunk)].into());
            rig.until("its head is back", |rig| heads(&rig.near.seen) > known);
            let place = book.write(parameter.bytes_mut()).within(&to);
            rig.near.land(near, vec![Incoming::Loan(place)].into());
            rig.until("it is back", |rig| {
                let out = |side: &crate::conformance::rig::RigSide| side.sends_out + side.receives_out;
                out(&rig.near) + out(&rig.far) == 0
            });
            let [read, written] = software_device.take_transfers()[..] else { panic!("the gradient, and the value") };
            assert!(read.is_read && read.remote == sent.as_ptr().addr() as u64, "from the trainer's own memory");
            assert!(is_the_servers(read.local), "into the lease that the session answered with");
            let place = to_address as u64;
            assert_eq!((written.local, written.remote, written.is_read), (value, place, false), "from value to tensor");
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
        let is_reached =
            || software_device.regions().iter().any(|(_, start, _)| *start == memory.bytes().as_ptr().addr() as u64);
        assert!(is_reached(), "the connection goes on");
        memory.mapping().let_go().expect("the device lets go of it");
        assert_eq!(is_reached(), matches!(memory, TrainerMemory::Buffer(_)), "what is the trainer's, it may now free");
    }
}

#[test]
fn between_a_buffer_and_leases_nothing_is_copied() {
    nothing_is_copied(TrainerMemory::buffer(), TrainerMemory::buffer());
}

#[test]
fn between_memory_of_the_trainers_own_and_leases_nothing_is_copied() {
    nothing_is_copied(TrainerMemory::own(), TrainerMemory::own());
    nothing_is_copied(TrainerMemory::own(), TrainerMemory::buffer());
}

/// Memory that was registered, freed and allocated again at the same address is other memory.
#[test]
fn new_memory_at_an_earlier_address_is_registered_anew() {
    let software_device = Arc::new(SoftwareDevice::new());
    let devices = VerbsDevices::This(VerbsDevice(Arc::clone(&software_device) as Arc<_>));
    let options = NetworkOptions { devices, ..NetworkOptions::default() };
    let mut rig = ConformanceRig::new(ends("verbs://127.0.0.1:0", &options));
    let (near, _) = rig.connect();
    let TrainerMemory::Own(bytes, first) = TrainerMemory::own() else { unreachable!("it is its own") };
    let mut keys = Vec::new();
    let second = Mapping::of_caller(bytes[SKEW..].as_ptr().addr(), LENGTH).expect("it is some bytes");
    for (round, mapping) in [(0, first), (1, Arc::new(second))] {
        lend(|book| {
            let loan = book.read(&bytes[SKEW..]).within(&mapping);
            rig.near.send(near, &push(round, &[&bytes[SKEW..]]), vec![Outgoing::Loan(loan)].into());
            rig.until("it is back", |rig| rig.near.sends_out == 0);
        });
        let regions = software_device.regions().into_iter();
        let known: Vec<_> = regions.filter(|(_, start, _)| *start == bytes[SKEW..].as_ptr().addr() as u64).collect();
        assert_eq!(known.len(), 1, "round {round}: nobody reaches the memory that was there before");
        keys.push(known[0].0);
    }
    assert_ne!(keys[0], keys[1]);
}

/// A trainer's memory is registered once, for gradients and for values, by however many servers it is accessed.
#[test]
fn memory_is_registered_once_for_all_connections_and_both_ways() {
    let software_device = Arc::new(SoftwareDevice::new());
    let devices = VerbsDevices::This(VerbsDevice(Arc::clone(&software_device) as Arc<_>));
    let options = NetworkOptions { devices, ..NetworkOptions::default() };
    let mut rig = ConformanceRig::new(ends("verbs://127.0.0.1:0", &options));
    let (mut gradient, mut parameter) = (TrainerMemory::own(), TrainerMemory::own());
    for number in 0..8 {
        let (near, far) = rig.connect();
        let landed = rig.far.landed().count();
        for memory in [&mut gradient, &mut parameter] {
            let mapping = memory.mapping().clone();
            lend(|book| {
                let sent = memory.bytes();
                let loan = book.read(sent).within(&mapping);
                rig.near.send(near, &push(number, &[sent]), vec![Outgoing::Loan(loan)].into());
                rig.until("it landed", |rig| rig.near.sends_out == 0 && rig.far.landed().count() > landed);
            });
            lend(|book| {
                rig.near.held.insert(near);
                let heads = |seen: &[SeenEvent]| seen.iter().filter(|one| matches!(one, SeenEvent::Head(..))).count();
                let known = heads(&rig.near.seen);
                let value = bytes(LENGTH, number);
                let chunk = rig.far.lease(&value);
                rig.far.send(far, &push(number, &[&value]), vec![Outgoing::Value(chunk)].into());
                rig.until("its head is there", |rig| heads(&rig.near.seen) > known);
                let place = book.write(memory.bytes_mut()).within(&mapping);
                rig.near.land(near, vec![Incoming::Loan(place)].into());
                rig.until("it landed", |rig| rig.near.receives_out + rig.far.sends_out == 0);
            });
        }
        for memory in [&gradient, &parameter] {
            let start = memory.bytes().as_ptr().addr() as u64;
            let is_of = |address: u64| (start..start + LENGTH as u64).contains(&address);
            let regions = software_device.regions().into_iter().filter(|(_, address, _)| is_of(*address));
            let registered: u64 = regions.map(|(_, _, bytes)| bytes).sum();
            assert_eq!(registered, LENGTH as u64, "after {} connections", number + 1);
        }
    }
}

#[test]
fn from_other_memory_one_copy_is_made_and_counted() {
    let options =
        NetworkOptions { devices: VerbsDevices::This(VerbsDevice::in_process()), ..NetworkOptions::default() };
    let (mut near, far, address, keep) = transports("verbs://127.0.0.1:0", &options);
    let counters = [near.verbs(), far.verbs()];
    let peer = near.connect(&address).expect("an address of this transport");
    let mut rig =
        ConformanceRig::new(TransportPair { keep, ..TransportPair::new(Box::new(near), Box::new(far), address) });
    rig.near.send(peer, &crate::conformance::rig::hello(0), Payloads::new());
    let payload = bytes(LENGTH, 1);
    let chunk = rig.near.lease(&payload);
    rig.near.send(peer, &push(1, &[&payload]), vec![Outgoing::Value(chunk)].into());
    rig.until("it is there", |rig| rig.far.landed().count() == 2);
    let copied = counters.each_ref().map(|side| side.copied_bytes.load(Relaxed));
    assert_eq!(copied, [LENGTH as u64, 0], "where it leaves");
}

/// A client submits more to a lane when a frame was transmitted, so it has always announced more than can be received
/// at once.
#[test]
fn frames_are_transmitted_before_they_are_read() {
    let options =
        NetworkOptions { devices: VerbsDevices::This(VerbsDevice::in_process()), ..NetworkOptions::default() };
    let mut rig = ConformanceRig::new(ends("verbs://127.0.0.1:0", &options));
    let (near, _) = rig.connect();
    rig.far.holds_all = true;
    let gradient = Buffer::new(LENGTH).expect("this system shares memory");
    let from = gradient.mapping().clone();
    lend(|book| {
        for number in 0..12 {
            let loan = book.read(&gradient).within(&from);
            rig.near.send(near, &push(number, &[&gradient]), vec![Outgoing::Loan(loan)].into());
        }
        rig.until("all have left", |rig| rig.near.left == 12);
        assert_eq!(rig.near.sends_out, 12, "none of them was read");
        rig.far.release();
        rig.until("they are back", |rig| rig.near.sends_out == 0);
    });
}

/// The scheme and the devices decide between verbs, TCP and a refusal; the outcome shows which.
#[test]
fn without_a_device_the_reason_is_given_and_tcp_is_used_or_refused() {
    let check = |server: VerbsDevices, client: VerbsDevices, scheme: &str, expected: Result<(), &str>| {
        let listening = NetworkOptions { devices: server, ..NetworkOptions::default() };
        let (_, far, mut address, keep) = transports("verbs://127.0.0.1:0", &listening);
        let near = crate::network::Network::new(NetworkOptions { devices: client, ..NetworkOptions::default() });
        if scheme == "tcp" {
            address.scheme = pserver_core::wire::Scheme::Tcp;
        }
        let mut rig = ConformanceRig::new(TransportPair {
            keep,
            ..TransportPair::new(Box::new(near.expect("a transport")), Box::new(far), address)
        });
        let address = rig.address.clone();
        let peer = rig.near.transport().connect(&address).expect("an address of this transport");
        rig.near.send(peer, &crate::conformance::rig::hello(0), Payloads::new());
        match expected {
            Ok(()) => rig.until("a hello lands", |rig| rig.far.landed().count() == 1),
            Err(words) => {
                rig.until("it is refused", |rig| rig.near.gone(peer).is_some());
                let reason = rig.near.gone(peer).unwrap_or_default().to_owned();
                let texts = rig.near.landed().map(|(_, frame, _)| String::from_utf8_lossy(&frame.control).into_owned());
                assert!(reason.contains(words) || texts.into_iter().any(|text| text.contains(words)), "{reason}");
            }
        }
    };
    let device = || VerbsDevices::This(VerbsDevice::in_process());
    check(VerbsDevices::None, VerbsDevices::None, "verbs", Err("verbs are switched off"));
    check(VerbsDevices::None, device(), "verbs", Err("verbs are switched off"));
    check(device(), VerbsDevices::None, "tcp", Err("verbs only"));
    let one = device();
    check(one.clone(), one, "verbs", Ok(()));
    assert!(
        VerbsDevice::find(&VerbsDevices::Named("none".parse().expect("a name")), &FabricSettings::default()).is_err()
    );
}

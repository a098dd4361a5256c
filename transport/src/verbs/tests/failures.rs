//! Whatever a device does wrong ends one connection, with a reason that names it, and every parcel comes back.

use std::sync::Arc;

use super::stage::ends;
use crate::conformance;
use crate::conformance::world::{Seen, Side, World, bytes, push};
use crate::network::{NetworkOptions, Poll};
use crate::verbs::plain::Plain;
use crate::verbs::rough::{Mischief, Plot, Rough};
use crate::verbs::status::Status;
use crate::verbs::{Device, Devices, INLINE_BYTES_MAX};
use pserver_core::ids::PeerId;
use pserver_core::limits::LANDINGS_MAX;
use pserver_core::memory::{Buffer, Mapping, lend};
use pserver_core::port::{Incoming, Outgoing};

fn world(device: &Rough) -> World {
    let devices = Devices::This(Device(Arc::new(device.clone())));
    World::new(ends("verbs://127.0.0.1:0", &NetworkOptions { devices, poll: Poll::Block, ..NetworkOptions::default() }))
}

/// Sends some frames, with long payloads and short ones.
pub(super) fn traffic(side: &mut Side, peer: PeerId) {
    for number in 0..12 {
        let payload = bytes(if number % 2 == 0 { 100_000 } else { 100 }, number);
        let chunk = side.lease(&payload);
        side.send(peer, &push(number, &[&payload]), vec![Outgoing::Value(Arc::clone(&chunk))]);
    }
}

pub(super) fn outstanding(world: &World) -> usize {
    let out = |side: &Side| side.parcels_out + side.places_out;
    out(&world.near) + out(&world.far)
}

/// Plots against one side of a connection with traffic both ways; why it ended there.
fn ended(mischief: Mischief, is_open: bool, after: u32) -> String {
    let device = Rough::new(Arc::new(Plain::new()));
    let mut world = world(&device);
    let (near, far) = world.connect();
    world.settle();
    device.plot(Some(Plot { mischief, is_open, after }));
    traffic(&mut world.near, near);
    traffic(&mut world.far, far);
    world.until("both are gone", |world| world.near.gone(near).is_some() && world.far.gone(far).is_some());
    world.until("the parcels are back", |world| outstanding(world) == 0);
    let reason = if is_open { world.near.gone(near) } else { world.far.gone(far) };
    let reason = reason.unwrap_or_default().to_owned();
    device.plot(None);
    // Others go on, and so does who connects again.
    let (near, far) = world.connect();
    let landed = world.far.landed().count();
    traffic(&mut world.near, near);
    traffic(&mut world.far, far);
    world.until("the next connection works", |world| world.far.landed().count() == landed + 12);
    world.until("its parcels are back", |world| outstanding(world) == 0);
    reason
}

#[test]
fn a_device_that_takes_its_time_keeps_every_promise() {
    let devices = || Devices::This(Device(Arc::new(Rough::slow())));
    conformance::check(|| {
        let options = NetworkOptions { devices: devices(), ..NetworkOptions::default() };
        ends("verbs://127.0.0.1:0", &options).landing(LANDINGS_MAX)
    });
}

/// How often both sides are polled until 32 frames of 256 KiB are there each way, over a device that takes its time.
fn polls(lands_singly: bool) -> u64 {
    let mut world = world(&Rough::slow());
    let (near, far) = world.connect();
    (world.near.lands_singly, world.far.lands_singly) = (lands_singly, lands_singly);
    let payload = bytes(256 * 1024, 1);
    for number in 0..32 {
        for (side, peer) in [(&mut world.near, near), (&mut world.far, far)] {
            let chunk = side.lease(&payload);
            side.send(peer, &push(number, &[&payload]), vec![Outgoing::Value(chunk)]);
        }
    }
    let before = world.steps;
    world.until("all landed", |world| world.near.landed().count() == 32 && world.far.landed().count() == 33);
    world.until("the parcels are back", |world| outstanding(world) == 0);
    world.steps - before
}

#[test]
fn frames_that_land_at_once_share_their_round_trips() {
    let (singly, at_once) = (polls(true), polls(false));
    println!("polls until 32 frames of 256 KiB are there each way: {singly} one by one, {at_once} several at once");
    assert!(2 * at_once < singly, "{singly} polls one by one, {at_once} at once");
}

#[test]
fn every_status_ends_the_connection_and_is_named() {
    for status in 1..25 {
        for is_open in [true, false] {
            let status = Status(status);
            let reason = ended(Mischief::Fails(status), is_open, status.0 % 3);
            assert!(reason.contains(&status.to_string()), "{status:?}, {is_open}: {reason}");
        }
    }
}

#[test]
fn what_a_device_does_wrong_ends_the_connection_and_is_named() {
    let check = |mischief, is_open, expected: &str| {
        for after in [0, 2] {
            let reason = ended(mischief, is_open, after);
            assert!(reason.contains(expected), "{mischief:?}, {is_open}, after {after}: {reason}");
        }
    };
    for is_open in [true, false] {
        check(Mischief::Lost, is_open, "completed, expected");
        check(Mischief::Twice, is_open, "completed");
        check(Mischief::Stranger, is_open, "completed");
        check(Mischief::TooLong, is_open, "a receive completed as Message(4294967295)");
        check(Mischief::Deaf, is_open, "the completion queue is lost");
        check(Mischief::Refuses, is_open, "the device takes no more work");
    }
    // The other side gets so few messages that the one behind may never come.
    check(Mischief::Late, true, "completed, expected");
    check(Mischief::WrongNumber, true, "payloads were written as number");
    assert!(ended(Mischief::RegistersNothing, true, 0).contains("so much memory cannot be registered"));
    assert!(ended(Mischief::RegistersNothing, false, 0).contains("so much memory cannot be registered"));
}

#[test]
fn a_key_of_another_connection_is_worth_nothing() {
    let plain = Arc::new(Plain::new());
    let device = Rough::new(Arc::clone(&plain) as Arc<_>);
    let mut world = world(&device);
    let (honest, honest_far) = world.connect();
    traffic(&mut world.near, honest);
    world.until("it landed", |world| world.far.landed().count() == 13);
    let keys: Vec<u32> = plain.regions().into_iter().map(|(key, ..)| key).collect();
    assert!(keys.len() > 3, "both sides have registered memory");
    for key in keys {
        let (near, far) = world.connect();
        let landed = world.far.landed().count();
        device.plot(Some(Plot { mischief: Mischief::Key(key), is_open: true, after: 0 }));
        traffic(&mut world.near, near);
        world.until("it is cut", |world| world.near.gone(near).is_some() && world.far.gone(far).is_some());
        device.plot(None);
        let reason = world.far.gone(far).unwrap_or_default().to_owned();
        assert!(reason.contains("named memory that is not registered for this connection"), "{reason}");
        assert_eq!(world.far.landed().count(), landed, "nothing of it landed");
        assert_eq!(outstanding(&world), 0);
        world.near.send(honest, &push(99, &[]), Vec::new());
        world.until("the honest one goes on", |world| world.far.landed().count() == landed + 1);
        assert!(world.far.gone(honest_far).is_none());
    }
}

/// How many slots of the accepting side are not free after the other has died while it read from there.
fn kept(mischief: Option<Mischief>) -> u64 {
    let device = Rough::new(Arc::new(Plain::new()));
    let mut world = world(&device);
    let (near, far) = world.connect();
    world.settle();
    let before = world.far.arena.usage().slots_in_use;
    traffic(&mut world.near, near);
    world.until("a head is there", |world| world.far.seen.iter().any(|seen| matches!(seen, Seen::Head(..))));
    device.plot(mischief.map(|mischief| Plot { mischief, is_open: false, after: 0 }));
    world.settle();
    world.near.transport = None;
    world.until("it is known", |world| world.far.gone(far).is_some());
    assert_eq!(world.far.places_out, 0, "every place came back, or what stands for it");
    world.far.arena.usage().slots_in_use - before
}

#[test]
fn what_a_device_does_not_give_back_is_given_to_nobody() {
    assert_eq!(kept(None), 0);
    assert_eq!(kept(Some(Mischief::Dead)), 2, "those of four frames at once that it was filling");
}

/// Ends a connection while the other side can read a buffer, and write another; after that the trainer has both again.
fn withdrawn(mischief: Option<Mischief>, from: &Arc<Mapping>, sent: &[u8], to: &Arc<Mapping>, place: &mut [u8]) {
    let device = Rough::new(Arc::new(Plain::new()));
    let mut world = world(&device);
    let (near, far) = world.connect();
    world.far.holds_all = true;
    lend(|book| {
        let loan = book.read(sent).within(from);
        world.near.send(near, &push(0, &[sent]), vec![Outgoing::Loan(loan)]);
        world.until("a head is there", |world| world.far.seen.iter().any(|seen| matches!(seen, Seen::Head(..))));
        world.near.held.insert(near);
        // It is asked for a place, and is not told that there is one.
        let chunk = world.far.lease(sent);
        world.far.send(far, &push(1, &[sent]), vec![Outgoing::Value(chunk)]);
        world.until("its head is there", |world| world.near.seen.iter().any(|seen| matches!(seen, Seen::Head(..))));
        let loan = book.write(place).within(to);
        world.near.land(near, vec![Incoming::Loan(loan)]);
        world.near.step();
        device.plot(mischief.map(|mischief| Plot { mischief, is_open: true, after: 0 }));
        world.near.transport().close(near);
        world.far.transport = None;
        let near_is_gone = |world: &mut World| {
            world.near.step();
            world.near.wait(std::time::Duration::from_millis(1));
            world.near.gone(near).is_some()
        };
        while !near_is_gone(&mut world) {}
        assert_eq!((world.near.parcels_out, world.near.places_out), (0, 0), "the loans are back");
    });
}

#[test]
fn what_another_side_may_still_reach_is_taken_out_of_its_sight() {
    let check = |mischief: Option<Mischief>, expected: bool| {
        let mut buffers = [0, 1].map(|_| Buffer::new(1 << 20).expect("this system shares memory"));
        let [from, to] = buffers.each_ref().map(|buffer| Arc::clone(buffer.mapping()));
        let [sent, place] = &mut buffers;
        withdrawn(mischief, &from, sent, &to, place);
        for mapping in [from, to] {
            mapping.withdraw().expect("the system lets go of it");
            assert_eq!(!mapping.is_in_place(), expected, "{mischief:?}");
        }
        let mut own = [0, 1].map(|_| vec![0; 1 << 20]);
        let mapping = |bytes: &Vec<u8>| Mapping::of_caller(bytes.as_ptr().addr(), bytes.len()).expect("some bytes");
        let [from, to] = own.each_ref().map(|bytes| Arc::new(mapping(bytes)));
        let [sent, place] = &mut own;
        withdrawn(mischief, &from, sent, &to, place);
        for mapping in [from, to] {
            assert_eq!(mapping.withdraw().is_err(), expected, "{mischief:?}: it is not the library's to take away");
            assert_eq!(!mapping.is_in_place(), expected, "{mischief:?}");
        }
    };
    check(None, false);
    // Memory that is not registered is out of sight, and a pair that is gone reads and writes nothing.
    check(Some(Mischief::Dead), false);
    check(Some(Mischief::KeepsMemory), false);
    check(Some(Mischief::Hung), true);
}

#[test]
fn there_is_always_room_for_a_message() {
    let plain = Arc::new(Plain::new());
    let mut world = world(&Rough::new(Arc::clone(&plain) as Arc<_>));
    let (near, far) = world.connect();
    for round in 1..=40 {
        traffic(&mut world.near, near);
        traffic(&mut world.far, far);
        let landed = 12 * round;
        world.until("all landed", |world| world.far.landed().count() > landed && world.near.landed().count() == landed);
    }
    world.until("the parcels are back", |world| outstanding(world) == 0);
    assert_eq!(plain.crowded(), 0, "credits see to it");
}

/// The answer's places are asked for when all its messages are there; nobody is cut for asking while some are missing.
#[test]
fn an_answer_of_more_than_there_is_room_for_arrives_whole() {
    const SHORT: usize = INLINE_BYTES_MAX as usize;
    let mut world = world(&Rough::new(Arc::new(Plain::new())));
    let (near, far) = world.connect();
    let shapes: [&[(usize, usize)]; 5] = [
        &[(28, SHORT), (1, 2 * SHORT)],
        &[(1, 2 * SHORT), (28, SHORT)],
        &[(14, SHORT), (3, 2 * SHORT), (40, SHORT)],
        // More places than one grant says, and payloads that end where messages do.
        &[(28, SHORT - 16), (600, 2 * SHORT)],
        &[(1, 2 * SHORT), (200, 1000), (1, 2 * SHORT)],
    ];
    for round in 0..20 {
        for shape in shapes {
            let lengths = shape.iter().flat_map(|(count, length)| std::iter::repeat_n(*length, *count));
            let payloads: Vec<_> = lengths.filter(|length| *length > 0).map(|length| bytes(length, round)).collect();
            let slices: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
            let body = payloads.iter().map(|payload| Outgoing::Value(world.far.lease(payload))).collect();
            world.far.send(far, &push(round, &slices), body);
            world.until("it landed, or the connection is gone", |world| {
                outstanding(world) == 0 && world.near.landed().count() > 0 || world.near.gone(near).is_some()
            });
            assert_eq!((world.near.gone(near), world.far.gone(far)), (None, None), "{shape:?}, round {round}");
            let landed = world.near.landed().next().map(|(_, _, body)| body.clone());
            assert!(landed == Some(payloads), "{shape:?}, round {round}: what landed is what was sent");
            world.near.seen.clear();
        }
    }
}

#[test]
fn the_memory_of_connections_that_are_over_is_not_registered_any_more() {
    let plain = Arc::new(Plain::new());
    let mut world = world(&Rough::new(Arc::clone(&plain) as Arc<_>));
    let mut most = 0;
    for number in 0..50 {
        let (near, far) = world.connect();
        traffic(&mut world.near, near);
        traffic(&mut world.far, far);
        world.until("the parcels are back", |world| outstanding(world) == 0);
        world.near.transport().close(near);
        world.until("it is over", |world| world.near.gone(near).is_some() && world.far.gone(far).is_some());
        let regions = plain.regions().len();
        // The first connections register the chunks that later ones use again.
        most = if number < 10 { regions.max(most) } else { most };
        assert!(regions <= most, "{regions} regions after {number} connections, {most} at most after the first ten");
    }
}

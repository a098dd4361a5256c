//! The promises, one function each.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pserver_core::ids::PeerId;
use pserver_core::limits::LANDINGS_MAX;
use pserver_core::memory::lend;
use pserver_core::port::{Incoming, Outgoing};
use pserver_core::wire::{Address, Frame, Head, Kind, Scheme};

use super::world::{Seen, Side, World, bytes, hello, push};

type Promise = fn(&mut World);

pub(super) const ALL: [(&str, Promise); 19] = [
    ("a hello comes first, then frames in order", frames_in_order),
    ("a round trip moves the bytes", a_round_trip),
    ("sizes from nothing to 4 MiB are mixed freely", mixed_sizes),
    ("4096 entries fit one frame", many_entries),
    ("the caller's own memory is sent from and received into", loans),
    ("a discarded payload does not disturb the next", discarded),
    ("parcels come back when the receiver dies", receiver_dies),
    ("places come back when the sender dies", sender_dies),
    ("who does not read makes submit leave work, and goes on later", back_pressure),
    ("both may send much at once", both_send),
    ("a second head comes before the first has landed, and all land in order", several_land),
    ("of all that was landing places come back when the sender dies", several_die_here),
    ("of all that was landing places come back when who was connected to dies", several_die_there),
    ("a doorbell wakes a wait", doorbell),
    ("what was submitted before a close arrives, then both are gone", close),
    ("work for a gone peer comes back", work_for_the_gone),
    ("a peer that holds a head does not hold the others", two_peers),
    ("a changed payload is refused by name, and parcels come back", changed_payload),
    ("nobody at an address is a reason, and a foreign address an error", nobody_there),
];

fn frames_in_order(world: &mut World) {
    let (near, far) = world.connect();
    for number in 0..500 {
        world.near.send(near, &push(number, &[]), Vec::new());
    }
    world.until("500 frames land", |world| world.far.landed().count() == 501);
    let numbers: Vec<_> = world.far.landed().map(|(_, frame, _)| frame.head.sequence.0).skip(1).collect();
    assert_eq!(numbers, (0..500).collect::<Vec<_>>());
    assert_eq!(world.far.landed().next().map(|(peer, frame, _)| (peer, frame.clone())), Some((far, hello(0))));
    let first = world.far.seen.iter().take(2).cloned().collect::<Vec<_>>();
    assert_eq!(first, [Seen::Accepted(far), Seen::Landed(far, hello(0), Vec::new())]);
    world.until("500 frames are sent", |world| sent(&world.near) == 501);
    assert!(matches!(world.near.seen[0], Seen::Connected(peer) if peer == near));
}

fn a_round_trip(world: &mut World) {
    let (near, far) = world.connect();
    for (number, length) in [(1, 4 * 1024), (2, 1024 * 1024), (3, 1)] {
        let payload = bytes(length, number);
        let there = transfer(&mut world.near, near, number, &[&payload]);
        world.until("it is there", |world| holds(&world.far, &there, &[&payload]));
        let back = transfer(&mut world.far, far, number + 100, &[&payload]);
        world.until("it is back", |world| holds(&world.near, &back, &[&payload]));
    }
    world.until("the parcels are back", |world| parcels(world) == 0);
}

fn mixed_sizes(world: &mut World) {
    let (near, _) = world.connect();
    let sizes = [0, 1, 63, 64, 4095, 4096, 16384, 16385, 65535, 65536, 65537, 1 << 20, (4 << 20) - 1, 4 << 20];
    let payloads: Vec<_> = (0..).zip(sizes).map(|(seed, size)| bytes(size, seed)).collect();
    let mut expected = Vec::new();
    for number in 0..42 {
        let index = usize::try_from(number).expect("small");
        let (one, two, three) = (index % 14, index * 5 % 14, index * 3 % 14);
        let body = [one, two, three].map(|size| payloads[size].as_slice());
        expected.push(transfer(&mut world.near, near, number, &body));
    }
    world.until("all land", |world| world.far.landed().count() == 43);
    for (number, (_, frame, body)) in world.far.landed().skip(1).enumerate() {
        assert_eq!(*frame, expected[number]);
        for (found, entry) in body.iter().zip(frame.entries.iter().filter(|entry| entry.bytes > 0)) {
            let payload = payloads.iter().find(|payload| payload.len() == entry.bytes as usize);
            assert!(Some(found) == payload, "frame {number}: payload of {} bytes", entry.bytes);
        }
    }
    world.until("the parcels are back", |world| parcels(world) == 0);
}

fn many_entries(world: &mut World) {
    let (near, _) = world.connect();
    let payloads: Vec<_> = (0..4096).map(|seed| bytes(if seed % 3 == 0 { 0 } else { 60 }, seed)).collect();
    let payloads: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
    let frames = [1, 2].map(|number| transfer(&mut world.near, near, number, &payloads));
    for frame in frames {
        world.until("it is there", |world| holds(&world.far, &frame, &payloads));
    }
}

fn loans(world: &mut World) {
    let (near, far) = world.connect();
    let (gradient, other) = (bytes(3 << 20, 1), bytes(100, 2));
    let (mut large, mut small) = (vec![0; 3 << 20], vec![0; 100]);
    world.far.held.insert(far);
    lend(|book| {
        let body = vec![Outgoing::Loan(book.read(&gradient)), Outgoing::Loan(book.read(&other))];
        world.near.send(near, &push(1, &[&gradient, &other]), body);
        world.until("the head is there", |world| heads(&world.far) == 1);
        let places = vec![Incoming::Loan(book.write(&mut large)), Incoming::Loan(book.write(&mut small))];
        world.far.land(far, places);
        world.until("the loans are back", |world| parcels(world) == 0 && world.far.landed().count() == 2);
    });
    assert!(large == gradient && small == other, "the payloads are in the caller's memory");
}

fn discarded(world: &mut World) {
    let (near, _) = world.connect();
    let payload = bytes(300_000, 1);
    world.far.discards = true;
    transfer(&mut world.near, near, 1, &[&payload, &[], &payload[..10]]);
    world.until("it is forgotten", |world| world.far.landed().count() == 2);
    world.far.discards = false;
    let frame = transfer(&mut world.near, near, 2, &[&payload]);
    world.until("the next is there", |world| holds(&world.far, &frame, &[&payload]));
}

fn receiver_dies(world: &mut World) {
    let (near, _) = world.connect();
    flood(world, near, 40, 1 << 20);
    world.until("some have landed", |world| world.far.landed().count() > 3);
    world.far.transport = None;
    world.until("it is known", |world| world.near.gone(near).is_some());
    world.until("the parcels are back", |world| world.near.queue.is_empty() && world.near.parcels_out == 0);
}

fn sender_dies(world: &mut World) {
    let (near, far) = world.connect();
    flood(world, near, 40, 4 << 20);
    world.until("some have landed", |world| world.far.landed().count() > 3 && world.far.places_out > 0);
    near_dies(world, far);
}

/// The near side goes; the far one learns it, and has its places back.
fn near_dies(world: &mut World, far: PeerId) {
    world.near.transport = None;
    world.until("it is known", |world| world.far.gone(far).is_some());
    world.until("the places are back", |world| world.far.queue.is_empty() && world.far.places_out == 0);
}

fn back_pressure(world: &mut World) {
    let (near, _) = world.connect();
    world.far.holds_all = true;
    flood(world, near, 1000, 64 * 1024);
    world.settle();
    assert!(!world.near.queue.is_empty(), "a peer that does not read takes 64 MB");
    assert_eq!(heads(&world.far), 1, "one head is reported, and nothing is read before its places come");
    world.far.release();
    world.until("all land", |world| world.far.landed().count() == 1001);
    let numbers = world.far.landed().map(|(_, frame, _)| frame.head.sequence.0).skip(1);
    assert!(numbers.eq(0..1000), "in order");
    world.until("the parcels are back", |world| parcels(world) == 0);
}

fn both_send(world: &mut World) {
    let (near, far) = world.connect();
    flood(world, near, 200, 256 * 1024);
    let payload = bytes(256 * 1024, 9);
    let chunk = world.far.lease(&payload);
    for number in 0..200 {
        world.far.send(far, &push(number, &[&payload]), vec![outgoing(&chunk)]);
    }
    let all = |side: &Side, count| side.landed().count() == count;
    world.until("all land", |world| all(&world.far, 201) && all(&world.near, 200));
}

/// Long payloads and short ones, and between some of them a frame without: what both sides have queued before the
/// first of it may land.
fn several_land(world: &mut World) {
    const SIZES: [&[usize]; 9] = [
        &[300_000],
        &[300_000, 100, 20_000],
        &[100],
        &[20_000, 8192],
        &[300_000],
        &[50_000, 0, 8193],
        &[],
        &[8192, 1],
        &[100_000, 100_000],
    ];
    let (near, far) = world.connect();
    (world.near.holds_all, world.far.holds_all) = (true, true);
    let mut expected = Vec::new();
    for (number, sizes) in (0..).zip(SIZES.iter().cycle().take(27)) {
        let payloads: Vec<_> = (number..).zip(*sizes).map(|(seed, size)| bytes(*size, seed)).collect();
        let slices: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
        let there = transfer(&mut world.near, near, number, &slices);
        assert_eq!(transfer(&mut world.far, far, number, &slices), there);
        let filled = payloads.into_iter().filter(|payload| !payload.is_empty());
        expected.push((there, filled.collect::<Vec<_>>()));
    }
    world.settle();
    world.near.release();
    world.far.release();
    world.until("all land", |world| world.far.landed().count() == 28 && world.near.landed().count() == 27);
    for (side, hellos) in [(&world.near, 0), (&world.far, 1)] {
        let landed = side.landed().skip(hellos).map(|(_, frame, body)| (frame.clone(), body.clone()));
        assert!(landed.eq(expected.iter().cloned()), "all of it, in order");
    }
    world.until("the parcels are back", |world| parcels(world) == 0);
    for side in [&mut world.near, &mut world.far] {
        let (most, may) = (side.most_landing, side.transport().capabilities().landings);
        assert!(most <= may && may <= LANDINGS_MAX, "{most} landed at once, and {may} may");
        assert!(world.landings <= most, "{most} landed at once, expected {}", world.landings);
    }
}

fn several_die_here(world: &mut World) {
    let (near, far) = world.connect();
    world.far.holds_all = true;
    flood(world, near, 12, 256 * 1024);
    world.settle();
    world.far.release();
    alone_until(&mut world.far, world.landings);
    near_dies(world, far);
}

fn several_die_there(world: &mut World) {
    let (near, far) = world.connect();
    world.near.holds_all = true;
    let payload = bytes(256 * 1024, 1);
    for number in 0..12 {
        transfer(&mut world.far, far, number, &[&payload, &payload]);
    }
    world.settle();
    world.near.release();
    alone_until(&mut world.near, world.landings);
    world.far.transport = None;
    world.until("it is known", |world| world.near.gone(near).is_some());
    world.until("the places are back", |world| world.near.queue.is_empty() && world.near.places_out == 0);
}

/// Polls one side until so many frames land there at once.
fn alone_until(side: &mut Side, landings: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut has_news = side.step();
    while side.landing.values().all(|landing| *landing < landings) {
        assert!(Instant::now() < deadline, "{landings} frames land at once\n{side:?}");
        // While heads come, nobody waits: a wait may look so often that a slow device is done meanwhile.
        if !has_news {
            side.wait(Duration::from_millis(1));
        }
        has_news = side.step();
    }
}

fn doorbell(world: &mut World) {
    let limit = Duration::from_secs(60);
    let bell = world.near.transport().doorbell();
    let began = Instant::now();
    bell.ring();
    world.near.wait(limit);
    thread::scope(|scope| {
        scope.spawn(|| bell.ring());
        world.near.wait(limit);
    });
    assert!(began.elapsed() < limit, "a ring ends a wait, before it and during it");
}

fn close(world: &mut World) {
    let (near, far) = world.connect();
    flood(world, near, 20, 1 << 20);
    world.until("all are taken", |world| world.near.queue.is_empty());
    world.near.transport().close(near);
    world.until("both are gone", |world| world.near.gone(near).is_some() && world.far.gone(far).is_some());
    assert_eq!(world.far.landed().count(), 21, "what was submitted before the close arrives");
    assert_eq!(parcels(world), 0);
}

fn work_for_the_gone(world: &mut World) {
    let (near, far) = world.connect();
    world.far.transport().close(far);
    world.until("both are gone", |world| world.near.gone(near).is_some() && world.far.gone(far).is_some());
    let frame = transfer(&mut world.near, near, 1, &[&bytes(100, 1)]);
    let places = world.far.places(&frame);
    world.far.land(far, places);
    assert_eq!(parcels(world), 2);
    world.until("they are back", |world| parcels(world) == 0);
    assert_eq!(sent(&world.near), 1, "only the hello was sent");
}

fn two_peers(world: &mut World) {
    let (stuck_near, stuck_far) = world.connect();
    let (near, far) = world.connect();
    world.far.held.insert(stuck_far);
    flood(world, stuck_near, 200, 64 * 1024);
    world.until("the head is held", |world| heads(&world.far) == 1);
    for number in 0..10 {
        let payload = bytes(100_000, number);
        let there = transfer(&mut world.near, near, 1000 + number, &[&payload]);
        world.until("it is there", |world| holds(&world.far, &there, &[&payload]));
        let back = transfer(&mut world.far, far, 2000 + number, &[&payload]);
        world.until("it is back", |world| holds(&world.near, &back, &[&payload]));
    }
    assert_eq!(world.far.landed().filter(|(peer, ..)| *peer == stuck_far).count(), 1, "only the hello");
}

fn changed_payload(world: &mut World) {
    if !world.near.checks_payload() {
        return;
    }
    let (near, far) = world.connect();
    let payload = bytes(100_000, 1);
    let mut frame = push(1, &[&payload]);
    frame.entries[0].checksum = 0x0bad_5eed;
    let chunk = world.near.lease(&payload);
    world.near.send(near, &frame, vec![outgoing(&chunk)]);
    world.until("both are gone", |world| world.near.gone(near).is_some() && world.far.gone(far).is_some());
    let reason = world.far.gone(far).unwrap_or_default();
    assert!(reason.contains("checksum of the payload"), "{reason}");
    assert_eq!(parcels(world), 0);
    let refusal = world.near.landed().find(|(_, frame, _)| frame.head.kind == Kind::Refused);
    let text = refusal.map(|(_, frame, _)| String::from_utf8_lossy(&frame.control).into_owned());
    assert!(text.is_some_and(|text| text.contains("checksum of the payload")), "the sender is told");
    let landed = world.far.landed().filter(|(_, frame, _)| frame.head.kind == Kind::Push);
    assert_eq!(landed.count(), 0, "a changed payload does not land");
}

fn nobody_there(world: &mut World) {
    let nobody = Address { port: 1, ..world.address.clone() };
    let peer = world.near.transport().connect(&nobody).expect("the address is of this transport");
    world.near.send(peer, &Frame::bare(Head::new(Kind::Hello)), Vec::new());
    world.until("it is known", |world| world.near.gone(peer).is_some());
    let reason = world.near.gone(peer).unwrap_or_default().to_owned();
    assert!(reason.contains(&nobody.to_string()), "{reason}");
    let scheme = if nobody.scheme == Scheme::Loopback { Scheme::Tcp } else { Scheme::Loopback };
    let foreign = Address { scheme, ..nobody };
    let error = world.near.transport().connect(&foreign).expect_err("another transport's address");
    assert!(error.to_string().contains(&foreign.to_string()), "{error}");
}

fn outgoing(chunk: &Arc<pserver_core::memory::Value>) -> Outgoing {
    Outgoing::Value(Arc::clone(chunk))
}

/// Submits a push of these payloads, from chunks.
fn transfer(side: &mut Side, peer: PeerId, number: u64, payloads: &[&[u8]]) -> Frame {
    let frame = push(number, payloads);
    let chunks = payloads.iter().filter(|payload| !payload.is_empty()).map(|payload| side.lease(payload));
    let body = chunks.map(|chunk| outgoing(&chunk)).collect();
    side.send(peer, &frame, body);
    frame
}

/// Submits many pushes of one chunk.
fn flood(world: &mut World, peer: PeerId, frames: u64, length: usize) {
    let payload = bytes(length, 1);
    let chunk = world.near.lease(&payload);
    let mut frame = push(0, &[&payload]);
    for number in 0..frames {
        frame.head.sequence.0 = number;
        world.near.send(peer, &frame, vec![outgoing(&chunk)]);
    }
}

fn holds(side: &Side, frame: &Frame, payloads: &[&[u8]]) -> bool {
    let landed = side.landed().find(|(_, landed, _)| *landed == frame);
    let expected = payloads.iter().filter(|payload| !payload.is_empty());
    landed.is_some_and(|(_, _, body)| {
        assert!(expected.eq(body.iter()), "the payloads are the ones that were sent");
        true
    })
}

fn sent(side: &Side) -> usize {
    side.seen.iter().filter(|seen| matches!(seen, Seen::Sent(..))).count()
}

fn heads(side: &Side) -> usize {
    side.seen.iter().filter(|seen| matches!(seen, Seen::Head(..))).count()
}

fn parcels(world: &World) -> usize {
    world.near.parcels_out + world.near.places_out + world.far.parcels_out + world.far.places_out
}

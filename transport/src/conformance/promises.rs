//! The promises of a transport, one function each.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pserver_core::ids::PeerId;
use pserver_core::limits::RECEIVES_MAX;
use pserver_core::memory::lend;
use pserver_core::port::{Incoming, Outgoing, Payloads};
use pserver_core::wire::{Address, Frame, Head, Kind, Scheme};

use super::rig::{ConformanceRig, RigSide, SeenEvent, bytes, hello, push};

type Promise = fn(&mut ConformanceRig);

pub(super) const ALL: [(&str, Promise); 21] = [
    ("a hello comes first, then frames in order", frames_in_order),
    ("a round trip moves the bytes", a_round_trip),
    ("sizes from nothing to 4 MiB are mixed freely", mixed_sizes),
    ("4096 entries fit one frame", many_entries),
    ("a gradient is said to be finite only if it is", finite_gradients),
    ("the caller's own memory is sent from and received into", loans),
    ("a discarded payload does not disturb the next", discarded),
    ("sent buffers come back when the receiver dies", receiver_dies),
    ("a receive buffer comes back when the sender dies", sender_dies),
    ("a peer that does not read makes submit leave work, and goes on later", back_pressure),
    ("a peer that does not read answers is not read, and goes on later", unread_answers),
    ("both may send much at once", both_send),
    ("a second head comes before the first payload, and frames are received in order", several_land),
    ("all receive buffers come back when the sender dies", several_die_here),
    ("all receive buffers come back when the accepting side dies", several_die_there),
    ("a doorbell wakes a wait", doorbell),
    ("what was submitted before a close arrives, then both are gone", close),
    ("work for a gone peer comes back", work_for_the_gone),
    ("a peer that holds a head does not hold the others", two_peers),
    ("a changed payload is refused by name, and buffers come back", changed_payload),
    ("an unreachable address is a reason, and a foreign address an error", unreachable_address),
];

fn frames_in_order(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    for number in 0..500 {
        rig.near.send(near, &push(number, &[]), Payloads::new());
    }
    rig.until("500 frames land", |rig| rig.far.landed().count() == 501);
    let numbers: Vec<_> = rig.far.landed().map(|(_, frame, _)| frame.head.sequence.0).skip(1).collect();
    assert_eq!(numbers, (0..500).collect::<Vec<_>>());
    assert_eq!(rig.far.landed().next().map(|(peer, frame, _)| (peer, frame.clone())), Some((far, hello(0))));
    let first = rig.far.seen.iter().take(2).cloned().collect::<Vec<_>>();
    assert_eq!(first, [SeenEvent::Accepted(far), SeenEvent::Landed(far, hello(0), Vec::new())]);
    rig.until("500 frames are sent", |rig| sent(&rig.near) == 501);
    assert!(matches!(rig.near.seen[0], SeenEvent::Connected(peer) if peer == near));
}

/// Pushes of each size: a finite one, and one for each position of a non-finite element, next to other payloads.
fn finite_gradients(rig: &mut ConformanceRig) {
    let (near, _) = rig.connect();
    let mut pushes = 0;
    let mut finite = 0;
    for elements in [1_usize, 3, 1024, 2049, 20_000, 300_001] {
        let good: Vec<u8> = (0..elements).flat_map(|at| (at as f32 - 7.5).to_le_bytes()).collect();
        let places = [0, elements / 2, elements - 1].map(Some);
        for place in std::iter::once(None).chain(places) {
            let mut payload = good.clone();
            if let Some(place) = place {
                payload[4 * place..4 * place + 4].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
            }
            let (first, last) = if pushes % 2 == 0 { (&payload[..], &good[..]) } else { (&good[..], &payload[..]) };
            transfer(&mut rig.near, near, pushes, &[first, &[], last]);
            pushes += 1;
            finite += usize::from(place.is_none());
        }
    }
    rig.until("all land", |rig| rig.far.landed().count() as u64 == pushes + 1);
    assert_eq!(rig.far.finite, if rig.looks { finite } else { 0 });
}

fn a_round_trip(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    for (number, length) in [(1, 4 * 1024), (2, 1024 * 1024), (3, 1)] {
        let payload = bytes(length, number);
        let there = transfer(&mut rig.near, near, number, &[&payload]);
        rig.until("it is there", |rig| holds(&rig.far, &there, &[&payload]));
        let back = transfer(&mut rig.far, far, number + 100, &[&payload]);
        rig.until("it is back", |rig| holds(&rig.near, &back, &[&payload]));
    }
    rig.until("the parcels are back", |rig| parcels(rig) == 0);
}

fn mixed_sizes(rig: &mut ConformanceRig) {
    let (near, _) = rig.connect();
    let sizes = [0, 1, 63, 64, 4095, 4096, 16384, 16385, 65535, 65536, 65537, 1 << 20, (4 << 20) - 1, 4 << 20];
    let payloads: Vec<_> = (0..).zip(sizes).map(|(seed, size)| bytes(size, seed)).collect();
    let mut expected = Vec::new();
    for number in 0..42 {
        let index = usize::try_from(number).expect("small");
        let (one, two, three) = (index % 14, index * 5 % 14, index * 3 % 14);
        let body = [one, two, three].map(|size| payloads[size].as_slice());
        expected.push(transfer(&mut rig.near, near, number, &body));
    }
    rig.until("all land", |rig| rig.far.landed().count() == 43);
    for (number, (_, frame, body)) in rig.far.landed().skip(1).enumerate() {
        assert_eq!(*frame, expected[number]);
        for (found, entry) in body.iter().zip(frame.entries.iter().filter(|entry| entry.bytes > 0)) {
            let payload = payloads.iter().find(|payload| payload.len() == entry.bytes as usize);
            assert!(Some(found) == payload, "frame {number}: payload of {} bytes", entry.bytes);
        }
    }
    rig.until("the parcels are back", |rig| parcels(rig) == 0);
}

fn many_entries(rig: &mut ConformanceRig) {
    let (near, _) = rig.connect();
    let payloads: Vec<_> = (0..4096).map(|seed| bytes(if seed % 3 == 0 { 0 } else { 60 }, seed)).collect();
    let payloads: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
    let frames = [1, 2].map(|number| transfer(&mut rig.near, near, number, &payloads));
    for frame in frames {
        rig.until("it is there", |rig| holds(&rig.far, &frame, &payloads));
    }
}

fn loans(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    let (gradient, other) = (bytes(3 << 20, 1), bytes(100, 2));
    let (mut large, mut small) = (vec![0; 3 << 20], vec![0; 100]);
    rig.far.held.insert(far);
    lend(|book| {
        let body = vec![Outgoing::Loan(book.read(&gradient)), Outgoing::Loan(book.read(&other))];
        rig.near.send(near, &push(1, &[&gradient, &other]), body.into());
        rig.until("the head is there", |rig| heads(&rig.far) == 1);
        let places = vec![Incoming::Loan(book.write(&mut large)), Incoming::Loan(book.write(&mut small))];
        rig.far.land(far, places.into());
        rig.until("the loans are back", |rig| parcels(rig) == 0 && rig.far.landed().count() == 2);
    });
    assert!(large == gradient && small == other, "the payloads are in the caller's memory");
}

fn discarded(rig: &mut ConformanceRig) {
    let (near, _) = rig.connect();
    let payload = bytes(300_000, 1);
    rig.far.discards = true;
    transfer(&mut rig.near, near, 1, &[&payload, &[], &payload[..10]]);
    rig.until("it is forgotten", |rig| rig.far.landed().count() == 2);
    rig.far.discards = false;
    let frame = transfer(&mut rig.near, near, 2, &[&payload]);
    rig.until("the next is there", |rig| holds(&rig.far, &frame, &[&payload]));
}

fn receiver_dies(rig: &mut ConformanceRig) {
    let (near, _) = rig.connect();
    flood(rig, near, 40, 1 << 20);
    rig.until("some have landed", |rig| rig.far.landed().count() > 3);
    rig.far.transport = None;
    rig.until("it is known", |rig| rig.near.gone(near).is_some());
    rig.until("the parcels are back", |rig| rig.near.queue.is_empty() && rig.near.sends_out == 0);
}

fn sender_dies(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    flood(rig, near, 40, 4 << 20);
    rig.until("some have landed", |rig| rig.far.landed().count() > 3 && rig.far.receives_out > 0);
    near_dies(rig, far);
}

/// The near side dies; the far side notices, and has its buffers back.
fn near_dies(rig: &mut ConformanceRig, far: PeerId) {
    rig.near.transport = None;
    rig.until("it is known", |rig| rig.far.gone(far).is_some());
    rig.until("the places are back", |rig| rig.far.queue.is_empty() && rig.far.receives_out == 0);
}

fn back_pressure(rig: &mut ConformanceRig) {
    let (near, _) = rig.connect();
    rig.far.holds_all = true;
    flood(rig, near, 1000, 64 * 1024);
    rig.until("a head is reported", |rig| heads(&rig.far) == 1);
    rig.settle();
    assert!(!rig.near.queue.is_empty(), "a peer that does not read takes 64 MB");
    assert_eq!(heads(&rig.far), 1, "one head is reported, and nothing is read before its places come");
    rig.far.release();
    rig.until("all land", |rig| rig.far.landed().count() == 1001);
    let numbers = rig.far.landed().map(|(_, frame, _)| frame.head.sequence.0).skip(1);
    assert!(numbers.eq(0..1000), "in order");
    rig.until("the parcels are back", |rig| parcels(rig) == 0);
}

/// A server answers each request with 64 KiB to a client that does not read.
fn unread_answers(rig: &mut ConformanceRig) {
    const ASKED: u64 = 2000;
    /// Unread answers at most: the frames of a queue, and those in the system's buffers or in a ring of references.
    const MOST: u64 = 1000;
    let (near, far) = rig.connect();
    rig.near.discards = true;
    let value = rig.far.lease(&bytes(64 * 1024, 1));
    let (request, answer) = (push(0, &[&[][..]; 64]), push(0, &[value.bytes()]));
    for _ in 0..ASKED {
        rig.near.send(near, &request, Payloads::new());
    }
    let mut answered = 0;
    let mut answer_all = |far_side: &mut RigSide| {
        let asked = far_side.landed().filter(|(_, frame, _)| frame.head.kind == Kind::Push).count() as u64;
        for _ in answered..asked {
            far_side.send(far, &answer, vec![Outgoing::Value(Arc::clone(&value))].into());
        }
        answered = asked;
        asked
    };
    let mut quiet = 0;
    while quiet < 50 {
        // The client sends, and reads nothing.
        rig.near.transport.as_mut().expect("it lives").submit(&mut rig.near.queue).expect("the device works");
        quiet = if rig.far.step() { 0 } else { quiet + 1 };
        let asked = answer_all(&mut rig.far);
        assert!(asked <= MOST, "{asked} requests were read of a peer that reads no answer; at most {MOST}");
        rig.far.wait(Duration::from_millis(1));
    }
    rig.until("it is read again, and has every answer", |rig| {
        answer_all(&mut rig.far);
        rig.near.seen.retain(|seen| !matches!(seen, SeenEvent::Head(..)));
        rig.near.landed().count() as u64 == ASKED
    });
    rig.until("the parcels are back", |rig| parcels(rig) == 0);
}

fn both_send(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    flood(rig, near, 200, 256 * 1024);
    let payload = bytes(256 * 1024, 9);
    let chunk = rig.far.lease(&payload);
    for number in 0..200 {
        rig.far.send(far, &push(number, &[&payload]), vec![outgoing(&chunk)].into());
    }
    let all = |side: &RigSide, count| side.landed().count() == count;
    rig.until("all land", |rig| all(&rig.far, 201) && all(&rig.near, 200));
}

/// Long and short payloads, and frames without one between them; both sides queue all of it before the first receive.
fn several_land(rig: &mut ConformanceRig) {
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
    let (near, far) = rig.connect();
    (rig.near.holds_all, rig.far.holds_all) = (true, true);
    let mut expected = Vec::new();
    for (number, sizes) in (0..).zip(SIZES.iter().cycle().take(27)) {
        let payloads: Vec<_> = (number..).zip(*sizes).map(|(seed, size)| bytes(*size, seed)).collect();
        let slices: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
        let there = transfer(&mut rig.near, near, number, &slices);
        assert_eq!(transfer(&mut rig.far, far, number, &slices), there);
        let filled = payloads.into_iter().filter(|payload| !payload.is_empty());
        expected.push((there, filled.collect::<Vec<_>>()));
    }
    rig.settle();
    rig.near.release();
    rig.far.release();
    rig.until("all land", |rig| rig.far.landed().count() == 28 && rig.near.landed().count() == 27);
    for (side, hellos) in [(&rig.near, 0), (&rig.far, 1)] {
        let landed = side.landed().skip(hellos).map(|(_, frame, body)| (frame.clone(), body.clone()));
        assert!(landed.eq(expected.iter().cloned()), "all of it, in order");
    }
    rig.until("the parcels are back", |rig| parcels(rig) == 0);
    for side in [&mut rig.near, &mut rig.far] {
        let (most, may) = (side.most_landing, side.transport().capabilities().receives);
        assert!(most <= may && may <= RECEIVES_MAX, "{most} landed at once, and {may} may");
        assert!(rig.landings <= most, "{most} landed at once, expected {}", rig.landings);
    }
}

fn several_die_here(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    rig.far.holds_all = true;
    flood(rig, near, 12, 256 * 1024);
    rig.settle();
    rig.far.release();
    alone_until(&mut rig.far, rig.landings);
    near_dies(rig, far);
}

fn several_die_there(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    rig.near.holds_all = true;
    let payload = bytes(256 * 1024, 1);
    for number in 0..12 {
        transfer(&mut rig.far, far, number, &[&payload, &payload]);
    }
    rig.settle();
    rig.near.release();
    alone_until(&mut rig.near, rig.landings);
    rig.far.transport = None;
    rig.until("it is known", |rig| rig.near.gone(near).is_some());
    rig.until("the places are back", |rig| rig.near.queue.is_empty() && rig.near.receives_out == 0);
}

/// Polls one side until so many receives are posted at once.
fn alone_until(side: &mut RigSide, landings: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut has_news = side.step();
    while side.landing.values().all(|landing| *landing < landings) {
        assert!(Instant::now() < deadline, "{landings} frames land at once\n{side:?}");
        // The side does not wait while heads arrive: a wait may poll so often that a slow device completes meanwhile.
        if !has_news {
            side.wait(Duration::from_millis(1));
        }
        has_news = side.step();
    }
}

fn doorbell(rig: &mut ConformanceRig) {
    let limit = Duration::from_secs(60);
    let bell = rig.near.transport().doorbell();
    let began = Instant::now();
    bell.ring();
    rig.near.wait(limit);
    thread::scope(|scope| {
        scope.spawn(|| bell.ring());
        rig.near.wait(limit);
    });
    assert!(began.elapsed() < limit, "a ring ends a wait, before it and during it");
}

fn close(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    flood(rig, near, 20, 1 << 20);
    rig.until("all are taken", |rig| rig.near.queue.is_empty());
    rig.near.transport().close(near);
    rig.until("both are gone", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
    assert_eq!(rig.far.landed().count(), 21, "what was submitted before the close arrives");
    assert_eq!(parcels(rig), 0);
}

fn work_for_the_gone(rig: &mut ConformanceRig) {
    let (near, far) = rig.connect();
    rig.far.transport().close(far);
    rig.until("both are gone", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
    let frame = transfer(&mut rig.near, near, 1, &[&bytes(100, 1)]);
    let places = rig.far.places(&frame);
    rig.far.land(far, places);
    assert_eq!(parcels(rig), 2);
    rig.until("they are back", |rig| parcels(rig) == 0);
    assert_eq!(sent(&rig.near), 1, "only the hello was sent");
}

fn two_peers(rig: &mut ConformanceRig) {
    let (stuck_near, stuck_far) = rig.connect();
    let (near, far) = rig.connect();
    rig.far.held.insert(stuck_far);
    flood(rig, stuck_near, 200, 64 * 1024);
    rig.until("the head is held", |rig| heads(&rig.far) == 1);
    for number in 0..10 {
        let payload = bytes(100_000, number);
        let there = transfer(&mut rig.near, near, 1000 + number, &[&payload]);
        rig.until("it is there", |rig| holds(&rig.far, &there, &[&payload]));
        let back = transfer(&mut rig.far, far, 2000 + number, &[&payload]);
        rig.until("it is back", |rig| holds(&rig.near, &back, &[&payload]));
    }
    assert_eq!(rig.far.landed().filter(|(peer, ..)| *peer == stuck_far).count(), 1, "only the hello");
}

fn changed_payload(rig: &mut ConformanceRig) {
    if !rig.near.checks_payload() {
        return;
    }
    let (near, far) = rig.connect();
    let payload = bytes(100_000, 1);
    let mut frame = push(1, &[&payload]);
    frame.entries[0].checksum = 0x0bad_5eed;
    let chunk = rig.near.lease(&payload);
    rig.near.send(near, &frame, vec![outgoing(&chunk)].into());
    rig.until("both are gone", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
    let reason = rig.far.gone(far).unwrap_or_default();
    assert!(reason.contains("checksum of the payload"), "{reason}");
    assert_eq!(parcels(rig), 0);
    let refusal = rig.near.landed().find(|(_, frame, _)| frame.head.kind == Kind::Refused);
    let text = refusal.map(|(_, frame, _)| String::from_utf8_lossy(&frame.control).into_owned());
    assert!(text.is_some_and(|text| text.contains("checksum of the payload")), "the sender is told");
    let landed = rig.far.landed().filter(|(_, frame, _)| frame.head.kind == Kind::Push);
    assert_eq!(landed.count(), 0, "a changed payload does not land");
}

fn unreachable_address(rig: &mut ConformanceRig) {
    let nobody = Address { port: 1, ..rig.address.clone() };
    let peer = rig.near.transport().connect(&nobody).expect("the address is of this transport");
    rig.near.send(peer, &Frame::bare(Head::new(Kind::Hello)), Payloads::new());
    rig.until("it is known", |rig| rig.near.gone(peer).is_some());
    let reason = rig.near.gone(peer).unwrap_or_default().to_owned();
    assert!(reason.contains(&nobody.to_string()), "{reason}");
    let scheme = if nobody.scheme == Scheme::Loopback { Scheme::Tcp } else { Scheme::Loopback };
    let foreign = Address { scheme, ..nobody };
    let error = rig.near.transport().connect(&foreign).expect_err("another transport's address");
    assert!(error.to_string().contains(&foreign.to_string()), "{error}");
}

fn outgoing(chunk: &Arc<pserver_core::memory::Value>) -> Outgoing {
    Outgoing::Value(Arc::clone(chunk))
}

/// Submits a push of these payloads.
fn transfer(side: &mut RigSide, peer: PeerId, number: u64, payloads: &[&[u8]]) -> Frame {
    let frame = push(number, payloads);
    let chunks = payloads.iter().filter(|payload| !payload.is_empty()).map(|payload| side.lease(payload));
    let body = chunks.map(|chunk| outgoing(&chunk)).collect();
    side.send(peer, &frame, body);
    frame
}

/// Submits many pushes of one payload.
fn flood(rig: &mut ConformanceRig, peer: PeerId, frames: u64, length: usize) {
    let payload = bytes(length, 1);
    let chunk = rig.near.lease(&payload);
    let mut frame = push(0, &[&payload]);
    for number in 0..frames {
        frame.head.sequence.0 = number;
        rig.near.send(peer, &frame, vec![outgoing(&chunk)].into());
    }
}

fn holds(side: &RigSide, frame: &Frame, payloads: &[&[u8]]) -> bool {
    let landed = side.landed().find(|(_, landed, _)| *landed == frame);
    let expected = payloads.iter().filter(|payload| !payload.is_empty());
    landed.is_some_and(|(_, _, body)| {
        assert!(expected.eq(body.iter()), "the payloads are the ones that were sent");
        true
    })
}

fn sent(side: &RigSide) -> usize {
    side.seen.iter().filter(|seen| matches!(seen, SeenEvent::Sent(..))).count()
}

fn heads(side: &RigSide) -> usize {
    side.seen.iter().filter(|seen| matches!(seen, SeenEvent::Head(..))).count()
}

fn parcels(rig: &ConformanceRig) -> usize {
    rig.near.sends_out + rig.near.receives_out + rig.far.sends_out + rig.far.receives_out
}

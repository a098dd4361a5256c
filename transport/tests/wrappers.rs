//! Tests of the wrappers of transports.

use std::collections::VecDeque;

use pserver_core::ids::Ticket;
use pserver_core::limits::RECEIVES_MAX;
use pserver_core::port::{Event, Payloads, Submit, Transport};
use pserver_core::wire::{Frame, Head, Kind};
use pserver_transport::conformance::{self, TransportPair};
use pserver_transport::fault::{FaultPlan, FaultyTransport};
use pserver_transport::loopback;
use pserver_transport::trace::Trace;

fn bare(kind: Kind) -> Frame {
    Frame::bare(Head::new(kind))
}

/// The events, as letters, of 30 frames sent through a plan: `s` sent, `g` gone, `c` connected.
fn story(plan: FaultPlan, seed: u64) -> (String, usize) {
    let (near, mut far, address) = loopback::pair();
    let mut near = FaultyTransport::new(Box::new(near), plan, seed);
    let peer = near.connect(&address).expect("an address of this transport");
    let frames = (0..30).map(|ticket| Submit::Send {
        peer,
        ticket: Ticket(ticket),
        frame: bare(Kind::Leave),
        body: Payloads::new(),
    });
    let mut queue: VecDeque<_> = frames.collect();
    let (mut story, mut landed) = (String::new(), 0);
    for _ in 0..200 {
        let (mut events, mut others) = (Vec::new(), Vec::new());
        near.submit(&mut queue).expect("the device works");
        near.poll(&mut events).expect("the device works");
        far.poll(&mut others).expect("the device works");
        landed += others.iter().filter(|event| matches!(event, Event::Received { .. })).count();
        for event in &events {
            match event {
                Event::Sent { .. } => story.push('s'),
                Event::Gone { unsent, .. } => story.push_str(&format!("g{}", unsent.len())),
                Event::Connected { .. } => story.push('c'),
                _ => {}
            }
        }
    }
    assert!(queue.is_empty(), "everything is taken in the end");
    (story, landed)
}

#[test]
fn a_fault_without_a_plan_keeps_every_promise() {
    conformance::check(|| {
        let (near, far, address) = loopback::pair();
        let near = FaultyTransport::new(Box::new(near), FaultPlan::default(), 1);
        TransportPair::new(Box::new(near), Box::new(far), address).landing(RECEIVES_MAX)
    });
}

#[test]
fn a_trace_keeps_every_promise() {
    conformance::check(|| {
        let (near, far, address) = loopback::pair();
        let (near, far) = (Trace::new(Box::new(near)), Trace::new(Box::new(far)));
        TransportPair::new(Box::new(near), Box::new(far), address).landing(RECEIVES_MAX)
    });
}

#[test]
fn late_frames_keep_every_promise() {
    let plan = FaultPlan { delay_frame: 0.3, delay_polls: 3, ..FaultPlan::default() };
    conformance::check(|| {
        let (near, far, address) = loopback::pair();
        let far = FaultyTransport::new(Box::new(far), plan, 3);
        TransportPair::new(Box::new(near), Box::new(far), address).landing(RECEIVES_MAX)
    });
}

#[test]
fn a_seed_gives_the_same_events_twice() {
    let plan = FaultPlan {
        cut_before_frame: 0.03,
        cut_after_frame: 0.03,
        delay_frame: 0.2,
        delay_polls: 2,
        refuse_connect: 0.2,
        change_checksum: 0.0,
    };
    let stories: Vec<_> = (0..50).map(|seed| story(plan, seed)).collect();
    assert_eq!(stories, (0..50).map(|seed| story(plan, seed)).collect::<Vec<_>>());
    assert!(stories.iter().any(|story| *story != stories[0]), "seeds differ");
}

#[test]
fn each_fault_does_what_its_name_says() {
    let none = FaultPlan::default();
    let check = |plan: FaultPlan, expected: &str, landed: usize| {
        assert_eq!(story(plan, 7), (expected.to_owned(), landed), "{plan:?}");
    };
    check(none, &format!("c{}", "s".repeat(30)), 30);
    check(FaultPlan { refuse_connect: 1.0, ..none }, &format!("g0{}", "g1".repeat(30)), 0);
    check(FaultPlan { cut_before_frame: 1.0, ..none }, &format!("{}cg0", "g1".repeat(30)), 0);
    check(FaultPlan { cut_after_frame: 1.0, ..none }, &format!("{}csg0", "g1".repeat(29)), 1);
    check(FaultPlan { delay_frame: 1.0, delay_polls: 5, ..none }, &format!("c{}", "s".repeat(30)), 30);
}

#[test]
fn a_trace_counts_submitted_and_received_frames() {
    let (near, far, address) = loopback::pair();
    let (mut near, mut far) = (Trace::new(Box::new(near)), Trace::new(Box::new(far)));
    let peer = near.connect(&address).expect("an address of this transport");
    let frame = |kind| Submit::Send { peer, ticket: Ticket(1), frame: bare(kind), body: Payloads::new() };
    let mut queue = VecDeque::from([frame(Kind::Hello)]);
    queue.extend((0..99).map(|_| frame(Kind::Pull)));
    near.submit(&mut queue).expect("the device works");
    let (out, inward) = (near.counters(), far.counters());
    assert_eq!(out.out.frames() + u64::try_from(queue.len()).expect("small"), 100, "what is left is not counted");
    for _ in 0..20 {
        near.submit(&mut queue).expect("the device works");
        far.poll(&mut Vec::new()).expect("the device works");
    }
    assert_eq!((out.out.frames_of(Kind::Hello), out.out.frames_of(Kind::Pull)), (1, 99));
    assert_eq!((inward.inward.frames_of(Kind::Hello), inward.inward.frames_of(Kind::Pull)), (1, 99));
}

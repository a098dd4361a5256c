//! What becomes of connections that have a choice, when verbs are there and do not do.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prost::Message;
use pserver_core::ids::PeerId;
use pserver_core::port::Outgoing;
use pserver_core::wire::{ErrorMessage, Kind};

use super::stage::{far_away, transports};
use crate::conformance::Ends;
use crate::conformance::world::{World, bytes, hello, push};
use crate::network::{NetworkOptions, Poll};
use crate::verbs::plain::Plain;
use crate::verbs::rough::{Mischief, Plot, Rough};
use crate::verbs::{Counters, Device, Devices};

/// A trainer and a server of two machines, which choose between verbs and TCP.
struct Choice {
    device: Rough,
    world: World,
    counters: [Arc<Counters>; 2],
}

impl Choice {
    fn new() -> Self {
        let device = Rough::new(Arc::new(Plain::new()));
        let devices = Devices::This(Device(Arc::new(device.clone())));
        let options = NetworkOptions { devices, poll: Poll::Block, ..NetworkOptions::default() };
        let (near, far, address, keep) = transports("auto://127.0.0.1:0", &options);
        let counters = [near.verbs(), far.verbs()];
        let address = far_away(&address);
        Self { device, world: World::new(Ends { keep, ..Ends::new(Box::new(near), Box::new(far), address) }), counters }
    }

    /// Connections over verbs, as either side counts them.
    fn over_verbs(&self) -> [u64; 2] {
        self.counters.each_ref().map(|side| side.connections.load(Relaxed))
    }

    /// Connects and sends until a frame with a payload is there, as a trainer does; how often it connected.
    fn deliver(&mut self) -> usize {
        let payload = bytes(100_000, 1);
        let landed = pushes(&self.world);
        for attempt in 1..10 {
            let address = self.world.address.clone();
            let peer = self.world.near.transport().connect(&address).expect("an address of this transport");
            self.world.near.send(peer, &hello(0), Vec::new());
            let chunk = self.world.near.lease(&payload);
            self.world.near.send(peer, &push(1, &[&payload]), vec![Outgoing::Value(chunk)]);
            let is_over = |world: &World, peer: PeerId| world.near.gone(peer).is_some();
            self.world.until("it is there or over", |world| is_over(world, peer) || pushes(world) > landed);
            if !is_over(&self.world, peer) {
                return attempt;
            }
        }
        panic!("nine connections, and none carries anything");
    }
}

fn pushes(world: &World) -> usize {
    world.far.landed().filter(|(_, _, body)| !body.is_empty()).count()
}

#[test]
fn verbs_that_do_not_do_become_tcp() {
    let check = |mischief: Mischief, is_open: bool, attempts: usize| {
        let mut choice = Choice::new();
        choice.device.plot(Some(Plot { mischief, is_open, after: 0 }));
        assert_eq!(choice.deliver(), attempts, "{mischief:?}, {is_open}");
        choice.device.plot(None);
        let before = choice.over_verbs();
        assert_eq!(choice.deliver(), 1);
        assert_eq!(choice.over_verbs(), before, "{mischief:?}, {is_open}: verbs are not tried again at once");
    };
    check(Mischief::Silent, true, 2);
    check(Mischief::Silent, false, 2);
    check(Mischief::Unmet, true, 2);
    check(Mischief::RegistersNothing, true, 2);
    check(Mischief::RegistersNothing, false, 1);
    check(Mischief::Deaf, true, 2);
    check(Mischief::Deaf, false, 2);
}

/// Its device refuses the arena with the first payload, when the connection is there.
#[test]
fn a_server_that_may_register_nothing_says_so_before_it_goes() {
    let mut choice = Choice::new();
    let address = choice.world.address.clone();
    let peer = choice.world.near.transport().connect(&address).expect("an address of this transport");
    choice.world.near.send(peer, &hello(0), Vec::new());
    choice.world.until("it is accepted", |world| !world.far.accepted().is_empty());
    choice.world.settle();
    choice.device.plot(Some(Plot { mischief: Mischief::RegistersNothing, is_open: false, after: 0 }));
    let payload = bytes(100_000, 1);
    let chunk = choice.world.near.lease(&payload);
    choice.world.near.send(peer, &push(1, &[&payload]), vec![Outgoing::Value(chunk)]);
    choice.world.until("it is over", |world| world.near.gone(peer).is_some());
    let refused = choice.world.near.landed().find(|(_, frame, _)| frame.head.kind == Kind::Refused);
    let (_, frame, _) = refused.expect("the trainer is told");
    let message = ErrorMessage::decode(frame.control.as_slice()).expect("a refusal holds an error");
    assert!(message.text.contains("registered"), "{}", message.text);
    choice.device.plot(None);
    assert_eq!(choice.deliver(), 1);
    assert_eq!(choice.over_verbs(), [1, 1], "and for a while they do without");
}

#[test]
fn verbs_that_did_are_tried_again() {
    let mut choice = Choice::new();
    assert_eq!(choice.deliver(), 1);
    assert_eq!(choice.over_verbs(), [1, 1]);
    // The server answers, and the connection breaks afterwards.
    let peer = *choice.world.far.accepted().first().expect("it was accepted");
    let known = choice.world.near.landed().count();
    choice.world.far.send(peer, &push(7, &[]), Vec::new());
    choice.world.until("an answer is there", |world| world.near.landed().count() > known);
    choice.device.plot(Some(Plot { mischief: Mischief::Fatal, is_open: true, after: 0 }));
    choice.world.until("an idle connection learns of it", |world| world.far.gone(peer).is_some());
    choice.device.plot(None);
    assert_eq!(choice.deliver(), 1);
    assert_eq!(choice.over_verbs(), [2, 2]);
}

/// Somebody whose pair takes the system long keeps a thread of the listener's, and neither the lane nor others.
#[test]
fn a_lane_does_not_wait_for_a_pair_that_takes_long() {
    let mut choice = Choice::new();
    assert_eq!(choice.deliver(), 1);
    let honest = *choice.world.far.accepted().first().expect("it was accepted");
    choice.device.plot(Some(Plot { mischief: Mischief::Stuck, is_open: false, after: 0 }));
    let address = choice.world.address.clone();
    let slow = choice.world.near.transport().connect(&address).expect("an address of this transport");
    choice.world.near.send(slow, &hello(0), Vec::new());
    choice.world.settle();
    assert_eq!(choice.world.far.accepted().len(), 1, "the lane has not heard of it");
    let known = choice.world.near.landed().count();
    choice.world.far.send(honest, &push(7, &[]), Vec::new());
    choice.world.until("the others go on", |world| world.near.landed().count() > known);
    choice.device.plot(None);
    choice.world.until("it is its turn", |world| world.far.accepted().len() == 2);
}

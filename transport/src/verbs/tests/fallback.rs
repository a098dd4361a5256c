//! Tests of connections that may choose, when verbs are present and fail.

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use prost::Message;
use pserver_core::ids::PeerId;
use pserver_core::port::{Outgoing, Payloads};
use pserver_core::wire::{ErrorMessage, Kind};

use super::failures::outstanding;
use super::fixtures::{far_away, transports};
use crate::conformance::TransportPair;
use crate::conformance::rig::{ConformanceRig, RigSide, SeenEvent, bytes, hello, push};
use crate::network::{NetworkOptions, PollPolicy};
use crate::verbs::faulty_device::{DeviceFault, FaultInjection, FaultyDevice};
use crate::verbs::software_device::SoftwareDevice;
use crate::verbs::{VerbsCounters, VerbsDevice, VerbsDevices};

/// More connections without a hello than a listener keeps.
const SILENT: usize = 300;

/// A trainer and a server on two machines, which choose between verbs and TCP.
struct FallbackRig {
    device: FaultyDevice,
    rig: ConformanceRig,
    counters: [Arc<VerbsCounters>; 2],
    /// The server's own address.
    server: (String, u16),
}

impl FallbackRig {
    fn new() -> Self {
        let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
        let devices = VerbsDevices::This(VerbsDevice(Arc::new(device.clone())));
        let options = NetworkOptions { devices, poll: PollPolicy::Block, ..NetworkOptions::default() };
        let (near, far, address, keep) = transports("auto://127.0.0.1:0", &options);
        let counters = [near.verbs(), far.verbs()];
        let server = (address.host.clone(), address.port);
        let address = far_away(&address);
        Self {
            device,
            rig: ConformanceRig::new(TransportPair {
                keep,
                ..TransportPair::new(Box::new(near), Box::new(far), address)
            }),
            counters,
            server,
        }
    }

    /// Connections over verbs, as each side counts them.
    fn over_verbs(&self) -> [u64; 2] {
        self.counters.each_ref().map(|side| side.connections.load(Relaxed))
    }

    /// Connects and sends, as a trainer does, until a frame with a payload has arrived; the number of attempts.
    fn deliver(&mut self) -> usize {
        let payload = bytes(100_000, 1);
        let landed = pushes(&self.rig);
        for attempt in 1..10 {
            let address = self.rig.address.clone();
            let peer = self.rig.near.transport().connect(&address).expect("an address of this transport");
            self.rig.near.send(peer, &hello(0), Payloads::new());
            let chunk = self.rig.near.lease(&payload);
            self.rig.near.send(peer, &push(1, &[&payload]), vec![Outgoing::Value(chunk)].into());
            let is_over = |rig: &ConformanceRig, peer: PeerId| rig.near.gone(peer).is_some();
            self.rig.until("it is there or over", |rig| is_over(rig, peer) || pushes(rig) > landed);
            if !is_over(&self.rig, peer) {
                return attempt;
            }
        }
        panic!("nine connections, and none carries anything");
    }
}

fn pushes(rig: &ConformanceRig) -> usize {
    rig.far.landed().filter(|(_, _, body)| !body.is_empty()).count()
}

#[test]
fn a_connection_falls_back_to_tcp_when_verbs_fail() {
    let check = |fault: DeviceFault, is_open: bool, attempts: usize| {
        let mut choice = FallbackRig::new();
        choice.device.inject(Some(FaultInjection { fault, is_open, after: 0 }));
        assert_eq!(choice.deliver(), attempts, "{fault:?}, {is_open}");
        choice.device.inject(None);
        let before = choice.over_verbs();
        assert_eq!(choice.deliver(), 1);
        assert_eq!(choice.over_verbs(), before, "{fault:?}, {is_open}: verbs are not tried again at once");
    };
    check(DeviceFault::NoAnswer, true, 2);
    check(DeviceFault::NoAnswer, false, 2);
    check(DeviceFault::ConnectFails, true, 2);
    check(DeviceFault::RegistrationFails, true, 2);
    check(DeviceFault::RegistrationFails, false, 1);
    check(DeviceFault::PollFails, true, 2);
    check(DeviceFault::PollFails, false, 2);
}

/// The server's device refuses the arena with the first payload, after the connection is made.
#[test]
fn a_server_that_cannot_register_memory_sends_the_reason_before_it_closes() {
    let mut choice = FallbackRig::new();
    let address = choice.rig.address.clone();
    let peer = choice.rig.near.transport().connect(&address).expect("an address of this transport");
    choice.rig.near.send(peer, &hello(0), Payloads::new());
    choice.rig.until("it is accepted", |rig| !rig.far.accepted().is_empty());
    choice.rig.settle();
    choice.device.inject(Some(FaultInjection { fault: DeviceFault::RegistrationFails, is_open: false, after: 0 }));
    let payload = bytes(100_000, 1);
    let chunk = choice.rig.near.lease(&payload);
    choice.rig.near.send(peer, &push(1, &[&payload]), vec![Outgoing::Value(chunk)].into());
    choice.rig.until("it is over", |rig| rig.near.gone(peer).is_some());
    let refused = choice.rig.near.landed().find(|(_, frame, _)| frame.head.kind == Kind::Refused);
    let (_, frame, _) = refused.expect("the trainer is told");
    let message = ErrorMessage::decode(frame.control.as_slice()).expect("a refusal holds an error");
    assert!(message.text.contains("registered"), "{}", message.text);
    choice.device.inject(None);
    assert_eq!(choice.deliver(), 1);
    assert_eq!(choice.over_verbs(), [1, 1], "and for a while they do without");
}

#[test]
fn verbs_that_worked_before_are_tried_again() {
    let mut choice = FallbackRig::new();
    assert_eq!(choice.deliver(), 1);
    assert_eq!(choice.over_verbs(), [1, 1]);
    // The connection breaks after the server has answered.
    let peer = *choice.rig.far.accepted().first().expect("it was accepted");
    let known = choice.rig.near.landed().count();
    choice.rig.far.send(peer, &push(7, &[]), Payloads::new());
    choice.rig.until("an answer is there", |rig| rig.near.landed().count() > known);
    choice.device.inject(Some(FaultInjection { fault: DeviceFault::Fatal, is_open: true, after: 0 }));
    choice.rig.until("an idle connection learns of it", |rig| rig.far.gone(peer).is_some());
    choice.device.inject(None);
    assert_eq!(choice.deliver(), 1);
    assert_eq!(choice.over_verbs(), [2, 2]);
}

/// Sends frames both ways over the connection of these peers until `is_enough`; every one arrives, in order.
fn talk(choice: &mut FallbackRig, (near, far): (PeerId, PeerId), is_enough: impl Fn(&FallbackRig) -> bool) {
    let numbers = |rig: &RigSide, first: usize| -> Vec<(u64, Vec<u8>)> {
        let landed = rig.landed().skip(first).filter(|(_, frame, _)| frame.head.kind == Kind::Push);
        landed.map(|(_, frame, body)| (frame.head.sequence.0, body.concat())).collect()
    };
    let first = (choice.rig.near.landed().count(), choice.rig.far.landed().count());
    let mut sent = Vec::new();
    let until = Instant::now() + Duration::from_secs(60);
    while !is_enough(choice) {
        assert!(Instant::now() < until, "{} frames, and it is not enough", sent.len());
        let number = sent.len() as u64;
        let payload = bytes(if number.is_multiple_of(3) { 100_000 } else { 50 }, number);
        for (side, peer) in [(&mut choice.rig.near, near), (&mut choice.rig.far, far)] {
            let chunk = side.lease(&payload);
            side.send(peer, &push(number, &[&payload]), vec![Outgoing::Value(chunk)].into());
        }
        sent.push((number, payload));
        // A few are in flight at any time.
        choice.rig.until("earlier ones arrive", |rig| {
            numbers(&rig.near, first.0).len() + 4 > sent.len() && numbers(&rig.far, first.1).len() + 4 > sent.len()
        });
        assert_eq!((choice.rig.near.gone(near), choice.rig.far.gone(far)), (None, None), "the connection goes on");
    }
    choice.rig.until("all arrive", |rig| {
        numbers(&rig.near, first.0).len() == sent.len() && numbers(&rig.far, first.1).len() == sent.len()
    });
    choice.rig.until("the parcels are back", |rig| outstanding(rig) == 0);
    assert!(numbers(&choice.rig.near, first.0) == sent, "the client has what the server sent");
    assert!(numbers(&choice.rig.far, first.1) == sent, "the server has what the client sent");
}

/// The client's and the server's end of the last connection.
fn last_ends(choice: &FallbackRig) -> (PeerId, PeerId) {
    let near = choice.rig.near.seen.iter().rev().find_map(|seen| match seen {
        SeenEvent::Connected(peer) => Some(*peer),
        _ => None,
    });
    (near.expect("it is connected"), *choice.rig.far.accepted().last().expect("it was accepted"))
}

#[test]
fn a_connection_over_tcp_returns_to_verbs_between_two_frames() {
    let check = |fault: DeviceFault, is_open: bool| {
        let mut choice = FallbackRig::new();
        choice.device.inject(Some(FaultInjection { fault, is_open, after: 0 }));
        choice.deliver();
        let (ends, before) = (last_ends(&choice), choice.over_verbs());
        let began = Instant::now();
        // Longer than the first offer takes, which fails.
        talk(&mut choice, ends, |_| began.elapsed() > Duration::from_millis(2500));
        assert_eq!(choice.over_verbs(), before, "{fault:?}, {is_open}: over TCP as long as verbs fail");
        choice.device.inject(None);
        talk(&mut choice, ends, |choice| choice.over_verbs().iter().zip(before).all(|(now, before)| *now > before));
        let known = choice.over_verbs();
        let takes = choice.rig.near.seen.iter().filter(|seen| matches!(seen, SeenEvent::TakesAnswers(_))).count();
        assert_eq!(takes, 1, "{fault:?}, {is_open}: once it goes over verbs");
        let began = Instant::now();
        talk(&mut choice, ends, |_| began.elapsed() > Duration::from_millis(200));
        assert_eq!(choice.over_verbs(), known, "{fault:?}, {is_open}: once");
    };
    let faults =
        [(DeviceFault::NoAnswer, true), (DeviceFault::ConnectFails, true), (DeviceFault::RegistrationFails, false)];
    // Each waits for seconds.
    thread::scope(|scope| faults.map(|(fault, is_open)| scope.spawn(move || check(fault, is_open))).map(drop));
}

/// A client whose queue pair takes long to connect occupies one pool thread, and neither the lane nor other clients.
/// Connections without a hello, of which the oldest are dropped, do not drop it.
#[test]
fn a_lane_does_not_wait_for_a_slow_queue_pair() {
    let mut choice = FallbackRig::new();
    assert_eq!(choice.deliver(), 1);
    let honest = *choice.rig.far.accepted().first().expect("it was accepted");
    choice.device.inject(Some(FaultInjection { fault: DeviceFault::ConnectBlocks, is_open: false, after: 0 }));
    let address = choice.rig.address.clone();
    let slow = choice.rig.near.transport().connect(&address).expect("an address of this transport");
    choice.rig.near.send(slow, &hello(0), Payloads::new());
    choice.rig.settle();
    assert_eq!(choice.rig.far.accepted().len(), 1, "the lane has not heard of it");
    let known = choice.rig.near.landed().count();
    choice.rig.far.send(honest, &push(7, &[]), Payloads::new());
    choice.rig.until("the others go on", |rig| rig.near.landed().count() > known);
    let (host, port) = &choice.server;
    let silent: Vec<TcpStream> =
        (0..SILENT).map(|_| TcpStream::connect((host.as_str(), *port)).expect("it listens")).collect();
    let mut dropped = &silent[0];
    assert_eq!(dropped.read(&mut [0]).expect("the oldest is dropped"), 0);
    choice.device.inject(None);
    choice.rig.until("it is its turn", |rig| rig.far.accepted().len() == 2);
    assert!(choice.rig.near.gone(slow).is_none(), "it is not dropped for those without a hello");
}

//! Tests of device faults: each ends one connection, with a reason that names the fault, and every buffer is returned.

use std::sync::Arc;

use super::fixtures::ends;
use crate::conformance;
use crate::conformance::rig::{ConformanceRig, RigSide, SeenEvent, bytes, push};
use crate::network::{NetworkOptions, PollPolicy};
use crate::verbs::faulty_device::{DeviceFault, FaultInjection, FaultyDevice};
use crate::verbs::software_device::SoftwareDevice;
use crate::verbs::status::CompletionStatus;
use crate::verbs::{FabricOption, FabricSettings, INLINE_BYTES_MAX, VerbsDevice, VerbsDevices};
use pserver_core::ids::PeerId;
use pserver_core::limits::RECEIVES_MAX;
use pserver_core::memory::{Buffer, Mapping, lend};
use pserver_core::port::{Incoming, Outgoing, Payloads};

fn rig(device: &FaultyDevice) -> ConformanceRig {
    let devices = VerbsDevices::This(VerbsDevice(Arc::new(device.clone())));
    ConformanceRig::new(ends(
        "verbs://127.0.0.1:0",
        &NetworkOptions { devices, poll: PollPolicy::Block, ..NetworkOptions::default() },
    ))
}

/// Sends frames with long payloads and short ones.
pub(super) fn traffic(side: &mut RigSide, peer: PeerId) {
    for number in 0..12 {
        let payload = bytes(if number % 2 == 0 { 100_000 } else { 100 }, number);
        let chunk = side.lease(&payload);
        side.send(peer, &push(number, &[&payload]), vec![Outgoing::Value(Arc::clone(&chunk))].into());
    }
}

pub(super) fn outstanding(rig: &ConformanceRig) -> usize {
    let out = |side: &RigSide| side.sends_out + side.receives_out;
    out(&rig.near) + out(&rig.far)
}

/// Injects a fault into one side of a connection with traffic both ways; the reason for its end there.
fn end_reason(fault: DeviceFault, is_open: bool, after: u32) -> String {
    let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
    let mut rig = rig(&device);
    let (near, far) = rig.connect();
    rig.settle();
    device.inject(Some(FaultInjection { fault, is_open, after }));
    traffic(&mut rig.near, near);
    traffic(&mut rig.far, far);
    rig.until("both are gone", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
    rig.until("the parcels are back", |rig| outstanding(rig) == 0);
    let reason = if is_open { rig.near.gone(near) } else { rig.far.gone(far) };
    let reason = reason.unwrap_or_default().to_owned();
    device.inject(None);
    // Other connections go on, and a new one can be made.
    let (near, far) = rig.connect();
    let landed = rig.far.landed().count();
    traffic(&mut rig.near, near);
    traffic(&mut rig.far, far);
    rig.until("the next connection works", |rig| rig.far.landed().count() == landed + 12);
    rig.until("its parcels are back", |rig| outstanding(rig) == 0);
    reason
}

/// A device that neither completes a request nor gives it up.
#[test]
fn a_connection_whose_device_has_lost_a_request_ends_after_twice_the_patience() {
    let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
    let fabric = FabricOption::new("timeout=1,retries=0", "the test").expect("it is right");
    let fabric = FabricSettings::find(&fabric, &|_| None).expect("they are right").0;
    let devices = VerbsDevices::This(VerbsDevice(Arc::new(device.clone())));
    let options = NetworkOptions { devices, fabric, poll: PollPolicy::Block, ..NetworkOptions::default() };
    let mut rig = ConformanceRig::new(ends("verbs://127.0.0.1:0", &options));
    let (near, far) = rig.connect();
    rig.settle();
    device.inject(Some(FaultInjection { fault: DeviceFault::Unresponsive, is_open: true, after: 0 }));
    traffic(&mut rig.near, near);
    rig.until("it is cut", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
    let reason = rig.near.gone(near).unwrap_or_default().to_owned();
    assert!(reason.contains("the device has not completed a request for 0.0 s"), "{reason}");
}

#[test]
fn a_slow_device_keeps_every_promise() {
    let devices = || VerbsDevices::This(VerbsDevice(Arc::new(FaultyDevice::slow())));
    conformance::check(|| {
        let options = NetworkOptions { devices: devices(), ..NetworkOptions::default() };
        ends("verbs://127.0.0.1:0", &options).landing(RECEIVES_MAX)
    });
}

/// Polls of both sides until 32 frames of 256 KiB have arrived each way, over a slow device.
fn polls(lands_singly: bool) -> u64 {
    let mut rig = rig(&FaultyDevice::slow());
    let (near, far) = rig.connect();
    (rig.near.lands_singly, rig.far.lands_singly) = (lands_singly, lands_singly);
    let payload = bytes(256 * 1024, 1);
    for number in 0..32 {
        for (side, peer) in [(&mut rig.near, near), (&mut rig.far, far)] {
            let chunk = side.lease(&payload);
            side.send(peer, &push(number, &[&payload]), vec![Outgoing::Value(chunk)].into());
        }
    }
    let before = rig.steps;
    rig.until("all landed", |rig| rig.near.landed().count() == 32 && rig.far.landed().count() == 33);
    rig.until("the parcels are back", |rig| outstanding(rig) == 0);
    rig.steps - before
}

#[test]
fn concurrent_receives_share_their_round_trips() {
    let (singly, at_once) = (polls(true), polls(false));
    println!("polls until 32 frames of 256 KiB are there each way: {singly} one by one, {at_once} several at once");
    assert!(2 * at_once < singly, "{singly} polls one by one, {at_once} at once");
}

#[test]
fn every_status_ends_the_connection_and_is_named() {
    for status in 1..25 {
        for is_open in [true, false] {
            let status = CompletionStatus(status);
            let reason = end_reason(DeviceFault::Fails(status), is_open, status.0 % 3);
            assert!(reason.contains(&status.to_string()), "{status:?}, {is_open}: {reason}");
        }
    }
}

#[test]
fn a_device_fault_ends_the_connection_and_is_named() {
    let check = |fault, is_open, expected: &str| {
        for after in [0, 2] {
            let reason = end_reason(fault, is_open, after);
            assert!(reason.contains(expected), "{fault:?}, {is_open}, after {after}: {reason}");
        }
    };
    for is_open in [true, false] {
        check(DeviceFault::Lost, is_open, "completed, expected");
        check(DeviceFault::Twice, is_open, "completed");
        check(DeviceFault::UnknownId, is_open, "completed");
        check(DeviceFault::TooLong, is_open, "a receive completed as Message(4294967295)");
        check(DeviceFault::PollFails, is_open, "the completion queue is lost");
        check(DeviceFault::PostFails, is_open, "the device takes no more work");
    }
    // The accepting side receives so few messages that a later one may never come.
    check(DeviceFault::Late, true, "completed, expected");
    check(DeviceFault::WrongNumber, true, "payloads were written as number");
    assert!(end_reason(DeviceFault::RegistrationFails, true, 0).contains("memory of this size cannot be registered"));
    assert!(end_reason(DeviceFault::RegistrationFails, false, 0).contains("memory of this size cannot be registered"));
}

#[test]
fn a_key_of_another_connection_gives_no_access() {
    let software_device = Arc::new(SoftwareDevice::new());
    let device = FaultyDevice::new(Arc::clone(&software_device) as Arc<_>);
    let mut rig = rig(&device);
    let (honest, honest_far) = rig.connect();
    traffic(&mut rig.near, honest);
    rig.until("it landed", |rig| rig.far.landed().count() == 13);
    let keys: Vec<u32> = software_device.regions().into_iter().map(|(key, ..)| key).collect();
    assert!(keys.len() > 3, "both sides have registered memory");
    for key in keys {
        let (near, far) = rig.connect();
        let landed = rig.far.landed().count();
        device.inject(Some(FaultInjection { fault: DeviceFault::Key(key), is_open: true, after: 0 }));
        traffic(&mut rig.near, near);
        rig.until("it is cut", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
        device.inject(None);
        let reason = rig.far.gone(far).unwrap_or_default().to_owned();
        assert!(reason.contains("named memory that is not registered for this connection"), "{reason}");
        assert_eq!(rig.far.landed().count(), landed, "nothing of it landed");
        assert_eq!(outstanding(&rig), 0);
        rig.near.send(honest, &push(99, &[]), Payloads::new());
        rig.until("the honest one goes on", |rig| rig.far.landed().count() == landed + 1);
        assert!(rig.far.gone(honest_far).is_none());
    }
}

/// Slots of the accepting side that stay in use after the other side died during reads from it.
fn kept(fault: Option<DeviceFault>) -> u64 {
    let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
    let mut rig = rig(&device);
    let (near, far) = rig.connect();
    rig.settle();
    let before = rig.far.arena.usage().slots_in_use;
    traffic(&mut rig.near, near);
    rig.until("a head is there", |rig| rig.far.seen.iter().any(|seen| matches!(seen, SeenEvent::Head(..))));
    device.inject(fault.map(|fault| FaultInjection { fault, is_open: false, after: 0 }));
    rig.settle();
    rig.near.transport = None;
    rig.until("it is known", |rig| rig.far.gone(far).is_some());
    assert_eq!(rig.far.receives_out, 0, "every place came back, or what stands for it");
    rig.far.arena.usage().slots_in_use - before
}

#[test]
fn memory_that_a_device_may_still_access_is_not_reused() {
    assert_eq!(kept(None), 0);
    assert_eq!(kept(Some(DeviceFault::Unresponsive)), 2, "those of four frames at once that it was filling");
}

/// Ends a connection while the peer can read one buffer and write another; afterwards the trainer owns both again.
fn withdrawn(fault: Option<DeviceFault>, from: &Arc<Mapping>, sent: &[u8], to: &Arc<Mapping>, place: &mut [u8]) {
    let device = FaultyDevice::new(Arc::new(SoftwareDevice::new()));
    let mut rig = rig(&device);
    let (near, far) = rig.connect();
    rig.far.holds_all = true;
    lend(|book| {
        let loan = book.read(sent).within(from);
        rig.near.send(near, &push(0, &[sent]), vec![Outgoing::Loan(loan)].into());
        rig.until("a head is there", |rig| rig.far.seen.iter().any(|seen| matches!(seen, SeenEvent::Head(..))));
        rig.near.held.insert(near);
        // The peer's destination is requested, and its answer is not delivered.
        let chunk = rig.far.lease(sent);
        rig.far.send(far, &push(1, &[sent]), vec![Outgoing::Value(chunk)].into());
        rig.until("its head is there", |rig| rig.near.seen.iter().any(|seen| matches!(seen, SeenEvent::Head(..))));
        let loan = book.write(place).within(to);
        rig.near.land(near, vec![Incoming::Loan(loan)].into());
        rig.near.step();
        device.inject(fault.map(|fault| FaultInjection { fault, is_open: true, after: 0 }));
        rig.near.transport().close(near);
        rig.far.transport = None;
        let near_is_gone = |rig: &mut ConformanceRig| {
            rig.near.step();
            rig.near.wait(std::time::Duration::from_millis(1));
            rig.near.gone(near).is_some()
        };
        while !near_is_gone(&mut rig) {}
        assert_eq!((rig.near.sends_out, rig.near.receives_out), (0, 0), "the loans are back");
    });
}

#[test]
fn memory_that_the_peer_may_still_access_is_withdrawn() {
    let check = |fault: Option<DeviceFault>, expected: bool| {
        let mut buffers = [0, 1].map(|_| Buffer::new(1 << 20).expect("this system shares memory"));
        let [from, to] = buffers.each_ref().map(|buffer| Arc::clone(buffer.mapping()));
        let [sent, place] = &mut buffers;
        withdrawn(fault, &from, sent, &to, place);
        for mapping in [from, to] {
            mapping.withdraw().expect("the system lets go of it");
            assert_eq!(!mapping.is_in_place(), expected, "{fault:?}");
        }
        let mut own = [0, 1].map(|_| vec![0; 1 << 20]);
        let mapping = |bytes: &Vec<u8>| Mapping::of_caller(bytes.as_ptr().addr(), bytes.len()).expect("some bytes");
        let [from, to] = own.each_ref().map(|bytes| Arc::new(mapping(bytes)));
        let [sent, place] = &mut own;
        withdrawn(fault, &from, sent, &to, place);
        for mapping in [from, to] {
            assert_eq!(mapping.withdraw().is_err(), expected, "{fault:?}: it is not the library's to take away");
            assert_eq!(!mapping.is_in_place(), expected, "{fault:?}");
        }
    };
    check(None, false);
    // Deregistered memory is inaccessible, and so is memory behind a destroyed queue pair.
    check(Some(DeviceFault::Unresponsive), false);
    check(Some(DeviceFault::DeregistrationFails), false);
    check(Some(DeviceFault::Hung), true);
}

#[test]
fn there_is_always_room_for_a_message() {
    let software_device = Arc::new(SoftwareDevice::new());
    let mut rig = rig(&FaultyDevice::new(Arc::clone(&software_device) as Arc<_>));
    let (near, far) = rig.connect();
    for round in 1..=40 {
        traffic(&mut rig.near, near);
        traffic(&mut rig.far, far);
        let landed = 12 * round;
        rig.until("all landed", |rig| rig.far.landed().count() > landed && rig.near.landed().count() == landed);
    }
    rig.until("the parcels are back", |rig| outstanding(rig) == 0);
    assert_eq!(software_device.receiver_not_ready(), 0, "credits see to it");
}

/// Destinations are sent after all messages of an answer have arrived; a connection is not cut for a request before
/// that.
#[test]
fn an_answer_of_more_than_there_is_room_for_arrives_whole() {
    const SHORT: usize = INLINE_BYTES_MAX as usize;
    let mut rig = rig(&FaultyDevice::new(Arc::new(SoftwareDevice::new())));
    let (near, far) = rig.connect();
    let shapes: [&[(usize, usize)]; 5] = [
        &[(28, SHORT), (1, 2 * SHORT)],
        &[(1, 2 * SHORT), (28, SHORT)],
        &[(14, SHORT), (3, 2 * SHORT), (40, SHORT)],
        // More destinations than one control message holds, and payloads that end where messages do.
        &[(28, SHORT - 16), (600, 2 * SHORT)],
        &[(1, 2 * SHORT), (200, 1000), (1, 2 * SHORT)],
    ];
    for round in 0..20 {
        for shape in shapes {
            let lengths = shape.iter().flat_map(|(count, length)| std::iter::repeat_n(*length, *count));
            let payloads: Vec<_> = lengths.filter(|length| *length > 0).map(|length| bytes(length, round)).collect();
            let slices: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
            let body = payloads.iter().map(|payload| Outgoing::Value(rig.far.lease(payload))).collect();
            rig.far.send(far, &push(round, &slices), body);
            rig.until("it landed, or the connection is gone", |rig| {
                outstanding(rig) == 0 && rig.near.landed().count() > 0 || rig.near.gone(near).is_some()
            });
            assert_eq!((rig.near.gone(near), rig.far.gone(far)), (None, None), "{shape:?}, round {round}");
            let landed = rig.near.landed().next().map(|(_, _, body)| body.clone());
            assert!(landed == Some(payloads), "{shape:?}, round {round}: what landed is what was sent");
            rig.near.seen.clear();
        }
    }
}

#[test]
fn memory_of_closed_connections_is_deregistered() {
    let software_device = Arc::new(SoftwareDevice::new());
    let mut rig = rig(&FaultyDevice::new(Arc::clone(&software_device) as Arc<_>));
    let mut most = 0;
    for number in 0..50 {
        let (near, far) = rig.connect();
        traffic(&mut rig.near, near);
        traffic(&mut rig.far, far);
        rig.until("the parcels are back", |rig| outstanding(rig) == 0);
        rig.near.transport().close(near);
        rig.until("it is over", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
        let regions = software_device.regions().len();
        // The first connections register the chunks that later ones reuse.
        most = if number < 10 { regions.max(most) } else { most };
        assert!(regions <= most, "{regions} regions after {number} connections, {most} at most after the first ten");
    }
}

//! The common suite and recovery over a real device. In the virtual machine with a soft-RoCE device, its address is
//! 10.9.0.1.

use std::net::{IpAddr, Ipv6Addr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pserver_core::port::Payloads;
use pserver_core::wire::Address;

use super::failures::{outstanding, traffic};
use super::fixtures::{NetworkInterface, ends, hardware, skip};
use crate::conformance;
use crate::conformance::rig::{ConformanceRig, hello};
use crate::network::{ChecksumPolicy, NetworkOptions, PollPolicy};
use crate::verbs::{VerbsDevice, VerbsDevices};

/// The variable with the address that a child process, which is to be killed, sends to.
const VICTIM: &str = "PSERVER_TEST_VICTIM_OF";

/// A child process that ends with its test.
struct Victim(Child);

impl Victim {
    /// Runs one test of this program as a process that sends to `address` for ever.
    fn start(test: &str, address: &Address) -> Self {
        let program = std::env::current_exe().expect("a test has a path");
        let mut command = Command::new(program);
        command.args(["--exact", test]).env(VICTIM, address.to_string()).stdout(Stdio::null());
        Self(command.spawn().expect("the program runs again"))
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // A process that has ended cannot be killed, and is only waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The TCP address of the device's port.
fn address(device: &VerbsDevice) -> String {
    let gid = Ipv6Addr::from(device.0.attributes().gid);
    match gid.to_ipv4_mapped() {
        Some(number) => format!("verbs://{}:0", IpAddr::from(number)),
        None => "verbs://127.0.0.1:0".to_owned(),
    }
}

fn options(device: VerbsDevice, poll: PollPolicy, checks: ChecksumPolicy) -> NetworkOptions {
    // A close queues twenty megabytes, which software in a virtual machine does not send in a second.
    let linger = Duration::from_secs(60);
    NetworkOptions { devices: VerbsDevices::This(device), poll, checks, linger, ..NetworkOptions::default() }
}

fn rig(device: VerbsDevice) -> ConformanceRig {
    let address = address(&device);
    ConformanceRig::new(ends(&address, &options(device, PollPolicy::Adaptive, ChecksumPolicy::BetweenHosts)))
}

fn check(test: &str, poll: PollPolicy, checks: ChecksumPolicy) {
    let Some(device) = hardware(test) else { return };
    println!("device: {}", device.name());
    let address = address(&device);
    let options = options(device, poll, checks);
    conformance::check(|| ends(&address, &options));
}

/// After a lost connection, a new one works and nothing of the first is kept.
fn check_recovered(rig: &mut ConformanceRig) {
    rig.until("the parcels are back", |rig| outstanding(rig) == 0);
    let (near, far) = rig.connect();
    let landed = rig.far.landed().count();
    traffic(&mut rig.near, near);
    traffic(&mut rig.far, far);
    rig.until("the next connection works", |rig| {
        rig.far.landed().count() >= landed + 12 && rig.near.landed().filter(|(peer, ..)| *peer == near).count() == 12
    });
    rig.until("its parcels are back", |rig| outstanding(rig) == 0);
    assert_eq!((rig.near.gone(near), rig.far.gone(far)), (None, None));
}

#[test]
fn a_device_keeps_every_promise() {
    check("verbs::tests::real::a_device_keeps_every_promise", PollPolicy::Adaptive, ChecksumPolicy::BetweenHosts);
}

#[test]
fn a_device_keeps_every_promise_with_sleeping_threads() {
    let test = "verbs::tests::real::a_device_keeps_every_promise_with_sleeping_threads";
    check(test, PollPolicy::Block, ChecksumPolicy::Always);
}

#[test]
fn a_link_that_goes_down_ends_its_connection_and_the_next_one_works() {
    let test = "verbs::tests::real::a_link_that_goes_down_ends_its_connection_and_the_next_one_works";
    let Some(device) = hardware(test) else { return };
    let Some(link) = NetworkInterface::that_may_go_down() else {
        return skip(test, "PSERVER_RDMA_INTERFACE names no interface that may be taken down");
    };
    let mut rig = rig(device);
    for time in 1..=3 {
        let (near, far) = rig.connect();
        let landed = rig.far.landed().count();
        traffic(&mut rig.near, near);
        traffic(&mut rig.far, far);
        rig.until("half of it landed", |rig| rig.far.landed().count() >= landed + 6);
        link.goes("down");
        let began = Instant::now();
        traffic(&mut rig.near, near);
        traffic(&mut rig.far, far);
        rig.until("both know", |rig| rig.near.gone(near).is_some() && rig.far.gone(far).is_some());
        let millis = began.elapsed().as_millis();
        link.goes("up");
        let reasons = (rig.near.gone(near).unwrap_or_default(), rig.far.gone(far).unwrap_or_default());
        println!("link down, time {time}: known after {millis} ms: here `{}`, there `{}`", reasons.0, reasons.1);
        check_recovered(&mut rig);
    }
}

#[test]
fn a_killed_process_is_reported_gone_and_leaks_nothing() {
    let test = "verbs::tests::real::a_killed_process_is_reported_gone_and_leaks_nothing";
    let Some(device) = hardware(test) else { return };
    let mut rig = rig(device);
    if let Ok(address) = std::env::var(VICTIM) {
        return send_for_ever(&mut rig, &Address::parse(&address).expect("an address"));
    }
    let free = rig.far.arena.usage().slots_in_use;
    for time in 1..=3 {
        let (known, landed) = (rig.far.accepted(), rig.far.landed().count());
        let victim = Victim::start(test, &rig.address);
        rig.until("it sends", |rig| rig.far.landed().count() >= landed + 20);
        let peer = rig.far.accepted().into_iter().find(|peer| !known.contains(peer)).expect("it was accepted");
        drop(victim);
        let began = Instant::now();
        rig.until("it is known", |rig| rig.far.gone(peer).is_some());
        let reason = rig.far.gone(peer).unwrap_or_default();
        println!("killed, time {time}: known after {} ms: `{reason}`", began.elapsed().as_millis());
        assert_eq!(outstanding(&rig), 0, "every place came back");
        assert_eq!(rig.far.arena.usage().slots_in_use, free, "nothing is kept for the dead");
        check_recovered(&mut rig);
    }
}

/// The child process: sends until it is killed.
fn send_for_ever(rig: &mut ConformanceRig, address: &Address) {
    let peer = rig.near.transport().connect(address).expect("the address is of this transport");
    rig.near.send(peer, &hello(0), Payloads::new());
    while rig.near.gone(peer).is_none() {
        traffic(&mut rig.near, peer);
        rig.until("it is sent", |rig| rig.near.sends_out == 0);
    }
}

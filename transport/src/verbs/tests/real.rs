//! The same promises over a real device. In the guest, which has one, the address of its port is 10.9.0.1.

use std::net::{IpAddr, Ipv6Addr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pserver_core::wire::Address;

use super::failures::{outstanding, traffic};
use super::stage::{Link, ends, hardware, skip};
use crate::conformance;
use crate::conformance::world::{World, hello};
use crate::network::{Checks, NetworkOptions, Poll};
use crate::verbs::{Device, Devices};

/// Whom a process that is to be killed sends to: the test runs its own program with this variable.
const VICTIM: &str = "PSERVER_TEST_VICTIM_OF";

/// A process that ends with its test.
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
        // One that has ended cannot be killed, and is only waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where the device's port is reached by TCP.
fn address(device: &Device) -> String {
    let gid = Ipv6Addr::from(device.0.facts().gid);
    match gid.to_ipv4_mapped() {
        Some(number) => format!("verbs://{}:0", IpAddr::from(number)),
        None => "verbs://127.0.0.1:0".to_owned(),
    }
}

fn options(device: Device, poll: Poll, checks: Checks) -> NetworkOptions {
    // Twenty megabytes are queued when a connection is closed, which software in a virtual machine does not move in a
    // second.
    let linger = Duration::from_secs(60);
    NetworkOptions { devices: Devices::This(device), poll, checks, linger, ..NetworkOptions::default() }
}

fn world(device: Device) -> World {
    let address = address(&device);
    World::new(ends(&address, &options(device, Poll::Adaptive, Checks::BetweenHosts)))
}

fn check(test: &str, poll: Poll, checks: Checks) {
    let Some(device) = hardware(test) else { return };
    println!("device: {}", device.name());
    let address = address(&device);
    let options = options(device, poll, checks);
    conformance::check(|| ends(&address, &options));
}

/// After a connection is lost another one works, and nothing of the first is kept.
fn check_recovered(world: &mut World) {
    world.until("the parcels are back", |world| outstanding(world) == 0);
    let (near, far) = world.connect();
    let landed = world.far.landed().count();
    traffic(&mut world.near, near);
    traffic(&mut world.far, far);
    world.until("the next connection works", |world| {
        world.far.landed().count() >= landed + 12
            && world.near.landed().filter(|(peer, ..)| *peer == near).count() == 12
    });
    world.until("its parcels are back", |world| outstanding(world) == 0);
    assert_eq!((world.near.gone(near), world.far.gone(far)), (None, None));
}

#[test]
fn a_device_keeps_every_promise() {
    check("verbs::tests::real::a_device_keeps_every_promise", Poll::Adaptive, Checks::BetweenHosts);
}

#[test]
fn a_device_keeps_every_promise_to_those_who_sleep() {
    let test = "verbs::tests::real::a_device_keeps_every_promise_to_those_who_sleep";
    check(test, Poll::Block, Checks::Always);
}

#[test]
fn a_link_that_goes_down_ends_its_connection_and_the_next_one_works() {
    let test = "verbs::tests::real::a_link_that_goes_down_ends_its_connection_and_the_next_one_works";
    let Some(device) = hardware(test) else { return };
    let Some(link) = Link::that_may_go_down() else {
        return skip(test, "PSERVER_RDMA_INTERFACE names no interface that may be taken down");
    };
    let mut world = world(device);
    for time in 1..=3 {
        let (near, far) = world.connect();
        let landed = world.far.landed().count();
        traffic(&mut world.near, near);
        traffic(&mut world.far, far);
        world.until("half of it landed", |world| world.far.landed().count() >= landed + 6);
        link.goes("down");
        let began = Instant::now();
        traffic(&mut world.near, near);
        traffic(&mut world.far, far);
        world.until("both know", |world| world.near.gone(near).is_some() && world.far.gone(far).is_some());
        let millis = began.elapsed().as_millis();
        link.goes("up");
        let reasons = (world.near.gone(near).unwrap_or_default(), world.far.gone(far).unwrap_or_default());
        println!("link down, time {time}: known after {millis} ms: here `{}`, there `{}`", reasons.0, reasons.1);
        check_recovered(&mut world);
    }
}

#[test]
fn a_process_that_is_killed_is_gone_and_takes_nothing_with_it() {
    let test = "verbs::tests::real::a_process_that_is_killed_is_gone_and_takes_nothing_with_it";
    let Some(device) = hardware(test) else { return };
    let mut world = world(device);
    if let Ok(address) = std::env::var(VICTIM) {
        return send_for_ever(&mut world, &Address::parse(&address).expect("an address"));
    }
    let free = world.far.arena.usage().slots_in_use;
    for time in 1..=3 {
        let (known, landed) = (world.far.accepted(), world.far.landed().count());
        let victim = Victim::start(test, &world.address);
        world.until("it sends", |world| world.far.landed().count() >= landed + 20);
        let peer = world.far.accepted().into_iter().find(|peer| !known.contains(peer)).expect("it was accepted");
        drop(victim);
        let began = Instant::now();
        world.until("it is known", |world| world.far.gone(peer).is_some());
        let reason = world.far.gone(peer).unwrap_or_default();
        println!("killed, time {time}: known after {} ms: `{reason}`", began.elapsed().as_millis());
        assert_eq!(outstanding(&world), 0, "every place came back");
        assert_eq!(world.far.arena.usage().slots_in_use, free, "nothing is kept for the dead");
        check_recovered(&mut world);
    }
}

/// What the process does that is killed.
fn send_for_ever(world: &mut World, address: &Address) {
    let peer = world.near.transport().connect(address).expect("the address is of this transport");
    world.near.send(peer, &hello(0), Vec::new());
    while world.near.gone(peer).is_none() {
        traffic(&mut world.near, peer);
        world.until("it is sent", |world| world.near.parcels_out == 0);
    }
}

//! The same promises over a real device. In the guest, which has one, the address of its port is 10.9.0.1.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use super::stage::{ends, hardware};
use crate::conformance;
use crate::network::{Checks, NetworkOptions, Poll};
use crate::verbs::{Device, Devices};

/// Where the device's port is reached by TCP.
fn address(device: &Device) -> String {
    let gid = Ipv6Addr::from(device.0.facts().gid);
    match gid.to_ipv4_mapped() {
        Some(number) => format!("verbs://{}:0", IpAddr::from(number)),
        None => "verbs://127.0.0.1:0".to_owned(),
    }
}

fn check(poll: Poll, checks: Checks) {
    let Some(device) = hardware() else { return };
    println!("device: {}", device.name());
    let address = address(&device);
    // Twenty megabytes are queued when a connection is closed, which software in a virtual machine does not move in a
    // second.
    let linger = Duration::from_secs(60);
    let options = NetworkOptions { devices: Devices::This(device), poll, checks, linger, ..NetworkOptions::default() };
    conformance::check(|| ends(&address, &options));
}

#[test]
fn a_device_keeps_every_promise() {
    check(Poll::Adaptive, Checks::BetweenHosts);
}

#[test]
fn a_device_keeps_every_promise_to_those_who_sleep() {
    check(Poll::Block, Checks::Always);
}

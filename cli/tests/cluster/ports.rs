//! Ports on which a test's processes listen.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports that this test program has looked at.
static LOOKED_AT: AtomicU32 = AtomicU32::new(0);

/// A port without a listener, returned only once. The port is below the ephemeral range of the system. A port of that
/// range can be taken by a connection before the process that is to listen starts. A trainer that keeps connecting to a
/// port of that range without a listener at last connects to itself, and a restarted server finds its port taken.
pub(crate) fn free_port() -> u16 {
    let first = std::process::id().wrapping_mul(64);
    let next = || first.wrapping_add(LOOKED_AT.fetch_add(1, Ordering::Relaxed)) % 20_000;
    let mut ports = std::iter::repeat_with(|| 10_000 + u16::try_from(next()).expect("below 20,000"));
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("they have no end")
}

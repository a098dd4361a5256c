//! Where payloads carry checksums.

use std::str::FromStr;

use tokio::net::TcpStream;

/// Where payloads carry checksums. Heads always do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// Where the two ends are on different hosts. Within one host a payload goes from memory to memory, as it does
    /// from a gradient to its sum, and there is nothing on the way that could change it.
    #[default]
    BetweenHosts,
    /// Everywhere: for connections that end on this host at a proxy or a tunnel.
    Always,
}

/// The words for it, for error texts.
pub const CHECKS_EXPECTED: &str = "one of between-hosts, always";

impl FromStr for Checks {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "between-hosts" => Ok(Self::BetweenHosts),
            "always" => Ok(Self::Always),
            _ => Err(()),
        }
    }
}

/// What that means for one connection, found out with its first payload.
pub(super) struct Checking {
    checks: Checks,
    is_on: Option<bool>,
}

impl Checking {
    pub(super) fn new(checks: Checks) -> Self {
        Self { checks, is_on: None }
    }

    /// Whether payloads are checked on this connection.
    pub(super) fn is_on(&mut self, stream: &TcpStream) -> bool {
        let checks = self.checks;
        *self.is_on.get_or_insert_with(|| checks == Checks::Always || !is_within_host(stream))
    }
}

/// Whether both ends have the address of this host.
fn is_within_host(stream: &TcpStream) -> bool {
    let ends = stream.local_addr().ok().zip(stream.peer_addr().ok());
    let ips = ends.map(|(near, far)| (near.ip().to_canonical(), far.ip().to_canonical()));
    ips.is_some_and(|(near, far)| near == far || near.is_loopback() && far.is_loopback())
}

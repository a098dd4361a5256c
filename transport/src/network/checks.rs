//! The policy for payload checksums.

use std::str::FromStr;

use tokio::net::TcpStream;

use crate::tls::TcpChannel;

/// The connections whose payloads carry checksums. Heads always carry them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChecksumPolicy {
    /// Connections between hosts. Within a host a payload moves from memory to memory, and no device on the way can
    /// change it.
    #[default]
    BetweenHosts,
    /// All connections; for those that end at a proxy or tunnel on this host.
    Always,
    /// None, unless the other side requires them: the network's own checksums are trusted.
    Never,
}

/// The accepted values, for error texts.
pub const CHECKS_EXPECTED: &str = "one of between-hosts, always, never";

impl FromStr for ChecksumPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "between-hosts" => Ok(Self::BetweenHosts),
            "always" => Ok(Self::Always),
            "never" => Ok(Self::Never),
            _ => Err(()),
        }
    }
}

/// The policy's decision for one connection, made with its first payload.
pub(super) struct ChecksumDecision {
    checks: ChecksumPolicy,
    is_on: Option<bool>,
}

impl ChecksumDecision {
    /// The policy for a connection over this channel. TLS authenticates every byte, so only a side with `always` adds
    /// checksums.
    pub(super) fn policy(checks: ChecksumPolicy, channel: &TcpChannel) -> ChecksumPolicy {
        let is_implied = checks == ChecksumPolicy::BetweenHosts && channel.is_encrypted();
        if is_implied { ChecksumPolicy::Never } else { checks }
    }

    pub(super) fn new(checks: ChecksumPolicy) -> Self {
        Self { checks, is_on: None }
    }

    /// Whether this side requires checksums of its peer.
    pub(super) fn insists(&self) -> bool {
        self.checks == ChecksumPolicy::Always
    }

    /// The peer requires checksums.
    pub(super) fn follow_peer(&mut self) {
        self.is_on = Some(true);
    }

    /// Whether payloads of this connection carry checksums.
    pub(super) fn is_on(&mut self, channel: &TcpChannel) -> bool {
        let checks = self.checks;
        *self.is_on.get_or_insert_with(|| match checks {
            ChecksumPolicy::Always => true,
            ChecksumPolicy::Never => false,
            ChecksumPolicy::BetweenHosts => !is_within_host(channel.socket()),
        })
    }
}

/// Whether both ends have an address of this host.
fn is_within_host(stream: &TcpStream) -> bool {
    let ends = stream.local_addr().ok().zip(stream.peer_addr().ok());
    let ips = ends.map(|(near, far)| (near.ip().to_canonical(), far.ip().to_canonical()));
    ips.is_some_and(|(near, far)| near == far || near.is_loopback() && far.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn payloads_within_a_host_carry_checksums_where_a_side_requires_them() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback is there");
        let stream = TcpStream::connect(listener.local_addr().expect("it listens")).await.expect("it accepts");
        let stream = TcpChannel::from(stream);
        for (policy, is_on) in
            [(ChecksumPolicy::Always, true), (ChecksumPolicy::BetweenHosts, false), (ChecksumPolicy::Never, false)]
        {
            let mut decision = ChecksumDecision::new(policy);
            assert_eq!((decision.is_on(&stream), decision.insists()), (is_on, is_on), "{policy:?}");
            decision.follow_peer();
            assert!(decision.is_on(&stream), "{policy:?}: the other side requires them");
        }
    }
}

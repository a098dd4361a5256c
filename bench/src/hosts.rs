//! Hosts of a measurement: network namespaces of this machine with an interface each, joined by a bridge in another.
//!
//! A namespace lives as long as the process in it, so that nothing stays behind, however the measurement ends.

use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

/// The interface of every host.
pub(crate) const INTERFACE: &str = "eth0";
/// Congestion controls of hosts, the first that may be set. One that spreads packets over time, as BBR does, wakes
/// processors for each, which costs more than all that is measured: 1.2 to 2 times the time of a round.
const UNPACED: [&str; 2] = ["cubic", "reno"];
/// More than these have no address here; two processors are busy long before.
const HOSTS_MAX: u8 = 64;
/// A token bucket holds the bytes of so long, and no fewer than a few of the longest segments.
const BUCKET_SECONDS: f64 = 0.002;
const BUCKET_BYTES_MIN: f64 = 262_144.0;

/// The place of servers among hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServerPlacement {
    /// A server on a host of its own.
    Dedicated,
    /// A server on each trainer's host.
    Colocated,
}

/// Hosts with a trainer each, and one more for a dedicated server.
#[derive(Debug)]
pub(crate) struct Hosts {
    hosts: Vec<BenchHost>,
    /// The namespace of the bridge.
    _switch: Namespace,
}

/// A host.
#[derive(Debug)]
pub(crate) struct BenchHost {
    namespace: Namespace,
    pub(crate) address: Ipv4Addr,
}

/// A network namespace, and the process that keeps it.
#[derive(Debug)]
struct Namespace {
    keeper: Child,
}

impl Hosts {
    /// Makes hosts for so many trainers. `bits_per_second` bounds each host's link, each way.
    pub(crate) fn new(trainers: u8, bits_per_second: Option<u64>) -> Result<Self> {
        ensure!((1..=HOSTS_MAX).contains(&trainers), "--hosts {trainers}: expected 1 to {HOSTS_MAX}");
        let switch = Namespace::new()?;
        switch.run("ip link add bridge type bridge forward_delay 0")?;
        switch.run("ip link set bridge up")?;
        let host = |index: u8| {
            let (namespace, port) = (Namespace::new()?, format!("port{index}"));
            let address = Ipv4Addr::new(10, 87, 0, 1 + index);
            let (inner, outer) = (namespace.keeper.id(), switch.keeper.id());
            run(&format!("ip link add {INTERFACE} netns {inner} type veth peer name {port} netns {outer}"), &[])?;
            switch.run(&format!("ip link set {port} master bridge up"))?;
            let unpaced =
                |name: &&str| namespace.run(&format!("sysctl -qw net.ipv4.tcp_congestion_control={name}")).is_ok();
            ensure!(UNPACED.iter().any(unpaced), "--hosts: the congestion control cannot be set");
            namespace.run("ip link set lo up")?;
            namespace.run(&format!("ip address add {address}/24 dev {INTERFACE}"))?;
            namespace.run(&format!("ip link set {INTERFACE} up"))?;
            for (at, interface) in [(&namespace, INTERFACE), (&switch, port.as_str())] {
                bits_per_second.map_or(Ok(()), |rate| at.run(&bucket(interface, rate)))?;
            }
            Ok(BenchHost { namespace, address })
        };
        let hosts = (0..=trainers).map(host).collect::<Result<_>>()?;
        Ok(Self { hosts, _switch: switch })
    }

    /// The host of a trainer: trainers are in equal blocks.
    pub(crate) fn of_trainer(&self, trainer: u32, trainers: u32) -> &BenchHost {
        let hosts = self.of_trainers();
        &hosts[trainer as usize * hosts.len() / trainers as usize]
    }

    /// The host of a server.
    pub(crate) fn of_server(&self, placement: ServerPlacement, server: u16) -> &BenchHost {
        match placement {
            ServerPlacement::Dedicated => self.hosts.last().expect("there is one for servers"),
            ServerPlacement::Colocated => &self.hosts[usize::from(server)],
        }
    }

    /// Servers where each host of the placement has one.
    pub(crate) fn servers(&self, placement: ServerPlacement) -> u16 {
        let hosts = if placement == ServerPlacement::Dedicated { 1 } else { self.of_trainers().len() };
        u16::try_from(hosts).expect("hosts are few")
    }

    /// All of them as scripts of peers read them: `NAMESPACE@ADDRESS`, with commas between; servers are on the last.
    pub(crate) fn words(&self) -> String {
        let word = |host: &BenchHost| format!("{}@{}", host.namespace.path(), host.address);
        self.hosts.iter().map(word).collect::<Vec<_>>().join(",")
    }

    /// All that have trainers.
    pub(crate) fn of_trainers(&self) -> &[BenchHost] {
        &self.hosts[..self.hosts.len() - 1]
    }
}

impl BenchHost {
    /// The words before a command that runs on this host.
    pub(crate) fn within(&self) -> [String; 2] {
        self.namespace.within()
    }

    /// A command that runs on this host.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let [nsenter, namespace] = self.within();
        let mut command = Command::new(nsenter);
        command.args([namespace, "--".to_owned()]).arg(program);
        command
    }
}

impl Namespace {
    fn new() -> Result<Self> {
        let mut keeper = Command::new("unshare")
            .args(["--net", "--", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("--hosts: unshare cannot be started; expected util-linux")?;
        // Its answer says that it is in the namespace.
        let mut line = String::new();
        let asked = keeper.stdin.as_mut().expect("it is a pipe").write_all(b"\n");
        BufReader::new(keeper.stdout.as_mut().expect("it is a pipe")).read_line(&mut line)?;
        if asked.is_err() || line.is_empty() {
            let ended = keeper.wait_with_output()?;
            let why = String::from_utf8_lossy(&ended.stderr);
            bail!("--hosts: no network namespace ({}); expected the rights of root", why.trim());
        }
        Ok(Self { keeper })
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.keeper.id())
    }

    fn within(&self) -> [String; 2] {
        ["nsenter".to_owned(), format!("--net={}", self.path())]
    }

    fn run(&self, line: &str) -> Result<()> {
        run(line, &self.within())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // One that has ended needs neither.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// The command that bounds what an interface sends.
fn bucket(interface: &str, bits_per_second: u64) -> String {
    let bytes = (bits_per_second as f64 / 8.0 * BUCKET_SECONDS).max(BUCKET_BYTES_MIN);
    format!("tc qdisc add dev {interface} root tbf rate {bits_per_second}bit burst {bytes:.0} latency 50ms")
}

fn run(line: &str, within: &[String]) -> Result<()> {
    let words: Vec<&str> = within.iter().map(String::as_str).chain(line.split(' ')).collect();
    let ended = Command::new(words[0]).args(&words[1..]).output();
    let ended = ended.with_context(|| format!("--hosts: {} cannot be started; expected iproute2", words[0]))?;
    let why = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success(), "--hosts: {line}: {}", why.trim());
    Ok(())
}

/// A rate of a link as bits per second: `1Gbit`, `500Mbit`.
pub(crate) fn rate(text: &str) -> Result<u64, String> {
    let units = [("Gbit", 1_000_000_000), ("Mbit", 1_000_000), ("kbit", 1_000)];
    let parsed = units.iter().find_map(|(unit, bits)| {
        let number = text.strip_suffix(unit)?.trim().parse::<u64>().ok()?;
        number.checked_mul(*bits).filter(|rate| 0 < *rate)
    });
    parsed.ok_or_else(|| format!("found {text}; expected bits per second, such as 1Gbit or 500Mbit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_unit() {
        assert_eq!(rate("1Gbit"), Ok(1_000_000_000));
        assert_eq!(rate("500 Mbit"), Ok(500_000_000));
        for text in ["1", "0Gbit", "-1Gbit", "Gbit", "99999999999Gbit", "1G"] {
            assert!(rate(text).is_err_and(|why| why.contains("expected bits per second")), "{text}");
        }
    }
}

//! The link that bytes travelled over, and whether a card could have taken them from an accelerator.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};

use pserver_core::wire::Address;
use pserver_transport::verbs::{DeviceChoice, VerbsDevice, VerbsDevices};
use rustix::net::sockopt::ip_mtu;

use crate::counters::Carried;
use crate::job::{TransportName, word};

/// How trainers and servers of a run reached each other.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) carried: Carried,
    pub(crate) link: NetworkLink,
    /// Why no card reads gradients where an accelerator has them.
    pub(crate) no_gpu_direct: String,
}

/// A link: an interface, a port of a card, or neither.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NetworkLink {
    pub(crate) name: String,
    /// As the system has it; virtual interfaces have none.
    pub(crate) bits_per_second: Option<u64>,
    /// Of the way there, which may be less than the interface's.
    pub(crate) mtu_bytes: Option<u64>,
}

impl Route {
    /// The route to servers at `address`, by what the connections said.
    pub(crate) fn of(carried: Carried, address: &str, rdma_device: &str) -> Self {
        let host = Address::parse(address).map_or_else(|_| String::new(), |address| address.host);
        let (link, why) = match carried.by.as_str() {
            "verbs" => Self::over_verbs(rdma_device),
            "shm" | "loopback" => {
                (NetworkLink::new("none, memory of this machine"), "no card moves anything".to_owned())
            }
            by => {
                let link = NetworkLink::to(&host).unwrap_or_else(|| NetworkLink::new("unknown"));
                (link, format!("over {by} everything goes through the host's memory"))
            }
        };
        Self { carried, link, no_gpu_direct: why }
    }

    /// The routes of a run that has several, all to servers of this machine; each result says which one is its own.
    pub(crate) fn within_machine(transports: &[TransportName]) -> Self {
        let words = |with| transports.iter().map(|one| word(*one)).collect::<Vec<_>>().join(with);
        let reason = format!("--transport {}, each in lines of its own", words(","));
        Self::of(Carried { by: words(" and "), reason }, "tcp://127.0.0.1:0", "none")
    }

    fn over_verbs(rdma_device: &str) -> (NetworkLink, String) {
        let choice = rdma_device.parse::<DeviceChoice>().unwrap_or_default();
        match VerbsDevice::find(&VerbsDevices::from(&choice), &crate::environment::fabric()) {
            Ok(device) => (NetworkLink::of(&device), device.device_memory()),
            Err(reason) => (NetworkLink::new("unknown"), reason),
        }
    }
}

impl NetworkLink {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), bits_per_second: None, mtu_bytes: None }
    }

    /// The interface that packets to a host leave by.
    fn to(host: &str) -> Option<Self> {
        let address = (host, 0).to_socket_addrs().ok()?.next()?.ip();
        let name = interface_to(address)?;
        let read = |file| fs::read_to_string(format!("/sys/class/net/{name}/{file}")).ok();
        // Zero or less stands for a speed that the interface does not know.
        let megabits = read("speed").and_then(|text| text.trim().parse::<u64>().ok()).filter(|speed| *speed > 0);
        let mtu_bytes = mtu_to(address).or_else(|| read("mtu")?.trim().parse().ok());
        Some(Self { bits_per_second: megabits.map(|speed| speed * 1_000_000), mtu_bytes, name })
    }

    /// A card's port.
    fn of(device: &VerbsDevice) -> Self {
        let (place, _) = device.name().split_once(',').unwrap_or((device.name(), ""));
        let mut parts = place.split(':');
        let (card, port) = (parts.next().unwrap_or_default(), parts.next().unwrap_or("1"));
        let rate = fs::read_to_string(format!("/sys/class/infiniband/{card}/ports/{port}/rate")).ok();
        let bits_per_second = rate.and_then(|text| rate_of(&text));
        Self { name: place.to_owned(), bits_per_second, mtu_bytes: Some(device.packet_bytes_max().into()) }
    }
}

/// The text of a port's `rate`, such as `100 Gb/sec (4X EDR)` or `2.5 Gb/sec (1X SDR)`.
fn rate_of(text: &str) -> Option<u64> {
    let (number, _) = text.split_once(" Gb/sec")?;
    let (whole, part) = number.trim().split_once('.').unwrap_or((number.trim(), "0"));
    let tenths = part.get(..1)?.parse::<u64>().ok()?;
    Some(whole.parse::<u64>().ok()? * 1_000_000_000 + tenths * 100_000_000)
}

/// The longest packet that the system would send to this address; nothing where the interface alone bounds it.
fn mtu_to(address: IpAddr) -> Option<u64> {
    if !address.is_ipv4() {
        return None;
    }
    // Nothing is sent: a datagram's socket only remembers the way.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((address, 9)).ok()?;
    // IPv4 has no longer packets, and an interface may say more.
    ip_mtu(&socket).ok().map(u64::from).filter(|bytes| *bytes < u64::from(u16::MAX))
}

fn interface_to(address: IpAddr) -> Option<String> {
    // A socket can be bound to this machine's addresses only, and to those everything goes through `lo`.
    if UdpSocket::bind((address, 0)).is_ok() {
        return Some("lo".to_owned());
    }
    match address {
        IpAddr::V4(address) => interface4(&fs::read_to_string("/proc/net/route").ok()?, address),
        IpAddr::V6(address) => interface6(&fs::read_to_string("/proc/net/ipv6_route").ok()?, address),
    }
}

/// The interface of the longest prefix that an address begins with, in `/proc/net/route`; of several the one with the
/// least metric.
fn interface4(routes: &str, address: Ipv4Addr) -> Option<String> {
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [name, to, _, _, _, _, metric, mask, ..] = fields[..] else { return None };
        let number = |text| u32::from_str_radix(text, 16).ok().map(|all| u32::from_be_bytes(all.to_ne_bytes()));
        let (to, mask) = (number(to)?, number(mask)?);
        (address.to_bits() & mask == to).then(|| (mask.count_ones(), metric.parse().unwrap_or(0), name.to_owned()))
    };
    best(routes.lines().skip(1).filter_map(route))
}

/// The same in `/proc/net/ipv6_route`.
fn interface6(routes: &str, address: Ipv6Addr) -> Option<String> {
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [to, bits, _, _, _, metric, _, _, _, name] = fields[..] else { return None };
        let (to, bits) = (u128::from_str_radix(to, 16).ok()?, u32::from_str_radix(bits, 16).ok()?);
        let metric = u32::from_str_radix(metric, 16).ok()?;
        let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
        (address.to_bits() & mask == to).then(|| (bits, metric, name.to_owned()))
    };
    best(routes.lines().filter_map(route))
}

fn best(routes: impl Iterator<Item = (u32, u32, String)>) -> Option<String> {
    routes.max_by_key(|(bits, metric, _)| (*bits, u32::MAX - metric)).map(|(_, _, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
        wlan0\t00000000\t010200C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n\
        eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
        ib0\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
    const ROUTES6: &str = "fd000000000000000000000000000000 40 00000000000000000000000000000000 00 \
        00000000000000000000000000000000 00000100 00000001 00000000 00000001     ib0\n\
        00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
        fd000000000000000000000000000001 00000400 00000003 00000000 00000003     eth0\n\
        00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
        00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n";

    #[test]
    fn the_route_with_the_longest_prefix_selects_the_interface() {
        let check = |address: &str, expected: &str| {
            let found = match address.parse().expect("an address") {
                IpAddr::V4(address) => interface4(ROUTES, address),
                IpAddr::V6(address) => interface6(ROUTES6, address),
            };
            assert_eq!(found.as_deref(), Some(expected), "{address}");
        };
        check("10.1.7.9", "ib0");
        check("10.2.7.9", "eth0");
        check("192.0.2.44", "eth0");
        check("fd00::17", "ib0");
        check("2001:db8::1", "eth0");
        assert_eq!(interface4("", Ipv4Addr::new(10, 1, 7, 9)), None);
    }

    #[test]
    fn rates_of_ports_are_read() {
        let check = |text, expected| assert_eq!(rate_of(text), expected, "{text}");
        check("100 Gb/sec (4X EDR)\n", Some(100_000_000_000));
        check("2.5 Gb/sec (1X SDR)", Some(2_500_000_000));
        check("fast", None);
    }

    #[test]
    fn the_route_to_this_machine_is_the_loopback_link() {
        let carried = Carried { by: "tcp".to_owned(), reason: String::new() };
        let route = Route::of(carried, "tcp://127.0.0.1:7164", "auto");
        let mtu = fs::read_to_string("/sys/class/net/lo/mtu").expect("every machine has it");
        assert_eq!((route.link.name.as_str(), route.link.bits_per_second), ("lo", None));
        assert_eq!(route.link.mtu_bytes, mtu.trim().parse().ok());
        assert!(route.no_gpu_direct.contains("over tcp"), "{}", route.no_gpu_direct);
    }
}

//! Selection of the device, port and GID that connections use.
//!
//! Ports that cannot carry a connection are left out first: those without reliable-connected queue pairs, and GIDs
//! whose address is another network namespace's. A configured list names the devices to choose from. Of the others come
//! first: fast ports, then the port with the address of the TCP connection, which is known to reach the peer, then
//! InfiniBand before RoCE, then ports near the processors of this process. Devices that are equal are dealt over the
//! shards of a server and the connections of a trainer.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};
use std::str::FromStr;

use super::VerbsDevices;
use super::provider::{LinkLayer, PairAddress};
use super::reasons::VerbsError;

/// Begins the reason of a side whose ports do not reach the peer's.
pub(super) const NOT_REACHED: &str = "the peer has";

/// The setting that selects devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best devices.
    #[default]
    Auto,
    /// No device.
    None,
    /// The best of the devices of these names.
    Named(DeviceNames),
}

/// The accepted values, for error texts.
pub const DEVICE_EXPECTED: &str = "auto, none, or RDMA devices: NAME, NAME:PORT or NAME:PORT:GID, several with commas, \
                                   where * stands for any letters; ^ before them means all others";

impl FromStr for DeviceChoice {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            names => names.parse().map(Self::Named),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::None => formatter.write_str("none"),
            Self::Named(names) => names.fmt(formatter),
        }
    }
}

impl From<&DeviceChoice> for VerbsDevices {
    fn from(choice: &DeviceChoice) -> Self {
        match choice {
            DeviceChoice::Auto => Self::Best,
            DeviceChoice::None => Self::None,
            DeviceChoice::Named(names) => Self::Named(names.clone()),
        }
    }
}

/// A list of devices to use, or of those not to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNames {
    excludes: bool,
    names: Vec<DeviceName>,
    /// Whether a list for other programs has the names: it says which devices there are for verbs, where it has any.
    is_of_others: bool,
}

/// A device's name, in which `*` stands for any letters, with port and GID index where it has several.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DeviceName {
    device: String,
    port: Option<u8>,
    gid: Option<u8>,
}

impl FromStr for DeviceNames {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (excludes, list) = text.strip_prefix('^').map_or((false, text), |list| (true, list));
        let names = list.split(',').map(str::parse).collect::<Result<Vec<DeviceName>, ()>>()?;
        Ok(Self { excludes, names, is_of_others: false })
    }
}

impl fmt::Display for DeviceNames {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = if self.excludes { "^" } else { "" };
        self.names.iter().try_for_each(|name| write!(formatter, "{}{name}", std::mem::replace(&mut before, ",")))
    }
}

impl FromStr for DeviceName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(':');
        let is_of_name = |one: char| one.is_ascii_graphic() && one != '^';
        let device = parts.next().filter(|name| !name.is_empty() && name.chars().all(is_of_name));
        let device = device.ok_or(())?.to_owned();
        let number = |part: Option<&str>| part.map(|part| part.parse().map_err(|_| ())).transpose();
        let (port, gid) = (number(parts.next())?, number(parts.next())?);
        if parts.next().is_some() || port == Some(0) { Err(()) } else { Ok(Self { device, port, gid }) }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.device)?;
        self.port.iter().try_for_each(|port| write!(formatter, ":{port}"))?;
        self.gid.iter().try_for_each(|gid| write!(formatter, ":{gid}"))
    }
}

impl DeviceNames {
    /// The names of a list for other programs.
    pub(super) fn of_others(self) -> Self {
        Self { is_of_others: true, ..self }
    }

    /// Whether all devices of the list are used, in its order.
    fn is_order(&self) -> bool {
        !self.excludes && !self.is_of_others && self.names.iter().all(|name| !name.device.contains('*'))
    }

    /// The place in the list of the name that means this port, or zero where all but the listed ones are meant; none
    /// for a port that is not meant.
    fn place(&self, candidate: &PortCandidate) -> Option<usize> {
        let place = self.names.iter().position(|name| name.means(candidate));
        if self.excludes { place.is_none().then_some(0) } else { place }
    }

    /// Whether a name has the GID's own index.
    fn has_gid(&self, candidate: &PortCandidate) -> bool {
        !self.excludes && self.names.iter().any(|name| name.gid.is_some() && name.means(candidate))
    }
}

impl DeviceName {
    fn means(&self, candidate: &PortCandidate) -> bool {
        let Self { device, port, gid } = self;
        let PortCandidate { port: own_port, gid: own_gid, device: own, .. } = candidate;
        matches(device, own) && port.is_none_or(|port| port == *own_port) && gid.is_none_or(|gid| gid == *own_gid)
    }
}

/// Whether a name is of a pattern, in which `*` stands for any letters.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((begin, rest)) => name.strip_prefix(begin).is_some_and(|left| {
            let mut ends = left.char_indices().map(|(at, _)| at).chain([left.len()]);
            ends.any(|at| matches(rest, &left[at..]))
        }),
    }
}

/// One address of an active port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortCandidate {
    pub(super) device: String,
    pub(super) port: u8,
    pub(super) gid: u8,
    pub(super) address: IpAddr,
    pub(super) layer: LinkLayer,
    /// Megabits per second.
    pub(super) speed: u32,
    /// Whether the card is near the processors of this process, where the process has the processors of one node.
    pub(super) is_near: bool,
    /// Whether the address is one of this network namespace. Addresses of InfiniBand are of every namespace.
    pub(super) is_here: bool,
}

/// The connection that a port is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionPlace {
    /// The local address of its TCP connection.
    pub(super) local: Option<IpAddr>,
    /// Which of several equal devices, in turn.
    pub(super) turn: usize,
    /// The peer's link, if it is known.
    pub(super) link: Option<PeerLink>,
    /// The link layer that the peer has not, as it has said.
    pub(super) lacking: Option<LinkLayer>,
}

/// The link of a peer's port, by which others reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerLink {
    layer: LinkLayer,
    /// Its address, of another host that of its net: peers of one net are answered alike.
    address: IpAddr,
}

impl PeerLink {
    /// The link of a peer's queue pair. A peer that does not say it has a LID in InfiniBand alone.
    pub(super) fn of(there: &PairAddress) -> Option<Self> {
        let layer = layer_of(there)?;
        let address = IpAddr::V6(Ipv6Addr::from(there.gid)).to_canonical();
        let is_own = layer == LinkLayer::Ethernet && is_of_this_host((address, 0));
        Some(Self { layer, address: if is_own { address } else { net(address) } })
    }

    /// How near a port is: with the peer's own address, or by the bits that its address begins with like the peer's.
    fn nearness(&self, candidate: &PortCandidate) -> u32 {
        match (self.address, candidate.address) {
            (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
            (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
            _ => 0,
        }
    }

    /// Whether queue pairs of these two ports can be connected: in one subnet of InfiniBand, or by addresses of one
    /// kind.
    fn reaches(&self, candidate: &PortCandidate) -> bool {
        self.layer == candidate.layer
            && match self.layer {
                LinkLayer::InfiniBand => net(self.address) == net(candidate.address),
                _ => kind(self.address) == kind(candidate.address),
            }
    }
}

impl fmt::Display for PeerLink {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} with the address {}", self.layer, self.address)
    }
}

/// The link layer of a queue pair; none of a software device.
fn layer_of(there: &PairAddress) -> Option<LinkLayer> {
    match there.layer {
        LinkLayer::Unknown if there.gid == [0; 16] => None,
        LinkLayer::Unknown if there.lid == 0 => Some(LinkLayer::Ethernet),
        LinkLayer::Unknown => Some(LinkLayer::InfiniBand),
        known => Some(known),
    }
}

/// Whether queue pairs of these two can be connected, as far as they say it.
pub(super) fn can_meet(here: &PairAddress, there: &PairAddress) -> bool {
    layer_of(here).zip(layer_of(there)).is_none_or(|(one, other)| one == other)
}

/// Whether an address is one of this host, as its network namespace has them: then a socket can have it.
pub(super) fn is_of_this_host(address: impl ToSocketAddrs) -> bool {
    UdpSocket::bind(address).is_ok()
}

/// The beginning of an address: 24 bits, or 64, which of InfiniBand are the subnet.
fn net(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & !0xff)),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
    }
}

/// How far an address of RoCE version 2 reaches, and by which protocol: none of one kind reaches one of another.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AddressReach {
    LinkLocal,
    V6,
    V4,
}

fn kind(address: IpAddr) -> AddressReach {
    match address {
        IpAddr::V4(_) => AddressReach::V4,
        IpAddr::V6(address) if address.is_unicast_link_local() => AddressReach::LinkLocal,
        IpAddr::V6(_) => AddressReach::V6,
    }
}

impl PortCandidate {
    /// Preference where neither name, speed nor address decides. InfiniBand needs no settings of the fabric.
    fn rank(&self) -> u8 {
        match (self.layer, kind(self.address)) {
            (LinkLayer::InfiniBand, _) => 3,
            (_, AddressReach::V4) => 2,
            (_, AddressReach::V6) => 1,
            (_, AddressReach::LinkLocal) => 0,
        }
    }
}

impl fmt::Display for PortCandidate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, port, gid, address, layer, speed, .. } = self;
        write!(formatter, "{device}:{port}:{gid} ({layer}, {} Gbit/s, {address})", speed / 1000)
    }
}

/// A candidate with its index, and its place in the list of names.
type PlacedCandidate<'a> = (usize, &'a PortCandidate, usize);

/// The candidates that are named, have the index that is asked for, and are of this network namespace.
fn usable<'a>(
    candidates: &'a [PortCandidate],
    names: Option<&DeviceNames>,
    gid_index: Option<u8>,
    listed: &dyn Fn() -> String,
) -> Result<Vec<PlacedCandidate<'a>>, VerbsError> {
    // A list for other programs that names none of these devices leaves the choice.
    let is_free = |names: &DeviceNames| names.is_of_others && !candidates.iter().any(|one| names.place(one).is_some());
    let names = names.filter(|names| !is_free(names));
    let meant: Vec<PlacedCandidate<'_>> = candidates
        .iter()
        .enumerate()
        .filter_map(|(index, one)| Some((index, one, names.map_or(Some(0), |names| names.place(one))?)))
        .collect();
    if let (true, Some(names)) = (meant.is_empty(), names) {
        return Err(VerbsError::no_device(format!("expected one of {}, found no {names}", listed())));
    }
    // An index of the list's own goes before the setting for all, which is that of RoCE.
    let is_listed_gid = |one: &PortCandidate| names.is_some_and(|names| names.has_gid(one));
    let is_of_index = |one: &PortCandidate| {
        let is_free = one.layer == LinkLayer::InfiniBand || gid_index.is_none_or(|index| index == one.gid);
        is_free || is_listed_gid(one)
    };
    let indexed: Vec<_> = meant.into_iter().filter(|(_, one, _)| is_of_index(one)).collect();
    if let (true, Some(index)) = (indexed.is_empty(), gid_index) {
        return Err(VerbsError::no_device(format!("expected one of {}, found no address {index}", listed())));
    }
    let is_usable = |one: &PortCandidate| one.is_here || is_listed_gid(one);
    let is_any_usable = indexed.iter().any(|(_, one, _)| is_usable(one));
    let usable: Vec<_> = match gid_index {
        // The index says which one is meant, where there is no other.
        Some(_) if !is_any_usable => indexed,
        _ => indexed.into_iter().filter(|(_, one, _)| is_usable(one)).collect(),
    };
    if usable.is_empty() {
        let text = "which are addresses of other network namespaces; expected one of this, or a GID index";
        return Err(VerbsError::no_device(format!("found {}, {text}", listed())));
    }
    Ok(usable)
}

/// The index of the candidate for a connection. The first of equals of a device wins, and devices that are equal are
/// taken in turn.
///
/// # Errors
/// No candidate, or none that is named, or that reaches the peer; the text lists the candidates.
pub(super) fn choose(
    candidates: &[PortCandidate],
    names: Option<&DeviceNames>,
    gid_index: Option<u8>,
    place: &ConnectionPlace,
) -> Result<usize, VerbsError> {
    let listed = || candidates.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if candidates.is_empty() {
        return Err(VerbsError::no_device("none has an active port"));
    }
    let usable = usable(candidates, names, gid_index, &listed)?;
    let mut reaching: Vec<_> =
        usable.into_iter().filter(|(_, one, _)| place.link.is_none_or(|link| link.reaches(one))).collect();
    if reaching.iter().any(|(_, one, _)| Some(one.layer) != place.lacking) {
        reaching.retain(|(_, one, _)| Some(one.layer) != place.lacking);
    }
    let Some(best_speed) = reaching.iter().map(|(_, one, _)| one.speed).max() else {
        let link = place.link.map(|link| link.to_string()).unwrap_or_default();
        return Err(VerbsError::no_device(format!("{NOT_REACHED} {link}, found {}", listed())));
    };
    // A quarter slower is about as fast: a connection's own address then says more.
    let is_fast = |one: &PortCandidate| best_speed.saturating_mul(3) <= one.speed.saturating_mul(4);
    let is_listed = names.is_some_and(DeviceNames::is_order);
    let key = |one: &PortCandidate| {
        let is_own = Some(one.address) == place.local;
        let nearness = place.link.map_or(0, |link| link.nearness(one));
        (is_fast(one), is_own, one.rank(), one.is_near, nearness, one.speed)
    };
    // Of each device the best address, of equals the first.
    let mut of_devices: Vec<PlacedCandidate<'_>> = Vec::new();
    for (index, one, at) in reaching {
        match of_devices.iter_mut().find(|(_, other, place)| other.device == one.device && *place == at) {
            Some(known) if key(known.1) < key(one) => *known = (index, one, at),
            Some(_) => {}
            None => of_devices.push((index, one, at)),
        }
    }
    if is_listed {
        // The program's list is its choice: all of it is used, in its order.
        of_devices.sort_by_key(|(_, _, at)| *at);
    } else {
        let best = of_devices.iter().map(|(_, one, _)| key(one)).max();
        of_devices.retain(|(_, one, _)| Some(key(one)) == best);
    }
    Ok(of_devices[place.turn % of_devices.len()].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(device: &str, port: u8, gid: u8, address: &str, speed: u32) -> PortCandidate {
        let (device, address) = (device.to_owned(), address.parse().expect("an address"));
        let layer = if speed % 2 == 1 { LinkLayer::InfiniBand } else { LinkLayer::Ethernet };
        PortCandidate { device, port, gid, address, layer, speed, is_near: false, is_here: true }
    }

    /// Cards of Ethernet with 100 Gbit/s.
    fn candidates() -> Vec<PortCandidate> {
        vec![
            one("mlx5_0", 1, 0, "fe80::1", 100_000),
            one("mlx5_0", 1, 3, "10.0.0.1", 100_000),
            one("mlx5_1", 1, 3, "10.0.1.1", 100_000),
            one("mlx5_1", 2, 3, "10.0.2.1", 100_000),
            one("mlx5_10", 1, 0, "fe80::2", 100_000),
        ]
    }

    fn chosen(candidates: &[PortCandidate], names: &str, local: &str, turn: usize) -> Result<usize, VerbsError> {
        let names: Option<DeviceNames> = (!names.is_empty()).then(|| names.parse().expect("names"));
        let local = (!local.is_empty()).then(|| local.parse().expect("an address"));
        choose(candidates, names.as_ref(), None, &ConnectionPlace { local, turn, ..ConnectionPlace::default() })
    }

    #[test]
    fn the_connections_local_address_takes_precedence_over_the_best_device() {
        let check = |names: &str, local: &str, expected: usize| {
            assert_eq!(chosen(&candidates(), names, local, 0), Ok(expected), "{names:?}, {local:?}");
        };
        check("", "", 1);
        check("", "10.0.1.1", 2);
        check("", "10.0.2.1", 3);
        check("", "fe80::2", 4);
        check("", "192.168.0.1", 1);
        check("mlx5_1", "", 2);
        check("mlx5_1", "10.0.2.1", 3);
        check("mlx5_1", "10.0.0.1", 2);
        check("mlx5_1:2", "10.0.1.1", 3);
        check("mlx5_0:1:0", "10.0.0.1", 0);
        check("mlx5_10", "", 4);
        check("mlx5_10:1", "", 4);
        check("^mlx5_0", "", 2);
        check("^mlx5_0,mlx5_1:1", "", 3);
        check("mlx5_1*:1", "", 2);
    }

    #[test]
    fn a_fast_device_takes_precedence_over_the_address_of_a_slow_one() {
        let infiniband = |name: &str, speed: u32| one(name, 1, 0, "fe80::5", speed + 1);
        let mut host = vec![one("mlx5_bond_0", 1, 3, "10.0.0.1", 100_000), infiniband("mlx5_4", 400_000)];
        assert_eq!(chosen(&host, "", "10.0.0.1", 0), Ok(1), "the host's name is that of a slow card");
        host[0].speed = 320_000;
        assert_eq!(chosen(&host, "", "10.0.0.1", 0), Ok(0), "it is about as fast, and known to reach the peer");
        assert_eq!(chosen(&host, "", "", 0), Ok(1), "InfiniBand goes before RoCE");
        assert_eq!(chosen(&host, "mlx5_bond_*", "", 0), Ok(0));
    }

    #[test]
    fn connections_rotate_over_equal_devices_and_prefer_near_ones() {
        let mut host: Vec<_> = (0..4).map(|at| one(&format!("mlx5_{at}"), 1, 0, "fe80::5", 400_001)).collect();
        let dealt = |host: &[_], names: &str| -> Vec<usize> {
            (0..5).map(|turn| chosen(host, names, "", turn).expect("there are cards")).collect()
        };
        assert_eq!(dealt(&host, ""), [0, 1, 2, 3, 0]);
        host[1].is_near = true;
        host[2].is_near = true;
        assert_eq!(dealt(&host, ""), [1, 2, 1, 2, 1]);
        // A list is used in its order, whatever else could be preferred.
        assert_eq!(dealt(&host, "mlx5_3,mlx5_0"), [3, 0, 3, 0, 3]);
        assert_eq!(dealt(&host, "^mlx5_1"), [2, 2, 2, 2, 2]);
    }

    #[test]
    fn a_port_that_does_not_reach_the_peer_is_not_chosen() {
        let host = [
            one("mlx5_0", 1, 0, "fe80::1", 400_001),
            one("mlx5_1", 1, 0, "fec0::1", 400_001),
            one("mlx5_2", 1, 3, "10.0.0.1", 100_000),
            one("mlx5_2", 1, 1, "fe80::1", 100_000),
        ];
        let towards = |layer, address: &str| {
            let gid = match address.parse().expect("an address") {
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            };
            let there = PairAddress { number: 1, packet: 1, gid, lid: 1, mtu: 5, reads_in: 1, layer };
            let place = ConnectionPlace { link: PeerLink::of(&there), ..ConnectionPlace::default() };
            choose(&host, None, None, &place).map_err(|fault| fault.to_string())
        };
        assert_eq!(towards(LinkLayer::InfiniBand, "fe80::9"), Ok(0));
        assert_eq!(towards(LinkLayer::InfiniBand, "fec0::9"), Ok(1));
        assert_eq!(towards(LinkLayer::Ethernet, "10.0.0.9"), Ok(2));
        assert_eq!(towards(LinkLayer::Ethernet, "fe80::9"), Ok(3));
        assert_eq!(towards(LinkLayer::Unknown, "fe80::9"), Ok(0), "its LID is not zero");
        let refused = towards(LinkLayer::Ethernet, "2001:db8::9").expect_err("there is none");
        assert!(
            refused.contains("the peer has RoCE v2 with the address 2001:db8::, found mlx5_0:1:0 (InfiniBand, 400")
        );
        assert!(towards(LinkLayer::InfiniBand, "fd00::9").is_err(), "another subnet");
    }

    #[test]
    fn an_address_of_another_network_namespace_is_used_only_where_it_is_named() {
        let mut host = vec![one("mlx5_0", 1, 3, "10.0.0.1", 100_000), one("mlx5_0", 1, 5, "10.0.9.1", 100_000)];
        host[0].is_here = false;
        assert_eq!(chosen(&host, "", "", 0), Ok(1));
        assert_eq!(chosen(&host, "mlx5_0:1:3", "", 0), Ok(0));
        host[1].is_here = false;
        let refused = chosen(&host, "mlx5_0", "", 0).expect_err("both are elsewhere").to_string();
        assert!(refused.contains("addresses of other network namespaces; expected one of this"), "{refused}");
    }

    #[test]
    fn a_common_gid_index_precedes_the_best_address_and_follows_the_lists_own_index() {
        let host = [one("mlx5_0", 1, 3, "10.0.0.1", 100_000), one("mlx5_0", 1, 5, "fe80::1", 100_000)];
        let at = |names: &str, index| {
            let names: Option<DeviceNames> = names.parse().ok();
            choose(&host, names.as_ref(), index, &ConnectionPlace::default()).map_err(|fault| fault.to_string())
        };
        assert_eq!(at("", Some(5)), Ok(1));
        assert_eq!(at("mlx5_0", Some(5)), Ok(1));
        assert_eq!(at("mlx5_0:1:3", Some(5)), Ok(0));
        assert!(at("", Some(4)).expect_err("there is none").contains("found no address 4"));
        let infiniband = [one("mlx5_1", 1, 0, "fe80::1", 400_001)];
        assert_eq!(choose(&infiniband, None, Some(3), &ConnectionPlace::default()), Ok(0), "an index is of RoCE");
        let mut pod = [one("mlx5_0", 1, 3, "10.0.0.1", 100_000), one("mlx5_1", 1, 3, "10.0.1.1", 100_000)];
        pod[0].is_here = false;
        assert_eq!(choose(&pod, None, Some(3), &ConnectionPlace::default()), Ok(1));
        pod[1].is_here = false;
        assert_eq!(choose(&pod, None, Some(3), &ConnectionPlace::default()), Ok(0), "there is no other");
    }

    #[test]
    fn a_server_answers_with_the_card_that_is_nearest_to_the_peers() {
        let address = |third: u8| format!("10.0.{third}.1");
        let rails: Vec<_> = (0..4).map(|at| one(&format!("mlx5_{at}"), 1, 3, &address(at), 400_000)).collect();
        let towards = |text: &str, turn| {
            let gid = text.parse::<Ipv4Addr>().expect("an address").to_ipv6_mapped().octets();
            let layer = LinkLayer::Ethernet;
            let there = PairAddress { number: 1, packet: 1, gid, lid: 0, mtu: 5, reads_in: 1, layer };
            choose(
                &rails,
                None,
                None,
                &ConnectionPlace { link: PeerLink::of(&there), turn, ..ConnectionPlace::default() },
            )
        };
        for turn in 0..3 {
            assert_eq!(towards("10.0.2.77", turn), Ok(2), "the rail of the peer");
        }
        assert_eq!((towards("10.1.0.9", 0), towards("10.1.0.9", 1)), (Ok(0), Ok(1)), "all are as far");
        let of_host = [one("mlx5_0", 1, 3, "127.0.0.5", 400_000), one("mlx5_1", 1, 3, "127.0.0.6", 400_000)];
        let gid = Ipv4Addr::new(127, 0, 0, 6).to_ipv6_mapped().octets();
        let there = PairAddress { number: 1, packet: 1, gid, lid: 0, mtu: 5, reads_in: 1, layer: LinkLayer::Unknown };
        let place = ConnectionPlace { link: PeerLink::of(&there), ..ConnectionPlace::default() };
        assert_eq!(choose(&of_host, None, None, &place), Ok(1), "the peer's own card");
    }

    #[test]
    fn a_link_layer_that_the_peer_lacks_is_not_offered_again_if_there_is_another() {
        let host = [one("mlx5_0", 1, 0, "fe80::1", 400_001), one("mlx5_1", 1, 3, "10.0.0.1", 100_000)];
        let without = |lacking| choose(&host, None, None, &ConnectionPlace { lacking, ..ConnectionPlace::default() });
        assert_eq!(without(None), Ok(0));
        assert_eq!(without(Some(LinkLayer::InfiniBand)), Ok(1));
        assert_eq!(without(Some(LinkLayer::Ethernet)), Ok(0));
        let alone = ConnectionPlace { lacking: Some(LinkLayer::InfiniBand), ..ConnectionPlace::default() };
        assert_eq!(choose(&host[..1], None, None, &alone), Ok(0));
    }

    #[test]
    fn a_list_for_other_programs_says_which_devices_there_are() {
        let host = [
            one("mlx5_1", 1, 3, "10.0.0.1", 25_000),
            one("mlx5_0", 1, 0, "fe80::1", 400_001),
            one("mlx5_2", 1, 0, "fe80::2", 400_001),
        ];
        let at = |names: &str, turn| {
            let names = names.parse::<DeviceNames>().expect("names").of_others();
            choose(&host, Some(&names), None, &ConnectionPlace { turn, ..ConnectionPlace::default() })
        };
        assert_eq!((at("mlx5*", 0), at("mlx5*", 1)), (Ok(1), Ok(2)), "the slow one is not used");
        assert_eq!(at("mlx5_2,mlx5_1", 1), Ok(2));
        assert_eq!(at("eth0", 0), Ok(1), "it names none of verbs");
        assert_eq!(chosen(&host, "mlx5_*", "", 0), Ok(1), "and so is a pattern");
    }

    #[test]
    fn an_unknown_device_name_is_refused_with_the_existing_devices() {
        let check = |candidates: &[PortCandidate], names: &str, expected: &str| {
            let fault = chosen(candidates, names, "", 0).expect_err("there is none").to_string();
            assert!(fault.contains(expected), "{fault}");
        };
        let all = candidates();
        let listed = "expected one of mlx5_0:1:3 (RoCE v2, 100 Gbit/s, 10.0.0.1), mlx5_1:1:3 (RoCE v2, 100 Gbit/s, \
                      10.0.1.1), found no mlx5";
        check(&all[1..3], "mlx5", listed);
        check(&all, "mlx5_0:2", "found no mlx5_0:2");
        check(&all, "mlx5_0:1:1", "found no mlx5_0:1:1");
        check(&all[4..], "mlx5_1,mlx5_2", "found no mlx5_1,mlx5_2");
        check(&all, "^mlx5_*", "found no ^mlx5_*");
        check(&[], "mlx5_1", "none has an active port");
        check(&[], "", "none has an active port");
    }

    #[test]
    fn device_names_parse_and_print_as_the_same_text() {
        for choice in ["auto", "none", "mlx5_0", "mlx5_0:1:3", "mlx5_0,mlx5_1:2", "^mlx5_bond_0", "^mlx5_*,rxe0:1"] {
            assert_eq!(choice.parse::<DeviceChoice>().map(|choice| choice.to_string()), Ok(choice.to_owned()));
        }
        let wrong =
            ["", ":1", "mlx5_0:", "mlx5_0:one", "mlx5_0:0", "mlx5_0:256", "mlx5_0:1:2:3", "mlx5 0", "a,", "^", "a,^b"];
        for wrong in wrong {
            assert_eq!(wrong.parse::<DeviceChoice>(), Err(()), "{wrong:?}");
        }
    }

    #[test]
    fn a_star_stands_for_any_letters() {
        let check = |pattern, name, expected| assert_eq!(matches(pattern, name), expected, "{pattern} and {name}");
        check("mlx5_0", "mlx5_0", true);
        check("mlx5_1", "mlx5_10", false);
        check("mlx5_*", "mlx5_10", true);
        check("mlx5_*", "mlx5_", true);
        check("*", "", true);
        check("*_0", "mlx5_bond_0", true);
        check("*bond*", "mlx5_bond_0", true);
        check("m*5*1", "mlx5_10", false);
        check("m*5*1*", "mlx5_10", true);
    }
}

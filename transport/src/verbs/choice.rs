//! Selection of the device, port and GID that connections use.
//!
//! A configured name goes first. Otherwise the port whose address is that of the TCP connection is chosen, because it
//! is known to reach the peer; else the port of the highest rank.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::VerbsDevices;
use super::reasons::VerbsError;

/// The setting that selects a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The device of the connection's address, else the best one.
    #[default]
    Auto,
    /// No device.
    None,
    /// The device of this name.
    Named(DeviceName),
}

/// The accepted values, for error texts.
pub const DEVICE_EXPECTED: &str = "auto, none, or an RDMA device: NAME, NAME:PORT or NAME:PORT:GID";

impl FromStr for DeviceChoice {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            name => name.parse().map(Self::Named),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::None => formatter.write_str("none"),
            Self::Named(name) => name.fmt(formatter),
        }
    }
}

impl From<&DeviceChoice> for VerbsDevices {
    fn from(choice: &DeviceChoice) -> Self {
        match choice {
            DeviceChoice::Auto => Self::Best,
            DeviceChoice::None => Self::None,
            DeviceChoice::Named(name) => Self::Named(name.clone()),
        }
    }
}

/// A device's name, with port and GID index where it has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName {
    device: String,
    port: Option<u8>,
    gid: Option<u8>,
}

impl FromStr for DeviceName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(':');
        let device = parts.next().filter(|name| !name.is_empty() && name.chars().all(|one| one.is_ascii_graphic()));
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

/// One address of an active port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortCandidate {
    pub(super) device: String,
    pub(super) port: u8,
    pub(super) gid: u8,
    pub(super) address: IpAddr,
    /// Preference when neither name nor address decides.
    pub(super) rank: u8,
}

impl PortCandidate {
    fn is_meant(&self, name: &DeviceName) -> bool {
        let DeviceName { device, port, gid } = name;
        self.device == *device && port.is_none_or(|port| self.port == port) && gid.is_none_or(|gid| self.gid == gid)
    }
}

impl fmt::Display for PortCandidate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, port, gid, address, .. } = self;
        write!(formatter, "{device}:{port}:{gid} ({address})")
    }
}

/// The index of the candidate for connections from local address `local`. The first of equals wins.
///
/// # Errors
/// No candidate, or none of that name; the text lists the candidates.
pub(super) fn choose(
    candidates: &[PortCandidate],
    name: Option<&DeviceName>,
    local: Option<IpAddr>,
) -> Result<usize, VerbsError> {
    let meant = candidates.iter().enumerate().filter(|(_, one)| name.is_none_or(|name| one.is_meant(name)));
    // `max_by_key` returns the last of equals, hence the reversed order.
    let best = meant.rev().max_by_key(|(_, one)| (Some(one.address) == local, one.rank));
    best.map(|(index, _)| index).ok_or_else(|| match (name, candidates) {
        (_, []) => VerbsError::no_device("none has an active port"),
        (Some(name), _) => {
            let known: Vec<_> = candidates.iter().map(ToString::to_string).collect();
            VerbsError::no_device(format!("expected one of {}, found no {name}", known.join(", ")))
        }
        (None, _) => unreachable!("each of them is meant"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates() -> Vec<PortCandidate> {
        let one = |device: &str, port, gid, address: &str, rank| {
            let (device, address) = (device.to_owned(), address.parse().expect("an address"));
            PortCandidate { device, port, gid, address, rank }
        };
        vec![
            one("mlx5_0", 1, 0, "fe80::1", 1),
            one("mlx5_0", 1, 3, "10.0.0.1", 3),
            one("mlx5_1", 1, 3, "10.0.1.1", 3),
            one("mlx5_1", 2, 3, "10.0.2.1", 3),
            one("mlx5_10", 1, 0, "fe80::2", 2),
        ]
    }

    #[test]
    fn the_address_of_the_connection_goes_before_what_suits_best() {
        let check = |name: &str, local: &str, expected: usize| {
            let name = (!name.is_empty()).then(|| name.parse().expect("a name"));
            let local = (!local.is_empty()).then(|| local.parse().expect("an address"));
            assert_eq!(choose(&candidates(), name.as_ref(), local), Ok(expected), "{name:?}, {local:?}");
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
    }

    #[test]
    fn a_name_that_nothing_has_is_refused_with_what_there_is() {
        let check = |candidates: &[PortCandidate], name: Option<&str>, expected: &str| {
            let name = name.map(|name| name.parse().expect("a name"));
            let fault = choose(candidates, name.as_ref(), None).expect_err("there is none").to_string();
            assert!(fault.contains(expected), "{fault}");
        };
        let all = candidates();
        check(&all[1..3], Some("mlx5"), "expected one of mlx5_0:1:3 (10.0.0.1), mlx5_1:1:3 (10.0.1.1), found no mlx5");
        check(&all, Some("mlx5_0:2"), "found no mlx5_0:2");
        check(&all, Some("mlx5_0:1:1"), "found no mlx5_0:1:1");
        check(&all[4..], Some("mlx5_1"), "found no mlx5_1");
        check(&[], Some("mlx5_1"), "none has an active port");
        check(&[], None, "none has an active port");
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["mlx5_0", "mlx5_0:1", "mlx5_0:1:3", "rxe0:2:0"] {
            assert_eq!(name.parse::<DeviceName>().map(|name| name.to_string()), Ok(name.to_owned()));
        }
        for choice in ["auto", "none", "mlx5_0:1:3"] {
            assert_eq!(choice.parse::<DeviceChoice>().map(|choice| choice.to_string()), Ok(choice.to_owned()));
        }
        for wrong in ["", ":1", "mlx5_0:", "mlx5_0:one", "mlx5_0:0", "mlx5_0:256", "mlx5_0:1:2:3", "mlx5 0"] {
            assert_eq!(wrong.parse::<DeviceName>(), Err(()), "{wrong:?}");
        }
    }
}

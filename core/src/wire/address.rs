//! Addresses: an optional scheme, then `host:port`. The host is a name or a number, IPv6 in brackets.

use std::fmt;

use crate::error::Failure;

/// Transport by which an address is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// The fastest path: shared memory within a host; between hosts verbs where both have a device, else TCP.
    Auto,
    /// TCP, which every machine has.
    Tcp,
    /// Shared memory of processes of one machine.
    Shm,
    /// RDMA: network cards access registered memory of other machines.
    Verbs,
    /// Within one process, for tests and measurements.
    Loopback,
}

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The transport.
    pub scheme: Scheme,
    /// A host name or a number, without brackets.
    pub host: String,
    /// The port; zero asks the system for a free one when binding.
    pub port: u16,
}

impl Address {
    /// Reads `host:port`, with `auto://`, `tcp://`, `shm://` or `verbs://` before it; nothing before it means
    /// `auto://`.
    ///
    /// # Errors
    /// The fault in the text, and the expected form.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |what: &str| {
            let expected = "host:port, such as 127.0.0.1:7164, or with tcp://, shm:// or verbs:// before it";
            Failure::call(format!("address \"{text}\": {what}; expected {expected}"))
        };
        let (scheme, rest) = text.split_once("://").unwrap_or(("auto", text));
        let scheme = match scheme {
            "auto" => Scheme::Auto,
            "tcp" => Scheme::Tcp,
            "shm" => Scheme::Shm,
            "verbs" => Scheme::Verbs,
            "loopback" => Scheme::Loopback,
            other => return Err(wrong(&format!("unknown transport \"{other}\""))),
        };
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
        let port = port.parse().map_err(|_| wrong(&format!("port \"{port}\" is not a number from 0 to 65535")))?;
        let bare = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
        if bare.is_none() && host.contains(':') {
            return Err(wrong("an IPv6 address stands in brackets"));
        }
        let host = bare.unwrap_or(host);
        if host.is_empty() || host.len() > 255 || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(wrong("the host is missing or not a name"));
        }
        Ok(Self { scheme, host: host.to_owned(), port })
    }

    /// The address with the scheme of the process's settings; [`Scheme::Auto`] keeps the address's own scheme.
    #[must_use]
    pub fn reached_by(self, scheme: Scheme) -> Self {
        if scheme == Scheme::Auto { self } else { Self { scheme, ..self } }
    }

    /// The address of a lane of this server. One port has all lanes, except within a process, where each lane has an
    /// address of its own.
    #[must_use]
    pub fn of_lane(&self, lane: u64) -> Self {
        match (self.scheme, u16::try_from(lane)) {
            (Scheme::Loopback, Ok(port)) => Self { port, ..self.clone() },
            (Scheme::Loopback, Err(_)) => {
                let (host, port) = (format!("{}#{}", self.host, lane >> 16), (lane & 0xffff) as u16);
                Self { scheme: self.scheme, host, port }
            }
            _ => self.clone(),
        }
    }

    /// Whether only this machine can reach it.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        let number = self.host.parse::<core::net::IpAddr>();
        let is_within = matches!(self.scheme, Scheme::Loopback | Scheme::Shm);
        is_within || self.host == "localhost" || number.is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self.scheme {
            // An address without a required scheme is printed without one, for trainers' settings.
            Scheme::Auto => "",
            Scheme::Tcp => "tcp://",
            Scheme::Shm => "shm://",
            Scheme::Verbs => "verbs://",
            Scheme::Loopback => "loopback://",
        })?;
        if self.host.contains(':') {
            write!(formatter, "[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "{}:{}", self.host, self.port)
        }
    }
}

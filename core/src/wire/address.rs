//! Addresses: `tcp://host:port`, names as well as numbers, IPv6 in brackets.

use std::fmt;

use crate::error::Failure;

/// How to reach an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Between machines, always there.
    Tcp,
    /// Within one process, for tests.
    Loopback,
}

/// Where a server listens or is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// How.
    pub scheme: Scheme,
    /// A host name or a number, without brackets.
    pub host: String,
    /// The port; zero asks the system for a free one when binding.
    pub port: u16,
}

impl Address {
    /// Reads `tcp://host:port`; `host:port` alone means TCP.
    ///
    /// # Errors
    /// What is wrong with the text, and the form expected.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |what: &str| {
            Failure::call(format!("address \"{text}\": {what}; expected tcp://host:port, such as tcp://127.0.0.1:7164"))
        };
        let (scheme, rest) = text.split_once("://").unwrap_or(("tcp", text));
        let scheme = match scheme {
            "tcp" => Scheme::Tcp,
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

    /// Whether only this machine can reach it.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        let number = self.host.parse::<core::net::IpAddr>();
        self.scheme == Scheme::Loopback || self.host == "localhost" || number.is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::Tcp => "tcp",
            Scheme::Loopback => "loopback",
        };
        if self.host.contains(':') {
            write!(formatter, "{scheme}://[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "{scheme}://{}:{}", self.host, self.port)
        }
    }
}

//! Encryption of connections over TCP by TLS 1.3.
//!
//! [`Encryption`] has the certificates of a process, `TlsSession` the record layer of one connection, and
//! `TcpChannel` is the byte stream of a connection over TCP, plain or encrypted. Why so:
//! `docs/decisions/encryption.md`.
//!
//! Not here: the token that is proven inside a session (`network::token`), and the choice of a transport
//! (`network::socket`). No cryptography is written here: `rustls` has the protocol, and `ring` the algorithms.

mod calls;
mod certificates;
mod channel;
mod files;
mod session;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub use certificates::Encryption;
pub(crate) use channel::{DetachedChannel, TcpChannel};
pub(crate) use files::ReloadedFiles;
pub(crate) use session::{ChannelBinding, TlsFailure};

/// The connections that are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncryptPolicy {
    /// Nothing.
    #[default]
    Off,
    /// Connections over TCP. Verbs and shared memory are used as without it, and are not encrypted.
    Tcp,
    /// Connections over TCP, and verbs are refused. Shared memory does not leave the host.
    Required,
}

/// The accepted values, for error texts.
pub const ENCRYPT_EXPECTED: &str = "one of off, tcp, required";

impl FromStr for EncryptPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "off" => Ok(Self::Off),
            "tcp" => Ok(Self::Tcp),
            "required" => Ok(Self::Required),
            _ => Err(()),
        }
    }
}

impl fmt::Display for EncryptPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Off => "off",
            Self::Tcp => "tcp",
            Self::Required => "required",
        })
    }
}

/// The settings of encryption of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncryptionSettings {
    /// The connections that are encrypted.
    pub policy: EncryptPolicy,
    /// The file with this side's certificate, and those between it and the authority.
    pub certificate: Option<PathBuf>,
    /// The file with the certificate's private key.
    pub private_key: Option<PathBuf>,
    /// The file with the certificates of authorities that the other side's certificate must be from.
    pub authority: Option<PathBuf>,
}

/// The first byte of a TLS handshake. No frame and no token begins with it.
pub(crate) const HANDSHAKE_BYTE: u8 = 0x16;

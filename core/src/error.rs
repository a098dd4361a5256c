//! Failures of the environment, classified by the largest thing lost, because recovery depends on it.

use thiserror::Error;

use crate::ids::PeerId;

/// A failure of the environment. Bugs are `assert!`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// One call was refused; the connection is usable. Report it to the caller.
    #[error("{0}")]
    Call(String),
    /// A connection is lost or untrusted. Drop its session; other sessions continue.
    #[error("connection {peer}: {reason}")]
    Peer {
        /// The connection.
        peer: PeerId,
        /// Why.
        reason: String,
    },
    /// A device is gone. Rebuild everything on it.
    #[error("device: {0}")]
    Device(String),
    /// This process cannot go on. Stop; let the cluster start another.
    #[error("{0}")]
    Node(String),
}

impl Failure {
    /// A refused call, from anything printable.
    pub fn call(text: impl Into<String>) -> Self {
        Self::Call(text.into())
    }
}

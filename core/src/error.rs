//! What the world can do to us, named by the largest thing it took down, because that is the plan.

use thiserror::Error;

use crate::ids::PeerId;

/// A failure that is not a bug of ours. Bugs are `assert!`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// One call was refused; the peer is well. Report it to the caller.
    #[error("{0}")]
    Call(String),
    /// A connection is gone or not to be trusted. Drop its session; the others carry on.
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

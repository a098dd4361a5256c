//! Failures of the environment, classified by the largest thing lost, because recovery depends on it.

use thiserror::Error;

use crate::ids::PeerId;

/// A failure of the environment. Bugs are `assert!`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// One call was refused; the connection is usable. Report it to the caller.
    #[error("{0}")]
    Call(String),
    /// One call ended for a reason that programs tell apart; otherwise as [`Failure::Call`].
    #[error("{text}")]
    Ended {
        /// The reason, for programs.
        end: CallEnd,
        /// The reason, for people.
        text: String,
    },
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

/// Why a call ended without success, for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// The call has a fault: repeated, it fails again.
    Refused,
    /// The parameters are not initialised.
    NotInitialised,
    /// The call reached its deadline.
    Timeout,
    /// The call waited for these ranks until a server gave up.
    MissingTrainers(Vec<u32>),
    /// A server is gone.
    ServerLost,
    /// The program cancelled the call.
    Cancelled,
}

impl Failure {
    /// The end of a call for a reason that programs tell apart, from anything printable.
    pub fn ended(end: CallEnd, text: impl Into<String>) -> Self {
        match end {
            CallEnd::Refused => Self::Call(text.into()),
            end => Self::Ended { end, text: text.into() },
        }
    }

    /// The reason, for programs.
    #[must_use]
    pub fn end(&self) -> CallEnd {
        match self {
            Self::Ended { end, .. } => end.clone(),
            Self::Peer { .. } => CallEnd::ServerLost,
            Self::Call(_) | Self::Device(_) | Self::Node(_) => CallEnd::Refused,
        }
    }

    /// A refused call, from anything printable.
    pub fn call(text: impl Into<String>) -> Self {
        Self::Call(text.into())
    }
}

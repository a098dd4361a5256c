//! Failures before a connection is established: the refusal of a client, and the failure of an attempt to connect.

use std::io;

use pserver_core::wire::{ErrorCode, Frame};

/// The reason for refusing a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HelloRefusal {
    pub(super) code: ErrorCode,
    pub(super) text: String,
}

impl HelloRefusal {
    pub(super) fn invalid(text: impl ToString) -> Self {
        Self { code: ErrorCode::Invalid, text: text.to_string() }
    }
}

/// The failure of a connection attempt.
pub(super) enum ConnectFailure {
    Failed(String),
    /// The server refused this side, or this side the server.
    Refused(Frame),
}

impl From<io::Error> for ConnectFailure {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

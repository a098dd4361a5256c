//! The frame that says why a connection ends.

use pserver_core::wire::{ErrorCode, ErrorMessage, Frame, Head, Kind};

/// A frame that refuses the connection with `code` and a text for a person.
pub(crate) fn refusal(code: ErrorCode, text: impl Into<String>) -> Frame {
    let message = ErrorMessage { code: code.into(), text: text.into(), ..ErrorMessage::default() };
    Frame::with_control(Head::new(Kind::Refused), &message)
}

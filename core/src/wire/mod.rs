//! Wire format of a frame: 64 bytes of header, entries of 32 bytes, a control message, then the entries' payloads.
//!
//! `docs/WIRE.md` draws every byte. Not here: reading or writing a socket; a transport reads a header, asks
//! [`Prefix`] how much follows, and hands the session a checked [`Frame`].
//!
//! A header is checked, its checksum and every bound, before memory is allocated for the rest of the frame.

mod address;
mod control;
mod frame;
mod header;
mod prefix;
mod rows;

#[cfg(test)]
mod tests;

pub use address::{Address, Scheme};
pub use control::{
    CatalogueRequest, ControlAnswer, ControlRequest, ErrorCode, ErrorMessage, FinishMessage, FirstServerMessage,
    HeldShardMessage, HelloMessage, InitMessage, JobMessage, JoinRequest, Joined, MoveRequest, OfferMessage,
    PushMessage, RegisterRequest, Role, ServerEntry, SettingMessage, ShardMapMessage, ShardMessage, StateMessage,
    TopologyMessage, WelcomeMessage, answer, request,
};
pub use frame::{Entries, Entry, Frame};
pub use header::{Flags, HEADER_BYTES, Head, Kind, WIRE_VERSION, WireError};
pub use prefix::Prefix;
pub use rows::RowsPart;

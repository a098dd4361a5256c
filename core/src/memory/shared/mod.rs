//! Memory of two processes: sealed files in memory, whose mappings neither process can shrink.
//!
//! There are two kinds. An arena's memory is written by its owner and read by others ([`File`], [`ReadOnly`]). A
//! [`Board`] is written by both: counters, which are atomic, and bytes, which a protocol over the counters assigns to
//! one side at a time. Bytes of the other side are a claim: they are copied out and then checked ([`ForeignBytes`]).
//!
//! Not here: the protocol that assigns bytes to a side, which is the transport's.

mod board;
mod descriptor;
mod file;
mod foreign;

use std::fmt;

use crate::error::Failure;

pub use board::{Board, COUNTERS, COUNTERS_BYTES, Counters};
pub use descriptor::Descriptor;
pub use file::{File, ReadOnly, SharedRange};
pub use foreign::ForeignBytes;

/// The owner to which a view of another process's memory is returned.
pub trait GiveBack: Send + Sync {
    /// The view of `bytes` bytes that was made with `token` is read no more. Any thread may call this; it must not
    /// wait.
    fn give_back(&self, token: u32, bytes: u32);

    /// Whether the owner of the memory still keeps its views as they are. Once it does not, they may change.
    fn is_kept(&self) -> bool;
}

pub(super) fn refused(what: &str, why: &dyn fmt::Display) -> Failure {
    Failure::Node(format!("shared memory: {what}: {why}"))
}

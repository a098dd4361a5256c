//! The driver's objects, each owned by one value. Nothing above sees a type of C.
//!
//! All unsafe code of the driver side is here, in `checked` and in `sys`. What makes it sound: an object knows its
//! [`Context`] and keeps it; a handle is destroyed once, by the value that owns it; memory of the host that a stream
//! reads or writes is owned by [`Lanes`] until an event has said that the stream is done with it, and is given up for
//! good when that cannot be learned any more.

mod compiler;
mod context;
mod foreign;
mod graph;
mod lanes;
mod memory;
mod module;
mod replicas;

pub(super) use compiler::Compiler;
pub(super) use context::Context;
pub use foreign::{Claim, Foreign, Whose};
pub(super) use graph::Captured;
pub(super) use lanes::{Event, Lane, Lanes, Ring, Ticket};
pub(super) use memory::{Memory, Part, Piece, Pinned, Registered};
pub(super) use module::{Entry, Grid, Module};

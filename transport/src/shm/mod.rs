//! Frames between processes of one machine: a Unix socket to meet and to wake each other, and memory that both see.
//!
//! A connection has one board of memory: counters, and behind them a ring of bytes for each direction. A ring
//! carries what a TCP stream would, but a payload above [`INLINE_BYTES_MAX`] stands in the ring as a reference to an
//! arena of its sender, which the receiver has mapped to read. The receiver uses it in place or copies it, and gives
//! its token back. The socket carries descriptors and wake-ups, and its end is the end of the connection.
//!
//! Not here: what owns connections (`network`), and which leases lie in shared arenas (whoever makes arenas).
//!
//! Read in this order: `rings` (bytes and counters), `post` (the socket), `outward` and `inward` (frames), `line`
//! (all of it as one connection). The bytes are in `docs/WIRE.md`, the memory in `docs/MEMORY.md`.

mod inward;
mod line;
mod meeting;
mod outward;
mod post;
mod rings;
mod staging;

use pserver_core::wire::WireError;
use thiserror::Error;

pub(crate) use line::Line;
pub(crate) use meeting::{Met, accept, connect, listen};
pub(crate) use rings::Side;

/// A payload up to this length stands in the ring itself: below it two short copies cost less than a reference.
const INLINE_BYTES_MAX: u32 = 8 * 1024;
/// Bytes of one ring.
const RING_BYTES: usize = 256 * 1024;
/// References of one side that the other has not given back.
const TOKENS: u32 = 512;
/// Arenas of one side.
const ARENAS_MAX: usize = 1024;

/// Why nothing more comes from a connection.
#[derive(Debug, Error)]
pub(crate) enum Ended {
    #[error("closed by the peer")]
    Closed,
    #[error("closed by the peer in the middle of a frame")]
    Cut,
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Broken(String),
}

impl Ended {
    /// Whether the peer is there and did what it should not.
    pub(crate) fn is_peers_fault(&self) -> bool {
        matches!(self, Self::Wire(_) | Self::Broken(_))
    }
}

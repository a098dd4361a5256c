//! Connections between processes of one machine through shared memory, with a Unix socket for wake-ups and descriptors.
//!
//! A connection has one board of shared memory: counters, and a byte ring for each direction. A ring carries what a TCP
//! stream would. A payload above [`INLINE_BYTES_MAX`] is a reference in the ring, to an arena of the sender that the
//! receiver maps read-only. The receiver reads it in place or copies it, and returns the reference's token. The socket
//! carries descriptors and wake-ups, and the connection ends with it.
//!
//! Not here: the transport that owns connections (`network`), and the choice of leases in shared arenas.
//!
//! Read in this order: `rings` (bytes and counters), `control_socket`, `send` and `receive` (frames), `connection` (all
//! of it). `docs/WIRE.md` has the bytes, `docs/MEMORY.md` the memory.

mod connection;
mod control_socket;
mod handshake;
mod receive;
mod rings;
mod send;
mod staging;

pub(crate) use connection::ShmConnection;
pub(crate) use handshake::{ShmEndpoint, accept, check_user, connect, listen};

use crate::connection::{ConnectionError, ConnectionSide};

/// Payloads up to this length are in the ring: two short copies cost less than a reference.
const INLINE_BYTES_MAX: u32 = 8 * 1024;
/// Bytes of one ring.
const RING_BYTES: usize = 256 * 1024;
/// References of one side that are not returned.
const TOKENS: u32 = 512;
/// A flag beside a token: the sender has checked that every element is finite.
const FINITE: u32 = 1 << 31;
/// Arenas announced by one side.
const ARENAS_MAX: usize = 1024;

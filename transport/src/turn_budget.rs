//! The budget of one connection's turn, after which other connections have theirs.

/// Bytes that one turn moves in each direction.
pub(crate) const TURN_BYTES: usize = 1024 * 1024;
/// Events that one turn reports.
pub(crate) const TURN_FRAMES: usize = 16;

//! What one connection may do before others get their turn.

/// How much one turn may move, and how many events it may report.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    pub(crate) bytes: usize,
    pub(crate) frames: usize,
}

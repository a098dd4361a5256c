//! Output of the server sessions: the actions that a shard or the coordinator asks of its caller.

use crate::ids::PeerId;
use crate::port::Submit;
use crate::wire::Head;

/// An action that a server session asks of its caller.
pub enum ServerOutput {
    /// Hand this to the transport.
    Submit(Submit),
    /// End this connection.
    Close(PeerId),
}

/// A trainer's request for a checkpoint, which the caller takes and answers when the checkpoint is on disk.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointRequest {
    pub(super) peer: PeerId,
    pub(super) head: Head,
}

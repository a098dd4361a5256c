//! Output of the server sessions: the actions that a shard or the coordinator asks of its caller.

use crate::ids::PeerId;
use crate::port::Submit;

/// An action that a server session asks of its caller.
pub enum ServerOutput {
    /// Hand this to the transport.
    Submit(Submit),
    /// End this connection.
    Close(PeerId),
}

//! Identity of trainers' calls: a shard recognises a duplicate by the last call of its trainer that it applied.

use crate::ids::{Incarnation, Sequence};
use crate::wire::Head;

/// Id of a trainer's call. A call whose id is not greater than the last applied one is a duplicate.
///
/// The derived order is the order of calls: incarnation first, then sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CallId {
    pub(super) incarnation: Incarnation,
    pub(super) sequence: Sequence,
}

impl CallId {
    /// The call of a frame.
    pub(super) fn of(head: &Head) -> Self {
        Self { incarnation: head.incarnation, sequence: head.sequence }
    }

    /// Whether a call is applied already.
    pub(super) fn covers(self, call: Self) -> bool {
        call <= self
    }
}

/// Per-trainer state of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TrainerMarks {
    /// The last push in the value.
    pub(super) push: CallId,
    /// The last set that replaced the value.
    pub(super) set: CallId,
    /// Count of the trainer's gradients in the value: its clock.
    pub(super) clock: u64,
}

//! Server side of the job: a [`Shard`] holds chunks and turns gradients into versions; the [`Coordinator`], in server
//! 0, elects the initialiser, keeps the catalogue and tracks members.
//!
//! Not here: sockets, threads, clocks. A session has three entry points: `handle` takes an event and the time, `out`
//! collects the actions, and `deadline` gives the next time to call. State that outlives the process goes through
//! [`crate::checkpoint`].
//!
//! Read in this order: [`shard`](Shard) (dispatch of frames), `serving` (pushes, pulls and sets), `flow` (from a
//! received gradient to the published value), `program` and `stage` (the program of a parameter, and its compiled form),
//! `chunk` (value, version, call ids), `round` (open contributions), `initialisation` (the table and its generation
//! fence), `bucket` and `rows` (sparse chunks), `device` and `completing` (chunks on an accelerator), `grouped_update`
//! (chunks that update together), `waiters` and `waits` (requests that wait for a version, and their expiry),
//! `half_precision` (float32 values as half precision), `nonfinite` (gradients refused or skipped), `presence`
//! (connected trainers), `coordinator` and `membership` (ranks and server slots).

mod bucket;
mod chunk;
mod completing;
mod coordinator;
mod device;
mod flow;
mod grouped_update;
mod half_precision;
mod initialisation;
mod membership;
mod nonfinite;
mod pool;
mod presence;
mod program;
mod record;
mod reply;
mod round;
mod rows;
mod serving;
mod shard;
mod snapshot;
mod stage;
mod survey;
mod waiters;
mod waits;
mod watch;

#[cfg(test)]
mod tests;

pub use coordinator::{Coordinator, CoordinatorOptions, CoordinatorOutput};
pub use device::NoRoom;
pub use membership::{PeerOrigin, TrainerMember};
pub use nonfinite::NonFinite;
pub use shard::{ServerOutput, Shard, ShardOptions};
pub use snapshot::{Checkpointing, JournalOptions, Restored, ShardStatus, Visit};
pub use survey::{LOST, survey};

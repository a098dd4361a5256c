//! Server side of the job: a [`Shard`] holds chunks and turns gradients into versions; the [`Coordinator`], in server
//! 0, elects the initialiser, keeps the catalogue and tracks members.
//!
//! Not here: sockets, threads, clocks. A session has three entry points: `handle` takes an event and the time, `out`
//! collects the actions, and `deadline` gives the next time to call. State that outlives the process goes through
//! [`crate::checkpoint`].
//!
//! Read in this order: [`shard`](Shard) (entry points, peers), `admission` (every check of a frame), `serving` (pushes
//! and pulls) and `sets`, `flow` (from a received gradient to the published value), `compiled_flows` (the compiled
//! programs of parameters), `update` (the next value, a file for each case), `chunk` (value, version, call ids),
//! `contribution` and `round` (gradients that the value does not contain), `group` (chunks that are updated together),
//! `initialisation` (the table and its generation fence), `bucket` and `rows` (sparse chunks), `device` and
//! `device_chunk` (chunks on an accelerator), `snapshot` and `replay` (checkpoint and restart), `waiters` and `waits`
//! (requests that wait for a version, and their expiry), `half_precision` and `half_values` (float32 values as half
//! precision), `nonfinite` (gradients refused or skipped), `presence` (connected trainers), `coordinator` and
//! `membership` (ranks and server slots).

mod admission;
mod bucket;
mod call;
mod chunk;
mod compiled_flows;
mod context;
mod contribution;
mod coordinator;
mod device;
mod device_chunk;
mod flow;
mod group;
mod half_precision;
mod half_values;
mod initialisation;
mod job;
mod membership;
mod nonfinite;
mod options;
mod output;
mod pool;
mod presence;
mod record;
mod replay;
mod reply;
mod round;
mod rows;
mod serving;
mod sets;
mod shard;
mod snapshot;
mod stalls;
mod survey;
mod update;
mod waiters;
mod waits;
mod watch;

#[cfg(test)]
mod tests;

pub use coordinator::{Coordinator, CoordinatorOptions, CoordinatorOutput};
pub use membership::{PeerOrigin, TrainerMember};
pub use options::{NoRoom, NonFinite, ShardOptions};
pub use output::ServerOutput;
pub use shard::Shard;
pub use snapshot::{Checkpointing, JournalOptions, Restored, ShardStatus, Visit};
pub use survey::{LOST, survey};

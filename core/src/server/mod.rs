//! Server side of the job: a [`Shard`] holds chunks and turns gradients into versions; the [`Coordinator`], in server
//! 0, elects the initialiser, keeps the catalogue and tracks members.
//!
//! Not here: sockets, threads, clocks. A session has three entry points: `handle` takes an event and the time, `out`
//! collects the actions, and `deadline` gives the next time to call. State that outlives the process goes through
//! [`crate::checkpoint`].
//!
//! A file imports only files below it, and calls of methods form no circle of more than four files
//! (`ci/src/tidy/circles.rs`). A type that many files give methods to is therefore data with constructors, and what it
//! does stands in the files of its subjects.
//!
//! The data, from the small to the large: `call` (identity of calls), `contribution` (gradients and sets that a value
//! does not contain), `round` and `waiters` (contributions and requests of one chunk), `bucket` (rows), `device_chunk`
//! (state on an accelerator), `chunk`, `group` (chunks that are updated together), `chunk_table` (the table and its
//! generation fence), `compiled_flows` (programs of parameters), `programs` and `saved_program` (programs that the
//! executor runs), `stalls` and `wait_index` (work and requests that wait), `serving` (all of this after
//! initialisation), `frames` and `journal`, [`shard`](Shard). Beside them: `options` and `job` (settings), `needs` and
//! `holdings` (sizes), `pool` and `half_values` (memory), `device` (the placement of chunks on an accelerator),
//! `presence` (connected trainers), `participants` (trainers that rounds wait for), `reply` and `output` (answers and
//! actions), `context` (resources for one frame), `counters` (for readers on other threads), `report` and `status`
//! (what a shard holds and waits for).
//!
//! The behaviour, from the top: `session` (entry points), `joins` (a connection becomes a trainer's), `admission`
//! (every check), `nonfinite` and `record` (payloads and journal), `apply`, then `initialisation`, `pushes`, `rows`,
//! `pulls`, `runs` and `departures`. Below: `retry` (stalled work) and `device_work` (work that an accelerator has
//! ended), `flow` (from a received gradient to the decided round and the published value), `recording` (the record of
//! decided rounds), `program_runs`, `sets`, `totals` and `update` (the next value, a file for each case), `answers`,
//! `rows_answers` and `half_precision` (to requests that waited), `verdict` and `completion` (of a gradient, of a
//! round). Beside them `waits` and `watch` (overdue requests, and their log lines). The disk has `checkpointing`,
//! `marks`, `snapshot`, `carry`, `replay` and `survey`, server 0 `coordinator`, `membership` (ranks and server slots)
//! and `resumed` (settings of a restart beside those of the job).

mod admission;
mod answers;
mod apply;
mod bucket;
mod call;
mod carry;
mod checkpoint_requests;
mod checkpointing;
mod chunk;
mod chunk_table;
mod compiled_flows;
mod completion;
mod context;
mod contribution;
mod coordinator;
mod counters;
mod decided;
mod departures;
mod device;
mod device_chunk;
mod device_work;
mod flow;
mod frames;
mod group;
mod half_precision;
mod half_values;
mod holdings;
mod initialisation;
mod job;
mod joins;
mod journal;
mod marks;
mod membership;
mod moves;
mod needs;
mod nonfinite;
mod options;
mod output;
mod participants;
mod pool;
mod presence;
mod program_runs;
mod programs;
mod pulls;
mod pushes;
mod record;
mod recording;
mod replay;
mod reply;
mod report;
mod resumed;
mod retry;
mod round;
mod rows;
mod rows_answers;
mod runs;
mod saved_program;
mod serving;
mod session;
mod sets;
mod shard;
mod snapshot;
mod stalls;
mod states;
mod status;
mod survey;
mod totals;
mod update;
mod verdict;
mod wait_index;
mod waiters;
mod waits;
mod watch;

#[cfg(test)]
mod tests;

pub use checkpointing::Checkpointing;
pub use coordinator::{Coordinator, CoordinatorOutput};
pub use counters::ShardCounters;
pub use decided::record_name;
pub use membership::{PeerOrigin, TrainerMember};
pub use needs::{Holdings, Needs};
pub use options::{CoordinatorOptions, NoRoom, NonFinite, OperatorSettings, ProcessMemory, ShardOptions};
pub use output::{CheckpointRequest, ServerOutput};
pub use report::{
    CoordinatorReport, MemoryReport, ProgramReport, ServerReport, ShardPhase, ShardReport, TrainerConnection,
    TrainerReport, TrainerState, WaitReport,
};
pub use shard::Shard;
pub use snapshot::{JournalOptions, Restored, Visit};
pub use status::ShardStatus;
pub use survey::{LOST, server_without_job, survey, survey_holdings};

//! The server's side: a [`Shard`] holds chunks and turns gradients into versions; the [`Coordinator`], in server
//! 0, elects the initialiser, keeps the catalogue and knows who takes part.
//!
//! Not here: sockets, threads, clocks. A session has three doors: an event goes in with the time, everything it
//! wants comes out, and `deadline` says when to call next. What outlives the process goes through
//! [`crate::checkpoint`].
//!
//! Read in this order: [`shard`](Shard) (which frame goes where), `program` (what becomes of a gradient) and `running`
//! (who runs it), `chunk` (value, version, marks), `round` (what its accumulator holds), `gate` (initialisation and its
//! fence), `bucket` and `rows` (chunks that are tables of rows), `device` and `completing` (chunks that live on an
//! accelerator), `whole` (chunks that step together), `halves` (values in half the bytes), `coordinator`.

mod bucket;
mod chunk;
mod completing;
mod coordinator;
mod device;
mod gate;
mod halves;
mod pool;
mod program;
mod reply;
mod round;
mod rows;
mod running;
mod serving;
mod shard;
mod snapshot;
mod whole;

#[cfg(test)]
mod tests;

pub use coordinator::{Coordinator, CoordinatorOptions, CoordinatorOutput, Member};
pub use device::NoRoom;
pub use shard::{Output, Shard, ShardOptions};
pub use snapshot::{Checkpointing, Restored, ShardStatus, Visit};

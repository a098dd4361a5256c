//! What outlives a process: checkpoints of a shard, its journal, and the models that users take away.
//!
//! Not here: threads, clocks, or the decision when to write. The shard decides; this module turns chunks into
//! files and files into chunks, through one door to the disk, [`storage::Storage`]. The bytes are drawn in
//! `docs/CHECKPOINT.md`.
//!
//! A shard's state after a restart is its newest whole checkpoint ([`load_latest`]) and every journal record
//! from that checkpoint's `journal_from` on ([`journal::replay`]), put through the shard's ordinary door. Records
//! that the checkpoint already contains are known by the marks that were saved with the chunks.
//!
//! Read in this order: [`storage`] (the door), [`path`] (what a trainer may name), `tensors` (the header that
//! checkpoints and models share), [`shard`] and [`load`] (checkpoints), [`journal`], [`model`], [`inspect`].

pub mod inspect;
pub mod journal;
pub mod load;
pub mod model;
pub mod path;
pub mod shard;
pub mod storage;

mod manifest;
mod partial;
mod source;
mod tensors;

pub use inspect::inspect;
pub use journal::{Journal, Replayed, replay};
pub use load::{Loaded, journal_needed_from, load_latest};
pub use model::{ModelTensor, ModelWriter, OutputTensor, plan_model};
pub use path::ModelPath;
pub use shard::{ChunkLayout, ChunkRecord, ShardCheckpoint, StateLayout};
pub use storage::Storage;

//! Persistent state: checkpoints of a shard, its journal, and exported models.
//!
//! Not here: threads, clocks, or the decision when to write. The shard decides; this module converts between chunks and
//! files, through one interface to the disk, [`storage::Storage`]. `docs/CHECKPOINT.md` specifies the bytes.
//!
//! After a restart a shard restores its newest valid checkpoint ([`load_latest`]) and applies every journal record from
//! that checkpoint's `journal_from` on ([`journal::replay`]), by the same code as a live frame. The marks that were
//! saved with the chunks identify records that the checkpoint already contains.
//!
//! Read in this order: [`storage`], [`path`] (the check of a trainer's path), `tensors` (the header that checkpoints
//! and models share), `chunk`, [`shard`] and [`load`] (checkpoints), [`journal`], [`model`], [`mod@inspect`].

pub mod coordinator;
pub mod inspect;
pub mod journal;
pub mod load;
pub mod model;
pub mod owner;
pub mod path;
pub mod shard;
pub mod storage;

mod chunk;
mod cursor;
mod manifest;
mod partial;
mod room;
mod tensors;

pub use chunk::{ChunkLayout, ChunkRecord, StateLayout};
pub use coordinator::{CoordinatorFile, CoordinatorState};
pub use inspect::{identity_of, inspect};
pub use journal::{Journal, ReplayOptions, Replayed, replay};
pub use load::{Loaded, journal_needed_from, load_latest};
pub use manifest::CheckpointName;
pub use model::{ModelTensor, ModelWriter, OutputTensor, RowsForm, check_savable, is_always_matrix, plan_model};
pub use owner::{DirectoryOwner, Folder, OwnerRecord, ShardIdentity};
pub use partial::sweep_models;
pub use path::ModelPath;
pub use room::{LOOK_BYTES, RESERVE_BYTES, disk_need, journal_room};
pub use shard::ShardCheckpoint;
pub use storage::Storage;

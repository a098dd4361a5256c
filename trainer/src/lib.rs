//! A trainer's part of a program, run against the servers of a job. Sends and receives become calls of a client.
//!
//! The transpiler divides a program into parts. A trainer runs its own part with the executor. A server makes the
//! program of a gradient (receive, accumulate, update, send) from the job's settings and the declared rule, so this
//! package only reads a server's part: which parameters it holds, their initial values, their rules, and how trainers
//! share them. The initialiser sets the job's sharing accordingly. A part that does more, or a job that shares
//! otherwise, is refused.
//!
//! A table whose gradient is selected rows is a sparse parameter on the servers. A trainer fetches only the rows that
//! its step looks up, when an op `pull_rows` asks for them, and holds no table.
//!
//! Not here: dividing a program ([`pserver_program::transpile`]), running one
//! ([`pserver_program::executor`]).
//!
//! Read in this order: `server_parameters` with `sharing` and `initial_values`, `queues`, `table_rows`, [`Trainer`];
//! then training from text: [`DataSet`], [`trainable`], [`Batches`], [`Training`], [`ForwardRun`].

mod arithmetic;
mod data;
mod explain;
mod forward_run;
mod held_client;
mod hosted_programs;
mod initial_values;
mod kept_columns;
mod program_file;
mod queues;
mod server_contents;
mod server_parameters;
mod sharing;
mod step_numbers;
mod table_rows;
mod totals;
mod trainer;
mod training;

pub use data::{DataSet, ValueFile, read_model, table, write_model, write_tensors};
pub use explain::{PartWay, ServedPart, explain};
pub use forward_run::ForwardRun;
pub use held_client::HeldClient;
pub use program_file::{program_bytes, read_program};
pub use trainer::{Trainer, initialise, initialise_for_batch, initialise_for_deltas};
pub use training::{Batches, Training, TrainingOptions, check_scalar, trainable};

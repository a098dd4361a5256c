//! Programs that are divided over trainers and servers, and trained by the commands of `pserver`.

#[path = "../cluster/mod.rs"]
mod cluster;

#[path = "../trainings/mod.rs"]
mod trainings;

mod columns;
mod failed_steps;
mod given_values;
mod hosted;
mod hosted_random;
mod import_paddle;
mod import_torch;
mod programs;
mod stages;
mod train;
mod train_columns;
mod train_examples;
mod train_resume;
mod train_settings;
mod train_tables;
mod transpile;

//! Servers of a job: start, stop, kill, damaged files, membership, and access by token and certificate.

#[path = "../cluster/mod.rs"]
mod cluster;

mod backup;
mod certificates;
mod damage;
mod election;
mod encryption;
mod lifecycle;
mod lost;
mod members;
mod needs;
mod owners;
mod runs;
mod saves;
mod scribble;
mod settings;
mod settings_table;
mod snapshot;
mod token;

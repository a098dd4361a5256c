//! Servers that come, go, are killed or damaged, and who may reach them.

#[path = "../cluster/mod.rs"]
mod cluster;

mod damage;
mod election;
mod lifecycle;
mod members;
mod owners;
mod saves;
mod scribble;
mod snapshot;
mod token;

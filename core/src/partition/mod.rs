//! Partition of parameters into chunks, and their placement on shards.
//!
//! A [`Catalogue`] is built by declaring parameters in order, and placement is a pure function of the topology, the
//! chunk size and the declarations so far. So every client and every server computes the same
//! placement, and no table is sent.
//!
//! Not here: the bytes of chunks ([`memory`](crate::memory)), frames ([`wire`](crate::wire)) and what a parameter's
//! configuration means ([`config`](crate::config)).
//!
//! Read in this order: [`Topology`], [`Declaration`], [`Catalogue`], [`Parameter`], [`Buckets`]; then `placement`,
//! which has the proof that servers are balanced; then [`CataloguePage`], the form of a catalogue on the wire.

mod buckets;
mod catalogue;
mod declaration;
mod pages;
mod placement;
mod shard_map;
mod topology;

#[cfg(test)]
mod tests;

pub use buckets::Buckets;
pub use catalogue::{Catalogue, ChunkSpan, Parameter};
pub use declaration::{Declaration, Hosted, Name, TotalPart};
pub use pages::{CataloguePage, DeclarationMessage};
pub use shard_map::{ShardMap, ShardPlace};
pub use topology::Topology;

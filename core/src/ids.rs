//! Identities, each a type of its own, so that a server index cannot stand where a shard index belongs.

use std::fmt;

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(formatter)
            }
        }
    };
}

identity! {
    /// One life of a job. A job that starts from nothing has a new epoch; a resumed one keeps its own.
    Epoch(u64)
}
identity! {
    /// A trainer's rank, dense from zero. Sums over trainers go in this order.
    TrainerId(u32)
}
identity! {
    /// One life of a trainer: every start of rank `t` gets a larger number, so a zombie can be told apart.
    Incarnation(u32)
}
identity! {
    /// A trainer's count of mutating calls in one incarnation, from one.
    Sequence(u64)
}
identity! {
    /// The fencing token of one attempt at initialisation; the coordinator never gives a number twice.
    Generation(u32)
}
identity! {
    /// A synchronous step of one chunk, from one. Round `r` turns version `r - 1` into version `r`.
    Round(u64)
}
identity! {
    /// How many updates a chunk has seen.
    Version(u64)
}
identity! {
    /// A server's place in the cluster's list.
    ServerIndex(u16)
}
identity! {
    /// A shard's place within its server.
    ShardIndex(u16)
}
identity! {
    /// A parameter's place in the catalogue, in order of declaration.
    ParameterIndex(u32)
}
identity! {
    /// A chunk's place within its parameter.
    ChunkIndex(u64)
}
identity! {
    /// One connection of one transport; never reused within a transport's life.
    PeerId(u64)
}
identity! {
    /// A request's number, chosen by who asks and returned in every answer.
    Ticket(u64)
}

/// The number in a hello of somebody who is not a trainer: a server that registers, or a tool.
pub const NO_TRAINER: TrainerId = TrainerId(u32::MAX);

/// A chunk, named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    /// The parameter it is a piece of.
    pub parameter: ParameterIndex,
    /// Its place in that parameter.
    pub chunk: ChunkIndex,
}

/// A shard, named across the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The server.
    pub server: ServerIndex,
    /// The shard on that server.
    pub shard: ShardIndex,
}

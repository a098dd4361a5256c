//! Identifiers, each with its own type, so that a server index cannot be used as a shard index.

use std::fmt;

use crate::limits::SHARDS_MAX;

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
    /// Incarnation of a job. A job that starts from nothing has a new epoch; a resumed one keeps its own.
    Epoch(u64)
}
identity! {
    /// A trainer's rank, dense from zero. Sums over trainers go in this order.
    TrainerId(u32)
}
identity! {
    /// Incarnation of a trainer: every start of a rank gets a larger number, which identifies a superseded process.
    Incarnation(u32)
}
identity! {
    /// A run of the job's trainers, from one: from the first process that joins while no other trainer is connected,
    /// until all have departed or are lost. Zero is before the first.
    RunNumber(u32)
}
identity! {
    /// Number of a trainer's mutating call in one incarnation, from one.
    Sequence(u64)
}
identity! {
    /// Fencing token of one initialisation attempt; granted once.
    Generation(u32)
}
identity! {
    /// A synchronous step of one chunk, from one. Round `r` turns version `r - 1` into version `r`.
    Round(u64)
}
identity! {
    /// Count of updates of a chunk.
    Version(u64)
}
identity! {
    /// Index of a server in the cluster's list.
    ServerIndex(u16)
}
identity! {
    /// Index of a shard within its server.
    ShardIndex(u16)
}
identity! {
    /// Term of a shard's leader: each server that takes the shard over gets a larger one. Zero where it is not known.
    Term(u32)
}
identity! {
    /// Count of changes of the map of shards.
    MapVersion(u64)
}
identity! {
    /// Index of a parameter in the catalogue, in order of declaration.
    ParameterIndex(u32)
}
identity! {
    /// Index of a chunk within its parameter.
    ChunkIndex(u64)
}
identity! {
    /// A connection of a transport; never reused.
    PeerId(u64)
}
identity! {
    /// Number of a request, chosen by its sender and returned in every answer.
    Ticket(u64)
}

/// A run of the job's trainers: rounds wait for all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobRun {
    /// Its number.
    pub number: RunNumber,
    /// The trainers that take part; zero where they are as many as the job was initialised for.
    pub trainers: u32,
}

/// Rank in the hello of a process that is no trainer: a registering server, or a tool.
pub const NO_TRAINER: TrainerId = TrainerId(u32::MAX);

/// Identifier of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    /// Its parameter.
    pub parameter: ParameterIndex,
    /// Its index in that parameter.
    pub chunk: ChunkIndex,
}

/// Name of a shard, which stays when the shard moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardId {
    /// The server that it was placed at first.
    pub server: ServerIndex,
    /// Its index there.
    pub shard: ShardIndex,
}

impl fmt::Display for ShardId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "server {} shard {}", self.server, self.shard)
    }
}

impl ShardId {
    /// Number of its lane, at every server that leads it. Lane zero is the coordinator's.
    #[must_use]
    pub fn lane(self) -> u64 {
        1 + u64::from(self.server.0) * u64::from(SHARDS_MAX) + u64::from(self.shard.0)
    }
}

impl Term {
    /// The term of a shard that has not moved.
    pub const FIRST: Self = Self(1);

    /// The term of the next leader.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

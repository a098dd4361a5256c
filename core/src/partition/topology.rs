//! The servers of a job, and the shards of each.

use crate::error::Failure;
use crate::ids::{ServerIndex, ShardId, ShardIndex};
use crate::limits::{SERVERS_MAX, SHARDS_MAX};

/// How many shards each server has. There is at least one server, and each has at least one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    shards: Vec<u16>,
}

impl Topology {
    /// A topology from the number of shards of each server.
    ///
    /// # Errors
    /// [`Failure::Call`] unless there are 1 to [`SERVERS_MAX`] servers of 1 to [`SHARDS_MAX`] shards each.
    pub fn new(shards: Vec<u16>) -> Result<Self, Failure> {
        let servers = shards.len();
        if servers == 0 || servers > usize::from(SERVERS_MAX) {
            return Err(Failure::Call(format!("topology: {servers} servers; expected 1 to {SERVERS_MAX}")));
        }
        if let Some(server) = shards.iter().position(|count| *count == 0 || *count > SHARDS_MAX) {
            let found = shards[server];
            return Err(Failure::Call(format!("server {server}: {found} shards; expected 1 to {SHARDS_MAX}")));
        }
        Ok(Self { shards })
    }

    /// How many servers there are.
    #[must_use]
    pub fn servers(&self) -> u16 {
        u16::try_from(self.shards.len()).expect("checked against SERVERS_MAX when built")
    }

    /// How many shards this server has, if there is such a server.
    #[must_use]
    pub fn shards(&self, server: ServerIndex) -> Option<u16> {
        self.shards.get(usize::from(server.0)).copied()
    }

    /// Every shard of the cluster, server by server.
    pub fn shard_ids(&self) -> impl Iterator<Item = ShardId> {
        let shards_of = |(server, shards): (u16, &u16)| {
            (0..*shards).map(move |shard| ShardId { server: ServerIndex(server), shard: ShardIndex(shard) })
        };
        (0..).zip(&self.shards).flat_map(shards_of)
    }
}

//! Placement of chunks, with the proof that servers are balanced.
//!
//! A parameter of `n` chunks over `S` servers: the servers are ordered by (bytes held, index), and chunk `i` goes to
//! the server at `i mod S` of that order. Within a server, the parameter's chunk number `j = i div S` goes to shard
//! `(start + j) mod K`, where `start` is the server's least loaded shard. A whole parameter goes to the least loaded
//! shard of the least loaded server. A parameter with an owner is placed as if its owner were the only server.
//!
//! *Promise.* With chunks of `C` bytes, no whole parameter and no owner, the fullest server holds at most `C` bytes
//! more than the emptiest, hence at most one chunk above the mean.
//!
//! *Proof.* Let the loads before be `l_0 <= .. <= l_{S-1}` with `l_{S-1} - l_0 <= G`, where `G >= C`. Every full turn
//! adds `C` to each server and changes no difference. The rest adds `C` to the servers `0 .. k` and the tail
//! `t <= C` to server `k < S`. No load shrank, so an unchanged server exceeds no other by more than `G`. A server
//! `i < k` exceeds another one below `k` by at most `G` as before, and one from `k` on, which holds `l_k` or more, by
//! at most `l_i + C - l_k <= C`. Server `k` exceeds one below it by at most `l_k + t - (l_0 + C) <= G`, and one above
//! it by at most `l_k + t - l_{k+1} <= t`. So the gap is still at most `G`; it starts at 0, and `G = C` will do.
//! A whole parameter of `W` bytes is a tail of `W` bytes, and the same argument gives `G = max(C, largest W)`: the
//! promise excludes whole parameters, but neither do they unbalance anything by more than their own size.
//! A parameter with an owner may unbalance without bound: `G` is then the resulting gap, and the argument continues.
//! A parameter without an owner leaves the gap at most as large as it was, or at most `C`.

use std::collections::BTreeSet;

use super::topology::Topology;
use crate::ids::{ChunkIndex, ServerIndex, ShardId, ShardIndex};

/// Placement of one parameter's chunks. Its size is independent of their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// All on one shard: a single chunk, or a whole parameter.
    OneShard(ShardId),
    /// Striped over these servers in turn; no more servers than chunks.
    Striped(Box<[ServerStripe]>),
}

/// One server's part of a striped parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerStripe {
    /// The server, and the shard of the parameter's first chunk there.
    start: ShardId,
    /// How many shards the server has.
    shards: u16,
}

/// A parameter's size, as placement sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// How many chunks; at least one.
    pub(super) chunks: u64,
    /// The bytes of every chunk but the last.
    pub(super) chunk_bytes: u32,
    /// The bytes of all.
    pub(super) bytes: u64,
}

/// The bytes placed so far.
#[derive(Clone, Debug)]
pub(super) struct Loads {
    servers: Vec<ServerLoad>,
    /// The servers by (bytes held, index).
    order: BTreeSet<(u64, ServerIndex)>,
}

#[derive(Clone, Debug)]
struct ServerLoad {
    bytes: u64,
    shards: Vec<u64>,
}

impl Layout {
    /// The shard that holds this chunk.
    pub(super) fn shard_of(&self, chunk: ChunkIndex) -> ShardId {
        match self {
            Self::OneShard(shard) => *shard,
            Self::Striped(stripes) => {
                let count = stripes.len() as u64;
                let stripe = usize::try_from(chunk.0 % count).expect("less than the number of stripes");
                stripes[stripe].shard_at(chunk.0 / count)
            }
        }
    }

    /// The chunks of this shard: the first, and the distance to the next. The first may be past the end.
    pub(super) fn stride(&self, shard: ShardId) -> Option<(u64, u64)> {
        match self {
            Self::OneShard(only) => (*only == shard).then_some((0, 1)),
            Self::Striped(stripes) => {
                let count = stripes.len() as u64;
                let (index, stripe) = (0_u64..).zip(stripes).find(|(_, stripe)| stripe.start.server == shard.server)?;
                Some((index + count * stripe.turns_until(shard.shard)?, count * u64::from(stripe.shards)))
            }
        }
    }
}

#[cfg(test)]
impl Layout {
    /// Its heap bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::OneShard(_) => 0,
            Self::Striped(stripes) => size_of_val(&**stripes),
        }
    }
}

impl ServerStripe {
    /// The shard of the parameter's chunk number `turn` on this server.
    fn shard_at(&self, turn: u64) -> ShardId {
        let shard = (u64::from(self.start.shard.0) + turn) % u64::from(self.shards);
        ShardId { shard: ShardIndex(u16::try_from(shard).expect("less than the number of shards")), ..self.start }
    }

    /// The number of the first of the parameter's chunks on this server that this shard gets.
    fn turns_until(&self, shard: ShardIndex) -> Option<u64> {
        (shard.0 < self.shards).then(|| u64::from((shard.0 + self.shards - self.start.shard.0) % self.shards))
    }
}

impl Loads {
    /// Nothing placed yet.
    pub(super) fn new(topology: &Topology) -> Self {
        let shards = |server| topology.shards(server).expect("the index is below the number of servers");
        let servers = (0..topology.servers()).map(ServerIndex);
        Self {
            order: servers.clone().map(|server| (0, server)).collect(),
            servers: servers
                .map(|server| ServerLoad { bytes: 0, shards: vec![0; usize::from(shards(server))] })
                .collect(),
        }
    }

    /// The bytes on this server; zero if there is no such server.
    pub(super) fn bytes_on(&self, server: ServerIndex) -> u64 {
        self.servers.get(usize::from(server.0)).map_or(0, |load| load.bytes)
    }

    /// Whether a server has nothing yet.
    pub(super) fn has_empty_server(&self) -> bool {
        self.order.first().is_some_and(|(bytes, _)| *bytes == 0)
    }

    /// The bytes of each shard of this server.
    #[cfg(test)]
    pub(super) fn shards_of(&self, server: ServerIndex) -> &[u64] {
        &self.servers[usize::from(server.0)].shards
    }

    /// Places one more parameter; its owner is one of the servers.
    pub(super) fn add(&mut self, size: Size, whole: bool, owner: Option<ServerIndex>) -> Layout {
        let stripe = owner.map(|owner| self.servers[usize::from(owner.0)].stripe(owner));
        if whole || size.chunks == 1 {
            let stripe = stripe.unwrap_or_else(|| self.stripes(1)[0]);
            self.fill(stripe, size.bytes, &mut |_, shards| shards[usize::from(stripe.start.shard.0)] += size.bytes);
            return Layout::OneShard(stripe.start);
        }
        let stripes = stripe.map_or_else(|| self.stripes(size.chunks), |stripe| vec![stripe]);
        for (index, stripe) in (0..).zip(&stripes) {
            self.add_stripe(*stripe, index, stripes.len() as u64, size);
        }
        Layout::Striped(stripes.into())
    }

    /// Places a parameter as another one that has as many chunks, or all of it on one shard.
    pub(super) fn add_beside(&mut self, size: Size, layout: Layout) -> Layout {
        match &layout {
            Layout::OneShard(shard) => {
                let stripe = ServerStripe { start: *shard, shards: 1 };
                self.fill(stripe, size.bytes, &mut |_, shards| shards[usize::from(shard.shard.0)] += size.bytes);
            }
            Layout::Striped(stripes) => {
                for (index, stripe) in (0..).zip(stripes) {
                    self.add_stripe(*stripe, index, stripes.len() as u64, size);
                }
            }
        }
        layout
    }

    /// The least loaded servers, as many as there are chunks, each with its least loaded shard.
    fn stripes(&self, chunks: u64) -> Vec<ServerStripe> {
        let most = usize::try_from(chunks).unwrap_or(usize::MAX);
        self.order.iter().take(most).map(|(_, server)| self.servers[usize::from(server.0)].stripe(*server)).collect()
    }

    /// Adds to one server its part of a parameter: every chunk whose index is `index` modulo `stripes`.
    fn add_stripe(&mut self, stripe: ServerStripe, index: u64, stripes: u64, size: Size) {
        let turns = every(size.chunks, index, stripes);
        // Bytes that the last chunk lacks, if it is here.
        let last = size.chunks - 1;
        let missing = size.chunks * u64::from(size.chunk_bytes) - size.bytes;
        let missing = if last % stripes == index { missing } else { 0 };
        self.fill(stripe, turns * u64::from(size.chunk_bytes) - missing, &mut |stripe, shards| {
            for turn in 0..turns.min(u64::from(stripe.shards)) {
                let chunks = every(turns, turn, u64::from(stripe.shards));
                shards[usize::from(stripe.shard_at(turn).shard.0)] += chunks * u64::from(size.chunk_bytes);
            }
            shards[usize::from(stripe.shard_at(last / stripes).shard.0)] -= missing;
        });
    }

    /// Adds bytes to the stripe's server, and what `shards` adds to its shards.
    fn fill(&mut self, stripe: ServerStripe, bytes: u64, shards: &mut dyn FnMut(ServerStripe, &mut [u64])) {
        let server = stripe.start.server;
        let load = &mut self.servers[usize::from(server.0)];
        self.order.remove(&(load.bytes, server));
        load.bytes += bytes;
        shards(stripe, &mut load.shards);
        self.order.insert((load.bytes, server));
    }
}

impl ServerLoad {
    fn stripe(&self, server: ServerIndex) -> ServerStripe {
        let least = (0..).zip(&self.shards).min_by_key(|(index, bytes)| (**bytes, *index));
        let (shard, _) = least.expect("a server has at least one shard");
        let shards = u16::try_from(self.shards.len()).expect("checked against SHARDS_MAX");
        ServerStripe { start: ShardId { server, shard: ShardIndex(shard) }, shards }
    }
}

/// Count of the numbers below `count` that are `first` modulo `step`, where `first` is less than `step` and `count`.
fn every(count: u64, first: u64, step: u64) -> u64 {
    (count - first).div_ceil(step)
}

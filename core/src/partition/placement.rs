//! Where each chunk goes, and the proof that servers are balanced.
//!
//! A parameter of `n` chunks over `S` servers: the servers are ordered by (bytes held, index), and chunk `i` goes to
//! the server at `i mod S` of that order. Within a server, the parameter's chunk number `j = i div S` goes to shard
//! `(start + j) mod K`, where `start` is the server's least loaded shard. A whole parameter goes to the least loaded
//! shard of the least loaded server. A parameter with a home is placed as if its home were the only server.
//!
//! *Promise.* With chunks of `C` bytes, no whole parameter and no home, the fullest server holds at most `C` bytes more
//! than the emptiest, hence at most one chunk above the mean.
//!
//! *Proof.* Let the loads before be `l_0 <= .. <= l_{S-1}` with `l_{S-1} - l_0 <= G`, where `G >= C`. Every full turn
//! adds `C` to each server and changes no difference. What is left adds `C` to the servers `0 .. k` and the tail
//! `t <= C` to server `k < S`. No load shrank, so an unchanged server exceeds no other by more than `G`. A server
//! `i < k` exceeds another one below `k` by at most `G` as before, and one from `k` on, which holds `l_k` or more, by
//! at most `l_i + C - l_k <= C`. Server `k` exceeds one below it by at most `l_k + t - (l_0 + C) <= G`, and one above
//! it by at most `l_k + t - l_{k+1} <= t`. So the gap is still at most `G`; it starts at 0, and `G = C` will do.
//! A whole parameter of `W` bytes is a tail of `W` bytes, and the same argument gives `G = max(C, largest W)`: the
//! promise excludes whole parameters, but neither do they unbalance anything by more than their own size.
//! A home may unbalance as much as whoever wishes for it likes. It makes `G` what the gap is then, and the argument
//! goes on: a parameter without a home leaves the gap at most as large as it was, or at most `C`.

use std::collections::BTreeSet;

use super::topology::Topology;
use crate::ids::{ChunkIndex, Place, ServerIndex, ShardIndex};

/// Where the chunks of one parameter are. Its size does not depend on how many chunks there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// All on one shard: a single chunk, or a whole parameter.
    Together(Place),
    /// Dealt out to these servers in turn; no more servers than chunks.
    Dealt(Box<[Lane]>),
}

/// One server's part in a parameter that is dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lane {
    /// The server, and the shard of the parameter's first chunk there.
    start: Place,
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
    pub(super) fn place(&self, chunk: ChunkIndex) -> Place {
        match self {
            Self::Together(place) => *place,
            Self::Dealt(lanes) => {
                let count = lanes.len() as u64;
                let lane = usize::try_from(chunk.0 % count).expect("less than the number of lanes");
                lanes[lane].place(chunk.0 / count)
            }
        }
    }

    /// Which chunks this shard holds: the first, and the distance to the next. The first may be past the end.
    pub(super) fn stride(&self, place: Place) -> Option<(u64, u64)> {
        match self {
            Self::Together(only) => (*only == place).then_some((0, 1)),
            Self::Dealt(lanes) => {
                let count = lanes.len() as u64;
                let (index, lane) = (0_u64..).zip(lanes).find(|(_, lane)| lane.start.server == place.server)?;
                Some((index + count * lane.turns_until(place.shard)?, count * u64::from(lane.shards)))
            }
        }
    }
}

#[cfg(test)]
impl Layout {
    /// What it holds on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Together(_) => 0,
            Self::Dealt(lanes) => size_of_val(&**lanes),
        }
    }
}

impl Lane {
    /// The shard of the parameter's chunk number `turn` on this server.
    fn place(&self, turn: u64) -> Place {
        let shard = (u64::from(self.start.shard.0) + turn) % u64::from(self.shards);
        Place { shard: ShardIndex(u16::try_from(shard).expect("less than the number of shards")), ..self.start }
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

    /// The bytes of each shard of this server.
    #[cfg(test)]
    pub(super) fn shards_of(&self, server: ServerIndex) -> &[u64] {
        &self.servers[usize::from(server.0)].shards
    }

    /// Places one more parameter; its home is one of the servers.
    pub(super) fn add(&mut self, size: Size, whole: bool, home: Option<ServerIndex>) -> Layout {
        let lane = home.map(|home| self.servers[usize::from(home.0)].lane(home));
        if whole || size.chunks == 1 {
            let lane = lane.unwrap_or_else(|| self.lanes(1)[0]);
            self.fill(lane, size.bytes, &mut |_, shards| shards[usize::from(lane.start.shard.0)] += size.bytes);
            return Layout::Together(lane.start);
        }
        let lanes = lane.map_or_else(|| self.lanes(size.chunks), |lane| vec![lane]);
        for (index, lane) in (0..).zip(&lanes) {
            self.deal(*lane, index, lanes.len() as u64, size);
        }
        Layout::Dealt(lanes.into())
    }

    /// The least loaded servers, as many as there are chunks, each with its least loaded shard.
    fn lanes(&self, chunks: u64) -> Vec<Lane> {
        let most = usize::try_from(chunks).unwrap_or(usize::MAX);
        self.order.iter().take(most).map(|(_, server)| self.servers[usize::from(server.0)].lane(*server)).collect()
    }

    /// Adds to one server its part of a parameter: every chunk whose index is `index` modulo `lanes`.
    fn deal(&mut self, lane: Lane, index: u64, lanes: u64, size: Size) {
        let turns = every(size.chunks, index, lanes);
        // What the last chunk lacks, if it is here.
        let last = size.chunks - 1;
        let missing = size.chunks * u64::from(size.chunk_bytes) - size.bytes;
        let missing = if last % lanes == index { missing } else { 0 };
        self.fill(lane, turns * u64::from(size.chunk_bytes) - missing, &mut |lane, shards| {
            for turn in 0..turns.min(u64::from(lane.shards)) {
                let chunks = every(turns, turn, u64::from(lane.shards));
                shards[usize::from(lane.place(turn).shard.0)] += chunks * u64::from(size.chunk_bytes);
            }
            shards[usize::from(lane.place(last / lanes).shard.0)] -= missing;
        });
    }

    /// Adds bytes to the lane's server, and what `shards` adds to its shards.
    fn fill(&mut self, lane: Lane, bytes: u64, shards: &mut dyn FnMut(Lane, &mut [u64])) {
        let server = lane.start.server;
        let load = &mut self.servers[usize::from(server.0)];
        self.order.remove(&(load.bytes, server));
        load.bytes += bytes;
        shards(lane, &mut load.shards);
        self.order.insert((load.bytes, server));
    }
}

impl ServerLoad {
    fn lane(&self, server: ServerIndex) -> Lane {
        let least = (0..).zip(&self.shards).min_by_key(|(index, bytes)| (**bytes, *index));
        let (shard, _) = least.expect("a server has at least one shard");
        let shards = u16::try_from(self.shards.len()).expect("checked against SHARDS_MAX");
        Lane { start: Place { server, shard: ShardIndex(shard) }, shards }
    }
}

/// How many of the numbers below `count` are `first` modulo `step`, where `first` is less than `step` and `count`.
fn every(count: u64, first: u64, step: u64) -> u64 {
    (count - first).div_ceil(step)
}

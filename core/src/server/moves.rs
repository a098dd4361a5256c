//! Moves of shards between servers: the map, who waits for a newer one, and who waits for the end of a move.
//!
//! Not here: what a server does when the map changes (`node`).

use std::collections::BTreeMap;

use super::reply::{Refusal, Replies, answer};
use crate::ids::{MapVersion, PeerId, ServerIndex, ShardId};
use crate::partition::ShardMap;
use crate::wire::answer::Answer;
use crate::wire::{Head, HeldShardMessage, ShardMapMessage};

/// The map of a job's shards, and the requests that wait for it.
#[derive(Default)]
pub(super) struct ShardMoves {
    map: ShardMap,
    /// The last report of each server.
    reports: BTreeMap<ServerIndex, HeldShards>,
    /// Servers that wait for a map that is newer than theirs.
    watchers: Vec<(PeerId, Head, MapVersion)>,
    /// Requests for moves that have not ended.
    movers: Vec<Mover>,
}

/// A server's report of the shards that it holds.
struct HeldShards {
    /// The version of the map that it follows.
    version: MapVersion,
    /// The shards that it holds, and whether it serves each.
    held: BTreeMap<ShardId, bool>,
    /// The shards that it could not take up, each with the reason.
    failures: BTreeMap<ShardId, String>,
}

/// The sender of a request to move a shard.
struct Mover {
    peer: PeerId,
    head: Head,
    shard: ShardId,
    to: ServerIndex,
}

impl ShardMoves {
    pub(super) fn map(&self) -> &ShardMap {
        &self.map
    }

    /// Goes on with the map that an earlier coordinator kept.
    pub(super) fn recall(&mut self, map: ShardMap) {
        self.map = map;
    }

    /// Orders a shard to another server. The answer follows once that server serves it. True where the map has changed.
    pub(super) fn order(
        &mut self,
        (peer, head): (PeerId, Head),
        shard: ShardId,
        to: ServerIndex,
        replies: &mut Replies,
    ) -> bool {
        let has_changed = self.map.order(shard, to);
        self.movers.push(Mover { peer, head, shard, to });
        self.answer_movers(replies);
        has_changed
    }

    /// Takes note of the shards that a server holds, which follows the map of this version, or has just started. Each
    /// server gives away those that are to move and that it does not hold, to a server that is connected. True where
    /// the map has changed.
    pub(super) fn reported(
        &mut self,
        server: ServerIndex,
        version: Option<MapVersion>,
        held: &[HeldShardMessage],
        is_connected: impl Fn(ServerIndex) -> bool,
        replies: &mut Replies,
    ) -> bool {
        let named = || held.iter().filter_map(|one| Some((one.shard?.id()?, one)));
        let failures = named().filter_map(|(shard, one)| Some((shard, one.failure.clone()?))).collect();
        let held = named().filter(|(_, one)| one.failure.is_none()).map(|(shard, one)| (shard, one.serves)).collect();
        // A server that has just started holds nothing, and gets the newest map with its answer.
        let version = version.unwrap_or(self.map.version());
        self.reports.insert(server, HeldShards { version, held, failures });
        let (map, mut has_changed) = (&mut self.map, false);
        for (server, report) in &self.reports {
            // A report from before the last order says nothing about that order.
            if report.version == map.version() {
                has_changed |=
                    map.hand_over(*server, |shard, next| !report.held.contains_key(&shard) && is_connected(next));
            }
        }
        self.answer_movers(replies);
        has_changed
    }

    /// Answers the requests for moves that have ended, those that another one has overtaken, and those whose shard the
    /// next leader cannot take up.
    fn answer_movers(&mut self, replies: &mut Replies) {
        let (map, reports) = (&self.map, &self.reports);
        self.movers.retain(|Mover { peer, head, shard, to }| {
            let (place, report) = (map.place(*shard), reports.get(to));
            if place.next.unwrap_or(place.server) != *to {
                let (text, now) = (format!("{shard} was sent elsewhere before it was moved"), place.server);
                replies.error(*peer, head, &Refusal::invalid(format!("{text} to server {to}: server {now} leads it")));
                return false;
            }
            let report = report.filter(|_| place.next.is_none());
            if let Some(failure) = report.and_then(|report| report.failures.get(shard)) {
                let text = format!("server {to} cannot take {shard} up, and tries again: {failure}");
                replies.error(*peer, head, &Refusal::invalid(text));
                return false;
            }
            let is_there = report.is_some_and(|report| report.held.get(shard).is_some_and(|serves| *serves));
            if is_there {
                answer(replies, *peer, head, Answer::Done(true));
            }
            !is_there
        });
    }

    /// Answers with the map once it is newer than this version.
    pub(super) fn watch(&mut self, peer: PeerId, head: Head, version: MapVersion, replies: &mut Replies) {
        // A server asks again behind a lost connection.
        self.watchers.retain(|(other, ..)| *other != peer);
        self.watchers.push((peer, head, version));
        self.tell(replies);
    }

    /// Answers those that wait for a newer map.
    pub(super) fn tell(&mut self, replies: &mut Replies) {
        let map = &self.map;
        for (peer, head, _) in self.watchers.extract_if(.., |(.., version)| *version < map.version()) {
            answer(replies, peer, &head, Answer::Map(ShardMapMessage::from(map)));
        }
    }

    pub(super) fn gone(&mut self, peer: PeerId) {
        self.watchers.retain(|(other, ..)| *other != peer);
        self.movers.retain(|mover| mover.peer != peer);
    }
}

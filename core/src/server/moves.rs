//! Moves of shards between servers: the map, who waits for a newer one, and who waits for the end of a move.
//!
//! Not here: what a server does when the map changes (`node`).

use std::collections::BTreeMap;

use super::reply::{Refusal, Replies, answer};
use crate::ids::{MapVersion, PeerId, ServerIndex, ShardId};
use crate::partition::{ShardMap, ShardPlace};
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

    /// Orders a shard to another server, unless its place has changed since the map that the sender has seen. Then the
    /// order has come again, or another one has overtaken it. The answer follows once that server serves the shard.
    /// True where the map has changed.
    pub(super) fn order(
        &mut self,
        (peer, head): (PeerId, Head),
        (shard, to): (ShardId, ServerIndex),
        seen: MapVersion,
        replies: &mut Replies,
    ) -> bool {
        let has_changed = self.map.place(shard).changed <= seen && self.map.order(shard, to);
        self.movers.push(Mover { peer, head, shard, to });
        self.answer_movers(replies);
        has_changed
    }

    /// Takes note of the shards that a server holds. The server follows the map of this version, or has just started. A
    /// shard that is to move, and that its leader does not hold, goes to its next leader. A shard that its new leader
    /// cannot take up goes back, as far as servers are connected: `connection` says so of those that have registered
    /// with this coordinator. True where a new leader serves its shard, which the map notes without a new version.
    pub(super) fn reported(
        &mut self,
        server: ServerIndex,
        version: Option<MapVersion>,
        held: &[HeldShardMessage],
        connection: impl Fn(ServerIndex) -> Option<bool>,
        replies: &mut Replies,
    ) -> bool {
        let named = || held.iter().filter_map(|one| Some((one.shard?.id()?, one)));
        let failures = named().filter_map(|(shard, one)| Some((shard, one.failure.clone()?))).collect();
        let held = named().filter(|(_, one)| one.failure.is_none()).map(|(shard, one)| (shard, one.serves)).collect();
        // A server that has just started holds nothing, and gets the newest map with its answer.
        let version = version.unwrap_or(self.map.version());
        self.reports.insert(server, HeldShards { version, held, failures });
        self.hand_over(&connection, replies);
        self.answer_movers(replies);
        self.send_back(|server| connection(server) == Some(true))
    }

    /// Gives the shards that their leaders have released to the next leaders. Where one is not connected any more, its
    /// shard stays.
    fn hand_over(&mut self, connection: &impl Fn(ServerIndex) -> Option<bool>, replies: &mut Replies) {
        for (server, report) in &self.reports {
            for (shard, next) in self.map.leaving(*server, report.version) {
                match connection(next) {
                    _ if report.held.contains_key(&shard) => {}
                    // The coordinator has restarted, and the server is to register again.
                    None => {}
                    Some(true) => self.map.hand_over(shard),
                    Some(false) => {
                        self.map.order(shard, *server);
                        for mover in self.movers.extract_if(.., |mover| (mover.shard, mover.to) == (shard, next)) {
                            let text = format!("server {next} is not connected: {shard} stays at server {server}");
                            replies.error(mover.peer, &mover.head, &Refusal::invalid(text));
                        }
                    }
                }
            }
        }
    }

    /// Orders the shards that their new leaders could not take up back to the servers that served them last. True where
    /// a new leader serves its shard.
    fn send_back(&mut self, is_connected: impl Fn(ServerIndex) -> bool) -> bool {
        let moved: Vec<_> = self.map.moved().collect();
        let mut has_settled = false;
        for (shard, place) in moved {
            let (Some(former), Some(report)) = (place.former, report_of(&self.reports, place)) else { continue };
            if report.serves(&shard) {
                has_settled |= self.map.settle(shard);
            } else if report.failures.contains_key(&shard) && is_connected(former) {
                self.map.order(shard, former);
            }
        }
        has_settled
    }

    /// Answers the requests for moves that have ended, those that another one has overtaken, and those whose shard the
    /// next leader cannot take up.
    fn answer_movers(&mut self, replies: &mut Replies) {
        let (map, reports) = (&self.map, &self.reports);
        self.movers.retain(|Mover { peer, head, shard, to }| {
            let place = map.place(*shard);
            if place.next.unwrap_or(place.server) != *to {
                let now = place.server;
                let text = format!("{shard} was sent elsewhere, or stayed: server {now} leads it, not server {to}");
                replies.error(*peer, head, &Refusal::invalid(text));
                return false;
            }
            let report = report_of(reports, place);
            if let Some(failure) = report.and_then(|report| report.failures.get(shard)) {
                let text = format!("server {to} cannot take {shard} up: {failure}");
                replies.error(*peer, head, &Refusal::invalid(text));
                return false;
            }
            let is_there = report.is_some_and(|report| report.serves(shard));
            if is_there {
                answer(replies, *peer, head, Answer::Done(true));
            }
            !is_there
        });
    }

    /// Describes what a move waits for that this connection has asked for.
    pub(super) fn describe_wait(&self, peer: PeerId) -> Option<String> {
        let Mover { shard, to, .. } = self.movers.iter().find(|mover| mover.peer == peer)?;
        let place = self.map.place(*shard);
        Some(match place.next {
            Some(_) => format!("server {} has not released {shard}", place.server),
            None => format!("server {to} has not taken {shard} up"),
        })
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

impl HeldShards {
    fn serves(&self, shard: &ShardId) -> bool {
        self.held.get(shard).is_some_and(|serves| *serves)
    }
}

/// The report of a shard's leader, if it follows the map that changed the place last.
fn report_of(reports: &BTreeMap<ServerIndex, HeldShards>, place: ShardPlace) -> Option<&HeldShards> {
    reports.get(&place.server).filter(|report| place.next.is_none() && place.changed <= report.version)
}

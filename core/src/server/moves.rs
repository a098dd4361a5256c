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
    /// The server that serves each shard, as they have told last.
    served: BTreeMap<ShardId, ServerIndex>,
    /// Servers that wait for a map that is newer than theirs.
    watchers: Vec<(PeerId, Head, MapVersion)>,
    /// Requests for moves that have not ended.
    movers: Vec<Mover>,
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

    /// Takes note of the shards that a server holds, which follows the map of this version, or has just started: it
    /// gives away those that are to move and that it does not hold. True where the map has changed.
    pub(super) fn reported(
        &mut self,
        server: ServerIndex,
        version: Option<MapVersion>,
        held: &[HeldShardMessage],
        replies: &mut Replies,
    ) -> bool {
        let held = held.iter().filter_map(|one| Some((one.shard?.id()?, one.serves)));
        let held: BTreeMap<ShardId, bool> = held.collect();
        self.served.retain(|_, at| *at != server);
        self.served.extend(held.iter().filter(|(_, serves)| **serves).map(|(shard, _)| (*shard, server)));
        // A report from before the last order says nothing about that order.
        let is_newest = version.is_none_or(|version| version == self.map.version());
        let has_changed = is_newest && self.map.hand_over(server, |shard| held.contains_key(&shard));
        self.answer_movers(replies);
        has_changed
    }

    /// Answers the requests for moves that have ended, and those that another one has overtaken.
    fn answer_movers(&mut self, replies: &mut Replies) {
        let (map, served) = (&self.map, &self.served);
        self.movers.retain(|Mover { peer, head, shard, to }| {
            let place = map.place(*shard);
            if place.next.unwrap_or(place.server) != *to {
                let (text, now) = (format!("{shard} was sent elsewhere before it was moved"), place.server);
                replies.error(*peer, head, &Refusal::invalid(format!("{text} to server {to}: server {now} leads it")));
                return false;
            }
            let is_there = place.next.is_none() && served.get(shard) == Some(to);
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

//! Map of a job's shards: which server leads each, and under which term.
//!
//! A shard keeps its name, which says where it was placed at first; the map says where it is. One that was never
//! ordered elsewhere is there under the first term and has no entry. The coordinator changes the map, and each change
//! has a larger version.
//!
//! A move has two changes. The first names the next leader: the leader writes what it has and lets go of the shard. The
//! second makes that server the leader, under a larger term: it takes the shard up from its files.

use std::collections::BTreeMap;

use crate::ids::{MapVersion, ServerIndex, ShardId, Term};

/// Where each shard is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardMap {
    version: MapVersion,
    /// The shards that have been ordered elsewhere.
    moved: BTreeMap<ShardId, ShardPlace>,
}

/// The place of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPlace {
    /// The server that leads it.
    pub server: ServerIndex,
    /// Its term there.
    pub term: Term,
    /// The server that it moves to, its next leader.
    pub next: Option<ServerIndex>,
    /// The server that served it last, as far as reports say, until its leader serves it.
    pub former: Option<ServerIndex>,
    /// The version of the map that changed the place last.
    pub changed: MapVersion,
}

impl ShardMap {
    /// A map of this version, with these shards that have been ordered elsewhere.
    #[must_use]
    pub fn new(version: MapVersion, moved: BTreeMap<ShardId, ShardPlace>) -> Self {
        Self { version, moved }
    }

    /// How often it has changed.
    #[must_use]
    pub fn version(&self) -> MapVersion {
        self.version
    }

    /// The shards that have been ordered elsewhere than where they were placed at first.
    pub fn moved(&self) -> impl Iterator<Item = (ShardId, ShardPlace)> {
        self.moved.iter().map(|(shard, place)| (*shard, *place))
    }

    /// Where a shard is.
    #[must_use]
    pub fn place(&self, shard: ShardId) -> ShardPlace {
        let (server, term, changed) = (shard.server, Term::FIRST, MapVersion(0));
        self.moved.get(&shard).copied().unwrap_or(ShardPlace { server, term, next: None, former: None, changed })
    }

    /// The shards that this server leads and keeps, each with its term; `own` are those that were placed there first.
    pub fn led_by(&self, server: ServerIndex, own: impl Iterator<Item = ShardId>) -> BTreeMap<ShardId, Term> {
        let all = own.chain(self.moved.keys().copied()).map(|shard| (shard, self.place(shard)));
        let led = all.filter(|(_, place)| place.server == server && place.next.is_none());
        led.map(|(shard, place)| (shard, place.term)).collect()
    }

    /// Orders a shard to another server; false where that is its place, or where it moves already.
    pub fn order(&mut self, shard: ShardId, to: ServerIndex) -> bool {
        let place = self.place(shard);
        let next = Some(to).filter(|to| *to != place.server);
        if place.next == next {
            return false;
        }
        self.change(shard, ShardPlace { next, former: place.former.or(Some(place.server)), ..place });
        true
    }

    /// Notes that the leader of a shard serves it: the shard goes back no more. True where that was not known; the
    /// version stays.
    pub fn settle(&mut self, shard: ShardId) -> bool {
        self.moved.get_mut(&shard).is_some_and(|place| place.former.take().is_some())
    }

    /// The shards that a server gives away by the map of this version, each with the next leader.
    pub fn leaving(&self, from: ServerIndex, followed: MapVersion) -> Vec<(ShardId, ServerIndex)> {
        let given = self.moved.iter().filter(|(_, place)| place.server == from && place.changed <= followed);
        given.filter_map(|(shard, place)| Some((*shard, place.next?))).collect()
    }

    /// Makes the next leader of a shard its leader, under the next term.
    ///
    /// # Panics
    ///
    /// When the shard does not move.
    pub fn hand_over(&mut self, shard: ShardId) {
        let place = self.place(shard);
        let server = place.next.expect("the shard moves");
        self.change(shard, ShardPlace { server, term: place.term.next(), next: None, ..place });
    }

    fn change(&mut self, shard: ShardId, place: ShardPlace) {
        self.version = MapVersion(self.version.0 + 1);
        let former = place.former.filter(|former| *former != place.server || place.next.is_some());
        self.moved.insert(shard, ShardPlace { former, changed: self.version, ..place });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ShardIndex;

    const fn shard(server: u16, shard: u16) -> ShardId {
        ShardId { server: ServerIndex(server), shard: ShardIndex(shard) }
    }

    fn own(server: u16) -> impl Iterator<Item = ShardId> {
        (0..2).map(move |index| shard(server, index))
    }

    fn led(map: &ShardMap, server: u16) -> Vec<(ShardId, u32)> {
        map.led_by(ServerIndex(server), own(server)).into_iter().map(|(shard, term)| (shard, term.0)).collect()
    }

    #[test]
    fn a_moving_shard_has_no_leader_until_the_old_one_releases_it() {
        let mut map = ShardMap::default();
        assert_eq!(led(&map, 0), [(shard(0, 0), 1), (shard(0, 1), 1)]);
        assert!(map.order(shard(0, 1), ServerIndex(1)));
        assert!(!map.order(shard(0, 1), ServerIndex(1)), "it moves already");
        assert_eq!((led(&map, 0), led(&map, 1).len()), (vec![(shard(0, 0), 1)], 2));
        let leaving = |map: &ShardMap, server, version| map.leaving(ServerIndex(server), MapVersion(version));
        assert_eq!(leaving(&map, 0, 0), [], "the leader does not know of the order");
        assert_eq!(leaving(&map, 1, 1), [], "another server does not lead it");
        assert_eq!(leaving(&map, 0, 1), [(shard(0, 1), ServerIndex(1))]);
        assert!(map.order(shard(0, 0), ServerIndex(1)));
        assert_eq!(leaving(&map, 0, 1), [(shard(0, 1), ServerIndex(1))], "the order of another shard changes nothing");
        assert!(map.order(shard(0, 0), ServerIndex(0)));
        map.hand_over(shard(0, 1));
        assert_eq!(leaving(&map, 0, 4), [], "it has gone");
        assert_eq!(led(&map, 1), [(shard(0, 1), 2), (shard(1, 0), 1), (shard(1, 1), 1)]);
        assert_eq!((map.version(), map.place(shard(0, 1)).changed), (MapVersion(4), MapVersion(4)));
    }

    #[test]
    fn a_shard_has_a_former_server_until_its_leader_serves_it() {
        let mut map = ShardMap::default();
        let former = |map: &ShardMap| map.place(shard(0, 0)).former.map(|server| server.0);
        map.order(shard(0, 0), ServerIndex(1));
        map.hand_over(shard(0, 0));
        map.order(shard(0, 0), ServerIndex(2));
        map.hand_over(shard(0, 0));
        assert_eq!(former(&map), Some(0), "server 1 has not served it");
        assert!(map.settle(shard(0, 0)));
        assert!(!map.settle(shard(0, 0)), "it is known");
        assert_eq!(former(&map), None);
        map.order(shard(0, 0), ServerIndex(1));
        assert_eq!(former(&map), Some(2));
        map.order(shard(0, 0), ServerIndex(2));
        assert_eq!(former(&map), None, "it stays");
    }

    #[test]
    fn a_cancelled_move_leaves_the_term_unchanged() {
        let mut map = ShardMap::default();
        assert!(!map.order(shard(0, 0), ServerIndex(0)), "that is its place");
        assert!(map.order(shard(0, 0), ServerIndex(1)));
        assert!(map.order(shard(0, 0), ServerIndex(0)));
        assert_eq!(led(&map, 0), [(shard(0, 0), 1), (shard(0, 1), 1)]);
        assert_eq!(map.version(), MapVersion(2));
    }
}

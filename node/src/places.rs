//! Places of shards, as a process knows them: the newest map, and the shards that the process holds.
//!
//! The map comes from the coordinator, over the registration or within the process of server 0. The shards that it
//! gives to this server are taken up, and those that it takes away are let go ([`hosting`](super::hosting)). A report
//! of what is held goes back to the coordinator, which completes moves by it.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pserver_core::ids::{MapVersion, ServerIndex, ShardId, ShardIndex, Term};
use pserver_core::partition::ShardMap;
use pserver_core::port::Doorbell;
use pserver_core::wire::HeldShardMessage;

/// The places, shared by the threads of a process.
pub(super) struct ShardPlaces {
    server: ServerIndex,
    /// Shards that are placed at this server at first.
    own: u16,
    state: Mutex<PlacesState>,
    changed: Condvar,
}

#[derive(Default)]
struct PlacesState {
    map: ShardMap,
    held: BTreeMap<ShardId, HeldShard>,
    /// The shards that could not be taken up, each with the reason.
    failures: BTreeMap<ShardId, String>,
    /// The version of the map that `held` follows.
    followed: MapVersion,
    /// Count of changes of `held` and `followed`.
    reports: u64,
    /// Wakes the thread that tells the coordinator.
    reporter: Option<Doorbell>,
    is_over: bool,
}

/// A shard that this process serves, or takes up.
struct HeldShard {
    term: Term,
    serves: bool,
}

/// The changes that a new map asks of this process.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PlaceChanges {
    /// The version of the map.
    pub version: MapVersion,
    /// Shards to let go.
    pub lets_go: Vec<ShardId>,
    /// Shards to take up, each with its term.
    pub takes_up: Vec<(ShardId, Term)>,
}

/// The shards that this process holds, for the coordinator.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HoldReport {
    /// Number of the report.
    pub number: u64,
    /// The version of the map that it follows.
    pub version: MapVersion,
    /// The shards that it holds, and those that it could not take up.
    pub held: Vec<HeldShardMessage>,
}

impl ShardPlaces {
    /// The places of a server that begins, with so many shards of its own.
    pub(super) fn new(server: u16, own: u16) -> Self {
        Self { server: ServerIndex(server), own, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes in a map, unless a newer one is known.
    pub(super) fn publish(&self, map: &ShardMap) {
        let mut state = self.lock();
        if state.map.version() < map.version() {
            state.map = map.clone();
            self.changed.notify_all();
        }
    }

    /// The version of the newest map.
    pub(super) fn version(&self) -> MapVersion {
        self.lock().map.version()
    }

    /// Wakes this doorbell when there is another report.
    pub(super) fn report_to(&self, reporter: Doorbell) {
        self.lock().reporter = Some(reporter);
    }

    /// The number of the newest report.
    pub(super) fn report_number(&self) -> u64 {
        self.lock().reports
    }

    /// The newest report.
    pub(super) fn report(&self) -> HoldReport {
        let state = self.lock();
        let held = |(shard, held): (&ShardId, &HeldShard)| HeldShardMessage {
            shard: Some((*shard).into()),
            serves: held.serves,
            failure: None,
        };
        let failed = |(shard, reason): (&ShardId, &String)| HeldShardMessage {
            shard: Some((*shard).into()),
            serves: false,
            failure: Some(reason.clone()),
        };
        let held = state.held.iter().map(held).chain(state.failures.iter().map(failed));
        HoldReport { number: state.reports, version: state.followed, held: held.collect() }
    }

    /// The changes that the newest map asks of this process.
    pub(super) fn changes(&self) -> PlaceChanges {
        self.changes_in(&self.lock())
    }

    fn changes_in(&self, state: &PlacesState) -> PlaceChanges {
        let led = state.map.led_by(self.server, self.own_shards());
        let lost = state.held.iter().filter(|(shard, held)| led.get(shard) != Some(&held.term));
        let lets_go: Vec<ShardId> = lost.map(|(shard, _)| *shard).collect();
        let is_new = |shard: &ShardId| !state.held.contains_key(shard) || lets_go.contains(shard);
        let takes_up = led.into_iter().filter(|(shard, _)| is_new(shard)).collect();
        PlaceChanges { version: state.map.version(), lets_go, takes_up }
    }

    /// Whether a start fails without this shard: it was placed here at first, and there is no other server that has
    /// served it last, to which it goes back.
    pub(super) fn needs(&self, shard: ShardId) -> bool {
        shard.server == self.server && self.lock().map.place(shard).former.is_none()
    }

    /// Waits until the map asks something of this process, or for `pause` at most; none once it is over.
    pub(super) fn wait(&self, pause: Duration) -> Option<PlaceChanges> {
        let state = self.lock();
        let is_idle = |state: &mut PlacesState| !state.is_over && state.followed == state.map.version();
        let waited = self.changed.wait_timeout_while(state, pause, is_idle);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (!state.is_over).then(|| self.changes_in(&state))
    }

    /// Ends every wait.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Notes a shard that this process takes up, or serves.
    pub(super) fn hold(&self, shard: ShardId, term: Term, serves: bool) {
        self.change(|state| {
            state.held.insert(shard, HeldShard { term, serves });
            state.failures.remove(&shard);
        });
    }

    /// Notes a shard that this process has let go.
    pub(super) fn let_go(&self, shard: ShardId) {
        self.change(|state| {
            state.held.remove(&shard);
            state.failures.remove(&shard);
        });
    }

    /// Notes that a shard could not be taken up, and why.
    pub(super) fn fail(&self, shard: ShardId, reason: String) {
        self.change(|state| {
            state.held.remove(&shard);
            state.failures.insert(shard, reason);
        });
    }

    /// Notes that this process has done what the map of this version asks.
    pub(super) fn follow(&self, version: MapVersion) {
        if self.lock().followed != version {
            self.change(|state| {
                state.followed = version;
                // A failure says nothing about a later move of its shard to this process.
                let led = state.map.led_by(self.server, self.own_shards());
                state.failures.retain(|shard, _| led.contains_key(shard));
            });
        }
    }

    fn own_shards(&self) -> impl Iterator<Item = ShardId> {
        (0..self.own).map(|shard| ShardId { server: self.server, shard: ShardIndex(shard) })
    }

    fn change(&self, change: impl FnOnce(&mut PlacesState)) {
        let mut state = self.lock();
        change(&mut state);
        state.reports += 1;
        state.reporter.iter().for_each(Doorbell::ring);
    }

    fn lock(&self) -> MutexGuard<'_, PlacesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(server: u16, shard: u16) -> ShardId {
        ShardId { server: ServerIndex(server), shard: ShardIndex(shard) }
    }

    fn take_up(places: &ShardPlaces) -> PlaceChanges {
        let changes = places.changes();
        changes.takes_up.iter().for_each(|(shard, term)| places.hold(*shard, *term, true));
        places.follow(changes.version);
        changes
    }

    #[test]
    fn a_server_takes_up_and_releases_shards_as_the_map_says() {
        let (home, other) = (ShardPlaces::new(0, 2), ShardPlaces::new(1, 1));
        assert_eq!(take_up(&home).takes_up, [(shard(0, 0), Term(1)), (shard(0, 1), Term(1))]);
        assert_eq!(take_up(&other).takes_up, [(shard(1, 0), Term(1))]);
        let mut map = ShardMap::default();
        map.order(shard(0, 1), ServerIndex(1));
        home.publish(&map);
        other.publish(&map);
        assert_eq!((home.changes().lets_go, home.changes().takes_up), (vec![shard(0, 1)], vec![]));
        assert_eq!((other.changes().lets_go, other.changes().takes_up), (vec![], vec![]));
        home.let_go(shard(0, 1));
        home.follow(map.version());
        assert_eq!(home.report().held.len(), 1);
        map.hand_over(shard(0, 1));
        home.publish(&map);
        other.publish(&map);
        assert_eq!(other.changes().takes_up, [(shard(0, 1), Term(2))]);
        assert_eq!(home.changes().takes_up, []);
    }

    #[test]
    fn a_shard_that_returns_under_a_later_term_is_released_and_taken_up_again() {
        let home = ShardPlaces::new(0, 1);
        take_up(&home);
        let mut map = ShardMap::default();
        for server in [1, 0] {
            map.order(shard(0, 0), ServerIndex(server));
            map.hand_over(shard(0, 0));
        }
        home.publish(&map);
        let changes = home.changes();
        assert_eq!((changes.lets_go, changes.takes_up), (vec![shard(0, 0)], vec![(shard(0, 0), Term(3))]));
        // An older map changes nothing.
        home.publish(&ShardMap::default());
        assert_eq!(home.version(), map.version());
    }

    #[test]
    fn a_failure_is_reported_until_its_shard_is_ordered_away() {
        let other = ShardPlaces::new(1, 0);
        let mut map = ShardMap::default();
        let failures = || other.report().held.into_iter().filter(|one| one.failure.is_some()).count();
        for expected in [1, 0] {
            map.order(shard(0, 0), ServerIndex(expected));
            map.hand_over(shard(0, 0));
            other.publish(&map);
            other.changes().takes_up.iter().for_each(|(shard, _)| other.fail(*shard, "no files".to_owned()));
            other.follow(map.version());
            assert_eq!(failures(), usize::from(expected));
        }
    }

    #[test]
    fn a_report_has_a_new_number_after_each_change() {
        let home = ShardPlaces::new(0, 1);
        let before = home.report().number;
        home.hold(shard(0, 0), Term(1), false);
        let report = home.report();
        assert!(before < report.number && !report.held[0].serves);
        assert_eq!(home.report(), report);
    }
}

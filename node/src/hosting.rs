//! Hosting of shards: a server takes up the shards that the map gives to it, and lets go those that it takes away.
//!
//! Shards share threads. A shard that is let go ends as in a server that stops, with its last checkpoint, and is taken
//! up as in a server that starts, from checkpoint and journal; the other shards of its thread go on meanwhile. Trainers
//! repeat what was not answered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::ids::{ShardId, Term};
use pserver_core::port::{Capabilities, Transport};
use pserver_transport::network::NetworkOptions;

use super::device::{self, ShardDevice};
use super::places::ShardPlaces;
use super::session::{NodeSession, SessionControl};
use super::session_loop::{SessionEntry, SessionThread, join};
use super::sharding::ShardNode;
use super::watch::WatchedSession;
use super::{ServedJob, ServerStart};

/// Pause before a shard that could not be taken up is tried again.
const TAKE_UP_PAUSE: Duration = Duration::from_secs(1);

/// Makes the transports of a server's threads, and says which of them serves a lane.
pub(super) trait LaneTransports: Send + 'static {
    type Transport: Transport + 'static;
    /// The way of new connections to a transport.
    type Entrance: Send + 'static;

    /// A transport, which gets no connections yet.
    fn make(&mut self, options: NetworkOptions) -> Result<(Self::Transport, Self::Entrance), Failure>;

    /// From now on a transport gets the lane's connections.
    fn open(&mut self, lane: u64, entrance: &Self::Entrance) -> Result<(), Failure>;

    /// From now on the lane's connections are refused.
    fn close(&mut self, lane: u64);
}

/// The shards of a server.
pub(super) struct ShardHost {
    threads: Vec<SessionThread<ShardNode>>,
    places: Arc<ShardPlaces>,
    thread: Option<JoinHandle<Result<(), Failure>>>,
}

/// Takes shards up and lets them go.
struct Hosting<L: LaneTransports> {
    start: Arc<ServerStart>,
    job: ServedJob,
    lanes: L,
    threads: Vec<ShardThread<L::Entrance>>,
    /// The thread of each shard that runs.
    running: BTreeMap<ShardId, usize>,
    /// The devices that were opened at start, by the number of this server's shards. One that is taken up later has
    /// another or none.
    devices: BTreeMap<u16, ShardDevice>,
}

/// A thread of shards, as they enter it and leave it.
struct ShardThread<E> {
    sessions: SessionEntry<ShardNode>,
    entrance: E,
    can: Capabilities,
}

impl ShardHost {
    /// Takes up the shards that this server leads, and begins to follow the map.
    ///
    /// # Errors
    /// When one that was placed here at first cannot be restored, and cannot go back. Others are tried again.
    pub(super) fn start(
        start: &Arc<ServerStart>,
        job: ServedJob,
        mut lanes: impl LaneTransports,
    ) -> Result<Self, Failure> {
        let started = (0..start.settings.threads()).map(|number| ShardThread::start(start, number, &mut lanes));
        let (owned, threads) = started.collect::<Result<(Vec<_>, Vec<_>), Failure>>()?;
        let places = Arc::clone(&start.places);
        let mut host = Self { threads: owned, places: Arc::clone(&places), thread: None };
        let (devices, running) = ((0..).zip(device::open(&start.settings)?).collect(), BTreeMap::new());
        let mut hosting = Hosting { start: Arc::clone(start), job, lanes, threads, running, devices };
        let mut changes = places.changes();
        // The server's own shards come first, and do not wait for one that has moved here.
        changes.takes_up.sort_by_key(|(shard, _)| shard.server.0 != start.settings.index);
        for (shard, term) in changes.takes_up {
            let taken = hosting.take_up(shard, term);
            if places.needs(shard) {
                taken?;
            } else if let Err(failure) = taken {
                tracing::error!(%shard, %term, "the shard cannot be taken up: {failure}");
            }
        }
        places.follow(changes.version);
        let follow = move || {
            hosting.follow();
            Ok(())
        };
        let thread = std::thread::Builder::new().name("pserver-places".to_owned()).spawn(follow);
        host.thread = Some(thread.map_err(|error| Failure::Node(format!("starting a thread: {error}")))?);
        Ok(host)
    }

    /// Whether a thread of shards, or the one that follows the map, has ended by itself.
    pub(super) fn has_failed(&self) -> bool {
        let has_ended = self.thread.as_ref().is_some_and(JoinHandle::is_finished);
        has_ended || self.threads.iter().any(SessionThread::has_ended)
    }

    /// Follows the map no longer, and stops every shard.
    ///
    /// # Errors
    /// The first failure of any of them.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        self.places.end();
        let followed = self.thread.take().map_or(Ok(()), join);
        self.threads.iter().for_each(SessionThread::stop);
        self.threads.iter_mut().map(SessionThread::join).fold(followed, Result::and)
    }
}

impl<E> ShardThread<E> {
    fn start<L: LaneTransports<Entrance = E>>(
        start: &ServerStart,
        number: u16,
        lanes: &mut L,
    ) -> Result<(SessionThread<ShardNode>, Self), Failure> {
        let settings = &start.settings;
        // Servers of a host, and the threads of each, use different ones of several equal cards.
        let device_turn = usize::from(settings.index) * usize::from(settings.threads()) + usize::from(number);
        let (poll, checks) = (settings.poll, settings.addresses.checks);
        let options = NetworkOptions { poll, checks, device_turn, ..start.network_options() };
        let (transport, entrance) = lanes.make(options)?;
        let can = transport.capabilities();
        let name = format!("pserver-shards-{number}");
        let thread = SessionThread::shared(name, transport, Arc::clone(&start.machine))?;
        let sessions = thread.entry();
        Ok((thread, Self { sessions, entrance, can }))
    }
}

impl<L: LaneTransports> Hosting<L> {
    /// Does what each new map asks, and tries again what failed, until the server ends.
    fn follow(&mut self) {
        let places = Arc::clone(&self.start.places);
        while let Some(changes) = places.wait(TAKE_UP_PAUSE) {
            changes.lets_go.iter().for_each(|shard| self.let_go(*shard));
            for (shard, term) in changes.takes_up {
                match self.take_up(shard, term) {
                    Ok(()) => tracing::info!(%shard, %term, "the shard has moved here"),
                    Err(failure) => tracing::error!(%shard, %term, "the shard cannot be taken up: {failure}"),
                }
            }
            places.follow(changes.version);
        }
    }

    fn take_up(&mut self, shard: ShardId, term: Term) -> Result<(), Failure> {
        self.start.places.hold(shard, term, false);
        let begun = self.begin(shard, term);
        match &begun {
            Ok(()) => self.start.places.hold(shard, term, true),
            Err(failure) => self.start.places.fail(shard, failure.to_string()),
        }
        begun
    }

    fn begin(&mut self, shard: ShardId, term: Term) -> Result<(), Failure> {
        let settings = &self.start.settings;
        let is_own = shard.server.0 == settings.index;
        let device = if is_own { self.devices.remove(&shard.shard.0) } else { None };
        let device = device.unwrap_or_else(|| device::of_a_shard_that_moved(settings));
        let shards_of = |place: &usize| self.running.values().filter(|other| *other == place).count();
        let place = (0..self.threads.len()).min_by_key(shards_of).expect("a server has a thread");
        let thread = &self.threads[place];
        let control = SessionControl::new(thread.sessions.doorbell().clone());
        let node = ShardNode::new(&self.start, (shard, term), self.job, thread.can, device)?;
        let counters = Arc::clone(node.counters());
        thread.sessions.enter(shard.lane(), node, control.clone())?;
        if let Err(failure) = self.lanes.open(shard.lane(), &thread.entrance) {
            drop(thread.sessions.leave(shard.lane()));
            return Err(failure);
        }
        self.start.watch.add(WatchedSession { control, shard: Some((shard, counters)) });
        self.running.insert(shard, place);
        Ok(())
    }

    fn let_go(&mut self, shard: ShardId) {
        self.lanes.close(shard.lane());
        self.start.watch.remove(shard);
        let Some(place) = self.running.remove(&shard) else { return self.start.places.let_go(shard) };
        // The other shards of its thread do not wait until its last checkpoint is written.
        let finished = match self.threads[place].sessions.leave(shard.lane()) {
            Some(mut node) => node.finish(),
            None => Err(Failure::Node("its thread has ended".to_owned())),
        };
        match finished {
            Ok(()) => tracing::info!(%shard, "the shard has moved away"),
            Err(failure) => tracing::error!(
                %shard, "the shard moves as of its last checkpoint and its journal, as it ended with: {failure}"
            ),
        }
        self.start.places.let_go(shard);
    }
}

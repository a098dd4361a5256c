//! Hosting of shards: a server takes up the shards that the map gives to it, and lets go those that it takes away.
//!
//! Each shard has a thread of its own. A shard that is let go ends as in a server that stops, with its last checkpoint,
//! and is taken up as in a server that starts, from checkpoint and journal. Trainers repeat what was not answered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pserver_core::error::Failure;
use pserver_core::ids::{ShardId, Term};
use pserver_core::port::Transport;
use pserver_transport::network::NetworkOptions;

use super::device::{self, ShardDevice};
use super::places::ShardPlaces;
use super::session::{SessionControl, SessionThread, join};
use super::sharding::ShardNode;
use super::watch::WatchedSession;
use super::{ServedJob, ServerStart};

/// Pause before a shard that could not be taken up is tried again.
const TAKE_UP_PAUSE: Duration = Duration::from_secs(1);

/// Makes the transports of lanes, by their number.
pub(super) trait LaneTransports: Send + 'static {
    type Transport: Transport + 'static;

    /// The transport of a lane, which gets no connections yet.
    fn make(&mut self, lane: u64, options: NetworkOptions) -> Result<Self::Transport, Failure>;

    /// From now on the transport gets the lane's connections.
    fn open(&mut self, lane: u64, transport: &Self::Transport);

    /// From now on the lane's connections are refused.
    fn close(&mut self, lane: u64);
}

/// The shards of a server.
pub(super) struct ShardHost {
    running: Arc<Mutex<BTreeMap<ShardId, SessionThread>>>,
    places: Arc<ShardPlaces>,
    thread: Option<JoinHandle<Result<(), Failure>>>,
}

/// Takes shards up and lets them go.
struct Hosting<L> {
    start: Arc<ServerStart>,
    job: ServedJob,
    lanes: L,
    running: Arc<Mutex<BTreeMap<ShardId, SessionThread>>>,
    /// The devices that were opened at start, by the number of this server's shards. One that is taken up later has
    /// another or none.
    devices: BTreeMap<u16, ShardDevice>,
}

impl ShardHost {
    /// Takes up the shards that this server leads, and begins to follow the map.
    ///
    /// # Errors
    /// When one of them cannot be restored.
    pub(super) fn start(start: &Arc<ServerStart>, job: ServedJob, lanes: impl LaneTransports) -> Result<Self, Failure> {
        let running = Arc::<Mutex<BTreeMap<_, _>>>::default();
        let devices = (0..).zip(device::open(&start.settings)?).collect();
        let (places, shared) = (Arc::clone(&start.places), Arc::clone(&running));
        let mut hosting = Hosting { start: Arc::clone(start), job, lanes, running: shared, devices };
        let changes = places.changes();
        for (shard, term) in changes.takes_up {
            hosting.take_up(shard, term)?;
        }
        places.follow(changes.version);
        let follow = move || {
            hosting.follow();
            Ok(())
        };
        let thread = std::thread::Builder::new().name("pserver-places".to_owned()).spawn(follow);
        let thread = thread.map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        Ok(Self { running, places, thread: Some(thread) })
    }

    /// Whether the thread of a shard, or the one that follows the map, has ended by itself.
    pub(super) fn has_failed(&self) -> bool {
        let has_ended = self.thread.as_ref().is_some_and(JoinHandle::is_finished);
        has_ended || lock(&self.running).values().any(SessionThread::has_ended)
    }

    /// Follows the map no longer, and stops every shard.
    ///
    /// # Errors
    /// The first failure of any of them.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        self.places.end();
        let followed = self.thread.take().map_or(Ok(()), join);
        let shards = std::mem::take(&mut *lock(&self.running));
        shards.values().for_each(SessionThread::stop);
        shards.into_values().map(SessionThread::join).fold(followed, Result::and)
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
        // Servers of a host, and the shards of each, use different ones of several equal cards.
        let device_turn = usize::from(settings.index) * usize::from(settings.shards) + usize::from(shard.shard.0);
        let (poll, checks) = (settings.poll, settings.addresses.checks);
        let options = NetworkOptions { poll, checks, device_turn, ..self.start.network_options() };
        let transport = self.lanes.make(shard.lane(), options)?;
        let control = SessionControl::new(transport.doorbell());
        let node = ShardNode::new(&self.start, (shard, term), self.job, transport.capabilities(), device)?;
        let counters = Arc::clone(node.counters());
        self.start.watch.add(WatchedSession { control: control.clone(), shard: Some((shard, counters)) });
        self.lanes.open(shard.lane(), &transport);
        let (name, machine) = (format!("pserver-shard-{}", shard.shard), Arc::clone(&self.start.machine));
        let thread = SessionThread::spawn(&name, node, transport, control, machine)?;
        lock(&self.running).insert(shard, thread);
        Ok(())
    }

    fn let_go(&mut self, shard: ShardId) {
        self.lanes.close(shard.lane());
        let thread = lock(&self.running).remove(&shard);
        if let Some(thread) = thread {
            thread.release();
            match thread.join() {
                Ok(()) => tracing::info!(%shard, "the shard has moved away"),
                Err(failure) => tracing::error!(
                    %shard, "the shard moves as of its last checkpoint and its journal, as it ended with: {failure}"
                ),
            }
        }
        self.start.watch.remove(shard);
        self.start.places.let_go(shard);
    }
}

fn lock(running: &Mutex<BTreeMap<ShardId, SessionThread>>) -> MutexGuard<'_, BTreeMap<ShardId, SessionThread>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

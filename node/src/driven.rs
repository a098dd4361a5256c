//! Sessions of a server that run without threads: the owner gives them machine, disk and transports, and each turn.
//!
//! For simulations. A process runs the same sessions on threads ([`Server`](super::Server)). Not here: registration
//! with server 0, which the owner does.

use std::sync::Arc;
use std::time::Duration;

use pserver_core::checkpoint::{OwnerRecord, Storage};
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, Generation, MapVersion, ShardId, Term};
use pserver_core::partition::ShardMap;
use pserver_core::port::{CoordinationStore, Transport};
use pserver_core::shares::SharedNeeds;
use pserver_transport::loopback::Hub;

use super::coordinating::CoordinatorNode;
use super::machine::ProcessMachine;
use super::places::{HoldReport, PlaceChanges, ShardPlaces};
use super::seats::Seats;
use super::session::SessionControl;
use super::session_loop::{SessionLoop, TurnEnd};
use super::sharding::ShardNode;
use super::watch::Watch;
use super::{OwnedStorage, ServedJob, ServerNetwork, ServerStart};
use crate::settings::Settings;

/// The parameters of a process's start.
pub struct ProcessOptions {
    /// Its settings.
    pub settings: Settings,
    /// Its clocks, and the threads of its background work.
    pub machine: Arc<dyn ProcessMachine>,
    /// Its checkpoint directory, if it has one.
    pub storage: Option<Arc<dyn Storage>>,
    /// Its description in the directory's owner file.
    pub owner: OwnerRecord,
}

/// A server process without threads.
pub struct DrivenProcess {
    start: ServerStart,
}

/// A session of such a process.
pub struct DrivenSession<T> {
    session: SessionKind<T>,
}

enum SessionKind<T> {
    Coordinator(Box<SessionLoop<CoordinatorNode, T>>),
    Shard(Box<SessionLoop<ShardNode, T>>),
}

impl DrivenProcess {
    /// Starts a process, which becomes the owner of its checkpoint directory.
    ///
    /// # Errors
    /// When the directory cannot be claimed.
    pub fn start(options: ProcessOptions) -> Result<Self, Failure> {
        let ProcessOptions { settings, machine, storage, owner } = options;
        let storage = storage.map(|storage| OwnedStorage::claim(storage, &settings, owner)).transpose()?;
        let start = ServerStart {
            address: settings.addresses.bind.clone(),
            storage,
            machine,
            memory_limit: None,
            memory_needs: SharedNeeds::default(),
            token: None,
            encryption: None,
            shares_memory: false,
            reach: ServerNetwork::Within(Hub::default()),
            watch: Arc::new(Watch::new(&settings)),
            places: Arc::new(ShardPlaces::new(settings.index, settings.shards)),
            settings,
        };
        Ok(Self { start })
    }

    /// The coordinator of server 0, with the job that it serves: its epoch and the committed generation. Without a
    /// store it keeps its state in the checkpoint directory.
    ///
    /// # Errors
    /// When its state cannot be read or kept.
    pub fn coordinator<T: Transport>(
        &self,
        store: Option<Box<dyn CoordinationStore>>,
        transport: T,
    ) -> Result<(DrivenSession<T>, (Epoch, Generation)), Failure> {
        let control = SessionControl::new(transport.doorbell());
        let store = store.unwrap_or_else(|| self.start.coordination());
        let node = CoordinatorNode::new(&self.start, store, control.clone())?;
        let ServedJob { epoch, committed } = node.serves();
        let session = SessionLoop::new(Seats::lone(node, control), transport, Arc::clone(&self.start.machine));
        Ok((DrivenSession { session: SessionKind::Coordinator(Box::new(session)) }, (epoch, committed)))
    }

    /// Takes in a map of shards from the coordinator of another process.
    pub fn publish(&self, map: &ShardMap) {
        self.start.places.publish(map);
    }

    /// The changes that the newest map asks of this process. Behind them [`DrivenProcess::follow`] is next.
    #[must_use]
    pub fn changes(&self) -> PlaceChanges {
        self.start.places.changes()
    }

    /// The version of the newest map that it knows.
    #[must_use]
    pub fn map_version(&self) -> MapVersion {
        self.start.places.version()
    }

    /// Notes that the map of this version is followed.
    pub fn follow(&self, version: MapVersion) {
        self.start.places.follow(version);
    }

    /// Whether a start fails without this shard.
    #[must_use]
    pub fn needs(&self, shard: ShardId) -> bool {
        self.start.places.needs(shard)
    }

    /// Notes a shard whose session is finished.
    pub fn let_go(&self, shard: ShardId) {
        self.start.places.let_go(shard);
    }

    /// The shards that this process holds, for the coordinator.
    #[must_use]
    pub fn report(&self) -> HoldReport {
        self.start.places.report()
    }

    /// The number of the newest report.
    #[must_use]
    pub fn report_number(&self) -> u64 {
        self.start.places.report_number()
    }

    /// A shard of the job, restored from its files.
    ///
    /// # Errors
    /// When the files cannot be read, or are lost.
    pub fn shard<T: Transport>(
        &self,
        (shard, term): (ShardId, Term),
        (epoch, committed): (Epoch, Generation),
        transport: T,
    ) -> Result<DrivenSession<T>, Failure> {
        let control = SessionControl::new(transport.doorbell());
        let job = ServedJob { epoch, committed };
        let node = ShardNode::new(&self.start, (shard, term), job, transport.capabilities(), None);
        let node = node.inspect_err(|failure| self.start.places.fail(shard, failure.to_string()))?;
        self.start.places.hold(shard, term, true);
        let session = SessionLoop::new(Seats::lone(node, control), transport, Arc::clone(&self.start.machine));
        Ok(DrivenSession { session: SessionKind::Shard(Box::new(session)) })
    }
}

impl<T: Transport> DrivenSession<T> {
    /// Whether [`DrivenSession::finish`] would wait for background work.
    #[must_use]
    pub fn awaits_work(&self) -> bool {
        match &self.session {
            SessionKind::Coordinator(session) => session.awaits_work(),
            SessionKind::Shard(session) => session.awaits_work(),
        }
    }

    /// Finishes the session of a shard that is let go.
    ///
    /// # Errors
    /// When its last checkpoint cannot be written.
    pub fn finish(mut self) -> Result<(), Failure> {
        match &mut self.session {
            SessionKind::Coordinator(session) => session.finish(),
            SessionKind::Shard(session) => session.finish(),
        }
    }

    /// Handles the events that have arrived, and does due work. The next turn is due after an event, or after this
    /// time.
    ///
    /// # Errors
    /// When the session ends; its process ends too.
    pub fn turn(&mut self) -> Result<Duration, Failure> {
        let end = match &mut self.session {
            SessionKind::Coordinator(session) => session.turn(),
            SessionKind::Shard(session) => session.turn(),
        };
        Ok(match end? {
            TurnEnd::Again | TurnEnd::Over => Duration::ZERO,
            TurnEnd::Wait(pause) => pause,
        })
    }
}

//! A server process: an accept thread, threads that shards share, one that follows the map of shards, and in server 0
//! one for the coordinator.
//!
//! The threads of shards and coordinator run the same loop over their sessions of `pserver_core::server` and a
//! transport of their own. The data path shares nothing between threads.
//!
//! A server serves other processes ([`Server::start`]) or clients of its own process ([`Server::start_within`]).
//!
//! Not here: what a frame does to a shard (`pserver_core::server`), where the options come from (`settings`).

mod coordinating;
mod device;
mod device_speed;
mod driven;
pub mod events;
mod hosted_programs;
mod hosting;
mod machine;
mod memory_limit;
mod ownership;
mod places;
pub mod progress;
mod registration;
mod saving;
mod seats;
mod session;
mod session_loop;
pub mod settings;
mod sharding;
pub mod telemetry;
mod watch;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam::channel::bounded;
use pserver_core::checkpoint::inspect::newer_file;
use pserver_core::checkpoint::owner::{server_directory, shard_directory};
use pserver_core::checkpoint::storage::{Directory, Lock, LockOutcome, Metered};
use pserver_core::checkpoint::{CoordinatorFile, DirectoryOwner, OwnerRecord, Storage};
use pserver_core::config::{OptimizerSettings, ParameterConfig};
use pserver_core::error::Failure;
use pserver_core::ids::{Epoch, Generation};
use pserver_core::metrics::WorkMeter;
use pserver_core::port::{CoordinationStore, MemoryStore, Transport};
use pserver_core::shares::SharedNeeds;
use pserver_core::time::Now;
use pserver_core::wire::{Address, JobMessage, Scheme, ServerEntry};
use pserver_transport::loopback::{Hub, LoopbackListener, LoopbackTransport};
use pserver_transport::network::{ConnectionSender, JobToken, Lanes, Listener, Network, NetworkOptions, Stop};
use pserver_transport::tls::Encryption;
use pserver_transport::verbs::{DeviceChoice, VerbsDevice, VerbsDevices};

use coordinating::CoordinatorNode;
use hosting::{LaneTransports, ShardHost};
use machine::OsMachine;
use memory_limit::memory_limit;
use ownership::Ownership;
use places::ShardPlaces;
use registration::Registration;
use session::SessionControl;
use session_loop::SessionThread;
use watch::{HttpServer, Watch, WatchedSession};

use crate::settings::{JournalSetting, Settings};

pub use driven::{DrivenProcess, DrivenSession, ProcessOptions};
pub use machine::{BackgroundWork, ProcessMachine};
pub use places::{HoldReport, PlaceChanges};
use pserver_client::{Client, ClientOptions, MakeTransport, SharedVerbsCounters, networks, within};
pub use watch::{
    Durations, JobServer, JobStatus, JobTrainer, SERIES, Series, SeriesKind, ServerStatus, ShardCounts,
    ShardStatusEntry,
};

/// Attempts to take the lock of a directory that another process has, after the first.
const LOCK_ATTEMPTS: u32 = 3;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A running server.
pub struct Server {
    address: Address,
    stop: Stop,
    listener: Option<JoinHandle<Result<(), Failure>>>,
    sessions: SessionThreads,
    watch: Arc<Watch>,
    http: Option<HttpServer>,
}

/// The sessions of a server, each with its thread.
struct SessionThreads {
    /// The coordinator, in server 0.
    coordinator: Option<SessionThread<CoordinatorNode>>,
    shards: ShardHost,
    /// The registration of a server other than 0.
    registered: Option<Registration>,
    /// Held until all sessions have finished writing.
    _lock: Option<Arc<Lock>>,
}

/// The network between a server, other servers and clients.
#[derive(Clone)]
enum ServerNetwork {
    /// Sockets, shared memory or verbs, to other processes.
    Network,
    /// Loopback, within this process.
    Within(Hub),
}

/// Start parameters of all sessions of a server.
struct ServerStart {
    settings: Settings,
    address: Address,
    storage: Option<OwnedStorage>,
    machine: Arc<dyn ProcessMachine>,
    /// Bytes of memory that this process may use, where there is a limit.
    memory_limit: Option<u64>,
    /// The needs of its shards of it.
    memory_needs: SharedNeeds,
    token: Option<JobToken>,
    encryption: Option<Encryption>,
    /// Whether trainers of this machine read values in shared memory.
    shares_memory: bool,
    reach: ServerNetwork,
    watch: Arc<Watch>,
    places: Arc<ShardPlaces>,
}

/// The storage of a server's checkpoints, journals and coordinator state, and the proof of its ownership.
struct OwnedStorage {
    storage: Arc<dyn Storage>,
    /// The owner of the server's directory; each shard's has its own.
    owner: DirectoryOwner,
    /// The process, as the owners' files describe it.
    record: OwnerRecord,
    /// None where the file system has no locks.
    lock: Option<Arc<Lock>>,
    /// The needs of the process's shards of the disk.
    disk_needs: SharedNeeds,
}

/// The job that a server serves.
#[derive(Clone, Copy)]
struct ServedJob {
    epoch: Epoch,
    /// The generation whose parameters are initialised; zero before.
    committed: Generation,
}

impl Server {
    /// Starts a server: takes its address, brings back what an earlier process left, and serves.
    ///
    /// # Errors
    /// When the token cannot be read, the address cannot be had, the disk cannot be read, or server 0 does not answer.
    pub fn start(settings: Settings) -> Result<Self, Failure> {
        Self::start_metered(settings, &Arc::default())
    }

    /// As [`Server::start`]; `meter` counts the bytes that a restart reads and those that checkpoints write.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_metered(settings: Settings, meter: &Arc<WorkMeter>) -> Result<Self, Failure> {
        let token = settings.admission.token_file.as_deref().map(JobToken::read).transpose();
        let token = token.map_err(|failure| Failure::Node(format!("{}: {failure}", settings.named("token_file"))))?;
        let encryption = Encryption::of_server(&settings.admission.encryption);
        let encryption =
            encryption.map_err(|failure| Failure::Node(format!("{}: {failure}", settings.named("encrypt"))))?;
        let is_reached_near = settings.addresses.advertise.as_ref().is_none_or(Address::is_loopback);
        let local_token = is_reached_near && !settings.admission.insecure;
        let options = NetworkOptions {
            token: token.clone(),
            encryption: encryption.clone(),
            local_token,
            ..NetworkOptions::default()
        };
        look_for_verbs(&settings)?;
        let listener = Listener::bind(&settings.addresses.bind, options)
            .map_err(|failure| Failure::Node(format!("{}: {failure}", settings.named("bind"))))?;
        let address = advertised(&settings, &listener.local_address());
        let start = Arc::new(ServerStart {
            token,
            encryption,
            ..ServerStart::new(settings, address, listener.shares_memory(), ServerNetwork::Network, meter)?
        });
        // The listener for HTTP answers while the sessions restore their state.
        let http = start.serve_http()?;
        let lanes = Lanes::default();
        let sessions = SessionThreads::start(&start, lanes.clone())?;
        let stop = Stop::new();
        let stop_listener = stop.clone();
        let listener = std::thread::Builder::new()
            .name("pserver-accept".to_owned())
            .spawn(move || listener.run(lanes, stop_listener))
            .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        let (address, watch) = (start.address.clone(), Arc::clone(&start.watch));
        Ok(Self { address, stop, listener: Some(listener), sessions, watch, http })
    }

    /// Starts a server for clients of this process ([`Client::within`]): `hub` has a place for each of its lanes, under
    /// the name that it is bound to, such as `loopback://server-0:1`. For tests and measurements.
    ///
    /// # Errors
    /// As [`Server::start`]; and when the address or a token is for other processes.
    pub fn start_within(settings: Settings, hub: &Hub) -> Result<Self, Failure> {
        let address = settings.addresses.bind.clone();
        if address.scheme != Scheme::Loopback {
            return Err(Failure::Node(format!(
                "listening on {address} within this process: expected an address such as loopback://server-0:1"
            )));
        }
        if settings.admission.token_file.is_some() {
            let text = format!("listening on {address} within this process: a token has no use there; expected none");
            return Err(Failure::Node(text));
        }
        let reach = ServerNetwork::Within(hub.clone());
        let start = Arc::new(ServerStart::new(settings, address.clone(), false, reach, &Arc::default())?);
        let sessions = SessionThreads::start(&start, HubLanes { hub: hub.clone(), address: address.clone() })?;
        let (watch, http) = (Arc::clone(&start.watch), None);
        Ok(Self { address, stop: Stop::new(), listener: None, sessions, watch, http })
    }

    /// The advertised address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The address of metrics, status and page, if they are served.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(HttpServer::address)
    }

    /// Whether one of its threads has ended by itself, after a failure or because another server took its index.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        let SessionThreads { coordinator, shards, registered, .. } = &self.sessions;
        coordinator.as_ref().is_some_and(SessionThread::has_ended)
            || shards.has_failed()
            || registered.as_ref().is_some_and(Registration::has_ended)
    }

    /// Stops the server: it accepts no connection, applies received gradients, and writes a last checkpoint.
    ///
    /// # Errors
    /// The first failure of any of its threads.
    pub fn stop(mut self) -> Result<(), Failure> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.watch.stops();
        self.stop.stop();
        let mut ended = Ok(());
        if let Some(listener) = self.listener.take() {
            ended = session_loop::join(listener);
        }
        // Shards first, all at once: while they finish, the coordinator still answers. With its last checkpoint written
        // a server leaves the job, so that a successor finds it.
        let SessionThreads { coordinator, shards, registered, .. } = &mut self.sessions;
        ended = ended.and(shards.end());
        if let Some(mut coordinator) = coordinator.take() {
            coordinator.stop();
            ended = ended.and(coordinator.join());
        }
        ended = registered.take().map_or(Ok(()), Registration::end).and(ended);
        self.http.take().into_iter().for_each(HttpServer::end);
        ended
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(failure) = self.end() {
            tracing::error!("stopping the server: {failure}");
        }
    }
}

impl SessionThreads {
    /// Starts the coordinator, where there is one, and the shards.
    fn start(start: &Arc<ServerStart>, mut lanes: impl LaneTransports) -> Result<Self, Failure> {
        let settings = &start.settings;
        let (job, coordinator, registered) = if settings.index == 0 {
            if let Some(named) = &settings.addresses.coordinator {
                let own = &start.address;
                tracing::info!(%named, %own, "this is server 0, so the setting coordinator has no effect here");
            }
            let (transport, entrance) = lanes.make(start.network_options())?;
            let control = SessionControl::new(transport.doorbell());
            let node = CoordinatorNode::new(start, start.coordination(), control.clone())?;
            start.watch.add(WatchedSession { control: control.clone(), shard: None });
            lanes.open(0, &entrance)?;
            let (job, machine) = (node.serves(), Arc::clone(&start.machine));
            let thread = SessionThread::lone("pserver-coordinator".to_owned(), (node, control), transport, machine)?;
            (job, Some(thread), None)
        } else {
            let (job, registered) = registration::register(start)?;
            (job, None, Some(registered))
        };
        let shards = ShardHost::start(start, job, lanes)?;
        start.watch.serves(start.address.to_string());
        let lock = start.storage.as_ref().and_then(|storage| storage.lock.clone());
        Ok(Self { coordinator, shards, registered, _lock: lock })
    }
}

impl LaneTransports for Lanes {
    type Transport = Network;
    type Entrance = ConnectionSender;

    fn make(&mut self, options: NetworkOptions) -> Result<(Network, ConnectionSender), Failure> {
        let transport = Network::new(options)?;
        let entrance = transport.connection_sender();
        Ok((transport, entrance))
    }

    fn open(&mut self, lane: u64, entrance: &ConnectionSender) -> Result<(), Failure> {
        Self::open(self, lane, entrance.clone());
        Ok(())
    }

    fn close(&mut self, lane: u64) {
        Self::close(self, lane);
    }
}

/// The lanes of a server for clients of its process.
struct HubLanes {
    hub: Hub,
    address: Address,
}

impl LaneTransports for HubLanes {
    type Transport = LoopbackTransport;
    type Entrance = LoopbackListener;

    fn make(&mut self, options: NetworkOptions) -> Result<(LoopbackTransport, LoopbackListener), Failure> {
        let transport = self.hub.transport().with(options.checks, options.poll);
        let entrance = transport.listener();
        Ok((transport, entrance))
    }

    fn open(&mut self, lane: u64, entrance: &LoopbackListener) -> Result<(), Failure> {
        self.hub.open(&self.address.of_lane(lane), entrance)
    }

    fn close(&mut self, lane: u64) {
        self.hub.close(&self.address.of_lane(lane));
    }
}

impl ServerNetwork {
    /// Makes transports to other servers.
    fn transports(&self, options: NetworkOptions) -> MakeTransport {
        match self {
            Self::Network => networks(options, SharedVerbsCounters::default()),
            Self::Within(hub) => within(options, hub.clone()),
        }
    }

    /// A client of a job that this server is part of.
    fn client(&self, options: ClientOptions) -> Result<Client, Failure> {
        match self {
            Self::Network => Client::new(options),
            Self::Within(hub) => Client::within(options, hub),
        }
    }
}

impl ServerStart {
    fn new(
        settings: Settings,
        address: Address,
        shares_memory: bool,
        reach: ServerNetwork,
        meter: &Arc<WorkMeter>,
    ) -> Result<Self, Failure> {
        let storage = OwnedStorage::open(&settings, meter)?;
        let watch = Arc::new(Watch::new(&settings));
        let places = Arc::new(ShardPlaces::new(settings.index, settings.shards));
        Ok(Self {
            settings,
            address,
            storage,
            machine: Arc::new(OsMachine::start()),
            memory_limit: memory_limit(),
            memory_needs: SharedNeeds::default(),
            token: None,
            encryption: None,
            shares_memory,
            reach,
            watch,
            places,
        })
    }

    /// Starts the listener for HTTP, where there is one.
    fn serve_http(&self) -> Result<Option<HttpServer>, Failure> {
        let Some(at) = self.settings.addresses.http else { return Ok(None) };
        let named = |setting, failure| Failure::Node(format!("{}: {failure}", self.settings.named(setting)));
        let token = self.settings.admission.http_token_file.as_deref().map(JobToken::read).transpose();
        let token = token.map_err(|failure| named("http_token_file", failure))?;
        HttpServer::start(at, (token, self.encryption.clone()), Arc::clone(&self.watch))
            .map(Some)
            .map_err(|failure| named("http", failure))
    }

    fn job(&self) -> JobMessage {
        let (mode, staleness) = self.settings.job.mode.numbers();
        JobMessage {
            mode,
            staleness,
            merge: self.settings.job.merge.number(),
            trainers: self.settings.job.trainers,
            chunk_bytes: self.settings.job.chunk_bytes,
        }
    }

    /// The default configuration of parameters, encoded.
    fn default_config(&self) -> Result<Vec<u8>, Failure> {
        let rule = OptimizerSettings::from_text(&self.settings.job.optimizer)?.rule.unwrap_or_default();
        Ok(ParameterConfig::of(rule).encode())
    }

    /// The options of the server's transports.
    fn network_options(&self) -> NetworkOptions {
        let addresses = &self.settings.addresses;
        let (devices, fabric) = (VerbsDevices::from(&addresses.rdma_device), addresses.fabric.clone());
        NetworkOptions { devices, fabric, encryption: self.encryption.clone(), ..NetworkOptions::default() }
    }

    /// The store of the job's coordination: a file in the checkpoint directory; without one, memory.
    fn coordination(&self) -> Box<dyn CoordinationStore> {
        match &self.storage {
            Some(owned) => Box::new(CoordinatorFile::new(Arc::clone(&owned.storage), owned.owner.clone())),
            None => Box::new(MemoryStore::default()),
        }
    }

    /// The ownership of the server's directory.
    fn ownership(&self) -> Ownership {
        Ownership::new(self.storage.iter().map(|storage| storage.owner.clone()).collect(), self.now())
    }

    fn now(&self) -> Now {
        self.machine.now()
    }

    fn entry(&self) -> ServerEntry {
        let (address, shards) = (self.address.to_string(), self.settings.shards.into());
        let keeps_journal = self.storage.is_some() && self.settings.storage.journal != JournalSetting::Off;
        ServerEntry { address, shards, keeps_journal }
    }
}

/// Logs at start whether verbs are available, and whether they reach device memory. A separate thread queries the
/// devices, which may take long; only a server without another transport waits for it.
///
/// # Errors
/// When verbs are the only transport and are not available: the reason.
fn look_for_verbs(settings: &Settings) -> Result<(), Failure> {
    let bind = &settings.addresses.bind;
    if !matches!(bind.scheme, Scheme::Verbs | Scheme::Auto) {
        return Ok(());
    }
    let (devices, fabric) = (VerbsDevices::from(&settings.addresses.rdma_device), settings.addresses.fabric.clone());
    let (say, said) = bounded::<Result<(), String>>(1);
    let named = matches!(settings.addresses.rdma_device, DeviceChoice::Named(_)).then(|| settings.named("rdma_device"));
    let look = move || {
        let found = VerbsDevice::find(&devices, &fabric).map(|device| {
            let memory = device.device_memory();
            tracing::info!(device = device.name(), "verbs: on; device memory over them: {memory}");
        });
        match (&found, named) {
            (Ok(()), _) => {}
            (Err(reason), None) => tracing::info!("verbs: off: {reason}"),
            (Err(reason), Some(setting)) => tracing::warn!("verbs: off: {setting} has no effect: {reason}"),
        }
        // The receiver is gone unless verbs are the only transport.
        let _ = say.send(found);
    };
    let failed = |what: &str| Failure::Node(format!("listening on {bind}: {what}"));
    let thread = std::thread::Builder::new().name("pserver-verbs".to_owned()).spawn(look);
    thread.map_err(|error| failed(&format!("starting a thread: {error}")))?;
    if bind.scheme == Scheme::Auto {
        return Ok(());
    }
    let limit = NetworkOptions::default().connect_timeout;
    match said.recv_timeout(limit) {
        Ok(found) => found.map_err(|reason| failed(&reason)),
        Err(_) => Err(failed(&format!("no RDMA device answers within {limit:?}"))),
    }
}

fn advertised(settings: &Settings, local: &Address) -> Address {
    match &settings.addresses.advertise {
        Some(advertise) if advertise.port == 0 => Address { port: local.port, ..advertise.clone() },
        Some(advertise) => advertise.clone(),
        None => local.clone(),
    }
}

impl OwnedStorage {
    /// Opens the checkpoint directory, where there is one, and makes this process the owner of the server's part.
    ///
    /// # Errors
    /// When another process that lives owns it, naming that process; or the storage refuses.
    fn open(settings: &Settings, meter: &Arc<WorkMeter>) -> Result<Option<Self>, Failure> {
        let Some(path) = &settings.storage.checkpoint_dir else { return Ok(None) };
        let directory = Directory::open(path).map_err(|failure| {
            let setting = settings.named("checkpoint_dir");
            Failure::Node(format!("{setting}: {failure}; expected a folder that this user may make, read and write"))
        })?;
        let record = OwnerRecord {
            server: settings.index,
            process: std::process::id(),
            host: host_name(),
            since: utc(SystemTime::now()),
        };
        let lock = if settings.storage.directory_lock { take_lock(&directory, path, &record)? } else { None };
        let storage: Arc<dyn Storage> = Arc::new(Metered::new(Arc::new(directory), Arc::clone(meter)));
        let owned = Self::claim(storage, settings, record)?;
        Ok(Some(Self { lock: lock.map(Arc::new), ..owned }))
    }

    /// Makes the process that `record` describes the owner.
    fn claim(storage: Arc<dyn Storage>, settings: &Settings, record: OwnerRecord) -> Result<Self, Failure> {
        let shards = (0..settings.shards).map(|shard| shard_directory(settings.index, shard));
        refuse_newer(&*storage, settings, std::iter::once(server_directory(settings.index)).chain(shards))?;
        let owner = DirectoryOwner::claim_server(Arc::clone(&storage), &record)?;
        Ok(Self { storage, owner, record, lock: None, disk_needs: SharedNeeds::default() })
    }
}

/// Refuses files of a newer program: they are whole, and none of them may be cut or dropped.
fn refuse_newer(
    storage: &dyn Storage,
    settings: &Settings,
    directories: impl IntoIterator<Item = String>,
) -> Result<(), Failure> {
    match directories.into_iter().find_map(|directory| newer_file(storage, &directory)) {
        None => Ok(()),
        Some(newer) => Err(Failure::Node(format!(
            "{}: a newer format: {newer}, and nothing is damaged; expected the program that wrote it, or a newer one",
            settings.named("checkpoint_dir")
        ))),
    }
}

fn take_lock(directory: &Directory, root: &Path, record: &OwnerRecord) -> Result<Option<Lock>, Failure> {
    let inside = server_directory(record.server);
    let mut locked = directory.lock(&inside, &record.encode())?;
    // An inspection has the lock for some microseconds, to learn whether a server has it.
    for _ in 0..LOCK_ATTEMPTS {
        if !matches!(locked, LockOutcome::ByAnother { .. }) {
            break;
        }
        std::thread::sleep(LOCK_PAUSE);
        locked = directory.lock(&inside, &record.encode())?;
    }
    match locked {
        LockOutcome::Ours(lock) => Ok(Some(lock)),
        LockOutcome::Unsupported { reason } => {
            let root = root.display();
            tracing::info!("{root}/{inside}: no lock ({reason}); a second server would replace this one");
            Ok(None)
        }
        LockOutcome::ByAnother { path } => {
            let owner = OwnerRecord::read(directory, &path);
            let owner = owner.map_or("an unnamed process".to_owned(), |owner| owner.to_string());
            Err(Failure::Node(format!(
                "{}/{inside} is in use by {owner}: stop that process first, or give this server another \
                 --checkpoint-dir or --index",
                root.display()
            )))
        }
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A time as `2026-11-22T18:00:05Z`. The days of a month follow Howard Hinnant's `civil_from_days`.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::utc;

    #[test]
    fn a_time_is_written_as_in_a_calendar() {
        // The texts are those of `date -u -d @seconds +%FT%TZ`.
        let check = |seconds, text| assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        check(0, "1970-01-01T00:00:00Z");
        check(951_827_696, "2000-02-29T12:34:56Z");
        check(1_735_689_599, "2024-12-31T23:59:59Z");
        check(4_107_542_400, "2100-03-01T00:00:00Z");
    }
}

//! A server process: one thread that accepts, one for each shard, and in server 0 one for the coordinator.
//!
//! Every thread but the first runs the same loop over a session of `pserver_core::server` and a transport of its
//! own; nothing is shared on the data path.
//!
//! A server is for other processes ([`Server::start`]) or for clients of its own one ([`Server::start_within`]).
//!
//! Not here: what a frame does to a shard (`pserver_core::server`), where the options come from (`settings`).

mod coordinating;
mod device;
mod registration;
mod saving;
mod session;
mod sharding;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use pserver_core::checkpoint::Storage;
use pserver_core::checkpoint::storage::Directory;
use pserver_core::config::{OptimizerSettings, ParameterConfig};
use pserver_core::error::Failure;
use pserver_core::ids::Epoch;
use pserver_core::port::Transport;
use pserver_core::time::Now;
use pserver_core::wire::{Address, JobMessage, Scheme, ServerEntry};
use pserver_transport::loopback::Hub;
use pserver_transport::network::{Listener, Network, NetworkOptions, Stop, Token};
use pserver_transport::verbs::{Device as VerbsDevice, Devices};

use coordinating::CoordinatorNode;
use registration::Registered;
use session::{Control, Running};
use sharding::ShardNode;

use crate::client::{Client, ClientOptions, MakeTransport, OverVerbs, networks, within};
use crate::settings::Settings;

/// A server that runs.
pub struct Server {
    address: Address,
    stop: Stop,
    listener: Option<JoinHandle<Result<(), Failure>>>,
    sessions: Sessions,
}

/// What of a server decides, each with a thread of its own.
struct Sessions {
    all: Vec<Running>,
    /// How many come before the shards: the coordinator's, in server 0.
    first_shard: usize,
    /// Dropping it ends the registration of a server other than 0.
    _registered: Option<Registered>,
}

/// How a server reaches others, and its clients reach it.
#[derive(Clone)]
enum Reach {
    /// From process to process.
    Network,
    /// Within this process.
    Within(Hub),
}

/// What every part of a server needs at start.
struct Start {
    settings: Settings,
    address: Address,
    storage: Option<Arc<dyn Storage>>,
    clock: Instant,
    token: Option<Token>,
    /// Whether trainers of this machine read values where they are.
    shares_memory: bool,
    reach: Reach,
}

impl Server {
    /// Starts a server: takes its address, brings back what an earlier process left, and serves.
    ///
    /// # Errors
    /// When the token cannot be read, the address cannot be had, the disk cannot be read, or server 0 does not answer.
    pub fn start(settings: Settings) -> Result<Self, Failure> {
        let token = settings.token_file.as_deref().map(Token::read).transpose()?;
        let options = NetworkOptions { token: token.clone(), ..NetworkOptions::default() };
        look_for_verbs(&settings)?;
        let listener = Listener::bind(&settings.bind, options)?;
        let address = advertised(&settings, &listener.local_address());
        let start = Start { token, ..Start::new(settings, address, listener.shares_memory(), Reach::Network)? };
        let mut lanes: Vec<_> = (0..=start.settings.shards).map(|_| None).collect();
        let sessions = Sessions::start(&start, |lane, options| {
            let transport = Network::new(options)?;
            lanes[usize::from(lane)] = Some(transport.adopter());
            Ok(transport)
        })?;
        let stop = Stop::new();
        let stop_listener = stop.clone();
        let listener = std::thread::Builder::new()
            .name("pserver-accept".to_owned())
            .spawn(move || listener.run(lanes, stop_listener))
            .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        Ok(Self { address: start.address, stop, listener: Some(listener), sessions })
    }

    /// Starts a server for clients of this process ([`Client::within`]): `hub` has a place for each of its lanes, under
    /// the name that it is bound to, such as `loopback://server-0:1`. For tests and measurements.
    ///
    /// # Errors
    /// As [`Server::start`]; and when the address or a token is for other processes.
    pub fn start_within(settings: Settings, hub: &Hub) -> Result<Self, Failure> {
        let address = settings.bind.clone();
        if address.scheme != Scheme::Loopback {
            return Err(Failure::Node(format!(
                "listening on {address} within this process: expected an address such as loopback://server-0:1"
            )));
        }
        if settings.token_file.is_some() {
            let text = format!("listening on {address} within this process: a token is for others; expected none");
            return Err(Failure::Node(text));
        }
        let start = Start::new(settings, address, false, Reach::Within(hub.clone()))?;
        let sessions = Sessions::start(&start, |lane, options| {
            let transport = hub.listen(&start.address.of_lane(lane.into()))?;
            Ok(transport.with(options.checks, options.poll))
        })?;
        Ok(Self { address: start.address, stop: Stop::new(), listener: None, sessions })
    }

    /// Where trainers find it.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Whether one of its threads has ended by itself, which only a failure makes it do.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.sessions.all.iter().any(Running::has_ended)
    }

    /// Stops: nobody new is let in, what has arrived is applied, a last checkpoint is taken.
    ///
    /// # Errors
    /// The first failure of any of its threads.
    pub fn stop(mut self) -> Result<(), Failure> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.stop.stop();
        let mut ended = Ok(());
        if let Some(listener) = self.listener.take() {
            ended = session::join(listener);
        }
        // Shards first, all at once: while they finish, the coordinator still answers.
        let Sessions { all, first_shard, .. } = &mut self.sessions;
        let shards = all.split_off(all.len().min(*first_shard));
        for sessions in [shards, std::mem::take(all)] {
            sessions.iter().for_each(Running::stop);
            ended = sessions.into_iter().map(Running::join).fold(ended, Result::and);
        }
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

impl Sessions {
    /// Starts the coordinator, where there is one, and the shards. `transport` makes the transport of a lane: lane zero
    /// is the coordinator's, and the shards follow.
    fn start<T: Transport + 'static>(
        start: &Start,
        mut transport: impl FnMut(u16, NetworkOptions) -> Result<T, Failure>,
    ) -> Result<Self, Failure> {
        let settings = &start.settings;
        let options = || NetworkOptions { devices: Devices::from(&settings.rdma_device), ..NetworkOptions::default() };
        let mut all = Vec::new();
        let (epoch, registered) = if settings.index == 0 {
            let transport = transport(0, options())?;
            let control = Control::new(transport.doorbell());
            let node = CoordinatorNode::new(start, control.clone())?;
            let epoch = node.epoch();
            all.push(Running::spawn("pserver-coordinator", node, transport, control, start.clock)?);
            (epoch, None)
        } else {
            let (epoch, registered) = registration::register(start)?;
            (epoch, Some(registered))
        };
        let first_shard = all.len();
        for (shard, accelerator) in (0..settings.shards).zip(device::open(settings)?) {
            let options = NetworkOptions { poll: settings.poll, checks: settings.checks, ..options() };
            let transport = transport(shard + 1, options)?;
            let control = Control::new(transport.doorbell());
            let node = ShardNode::new(start, shard, epoch, transport.capabilities(), accelerator)?;
            all.push(Running::spawn(&format!("pserver-shard-{shard}"), node, transport, control, start.clock)?);
        }
        Ok(Self { all, first_shard, _registered: registered })
    }
}

impl Reach {
    /// Makes transports to other servers.
    fn transports(&self, options: NetworkOptions) -> MakeTransport {
        match self {
            Self::Network => networks(options, OverVerbs::default()),
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

impl Start {
    fn new(settings: Settings, address: Address, shares_memory: bool, reach: Reach) -> Result<Self, Failure> {
        let storage = open_storage(&settings)?;
        Ok(Self { settings, address, storage, clock: Instant::now(), token: None, shares_memory, reach })
    }

    fn job(&self) -> JobMessage {
        let (mode, staleness) = self.settings.mode.numbers();
        JobMessage {
            mode,
            staleness,
            merge: self.settings.merge.number(),
            trainers: self.settings.trainers,
            chunk_bytes: self.settings.chunk_bytes,
        }
    }

    /// A parameter's configuration when nobody says otherwise, encoded.
    fn default_config(&self) -> Result<Vec<u8>, Failure> {
        let rule = OptimizerSettings::from_text(&self.settings.optimizer)?.rule.unwrap_or_default();
        Ok(ParameterConfig { rule, sparse: None }.encode())
    }

    fn now(&self) -> Now {
        Now(u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    fn entry(&self) -> ServerEntry {
        ServerEntry { address: self.address.to_string(), shards: self.settings.shards.into() }
    }
}

/// A number for the job's life that no earlier one had: the time at which it began.
fn new_epoch() -> Epoch {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).max(1))
}

/// Says at start whether trainers may come over verbs, and what becomes of memory of accelerators then.
///
/// # Errors
/// When they may come in no other way, and cannot in this one: why.
fn look_for_verbs(settings: &Settings) -> Result<(), Failure> {
    let bind = &settings.bind;
    if !matches!(bind.scheme, Scheme::Verbs | Scheme::Auto) {
        return Ok(());
    }
    match VerbsDevice::find(&Devices::from(&settings.rdma_device)) {
        Ok(device) => {
            let memory = device.device_memory();
            tracing::info!(device = device.name(), "verbs: on; device memory over them: {memory}");
        }
        Err(reason) if bind.scheme == Scheme::Verbs => {
            return Err(Failure::Node(format!("listening on {bind}: {reason}")));
        }
        Err(reason) => tracing::info!("verbs: off: {reason}"),
    }
    Ok(())
}

fn advertised(settings: &Settings, local: &Address) -> Address {
    match &settings.advertise {
        Some(advertise) if advertise.port == 0 => Address { port: local.port, ..advertise.clone() },
        Some(advertise) => advertise.clone(),
        None => local.clone(),
    }
}

fn open_storage(settings: &Settings) -> Result<Option<Arc<dyn Storage>>, Failure> {
    let Some(path) = &settings.checkpoint_dir else { return Ok(None) };
    Ok(Some(Arc::new(Directory::open(path)?)))
}

//! A server process: one thread that accepts, one for each shard, and in server 0 one for the coordinator.
//!
//! Every thread but the first runs the same loop over a session of `pserver_core::server` and a transport of its
//! own; nothing is shared on the data path.
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
use pserver_core::wire::{Address, JobMessage, ServerEntry};
use pserver_transport::network::{Listener, Network, NetworkOptions, Stop, Token};
use pserver_transport::verbs::Devices;

use coordinating::CoordinatorNode;
use registration::Registered;
use session::{Control, Running};
use sharding::ShardNode;

use crate::settings::Settings;

/// A server that runs.
pub struct Server {
    address: Address,
    stop: Stop,
    listener: Option<JoinHandle<Result<(), Failure>>>,
    sessions: Vec<Running>,
    /// How many sessions come before the shards: the coordinator's, in server 0.
    first_shard: usize,
    /// Dropping it ends the registration of a server other than 0.
    _registered: Option<Registered>,
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
}

impl Server {
    /// Starts a server: takes its address, brings back what an earlier process left, and serves.
    ///
    /// # Errors
    /// When the token cannot be read, the address cannot be had, the disk cannot be read, or server 0 does not answer.
    pub fn start(settings: Settings) -> Result<Self, Failure> {
        let token = settings.token_file.as_deref().map(Token::read).transpose()?;
        let options = NetworkOptions { token: token.clone(), ..NetworkOptions::default() };
        let listener = Listener::bind(&settings.bind, options)?;
        let address = advertised(&settings, &listener.local_address());
        let storage = open_storage(&settings)?;
        let shares_memory = listener.shares_memory();
        let start = Start { settings, address: address.clone(), storage, clock: Instant::now(), token, shares_memory };
        let mut sessions = Vec::new();
        let mut lanes = Vec::new();
        let stop = Stop::new();
        let (epoch, registered) = if start.settings.index == 0 {
            let devices = Devices::from(&start.settings.rdma_device);
            let transport = Network::new(NetworkOptions { devices, ..NetworkOptions::default() })?;
            lanes.push(Some(transport.adopter()));
            let control = Control::new(transport.doorbell());
            let node = CoordinatorNode::new(&start, control.clone())?;
            let epoch = node.epoch();
            sessions.push(Running::spawn("pserver-coordinator", node, transport, control, start.clock)?);
            (epoch, None)
        } else {
            lanes.push(None);
            let (epoch, registered) = registration::register(&start)?;
            (epoch, Some(registered))
        };
        let first_shard = sessions.len();
        for (shard, accelerator) in (0..start.settings.shards).zip(device::open(&start.settings)?) {
            let options = NetworkOptions {
                poll: start.settings.poll,
                checks: start.settings.checks,
                devices: Devices::from(&start.settings.rdma_device),
                ..NetworkOptions::default()
            };
            let transport = Network::new(options)?;
            lanes.push(Some(transport.adopter()));
            let control = Control::new(transport.doorbell());
            let node = ShardNode::new(&start, shard, epoch, transport.capabilities(), accelerator)?;
            sessions.push(Running::spawn(&format!("pserver-shard-{shard}"), node, transport, control, start.clock)?);
        }
        let stop_listener = stop.clone();
        let listener = std::thread::Builder::new()
            .name("pserver-accept".to_owned())
            .spawn(move || listener.run(lanes, stop_listener))
            .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        Ok(Self { address, stop, listener: Some(listener), sessions, first_shard, _registered: registered })
    }

    /// Where trainers find it.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Whether one of its threads has ended by itself, which only a failure makes it do.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.sessions.iter().any(Running::has_ended)
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
        let shards = self.sessions.split_off(self.sessions.len().min(self.first_shard));
        for sessions in [shards, std::mem::take(&mut self.sessions)] {
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

impl Start {
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

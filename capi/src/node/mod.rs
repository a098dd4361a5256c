//! A server process: one thread that accepts, one for each shard, and in server 0 one for the coordinator.
//!
//! Every thread but the first runs the same loop over a session of `pserver_core::server` and a transport of its
//! own; nothing is shared on the data path.
//!
//! Not here: what a frame does to a shard (`pserver_core::server`), where the options come from (`settings`).

mod coordinating;
mod registration;
mod saving;
mod session;
mod sharding;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pserver_core::checkpoint::Storage;
use pserver_core::checkpoint::storage::Directory;
use pserver_core::config::{Merge, Mode};
use pserver_core::error::Failure;
use pserver_core::ids::Epoch;
use pserver_core::port::Transport;
use pserver_core::wire::{Address, JobMessage, ServerEntry};
use pserver_transport::tcp::{Listener, Stop, TcpOptions, TcpTransport};

use coordinating::CoordinatorNode;
use session::{Control, Running};
use sharding::ShardNode;

/// Whether accepted frames are written down before they are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Journalling {
    /// No: what came after the last checkpoint is lost with the process.
    Off,
    /// Yes: it survives the process.
    #[default]
    On,
    /// Yes, and synced: it survives the machine.
    Sync,
}

/// What a server is told, checked.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Its place among the servers.
    pub index: u16,
    /// How many servers there are.
    pub servers: u16,
    /// How many shards, each a thread, this one has.
    pub shards: u16,
    /// How many trainers take part.
    pub trainers: u32,
    /// Where it listens; port 0 takes a free one.
    pub bind: Address,
    /// What others connect to, where that is another address.
    pub advertise: Option<Address>,
    /// Where server 0 is; not needed on server 0.
    pub coordinator: Option<Address>,
    /// The length of a chunk.
    pub chunk_bytes: u32,
    /// How trainers share a parameter, unless the initialiser says otherwise.
    pub mode: Mode,
    /// How gradients become one, unless the initialiser says otherwise.
    pub merge: Merge,
    /// A parameter's configuration when nobody says otherwise, encoded.
    pub default_config: Vec<u8>,
    /// Where checkpoints and journals go; without it nothing outlives the process.
    pub checkpoint_dir: Option<PathBuf>,
    /// How often a checkpoint is taken.
    pub checkpoint_interval: Duration,
    /// Whether accepted frames are written down.
    pub journalling: Journalling,
    /// Where models are saved, on server 0.
    pub model_dir: Option<PathBuf>,
    /// How long a pull waits for the other trainers.
    pub round_timeout: Duration,
    /// How long the initialiser may be silent.
    pub lease: Duration,
}

impl ServerOptions {
    /// Server 0 of 1, for `trainers` trainers, on a free port of 127.0.0.1, keeping nothing.
    #[must_use]
    pub fn local(trainers: u32) -> Self {
        Self {
            index: 0,
            servers: 1,
            shards: 1,
            trainers,
            bind: Address { scheme: pserver_core::wire::Scheme::Tcp, host: "127.0.0.1".to_owned(), port: 0 },
            advertise: None,
            coordinator: None,
            chunk_bytes: pserver_core::limits::CHUNK_BYTES_DEFAULT,
            mode: Mode::Sync,
            merge: Merge::Mean,
            default_config: pserver_core::config::ParameterConfig { rule: Default::default() }.encode(),
            checkpoint_dir: None,
            checkpoint_interval: Duration::from_secs(600),
            journalling: Journalling::On,
            model_dir: None,
            round_timeout: Duration::from_secs(60),
            lease: Duration::from_secs(10),
        }
    }
}

/// A server that runs.
pub struct Server {
    address: Address,
    stop: Stop,
    listener: Option<JoinHandle<Result<(), Failure>>>,
    sessions: Vec<Running>,
}

/// What every part of a server needs at start.
struct Start {
    options: ServerOptions,
    address: Address,
    storage: Option<Arc<dyn Storage>>,
    clock: Instant,
}

impl Server {
    /// Starts a server: takes its address, brings back what an earlier process left, and serves.
    ///
    /// # Errors
    /// When the address cannot be had, the disk cannot be read, or server 0 does not answer.
    pub fn start(options: ServerOptions) -> Result<Self, Failure> {
        let listener = Listener::bind(&options.bind, TcpOptions::default())?;
        let address = advertised(&options, &listener.local_address());
        let storage = open_storage(&options)?;
        let start = Start { options, address: address.clone(), storage, clock: Instant::now() };
        let mut sessions = Vec::new();
        let mut lanes = Vec::new();
        let stop = Stop::new();
        let epoch = if start.options.index == 0 {
            let transport = TcpTransport::new(TcpOptions::default())?;
            lanes.push(Some(transport.adopter()));
            let control = Control::new(transport.doorbell());
            let node = CoordinatorNode::new(&start, control.clone())?;
            let epoch = node.epoch();
            sessions.push(Running::spawn("pserver-coordinator", node, transport, control, start.clock)?);
            epoch
        } else {
            lanes.push(None);
            registration::register(&start)?
        };
        for shard in 0..start.options.shards {
            let transport = TcpTransport::new(TcpOptions::default())?;
            lanes.push(Some(transport.adopter()));
            let control = Control::new(transport.doorbell());
            let node = ShardNode::new(&start, shard, epoch)?;
            sessions.push(Running::spawn(&format!("pserver-shard-{shard}"), node, transport, control, start.clock)?);
        }
        let stop_listener = stop.clone();
        let listener = std::thread::Builder::new()
            .name("pserver-accept".to_owned())
            .spawn(move || listener.run(lanes, stop_listener))
            .map_err(|error| Failure::Node(format!("starting a thread: {error}")))?;
        Ok(Self { address, stop, listener: Some(listener), sessions })
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
        // Shards first: while they finish, the coordinator still answers.
        for running in self.sessions.drain(..).rev() {
            ended = ended.and(running.stop());
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
        let (mode, staleness) = self.options.mode.numbers();
        JobMessage {
            mode,
            staleness,
            merge: self.options.merge.number(),
            trainers: self.options.trainers,
            chunk_bytes: self.options.chunk_bytes,
        }
    }

    fn entry(&self) -> ServerEntry {
        ServerEntry { address: self.address.to_string(), shards: self.options.shards.into() }
    }
}

/// A number for the job's life that no earlier one had: the time at which it began.
fn new_epoch() -> Epoch {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).max(1))
}

fn advertised(options: &ServerOptions, local: &Address) -> Address {
    match &options.advertise {
        Some(advertise) if advertise.port == 0 => Address { port: local.port, ..advertise.clone() },
        Some(advertise) => advertise.clone(),
        None => local.clone(),
    }
}

fn open_storage(options: &ServerOptions) -> Result<Option<Arc<dyn Storage>>, Failure> {
    let Some(path) = &options.checkpoint_dir else { return Ok(None) };
    Ok(Some(Arc::new(Directory::open(path)?)))
}

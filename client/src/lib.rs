//! The Rust client of a job: the calls of a trainer or reader. Every edition of the C library is built on it.
//!
//! A call borrows the caller's slices for its own length, and is over when every server has answered or its deadline
//! has passed. A blocking call is started and finished on the calling thread. A driver thread drives the calls that
//! [`Client::scope`] starts. The thread that holds the client lock drives all calls in progress.
//!
//! Read in this order: `transfer` (pushes, pulls, sets), `rows` and `bucketize` (the same by rows), `packer` (frames),
//! `call` and `calls` (order, failure and end of calls), `engine` (transport), `client_lock` (threads), `pending`
//! (calls that are started and waited for later), `cancels` and `interrupts` (cancellation), `control` (answers of the
//! coordinator).
//!
//! Not here: C types (`capi`), frames (`pserver_core::wire`), resends (`pserver_core::client`).

mod bucketize;
mod buffers;
mod call;
mod calls;
mod cancels;
mod carried;
mod checkpoints;
mod client_lock;
pub mod console;
mod control;
mod engine;
pub mod environment;
mod initialise;
mod interrupts;
mod job;
pub mod launchers;
mod listing;
mod loading;
mod moves;
mod optimizer_state;
mod packer;
mod pending;
mod row_memory;
mod row_states;
mod rows;
pub mod rule_file;
pub mod setting_file;
mod settings;
mod transfer;
mod views;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pserver_core::client::{Finished, LaneId, Refused};
use pserver_core::config::{Merge, Mode};
use pserver_core::dtype::{ElementType, Half};
use pserver_core::error::Failure;
use pserver_core::ids::{ShardId, Ticket};
use pserver_core::port::Transport;
use pserver_core::wire::{Address, Role, Scheme};
use pserver_transport::loopback::Hub;
use pserver_transport::network::{ChecksumPolicy, JobToken, Network, NetworkOptions, PollPolicy};
use pserver_transport::tls::Encryption;
use pserver_transport::verbs::{self, DeviceChoice, FabricSettings, VerbsDevice, VerbsDevices};

use bucketize::RowBuffers;
use buffers::CallerMemory;
use call::Call;
use cancels::Cancellations;
use client_lock::{ClientGuard, ClientLock};
use job::{JoinedJob, ServerQuery};
use views::ViewArenas;

pub use buffers::TransferPath;
pub use pending::{Calls, Pending};
pub use views::View;

pub use buffers::{Extent, HeldBuffers};
pub use call::CallNumber;
pub use cancels::{CallScope, cancel};
pub use carried::CarriedNumbers;
pub use checkpoints::JobCheckpoint;
pub use client_lock::reason;
pub use control::{answer, unexpected};
pub use engine::{COORDINATOR, ClientEngine, MakeTransport};
pub use interrupts::ask_while_waiting;
pub use listing::ListedParameter;
pub use loading::GivenValue;
pub use optimizer_state::{OptimizerState, StateSlice, StateTensor};
pub use row_states::{RowStates, TableProgress};
pub use transfer::check_half;

/// The deadline of a call that the program does not choose. A call goes on past it while every server that has not
/// answered says that it waits for a trainer, as it ends that wait itself: at its round timeout (10 minutes), or soon
/// after the trainer's connection closed.
pub const DEADLINE_DEFAULT: Duration = Duration::from_secs(120);

/// How a client finds its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// The address of server 0.
    pub coordinator: Address,
    /// Whether that address is the default one and not configured.
    pub is_coordinator_default: bool,
    /// The rank; absent takes the lowest free one.
    pub trainer: Option<u32>,
    /// Whether this client is a reader, which only pulls.
    pub is_reader: bool,
    /// How long any call may take; see [`DEADLINE_DEFAULT`].
    pub deadline: Duration,
    /// How long a call waits for a server that refuses connections or has not registered: the time in which a cluster
    /// restarts a server. A call ends at its deadline at the latest.
    pub server_absence: Duration,
    /// How a call waits for servers.
    pub poll: PollPolicy,
    /// Where payloads over TCP carry checksums.
    pub checks: ChecksumPolicy,
    /// Which RDMA devices connections use.
    pub rdma_device: DeviceChoice,
    /// Settings of the fabric of RDMA.
    pub fabric: FabricSettings,
    /// The job's token, which servers that have one ask for.
    pub token: Option<JobToken>,
    /// Encryption of connections over TCP.
    pub encryption: Option<Encryption>,
}

impl ClientOptions {
    /// A trainer of the job at `coordinator`, with [`DEADLINE_DEFAULT`].
    #[must_use]
    pub fn new(coordinator: Address) -> Self {
        Self {
            coordinator,
            is_coordinator_default: false,
            trainer: None,
            is_reader: false,
            deadline: DEADLINE_DEFAULT,
            server_absence: Duration::from_secs(10),
            poll: PollPolicy::default(),
            checks: ChecksumPolicy::default(),
            rdma_device: DeviceChoice::default(),
            fabric: FabricSettings::default(),
            token: None,
            encryption: None,
        }
    }
}

/// A gradient, delta or value to send, in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct GradientSlice<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The type of the elements.
    pub element_type: ElementType,
    /// The elements.
    pub content: &'a [u8],
}

/// The caller's memory for a parameter's value.
#[derive(Debug)]
pub struct DestinationSlice<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The destination: as long as the parameter, or half as long for half precision.
    pub content: &'a mut [u8],
    /// The half-precision type to receive, each element rounded once; for float32 parameters only.
    pub half: Option<Half>,
}

impl<'a> DestinationSlice<'a> {
    /// A destination for a value in the parameter's own type.
    #[must_use]
    pub fn new(name: &'a str, content: &'a mut [u8]) -> Self {
        Self { name, content, half: None }
    }
}

/// Rows of a gradient or delta to send, in the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct GradientRows<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The type of the elements.
    pub element_type: ElementType,
    /// Ids of the rows. Repeated rows are summed.
    pub ids: &'a [u64],
    /// Their elements, row after row in the ids' order.
    pub values: &'a [u8],
}

/// The caller's memory for rows of a parameter.
#[derive(Debug)]
pub struct DestinationRows<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// Ids of the rows, which may repeat.
    pub ids: &'a [u64],
    /// The destination, row after row in the ids' order.
    pub values: &'a mut [u8],
}

/// Type, length and shape of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterFacts {
    /// The type of its elements.
    pub element_type: ElementType,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its shape, the slowest dimension first. A sparse parameter without a height has zero there.
    pub shape: Vec<u64>,
    /// Whether it is pushed and pulled by rows. Its length is then that of all rows that may exist.
    pub is_sparse: bool,
}

/// How the trainers of a job share its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSharing {
    /// Consistency mode of updates.
    pub mode: Mode,
    /// How the gradients of a round are merged.
    pub merge: Merge,
    /// Trainers in the job.
    pub trainers: u32,
}

/// Payload bytes that a client has sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferredBytes {
    /// To the servers.
    pub sent: u64,
    /// From the servers.
    pub received: u64,
}

/// [`TransferredBytes`] as atomic counters.
#[derive(Debug, Default)]
struct TransferCounters {
    sent: AtomicU64,
    received: AtomicU64,
}

impl TransferCounters {
    fn count(&self, sent: u64, received: u64) {
        self.sent.fetch_add(sent, Relaxed);
        self.received.fetch_add(received, Relaxed);
    }
}

/// A trainer's end of the job.
pub struct Client {
    lock: Arc<ClientLock>,
    buffers: Arc<CallerMemory>,
    options: ClientOptions,
    moved: Arc<TransferCounters>,
    verbs: SharedVerbsCounters,
    process: u32,
}

impl Drop for Client {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            self.lock.stop();
        } else {
            // In a child process the connections are the parent's, and the thread that held the lock does not exist.
            std::mem::forget(Arc::clone(&self.lock));
        }
    }
}

/// Verbs counters of the current transport.
pub type SharedVerbsCounters = Arc<Mutex<Arc<verbs::VerbsCounters>>>;

/// Makes transports to other processes.
pub fn networks(options: NetworkOptions, verbs: SharedVerbsCounters) -> MakeTransport {
    Box::new(move || {
        let network = Network::new(options.clone())?;
        *verbs.lock().unwrap_or_else(PoisonError::into_inner) = network.verbs();
        Ok(Box::new(network))
    })
}

/// Makes transports to servers within this process.
pub fn within(options: NetworkOptions, hub: Hub) -> MakeTransport {
    Box::new(move || Ok(Box::new(hub.transport().with(options.checks, options.poll))))
}

/// The client's state behind its lock.
struct ClientState {
    options: ClientOptions,
    engine: ClientEngine,
    /// The job, once joined.
    job: Option<JoinedJob>,
    /// The call that asks to join, while there is one.
    joining: Option<CallNumber>,
    search: ServerQuery,
    /// Requests that ask servers what calls wait for.
    asked: Vec<(Ticket, LaneId)>,
    moved: Arc<TransferCounters>,
    memory: ClientMemory,
    /// Calls whose results are not taken, in the order of their numbers.
    calls: Vec<Call>,
    last_call: u64,
    /// Shared with [`ClientLock`], which reads it without the lock.
    cancels: Arc<Cancellations>,
    /// Kept between turns for its memory.
    over: Vec<(Ticket, Result<Finished, Refused>)>,
}

/// The memory that calls use.
struct ClientMemory {
    /// Shared with [`Client`], which reads it without the client lock.
    caller: Arc<CallerMemory>,
    views: ViewArenas,
    rows: RowBuffers,
}

impl Client {
    /// A client; it connects with its first call.
    ///
    /// # Errors
    /// When this process cannot have another transport; when the address demands verbs and there is no RDMA device.
    pub fn new(options: ClientOptions) -> Result<Self, Failure> {
        let (poll, checks, token) = (options.poll, options.checks, options.token.clone());
        let devices = VerbsDevices::from(&options.rdma_device);
        if options.coordinator.scheme == Scheme::Verbs {
            // Without a device no connection can be made, however long the client tried.
            VerbsDevice::find(&devices, &options.fabric).map_err(|reason| {
                let server = &options.coordinator;
                Failure::call(format!(
                    "connecting to {server}: {reason}; expected an RDMA device, or an address without verbs://"
                ))
            })?;
        }
        let own_user_alone = options.is_coordinator_default;
        let (device_turn, fabric) = (options.trainer.unwrap_or(0) as usize, options.fabric.clone());
        let transport = NetworkOptions { poll, checks, devices, device_turn, fabric, ..NetworkOptions::default() };
        let encryption = options.encryption.clone();
        let transport = NetworkOptions { token, encryption, own_user_alone, ..transport };
        let verbs = SharedVerbsCounters::default();
        Self::with(options, networks(transport, Arc::clone(&verbs)), verbs)
    }

    /// A client of servers that were started in this process and in this hub.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn within(options: ClientOptions, hub: &Hub) -> Result<Self, Failure> {
        let transport = NetworkOptions { poll: options.poll, checks: options.checks, ..NetworkOptions::default() };
        Self::with(options, within(transport, hub.clone()), SharedVerbsCounters::default())
    }

    /// A client over the transports of `make`, called at start and after each failure of the transport. For tests and
    /// measurements.
    ///
    /// # Errors
    /// When the first one cannot be made.
    pub fn over(
        options: ClientOptions,
        make: impl Fn() -> Result<Box<dyn Transport>, Failure> + Send + 'static,
    ) -> Result<Self, Failure> {
        Self::with(options, Box::new(make), SharedVerbsCounters::default())
    }

    fn with(options: ClientOptions, make: MakeTransport, verbs: SharedVerbsCounters) -> Result<Self, Failure> {
        let role = if options.is_reader { Role::Reader } else { Role::Trainer };
        let coordinator = match options.is_coordinator_default {
            true => "the coordinator (server 0, tried at the default address: set PSERVER_COORDINATOR=host:port)",
            false => COORDINATOR,
        };
        let mut engine = ClientEngine::new(&options.coordinator, coordinator, role, make)?;
        engine.identify(|identity| identity.absence = Some(options.server_absence));
        let (buffers, moved) = (Arc::new(CallerMemory::default()), Arc::new(TransferCounters::default()));
        let state = ClientState {
            options: options.clone(),
            engine,
            job: None,
            joining: None,
            search: ServerQuery::default(),
            asked: Vec::new(),
            moved: Arc::clone(&moved),
            memory: ClientMemory {
                caller: Arc::clone(&buffers),
                views: ViewArenas::default(),
                rows: RowBuffers::default(),
            },
            calls: Vec::new(),
            last_call: 0,
            cancels: Arc::new(Cancellations::new()),
            over: Vec::new(),
        };
        let lock = Arc::new(ClientLock::new(state));
        if !options.is_reader {
            lock.keep_alive();
        }
        Ok(Self { lock, buffers, options, moved, verbs, process: std::process::id() })
    }

    /// Cancels every call in progress of this client, in all threads. Each call fails within about 100 ms, as at its
    /// deadline, with an error that names the cancellation. Calls that begin later are not affected. This function does
    /// not wait for the calls, and a signal handler may call it: it takes no lock and allocates nothing.
    pub fn cancel(&self) {
        self.lock.cancels().cancel();
    }

    /// Sets or clears the handle by which [`cancel`] finds the client.
    pub fn named(&self, handle: Option<u64>) {
        self.lock.cancels().name(handle);
    }

    /// The options of this client.
    #[must_use]
    pub fn options(&self) -> ClientOptions {
        self.options.clone()
    }

    /// The rank in the job. Joins the job if necessary.
    ///
    /// # Errors
    /// When no server answers before the deadline, one is absent for too long, or every rank is taken.
    pub fn trainer(&self) -> Result<u32, Failure> {
        let mut state = self.lock()?;
        state.joined()?;
        Ok(state.engine.identity().trainer.0)
    }

    /// Live verbs counters. They restart from zero when a broken device is replaced.
    #[must_use]
    pub fn verbs(&self) -> Arc<verbs::VerbsCounters> {
        Arc::clone(&self.verbs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Payload bytes so far; in a child process, until the fork.
    #[must_use]
    pub fn moved(&self) -> TransferredBytes {
        TransferredBytes { sent: self.moved.sent.load(Relaxed), received: self.moved.received.load(Relaxed) }
    }

    /// Type, length and shape of a parameter. Waits until the parameters are initialised.
    ///
    /// # Errors
    /// When there is no such parameter, or initialisation does not finish before the deadline.
    pub fn describe(&self, name: &str) -> Result<ParameterFacts, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        state.facts(name)
    }

    /// The servers that own chunks of a parameter, in order. Waits until the parameters are initialised.
    ///
    /// # Errors
    /// As [`describe`](Self::describe).
    pub fn servers_of(&self, name: &str) -> Result<Vec<u16>, Failure> {
        let mut state = self.lock()?;
        let catalogue = state.ready()?.catalogue();
        let found = catalogue.find(name).and_then(|index| catalogue.parameter(index));
        let found = found.ok_or_else(|| Failure::call(format!("found no parameter {name:?}")))?;
        let keeps = |place: &ShardId| found.chunks_on(*place).next().is_some();
        let mut servers: Vec<u16> =
            catalogue.topology().shard_ids().filter(keeps).map(|place| place.server.0).collect();
        servers.dedup();
        Ok(servers)
    }

    /// The number of trainers of the job. Joins the job if necessary.
    ///
    /// # Errors
    /// As [`trainer`](Self::trainer).
    pub fn trainers(&self) -> Result<u32, Failure> {
        Ok(self.lock()?.joined()?.sharing().trainers)
    }

    /// The number of servers of the job. Joins the job if necessary.
    ///
    /// # Errors
    /// As [`trainer`](Self::trainer).
    pub fn servers(&self) -> Result<u32, Failure> {
        Ok(self.lock()?.joined()?.servers())
    }

    /// Mode, merge and number of trainers. Waits until these are initialised.
    ///
    /// # Errors
    /// When initialisation does not finish before the deadline.
    pub fn sharing(&self) -> Result<JobSharing, Failure> {
        Ok(self.lock()?.ready()?.sharing())
    }

    /// The job's mode; before the job is initialised, that of its servers.
    ///
    /// # Errors
    /// As [`trainer`](Self::trainer).
    pub fn mode(&self) -> Result<Mode, Failure> {
        Ok(self.lock()?.joined()?.sharing().mode)
    }

    /// The names of all parameters in the order of declaration; waits until they are initialised.
    ///
    /// # Errors
    /// When initialisation does not finish before the deadline.
    pub fn names(&self) -> Result<Vec<String>, Failure> {
        let mut state = self.lock()?;
        let catalogue = state.ready()?.catalogue();
        Ok(catalogue.iter().map(|one| one.declaration().name.as_str().to_owned()).collect())
    }

    /// The type and the length in bytes of each of these parameters; waits until they are initialised.
    pub fn measure(&self, names: &[&str]) -> Result<Vec<(ElementType, u64)>, Failure> {
        let mut state = self.lock()?;
        state.ready()?;
        state.measure(names)
    }

    fn buffers(&self) -> &CallerMemory {
        &self.buffers
    }

    /// Takes the client lock for one call.
    fn lock(&self) -> Result<ClientGuard<'_>, Failure> {
        if std::process::id() != self.process {
            return Err(Failure::call(
                "this client was made before a fork; the child process makes a client of its own",
            ));
        }
        Ok(self.lock.lock())
    }
}

#[cfg(test)]
mod tests;

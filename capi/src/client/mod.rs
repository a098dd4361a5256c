//! The trainer's calls, put together from requests: one checked client under every edition of the C API.
//!
//! A call takes the caller's slices, lends them to the transport for its own length, and is over when every server
//! has answered or the deadline has passed. A blocking call is a call that is started and finished on the calling
//! thread; calls that are started alone ([`Client::scope`]) are moved on by a thread of the client's. Threads take
//! turns: whoever has entered the client moves everybody's calls.
//!
//! Read in this order: `transfer` (what a call is made of), `rows` and `dealt` (the same by rows), `packer` (its
//! frames), `calls` (how calls end, and which wait for which), `engine` (the traffic), `turns` (whose turn it is),
//! `pending` (calls that were started alone).
//!
//! Not here: C types (`api`), what a frame is (`pserver_core::wire`), what is resent and when
//! (`pserver_core::client`).

mod buffers;
mod calls;
mod dealt;
mod engine;
mod initialise;
mod job;
mod packer;
mod pending;
mod rows;
mod transfer;
mod turns;
mod views;

#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pserver_core::client::{Finished, Refused};
use pserver_core::config::{Merge, Mode};
use pserver_core::dtype::{ElementType, Half};
use pserver_core::error::Failure;
use pserver_core::ids::{Place, Ticket};
use pserver_core::port::Transport;
use pserver_core::wire::{Address, Role};
use pserver_transport::loopback::Hub;
use pserver_transport::network::{Checks, Network, NetworkOptions, Poll, Token};
use pserver_transport::verbs::{self, DeviceChoice, Devices};

use buffers::Buffers;
use calls::Call;
use dealt::RowsRoom;
use job::{Job, Search};
use turns::{Entered, Shared};
use views::Room;

pub use buffers::Path;
pub use pending::{Calls, Pending};
pub use views::View;

pub(crate) use buffers::{Extent, Held};
pub(crate) use calls::CallNumber;
pub(crate) use engine::{Engine, MakeTransport};
pub(crate) use initialise::{answer, unexpected};
pub(crate) use transfer::check_half;
pub(crate) use turns::reason;

/// How a client finds its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// The address of server 0.
    pub coordinator: Address,
    /// The rank; absent takes the lowest free one.
    pub trainer: Option<u32>,
    /// Whether this client takes part; a reader only pulls.
    pub is_reader: bool,
    /// How long any call may take.
    pub deadline: Duration,
    /// How a call waits for servers.
    pub poll: Poll,
    /// Where payloads over TCP carry checksums.
    pub checks: Checks,
    /// Which RDMA device connections use.
    pub rdma_device: DeviceChoice,
    /// The job's token, which servers that have one ask for.
    pub token: Option<Token>,
}

impl ClientOptions {
    /// A trainer of the job at `coordinator`, with a deadline of 120 s: twice what a server lets a round take, so
    /// that it is the server who says which trainer is missing.
    #[must_use]
    pub fn new(coordinator: Address) -> Self {
        Self {
            coordinator,
            trainer: None,
            is_reader: false,
            deadline: Duration::from_secs(120),
            poll: Poll::default(),
            checks: Checks::default(),
            rdma_device: DeviceChoice::default(),
            token: None,
        }
    }
}

/// A gradient, a delta or a value on its way to the servers.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The type of the elements.
    pub element_type: ElementType,
    /// The elements.
    pub content: &'a [u8],
}

/// A place for a parameter's value.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// Where the value goes; as long as the parameter, or half as long where it comes as halves.
    pub content: &'a mut [u8],
    /// What it comes as, where that is not the parameter's own type: each element rounded once. For float32 only.
    pub half: Option<Half>,
}

impl<'a> Wanted<'a> {
    /// A place for a value as it is.
    #[must_use]
    pub fn new(name: &'a str, content: &'a mut [u8]) -> Self {
        Self { name, content, half: None }
    }
}

/// Rows of a gradient or of a delta on their way to the servers.
#[derive(Clone, Copy, Debug)]
pub struct GivenRows<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The type of the elements.
    pub element_type: ElementType,
    /// Which rows; one that is there twice is summed.
    pub ids: &'a [u64],
    /// Their elements, row after row in the ids' order.
    pub values: &'a [u8],
}

/// Places for rows.
#[derive(Debug)]
pub struct WantedRows<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// Which rows; they may repeat.
    pub ids: &'a [u64],
    /// Where they go, row after row in the ids' order.
    pub values: &'a mut [u8],
}

/// What is known of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The type of its elements.
    pub element_type: ElementType,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its shape, the slowest dimension first. A sparse parameter without a height has zero there.
    pub shape: Vec<u64>,
    /// Whether it is sent and fetched by rows. Its length is then that of all rows that may come to be.
    pub is_sparse: bool,
}

/// How the trainers of a job share its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// What an update waits for.
    pub mode: Mode,
    /// How the gradients of one round become one.
    pub merge: Merge,
    /// Trainers in the job.
    pub trainers: u32,
}

/// Bytes of payload that a client has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// To the servers.
    pub sent: u64,
    /// From the servers.
    pub received: u64,
}

/// [`Moved`] as it is counted.
#[derive(Debug, Default)]
struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counters {
    fn count(&self, sent: u64, received: u64) {
        self.sent.fetch_add(sent, Relaxed);
        self.received.fetch_add(received, Relaxed);
    }
}

/// A trainer's end of the job.
pub struct Client {
    shared: Arc<Shared>,
    buffers: Arc<Buffers>,
    options: ClientOptions,
    moved: Arc<Counters>,
    verbs: OverVerbs,
    process: u32,
}

impl Drop for Client {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            self.shared.stop();
        } else {
            // In a child process the connections are the parent's, and nobody is there to give the lock back.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

/// What goes over verbs through the last transport that was made.
pub(crate) type OverVerbs = Arc<Mutex<Arc<verbs::Counters>>>;

/// Makes transports to other processes.
pub(crate) fn networks(options: NetworkOptions, verbs: OverVerbs) -> MakeTransport {
    Box::new(move || {
        let network = Network::new(options.clone())?;
        *verbs.lock().unwrap_or_else(PoisonError::into_inner) = network.verbs();
        Ok(Box::new(network))
    })
}

/// Makes transports to servers of this process.
pub(crate) fn within(options: NetworkOptions, hub: Hub) -> MakeTransport {
    Box::new(move || Ok(Box::new(hub.transport().with(options.checks, options.poll))))
}

/// Everything behind the lock.
struct State {
    options: ClientOptions,
    engine: Engine,
    /// What is known of the job, once joined.
    job: Option<Job>,
    /// The call that asks to join, while there is one.
    joining: Option<CallNumber>,
    search: Search,
    moved: Arc<Counters>,
    /// Shared with [`Client`], which does not wait for its turn to look there.
    buffers: Arc<Buffers>,
    room: Room,
    rows_room: RowsRoom,
    /// Calls whose results nobody has taken, in the order of their numbers.
    calls: Vec<Call>,
    last_call: u64,
    /// Kept between turns for its memory.
    over: Vec<(Ticket, Result<Finished, Refused>)>,
}

impl Client {
    /// A client; it connects with its first call.
    ///
    /// # Errors
    /// When this process cannot have another transport.
    pub fn new(options: ClientOptions) -> Result<Self, Failure> {
        let (poll, checks, token) = (options.poll, options.checks, options.token.clone());
        let devices = Devices::from(&options.rdma_device);
        let transport = NetworkOptions { poll, checks, devices, token, ..NetworkOptions::default() };
        let verbs = OverVerbs::default();
        Self::with(options, networks(transport, Arc::clone(&verbs)), verbs)
    }

    /// A client of servers that were started in this process and in this hub.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn within(options: ClientOptions, hub: &Hub) -> Result<Self, Failure> {
        let transport = NetworkOptions { poll: options.poll, checks: options.checks, ..NetworkOptions::default() };
        Self::with(options, within(transport, hub.clone()), OverVerbs::default())
    }

    /// A client over transports that `make` makes: the first one, and another one whenever that broke. For tests, and
    /// for who counts what goes over them.
    ///
    /// # Errors
    /// When the first one cannot be made.
    pub fn over(
        options: ClientOptions,
        make: impl Fn() -> Result<Box<dyn Transport>, Failure> + Send + 'static,
    ) -> Result<Self, Failure> {
        Self::with(options, Box::new(make), OverVerbs::default())
    }

    fn with(options: ClientOptions, make: MakeTransport, verbs: OverVerbs) -> Result<Self, Failure> {
        let role = if options.is_reader { Role::Reader } else { Role::Trainer };
        let engine = Engine::new(&options.coordinator, role, make)?;
        let (buffers, moved) = (Arc::new(Buffers::default()), Arc::new(Counters::default()));
        let state = State {
            options: options.clone(),
            engine,
            job: None,
            joining: None,
            search: Search::default(),
            moved: Arc::clone(&moved),
            buffers: Arc::clone(&buffers),
            room: Room::default(),
            rows_room: RowsRoom::default(),
            calls: Vec::new(),
            last_call: 0,
            over: Vec::new(),
        };
        let shared = Arc::new(Shared::new(state));
        Ok(Self { shared, buffers, options, moved, verbs, process: std::process::id() })
    }

    /// The options it was made with.
    #[must_use]
    pub fn options(&self) -> ClientOptions {
        self.options.clone()
    }

    /// The rank in the job; joins it when that has not happened.
    ///
    /// # Errors
    /// When no server answers before the deadline, or every rank is taken.
    pub fn trainer(&self) -> Result<u32, Failure> {
        let mut state = self.enter()?;
        state.joined()?;
        Ok(state.engine.identity().trainer.0)
    }

    /// What went over verbs, which counts on, and from zero when a device broke and its connections were made anew.
    #[must_use]
    pub fn verbs(&self) -> Arc<verbs::Counters> {
        Arc::clone(&self.verbs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Bytes moved so far; in a child process, until the fork.
    #[must_use]
    pub fn moved(&self) -> Moved {
        Moved { sent: self.moved.sent.load(Relaxed), received: self.moved.received.load(Relaxed) }
    }

    /// What is known of a parameter; waits until the parameters are initialised.
    ///
    /// # Errors
    /// When there is no such parameter, or initialisation does not finish before the deadline.
    pub fn describe(&self, name: &str) -> Result<Facts, Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        state.facts(name)
    }

    /// The servers that keep a parameter, in order; waits until the parameters are initialised.
    ///
    /// # Errors
    /// As [`describe`](Self::describe).
    pub fn servers_of(&self, name: &str) -> Result<Vec<u16>, Failure> {
        let mut state = self.enter()?;
        let catalogue = state.ready()?.catalogue();
        let found = catalogue.find(name).and_then(|index| catalogue.parameter(index));
        let found = found.ok_or_else(|| Failure::call(format!("found no parameter {name:?}")))?;
        let keeps = |place: &Place| found.chunks_on(*place).next().is_some();
        let mut servers: Vec<u16> = catalogue.topology().places().filter(keeps).map(|place| place.server.0).collect();
        servers.dedup();
        Ok(servers)
    }

    /// The trainers that the job is for; joins it when that has not happened.
    ///
    /// # Errors
    /// As [`trainer`](Self::trainer).
    pub fn trainers(&self) -> Result<u32, Failure> {
        Ok(self.enter()?.joined()?.sharing().trainers)
    }

    /// How trainers share parameters; waits until these are initialised.
    ///
    /// # Errors
    /// When initialisation does not finish before the deadline.
    pub fn sharing(&self) -> Result<Sharing, Failure> {
        Ok(self.enter()?.ready()?.sharing())
    }

    /// The names of all parameters in the order of declaration; waits until they are initialised.
    ///
    /// # Errors
    /// When initialisation does not finish before the deadline.
    pub fn names(&self) -> Result<Vec<String>, Failure> {
        let mut state = self.enter()?;
        let catalogue = state.ready()?.catalogue();
        Ok(catalogue.iter().map(|one| one.declaration().name.as_str().to_owned()).collect())
    }

    /// The type and the length in bytes of each of these parameters; waits until they are initialised.
    pub(crate) fn measure(&self, names: &[&str]) -> Result<Vec<(ElementType, u64)>, Failure> {
        let mut state = self.enter()?;
        state.ready()?;
        state.measure(names)
    }

    fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Enters the client for one call.
    fn enter(&self) -> Result<Entered<'_>, Failure> {
        if std::process::id() != self.process {
            return Err(Failure::call(
                "this client was made before a fork; the child process makes a client of its own",
            ));
        }
        Ok(self.shared.enter())
    }
}

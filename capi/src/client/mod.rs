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

use std::sync::Arc;
use std::time::Duration;

use pserver_core::client::{Finished, Refused};
use pserver_core::dtype::ElementType;
use pserver_core::error::Failure;
use pserver_core::ids::{Place, Ticket};
use pserver_core::wire::{Address, Role};
use pserver_transport::network::{Checks, NetworkOptions, Poll};
use pserver_transport::verbs::{Counters, DeviceChoice, Devices};

use buffers::Buffers;
use calls::Call;
use dealt::RowsRoom;
use job::Job;
use turns::{Entered, Shared};
use views::Room;

pub use buffers::Path;
pub use pending::{Calls, Pending};
pub use views::View;

pub(crate) use buffers::{Extent, Held};
pub(crate) use calls::CallNumber;
pub(crate) use engine::Engine;
pub(crate) use initialise::{answer, unexpected};

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
    /// Where the value goes; as long as the parameter.
    pub content: &'a mut [u8],
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

/// Bytes of payload that a client has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// To the servers.
    pub sent: u64,
    /// From the servers.
    pub received: u64,
}

/// A trainer's end of the job.
pub struct Client {
    shared: Arc<Shared>,
    buffers: Arc<Buffers>,
    process: u32,
}

impl Drop for Client {
    fn drop(&mut self) {
        // In a child process nobody is there to give the lock back.
        if std::process::id() == self.process {
            self.shared.stop();
        }
    }
}

/// Everything behind the lock.
struct State {
    options: ClientOptions,
    engine: Engine,
    /// What is known of the job, once joined.
    job: Option<Job>,
    moved: Moved,
    /// Shared with [`Client`], which does not wait for its turn to look there.
    buffers: Arc<Buffers>,
    room: Room,
    rows_room: RowsRoom,
    /// Calls whose results nobody has taken, in the order of their numbers.
    calls: Vec<Call>,
    last_call: u64,
    /// Whether a call came to its end since somebody last told those who wait.
    has_news: bool,
    /// Kept between turns for its memory.
    over: Vec<(Ticket, Result<Finished, Refused>)>,
}

impl Client {
    /// A client; it connects with its first call.
    ///
    /// # Errors
    /// When this process cannot have another transport.
    pub fn new(options: ClientOptions) -> Result<Self, Failure> {
        let role = if options.is_reader { Role::Reader } else { Role::Trainer };
        let (poll, checks, devices) = (options.poll, options.checks, Devices::from(&options.rdma_device));
        let transport = NetworkOptions { poll, checks, devices, ..NetworkOptions::default() };
        let engine = Engine::new(&options.coordinator, role, transport)?;
        let buffers = Arc::new(Buffers::default());
        let state = State {
            options,
            engine,
            job: None,
            moved: Moved::default(),
            buffers: Arc::clone(&buffers),
            room: Room::default(),
            rows_room: RowsRoom::default(),
            calls: Vec::new(),
            last_call: 0,
            has_news: false,
            over: Vec::new(),
        };
        Ok(Self { shared: Arc::new(Shared::new(state)), buffers, process: std::process::id() })
    }

    /// The options it was made with.
    #[must_use]
    pub fn options(&self) -> ClientOptions {
        self.shared.enter().options.clone()
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
    pub fn verbs(&self) -> Arc<Counters> {
        self.shared.enter().engine.verbs()
    }

    /// Bytes moved so far.
    #[must_use]
    pub fn moved(&self) -> Moved {
        self.shared.enter().moved
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

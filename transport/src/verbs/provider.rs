//! Interface of an RDMA device. `hardware_device` implements it with libibverbs, `software_device` over ordinary memory
//! in process, and `faulty_device` wraps another one with injected faults.
//!
//! A work request names memory by a [`MemorySpan`], which `work_requests` makes: that module owns the memory until
//! the request has completed or the queue pair is closed. So no memory is freed while a device may access it.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::task::Waker;

use pserver_core::memory::Mapped;

use super::memory_span::MemorySpan;
use super::reasons::VerbsError;
use super::status::CompletionStatus;

/// Attributes of a device's port, as queried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortAttributes {
    /// The device, its port and its address, for people.
    pub(crate) name: String,
    /// The port's GID.
    pub(crate) gid: [u8; 16],
    /// The port's LID in an InfiniBand subnet; zero over Ethernet.
    pub(crate) lid: u16,
    pub(crate) layer: LinkLayer,
    /// The place of the partition's key in the port's table.
    pub(crate) pkey_index: u16,
    /// The largest packet as a power of two: 1 is 256 bytes, 5 is 4,096.
    pub(crate) mtu: u8,
    /// Reads that one queue pair may have in flight, and that it may serve at once.
    pub(crate) reads_out: u8,
    pub(crate) reads_in: u8,
    /// Whether the system limits registered memory.
    pub(crate) is_limited: bool,
}

/// An RDMA device.
pub(crate) trait RdmaDevice: Send + Sync + fmt::Debug {
    /// The attributes of its port.
    fn attributes(&self) -> &PortAttributes;

    /// Makes the channel on which one thread waits for completions.
    fn completion_channel(&self) -> Result<Arc<dyn CompletionChannel>, VerbsError>;

    /// Whether accelerator memory can be registered, or why not.
    fn device_memory(&self) -> Result<(), VerbsError>;
}

/// A completion channel.
pub(crate) trait CompletionChannel: Send + Sync {
    /// Readable when a queue pair has a completion after [`CompletionChannel::arm`].
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Consumes the notifications, so that only new ones make the descriptor readable.
    fn drain(&self) -> Result<(), VerbsError>;

    /// Takes the completions of all queue pairs from the device, and wakes the connections of those that have some;
    /// whether there were some.
    fn collect(&self) -> Result<bool, VerbsError>;

    /// The next completion makes the descriptor readable.
    fn arm(&self) -> Result<(), VerbsError>;

    /// Readable when the device reports an asynchronous event, if it reports them.
    fn events(&self) -> Option<BorrowedFd<'_>>;

    /// Consumes the asynchronous events.
    fn news(&self) -> Result<DeviceNews, VerbsError>;

    /// Makes a protection domain: its keys are invalid in every other domain.
    fn domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError>;
}

/// Asynchronous events since the last call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceNews {
    /// A failure after which queue pairs do not recover.
    pub(crate) failure: Option<String>,
    /// Whether a port's state or addresses may be others, so that new connections look again.
    pub(crate) has_changed: bool,
}

/// The remote access that a registration allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionAccess {
    /// No remote access.
    Local,
    /// Peers of open queue pairs in the same domain may read and write.
    Remote,
}

/// A protection domain.
pub(crate) trait ProtectionDomain: Send + Sync {
    /// Registers a piece of a mapping. The caller keeps the mapping as long as the region.
    fn register(
        &self,
        memory: &Mapped,
        piece: (usize, usize),
        access: RegionAccess,
    ) -> Result<Box<dyn MemoryRegion>, VerbsError>;

    /// Makes a queue pair that is not connected.
    fn pair(&self, capacity: &PairCapacity) -> Result<Box<dyn QueuePair>, VerbsError>;
}

/// A registered memory region; dropping it deregisters the memory.
pub(crate) trait MemoryRegion: Send + Sync {
    /// The local key (lkey).
    fn local_key(&self) -> u32;

    /// The remote key (rkey).
    fn remote_key(&self) -> u32;

    /// Deregisters the memory; afterwards no device accesses it. May be called again.
    fn close(&mut self) -> Result<(), VerbsError>;
}

/// The capacity of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairCapacity {
    /// Work requests in flight.
    pub(crate) posted_max: u32,
    /// Posted receives.
    pub(crate) receives_max: u32,
    /// Whether the peer may read and write memory that is registered for that.
    pub(crate) is_open: bool,
}

/// The address of a queue pair, as the peer needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairAddress {
    pub(crate) number: u32,
    /// The first packet sequence number: random, 24 bits.
    pub(crate) packet: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) mtu: u8,
    /// Reads that it serves at once.
    pub(crate) reads_in: u8,
    pub(crate) layer: LinkLayer,
}

/// The link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LinkLayer {
    /// Not said: of a software device, or by an older peer.
    Unknown = 0,
    /// InfiniBand.
    InfiniBand = 1,
    /// Ethernet, with RoCE version 2.
    Ethernet = 2,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Unknown => "an unknown link",
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "RoCE v2",
        })
    }
}

/// An address in the peer's memory with its remote key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteAddress {
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// The operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Send the span into a posted receive of the peer.
    Send,
    /// Read the peer's memory into the span.
    Read(RemoteAddress),
    /// Write the span to the peer's memory; immediate data, if any, completes a receive of the peer.
    Write(RemoteAddress, Option<u32>),
}

/// A work request.
#[derive(Debug)]
pub(crate) struct WorkRequest {
    pub(crate) id: u64,
    pub(crate) operation: Operation,
    pub(crate) span: MemorySpan,
    /// Whether success produces a completion. Failure always does.
    pub(crate) is_signaled: bool,
}

/// A receive for one message.
#[derive(Debug)]
pub(crate) struct ReceiveRequest {
    pub(crate) id: u64,
    pub(crate) span: MemorySpan,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkCompletion {
    pub(crate) id: u64,
    pub(crate) result: Result<CompletionKind, CompletionStatus>,
}

/// The kind of a successful completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompletionKind {
    /// This request and all before it are complete.
    Posted,
    /// A message of so many bytes arrived.
    Message(u32),
    /// The peer's writes up to the one with this immediate data arrived.
    Immediate(u32),
}

/// A queue pair of a reliable connection.
pub(crate) trait QueuePair: Send {
    /// The address that the peer needs.
    fn here(&self) -> PairAddress;

    /// Connects to the peer; afterwards the pair can send and receive.
    fn connect(&mut self, there: &PairAddress) -> Result<(), VerbsError>;

    /// Posts receives; messages fill them in order.
    fn receive(&mut self, room: &[ReceiveRequest]) -> Result<(), VerbsError>;

    /// Posts work requests in order, with one call.
    fn post(&mut self, work: &[WorkRequest]) -> Result<(), VerbsError>;

    /// Sets the waker that is called when [`CompletionChannel::collect`] finds completions of this pair.
    fn set_waker(&mut self, waker: &Waker);

    /// Takes the completions of all queue pairs of the channel from the device, as [`CompletionChannel::collect`] does.
    fn collect(&mut self) -> Result<(), VerbsError>;

    /// Appends the completions that were taken from the device to `done`.
    fn poll(&mut self, done: &mut Vec<WorkCompletion>) -> Result<(), VerbsError>;

    /// Destroys the queue pair; afterwards no device accesses its memory. May be called again.
    fn close(&mut self) -> Result<(), VerbsError>;
}

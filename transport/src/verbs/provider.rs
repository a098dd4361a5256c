//! A device, as a connection sees it. The real one is `device`; `plain` does the same over ordinary memory, in process;
//! `rough` is any of them with faults.
//!
//! Work names memory by a [`Span`], which only `flights` makes: it keeps the memory, by value, until the work has
//! completed or the pair is closed. So no memory is given back while a device may touch it.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use pserver_core::memory::Mapped;
use thiserror::Error;

use super::flights::Span;
use super::reasons::{self, Cause};
use super::status::Status;

/// What a device, or the system before it, refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub(crate) struct Fault(pub(crate) String);

impl Fault {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// There is no device that can be used, in this way.
    pub(super) fn no_device(how: impl Into<String>) -> Self {
        Self(reasons::text(&Cause::Device(how.into()), None))
    }
}

/// What is known of a device's port. Limits are read, not assumed.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The device, its port and its address, for people.
    pub(crate) name: String,
    /// The port's address.
    pub(crate) gid: [u8; 16],
    /// The port's number in an InfiniBand subnet; zero over Ethernet.
    pub(crate) lid: u16,
    /// The longest packet, as a power of two: 1 is 256 bytes, 5 is 4,096.
    pub(crate) mtu: u8,
    /// Reads that one pair may have under way, and that it may be asked for.
    pub(crate) reads_out: u8,
    pub(crate) reads_in: u8,
    /// Whether the system limits how much memory can be registered.
    pub(crate) is_limited: bool,
}

/// A device.
pub(crate) trait Provider: Send + Sync + fmt::Debug {
    /// What is known of it.
    fn facts(&self) -> &Facts;

    /// A place where one thread waits for what its pairs have done.
    fn station(&self) -> Result<Arc<dyn Station>, Fault>;

    /// Whether memory of accelerators can be registered, or why not.
    fn device_memory(&self) -> Result<(), Fault>;
}

/// Where completions are announced.
pub(crate) trait Station: Send + Sync {
    /// Readable when a pair that was armed has something.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Takes the announcements, so that the descriptor is readable for new ones only.
    fn drain(&self) -> Result<(), Fault>;

    /// Readable when something has happened to the device itself, where that is told.
    fn events(&self) -> Option<BorrowedFd<'_>>;

    /// What has happened to the device that its pairs do not survive, after all that was told so far; nothing when
    /// there is no such thing.
    fn trouble(&self) -> Result<Option<String>, Fault>;

    /// A domain: keys of one are worth nothing in another.
    fn domain(&self) -> Result<Arc<dyn Domain>, Fault>;
}

/// What may be done to registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing from elsewhere.
    Near,
    /// The other side of a pair of the same domain may read it.
    FarReads,
    /// The other side of a pair of the same domain may write it.
    FarWrites,
}

/// A protection domain.
pub(crate) trait Domain: Send + Sync {
    /// Registers a piece of a mapping, which whoever registers keeps as long as the region: the region does not.
    fn register(&self, memory: &Mapped, piece: (usize, usize), access: Access) -> Result<Box<dyn Region>, Fault>;

    /// A pair that is not connected.
    fn pair(&self, plan: &Plan) -> Result<Box<dyn Pair>, Fault>;
}

/// Registered memory, until it is dropped.
pub(crate) trait Region: Send + Sync {
    /// The key for this side's work.
    fn near_key(&self) -> u32;

    /// The key for the other side's.
    fn far_key(&self) -> u32;

    /// Ends it: afterwards no device touches its memory. Once is enough.
    fn close(&mut self) -> Result<(), Fault>;
}

/// What a pair is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Work that is under way at once.
    pub(crate) posted_max: u32,
    /// Receives that are posted at once.
    pub(crate) receives_max: u32,
    /// Whether the other side may read and write what is registered for that.
    pub(crate) is_open: bool,
}

/// One end of a reliable connection, as the other must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) number: u32,
    /// The first packet's number: random, and 24 bits.
    pub(crate) packet: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) mtu: u8,
    /// Reads that it answers at once.
    pub(crate) reads_in: u8,
}

/// A place in the other side's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FarPlace {
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// What is to be done with a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// It is sent, into a receive of the other side.
    Send,
    /// It is filled from there.
    Read(FarPlace),
    /// It is written there; a number, if there is one, completes a receive of the other side.
    Write(FarPlace, Option<u32>),
}

/// One thing to do.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) id: u64,
    pub(crate) act: Act,
    pub(crate) near: Span,
    /// Whether its success is told. A failure always is.
    pub(crate) is_told: bool,
}

/// Room for one message.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) near: Span,
}

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) id: u64,
    pub(crate) what: Result<What, Status>,
}

/// What was done well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// This work and all before it.
    Posted,
    /// A message of so many bytes arrived.
    Message(u32),
    /// The other side's writes up to one with this number arrived.
    Number(u32),
}

/// One side of a reliable connection.
pub(crate) trait Pair: Send {
    /// What the other side must know.
    fn here(&self) -> End;

    /// Connects it: from here on it receives and sends.
    fn connect(&mut self, there: &End) -> Result<(), Fault>;

    /// Adds room for messages; they fill it in order.
    fn receive(&mut self, room: &[Receive]) -> Result<(), Fault>;

    /// Does work, in order, with one call.
    fn post(&mut self, work: &[Work]) -> Result<(), Fault>;

    /// Adds what was done to `done`.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Fault>;

    /// The next thing that is done is announced at the station.
    fn arm(&mut self) -> Result<(), Fault>;

    /// Destroys it: afterwards no device touches what it was given. Once is enough.
    fn close(&mut self) -> Result<(), Fault>;
}

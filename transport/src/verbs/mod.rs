//! Frames between machines whose network cards read and write registered memory by themselves.
//!
//! A connection begins as a TCP connection. The hello that goes over it carries an offer, the answer comes back over
//! it, and from then on frames go through a pair of reliable-connected queues; the end of the TCP connection is the
//! end of both. Heads and short payloads travel as messages, into room that the receiver has made. A long payload is
//! moved by the card of the side that accepted: it reads what the other pushes, straight into the leases that its
//! session answered, and writes what the other pulls, straight to where the other said. So the accepting side, the
//! server, opens no memory to anybody, and the connecting side opens, in a protection domain of that connection alone,
//! staging and the buffers that its caller registered.
//!
//! Not here: what owns connections (`network`), memory of one machine (`shm`), and which memory a session answers with.
//!
//! Read in this order: `provider` (what a device is), `flights` (whose memory it has), `mail` (messages and credits),
//! `outward` and `inward` (frames), `line` (all of it as one connection), `hall` (what connections share) and `meeting`
//! (how one begins), `plain` and `rough` (a device in process, and faults), `device` (the real one). The bytes are in
//! `docs/WIRE.md`, the reasons in `docs/decisions/verbs-data-path.md`.

mod checked;
mod choice;
mod denials;
mod device;
mod flights;
mod hall;
mod inward;
mod letters;
mod line;
mod mail;
mod meeting;
mod outward;
mod plain;
#[cfg(test)]
mod probe;
mod provider;
mod reasons;
mod registry;
#[cfg(test)]
mod rough;
mod staging;
mod status;
mod sys;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use pserver_core::wire::WireError;
use thiserror::Error;

pub use choice::{DEVICE_EXPECTED, DeviceChoice, DeviceName};
pub use registry::Counters;

pub(crate) use hall::{Answer, Hall, Watcher};
pub(crate) use line::Line;
pub(crate) use meeting::{Became, Meeting, Welcomed, welcome};
use provider::{Fault, Provider};

/// Bytes of a message.
const SLOT_BYTES: u32 = 8 * 1024;
/// Messages with bytes of frames that a side has room for.
const BULK_SLOTS: u16 = 24;
/// Other messages, and numbers that come with writes, that a side has room for.
const NOTE_SLOTS: u16 = 8;
/// Messages that a pair has room for.
const RECEIVES: u32 = BULK_SLOTS as u32 + NOTE_SLOTS as u32;
/// Messages that are under way.
const MESSAGES: u32 = RECEIVES;
/// Work that is under way on a pair: messages, and reads and writes of payloads.
const POSTED_MAX: u32 = 128;
/// A payload up to this length travels in messages: below it two short copies cost less than a round trip.
const INLINE_BYTES_MAX: u32 = 8 * 1024;

const _: () = assert!(MESSAGES < POSTED_MAX, "payloads leave room for messages");

/// Which side of a connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The one that connected: it says where payloads are and go.
    Connecting,
    /// The one that accepted: its card moves them.
    Accepting,
}

/// Which device connections use.
#[derive(Clone, Debug, Default)]
pub enum Devices {
    /// None.
    None,
    /// The one of this machine whose address is the connection's, else the one that suits best, if there is one.
    #[default]
    Best,
    /// The one of this name: `mlx5_0`, or with its port and the number of its address, `mlx5_0:1:3`.
    Named(DeviceName),
    /// This one.
    This(Device),
}

/// A device of this machine, or one that is made of ordinary memory.
#[derive(Clone)]
pub struct Device(Arc<dyn Provider>);

impl Device {
    /// A device in process: whoever has a clone of it can connect to the others who have. For tests.
    #[must_use]
    pub fn in_process() -> Self {
        Self(Arc::new(plain::Plain::new()))
    }

    /// The device that connections would use.
    ///
    /// # Errors
    /// Why there is none: the library is missing, there is no device, or too little memory may be locked.
    pub fn find(devices: &Devices) -> Result<Self, String> {
        hall::find(devices, None).map_err(|fault| fault.to_string())
    }

    /// Whether memory of accelerators is registered with it, in words: it is not, and why. Of a card that would take it
    /// that is what this transport does not do yet.
    #[must_use]
    pub fn device_memory(&self) -> String {
        match self.0.device_memory() {
            Ok(()) => {
                "off: the card takes it, and gradients of an accelerator go through the host all the same".to_owned()
            }
            Err(fault) => format!("off: {fault}"),
        }
    }

    /// Bytes of its longest packet.
    #[must_use]
    pub fn packet_bytes_max(&self) -> u32 {
        128 << self.0.facts().mtu.min(16)
    }

    /// The device, its port and its address.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.facts().name
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Device({})", self.name())
    }
}

/// Why nothing more comes from a connection.
#[derive(Debug, Error)]
pub(crate) enum Ended {
    #[error("closed by the peer")]
    Closed,
    #[error("closed by the peer in the middle of a frame")]
    Cut,
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Broken(String),
    /// The connection that says when it is over is not there any more.
    #[error("{0}")]
    Lost(String),
    /// The device failed, or said what cannot be.
    #[error("{0}")]
    Device(String),
    #[error("verbs: {0}")]
    Failed(status::Status),
}

impl Ended {
    /// Whether the peer is there and did what it should not.
    pub(crate) fn is_peers_fault(&self) -> bool {
        match self {
            Self::Wire(_) | Self::Broken(_) => true,
            Self::Failed(status) => status.is_peers_fault(),
            Self::Closed | Self::Cut | Self::Lost(_) | Self::Device(_) => false,
        }
    }

    /// Whether this side's device is at fault, whoever is at the other end.
    pub(crate) fn is_devices_fault(&self) -> bool {
        matches!(self, Self::Device(_))
    }
}

impl From<Fault> for Ended {
    fn from(fault: Fault) -> Self {
        Self::Device(format!("verbs: {fault}"))
    }
}

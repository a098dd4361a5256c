//! Connections over RDMA verbs: network cards of two machines read and write registered memory by themselves.
//!
//! A connection begins as a TCP connection. The client's hello carries an offer, the server's answer comes back over
//! TCP, and from then on frames go through a pair of reliable-connected queue pairs. Both queue pairs end with the TCP
//! connection. Heads and short payloads travel as messages into receive slots. The card of the accepting side moves
//! every long payload: it reads a push straight into the leases that the session posted, and writes a pulled value
//! straight to the address that the client named. So the accepting side, the server, registers no memory for remote
//! access. The connecting side registers staging and its caller's buffers, in a protection domain of that connection
//! alone.
//!
//! Not here: the transport that owns connections (`network`), memory of one machine (`shm`), and the choice of the
//! memory that a session posts.
//!
//! Read in this order: `provider` (the interface of a device), `work_requests` (requests in flight and their memory),
//! `credits` (messages and flow control), `send` and `receive` (frames), `connection` (all of it as one connection),
//! `device_context` (state that connections share), `handshake` (offer and answer), `software_device` (a device in
//! process) and `faulty_device` (injected faults), `hardware_device` (libibverbs), `hardware_ports` (its devices and
//! ports) and `choice` (the one that a connection uses). `docs/WIRE.md` has the bytes,
//! `docs/decisions/verbs-data-path.md` the reasons.

mod answers;
mod checked;
mod choice;
mod completion_queue;
mod connection;
mod credits;
mod denials;
mod device_context;
mod device_health;
mod fabric;
#[cfg(test)]
mod faulty_device;
mod handshake;
mod hardware_device;
mod hardware_ports;
mod locked_memory;
mod memory_span;
#[cfg(test)]
mod probe;
mod processors;
mod provider;
mod reasons;
mod receive;
mod registry;
mod send;
mod software_device;
mod staging;
pub(crate) mod status;
mod sys;
mod wire_format;
mod work_requests;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

pub use choice::{DEVICE_EXPECTED, DeviceChoice, DeviceNames};
pub use fabric::{FabricChoice, FabricOption, FabricSettings, fabric_variables};
pub use registry::VerbsCounters;

pub(crate) use denials::{RETRY_FIRST, longer};
pub(crate) use device_context::{DeviceContext, DeviceWatcher, OfferAnswer, PairEndpoint};
pub(crate) use handshake::{AcceptedTransport, HandshakeResult, VerbsHandshake, WaitingFrames, accept_offer};
pub(crate) use wire_format::HandshakeMessage;

use crate::connection::{ConnectionError, ConnectionSide};
use choice::{ConnectionPlace, PortCandidate};
use hardware_ports::FoundPorts;
use provider::RdmaDevice;
use reasons::VerbsError;

/// Bytes of a message slot.
const SLOT_BYTES: u32 = 8 * 1024;
/// Bulk messages, which carry bytes of frames, that a side has receive slots for.
const BULK_SLOTS: u16 = 24;
/// Control messages and writes with immediate data that a side has receive slots for.
const CONTROL_SLOTS: u16 = 8;
/// Receives posted on a queue pair.
const RECEIVES: u32 = BULK_SLOTS as u32 + CONTROL_SLOTS as u32;
/// Messages in flight from one side.
const MESSAGES: u32 = RECEIVES;
/// Work requests in flight on a queue pair: messages, and reads and writes of payloads.
const POSTED_MAX: u32 = 128;
/// Payloads up to this length travel in messages: two short copies cost less than a round trip.
const INLINE_BYTES_MAX: u32 = 8 * 1024;

const _: () = assert!(MESSAGES < POSTED_MAX, "payloads leave room for messages");

/// The device that connections use.
#[derive(Clone, Debug, Default)]
pub enum VerbsDevices {
    /// No device.
    None,
    /// The best devices of this machine.
    #[default]
    Best,
    /// The best of the devices of these names: `mlx5_0,mlx5_1`, or with port and GID index, `mlx5_0:1:3`.
    Named(DeviceNames),
    /// This device.
    This(VerbsDevice),
}

/// An RDMA device of this machine, or a software device over ordinary memory.
#[derive(Clone)]
pub struct VerbsDevice(Arc<dyn RdmaDevice>);

impl VerbsDevice {
    /// A software device for tests. Clones of it can connect to each other.
    #[must_use]
    pub fn in_process() -> Self {
        Self(Arc::new(software_device::SoftwareDevice::new()))
    }

    /// The device that connections would use.
    ///
    /// # Errors
    /// The reason why there is none: the library is missing, no device is usable, or the limit of locked memory is too
    /// low.
    pub fn find(devices: &VerbsDevices, fabric: &FabricSettings) -> Result<Self, String> {
        device_context::find(devices, fabric, &ConnectionPlace::default()).map_err(|fault| fault.to_string())
    }

    /// The addresses of this machine's ports that connections with these settings may use, and the ports that they may
    /// not, with the reasons.
    ///
    /// # Errors
    /// The reason why devices cannot be listed.
    pub fn survey(fabric: &FabricSettings) -> Result<(Vec<String>, Vec<String>), String> {
        let found = hardware_ports::ports(fabric).map_err(|fault| fault.to_string())?;
        let FoundPorts { candidates, unusable, .. } = found;
        let text = |one: &PortCandidate| match one.is_here {
            true => one.to_string(),
            false => format!("{one}: of another network namespace"),
        };
        Ok((candidates.iter().map(text).collect(), unusable))
    }

    /// The danger of a fork of this process, if the kernel has one.
    #[must_use]
    pub fn fork_warning() -> Option<&'static str> {
        let verbs = checked::library().ok()?;
        (!checked::copies_at_fork(verbs)).then_some(
            "the kernel does not copy registered memory at a fork, as Linux does from 5.12 on: a child that touches a \
             registered tensor, such as a worker of a DataLoader, is killed",
        )
    }

    /// A text that says whether accelerator memory is registered with this device, and why not. It never is: this
    /// transport does not register it even where the card could.
    #[must_use]
    pub fn device_memory(&self) -> String {
        match self.0.device_memory() {
            Ok(()) => "off: the card supports it, but gradients of an accelerator pass through the host".to_owned(),
            Err(fault) => format!("off: {fault}"),
        }
    }

    /// The largest packet in bytes.
    #[must_use]
    pub fn packet_bytes_max(&self) -> u32 {
        128 << self.0.attributes().mtu.min(16)
    }

    /// The device's name, port and address.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.attributes().name
    }
}

impl fmt::Debug for VerbsDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "VerbsDevice({})", self.name())
    }
}

impl From<VerbsError> for ConnectionError {
    fn from(fault: VerbsError) -> Self {
        Self::Device(format!("verbs: {fault}"))
    }
}

//! State that the verbs connections of one transport share: open devices, the tasks that watch them, and denials.
//!
//! Opening a device and making a queue pair may block for long. Threads that may wait do it, and hand the result to the
//! transport's thread.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pserver_core::memory::Arena;
use pserver_core::port::Doorbell;
use pserver_core::wire::{Address, Scheme};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;

use super::choice::{ConnectionPlace, DeviceChoice, NOT_REACHED, PeerLink, can_meet};
use super::connection::{ConnectionParts, ControlSocket, VerbsConnection};
use super::credits::{CreditedMessages, slots};
use super::denials::Denials;
use super::device_health::DeviceHealth;
use super::fabric::FabricSettings;
use super::provider::{
    CompletionChannel, DeviceNews, LinkLayer, PairAddress, PortAttributes, ProtectionDomain, RegionAccess,
};
use super::reasons::VerbsError;
use super::registry::{MemoryRegistry, VerbsCounters};
use super::staging::VerbsStaging;
use super::wire_format::HandshakeMessage;
use super::work_requests::{InFlightRequests, RequestOutcome};
use super::{ConnectionError, ConnectionSide, VerbsDevice, VerbsDevices, hardware_device, hardware_ports};
use crate::connection::Connection;
use crate::tls::TcpChannel;

/// Delay before a failed device is reopened.
const REOPEN_DELAY: Duration = Duration::from_secs(2);

/// Time for a new pair's first message to reach the peer's card.
const PROOF_LIMIT: Duration = Duration::from_secs(3);
/// Pause between two looks for its acknowledgement.
const PROOF_PAUSE: Duration = Duration::from_micros(50);
/// No host has more cards.
const TURNS: usize = 64;
/// Places whose device is remembered.
const PLACES_MAX: usize = 512;

/// A handle; clones share the state.
#[derive(Clone)]
pub(crate) struct DeviceContext(Arc<DeviceContextInner>);

struct DeviceContextInner {
    devices: VerbsDevices,
    /// Which of several equal devices the first connection uses.
    turn: usize,
    fabric: FabricSettings,
    is_checked: bool,
    counters: Arc<VerbsCounters>,
    watcher: DeviceWatcher,
    /// Locked while a device is being opened.
    open_devices: Mutex<OpenDevices>,
    channels: CompletionChannels,
    denials: Mutex<Denials>,
}

/// The runtime that watches a device's descriptors, and the doorbell that it rings.
pub(crate) struct DeviceWatcher {
    pub(crate) runtime: Handle,
    pub(crate) doorbell: Doorbell,
}

#[derive(Default)]
struct OpenDevices {
    open: Vec<Arc<OpenDevice>>,
    /// The device, or its error, by the place of connections.
    found: BTreeMap<ConnectionPlace, DeviceLookup>,
    /// The connections that were begun: each takes the next of several equal devices.
    begun: usize,
    /// The link layers that servers have not, as they have said.
    lacking: BTreeMap<String, LinkLayer>,
}

/// The completion channels of all devices that were opened, which the transport's thread asks in each turn.
#[derive(Default)]
struct CompletionChannels {
    /// The length of the list, so that a transport without verbs takes no lock.
    count: AtomicUsize,
    list: Mutex<Vec<Arc<dyn CompletionChannel>>>,
    /// Whether a device has failed since the transport last asked.
    has_failed: Arc<AtomicBool>,
}

/// An open device, or its error and the time until which that is remembered.
type DeviceLookup = Result<Arc<OpenDevice>, (Instant, VerbsError)>;

/// An open device.
pub(super) struct OpenDevice {
    attributes: PortAttributes,
    /// The domain of this process's connections.
    domain: Arc<dyn ProtectionDomain>,
    /// Memory of accepted connections, which is not accessible to peers.
    local_registry: MemoryRegistry,
    /// Memory of connections that this side made: each is registered once, however many servers access it.
    remote_registry: MemoryRegistry,
    health: Arc<DeviceHealth>,
}

/// A descriptor that the runtime watches.
struct WatchedDescriptor(Arc<dyn CompletionChannel>, fn(&dyn CompletionChannel) -> Option<BorrowedFd<'_>>);

impl AsRawFd for WatchedDescriptor {
    fn as_raw_fd(&self) -> RawFd {
        (self.1)(self.0.as_ref()).expect("a watched device has events").as_raw_fd()
    }
}

/// A local queue pair and the parts of the connection around it.
pub(crate) struct PairEndpoint {
    pub(super) parts: ConnectionParts,
    end: PairAddress,
    /// The server that it is offered to.
    server: Option<String>,
}

/// The answer to an offer: the connected local end, or the reason why there is none.
pub(crate) type OfferAnswer = Result<Box<PairEndpoint>, String>;

impl DeviceContext {
    pub(crate) fn new(
        (devices, turn): (VerbsDevices, usize),
        fabric: FabricSettings,
        is_checked: bool,
        watcher: DeviceWatcher,
    ) -> Self {
        let (open_devices, channels, denials) = Default::default();
        Self(Arc::new(DeviceContextInner {
            devices,
            turn,
            fabric,
            is_checked,
            counters: Arc::default(),
            watcher,
            open_devices,
            channels,
            denials,
        }))
    }

    pub(crate) fn counters(&self) -> &Arc<VerbsCounters> {
        &self.0.counters
    }

    /// The runtime for operations that may take long.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.0.watcher.runtime
    }

    /// Whether a device was opened.
    pub(crate) fn is_used(&self) -> bool {
        self.0.channels.count.load(Ordering::Acquire) > 0
    }

    /// Takes completions from all devices and wakes their connections; whether there were some.
    pub(crate) fn collect(&self) -> bool {
        let channels = &self.0.channels;
        if !self.is_used() {
            return false;
        }
        // A queue that is lost has woken its connections, which report it.
        channels.list().iter().filter(|channel| channel.collect().unwrap_or(false)).count() > 0
    }

    /// The next completion of any device ends the transport's sleep; false where a device cannot be armed.
    pub(crate) fn arm(&self) -> bool {
        let channels = &self.0.channels;
        if !self.is_used() {
            return true;
        }
        let is_armed = channels.list().iter().all(|channel| channel.arm().is_ok());
        channels.has_failed.fetch_or(!is_armed, Ordering::AcqRel);
        is_armed
    }

    /// Whether a device has failed since the last call: every connection looks whether it is its own.
    pub(crate) fn take_failure(&self) -> bool {
        let channels = &self.0.channels;
        channels.has_failed.load(Ordering::Acquire) && channels.has_failed.swap(false, Ordering::AcqRel)
    }

    /// Denies verbs for a while to connections with a choice: those to `address`, or without one those that this side
    /// accepts.
    pub(crate) fn deny(&self, address: Option<&Address>, reason: &str) {
        let denied = self.denials().deny(Instant::now(), address.map(ToString::to_string), reason);
        let seconds = denied.as_secs();
        match address {
            Some(address) => tracing::warn!(%address, reason, "no verbs for {seconds} s"),
            None => tracing::warn!(reason, "no verbs for accepted connections for {seconds} s"),
        }
    }

    /// Whether this machine has devices at all, usable or not. May block.
    pub(crate) fn has_devices(&self) -> bool {
        match self.0.devices {
            VerbsDevices::None => false,
            VerbsDevices::This(_) => true,
            VerbsDevices::Best | VerbsDevices::Named(_) => hardware_ports::are_listed(),
        }
    }

    fn denial_reason(&self, address: Option<&Address>) -> Option<String> {
        let place = address.map(ToString::to_string);
        self.denials().reason(Instant::now(), place.as_deref()).map(|reason| format!("verbs cannot be used: {reason}"))
    }

    fn denials(&self) -> MutexGuard<'_, Denials> {
        // Every operation leaves the map consistent, so a panic elsewhere does no harm.
        self.0.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The local end for a connection from `local` to `address`. May block.
    pub(crate) fn offer(&self, address: &Address, local: Option<IpAddr>) -> OfferAnswer {
        if let Some(reason) = self.denial_reason(Some(address)).filter(|_| address.scheme == Scheme::Auto) {
            return Err(reason);
        }
        let open_device = self.open_device(&self.place(address, local)).map_err(|fault| fault.to_string())?;
        let made = self.endpoint(&open_device, ConnectionSide::Connecting);
        made.map(|endpoint| Box::new(endpoint.to(address))).map_err(|error| {
            if address.scheme == Scheme::Auto {
                self.deny(Some(address), &error.to_string());
            }
            error.to_string()
        })
    }

    /// Answers an offer that arrived at `local`, for a listener of `scheme`. May block.
    pub(crate) fn answer(&self, offer: &[u8], scheme: Scheme, local: Option<IpAddr>) -> OfferAnswer {
        if !matches!(scheme, Scheme::Verbs | Scheme::Auto) {
            return Err(format!("the server listens on {scheme:?} only"));
        }
        if let Some(reason) = self.denial_reason(None).filter(|_| scheme == Scheme::Auto) {
            return Err(format!("the server: {reason}"));
        }
        let there = match HandshakeMessage::decode(offer)? {
            HandshakeMessage::Yes(there) => there,
            HandshakeMessage::No(reason) => return Err(reason),
        };
        let link = PeerLink::of(&there);
        let place = ConnectionPlace { local, turn: self.0.turn % TURNS, link, lacking: None };
        let open_device = self.open_device(&place).map_err(|fault| format!("the server: {fault}"))?;
        let made = self.endpoint(&open_device, ConnectionSide::Accepting).inspect_err(|error| {
            if scheme == Scheme::Auto {
                self.deny(None, &error.to_string());
            }
        });
        // An error in the peer's address is not a failure of this device, so it denies nothing.
        made.and_then(|endpoint| endpoint.join(&there)).map(Box::new).map_err(|error| format!("the server: {error}"))
    }

    /// Makes a local end on an open device. May block.
    pub(super) fn endpoint(
        &self,
        open_device: &OpenDevice,
        side: ConnectionSide,
    ) -> Result<PairEndpoint, ConnectionError> {
        let DeviceContextInner { is_checked, counters, .. } = &*self.0;
        let domain = &open_device.domain;
        let registry = match side {
            ConnectionSide::Accepting => &open_device.local_registry,
            ConnectionSide::Connecting => &open_device.remote_registry,
        };
        let pair = domain.pair(&InFlightRequests::capacity(side == ConnectionSide::Connecting))?;
        let arena = Arena::new(&slots()).map_err(|failure| ConnectionError::Device(failure.to_string()))?;
        // A registry of its own, so that the transport's thread never waits for another connection's registration.
        let local_registry = MemoryRegistry::new(domain, RegionAccess::Local, counters);
        let first = arena.take(1).map_err(|failure| ConnectionError::Device(failure.to_string()))?;
        let key = local_registry.local_key_of_own(&first)?;
        drop(first);
        let end = pair.here();
        let messages = CreditedMessages::new(InFlightRequests::new(pair, key), &arena)?;
        let (send_staging, receive_staging) =
            (VerbsStaging::new(registry.clone()), VerbsStaging::new(registry.clone()));
        let (counters, health, is_checked) = (Arc::clone(counters), Arc::clone(&open_device.health), *is_checked);
        Ok(PairEndpoint {
            end,
            server: None,
            parts: ConnectionParts {
                messages,
                local_registry,
                side,
                send_staging,
                receive_staging,
                counters,
                health,
                is_checked,
                outcomes: Vec::new(),
            },
        })
    }

    /// The place of the next connection to a server.
    fn place(&self, address: &Address, local: Option<IpAddr>) -> ConnectionPlace {
        let mut open_devices = self.open_devices();
        let turn = (self.0.turn + open_devices.begun) % TURNS;
        open_devices.begun = (open_devices.begun + 1) % TURNS;
        ConnectionPlace { local, turn, link: None, lacking: open_devices.lacking.get(&address.to_string()).copied() }
    }

    /// Notes a server's "no": if no port of it reaches the offered one, the next connection offers another layer.
    pub(crate) fn note_lacking(&self, endpoint: &PairEndpoint, reason: &str) {
        if let Some(server) = endpoint.server.as_ref().filter(|_| reason.contains(NOT_REACHED)) {
            self.open_devices().lacking.insert(server.clone(), endpoint.end.layer);
        }
    }

    fn open_devices(&self) -> MutexGuard<'_, OpenDevices> {
        self.0.open_devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device for a connection. A failure is remembered for [`REOPEN_DELAY`].
    pub(super) fn open_device(&self, place: &ConnectionPlace) -> Result<Arc<OpenDevice>, VerbsError> {
        let (mut open_devices, now) = (self.open_devices(), Instant::now());
        // Each device is asked: no change is left for later.
        let changed = open_devices.open.iter().filter(|open_device| open_device.health.take_change()).count();
        if changed > 0 {
            open_devices.found.clear();
        }
        open_devices.open.retain(|open_device| open_device.health.failure().is_none());
        open_devices.found.retain(|_, found| match found {
            Ok(open_device) => open_device.health.failure().is_none(),
            Err((until, _)) => *until > now,
        });
        if let Some(found) = open_devices.found.get(place) {
            return found.clone().map_err(|(_, fault)| fault);
        }
        if PLACES_MAX <= open_devices.found.len() {
            open_devices.found.clear();
        }
        let found = self.find_device(&mut open_devices, place);
        open_devices.found.insert(*place, found.clone().map_err(|fault| (now + REOPEN_DELAY, fault)));
        found
    }

    fn find_device(
        &self,
        open_devices: &mut OpenDevices,
        place: &ConnectionPlace,
    ) -> Result<Arc<OpenDevice>, VerbsError> {
        let device = find(&self.0.devices, &self.0.fabric, place)?;
        let attributes = device.0.attributes();
        if let Some(open_device) = open_devices.open.iter().find(|one| one.attributes == *attributes) {
            return Ok(Arc::clone(open_device));
        }
        // Connections keep a device whose port has another address now.
        open_devices.open.retain(|one| one.attributes.name != attributes.name);
        let (completion_channel, health, attributes) =
            (device.0.completion_channel()?, Arc::<DeviceHealth>::default(), attributes.clone());
        let domain = completion_channel.domain()?;
        let local_registry = match attributes.is_limited {
            true => MemoryRegistry::limited(&domain, RegionAccess::Local, &self.0.counters),
            false => MemoryRegistry::new(&domain, RegionAccess::Local, &self.0.counters),
        };
        let remote_registry = MemoryRegistry::new(&domain, RegionAccess::Remote, &self.0.counters);
        watch(&completion_channel, (&health, &self.0.channels.has_failed), &self.0.watcher)
            .map_err(|error| VerbsError::new(format!("watching the device's completions: {error}")))?;
        self.0.channels.add(completion_channel);
        tracing::info!(device = attributes.name, "device memory: {}", device.device_memory());
        let open_device = Arc::new(OpenDevice { attributes, domain, local_registry, remote_registry, health });
        open_devices.open.push(Arc::clone(&open_device));
        Ok(open_device)
    }
}

/// Selects the device for a connection.
///
/// # Errors
/// The reason why there is none, and the remedy.
pub(super) fn find(
    devices: &VerbsDevices,
    fabric: &FabricSettings,
    place: &ConnectionPlace,
) -> Result<VerbsDevice, VerbsError> {
    match (devices, &fabric.device) {
        (VerbsDevices::None, _) => Err(VerbsError::new("verbs are switched off")),
        (VerbsDevices::This(device), _) => Ok(device.clone()),
        (VerbsDevices::Named(names), _) | (VerbsDevices::Best, DeviceChoice::Named(names)) => {
            hardware_device::open(Some(names), fabric, place)
        }
        (VerbsDevices::Best, DeviceChoice::Auto) => hardware_device::open(None, fabric, place),
        (VerbsDevices::Best, DeviceChoice::None) => {
            let text = "verbs are switched off by a variable of NCCL or UCX (`psbench doctor` says which)";
            Err(VerbsError::new(text))
        }
    }
}

fn watch(
    completion_channel: &Arc<dyn CompletionChannel>,
    (health, has_failed): (&Arc<DeviceHealth>, &Arc<AtomicBool>),
    watcher: &DeviceWatcher,
) -> io::Result<()> {
    let DeviceWatcher { runtime, doorbell } = watcher;
    let _inside = runtime.enter();
    let watch_descriptor = |descriptor| {
        let descriptor = WatchedDescriptor(Arc::clone(completion_channel), descriptor);
        // SAFETY: `WatchedDescriptor` owns the completion channel, whose descriptor stays the same as long as it lives.
        let watched = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
        watched.map_err(io::Error::from)
    };
    let (completions, announce) = (watch_descriptor(|channel| Some(channel.descriptor()))?, doorbell.clone());
    runtime.spawn(async move {
        while let Ok(mut ready) = completions.readable().await {
            if completions.get_ref().0.drain().is_err() {
                return;
            }
            ready.clear_ready();
            announce.ring();
        }
    });
    if completion_channel.events().is_none() {
        return Ok(());
    }
    let (events, doorbell) = (watch_descriptor(|channel| channel.events())?, doorbell.clone());
    let (health, has_failed) = (Arc::clone(health), Arc::clone(has_failed));
    runtime.spawn(async move {
        while let Ok(mut ready) = events.readable().await {
            let news = events.get_ref().0.news().unwrap_or_else(|fault| {
                let failure = Some(fault.to_string());
                DeviceNews { failure, has_changed: true }
            });
            if news.has_changed {
                health.change();
            }
            if let Some(failure) = news.failure {
                tracing::warn!(failure, "an RDMA device failed; its connections are closed");
                health.fail(failure);
                has_failed.store(true, Ordering::Release);
                return doorbell.ring();
            }
            ready.clear_ready();
        }
    });
    Ok(())
}

impl CompletionChannels {
    fn add(&self, channel: Arc<dyn CompletionChannel>) {
        self.list().push(channel);
        self.count.fetch_add(1, Ordering::Release);
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<dyn CompletionChannel>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PairEndpoint {
    pub(crate) fn end(&self) -> PairAddress {
        self.end
    }

    fn to(self, server: &Address) -> Self {
        Self { server: Some(server.to_string()), ..self }
    }

    /// Connects the client's queue pair to the server's, which is connected, and sends the first message; the peer's
    /// card has taken it when this returns. Blocks for at most [`PROOF_LIMIT`] and the system's search for the address.
    pub(crate) fn connect(self, there: &PairAddress) -> Result<Self, ConnectionError> {
        let mut joined = self.join(there)?;
        let ConnectionParts { messages, outcomes, .. } = &mut joined.parts;
        messages.greet()?;
        let until = Instant::now() + PROOF_LIMIT;
        // The server answers the first message, so that outcomes are kept for the connection.
        while !outcomes.iter().any(RequestOutcome::is_sent) {
            messages.work_requests.pair().collect()?;
            messages.work_requests.collect(outcomes)?;
            if until <= Instant::now() {
                let text = format!("the server's card acknowledges no message within {PROOF_LIMIT:?}");
                return Err(ConnectionError::Device(text));
            }
            thread::sleep(PROOF_PAUSE);
        }
        Ok(joined)
    }

    /// Connects the queue pair to the peer's. May block: the system resolves the peer's address.
    pub(super) fn join(mut self, there: &PairAddress) -> Result<Self, ConnectionError> {
        if !can_meet(&self.end, there) {
            let text = format!("this side offers {}, and the other side answers with {}", self.end.layer, there.layer);
            return Err(ConnectionError::Device(text));
        }
        self.parts.messages.work_requests.pair().connect(there)?;
        Ok(self)
    }

    /// The connection that ends with `socket`.
    pub(super) fn into_connection(self, socket: ControlSocket) -> VerbsConnection {
        self.parts.counters.connected();
        VerbsConnection::new(socket, self.parts)
    }

    /// The connection that goes on from a TCP connection, whose `unread` bytes were read from the stream.
    pub(crate) fn take_over(self, channel: TcpChannel, unread: Vec<u8>) -> Box<dyn Connection> {
        Box::new(self.into_connection(ControlSocket::with_bytes(channel, unread)))
    }
}

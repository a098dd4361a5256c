//! What the connections of one transport share: devices, where their completions are announced, and why there are none.
//!
//! Opening a device and making a pair take the system as long as it likes: they are for threads that may wait, and
//! what comes of them is handed to the transport's own thread.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pserver_core::memory::Arena;
use pserver_core::port::Doorbell;
use pserver_core::wire::{Address, Scheme};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;

use super::denials::{DENIED_FOR, Denials};
use super::flights::Flights;
use super::letters::Letter;
use super::line::{Line, Parts, Socket};
use super::mail::{Mail, slots};
use super::provider::{Access, Domain, End, Fault, Station};
use super::registry::{Counters, Registry};
use super::staging::Staging;
use super::{Device, Devices, Ended, Side, device};

/// A device that could not be opened is not tried again before.
const AGAIN: Duration = Duration::from_secs(2);

/// Clones are the same hall.
#[derive(Clone)]
pub(crate) struct Hall(Arc<Shared>);

struct Shared {
    devices: Devices,
    is_checked: bool,
    counters: Arc<Counters>,
    watcher: Watcher,
    /// Held while a device is opened.
    rooms: Mutex<Rooms>,
    denials: Mutex<Denials>,
}

/// Who watches the device's announcements, and whom it tells.
pub(crate) struct Watcher {
    pub(crate) runtime: Handle,
    pub(crate) bell: Doorbell,
}

#[derive(Default)]
struct Rooms {
    open: Vec<Arc<Room>>,
    /// What connections of each address of this side use.
    found: BTreeMap<Option<IpAddr>, Found>,
}

/// A device, or why there is none, and until when that holds.
type Found = Result<Arc<Room>, (Instant, Fault)>;

/// An open device.
pub(super) struct Room {
    name: String,
    station: Arc<dyn Station>,
    /// For connections that were accepted: their memory is opened to nobody, so one domain is enough.
    domain: Arc<dyn Domain>,
    near: Registry,
    health: Arc<Health>,
}

/// Whether a device is as it was.
#[derive(Default)]
pub(super) struct Health(OnceLock<String>);

impl Health {
    /// What has happened to the device, and its pairs do not survive.
    pub(super) fn trouble(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}

/// A descriptor that the runtime watches.
struct Watched(Arc<dyn Station>, fn(&dyn Station) -> Option<BorrowedFd<'_>>);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        (self.1)(self.0.as_ref()).expect("who watches has looked that it is there").as_raw_fd()
    }
}

/// One side of a pair.
pub(crate) struct Half {
    pub(super) parts: Parts,
    end: End,
}

/// What is answered to an offer: this side's end, connected to the other, or why there is none.
pub(crate) type Answer = Result<Box<Half>, String>;

impl Hall {
    pub(crate) fn new(devices: Devices, is_checked: bool, watcher: Watcher) -> Self {
        let (rooms, denials) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Shared { devices, is_checked, counters: Arc::default(), watcher, rooms, denials }))
    }

    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.0.counters
    }

    /// Runs what may take long where nobody waits for it.
    pub(super) fn runtime(&self) -> &Handle {
        &self.0.watcher.runtime
    }

    /// Connections to `address` do without verbs for a while, where they have a choice; without an address, those who
    /// connect to this side do.
    pub(crate) fn deny(&self, address: Option<&Address>, reason: &str) {
        let seconds = DENIED_FOR.as_secs();
        match address {
            Some(address) => tracing::warn!(%address, reason, "no verbs for {seconds} s"),
            None => tracing::warn!(reason, "no verbs for who connects for {seconds} s"),
        }
        self.denials().deny(Instant::now(), address.map(ToString::to_string), reason);
    }

    fn denied(&self, address: Option<&Address>) -> Option<String> {
        let place = address.map(ToString::to_string);
        self.denials().reason(Instant::now(), place.as_deref()).map(|reason| format!("verbs did not do: {reason}"))
    }

    fn denials(&self) -> MutexGuard<'_, Denials> {
        // It is whole after every operation, so a panic elsewhere does not spoil it.
        self.0.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This side's end for a connection that it has made from `local` to `address`. May take long.
    pub(crate) fn offer(&self, address: &Address, local: Option<IpAddr>) -> Answer {
        if let Some(reason) = self.denied(Some(address)).filter(|_| address.scheme == Scheme::Auto) {
            return Err(reason);
        }
        let room = self.room(local).map_err(|fault| fault.to_string())?;
        self.half(&room, Side::Connecting).map(Box::new).map_err(|ended| {
            if address.scheme == Scheme::Auto {
                self.deny(Some(address), &ended.to_string());
            }
            ended.to_string()
        })
    }

    /// Answers an offer that came to `local`, where the server listens by `scheme`. May take long.
    pub(crate) fn answer(&self, offer: &[u8], scheme: Scheme, local: Option<IpAddr>) -> Answer {
        if !matches!(scheme, Scheme::Verbs | Scheme::Auto) {
            return Err(format!("the server listens by {scheme:?} only"));
        }
        if let Some(reason) = self.denied(None).filter(|_| scheme == Scheme::Auto) {
            return Err(format!("the server: {reason}"));
        }
        let there = match Letter::decode(offer)? {
            Letter::Yes(there) => there,
            Letter::No(reason) => return Err(reason),
        };
        let room = self.room(local).map_err(|fault| format!("the server: {fault}"))?;
        let made = self.half(&room, Side::Accepting).inspect_err(|ended| {
            if scheme == Scheme::Auto {
                self.deny(None, &ended.to_string());
            }
        });
        // Where the other side is, is its own affair.
        made.and_then(|half| half.join(&there)).map(Box::new).map_err(|ended| format!("the server: {ended}"))
    }

    /// An end of a pair, for a device that is open. May take long.
    pub(super) fn half(&self, room: &Room, side: Side) -> Result<Half, Ended> {
        let Shared { is_checked, counters, .. } = &*self.0;
        let own = match side {
            Side::Accepting => None,
            Side::Connecting => Some(room.station.domain()?),
        };
        let domain = own.as_ref().unwrap_or(&room.domain);
        let registry = |access| match &own {
            None => room.near.clone(),
            Some(domain) => Registry::new(domain, access, counters),
        };
        let pair = domain.pair(&Flights::plan(side == Side::Connecting))?;
        let arena = Arena::new(&slots()).map_err(|failure| Ended::Device(failure.to_string()))?;
        // Of its own, so that the transport's thread never waits for a registration that is not for it.
        let near = Registry::new(domain, Access::Near, counters);
        let first = arena.take(1).map_err(|failure| Ended::Device(failure.to_string()))?;
        let key = near.own_key_of(&first)?;
        drop(first);
        let end = pair.here();
        let mail = Mail::new(Flights::new(pair, key), &arena)?;
        let (outward, inward) = (registry(Access::FarReads), registry(Access::FarWrites));
        let (outward, inward) = (Staging::new(outward), Staging::new(inward));
        let (counters, health, is_checked) = (Arc::clone(counters), Arc::clone(&room.health), *is_checked);
        Ok(Half { end, parts: Parts { mail, near, side, outward, inward, counters, health, is_checked } })
    }

    /// The device for connections of this address of this side. What failed is remembered.
    pub(super) fn room(&self, local: Option<IpAddr>) -> Result<Arc<Room>, Fault> {
        let (mut rooms, now) = (self.0.rooms.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        rooms.open.retain(|room| room.health.trouble().is_none());
        rooms.found.retain(|_, found| match found {
            Ok(room) => room.health.trouble().is_none(),
            Err((until, _)) => *until > now,
        });
        if let Some(found) = rooms.found.get(&local) {
            return found.clone().map_err(|(_, fault)| fault);
        }
        let found = self.find_room(&mut rooms, local);
        rooms.found.insert(local, found.clone().map_err(|fault| (now + AGAIN, fault)));
        found
    }

    fn find_room(&self, rooms: &mut Rooms, local: Option<IpAddr>) -> Result<Arc<Room>, Fault> {
        let device = find(&self.0.devices, local)?;
        if let Some(room) = rooms.open.iter().find(|room| room.name == device.name()) {
            return Ok(Arc::clone(room));
        }
        let (station, health, name) = (device.0.station()?, Arc::<Health>::default(), device.name().to_owned());
        let domain = station.domain()?;
        let near = match device.0.facts().is_limited {
            true => Registry::limited(&domain, Access::Near, &self.0.counters),
            false => Registry::new(&domain, Access::Near, &self.0.counters),
        };
        watch(&station, &health, &self.0.watcher)
            .map_err(|error| Fault::new(format!("watching the device's completions: {error}")))?;
        tracing::info!(device = name, "device memory: {}", device.device_memory());
        let room = Arc::new(Room { name, station, domain, near, health });
        rooms.open.push(Arc::clone(&room));
        Ok(room)
    }
}

/// The device that connections of this address of this side use, or why there is none.
///
/// # Errors
/// Which of the reasons it is, and what can be done about it.
pub(super) fn find(devices: &Devices, local: Option<IpAddr>) -> Result<Device, Fault> {
    match devices {
        Devices::None => Err(Fault::new("verbs are switched off")),
        Devices::This(device) => Ok(device.clone()),
        Devices::Best => device::open(None, local),
        Devices::Named(name) => device::open(Some(name), local),
    }
}

fn watch(station: &Arc<dyn Station>, health: &Arc<Health>, watcher: &Watcher) -> io::Result<()> {
    let Watcher { runtime, bell } = watcher;
    let _inside = runtime.enter();
    let watched = |descriptor| {
        let watched = Watched(Arc::clone(station), descriptor);
        // SAFETY: `Watched` keeps the station, and with it the descriptor, which is the same for as long as it lives.
        let watched = unsafe { AsyncFd::register_with_interest(watched, Interest::READABLE) };
        watched.map_err(io::Error::from)
    };
    let (announced, rung) = (watched(|station| Some(station.descriptor()))?, bell.clone());
    runtime.spawn(async move {
        while let Ok(mut ready) = announced.readable().await {
            if announced.get_ref().0.drain().is_err() {
                return;
            }
            ready.clear_ready();
            rung.ring();
        }
    });
    if station.events().is_none() {
        return Ok(());
    }
    let (events, rung, health) = (watched(|station| station.events())?, bell.clone(), Arc::clone(health));
    runtime.spawn(async move {
        while let Ok(mut ready) = events.readable().await {
            let trouble = events.get_ref().0.trouble().unwrap_or_else(|fault| Some(fault.to_string()));
            if let Some(trouble) = trouble {
                tracing::warn!(trouble, "the connections of an RDMA device are over");
                // It is told once.
                let _ = health.0.set(trouble);
                return rung.ring();
            }
            ready.clear_ready();
        }
    });
    Ok(())
}

impl Half {
    pub(super) fn end(&self) -> End {
        self.end
    }

    /// Connects the pair to its other end. May take long: the system looks for the other side's address.
    pub(super) fn join(mut self, there: &End) -> Result<Self, Ended> {
        self.parts.mail.flights.pair().connect(there)?;
        Ok(self)
    }

    /// The connection, which goes with `socket`; the side that connected speaks first.
    pub(super) fn into_line(mut self, socket: Socket) -> Result<Line, Ended> {
        let Parts { mail, side, counters, .. } = &mut self.parts;
        if *side == Side::Connecting {
            mail.greet()?;
        }
        counters.connected();
        Ok(Line::new(socket, self.parts))
    }
}

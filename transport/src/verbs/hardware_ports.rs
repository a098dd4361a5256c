//! RDMA devices of this machine, each opened once a process, and their active ports.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pserver_core::limits::CHUNK_BYTES_MAX;

use super::checked::{self, ContextPointer, ListedDevice, leave, library};
use super::choice::{PortCandidate, is_of_this_host};
use super::fabric::{FabricSettings, PartitionKey};
use super::locked_memory::memory_limit;
use super::processors;
use super::provider::{LinkLayer, PairCapacity, PortAttributes};
use super::reasons::VerbsError;
#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use super::sys::*;

/// Every device supports messages of this length.
const MESSAGE_LEAST: u32 = 1024 * 1024;
/// `IBV_QPF_GRH_REQUIRED`: an InfiniBand port through whose router every packet needs a global address.
const GLOBAL_REQUIRED: u8 = 1;
/// Asynchronous events that are kept for those who have not read them.
const EVENTS_KEPT: usize = 64;

/// An open device. All of a process share it.
pub(super) struct DeviceHandle {
    pub(super) verbs: &'static Verbs,
    pub(super) context: ContextPointer,
    sysfs: PathBuf,
    events: Mutex<EventLog>,
    /// Whether the device has failed, so that another one is opened.
    has_failed: AtomicBool,
}

/// The last asynchronous events of a device: the first that is kept has the number `first`.
#[derive(Default)]
struct EventLog {
    first: u64,
    kept: VecDeque<(ibv_event_type, i32)>,
}

/// A port of a device with one of its GIDs.
pub(super) struct DevicePort {
    pub(super) handle: Arc<DeviceHandle>,
    pub(super) attributes: PortAttributes,
    pub(super) number: u8,
    pub(super) gid_index: u8,
    /// Whether packets need a global address.
    pub(super) is_global: bool,
    pub(super) fabric: FabricSettings,
    /// Work requests of a queue pair, and entries of a completion queue.
    pub(super) queue_max: u32,
    pub(super) completions_max: u32,
    /// The longest work request.
    pub(super) message_max: u32,
}

/// An active port, of which each GID is a port to choose from.
struct ActivePort<'a> {
    number: u8,
    attributes: ibv_port_attr,
    pkey_index: u16,
    is_near: bool,
    fabric: &'a FabricSettings,
}

/// Ports that may be chosen, and the devices and ports that may not, each with the reason.
#[derive(Default)]
pub(super) struct FoundPorts {
    pub(super) candidates: Vec<PortCandidate>,
    pub(super) ports: Vec<DevicePort>,
    pub(super) unusable: Vec<String>,
}

/// The devices that are open, by name.
struct OpenCards {
    process: u32,
    by_name: BTreeMap<String, Arc<DeviceHandle>>,
}

// SAFETY: libibverbs may be called from any thread; `close` is called once, when the last owner is dropped.
unsafe impl Send for DeviceHandle {}
// SAFETY: as above.
unsafe impl Sync for DeviceHandle {}

static OPEN: Mutex<OpenCards> = Mutex::new(OpenCards { process: 0, by_name: BTreeMap::new() });

/// Every active port with each of its GIDs. Ports of InfiniBand that are not in the partition of these settings are
/// unusable.
pub(super) fn ports(fabric: &FabricSettings) -> Result<FoundPorts, VerbsError> {
    let verbs = library()?;
    let mut found = FoundPorts::default();
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.begin();
    let mut listed = Vec::new();
    checked::each_device(verbs, |device| {
        if let Some(reason) = why_unusable(&device.name, device.transport) {
            found.unusable.push(format!("{}: {reason}", device.name));
            return;
        }
        match open.handle(verbs, &device) {
            Ok(handle) => listed.push((device.name, handle)),
            Err(fault) => found.unusable.push(format!("{}: {fault}", device.name)),
        }
    })?;
    // A device that is not there any more is closed with its last connection.
    open.by_name = listed.iter().cloned().collect();
    drop(open);
    for (name, handle) in listed {
        if let Err(fault) = handle.add_ports(&name, fabric, &mut found) {
            // The next search opens it anew.
            handle.has_failed.store(true, Ordering::Relaxed);
            found.unusable.push(format!("{name}: {fault}"));
        }
    }
    Ok(found)
}

/// Whether the system lists any device.
pub(super) fn are_listed() -> bool {
    let mut is_listed = false;
    let listed = library().and_then(|verbs| checked::each_device(verbs, |_| is_listed = true));
    listed.is_ok() && is_listed
}

/// Why a device of this transport cannot carry connections, if it cannot.
fn why_unusable(name: &str, transport: ibv_transport_type) -> Option<&'static str> {
    match transport {
        IBV_TRANSPORT_IB => None,
        IBV_TRANSPORT_IWARP => Some(
            "iWARP, which has no write with immediate data; expected RoCE, to which Intel's E810 is switched by \
             `devlink dev param set DEVICE name enable_roce value true cmode runtime`, or TCP",
        ),
        _ if name.starts_with("efa") || name.starts_with("rdmap") => {
            Some("EFA, which has no reliable-connected queue pairs, but SRD by way of libfabric; expected TCP")
        }
        _ => Some("a device without reliable-connected queue pairs; expected InfiniBand, RoCE or TCP"),
    }
}

/// The fabric of a machine without a device of verbs, and the remedy: Slingshot has none.
pub(super) fn other_fabric(sysfs: &Path) -> Option<&'static str> {
    sysfs.join("class/cxi").exists().then_some("Slingshot (cxi) has no verbs, but libfabric; expected TCP")
}

impl OpenCards {
    /// Forgets the devices of the process that this one was forked from, which that one closes.
    fn begin(&mut self) {
        let process = std::process::id();
        if std::mem::replace(&mut self.process, process) != process {
            std::mem::forget(std::mem::take(&mut self.by_name));
        }
    }

    /// The device, opened unless it is open and well.
    fn handle(&self, verbs: &'static Verbs, device: &ListedDevice) -> Result<Arc<DeviceHandle>, VerbsError> {
        let known = self.by_name.get(&device.name).filter(|handle| {
            // A device that nobody watches may have failed since it was opened.
            handle.events_from(u64::MAX).is_ok() && !handle.has_failed.load(Ordering::Relaxed)
        });
        if let Some(handle) = known {
            return Ok(Arc::clone(handle));
        }
        let context = device.open(verbs)?;
        let (sysfs, events, has_failed) = (device.sysfs.clone(), Mutex::default(), AtomicBool::new(false));
        let handle = Arc::new(DeviceHandle { verbs, context, sysfs, events, has_failed });
        // The runtime watches the descriptor, because idle connections are not polled.
        let nonblocking = rustix::io::ioctl_fionbio(handle.descriptor(), true);
        nonblocking.map_err(|error| VerbsError::new(format!("events that do not block: {error}")))?;
        Ok(handle)
    }
}

impl DeviceHandle {
    /// Readable when there are asynchronous events that nobody has read.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the device's, which is open as long as `self`.
        unsafe { BorrowedFd::borrow_raw(checked::events(self.context)) }
    }

    /// The asynchronous events of the device and its ports, from this number on, and the number of the next.
    pub(super) fn events_from(&self, number: u64) -> Result<(Vec<(ibv_event_type, i32)>, u64), VerbsError> {
        let mut log = self.log();
        while let Some(event) = checked::event(self.verbs, self.context)? {
            match event.0 {
                IBV_EVENT_DEVICE_FATAL => self.has_failed.store(true, Ordering::Relaxed),
                IBV_EVENT_CQ_ERR
                | IBV_EVENT_PORT_ERR
                | IBV_EVENT_PORT_ACTIVE
                | IBV_EVENT_GID_CHANGE
                | IBV_EVENT_LID_CHANGE
                | IBV_EVENT_PKEY_CHANGE
                | IBV_EVENT_SM_CHANGE
                | IBV_EVENT_CLIENT_REREGISTER => {}
                // The queue pair of another event reports it by its completions.
                _ => continue,
            }
            if log.kept.len() == EVENTS_KEPT {
                log.kept.pop_front();
                log.first += 1;
            }
            log.kept.push_back(event);
        }
        let skipped = usize::try_from(number.saturating_sub(log.first)).unwrap_or(usize::MAX);
        let new = log.kept.iter().skip(skipped).copied().collect();
        Ok((new, log.first + log.kept.len() as u64))
    }

    fn log(&self) -> MutexGuard<'_, EventLog> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_ports(
        self: &Arc<Self>,
        name: &str,
        fabric: &FabricSettings,
        found: &mut FoundPorts,
    ) -> Result<(), VerbsError> {
        let Self { verbs, context, .. } = **self;
        let limits = checked::limits(verbs, context)?;
        let is_near = processors::is_near(&self.sysfs);
        for number in 1..=limits.phys_port_cnt {
            let port = checked::port(verbs, context, number)?;
            if port.state != IBV_PORT_ACTIVE {
                found.unusable.push(format!("{name}:{number} is not active (state {})", port.state));
                continue;
            }
            let pkey_index = match u32::from(port.link_layer) {
                // It has one partition.
                IBV_LINK_LAYER_ETHERNET => Ok(0),
                _ => pkey_index(partition_keys(&self.sysfs, number), fabric.pkey),
            };
            let pkey_index = match pkey_index {
                Ok(index) => index,
                Err(reason) => {
                    found.unusable.push(format!("{name}:{number}: {reason}"));
                    continue;
                }
            };
            let gids = checked::gids(verbs, context, number, &port, &self.sysfs)?;
            let port = ActivePort { number, attributes: port, pkey_index, is_near, fabric };
            let before = found.candidates.len();
            for (candidate, port) in gids.iter().filter_map(|gid| DevicePort::new(self, name, &limits, &port, gid)) {
                found.candidates.push(candidate);
                found.ports.push(port);
            }
            if found.candidates.len() == before {
                let text = "expected one of InfiniBand or of RoCE version 2, with an index below 256";
                found.unusable.push(format!("{name}:{number} has {} addresses; {text}", gids.len()));
            }
        }
        Ok(())
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        leave(checked::close(self.verbs, self.context));
    }
}

impl DevicePort {
    fn new(
        handle: &Arc<DeviceHandle>,
        name: &str,
        limits: &ibv_device_attr,
        active: &ActivePort<'_>,
        entry: &ibv_gid_entry,
    ) -> Option<(PortCandidate, Self)> {
        let ActivePort { number, attributes: ref port, pkey_index, is_near, fabric } = *active;
        // SAFETY: a GID is sixteen bytes in either form.
        let gid = unsafe { entry.gid.raw };
        let address = Ipv6Addr::from(gid);
        // RoCE version 1 is not routed.
        let layer = match entry.gid_type {
            IBV_GID_TYPE_ROCE_V2 => LinkLayer::Ethernet,
            IBV_GID_TYPE_IB => LinkLayer::InfiniBand,
            _ => return None,
        };
        let (gid_index, mtu) = (u8::try_from(entry.gid_index).ok()?, u8::try_from(port.active_mtu).ok()?);
        let reads = |number: i32| u8::try_from(number.clamp(1, 255)).unwrap_or(1);
        let (speed, address) = (speed(port), IpAddr::V6(address).to_canonical());
        let attributes = PortAttributes {
            name: format!("{name}:{number}:{gid_index}, {layer}, {} Gbit/s, {address}", speed / 1000),
            gid,
            lid: port.lid,
            layer,
            pkey_index,
            mtu,
            reads_out: reads(limits.max_qp_init_rd_atom),
            reads_in: reads(limits.max_qp_rd_atom),
            is_limited: memory_limit().is_some(),
        };
        let is_global = match layer {
            LinkLayer::InfiniBand => fabric.is_global.unwrap_or(port.flags & GLOBAL_REQUIRED != 0),
            _ => true,
        };
        let queue_max = u32::try_from(limits.max_qp_wr.min(limits.max_cqe)).unwrap_or(0);
        let completions_max = u32::try_from(limits.max_cqe).unwrap_or(0);
        let message_max = port.max_msg_sz.clamp(MESSAGE_LEAST, CHUNK_BYTES_MAX);
        let candidate = PortCandidate {
            device: name.to_owned(),
            port: number,
            gid: gid_index,
            address,
            layer,
            speed,
            is_near,
            is_here: layer == LinkLayer::InfiniBand || is_of_this_namespace(address, entry.ndev_ifindex),
        };
        let (handle, fabric) = (Arc::clone(handle), fabric.clone());
        let port =
            Self { handle, attributes, number, gid_index, is_global, fabric, queue_max, completions_max, message_max };
        Some((candidate, port))
    }

    /// Send queue entries, when every payload has the largest length.
    pub(super) fn sends(&self, capacity: &PairCapacity) -> u32 {
        capacity.posted_max * CHUNK_BYTES_MAX.div_ceil(self.message_max)
    }
}

/// The keys of a port's partitions, by their places, each read when it is asked for; none where sysfs does not say
/// them.
fn partition_keys(sysfs: &Path, port: u8) -> impl Iterator<Item = u16> {
    let key = move |index: u32| {
        let text = std::fs::read_to_string(sysfs.join(format!("ports/{port}/pkeys/{index}"))).ok()?;
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    (0..).map_while(key)
}

/// The place of the key that is wanted; by default of the first with full membership, and else the first.
fn pkey_index(keys: impl IntoIterator<Item = u16>, wanted: Option<PartitionKey>) -> Result<u16, String> {
    /// The bit of full membership. Limited members of a partition do not reach one another.
    const FULL: u16 = 0x8000;
    let mut keys = keys.into_iter();
    let place = match wanted {
        Some(PartitionKey::Index(index)) => return Ok(index),
        Some(PartitionKey::Value(value)) => {
            let alike = |key: u16| key & !FULL == value & !FULL;
            let keys: Vec<u16> = keys.collect();
            let place = |is_match: &dyn Fn(u16) -> bool| keys.iter().position(|key| is_match(*key));
            let found = place(&|key| key == value).or_else(|| place(&|key| alike(key) && key & FULL != 0));
            found.or_else(|| place(&alike)).ok_or_else(|| {
                let known: Vec<String> =
                    keys.iter().filter(|key| **key != 0).map(|key| format!("{key:#06x}")).collect();
                format!("no partition with the key {value:#06x}; expected one of {}", known.join(", "))
            })?
        }
        None => keys.position(|key| key & FULL != 0).unwrap_or(0),
    };
    Ok(u16::try_from(place).expect("a table has at most 65,536"))
}

/// Megabits per second of a port, by the numbers of the InfiniBand specification: 2.5 Gbit/s for each lane of speed 1.
fn speed(port: &ibv_port_attr) -> u32 {
    let lane = match port.active_speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        // Not said.
        0 => 2_500,
        // A speed that these attributes have no number for is a newer one.
        _ => 200_000,
    };
    let lanes = match port.active_width {
        1 => 1,
        16 => 2,
        4 => 8,
        8 => 12,
        _ => 4,
    };
    lane * lanes
}

/// Whether an address is one of this network namespace: then a socket can have it.
fn is_of_this_namespace(address: IpAddr, interface: u32) -> bool {
    match address {
        IpAddr::V6(address) if address.is_unicast_link_local() => {
            interface == 0 || is_of_this_host(SocketAddrV6::new(address, 0, 0, interface))
        }
        address => is_of_this_host((address, 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_without_our_queue_pairs_are_refused_by_name() {
        assert_eq!(why_unusable("mlx5_0", IBV_TRANSPORT_IB), None);
        let check = |name, transport, words: &str| {
            let text = why_unusable(name, transport).expect("it is not usable");
            assert!(text.contains(words) && text.contains("expected"), "{text}");
        };
        check("rocep1s0f0", IBV_TRANSPORT_IWARP, "enable_roce");
        check("rdmap0s6", IBV_TRANSPORT_UNSPECIFIED, "EFA");
        check("efa_0", IBV_TRANSPORT_UNSPECIFIED, "libfabric");
        check("usnic_0", IBV_TRANSPORT_USNIC_UDP, "without reliable-connected queue pairs");
    }

    #[test]
    fn a_partition_is_the_one_that_is_named_or_the_first_with_full_membership() {
        let keys = [0x7fff, 0xffff, 0x0001, 0x8002, 0x0000];
        let check = |wanted, expected| assert_eq!(pkey_index(keys, wanted), Ok(expected), "{wanted:?}");
        check(None, 1);
        check(Some(PartitionKey::Index(2)), 2);
        check(Some(PartitionKey::Value(0x7fff)), 0);
        check(Some(PartitionKey::Value(0xffff)), 1);
        check(Some(PartitionKey::Value(0x8001)), 2);
        check(Some(PartitionKey::Value(0x0002)), 3);
        let refused = pkey_index(keys, Some(PartitionKey::Value(0x8003))).expect_err("there is none");
        assert_eq!(refused, "no partition with the key 0x8003; expected one of 0x7fff, 0xffff, 0x0001, 0x8002");
        assert_eq!(pkey_index([], None), Ok(0));
        assert_eq!(pkey_index([0x7fff], None), Ok(0));
    }

    #[test]
    fn a_speed_is_that_of_all_lanes() {
        let check = |active_speed, active_width, expected| {
            assert_eq!(speed(&ibv_port_attr { active_speed, active_width, ..ibv_port_attr::default() }), expected);
        };
        check(128, 2, 400_000);
        check(64, 2, 200_000);
        check(32, 2, 100_000);
        check(32, 1, 25_000);
        check(4, 2, 40_000);
        check(1, 8, 30_000);
        check(0, 2, 10_000);
        check(255, 2, 800_000);
    }

    #[test]
    fn an_address_is_of_this_namespace_where_a_socket_can_have_it() {
        let check = |address: &str, interface, expected| {
            assert_eq!(is_of_this_namespace(address.parse().expect("an address"), interface), expected, "{address}");
        };
        check("127.0.0.2", 1, true);
        check("192.0.2.1", 2, false);
        check("2001:db8::1", 2, false);
        check("fe80::1", 4_000_000, false);
        check("fe80::1", 0, true);
    }
}

//! A libibverbs for tests, whose devices are those of a table. It is opened as `libibverbs.so.1` by the shipped way.
//!
//! `PSERVER_FALSE_IBVERBS` names the table. A line is a device, a port of the device before, or a GID of the port
//! before:
//!
//! ```text
//! device mlx5_0 ib /sys/class/infiniband/mlx5_0      ib, iwarp, usnic or unspecified; its folder in sysfs
//! port active ib 128x2 lid=7 flags=0                 state, link layer, speed and width as the specification numbers
//! gid 0 ib fe80::1                                   index; ib, roce1 or roce2; address
//! ```
//!
//! The devices carry connections within the process (`fabric`), and `false_ibverbs_event` reports an event of them.
//!
//! `PSERVER_FALSE_IBVERBS_LOG` names a file that gets a line for each device that is opened or closed, and for each
//! call that prepares for forks.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int};
use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::net::IpAddr;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::{env, fs, ptr};

#[path = "../../src/verbs/sys/bindings.rs"]
mod bindings;
mod fabric;

#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use bindings::*;

/// The length of a port's table of addresses.
const GIDS: c_int = 300;
/// EINVAL
const INVALID: c_int = 22;
/// EAGAIN
const AGAIN: c_int = 11;

struct FalseDevice {
    of_list: ibv_device,
    ports: Mutex<Vec<FalsePort>>,
}

#[derive(Clone)]
struct FalsePort {
    attributes: ibv_port_attr,
    gids: Vec<ibv_gid_entry>,
}

/// The devices of the table, for the rest of the process.
struct Host(Vec<FalseDevice>);

// SAFETY: the pointers in it are null, and it is only read.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(read_table)
}

/// The host of the table, as it is now.
fn read_table() -> Host {
    let path = env::var("PSERVER_FALSE_IBVERBS").expect("PSERVER_FALSE_IBVERBS names the table");
    let mut devices: Vec<FalseDevice> = Vec::new();
    for line in fs::read_to_string(path).expect("the table can be read").lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["device", name, transport, sysfs] => devices.push(FalseDevice::new(name, transport, sysfs)),
            ["port", state, layer, speed, lid, flags] => {
                let device = devices.last_mut().expect("a device is before its ports");
                device.ports().push(FalsePort::new(state, layer, speed, (lid, flags)));
            }
            ["gid", index, kind, address] => {
                let mut ports = devices.last_mut().expect("a device is before its addresses").ports();
                let number = u32::try_from(ports.len()).expect("there are few");
                ports.last_mut().expect("a port is before its addresses").add(number, index, kind, address);
            }
            [] => {}
            _ => panic!("a line of another kind: {line}"),
        }
    }
    Host(devices)
}

impl FalseDevice {
    fn new(name: &str, transport: &str, sysfs: &str) -> Self {
        let transport_type = match transport {
            "ib" => IBV_TRANSPORT_IB,
            "iwarp" => IBV_TRANSPORT_IWARP,
            "usnic" => IBV_TRANSPORT_USNIC_UDP,
            _ => IBV_TRANSPORT_UNSPECIFIED,
        };
        let mut of_list = ibv_device { transport_type, ..ibv_device::default() };
        write(&mut of_list.name, name);
        write(&mut of_list.ibdev_path, sysfs);
        Self { of_list, ports: Mutex::default() }
    }

    fn ports(&self) -> MutexGuard<'_, Vec<FalsePort>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> &CStr {
        // SAFETY: `write` has put an end behind the name.
        unsafe { CStr::from_ptr(self.of_list.name.as_ptr()) }
    }
}

/// A descriptor that is readable as often as it was raised.
struct RaisedDescriptor(UnixStream);

impl RaisedDescriptor {
    /// The side that raises it, and the descriptor.
    fn new() -> (Self, c_int) {
        let (near, far) = UnixStream::pair().expect("descriptors are left");
        (Self(near), far.into_raw_fd())
    }

    fn raise(&mut self) {
        self.0.write_all(&[1]).expect("nobody raises it so often");
    }

    /// Takes one raising back, if there is one.
    fn lower(descriptor: c_int) {
        // SAFETY: the caller's descriptor is open, and is not closed here.
        let mut far = ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(descriptor) });
        far.read_exact(&mut [0; 1]).expect("it was raised");
    }
}

/// Events of a device's context that were not read.
struct Events {
    waiting: VecDeque<(ibv_event_type, c_int)>,
    signal: RaisedDescriptor,
}

/// The open contexts, by address.
static CONTEXTS: Mutex<BTreeMap<usize, Events>> = Mutex::new(BTreeMap::new());

fn contexts() -> MutexGuard<'static, BTreeMap<usize, Events>> {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the table again, and reports an event to every open context.
#[unsafe(no_mangle)]
extern "C" fn false_ibverbs_event(kind: ibv_event_type, port: c_int) {
    for (device, now) in host().0.iter().zip(read_table().0) {
        assert_eq!(device.name(), now.name(), "a table keeps its devices");
        device.ports().clone_from(&now.ports());
    }
    for events in contexts().values_mut() {
        events.waiting.push_back((kind, port));
        events.signal.raise();
    }
}

impl FalsePort {
    fn new(state: &str, layer: &str, speed: &str, (lid, flags): (&str, &str)) -> Self {
        let (active_speed, active_width) = speed.split_once('x').expect("a speed and a width");
        let after = |text: &str, name: &str| text.strip_prefix(name).expect("a name and a number").to_owned();
        let link_layer = if layer == "ib" { IBV_LINK_LAYER_INFINIBAND } else { IBV_LINK_LAYER_ETHERNET };
        let attributes = ibv_port_attr {
            state: if state == "active" { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN },
            max_mtu: 5,
            active_mtu: 5,
            gid_tbl_len: GIDS,
            // Longer payloads take several requests.
            max_msg_sz: 1 << 20,
            lid: number(&after(lid, "lid=")),
            flags: number(&after(flags, "flags=")),
            active_speed: number(active_speed),
            active_width: number(active_width),
            link_layer: u8::try_from(link_layer).expect("it is 1 or 2"),
            ..ibv_port_attr::default()
        };
        Self { attributes, gids: Vec::new() }
    }

    fn add(&mut self, port_num: u32, index: &str, kind: &str, address: &str) {
        let octets = match address.parse().expect("an address") {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        let gid_type = match kind {
            "ib" => IBV_GID_TYPE_IB,
            "roce1" => IBV_GID_TYPE_ROCE_V1,
            _ => IBV_GID_TYPE_ROCE_V2,
        };
        let gid = ibv_gid { raw: octets };
        self.gids.push(ibv_gid_entry { gid, gid_index: number(index), port_num, gid_type, ndev_ifindex: 0 });
    }
}

fn number<T: std::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("{text} is no number"))
}

fn write(into: &mut [c_char], text: &str) {
    let text = CString::new(text).expect("it has no zeros");
    let length = text.as_bytes_with_nul().len();
    assert!(length <= into.len(), "{text:?} is too long");
    // SAFETY: both have room for so many letters, and are not the same memory.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), into.as_mut_ptr(), length) };
}

fn log(what: &str, device: &FalseDevice) {
    note(&format!("{what} {}", device.name().to_string_lossy()));
}

/// Adds a line to the log.
fn note(line: &str) {
    let Ok(path) = env::var("PSERVER_FALSE_IBVERBS_LOG") else { return };
    let mut file = fs::File::options().append(true).create(true).open(path).expect("the log can be written");
    writeln!(file, "{line}").expect("the log can be written");
}

/// A device of the list.
fn listed(device: *const ibv_device) -> &'static FalseDevice {
    let known = host().0.iter().find(|one| ptr::eq(&raw const one.of_list, device));
    known.expect("a device of the list")
}

fn device_of(context: *mut ibv_context) -> &'static FalseDevice {
    // SAFETY: the context is one that `ibv_open_device` made.
    let context = unsafe { &*context };
    listed(context.device)
}

/// Whether ports of this host have both addresses of a path by GIDs: the peer's, and this one's index.
fn is_reached(path: &ibv_ah_attr) -> bool {
    let ports: Vec<FalsePort> = host().0.iter().flat_map(|device| device.ports().clone()).collect();
    let mut gids = ports.iter().flat_map(|port| &port.gids);
    // SAFETY: a GID is sixteen bytes in either form.
    let raw = |gid: &ibv_gid| unsafe { gid.raw };
    let has = |gid: &ibv_gid_entry| raw(&gid.gid) == raw(&path.grh.dgid);
    path.is_global == 0 || gids.clone().any(has) && gids.any(|gid| gid.gid_index == u32::from(path.grh.sgid_index))
}

/// A host whose `PSERVER_FALSE_IBVERBS_FORK` is `old` has a kernel before 5.12.
#[unsafe(no_mangle)]
extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    if env::var("PSERVER_FALSE_IBVERBS_FORK").is_ok_and(|kernel| kernel == "old") {
        return IBV_FORK_DISABLED;
    }
    IBV_FORK_UNNEEDED
}

#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    note("fork_init");
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = host().0.iter().map(|one| (&raw const one.of_list).cast_mut()).chain([ptr::null_mut()]);
    let list: Box<[*mut ibv_device]> = devices.collect();
    // SAFETY: the caller's place for a number.
    unsafe { count.write(c_int::try_from(list.len() - 1).expect("there are few")) };
    Box::leak(list).as_mut_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let whole = ptr::slice_from_raw_parts_mut(list, host().0.len() + 1);
    // SAFETY: `ibv_get_device_list` leaked it, with this length.
    drop(unsafe { Box::from_raw(whole) });
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    listed(device).of_list.name.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    log("open", listed(device));
    let (signal, async_fd) = RaisedDescriptor::new();
    let mut context = ibv_context { device, async_fd, ..ibv_context::default() };
    context.ops.post_send = Some(fabric::post_send);
    context.ops.post_recv = Some(fabric::post_recv);
    context.ops.poll_cq = Some(fabric::poll_cq);
    context.ops.req_notify_cq = Some(fabric::req_notify_cq);
    let context = Box::into_raw(Box::new(context));
    contexts().insert(context.addr(), Events { waiting: VecDeque::new(), signal });
    context
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    log("close", device_of(context));
    contexts().remove(&context.addr());
    // SAFETY: `ibv_open_device` made it.
    let context = unsafe { Box::from_raw(context) };
    // SAFETY: the descriptor is the context's, which ends here.
    drop(unsafe { OwnedFd::from_raw_fd(context.async_fd) });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, into: *mut ibv_async_event) -> c_int {
    let mut contexts = contexts();
    let events = contexts.get_mut(&context.addr()).expect("an open device");
    let Some((event_type, port_num)) = events.waiting.pop_front() else { return fabric::again() };
    // SAFETY: the context is open.
    RaisedDescriptor::lower(unsafe { (*context).async_fd });
    let mut event = ibv_async_event { element: ibv_async_event__bindgen_ty_1 { qp: ptr::null_mut() }, event_type };
    event.element.port_num = port_num;
    // SAFETY: the caller's place for an event.
    unsafe { into.write(event) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_async_event(_: *mut ibv_async_event) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, into: *mut ibv_device_attr) -> c_int {
    let limits = ibv_device_attr {
        phys_port_cnt: u8::try_from(device_of(context).ports().len()).expect("there are few"),
        max_qp_wr: 32768,
        max_cqe: 1 << 22,
        max_qp_rd_atom: 16,
        max_qp_init_rd_atom: 16,
        ..ibv_device_attr::default()
    };
    // SAFETY: the caller's place for the limits.
    unsafe { into.write(limits) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, number: u8, into: *mut ibv_port_attr) -> c_int {
    let Some(port) = device_of(context).ports().get(usize::from(number) - 1).cloned() else { return INVALID };
    // SAFETY: the caller's place for the attributes.
    unsafe { into.write(port.attributes) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(context: *mut ibv_context, number: u8, index: c_int, into: *mut ibv_gid) -> c_int {
    let Some(port) = device_of(context).ports().get(usize::from(number) - 1).cloned() else { return INVALID };
    let known = port.gids.iter().find(|gid| gid.gid_index == index.cast_unsigned());
    // SAFETY: the caller's place for the address.
    unsafe { into.write(known.map_or(ibv_gid { raw: [0; 16] }, |gid| gid.gid)) };
    0
}

/// As the kernel does: fewer places than addresses are an error.
#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    into: *mut ibv_gid_entry,
    most: usize,
    _: u32,
    _: usize,
) -> isize {
    let ports = device_of(context).ports();
    let gids: Vec<ibv_gid_entry> = ports.iter().flat_map(|port| port.gids.iter().copied()).collect();
    if most < gids.len() {
        return -(INVALID as isize);
    }
    // SAFETY: the caller has room for `most` entries.
    unsafe { ptr::copy_nonoverlapping(gids.as_ptr(), into, gids.len()) };
    gids.len().cast_signed()
}

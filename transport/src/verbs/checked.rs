//! Checked calls of libibverbs: a null pointer or an error number becomes a [`VerbsError`] with the system's text.
//!
//! The library is opened on first use, once per process. Every argument of a call here was made by a call here and is
//! destroyed once, by its owner in `hardware_device`.

use std::ffi::{CStr, c_int};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::reasons::VerbsError;
use super::reasons::{self, UnavailableCause};
use super::sys;
#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use super::sys::*;

/// Calls an exported function of libibverbs, if this version has it.
macro_rules! call {
    ($verbs:expr, $function:ident $(, $argument:expr)*) => {
        match $verbs.$function.as_ref() {
            // SAFETY: the arguments point to objects that this layer's owners have opened and not closed, or to values
            // that outlive the call; libibverbs may be called from any thread.
            Ok(function) => Ok(unsafe { function($($argument),*) }),
            Err(error) => Err(VerbsError::new(format!("{error}"))),
        }
    };
}

/// The library, or the reason why it cannot be opened.
pub(super) fn library() -> Result<&'static Verbs, VerbsError> {
    static LIBRARY: OnceLock<Result<Verbs, VerbsError>> = OnceLock::new();
    let handle = LIBRARY.get_or_init(|| {
        // SAFETY: opening libibverbs runs its constructors, which only set up the library's own tables.
        let handle = unsafe { Verbs::new("libibverbs.so.1") };
        let missing = |error| VerbsError::new(reasons::text(&UnavailableCause::Library(format!("{error}")), None));
        let verbs = handle.map_err(missing)?;
        // Kernels from 5.12 on copy registered pages at a fork, and need nothing. On older ones, the first write after
        // a fork would give this process another page than the card has. Then registered pages are kept from the child
        // (MADV_DONTFORK), which ends when it touches one: a loud failure in place of a silent one. The call fails
        // where another library of the process, such as MPI, has registered memory before.
        if !copies_at_fork(&verbs)
            && let Err(fault) = call!(verbs, ibv_fork_init).and_then(|code| zero(code, "preparing for forks"))
        {
            tracing::warn!("verbs: {fault}: memory was registered before");
        }
        Ok(verbs)
    });
    handle.as_ref().map_err(Clone::clone)
}

/// Whether the kernel copies registered pages at a fork. A library before rdma-core 35 does not say it.
pub(super) fn copies_at_fork(verbs: &Verbs) -> bool {
    call!(verbs, ibv_is_fork_initialized).is_ok_and(|status| status == IBV_FORK_UNNEEDED)
}

/// An open device.
pub(super) type ContextPointer = NonNull<ibv_context>;

/// A device in the library's list, while the list is there.
pub(super) struct ListedDevice {
    pub(super) name: String,
    pub(super) transport: ibv_transport_type,
    /// Its folder in sysfs.
    pub(super) sysfs: PathBuf,
    device: *mut ibv_device,
}

impl ListedDevice {
    /// Opens it. The caller closes the context.
    pub(super) fn open(&self, verbs: &Verbs) -> Result<ContextPointer, VerbsError> {
        found(call!(verbs, ibv_open_device, self.device)?, "opening a device")
    }
}

/// Visits every device.
pub(super) fn each_device(verbs: &Verbs, mut visit: impl FnMut(ListedDevice)) -> Result<(), VerbsError> {
    let mut count: c_int = 0;
    let list = call!(verbs, ibv_get_device_list, &raw mut count)?;
    let list = NonNull::new(list).ok_or_else(|| reasons::unlisted(&io::Error::last_os_error()))?;
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries.
        let entry = unsafe { list.add(index) };
        // SAFETY: it is one of them, and the list is not freed yet.
        let device = unsafe { entry.read() };
        let name = call!(verbs, ibv_get_device_name, device)?;
        // SAFETY: the name of a device in a list is a C string as long as the list is there.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        // SAFETY: the device of a list that is not freed yet, whose description is not written.
        let ibv_device { transport_type: transport, ibdev_path, .. } = unsafe { device.read() };
        // SAFETY: the path is a C string with an end.
        let sysfs = unsafe { CStr::from_ptr(ibdev_path.as_ptr()) };
        let sysfs = PathBuf::from(sysfs.to_string_lossy().into_owned());
        visit(ListedDevice { name, transport, sysfs, device });
    }
    call!(verbs, ibv_free_device_list, list.as_ptr())
}

pub(super) fn close(verbs: &Verbs, context: ContextPointer) -> Result<(), VerbsError> {
    zero(call!(verbs, ibv_close_device, context.as_ptr())?, "closing a device")
}

/// The descriptor that is readable when the device has an asynchronous event.
pub(super) fn events(context: ContextPointer) -> c_int {
    // SAFETY: the device is open, and its descriptor never changes.
    unsafe { context.as_ref() }.async_fd
}

/// The next asynchronous event and its port, if there is one. The descriptor does not block.
pub(super) fn event(verbs: &Verbs, context: ContextPointer) -> Result<Option<(ibv_event_type, c_int)>, VerbsError> {
    let nothing = ibv_async_event { element: ibv_async_event__bindgen_ty_1 { port_num: 0 }, event_type: 0 };
    let mut event = nothing;
    if call!(verbs, ibv_get_async_event, context.as_ptr(), &raw mut event)? != 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock => Ok(None),
            _ => Err(VerbsError::new(format!("reading an event of a device: {error}"))),
        };
    }
    // Destroying an object blocks until its events are acknowledged.
    call!(verbs, ibv_ack_async_event, &raw mut event)?;
    // SAFETY: an event is told with its union written whole or zero, and any bits are a number.
    Ok(Some((event.event_type, unsafe { event.element.port_num })))
}

/// Whether the device supports dma-buf: it does if it rejects an invalid descriptor as a bad descriptor.
pub(super) fn try_device_memory(verbs: &Verbs, domain: NonNull<ibv_pd>) -> Result<(), VerbsError> {
    let access = IBV_ACCESS_LOCAL_WRITE.cast_signed();
    let region = call!(verbs, ibv_reg_dmabuf_mr, domain.as_ptr(), 0, 4096, 0, -1, access)?;
    let Some(region) = NonNull::new(region) else {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            // EBADF
            Some(9) => Ok(()),
            _ => Err(VerbsError::new(format!("registering it by dma-buf: {error}"))),
        };
    };
    deregister(verbs, region)?;
    Err(VerbsError::new("the device registers an invalid descriptor"))
}

pub(super) fn limits(verbs: &Verbs, context: ContextPointer) -> Result<ibv_device_attr, VerbsError> {
    let mut limits = ibv_device_attr::default();
    zero(call!(verbs, ibv_query_device, context.as_ptr(), &raw mut limits)?, "asking for a device's limits")?;
    Ok(limits)
}

pub(super) fn port(verbs: &Verbs, context: ContextPointer, number: u8) -> Result<ibv_port_attr, VerbsError> {
    let mut port = ibv_port_attr::default();
    // The exported function fills the fields of every version; a library may lack the extended one of the C headers.
    let asked = call!(verbs, ibv_query_port, context.as_ptr(), number, (&raw mut port).cast())?;
    zero(asked, "asking for a port")?;
    Ok(port)
}

/// The GIDs of a device's port, without empty entries. `sysfs` is the device's folder there.
pub(super) fn gids(
    verbs: &Verbs,
    context: ContextPointer,
    number: u8,
    port: &ibv_port_attr,
    sysfs: &Path,
) -> Result<Vec<ibv_gid_entry>, VerbsError> {
    if verbs._ibv_query_gid_table.is_err() {
        return each_gid(verbs, context, number, port, sysfs);
    }
    /// Entries of all ports that are asked for, and more where these are too few.
    const GIDS: [usize; 3] = [512, 4096, 32768];
    let mut known = 0;
    for most in GIDS {
        let mut gids = vec![ibv_gid_entry::default(); most];
        let size = size_of::<ibv_gid_entry>();
        known = call!(verbs, _ibv_query_gid_table, context.as_ptr(), gids.as_mut_ptr(), most, 0, size)?;
        if let Ok(count) = usize::try_from(known) {
            gids.truncate(count);
            gids.retain(|gid| gid.port_num == u32::from(number));
            return Ok(gids);
        }
    }
    Err(VerbsError::new(format!("asking for a device's addresses: error {}", known.unsigned_abs())))
}

/// The same from a library before rdma-core 32, which tells GIDs one by one; their types are in sysfs.
fn each_gid(
    verbs: &Verbs,
    context: ContextPointer,
    number: u8,
    port: &ibv_port_attr,
    sysfs: &Path,
) -> Result<Vec<ibv_gid_entry>, VerbsError> {
    let is_infiniband = u32::from(port.link_layer) != IBV_LINK_LAYER_ETHERNET;
    let attributes = sysfs.join(format!("ports/{number}/gid_attrs"));
    let attribute = |of: &str, index: c_int| std::fs::read_to_string(attributes.join(format!("{of}/{index}")));
    let mut gids = Vec::new();
    for index in 0..port.gid_tbl_len {
        let mut gid = ibv_gid::default();
        let code = call!(verbs, ibv_query_gid, context.as_ptr(), number, index, &raw mut gid)?;
        // SAFETY: a GID is sixteen bytes in either form.
        if code != 0 || unsafe { gid.raw } == [0; 16] {
            continue;
        }
        let gid_type = match attribute("types", index).as_deref().map(str::trim) {
            Ok("RoCE v2") => IBV_GID_TYPE_ROCE_V2,
            _ if is_infiniband => IBV_GID_TYPE_IB,
            _ => continue,
        };
        let interface = attribute("ndevs", index).ok();
        let interface =
            interface.and_then(|name| std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", name.trim())).ok());
        let ndev_ifindex = interface.and_then(|number| number.trim().parse().ok()).unwrap_or(0);
        let (gid_index, port_num) = (index.unsigned_abs(), number.into());
        gids.push(ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex });
    }
    Ok(gids)
}

pub(super) fn channel(verbs: &Verbs, context: ContextPointer) -> Result<NonNull<ibv_comp_channel>, VerbsError> {
    found(call!(verbs, ibv_create_comp_channel, context.as_ptr())?, "making a completion channel")
}

pub(super) fn close_channel(verbs: &Verbs, channel: NonNull<ibv_comp_channel>) -> Result<(), VerbsError> {
    zero(call!(verbs, ibv_destroy_comp_channel, channel.as_ptr())?, "destroying a completion channel")
}

/// The completion queue of the next notification on a channel, if there is one.
pub(super) fn announced(
    verbs: &Verbs,
    channel: NonNull<ibv_comp_channel>,
) -> Result<Option<NonNull<ibv_cq>>, VerbsError> {
    let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
    let code = call!(verbs, ibv_get_cq_event, channel.as_ptr(), &raw mut queue, &raw mut context)?;
    if code == 0 {
        return Ok(NonNull::new(queue));
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock {
        return Ok(None);
    }
    Err(VerbsError::new(format!("reading a completion channel: {error}")))
}

pub(super) fn acknowledge(verbs: &Verbs, queue: NonNull<ibv_cq>, events: u32) -> Result<(), VerbsError> {
    call!(verbs, ibv_ack_cq_events, queue.as_ptr(), events)
}

pub(super) fn domain(verbs: &Verbs, context: ContextPointer) -> Result<NonNull<ibv_pd>, VerbsError> {
    found(call!(verbs, ibv_alloc_pd, context.as_ptr())?, "making a protection domain")
}

pub(super) fn close_domain(verbs: &Verbs, domain: NonNull<ibv_pd>) -> Result<(), VerbsError> {
    zero(call!(verbs, ibv_dealloc_pd, domain.as_ptr())?, "destroying a protection domain")
}

/// Registers `bytes` bytes at `address`, which the caller keeps mapped. `is_relaxed`: writes of the card may pass one
/// another, where library and kernel know it. Nothing here reads memory before the completion that announces it.
pub(super) fn register(
    verbs: &Verbs,
    domain: NonNull<ibv_pd>,
    (address, bytes): (usize, usize),
    access: ibv_access_flags,
    is_relaxed: bool,
) -> Result<NonNull<ibv_mr>, io::Error> {
    let start = std::ptr::with_exposed_provenance_mut(address);
    if is_relaxed && verbs.ibv_reg_mr_iova2.is_ok() {
        let relaxed = access | IBV_ACCESS_RELAXED_ORDERING;
        let region = call!(verbs, ibv_reg_mr_iova2, domain.as_ptr(), start, bytes, address as u64, relaxed);
        if let Ok(Some(region)) = region.map(NonNull::new) {
            return Ok(region);
        }
    }
    let region = call!(verbs, ibv_reg_mr, domain.as_ptr(), start, bytes, access.cast_signed());
    NonNull::new(region.map_err(io::Error::other)?).ok_or_else(io::Error::last_os_error)
}

/// A region's local and remote key.
pub(super) fn keys(region: NonNull<ibv_mr>) -> (u32, u32) {
    // SAFETY: the region was just registered, and its description is not written.
    let region = unsafe { region.as_ref() };
    (region.lkey, region.rkey)
}

pub(super) fn deregister(verbs: &Verbs, region: NonNull<ibv_mr>) -> Result<(), VerbsError> {
    zero(call!(verbs, ibv_dereg_mr, region.as_ptr())?, "deregistering memory")
}

pub(super) fn queue(
    verbs: &Verbs,
    context: ContextPointer,
    entries: u32,
    channel: NonNull<ibv_comp_channel>,
) -> Result<NonNull<ibv_cq>, VerbsError> {
    let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
    let (nobody, channel) = (std::ptr::null_mut(), channel.as_ptr());
    let queue = call!(verbs, ibv_create_cq, context.as_ptr(), entries, nobody, channel, 0)?;
    found(queue, &format!("making a completion queue of {entries}"))
}

pub(super) fn close_queue(verbs: &Verbs, queue: NonNull<ibv_cq>) -> Result<(), VerbsError> {
    zero(call!(verbs, ibv_destroy_cq, queue.as_ptr())?, "destroying a completion queue")
}

/// Polls completions; the number of filled elements of `done`.
pub(super) fn poll(queue: NonNull<ibv_cq>, done: &mut [ibv_wc]) -> Result<usize, VerbsError> {
    // SAFETY: the queue is open: its owner calls.
    let count = unsafe { sys::poll_cq(queue.as_ptr(), done) };
    usize::try_from(count).map_err(|_| VerbsError::new(format!("the completion queue is lost: error {count}")))
}

/// Arms the queue: the next completion notifies its channel.
pub(super) fn arm(queue: NonNull<ibv_cq>) -> Result<(), VerbsError> {
    // SAFETY: the queue is open: its owner calls.
    zero(unsafe { sys::req_notify_cq(queue.as_ptr(), false) }, "arming a completion queue")
}

/// Makes a queue pair; `wanted` returns its actual capacity.
pub(super) fn pair(
    verbs: &Verbs,
    domain: NonNull<ibv_pd>,
    wanted: &mut ibv_qp_init_attr,
) -> Result<NonNull<ibv_qp>, VerbsError> {
    found(call!(verbs, ibv_create_qp, domain.as_ptr(), &raw mut *wanted)?, "making a queue pair")
}

/// A queue pair's number.
pub(super) fn number(pair: NonNull<ibv_qp>) -> u32 {
    // SAFETY: the pair is open, and its number never changes.
    unsafe { pair.as_ref() }.qp_num
}

pub(super) fn modify(
    verbs: &Verbs,
    pair: NonNull<ibv_qp>,
    wish: &mut ibv_qp_attr,
    mask: ibv_qp_attr_mask,
) -> Result<(), VerbsError> {
    let state = wish.qp_state;
    let modified = call!(verbs, ibv_modify_qp, pair.as_ptr(), &raw mut *wish, mask.cast_signed())?;
    zero(modified, &format!("moving a queue pair to state {state}"))
}

pub(super) fn close_pair(verbs: &Verbs, pair: NonNull<ibv_qp>) -> Result<(), VerbsError> {
    zero(call!(verbs, ibv_destroy_qp, pair.as_ptr())?, "destroying a queue pair")
}

/// Links requests with one scatter-gather entry each, and posts them. The entries name memory of spans.
pub(super) fn post(
    pair: NonNull<ibv_qp>,
    requests: &mut [ibv_send_wr],
    entries: &mut [ibv_sge],
) -> Result<(), VerbsError> {
    assert_eq!(requests.len(), entries.len(), "one entry for each request");
    let mut next = std::ptr::null_mut();
    for (request, entry) in requests.iter_mut().zip(entries).rev() {
        (request.num_sge, request.next) = (c_int::from(entry.length > 0), next);
        request.sg_list = entry;
        next = request;
    }
    // SAFETY: the owner of the open pair calls. The requests and their entries outlive the call; spans name the memory,
    // which `work_requests` owns until the work has completed or the pair is destroyed.
    let (code, _) = unsafe { sys::post_send(pair.as_ptr(), next) };
    zero(code, "posting work")
}

/// Like [`post`], for receives.
pub(super) fn receive(
    pair: NonNull<ibv_qp>,
    requests: &mut [ibv_recv_wr],
    entries: &mut [ibv_sge],
) -> Result<(), VerbsError> {
    assert_eq!(requests.len(), entries.len(), "one entry for each request");
    let mut next = std::ptr::null_mut();
    for (request, entry) in requests.iter_mut().zip(entries).rev() {
        (request.sg_list, request.num_sge, request.next) = (entry, 1, next);
        next = request;
    }
    // SAFETY: as in `post`.
    let (code, _) = unsafe { sys::post_recv(pair.as_ptr(), next) };
    zero(code, "posting room for messages")
}

/// The system destroys a leaked object with the process.
pub(super) fn leave(result: Result<(), VerbsError>) {
    if let Err(fault) = result {
        tracing::warn!(%fault, "an RDMA object was not destroyed; the system frees it with the process");
    }
}

fn found<T>(pointer: *mut T, result: &str) -> Result<NonNull<T>, VerbsError> {
    NonNull::new(pointer).ok_or_else(|| VerbsError::new(format!("{result}: {}", io::Error::last_os_error())))
}

fn zero(code: c_int, result: &str) -> Result<(), VerbsError> {
    match code {
        0 => Ok(()),
        // Some functions return the error number, others set errno.
        code if code > 0 => Err(VerbsError::new(format!("{result}: {}", io::Error::from_raw_os_error(code)))),
        _ => Err(VerbsError::new(format!("{result}: {}", io::Error::last_os_error()))),
    }
}

//! libibverbs with its answers checked: a null pointer or an error number becomes a [`Fault`] with the system's words.
//!
//! The library is opened when it is first needed, once for the process. What a call here is given was made by a call
//! here and is destroyed once, by its owner in `device`.

use std::ffi::{CStr, c_int};
use std::io;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::provider::Fault;
use super::reasons::{self, Cause};
use super::sys;
#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use super::sys::*;

/// Calls an exported function of libibverbs, if this version has it.
macro_rules! call {
    ($verbs:expr, $function:ident $(, $argument:expr)*) => {
        match $verbs.$function.as_ref() {
            // SAFETY: the arguments point to what this layer's owners have opened and not closed, or to values that
            // outlive the call; libibverbs may be called from any thread.
            Ok(function) => Ok(unsafe { function($($argument),*) }),
            Err(error) => Err(Fault::new(format!("{error}"))),
        }
    };
}

/// The library, or why it cannot be had.
pub(super) fn library() -> Result<&'static Verbs, Fault> {
    static LIBRARY: OnceLock<Result<Verbs, Fault>> = OnceLock::new();
    let opened = LIBRARY.get_or_init(|| {
        // SAFETY: opening libibverbs runs its constructors, which only set up the library's own tables.
        let opened = unsafe { Verbs::new("libibverbs.so.1") };
        let missing = |error| Fault::new(reasons::text(&Cause::Library(format!("{error}")), None));
        let verbs = opened.map_err(missing)?;
        // A process that forks must not take registered pages away from its child; systems that copy them need nothing.
        // It is refused where somebody else in the process, MPI perhaps, has registered memory before: they decided.
        if let Err(fault) = call!(verbs, ibv_fork_init).and_then(|code| zero(code, "preparing for forks")) {
            tracing::warn!("verbs: {fault}: memory was registered before");
        }
        Ok(verbs)
    });
    opened.as_ref().map_err(Clone::clone)
}

/// An open device.
pub(super) type Context = NonNull<ibv_context>;

/// Opens every device that opens, and hands its name and context to `keep`, which owns the context from then on.
pub(super) fn open_all(verbs: &Verbs, mut keep: impl FnMut(String, Context)) -> Result<(), Fault> {
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
        match found(call!(verbs, ibv_open_device, device)?, "opening a device") {
            Ok(context) => keep(name, context),
            Err(fault) => tracing::warn!(name, %fault, "an RDMA device does not open"),
        }
    }
    call!(verbs, ibv_free_device_list, list.as_ptr())
}

pub(super) fn close(verbs: &Verbs, context: Context) -> Result<(), Fault> {
    zero(call!(verbs, ibv_close_device, context.as_ptr())?, "closing a device")
}

/// The descriptor that is readable when something has happened to a device.
pub(super) fn events(context: Context) -> c_int {
    // SAFETY: the device is open, and its descriptor never changes.
    unsafe { context.as_ref() }.async_fd
}

/// What has happened to a device, and to which port if it was one; nothing when nothing has. The descriptor does not
/// block.
pub(super) fn event(verbs: &Verbs, context: Context) -> Result<Option<(ibv_event_type, c_int)>, Fault> {
    let nothing = ibv_async_event { element: ibv_async_event__bindgen_ty_1 { port_num: 0 }, event_type: 0 };
    let mut event = nothing;
    if call!(verbs, ibv_get_async_event, context.as_ptr(), &raw mut event)? != 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock => Ok(None),
            _ => Err(Fault::new(format!("reading what happened to a device: {error}"))),
        };
    }
    // What is not acknowledged is waited for when what it is of is destroyed.
    call!(verbs, ibv_ack_async_event, &raw mut event)?;
    // SAFETY: an event is told with its union written whole or zero, and any bits are a number.
    Ok(Some((event.event_type, unsafe { event.element.port_num })))
}

/// What a device says when it is asked to register device memory by a descriptor that is none: a bad descriptor where
/// it would look at one.
pub(super) fn try_device_memory(verbs: &Verbs, domain: NonNull<ibv_pd>) -> Result<(), Fault> {
    let access = IBV_ACCESS_LOCAL_WRITE.cast_signed();
    let region = call!(verbs, ibv_reg_dmabuf_mr, domain.as_ptr(), 0, 4096, 0, -1, access)?;
    let Some(region) = NonNull::new(region) else {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            // EBADF
            Some(9) => Ok(()),
            _ => Err(Fault::new(format!("registering it by dma-buf: {error}"))),
        };
    };
    deregister(verbs, region)?;
    Err(Fault::new("the device registers a descriptor that is none"))
}

pub(super) fn limits(verbs: &Verbs, context: Context) -> Result<ibv_device_attr, Fault> {
    let mut limits = ibv_device_attr::default();
    zero(call!(verbs, ibv_query_device, context.as_ptr(), &raw mut limits)?, "asking for a device's limits")?;
    Ok(limits)
}

pub(super) fn port(verbs: &Verbs, context: Context, number: u8) -> Result<ibv_port_attr, Fault> {
    let mut port = ibv_port_attr::default();
    // The exported function fills the fields that every version has; the one in C's headers may not be known.
    let asked = call!(verbs, ibv_query_port, context.as_ptr(), number, (&raw mut port).cast())?;
    zero(asked, "asking for a port")?;
    Ok(port)
}

/// The addresses of a device's ports, but for those that are empty.
pub(super) fn gids(verbs: &Verbs, context: Context) -> Result<Vec<ibv_gid_entry>, Fault> {
    /// More than cards have in use.
    const GIDS_MAX: usize = 512;
    let mut gids = vec![ibv_gid_entry::default(); GIDS_MAX];
    let size = size_of::<ibv_gid_entry>();
    let known = call!(verbs, _ibv_query_gid_table, context.as_ptr(), gids.as_mut_ptr(), GIDS_MAX, 0, size)?;
    let failed = |_| Fault::new(format!("asking for a device's addresses: error {}", known.unsigned_abs()));
    gids.truncate(usize::try_from(known).map_err(failed)?);
    Ok(gids)
}

pub(super) fn channel(verbs: &Verbs, context: Context) -> Result<NonNull<ibv_comp_channel>, Fault> {
    found(call!(verbs, ibv_create_comp_channel, context.as_ptr())?, "making a completion channel")
}

pub(super) fn close_channel(verbs: &Verbs, channel: NonNull<ibv_comp_channel>) -> Result<(), Fault> {
    zero(call!(verbs, ibv_destroy_comp_channel, channel.as_ptr())?, "destroying a completion channel")
}

/// The queue that an announcement on a channel is of; nothing when there is none.
pub(super) fn announced(verbs: &Verbs, channel: NonNull<ibv_comp_channel>) -> Result<Option<NonNull<ibv_cq>>, Fault> {
    let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
    let code = call!(verbs, ibv_get_cq_event, channel.as_ptr(), &raw mut queue, &raw mut context)?;
    if code == 0 {
        return Ok(NonNull::new(queue));
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock {
        return Ok(None);
    }
    Err(Fault::new(format!("reading a completion channel: {error}")))
}

pub(super) fn acknowledge(verbs: &Verbs, queue: NonNull<ibv_cq>, events: u32) -> Result<(), Fault> {
    call!(verbs, ibv_ack_cq_events, queue.as_ptr(), events)
}

pub(super) fn domain(verbs: &Verbs, context: Context) -> Result<NonNull<ibv_pd>, Fault> {
    found(call!(verbs, ibv_alloc_pd, context.as_ptr())?, "making a protection domain")
}

pub(super) fn close_domain(verbs: &Verbs, domain: NonNull<ibv_pd>) -> Result<(), Fault> {
    zero(call!(verbs, ibv_dealloc_pd, domain.as_ptr())?, "destroying a protection domain")
}

/// Registers `bytes` bytes at `address`, which the caller keeps mapped.
pub(super) fn register(
    verbs: &Verbs,
    domain: NonNull<ibv_pd>,
    (address, bytes): (usize, usize),
    access: ibv_access_flags,
) -> Result<NonNull<ibv_mr>, io::Error> {
    let start = std::ptr::with_exposed_provenance_mut(address);
    let region = call!(verbs, ibv_reg_mr, domain.as_ptr(), start, bytes, access.cast_signed());
    NonNull::new(region.map_err(io::Error::other)?).ok_or_else(io::Error::last_os_error)
}

/// The keys of a region, for this side and for others.
pub(super) fn keys(region: NonNull<ibv_mr>) -> (u32, u32) {
    // SAFETY: the region was just registered, and nobody writes to what describes it.
    let region = unsafe { region.as_ref() };
    (region.lkey, region.rkey)
}

pub(super) fn deregister(verbs: &Verbs, region: NonNull<ibv_mr>) -> Result<(), Fault> {
    zero(call!(verbs, ibv_dereg_mr, region.as_ptr())?, "deregistering memory")
}

pub(super) fn queue(
    verbs: &Verbs,
    context: Context,
    entries: u32,
    channel: NonNull<ibv_comp_channel>,
) -> Result<NonNull<ibv_cq>, Fault> {
    let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
    let (nobody, channel) = (std::ptr::null_mut(), channel.as_ptr());
    let queue = call!(verbs, ibv_create_cq, context.as_ptr(), entries, nobody, channel, 0)?;
    found(queue, &format!("making a completion queue of {entries}"))
}

pub(super) fn close_queue(verbs: &Verbs, queue: NonNull<ibv_cq>) -> Result<(), Fault> {
    zero(call!(verbs, ibv_destroy_cq, queue.as_ptr())?, "destroying a completion queue")
}

/// Takes completions; how many of `done` were filled.
pub(super) fn poll(queue: NonNull<ibv_cq>, done: &mut [ibv_wc]) -> Result<usize, Fault> {
    // SAFETY: the queue is open: its owner calls.
    let count = unsafe { sys::poll_cq(queue.as_ptr(), done) };
    usize::try_from(count).map_err(|_| Fault::new(format!("the completion queue is lost: error {count}")))
}

/// Announces the next completion on the queue's channel.
pub(super) fn arm(queue: NonNull<ibv_cq>) -> Result<(), Fault> {
    // SAFETY: the queue is open: its owner calls.
    zero(unsafe { sys::req_notify_cq(queue.as_ptr(), false) }, "arming a completion queue")
}

/// Makes a queue pair; `wanted` then says what it has.
pub(super) fn pair(
    verbs: &Verbs,
    domain: NonNull<ibv_pd>,
    wanted: &mut ibv_qp_init_attr,
) -> Result<NonNull<ibv_qp>, Fault> {
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
) -> Result<(), Fault> {
    let state = wish.qp_state;
    let modified = call!(verbs, ibv_modify_qp, pair.as_ptr(), &raw mut *wish, mask.cast_signed())?;
    zero(modified, &format!("moving a queue pair to state {state}"))
}

pub(super) fn close_pair(verbs: &Verbs, pair: NonNull<ibv_qp>) -> Result<(), Fault> {
    zero(call!(verbs, ibv_destroy_qp, pair.as_ptr())?, "destroying a queue pair")
}

/// Links requests with their entries, one each, and hands them over. What they name is memory of spans.
pub(super) fn post(pair: NonNull<ibv_qp>, requests: &mut [ibv_send_wr], entries: &mut [ibv_sge]) -> Result<(), Fault> {
    assert_eq!(requests.len(), entries.len(), "one entry for each request");
    let mut next = std::ptr::null_mut();
    for (request, entry) in requests.iter_mut().zip(entries).rev() {
        (request.num_sge, request.next) = (c_int::from(entry.length > 0), next);
        request.sg_list = entry;
        next = request;
    }
    // SAFETY: the pair is open: its owner calls. The requests and their entries outlive the call; spans name the
    // memory, which `flights` keeps until the work has completed or the pair is destroyed.
    let (code, _) = unsafe { sys::post_send(pair.as_ptr(), next) };
    zero(code, "posting work")
}

/// As [`post`], for messages that will come.
pub(super) fn receive(
    pair: NonNull<ibv_qp>,
    requests: &mut [ibv_recv_wr],
    entries: &mut [ibv_sge],
) -> Result<(), Fault> {
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

fn found<T>(pointer: *mut T, what: &str) -> Result<NonNull<T>, Fault> {
    NonNull::new(pointer).ok_or_else(|| Fault::new(format!("{what}: {}", io::Error::last_os_error())))
}

fn zero(code: c_int, what: &str) -> Result<(), Fault> {
    match code {
        0 => Ok(()),
        // Some say it with a number, some leave it to the system.
        code if code > 0 => Err(Fault::new(format!("{what}: {}", io::Error::from_raw_os_error(code)))),
        _ => Err(Fault::new(format!("{what}: {}", io::Error::last_os_error()))),
    }
}

//! Two queue pairs of one process, connected to each other over a real device, with nothing between a test and the
//! verbs: what a device does is seen here before the transport relies on it.
//!
//! Not here: the transport, and the safe types on top of it. Objects opened here are closed here, in the order of the
//! fields.

mod tests;

use std::ffi::c_int;
use std::ptr;

use crate::verbs::sys::{self, *};

/// Calls an exported function of libibverbs.
macro_rules! call {
    ($verbs:expr, $function:ident, $($argument:expr),*) => {{
        let function = $verbs.$function.as_ref().expect(stringify!($function));
        // SAFETY: the arguments point to what this module has opened and not closed, or to values that outlive this.
        unsafe { function($($argument),*) }
    }};
}
pub(super) use call;

/// Half of an end's memory: sent from the first half, received in the second.
pub(super) const HALF: usize = 8 << 20;

/// An open device.
pub(super) struct ProbeDevice {
    pub(super) verbs: Verbs,
    pub(super) context: *mut ibv_context,
    pub(super) domain: *mut ibv_pd,
    pub(super) limits: ibv_device_attr,
    pub(super) port: ibv_port_attr,
    pub(super) gids: Vec<ibv_gid_entry>,
}

/// A queue pair with its own completion queue, channel and registered memory.
pub(super) struct ProbeEnd<'a> {
    pub(super) device: &'a ProbeDevice,
    pub(super) pair: *mut ibv_qp,
    pub(super) queue: *mut ibv_cq,
    pub(super) channel: *mut ibv_comp_channel,
    pub(super) region: *mut ibv_mr,
    pub(super) memory: Vec<u8>,
    /// The local and the remote key of the region.
    keys: (u32, u32),
}

/// Timeouts and retries of a queue pair.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// Retransmission timeout: 4.096 µs times two to this power.
    pub(super) timeout: u8,
    /// Retransmissions.
    pub(super) retries: u8,
    /// Retries while the receiver has no receive posted; 7 means for ever.
    pub(super) receiver_retries: u8,
}

/// A work request.
#[derive(Clone, Copy)]
pub(super) struct ProbeWork {
    pub(super) opcode: ibv_wr_opcode,
    pub(super) flags: ibv_send_flags,
    pub(super) bytes: usize,
    /// The offset in the first half here and in the second half there; for a READ the other way around.
    pub(super) offset: usize,
    pub(super) id: u64,
}

impl ProbeDevice {
    /// The first device; an error says why there is none.
    pub(super) fn open() -> Result<Self, String> {
        // SAFETY: opening libibverbs runs its constructors, which only set up the library's own tables.
        let verbs = unsafe { Verbs::new("libibverbs.so.1") }.map_err(|error| error.to_string())?;
        let mut count: c_int = 0;
        let list = call!(verbs, ibv_get_device_list, &mut count);
        if list.is_null() || count == 0 {
            return Err("there is no RDMA device".to_owned());
        }
        // SAFETY: the list has `count` entries, at least one.
        let first = unsafe { *list };
        let context = call!(verbs, ibv_open_device, first);
        call!(verbs, ibv_free_device_list, list);
        assert!(!context.is_null(), "the device does not open");
        let domain = call!(verbs, ibv_alloc_pd, context);
        assert!(!domain.is_null(), "no protection domain");
        let (mut limits, mut port) = (ibv_device_attr::default(), ibv_port_attr::default());
        assert_eq!(call!(verbs, ibv_query_device, context, &mut limits), 0);
        assert_eq!(call!(verbs, ibv_query_port, context, 1, (&raw mut port).cast()), 0);
        let mut gids = vec![ibv_gid_entry::default(); 64];
        let size = size_of::<ibv_gid_entry>();
        let known = call!(verbs, _ibv_query_gid_table, context, gids.as_mut_ptr(), gids.len(), 0, size);
        gids.truncate(usize::try_from(known).expect("the table of GIDs is readable"));
        Ok(Self { verbs, context, domain, limits, port, gids })
    }

    /// The GID for packets over UDP: RoCE version 2, of an IPv4 address if there is one.
    pub(super) fn gid(&self) -> &ibv_gid_entry {
        let routable = || self.gids.iter().filter(|entry| entry.gid_type == IBV_GID_TYPE_ROCE_V2);
        let of_address = routable().find(|entry| gid_bytes(entry)[..12] == *b"\0\0\0\0\0\0\0\0\0\0\xff\xff");
        of_address.or_else(|| routable().next()).expect("a GID of RoCE version 2")
    }

    /// Two ends that are connected to each other.
    pub(super) fn pair(&self, patience: Patience) -> (ProbeEnd<'_>, ProbeEnd<'_>) {
        let (near, far) = (ProbeEnd::new(self, 64), ProbeEnd::new(self, 64));
        near.connect(far.number(), patience);
        far.connect(near.number(), patience);
        (near, far)
    }

    /// A queue pair with so many inline bytes, or the error number.
    pub(super) fn queue_pair(&self, queue: *mut ibv_cq, inline: u32) -> Result<*mut ibv_qp, i32> {
        let cap = ibv_qp_cap {
            max_send_wr: 256,
            max_recv_wr: 256,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_data: inline,
        };
        let mut wanted = ibv_qp_init_attr { send_cq: queue, recv_cq: queue, cap, ..ibv_qp_init_attr::default() };
        wanted.qp_type = IBV_QPT_RC;
        let pair = call!(self.verbs, ibv_create_qp, self.domain, &mut wanted);
        if pair.is_null() { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { Ok(pair) }
    }
}

impl Drop for ProbeDevice {
    fn drop(&mut self) {
        call!(self.verbs, ibv_dealloc_pd, self.domain);
        call!(self.verbs, ibv_close_device, self.context);
    }
}

impl<'a> ProbeEnd<'a> {
    fn new(device: &'a ProbeDevice, inline: u32) -> Self {
        let verbs = &device.verbs;
        let channel = call!(verbs, ibv_create_comp_channel, device.context);
        let queue = call!(verbs, ibv_create_cq, device.context, 1024, ptr::null_mut(), channel, 0);
        assert!(!channel.is_null() && !queue.is_null(), "no completion queue");
        let pair = device.queue_pair(queue, inline).expect("a queue pair");
        let mut memory = vec![0; 2 * HALF];
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        let (start, access) = (memory.as_mut_ptr().cast(), access.cast_signed());
        let region = call!(verbs, ibv_reg_mr, device.domain, start, 2 * HALF, access);
        assert!(!region.is_null(), "the memory cannot be registered: {}", std::io::Error::last_os_error());
        // SAFETY: the region was just registered, and nobody writes to what describes it.
        let described = unsafe { &*region };
        let keys = (described.lkey, described.rkey);
        Self { device, pair, queue, channel, region, memory, keys }
    }

    fn number(&self) -> u32 {
        // SAFETY: the queue pair is open.
        unsafe { (*self.pair).qp_num }
    }

    fn connect(&self, other: u32, patience: Patience) {
        let (gid, port) = (self.device.gid(), &self.device.port);
        let access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        let mut wish = ibv_qp_attr { port_num: 1, qp_access_flags: access, ..ibv_qp_attr::default() };
        wish.qp_state = IBV_QPS_INIT;
        self.modify(&mut wish, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
        wish.qp_state = IBV_QPS_RTR;
        (wish.path_mtu, wish.dest_qp_num, wish.max_dest_rd_atomic, wish.min_rnr_timer) =
            (port.active_mtu, other, 16, 12);
        (wish.ah_attr.is_global, wish.ah_attr.port_num) = (1, 1);
        let source = u8::try_from(gid.gid_index).expect("a small table");
        wish.ah_attr.grh = ibv_global_route { dgid: gid.gid, sgid_index: source, hop_limit: 64, ..wish.ah_attr.grh };
        let receiving = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        self.modify(&mut wish, IBV_QP_STATE | receiving | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
        wish.qp_state = IBV_QPS_RTS;
        (wish.timeout, wish.retry_cnt, wish.rnr_retry) =
            (patience.timeout, patience.retries, patience.receiver_retries);
        wish.max_rd_atomic = 16;
        let sending = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN;
        self.modify(&mut wish, IBV_QP_STATE | sending | IBV_QP_MAX_QP_RD_ATOMIC);
    }

    fn modify(&self, wish: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) {
        let error = call!(self.device.verbs, ibv_modify_qp, self.pair, wish, mask.cast_signed());
        assert_eq!(error, 0, "to state {}: {}", wish.qp_state, std::io::Error::from_raw_os_error(error));
    }

    fn entry(&self, at: usize, bytes: usize) -> ibv_sge {
        let addr = self.memory.as_ptr().addr() as u64 + at as u64;
        ibv_sge { addr, length: u32::try_from(bytes).expect("at most 8 MiB"), lkey: self.keys.0 }
    }

    /// Posts a work request; the error number when it is refused.
    pub(super) fn post(&self, other: &ProbeEnd<'_>, work: ProbeWork) -> c_int {
        let mut entry = self.entry(work.offset, work.bytes);
        let remote = other.entry(HALF + work.offset, work.bytes);
        let mut request = ibv_send_wr { wr_id: work.id, sg_list: &mut entry, num_sge: 1, ..ibv_send_wr::default() };
        (request.opcode, request.send_flags) = (work.opcode, work.flags);
        request.__bindgen_anon_1.imm_data = 7_u32.to_be();
        request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.addr, rkey: other.keys.1 };
        // SAFETY: both ends and their memory outlive every test that posts; the entry outlives the call.
        unsafe { sys::post_send(self.pair, &mut request) }.0
    }

    /// Posts a receive into the second half, at `offset`.
    pub(super) fn receive(&self, offset: usize, bytes: usize, id: u64) {
        let mut entry = self.entry(HALF + offset, bytes);
        let mut request = ibv_recv_wr { wr_id: id, next: ptr::null_mut(), sg_list: &mut entry, num_sge: 1 };
        // SAFETY: as for what is posted to be sent.
        let (error, _) = unsafe { sys::post_recv(self.pair, &mut request) };
        assert_eq!(error, 0, "the receive queue takes no more");
    }

    /// The completions so far.
    pub(super) fn poll(&self, done: &mut [ibv_wc]) -> usize {
        // SAFETY: the queue is open.
        let count = unsafe { sys::poll_cq(self.queue, done) };
        usize::try_from(count).expect("the completion queue works")
    }

    /// Asks for an event at the next completion.
    pub(super) fn arm(&self) {
        // SAFETY: the queue is open.
        assert_eq!(unsafe { sys::req_notify_cq(self.queue, false) }, 0);
    }

    /// Waits in the kernel until the event is there, and acknowledges it.
    pub(super) fn sleep(&self) {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        assert_eq!(call!(self.device.verbs, ibv_get_cq_event, self.channel, &mut queue, &mut context), 0);
        call!(self.device.verbs, ibv_ack_cq_events, queue, 1);
    }

    /// Ends the queue pair as a killed process would; the memory stays, so addresses remain valid.
    pub(super) fn destroy_pair(&mut self) {
        let pair = std::mem::replace(&mut self.pair, ptr::null_mut());
        assert_eq!(call!(self.device.verbs, ibv_destroy_qp, pair), 0);
    }

    /// Deregisters the memory early.
    pub(super) fn deregister(&mut self) {
        let region = std::mem::replace(&mut self.region, ptr::null_mut());
        assert_eq!(call!(self.device.verbs, ibv_dereg_mr, region), 0);
    }
}

impl Drop for ProbeEnd<'_> {
    fn drop(&mut self) {
        let verbs = &self.device.verbs;
        if !self.pair.is_null() {
            call!(verbs, ibv_destroy_qp, self.pair);
        }
        call!(verbs, ibv_destroy_cq, self.queue);
        call!(verbs, ibv_destroy_comp_channel, self.channel);
        if !self.region.is_null() {
            call!(verbs, ibv_dereg_mr, self.region);
        }
    }
}

/// The bytes of a GID.
pub(super) fn gid_bytes(entry: &ibv_gid_entry) -> [u8; 16] {
    // SAFETY: a GID is sixteen bytes in either form.
    unsafe { entry.gid.raw }
}

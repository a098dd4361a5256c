//! Data path of the false library: reliable-connected queue pairs within the process, as hostile as cards may be.
//!
//! A thread moves payloads in pieces of a packet, in random order, also those of several work requests of a pair.
//! Memory that a card may write holds [`POISON`] from the call that names it, or from the time at which the card takes
//! the request up, until the last piece is there. A completion comes last, and those of a pair in order. A source is
//! read when its piece is moved, so that memory that is used again too early shows.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::{env, ptr, thread};

#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use crate::bindings::*;
use crate::{AGAIN, INVALID, RaisedDescriptor};

/// Bytes of memory whose contents are not there yet.
const POISON: u8 = 0xdb;
/// Bytes of a packet.
const PIECE: usize = 4096;
/// Work requests of a pair that are moved at once.
const WINDOW: usize = 8;
/// Steps between two looks at the lock.
const STEPS: usize = 32;
/// Inline messages up to this length.
const INLINE_MAX: u32 = 128;

#[derive(Default)]
struct Fabric {
    pairs: BTreeMap<u32, Pair>,
    regions: BTreeMap<u32, FalseRegion>,
    /// By address.
    queues: BTreeMap<usize, FalseQueue>,
    channels: BTreeMap<usize, Channel>,
    made: u32,
    random: u64,
}

struct FalseRegion {
    domain: usize,
    address: u64,
    bytes: u64,
    access: u32,
}

struct Channel {
    /// Queues that have announced a completion.
    announced: VecDeque<usize>,
    signal: RaisedDescriptor,
}

struct FalseQueue {
    channel: usize,
    done: VecDeque<ibv_wc>,
    entries: usize,
    is_armed: bool,
}

struct Pair {
    domain: usize,
    queue: usize,
    access: u32,
    there: u32,
    state: ibv_qp_state,
    receives: VecDeque<WorkMemory>,
    sends: VecDeque<SendRequest>,
}

/// Memory of a work request, with the request's number.
#[derive(Clone, Copy)]
struct WorkMemory {
    id: u64,
    address: u64,
    bytes: usize,
    key: u32,
}

struct SendRequest {
    memory: WorkMemory,
    inline: Option<Vec<u8>>,
    opcode: ibv_wr_opcode,
    is_signaled: bool,
    remote: (u64, u32),
    immediate: u32,
    /// The begins of pieces that were not moved, once the request is taken up.
    pieces: Option<Vec<usize>>,
}

static FABRIC: LazyLock<Mutex<Fabric>> = LazyLock::new(|| {
    thread::spawn(move_for_ever);
    let seed = env::var("PSERVER_FALSE_IBVERBS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    Mutex::new(Fabric { random: seed, ..Fabric::default() })
});
static HAS_WORK: Condvar = Condvar::new();

/// The fabric, whose payloads a thread moves.
fn fabric() -> MutexGuard<'static, Fabric> {
    FABRIC.lock().unwrap_or_else(PoisonError::into_inner)
}

fn move_for_ever() {
    let mut guard = fabric();
    loop {
        let has_moved = (0..STEPS).all(|_| guard.step());
        if has_moved {
            drop(guard);
            thread::yield_now();
            guard = fabric();
        } else {
            guard = HAS_WORK.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Fabric {
    fn number(&mut self) -> u32 {
        self.made += 1;
        self.made.wrapping_mul(0x9e37_79b1) & 0x00ff_ffff
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.random >> 33).expect("it has 31 bits") % limit
    }

    /// Moves one piece, or completes a request; whether there was something to do.
    fn step(&mut self) -> bool {
        let busy = self.pairs.iter().filter(|(_, pair)| !pair.sends.is_empty());
        let mut busy: Vec<u32> = busy.map(|(number, _)| *number).collect();
        while !busy.is_empty() {
            let number = busy.swap_remove(self.below(busy.len()));
            if self.step_pair(number) {
                return true;
            }
        }
        false
    }

    fn step_pair(&mut self, number: u32) -> bool {
        let pair = &self.pairs[&number];
        let window = pair.sends.len().min(WINDOW);
        if pair.sends[0].pieces.as_ref().is_some_and(Vec::is_empty) {
            self.complete(number);
            return true;
        }
        let first = self.below(window);
        for index in (0..window).map(|step| (first + step) % window) {
            match &self.pairs[&number].sends[index].pieces {
                Some(pieces) if pieces.is_empty() => {}
                Some(_) => {
                    self.move_piece(number, index);
                    return true;
                }
                // Requests are taken up in order.
                None if index > 0 && self.pairs[&number].sends[index - 1].pieces.is_none() => {}
                None => match self.take_up(number, index) {
                    Ok(true) => return true,
                    // The peer has no room for a message.
                    Ok(false) => {}
                    Err(status) if index == 0 => {
                        self.fail(number, status);
                        return true;
                    }
                    // Earlier ones are completed first.
                    Err(_) => {}
                },
            }
        }
        false
    }

    /// The peer's receive that a message of this index fills.
    fn receive_of(&self, number: u32, index: usize) -> Option<WorkMemory> {
        let pair = &self.pairs[&number];
        let before = pair.sends.iter().take(index).filter(|request| request.takes_receive()).count();
        self.pairs.get(&pair.there)?.receives.get(before).copied()
    }

    /// Checks a request and begins it; false where the peer has no room.
    fn take_up(&mut self, number: u32, index: usize) -> Result<bool, ibv_wc_status> {
        let pair = &self.pairs[&number];
        let request = &pair.sends[index];
        let (memory, remote, opcode) = (request.memory, request.remote, request.opcode);
        let is_local =
            request.inline.is_some() || self.is_in(memory.key, (memory.address, memory.bytes), pair.domain, 0);
        if !is_local {
            return Err(IBV_WC_LOC_PROT_ERR);
        }
        let there = self.pairs.get(&pair.there).filter(|other| other.there == number && other.state != IBV_QPS_ERR);
        let Some(there) = there else { return Err(IBV_WC_RETRY_EXC_ERR) };
        let access = match opcode {
            IBV_WR_RDMA_READ => IBV_ACCESS_REMOTE_READ,
            _ => IBV_ACCESS_REMOTE_WRITE,
        };
        let is_message = opcode == IBV_WR_SEND;
        let is_allowed =
            there.access & access != 0 && self.is_in(remote.1, (remote.0, memory.bytes), there.domain, access);
        if !is_message && !is_allowed {
            return Err(IBV_WC_REM_ACCESS_ERR);
        }
        let receive = self.receive_of(number, index);
        if request.takes_receive() && receive.is_none() {
            return Ok(false);
        }
        match opcode {
            IBV_WR_SEND if receive.is_some_and(|room| room.bytes < memory.bytes) => return Err(IBV_WC_REM_INV_REQ_ERR),
            IBV_WR_SEND => {}
            IBV_WR_RDMA_READ => poison(memory.address, memory.bytes),
            _ => poison(remote.0, memory.bytes),
        }
        let mut pieces: Vec<usize> = (0..memory.bytes).step_by(PIECE).collect();
        for place in (1..pieces.len()).rev() {
            let other = self.below(place + 1);
            pieces.swap(place, other);
        }
        self.pairs.get_mut(&number).expect("it was just there").sends[index].pieces = Some(pieces);
        Ok(true)
    }

    fn move_piece(&mut self, number: u32, index: usize) {
        let receive = self.receive_of(number, index);
        let request = &mut self.pairs.get_mut(&number).expect("it is busy").sends[index];
        let begin = request.pieces.as_mut().and_then(Vec::pop).expect("a piece is left");
        let bytes = (request.memory.bytes - begin).min(PIECE);
        let begin_there = begin as u64;
        let own = match &request.inline {
            Some(inline) => inline.as_ptr().expose_provenance() as u64,
            None => request.memory.address,
        };
        let (from, to) = match request.opcode {
            IBV_WR_RDMA_READ => (request.remote.0, request.memory.address),
            IBV_WR_SEND => (own, receive.expect("the peer has room").address),
            _ => (own, request.remote.0),
        };
        let (from, to) = (pointer(from + begin_there), pointer(to + begin_there));
        // SAFETY: both ranges were found inside registered memory, whose owners keep it until the request is completed
        // or its pair is destroyed, and the lock is held while pieces move.
        unsafe { ptr::copy(from, to, bytes) };
    }

    /// Completes the first request of a pair, whose payload is there.
    fn complete(&mut self, number: u32) {
        let pair = self.pairs.get_mut(&number).expect("it is busy");
        let (queue, there) = (pair.queue, pair.there);
        let request = pair.sends.pop_front().expect("it is busy");
        if request.takes_receive() {
            let other = self.pairs.get_mut(&there).expect("it was there when the request was taken up");
            let (other_queue, room) = (other.queue, other.receives.pop_front().expect("it was there too"));
            let mut done = ibv_wc { wr_id: room.id, qp_num: there, status: IBV_WC_SUCCESS, ..ibv_wc::default() };
            done.byte_len = u32::try_from(request.memory.bytes).expect("a length of 32 bits");
            done.opcode = IBV_WC_RECV;
            if request.opcode != IBV_WR_SEND {
                done.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
                done.wc_flags = IBV_WC_WITH_IMM;
                done.__bindgen_anon_1.imm_data = request.immediate;
            }
            self.finish(other_queue, done);
        }
        if request.is_signaled {
            let opcode = match request.opcode {
                IBV_WR_SEND => IBV_WC_SEND,
                IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
                _ => IBV_WC_RDMA_WRITE,
            };
            let done = ibv_wc { wr_id: request.memory.id, opcode, qp_num: number, ..ibv_wc::default() };
            self.finish(queue, done);
        }
    }

    /// Fails a pair at its first request, and its peer if that is at fault or reached.
    fn fail(&mut self, number: u32, status: ibv_wc_status) {
        let there = self.pairs[&number].there;
        self.flush(number, status);
        if matches!(status, IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR) {
            self.flush(there, IBV_WC_WR_FLUSH_ERR);
        }
    }

    /// Work was posted on a pair: one that has failed flushes it.
    fn posted(&mut self, number: u32) {
        if self.pairs[&number].state == IBV_QPS_ERR {
            self.flush(number, IBV_WC_WR_FLUSH_ERR);
        }
        HAS_WORK.notify_all();
    }

    fn flush(&mut self, number: u32, mut status: ibv_wc_status) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.state = IBV_QPS_ERR;
        let queue = pair.queue;
        let ids: Vec<u64> = pair.sends.drain(..).map(|request| request.memory.id).collect();
        let rooms: Vec<u64> = pair.receives.drain(..).map(|room| room.id).collect();
        for wr_id in ids.into_iter().chain(rooms) {
            self.finish(queue, ibv_wc { wr_id, status, qp_num: number, ..ibv_wc::default() });
            status = IBV_WC_WR_FLUSH_ERR;
        }
    }

    fn finish(&mut self, number: usize, done: ibv_wc) {
        let queue = self.queues.get_mut(&number).expect("a queue outlives its pairs");
        queue.done.push_back(done);
        assert!(queue.done.len() <= queue.entries, "the completion queue of {} overflows", queue.entries);
        if std::mem::take(&mut queue.is_armed) {
            let channel = self.channels.get_mut(&queue.channel).expect("a channel outlives its queues");
            channel.announced.push_back(number);
            channel.signal.raise();
        }
    }

    /// Whether a range lies in a region of this key, domain and access; an empty one always does.
    fn is_in(&self, key: u32, (address, bytes): (u64, usize), domain: usize, access: u32) -> bool {
        let end = address.checked_add(bytes as u64);
        let holds = |region: &FalseRegion| {
            region.domain == domain
                && region.access & access == access
                && region.address <= address
                && end.is_some_and(|end| end <= region.address + region.bytes)
        };
        bytes == 0 || self.regions.get(&key).is_some_and(holds)
    }
}

impl SendRequest {
    /// Whether it fills a receive of the peer.
    fn takes_receive(&self) -> bool {
        matches!(self.opcode, IBV_WR_SEND | IBV_WR_RDMA_WRITE_WITH_IMM)
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(usize::try_from(address).expect("an address of this process"))
}

fn poison(address: u64, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the range was found inside registered memory that the card may write.
        unsafe { ptr::write_bytes(pointer(address), POISON, bytes) };
    }
}

/// The address of an object, which is its number here.
fn key_of<T>(object: *const T) -> usize {
    object.addr()
}

fn leak<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// Frees what [`leak`] made.
///
/// # Safety
/// `object` came from `leak` and was not freed.
unsafe fn free<T>(object: *mut T) {
    // SAFETY: the caller vouches for it.
    drop(unsafe { Box::from_raw(object) });
}

#[unsafe(no_mangle)]
extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    leak(ibv_pd { context, handle: 0 })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int {
    let number = key_of(domain);
    let fabric = fabric();
    assert!(fabric.pairs.values().all(|pair| pair.domain != number), "a domain outlives its pairs");
    assert!(fabric.regions.values().all(|region| region.domain != number), "a domain outlives its regions");
    // SAFETY: `ibv_alloc_pd` made it.
    unsafe { free(domain) };
    0
}

/// Registers memory. Neither exported function calls the other: tests rename one that a library lacks.
///
/// # Safety
/// `ibv_alloc_pd` made the domain.
unsafe fn register(domain: *mut ibv_pd, addr: *mut c_void, length: usize, access: u32) -> *mut ibv_mr {
    // SAFETY: the caller vouches for it.
    let context = unsafe { (*domain).context };
    let mut fabric = fabric();
    let key = fabric.number();
    let address = addr.expose_provenance() as u64;
    fabric.regions.insert(key, FalseRegion { domain: key_of(domain), address, bytes: length as u64, access });
    leak(ibv_mr { context, pd: domain, addr, length, handle: key, lkey: key, rkey: key })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova2(
    domain: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    _: u64,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: the same arguments.
    unsafe { register(domain, address, length, access) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(
    domain: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the same arguments.
    unsafe { register(domain, address, length, access.cast_unsigned()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(region: *mut ibv_mr) -> c_int {
    // SAFETY: `ibv_reg_mr` made it.
    let key = unsafe { (*region).lkey };
    fabric().regions.remove(&key);
    // SAFETY: as above.
    unsafe { free(region) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let (signal, fd) = RaisedDescriptor::new();
    let channel = leak(ibv_comp_channel { context, fd, refcnt: 0 });
    fabric().channels.insert(key_of(channel), Channel { announced: VecDeque::new(), signal });
    channel
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let number = key_of(channel);
    let mut fabric = fabric();
    assert!(fabric.queues.values().all(|queue| queue.channel != number), "a channel outlives its queues");
    fabric.channels.remove(&number);
    // SAFETY: `ibv_create_comp_channel` made it.
    let descriptor = unsafe { (*channel).fd };
    // SAFETY: the descriptor is the channel's, which ends here.
    drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
    // SAFETY: as above.
    unsafe { free(channel) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    context: *mut *mut c_void,
) -> c_int {
    let mut fabric = fabric();
    let known = fabric.channels.get_mut(&key_of(channel)).expect("an open channel");
    let Some(announced) = known.announced.pop_front() else {
        return again();
    };
    // SAFETY: the channel is open.
    RaisedDescriptor::lower(unsafe { (*channel).fd });
    // SAFETY: the caller's places.
    unsafe { queue.write(ptr::with_exposed_provenance_mut(announced)) };
    // SAFETY: as above.
    unsafe { context.write(ptr::null_mut()) };
    0
}

/// Nothing is there now.
pub(crate) fn again() -> c_int {
    // SAFETY: it has no conditions.
    let place = unsafe { errno() };
    // SAFETY: the place is this thread's.
    unsafe { place.write(AGAIN) };
    -1
}

unsafe extern "C" {
    #[link_name = "__errno_location"]
    fn errno() -> *mut c_int;
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_cq_events(_: *mut ibv_cq, _: u32) {}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let queue = leak(ibv_cq { context, channel, cq_context, cqe, ..ibv_cq::default() });
    let entries = usize::try_from(cqe).expect("a positive number");
    let made = FalseQueue { channel: key_of(channel), done: VecDeque::new(), entries, is_armed: false };
    fabric().queues.insert(queue.expose_provenance(), made);
    queue
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int {
    let number = key_of(queue);
    let mut fabric = fabric();
    assert!(fabric.pairs.values().all(|pair| pair.queue != number), "a queue outlives its pairs");
    fabric.queues.remove(&number);
    for channel in fabric.channels.values_mut() {
        channel.announced.retain(|announced| *announced != number);
    }
    // SAFETY: `ibv_create_cq` made it.
    unsafe { free(queue) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(domain: *mut ibv_pd, wanted: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's wish, which is also the place for what it gets.
    let wanted = unsafe { &mut *wanted };
    if wanted.cap.max_inline_data > INLINE_MAX {
        return ptr::null_mut();
    }
    // SAFETY: `ibv_alloc_pd` made it.
    let context = unsafe { (*domain).context };
    let mut fabric = fabric();
    let number = fabric.number();
    let pair = Pair {
        domain: key_of(domain),
        queue: key_of(wanted.send_cq),
        access: 0,
        there: 0,
        state: IBV_QPS_RESET,
        receives: VecDeque::new(),
        sends: VecDeque::new(),
    };
    fabric.pairs.insert(number, pair);
    let (send_cq, recv_cq) = (wanted.send_cq, wanted.recv_cq);
    leak(ibv_qp { context, pd: domain, send_cq, recv_cq, qp_num: number, ..ibv_qp::default() })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(pair: *mut ibv_qp, wish: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: `ibv_create_qp` made it.
    let number = unsafe { (*pair).qp_num };
    // SAFETY: the caller's wish.
    let wish = unsafe { &*wish };
    let mut fabric = fabric();
    let pair = fabric.pairs.get_mut(&number).expect("an open pair");
    let mask = mask.cast_unsigned();
    let needed = match (pair.state, wish.qp_state) {
        (IBV_QPS_RESET, IBV_QPS_INIT) => IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        (IBV_QPS_INIT, IBV_QPS_RTR) => {
            let receiving = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
            receiving | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
        }
        (IBV_QPS_RTR, IBV_QPS_RTS) => {
            let sending = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN;
            sending | IBV_QP_MAX_QP_RD_ATOMIC
        }
        _ => return INVALID,
    };
    if mask & needed != needed {
        return INVALID;
    }
    if wish.qp_state == IBV_QPS_RTR && !crate::is_reached(&wish.ah_attr) {
        return INVALID;
    }
    pair.state = wish.qp_state;
    match wish.qp_state {
        IBV_QPS_INIT => pair.access = wish.qp_access_flags,
        IBV_QPS_RTR => pair.there = wish.dest_qp_num,
        _ => {}
    }
    HAS_WORK.notify_all();
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(pair: *mut ibv_qp) -> c_int {
    // SAFETY: `ibv_create_qp` made it.
    let number = unsafe { (*pair).qp_num };
    let mut fabric = fabric();
    if let Some(known) = fabric.pairs.remove(&number) {
        let queue = fabric.queues.get_mut(&known.queue).expect("a queue outlives its pairs");
        queue.done.retain(|done| done.qp_num != number);
        // Requests of the peer that were under way have no answer.
        let is_under_way = fabric
            .pairs
            .get(&known.there)
            .is_some_and(|other| other.there == number && other.sends.iter().any(|request| request.pieces.is_some()));
        if is_under_way {
            fabric.fail(known.there, IBV_WC_RETRY_EXC_ERR);
        }
    }
    // SAFETY: as above.
    unsafe { free(pair) };
    HAS_WORK.notify_all();
    0
}

/// `ibv_post_send` of C's headers.
pub(crate) unsafe extern "C" fn post_send(
    pair: *mut ibv_qp,
    mut work: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: `ibv_create_qp` made it.
    let number = unsafe { (*pair).qp_num };
    let mut fabric = fabric();
    // SAFETY: each request of the list is the caller's, or null at the end.
    while let Some(request) = unsafe { work.as_ref() } {
        let memory = memory(request.wr_id, request.sg_list, request.num_sge);
        let is_inline = request.send_flags & IBV_SEND_INLINE != 0;
        // SAFETY: the caller's memory, which is there for the call.
        let inline = is_inline.then(|| unsafe { std::slice::from_raw_parts(pointer(memory.address), memory.bytes) });
        // SAFETY: a request of a reliable connection has this member.
        let remote = unsafe { request.wr.rdma };
        // SAFETY: either member has 32 bits.
        let immediate = unsafe { request.__bindgen_anon_1.imm_data };
        let made = SendRequest {
            memory,
            inline: inline.map(<[u8]>::to_vec),
            opcode: request.opcode,
            is_signaled: request.send_flags & IBV_SEND_SIGNALED != 0,
            remote: (remote.remote_addr, remote.rkey),
            immediate,
            pieces: None,
        };
        let known = fabric.pairs.get_mut(&number).expect("an open pair");
        known.sends.push_back(made);
        work = request.next;
    }
    fabric.posted(number);
    0
}

/// `ibv_post_recv` of C's headers.
pub(crate) unsafe extern "C" fn post_recv(
    pair: *mut ibv_qp,
    mut work: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: `ibv_create_qp` made it.
    let number = unsafe { (*pair).qp_num };
    let mut fabric = fabric();
    // SAFETY: each request of the list is the caller's, or null at the end.
    while let Some(request) = unsafe { work.as_ref() } {
        let memory = memory(request.wr_id, request.sg_list, request.num_sge);
        let domain = fabric.pairs[&number].domain;
        if !fabric.is_in(memory.key, (memory.address, memory.bytes), domain, IBV_ACCESS_LOCAL_WRITE) {
            return INVALID;
        }
        poison(memory.address, memory.bytes);
        fabric.pairs.get_mut(&number).expect("an open pair").receives.push_back(memory);
        work = request.next;
    }
    fabric.posted(number);
    0
}

fn memory(id: u64, entries: *const ibv_sge, count: c_int) -> WorkMemory {
    if count == 0 {
        return WorkMemory { id, address: 0, bytes: 0, key: 0 };
    }
    // SAFETY: a request with an entry names it.
    let entry = unsafe { *entries };
    WorkMemory { id, address: entry.addr, bytes: entry.length as usize, key: entry.lkey }
}

/// `ibv_poll_cq` of C's headers.
pub(crate) unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, most: c_int, into: *mut ibv_wc) -> c_int {
    let mut fabric = fabric();
    let known = fabric.queues.get_mut(&key_of(queue)).expect("an open queue");
    let count = known.done.len().min(usize::try_from(most).expect("a positive number"));
    for (index, done) in known.done.drain(..count).enumerate() {
        // SAFETY: the caller has room for `most`.
        let place = unsafe { into.add(index) };
        // SAFETY: as above.
        unsafe { place.write(done) };
    }
    c_int::try_from(count).expect("it is at most `most`")
}

/// `ibv_req_notify_cq` of C's headers.
pub(crate) unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, _: c_int) -> c_int {
    fabric().queues.get_mut(&key_of(queue)).expect("an open queue").is_armed = true;
    0
}

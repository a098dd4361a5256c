//! RDMA devices of this machine, as values that destroy themselves.
//!
//! Each object keeps its owner alive, and fields are declared in the order of destruction: a queue pair before its
//! completion queue, a region before its domain, a domain before its channel, and the device last.

use std::any::Any;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::{fmt, io};

use pserver_core::memory::{Arena, Budget, Mapped};

use super::VerbsDevice;
use super::checked::{self, leave};
use super::choice::{ConnectionPlace, DeviceNames, choose};
use super::completion_queue::CompletionQueue;
use super::fabric::FabricSettings;
use super::hardware_ports::{DeviceHandle, DevicePort, FoundPorts, other_fabric, ports};
use super::locked_memory::memory_limit;
use super::provider::{
    CompletionChannel, DeviceNews, MemoryRegion, Operation, PairAddress, PairCapacity, PortAttributes,
    ProtectionDomain, QueuePair, RdmaDevice, ReceiveRequest, RegionAccess, WorkCompletion, WorkRequest,
};
use super::reasons::{self, UnavailableCause, VerbsError};
#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use super::sys::*;

/// Messages up to the first of these lengths that the device supports are posted inline: the card need not fetch them.
const INLINE_WANTED: [u32; 5] = [1024, 512, 256, 64, 0];
/// Bytes registered at start to test the limit of locked memory.
const TRIAL_BYTES: u32 = 16 * 1024 * 1024;

/// A device that connections use.
pub(super) struct HardwareDevice(Arc<DevicePort>);

struct HardwareChannel {
    channel: NonNull<ibv_comp_channel>,
    /// The completion queues of its pairs.
    queues: Mutex<Vec<Weak<CompletionQueue>>>,
    /// A descriptor of the device's events that is this channel's own: each may be watched by another thread.
    events: OwnedFd,
    /// The next of the device's events that this channel has not seen.
    next_event: AtomicU64,
    port: Arc<DevicePort>,
}

struct HardwareDomain {
    domain: NonNull<ibv_pd>,
    completion_channel: Arc<HardwareChannel>,
}

/// A handle that makes domains, which keep the channel alive.
struct HardwareChannelHandle(Arc<HardwareChannel>);

struct HardwareDomainHandle(Arc<HardwareDomain>);

struct HardwareRegion {
    /// None once it is deregistered.
    region: Option<NonNull<ibv_mr>>,
    keys: (u32, u32),
    domain: Arc<HardwareDomain>,
}

struct HardwarePair {
    /// None once it is destroyed.
    pair: Option<NonNull<ibv_qp>>,
    queue: Arc<CompletionQueue>,
    domain: Arc<HardwareDomain>,
    end: PairAddress,
    inline_max: u32,
    sends: Vec<ibv_send_wr>,
    receives: Vec<ibv_recv_wr>,
    entries: Vec<ibv_sge>,
}

// SAFETY: a channel may be read from any thread; it is destroyed once, by its only owner.
unsafe impl Send for HardwareChannel {}
// SAFETY: as above.
unsafe impl Sync for HardwareChannel {}
// SAFETY: as for a device.
unsafe impl Send for HardwareDomain {}
// SAFETY: as for a device.
unsafe impl Sync for HardwareDomain {}
// SAFETY: a region is only ever read, and deregistered once, by its only owner.
unsafe impl Send for HardwareRegion {}
// SAFETY: as above.
unsafe impl Sync for HardwareRegion {}
// SAFETY: the pair and its queue have one owner, and the pointers in its lists are set anew by each call.
unsafe impl Send for HardwarePair {}

/// Opens the best device for a connection, of these names if there are some.
///
/// # Errors
/// The reason why there is none, and the remedy.
pub(super) fn open(
    names: Option<&DeviceNames>,
    fabric: &FabricSettings,
    place: &ConnectionPlace,
) -> Result<VerbsDevice, VerbsError> {
    let FoundPorts { candidates, mut ports, mut unusable } = ports(fabric)?;
    if candidates.is_empty() {
        unusable.extend(other_fabric(Path::new("/sys")).map(str::to_owned));
        if !unusable.is_empty() {
            return Err(VerbsError::no_device(unusable.join("; ")));
        }
    }
    let port = ports.swap_remove(choose(&candidates, names, fabric.gid_index, place)?);
    let card = HardwareDevice(Arc::new(port));
    card.try_memory()?;
    Ok(VerbsDevice(Arc::new(card)))
}

impl HardwareDevice {
    /// Registers a test region, so that a limit shows at start and not later.
    fn try_memory(&self) -> Result<(), VerbsError> {
        if memory_limit().is_none() {
            return Ok(());
        }
        let mut budget = Budget::new();
        budget.line("whether memory can be registered", TRIAL_BYTES, 1);
        let arena = Arena::new(&budget).map_err(|failure| VerbsError::new(failure.to_string()))?;
        let lease = arena.take(TRIAL_BYTES).map_err(|failure| VerbsError::new(failure.to_string()))?;
        let memory = lease.mapped().expect("a slot is memory of ours");
        self.completion_channel()?.domain()?.register(&memory, (0, memory.len()), RegionAccess::Local).map(drop)
    }
}

/// The error for a refused registration.
fn unregistered(bytes: usize, error: &io::Error) -> VerbsError {
    let cause = UnavailableCause::Memory { bytes: bytes as u64, errno: error.raw_os_error(), said: error.to_string() };
    VerbsError::new(reasons::text(&cause, memory_limit()))
}

/// The failure that an event means for a device's queue pairs, if it means one. They survive a port that goes down for
/// as long as their requests are tried again.
fn failure(event: ibv_event_type) -> Option<&'static str> {
    match event {
        IBV_EVENT_DEVICE_FATAL => Some("the device has failed"),
        IBV_EVENT_CQ_ERR => Some("a completion queue has failed"),
        _ => None,
    }
}

impl RdmaDevice for HardwareDevice {
    fn attributes(&self) -> &PortAttributes {
        &self.0.attributes
    }

    fn completion_channel(&self) -> Result<Arc<dyn CompletionChannel>, VerbsError> {
        let port = Arc::clone(&self.0);
        let channel = checked::channel(port.handle.verbs, port.handle.context)?;
        let events = port.handle.descriptor().try_clone_to_owned();
        let events = events.map_err(|error| VerbsError::new(format!("watching a device's events: {error}")))?;
        // Events before now are no reason to end connections that are to come.
        let next_event = AtomicU64::new(port.handle.events_from(u64::MAX)?.1);
        let completion_channel = HardwareChannel { channel, queues: Mutex::default(), events, next_event, port };
        let nonblocking = rustix::io::ioctl_fionbio(completion_channel.descriptor(), true);
        nonblocking.map_err(|error| VerbsError::new(format!("a completion channel that does not block: {error}")))?;
        Ok(Arc::new(HardwareChannelHandle(Arc::new(completion_channel))))
    }

    fn device_memory(&self) -> Result<(), VerbsError> {
        let DeviceHandle { verbs, context, .. } = *self.0.handle;
        let domain = checked::domain(verbs, context)?;
        let tried = checked::try_device_memory(verbs, domain);
        checked::close_domain(verbs, domain)?;
        tried
    }
}

impl HardwareChannel {
    fn verbs(&self) -> &'static Verbs {
        self.port.handle.verbs
    }

    /// A completion queue in which so many entries are reserved.
    fn queue(self: &Arc<Self>, entries: u32) -> Result<Arc<CompletionQueue>, VerbsError> {
        let known = self.queues().iter().filter_map(Weak::upgrade).find(|queue| queue.reserve(entries));
        if let Some(queue) = known {
            return Ok(queue);
        }
        // The transport's thread, which looks through the list in each turn, does not wait for the device.
        let all = CompletionQueue::entries(entries, self.port.completions_max);
        let queue = checked::queue(self.verbs(), self.port.handle.context, all, self.channel)?;
        let owner = Arc::clone(self) as Arc<dyn Any + Send + Sync>;
        let queue = Arc::new(CompletionQueue::new(queue, all, (self.verbs(), owner)));
        assert!(queue.reserve(entries), "it was made for them");
        let mut queues = self.queues();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        drop(queues);
        Ok(queue)
    }

    /// Calls `act` for each completion queue.
    fn each_queue(&self, mut act: impl FnMut(&CompletionQueue) -> Result<(), VerbsError>) -> Result<(), VerbsError> {
        self.queues().iter().filter_map(Weak::upgrade).try_for_each(|queue| act(&queue))
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Weak<CompletionQueue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open, and its descriptor never changes.
        let number = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: the descriptor is the channel's, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(number) }
    }
}

impl CompletionChannel for HardwareChannelHandle {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }

    fn drain(&self) -> Result<(), VerbsError> {
        let (verbs, channel) = (self.0.verbs(), self.0.channel);
        let mut run: Option<(NonNull<ibv_cq>, u32)> = None;
        // Notifications of one queue are acknowledged together: each acknowledgement takes a lock.
        while let Some(queue) = checked::announced(verbs, channel)? {
            run = match run {
                Some((same, events)) if same == queue => Some((same, events + 1)),
                other => {
                    other.map_or(Ok(()), |(queue, events)| checked::acknowledge(verbs, queue, events))?;
                    Some((queue, 1))
                }
            };
        }
        run.map_or(Ok(()), |(queue, events)| checked::acknowledge(verbs, queue, events))
    }

    fn collect(&self) -> Result<bool, VerbsError> {
        let mut has_some = false;
        self.0.each_queue(|queue| queue.collect().map(|some| has_some |= some))?;
        Ok(has_some)
    }

    fn arm(&self) -> Result<(), VerbsError> {
        self.0.each_queue(CompletionQueue::arm)
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.events.as_fd())
    }

    fn news(&self) -> Result<DeviceNews, VerbsError> {
        let port = &self.0.port;
        let (events, next) = port.handle.events_from(self.0.next_event.load(Ordering::Relaxed))?;
        self.0.next_event.store(next, Ordering::Relaxed);
        let last = events.iter().rev().find_map(|(event, _)| failure(*event));
        for (event, number) in &events {
            tracing::info!(device = port.attributes.name, event, number, "an RDMA device reports an event");
        }
        let failure = last.map(|result| format!("{}: {result}", port.attributes.name));
        Ok(DeviceNews { failure, has_changed: !events.is_empty() })
    }

    fn domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        let domain = checked::domain(self.0.verbs(), self.0.port.handle.context)?;
        Ok(Arc::new(HardwareDomainHandle(Arc::new(HardwareDomain { domain, completion_channel: Arc::clone(&self.0) }))))
    }
}

impl ProtectionDomain for HardwareDomainHandle {
    fn register(
        &self,
        memory: &Mapped,
        piece: (usize, usize),
        access: RegionAccess,
    ) -> Result<Box<dyn MemoryRegion>, VerbsError> {
        let (begin, bytes) = piece;
        let is_inside = begin.checked_add(bytes).is_some_and(|end| end <= memory.len());
        assert!(is_inside, "{bytes} bytes at {begin} of a mapping of {}", memory.len());
        let access = IBV_ACCESS_LOCAL_WRITE
            | match access {
                RegionAccess::Local => 0,
                RegionAccess::Remote => IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
            };
        let registered = checked::register(
            self.0.completion_channel.verbs(),
            self.0.domain,
            (memory.address() + begin, bytes),
            access,
            self.0.completion_channel.port.fabric.is_relaxed,
        );
        let region = registered.map_err(|error| unregistered(bytes, &error))?;
        let keys = checked::keys(region);
        Ok(Box::new(HardwareRegion { region: Some(region), keys, domain: Arc::clone(&self.0) }))
    }

    fn pair(&self, capacity: &PairCapacity) -> Result<Box<dyn QueuePair>, VerbsError> {
        let completion_channel = &self.0.completion_channel;
        let port = &completion_channel.port;
        let sends = port.sends(capacity);
        let entries = sends + capacity.receives_max;
        if entries > port.queue_max {
            let queue_max = port.queue_max;
            return Err(VerbsError::new(format!("{entries} pieces of work at once; the device takes {queue_max}")));
        }
        let queue = completion_channel.queue(entries)?;
        let mut made = Err(VerbsError::new("no queue pair was tried"));
        for inline in INLINE_WANTED {
            made = self.0.make(capacity, queue.pointer(), inline);
            if made.is_ok() {
                break;
            }
        }
        let (pair, inline_max) = match made {
            Ok(made) => made,
            Err(fault) => {
                queue.release(entries);
                return Err(fault);
            }
        };
        let attributes = &port.attributes;
        let packet = u32::try_from(RandomState::new().build_hasher().finish() & 0x00ff_ffff).expect("it has 24 bits");
        let PortAttributes { gid, lid, layer, mtu, reads_in, .. } = *attributes;
        let end = PairAddress { number: checked::number(pair), packet, gid, lid, mtu, reads_in, layer };
        queue.add(end.number, entries);
        let mut made = HardwarePair {
            pair: Some(pair),
            queue,
            domain: Arc::clone(&self.0),
            end,
            inline_max,
            sends: Vec::with_capacity(sends as usize),
            receives: Vec::with_capacity(capacity.receives_max as usize),
            entries: Vec::with_capacity(entries as usize),
        };
        made.initialise(capacity.is_open)?;
        Ok(Box::new(made))
    }
}

impl HardwareDomain {
    /// A queue pair with inline messages of at most `inline` bytes, and its actual inline limit.
    fn make(
        &self,
        capacity: &PairCapacity,
        queue: NonNull<ibv_cq>,
        inline: u32,
    ) -> Result<(NonNull<ibv_qp>, u32), VerbsError> {
        let cap = ibv_qp_cap {
            max_send_wr: self.completion_channel.port.sends(capacity),
            max_recv_wr: capacity.receives_max,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: inline,
        };
        let (send_cq, recv_cq) = (queue.as_ptr(), queue.as_ptr());
        let mut wanted = ibv_qp_init_attr { send_cq, recv_cq, cap, ..ibv_qp_init_attr::default() };
        wanted.qp_type = IBV_QPT_RC;
        let pair = checked::pair(self.completion_channel.verbs(), self.domain, &mut wanted)?;
        Ok((pair, wanted.cap.max_inline_data))
    }
}

impl MemoryRegion for HardwareRegion {
    fn local_key(&self) -> u32 {
        self.keys.0
    }

    fn remote_key(&self) -> u32 {
        self.keys.1
    }

    fn close(&mut self) -> Result<(), VerbsError> {
        let Some(region) = self.region else { return Ok(()) };
        checked::deregister(self.domain.completion_channel.verbs(), region)?;
        self.region = None;
        Ok(())
    }
}

impl HardwarePair {
    fn verbs(&self) -> &'static Verbs {
        self.domain.completion_channel.verbs()
    }

    fn open(&self) -> Result<NonNull<ibv_qp>, VerbsError> {
        self.pair.ok_or_else(|| VerbsError::new("the queue pair is destroyed"))
    }

    /// Moves the queue pair to the state in which receives can be posted.
    fn initialise(&mut self, is_open: bool) -> Result<(), VerbsError> {
        let access = if is_open { IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ } else { 0 };
        let port_num = self.domain.completion_channel.port.number;
        let pkey_index = self.domain.completion_channel.port.attributes.pkey_index;
        let mut wish = ibv_qp_attr { port_num, pkey_index, qp_access_flags: access, ..ibv_qp_attr::default() };
        wish.qp_state = IBV_QPS_INIT;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        checked::modify(self.verbs(), self.open()?, &mut wish, mask)
    }
}

impl HardwarePair {
    /// Adds the part of a work request that begins at byte `from`.
    fn add(&mut self, work: &WorkRequest, (from, bytes): (u32, u32), is_last: bool) {
        let mut request = ibv_send_wr { wr_id: work.id, ..ibv_send_wr::default() };
        request.send_flags = if work.is_signaled && is_last { IBV_SEND_SIGNALED } else { 0 };
        let remote = match work.operation {
            Operation::Send => {
                request.opcode = IBV_WR_SEND;
                if bytes <= self.inline_max {
                    request.send_flags |= IBV_SEND_INLINE;
                }
                None
            }
            Operation::Read(remote) => {
                request.opcode = IBV_WR_RDMA_READ;
                Some(remote)
            }
            Operation::Write(remote, Some(number)) if is_last => {
                request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
                request.__bindgen_anon_1.imm_data = number.to_be();
                Some(remote)
            }
            Operation::Write(remote, _) => {
                request.opcode = IBV_WR_RDMA_WRITE;
                Some(remote)
            }
        };
        if let Some(remote) = remote {
            // An overflowing address is the peer's error, and the peer's card refuses it.
            let remote_addr = remote.address.wrapping_add(from.into());
            request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey: remote.key };
        }
        self.sends.push(request);
        let span = work.span;
        self.entries.push(ibv_sge { addr: span.address() + u64::from(from), length: bytes, lkey: span.key() });
    }
}

impl QueuePair for HardwarePair {
    fn here(&self) -> PairAddress {
        self.end
    }

    fn connect(&mut self, there: &PairAddress) -> Result<(), VerbsError> {
        let (pair, port) = (self.open()?, &self.domain.completion_channel.port);
        let mut wish = ibv_qp_attr { qp_state: IBV_QPS_RTR, ..ibv_qp_attr::default() };
        (wish.path_mtu, wish.dest_qp_num, wish.rq_psn) =
            (self.end.mtu.min(there.mtu).into(), there.number, there.packet);
        (wish.max_dest_rd_atomic, wish.min_rnr_timer) = (self.end.reads_in, 12);
        let (sl, dlid, port_num) = (port.fabric.service_level, there.lid, port.number);
        wish.ah_attr = ibv_ah_attr { dlid, sl, port_num, ..ibv_ah_attr::default() };
        // Another subnet of InfiniBand is behind a router, which reads the global address.
        if port.is_global || there.lid == 0 || there.gid[..8] != self.end.gid[..8] {
            let dgid = ibv_gid { raw: there.gid };
            wish.ah_attr.is_global = 1;
            wish.ah_attr.grh = ibv_global_route {
                dgid,
                sgid_index: port.gid_index,
                hop_limit: 64,
                traffic_class: port.fabric.traffic_class,
                ..ibv_global_route::default()
            };
        }
        let receiving = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let mask = IBV_QP_STATE | receiving | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        checked::modify(self.verbs(), pair, &mut wish, mask)?;
        let mut wish = ibv_qp_attr { qp_state: IBV_QPS_RTS, sq_psn: self.end.packet, ..ibv_qp_attr::default() };
        (wish.timeout, wish.retry_cnt) = (port.fabric.timeout, port.fabric.retries);
        wish.rnr_retry = port.fabric.room_retries;
        wish.max_rd_atomic = port.attributes.reads_out.min(there.reads_in).max(1);
        let sending = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN;
        checked::modify(self.verbs(), pair, &mut wish, IBV_QP_STATE | sending | IBV_QP_MAX_QP_RD_ATOMIC)
    }

    fn receive(&mut self, room: &[ReceiveRequest]) -> Result<(), VerbsError> {
        let pair = self.open()?;
        self.receives.clear();
        self.entries.clear();
        for ReceiveRequest { id, span } in room {
            self.receives.push(ibv_recv_wr { wr_id: *id, ..ibv_recv_wr::default() });
            self.entries.push(ibv_sge { addr: span.address(), length: span.bytes(), lkey: span.key() });
        }
        checked::receive(pair, &mut self.receives, &mut self.entries)
    }

    fn post(&mut self, work: &[WorkRequest]) -> Result<(), VerbsError> {
        let pair = self.open()?;
        self.sends.clear();
        self.entries.clear();
        let message_max = self.domain.completion_channel.port.message_max;
        for work in work {
            // Only the last part is signaled; a failure is reported for any of them.
            let mut from = 0;
            while from + message_max < work.span.bytes() {
                self.add(work, (from, message_max), false);
                from += message_max;
            }
            self.add(work, (from, work.span.bytes() - from), true);
        }
        checked::post(pair, &mut self.sends, &mut self.entries)
    }

    fn set_waker(&mut self, waker: &Waker) {
        self.queue.set_waker(self.end.number, waker);
    }

    fn collect(&mut self) -> Result<(), VerbsError> {
        self.queue.collect().map(drop)
    }

    fn poll(&mut self, done: &mut Vec<WorkCompletion>) -> Result<(), VerbsError> {
        self.queue.take(self.end.number, done)
    }

    fn close(&mut self) -> Result<(), VerbsError> {
        let Some(pair) = self.pair else { return Ok(()) };
        checked::close_pair(self.verbs(), pair)?;
        self.pair = None;
        self.queue.remove(self.end.number);
        Ok(())
    }
}

impl Drop for HardwarePair {
    fn drop(&mut self) {
        leave(self.close());
        if self.pair.is_some() {
            // A pair that is not destroyed keeps its completion queue.
            std::mem::forget(Arc::clone(&self.queue));
        }
    }
}

impl Drop for HardwareRegion {
    fn drop(&mut self) {
        leave(self.close());
    }
}

impl Drop for HardwareDomain {
    fn drop(&mut self) {
        leave(checked::close_domain(self.completion_channel.verbs(), self.domain));
    }
}

impl Drop for HardwareChannel {
    fn drop(&mut self) {
        leave(checked::close_channel(self.verbs(), self.channel));
    }
}

impl fmt::Debug for HardwareDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HardwareDevice({})", self.0.attributes.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_pairs_do_not_survive_are_failures() {
        let check = |event, expected: Option<&str>| assert_eq!(failure(event), expected);
        check(IBV_EVENT_DEVICE_FATAL, Some("the device has failed"));
        check(IBV_EVENT_CQ_ERR, Some("a completion queue has failed"));
        check(IBV_EVENT_PORT_ERR, None);
        check(IBV_EVENT_PORT_ACTIVE, None);
        check(IBV_EVENT_GID_CHANGE, None);
        // The pair itself reports it.
        check(IBV_EVENT_QP_FATAL, None);
    }
}

//! The devices of this machine, as values that are destroyed when nobody needs them.
//!
//! Owners are kept by those who need them, so what is destroyed first stands first: a pair before its queue, a region
//! before its domain, a domain before its station, and the device last.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, io};

use pserver_core::limits::CHUNK_BYTES_MAX;
use pserver_core::memory::{Arena, Budget, Mapped};
use rustix::process::{Resource, getrlimit};

use super::Device;
use super::checked::{self, Context, library};
use super::choice::{Candidate, DeviceName, choose};
use super::provider::{
    Access, Act, Domain, Done, End, Facts, Fault, Pair, Plan, Provider, Receive, Region, Station, What, Work,
};
use super::reasons::{self, Cause};
use super::status::Status;
#[allow(clippy::wildcard_imports, reason = "C's names, which begin with what they are of")]
use super::sys::*;

/// A packet is sent again when no acknowledgement came within 4.096 us times two to this: 67 ms.
const TIMEOUT: u8 = 14;
/// So often. Seven would be for ever over soft-RoCE.
const RETRIES: u8 = 6;
/// Credits see to it that there is room for every message, so no one is sent again for want of it.
const ROOM_RETRIES: u8 = 0;
/// Messages up to this length go with the work itself, where the device takes so much.
const INLINE_WANTED: u32 = 256;
/// Completions taken by one call.
const POLLED: usize = 32;
/// Less than this no device takes at once.
const MESSAGE_LEAST: u32 = 1024 * 1024;
/// What is registered to see whether memory can be, in bytes.
const TRIAL_BYTES: u32 = 16 * 1024 * 1024;

/// A device that is open.
struct Opened {
    verbs: &'static Verbs,
    context: Context,
}

/// A port of a device, and one of its addresses.
struct Port {
    opened: Arc<Opened>,
    facts: Facts,
    number: u8,
    gid_index: u8,
    is_global: bool,
    queue_max: u32,
    /// The longest piece of work.
    message_max: u32,
}

/// The device that connections use.
pub(super) struct Card(Arc<Port>);

struct CardStation {
    channel: NonNull<ibv_comp_channel>,
    port: Arc<Port>,
}

struct CardDomain {
    domain: NonNull<ibv_pd>,
    station: Arc<CardStation>,
}

/// A station's way to make domains needs the station itself.
struct Stationed(Arc<CardStation>);

struct Domained(Arc<CardDomain>);

struct CardRegion {
    /// None once it is deregistered.
    region: Option<NonNull<ibv_mr>>,
    keys: (u32, u32),
    domain: Arc<CardDomain>,
}

struct CardPair {
    /// None once it is destroyed.
    pair: Option<NonNull<ibv_qp>>,
    queue: NonNull<ibv_cq>,
    domain: Arc<CardDomain>,
    end: End,
    inline_max: u32,
    sends: Vec<ibv_send_wr>,
    receives: Vec<ibv_recv_wr>,
    entries: Vec<ibv_sge>,
    polled: [ibv_wc; POLLED],
}

// SAFETY: libibverbs may be called from any thread with a device; `close` is called once, when the last owner goes.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}
// SAFETY: a channel may be read from any thread; it is destroyed once, by its only owner.
unsafe impl Send for CardStation {}
// SAFETY: as above.
unsafe impl Sync for CardStation {}
// SAFETY: as for a device.
unsafe impl Send for CardDomain {}
// SAFETY: as for a device.
unsafe impl Sync for CardDomain {}
// SAFETY: a region is only ever read, and deregistered once, by its only owner.
unsafe impl Send for CardRegion {}
// SAFETY: as above.
unsafe impl Sync for CardRegion {}
// SAFETY: the pair and its queue have one owner, and the pointers in its lists are set anew by each call.
unsafe impl Send for CardPair {}

/// The device of this name, or the one that suits best those whose address of this side is `local`.
///
/// # Errors
/// Which of the reasons it is that there is none, and what can be done about it.
pub(super) fn open(name: Option<&DeviceName>, local: Option<IpAddr>) -> Result<Device, Fault> {
    let (candidates, mut ports): (Vec<_>, Vec<_>) = ports()?.into_iter().unzip();
    let card = Card(Arc::new(ports.swap_remove(choose(&candidates, name, local)?)));
    card.try_memory()?;
    Ok(Device(Arc::new(card)))
}

/// Every active port with each of its addresses.
fn ports() -> Result<Vec<(Candidate, Port)>, Fault> {
    let verbs = library()?;
    let mut devices = Vec::new();
    // What is opened is owned at once, and so is closed whatever comes.
    checked::open_all(verbs, |name, context| devices.push((name, Arc::new(Opened { verbs, context }))))?;
    let asked = devices.iter().map(|(name, opened)| (name.as_str(), opened.ports(name)));
    Ok(that_answer(asked))
}

/// What the devices say that say something; the others are none of it.
fn that_answer<'a, T>(asked: impl Iterator<Item = (&'a str, Result<Vec<T>, Fault>)>) -> Vec<T> {
    let mut all = Vec::new();
    for (name, said) in asked {
        match said {
            Ok(mut said) => all.append(&mut said),
            Err(fault) => tracing::warn!(name, %fault, "an RDMA device is left out"),
        }
    }
    all
}

impl Opened {
    fn ports(self: &Arc<Self>, name: &str) -> Result<Vec<(Candidate, Port)>, Fault> {
        let Self { verbs, context } = **self;
        let limits = checked::limits(verbs, context)?;
        let gids = checked::gids(verbs, context)?;
        // An idle connection is not asked, so the descriptor is watched.
        // SAFETY: the descriptor is the device's, which is open as long as `self`.
        let events = unsafe { BorrowedFd::borrow_raw(checked::events(context)) };
        let nonblocking = rustix::io::ioctl_fionbio(events, true);
        nonblocking.map_err(|error| Fault::new(format!("events that do not block: {error}")))?;
        let mut ports = Vec::new();
        for number in 1..=limits.phys_port_cnt {
            let port = checked::port(verbs, context, number)?;
            if port.state != IBV_PORT_ACTIVE {
                continue;
            }
            let of_port = gids.iter().filter(|gid| gid.port_num == u32::from(number));
            ports.extend(of_port.filter_map(|gid| Port::new(self, name, &limits, (number, &port), gid)));
        }
        Ok(ports)
    }
}

impl Port {
    fn new(
        opened: &Arc<Opened>,
        name: &str,
        limits: &ibv_device_attr,
        (number, port): (u8, &ibv_port_attr),
        entry: &ibv_gid_entry,
    ) -> Option<(Candidate, Self)> {
        // SAFETY: a GID is sixteen bytes in either form.
        let gid = unsafe { entry.gid.raw };
        let address = Ipv6Addr::from(gid);
        // One machine's own addresses reach nobody else; version 1 does not pass routers.
        let (rank, kind) = match entry.gid_type {
            IBV_GID_TYPE_ROCE_V2 if address.to_ipv4_mapped().is_some() => (3, "RoCE v2"),
            IBV_GID_TYPE_IB => (2, "InfiniBand"),
            IBV_GID_TYPE_ROCE_V2 => (1, "RoCE v2"),
            _ => return None,
        };
        let (gid_index, mtu) = (u8::try_from(entry.gid_index).ok()?, u8::try_from(port.active_mtu).ok()?);
        let reads = |number: i32| u8::try_from(number.clamp(1, 255)).unwrap_or(1);
        let facts = Facts {
            name: format!("{name}:{number}:{gid_index}, {kind}, {address}"),
            gid,
            lid: port.lid,
            mtu,
            reads_out: reads(limits.max_qp_init_rd_atom),
            reads_in: reads(limits.max_qp_rd_atom),
            is_limited: memory_limit().is_some(),
        };
        let is_global = port.link_layer != u8::try_from(IBV_LINK_LAYER_INFINIBAND).unwrap_or(1);
        let queue_max = u32::try_from(limits.max_qp_wr.min(limits.max_cqe)).unwrap_or(0);
        let message_max = port.max_msg_sz.clamp(MESSAGE_LEAST, CHUNK_BYTES_MAX);
        let opened = Arc::clone(opened);
        let (device, address) = (name.to_owned(), IpAddr::V6(address).to_canonical());
        let candidate = Candidate { device, port: number, gid: gid_index, address, rank };
        Some((candidate, Self { opened, facts, number, gid_index, is_global, queue_max, message_max }))
    }

    /// Work that a queue has room for, when every piece is as long as a payload can be.
    fn sends(&self, plan: &Plan) -> u32 {
        plan.posted_max * CHUNK_BYTES_MAX.div_ceil(self.message_max)
    }
}

impl Card {
    /// Registers a little, so that a limit is found at the start and not in the middle.
    fn try_memory(&self) -> Result<(), Fault> {
        if memory_limit().is_none() {
            return Ok(());
        }
        let mut budget = Budget::new();
        budget.line("whether memory can be registered", TRIAL_BYTES, 1);
        let arena = Arena::new(&budget).map_err(|failure| Fault::new(failure.to_string()))?;
        let lease = arena.take(TRIAL_BYTES).map_err(|failure| Fault::new(failure.to_string()))?;
        let memory = lease.mapped().expect("a slot is memory of ours");
        self.station()?.domain()?.register(&memory, (0, memory.len()), Access::Near).map(drop)
    }
}

/// How many bytes of memory this process may lock; nothing when it may as many as there are.
fn memory_limit() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let may_lock_all = may_lock_all(&read("/proc/self/status"), &read("/proc/self/uid_map"));
    getrlimit(Resource::Memlock).current.filter(|_| !may_lock_all)
}

/// Whether a process of this status may lock memory beyond its limit (`CAP_IPC_LOCK`). Only the capability of the
/// system itself counts, and not that of a container with users of its own, whose map is another than everybody's.
fn may_lock_all(status: &str, users: &str) -> bool {
    const LOCK: u32 = 14;
    if !users.split_whitespace().eq(["0", "0", "4294967295"]) {
        return false;
    }
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    effective.is_some_and(|capabilities| capabilities >> LOCK & 1 == 1)
}

/// What a refusal to register memory means.
fn unregistered(bytes: usize, error: &io::Error) -> Fault {
    let cause = Cause::Memory { bytes: bytes as u64, errno: error.raw_os_error(), said: error.to_string() };
    Fault::new(reasons::text(&cause, memory_limit()))
}

/// What an event means for the pairs of a port: that they are over, or nothing.
fn meaning(event: ibv_event_type, is_of_port: bool) -> Option<&'static str> {
    match event {
        IBV_EVENT_DEVICE_FATAL => Some("the device has failed"),
        IBV_EVENT_PORT_ERR if is_of_port => Some("the port is down"),
        _ => None,
    }
}

impl Provider for Card {
    fn facts(&self) -> &Facts {
        &self.0.facts
    }

    fn station(&self) -> Result<Arc<dyn Station>, Fault> {
        let port = Arc::clone(&self.0);
        let channel = checked::channel(port.opened.verbs, port.opened.context)?;
        let station = CardStation { channel, port };
        let nonblocking = rustix::io::ioctl_fionbio(station.descriptor(), true);
        nonblocking.map_err(|error| Fault::new(format!("a completion channel that does not block: {error}")))?;
        Ok(Arc::new(Stationed(Arc::new(station))))
    }

    fn device_memory(&self) -> Result<(), Fault> {
        let Opened { verbs, context } = *self.0.opened;
        let domain = checked::domain(verbs, context)?;
        let tried = checked::try_device_memory(verbs, domain);
        checked::close_domain(verbs, domain)?;
        tried
    }
}

impl CardStation {
    fn verbs(&self) -> &'static Verbs {
        self.port.opened.verbs
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open, and its descriptor never changes.
        let number = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: the descriptor is the channel's, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(number) }
    }
}

impl Station for Stationed {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }

    fn drain(&self) -> Result<(), Fault> {
        let (verbs, channel) = (self.0.verbs(), self.0.channel);
        let mut run: Option<(NonNull<ibv_cq>, u32)> = None;
        // Announcements of one queue are acknowledged together: each time takes a lock.
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

    fn events(&self) -> Option<BorrowedFd<'_>> {
        let number = checked::events(self.0.port.opened.context);
        // SAFETY: the descriptor is the device's, which is open as long as `self`.
        Some(unsafe { BorrowedFd::borrow_raw(number) })
    }

    fn trouble(&self) -> Result<Option<String>, Fault> {
        let port = &self.0.port;
        let mut trouble = None;
        while let Some((event, of)) = checked::event(self.0.verbs(), port.opened.context)? {
            trouble = meaning(event, of == i32::from(port.number)).or(trouble);
        }
        Ok(trouble.map(|what| format!("{}: {what}", port.facts.name)))
    }

    fn domain(&self) -> Result<Arc<dyn Domain>, Fault> {
        let domain = checked::domain(self.0.verbs(), self.0.port.opened.context)?;
        Ok(Arc::new(Domained(Arc::new(CardDomain { domain, station: Arc::clone(&self.0) }))))
    }
}

impl Domain for Domained {
    fn register(&self, memory: &Mapped, piece: (usize, usize), access: Access) -> Result<Box<dyn Region>, Fault> {
        let (begin, bytes) = piece;
        let is_inside = begin.checked_add(bytes).is_some_and(|end| end <= memory.len());
        assert!(is_inside, "{bytes} bytes at {begin} of a mapping of {}", memory.len());
        let access = IBV_ACCESS_LOCAL_WRITE
            | match access {
                Access::Near => 0,
                Access::FarReads => IBV_ACCESS_REMOTE_READ,
                Access::FarWrites => IBV_ACCESS_REMOTE_WRITE,
            };
        let registered =
            checked::register(self.0.station.verbs(), self.0.domain, (memory.address() + begin, bytes), access);
        let region = registered.map_err(|error| unregistered(bytes, &error))?;
        let keys = checked::keys(region);
        Ok(Box::new(CardRegion { region: Some(region), keys, domain: Arc::clone(&self.0) }))
    }

    fn pair(&self, plan: &Plan) -> Result<Box<dyn Pair>, Fault> {
        let (station, verbs) = (&self.0.station, self.0.station.verbs());
        let port = &station.port;
        let sends = port.sends(plan);
        let entries = sends + plan.receives_max;
        if entries > port.queue_max {
            let queue_max = port.queue_max;
            return Err(Fault::new(format!("{entries} pieces of work at once; the device takes {queue_max}")));
        }
        let queue = checked::queue(verbs, port.opened.context, entries, station.channel)?;
        let made = self.0.make(plan, queue, INLINE_WANTED);
        let made = made.or_else(|_| self.0.make(plan, queue, 64)).or_else(|_| self.0.make(plan, queue, 0));
        let (pair, inline_max) = match made {
            Ok(made) => made,
            Err(fault) => {
                checked::close_queue(verbs, queue)?;
                return Err(fault);
            }
        };
        let facts = &port.facts;
        let packet = u32::try_from(RandomState::new().build_hasher().finish() & 0x00ff_ffff).expect("it has 24 bits");
        let Facts { gid, lid, mtu, reads_in, .. } = *facts;
        let end = End { number: checked::number(pair), packet, gid, lid, mtu, reads_in };
        let mut made = CardPair {
            pair: Some(pair),
            queue,
            domain: Arc::clone(&self.0),
            end,
            inline_max,
            sends: Vec::with_capacity(sends as usize),
            receives: Vec::with_capacity(plan.receives_max as usize),
            entries: Vec::with_capacity(entries as usize),
            polled: [ibv_wc::default(); POLLED],
        };
        made.initialise(plan.is_open)?;
        Ok(Box::new(made))
    }
}

impl CardDomain {
    /// A pair whose short messages go with the work, if the device takes that; how long they may be.
    fn make(&self, plan: &Plan, queue: NonNull<ibv_cq>, inline: u32) -> Result<(NonNull<ibv_qp>, u32), Fault> {
        let cap = ibv_qp_cap {
            max_send_wr: self.station.port.sends(plan),
            max_recv_wr: plan.receives_max,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: inline,
        };
        let (send_cq, recv_cq) = (queue.as_ptr(), queue.as_ptr());
        let mut wanted = ibv_qp_init_attr { send_cq, recv_cq, cap, ..ibv_qp_init_attr::default() };
        wanted.qp_type = IBV_QPT_RC;
        let pair = checked::pair(self.station.verbs(), self.domain, &mut wanted)?;
        Ok((pair, wanted.cap.max_inline_data))
    }
}

impl Region for CardRegion {
    fn near_key(&self) -> u32 {
        self.keys.0
    }

    fn far_key(&self) -> u32 {
        self.keys.1
    }

    fn close(&mut self) -> Result<(), Fault> {
        let Some(region) = self.region else { return Ok(()) };
        checked::deregister(self.domain.station.verbs(), region)?;
        self.region = None;
        Ok(())
    }
}

impl CardPair {
    fn verbs(&self) -> &'static Verbs {
        self.domain.station.verbs()
    }

    fn open(&self) -> Result<NonNull<ibv_qp>, Fault> {
        self.pair.ok_or_else(|| Fault::new("the queue pair is destroyed"))
    }

    /// From here on it can be given room for messages.
    fn initialise(&mut self, is_open: bool) -> Result<(), Fault> {
        let access = if is_open { IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ } else { 0 };
        let port_num = self.domain.station.port.number;
        let mut wish = ibv_qp_attr { port_num, qp_access_flags: access, ..ibv_qp_attr::default() };
        wish.qp_state = IBV_QPS_INIT;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        checked::modify(self.verbs(), self.open()?, &mut wish, mask)
    }
}

impl CardPair {
    /// Adds `bytes` bytes of a piece of work, from byte `from` on.
    fn add(&mut self, work: &Work, (from, bytes): (u32, u32), is_last: bool) {
        let mut request = ibv_send_wr { wr_id: work.id, ..ibv_send_wr::default() };
        request.send_flags = if work.is_told && is_last { IBV_SEND_SIGNALED } else { 0 };
        let far = match work.act {
            Act::Send => {
                request.opcode = IBV_WR_SEND;
                if bytes <= self.inline_max {
                    request.send_flags |= IBV_SEND_INLINE;
                }
                None
            }
            Act::Read(far) => {
                request.opcode = IBV_WR_RDMA_READ;
                Some(far)
            }
            Act::Write(far, Some(number)) if is_last => {
                request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
                request.__bindgen_anon_1.imm_data = number.to_be();
                Some(far)
            }
            Act::Write(far, _) => {
                request.opcode = IBV_WR_RDMA_WRITE;
                Some(far)
            }
        };
        if let Some(far) = far {
            // An address that is too large is the other side's, and its card refuses it.
            let remote_addr = far.address.wrapping_add(from.into());
            request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey: far.key };
        }
        self.sends.push(request);
        let near = work.near;
        self.entries.push(ibv_sge { addr: near.address() + u64::from(from), length: bytes, lkey: near.key() });
    }
}

impl Pair for CardPair {
    fn here(&self) -> End {
        self.end
    }

    fn connect(&mut self, there: &End) -> Result<(), Fault> {
        let (pair, port) = (self.open()?, &self.domain.station.port);
        let mut wish = ibv_qp_attr { qp_state: IBV_QPS_RTR, ..ibv_qp_attr::default() };
        (wish.path_mtu, wish.dest_qp_num, wish.rq_psn) =
            (self.end.mtu.min(there.mtu).into(), there.number, there.packet);
        (wish.max_dest_rd_atomic, wish.min_rnr_timer) = (self.end.reads_in, 12);
        wish.ah_attr = ibv_ah_attr { dlid: there.lid, port_num: port.number, ..ibv_ah_attr::default() };
        if port.is_global || there.lid == 0 {
            let dgid = ibv_gid { raw: there.gid };
            wish.ah_attr.is_global = 1;
            wish.ah_attr.grh =
                ibv_global_route { dgid, sgid_index: port.gid_index, hop_limit: 64, ..ibv_global_route::default() };
        }
        let receiving = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let mask = IBV_QP_STATE | receiving | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        checked::modify(self.verbs(), pair, &mut wish, mask)?;
        let mut wish = ibv_qp_attr { qp_state: IBV_QPS_RTS, sq_psn: self.end.packet, ..ibv_qp_attr::default() };
        (wish.timeout, wish.retry_cnt, wish.rnr_retry) = (TIMEOUT, RETRIES, ROOM_RETRIES);
        wish.max_rd_atomic = port.facts.reads_out.min(there.reads_in).max(1);
        let sending = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN;
        checked::modify(self.verbs(), pair, &mut wish, IBV_QP_STATE | sending | IBV_QP_MAX_QP_RD_ATOMIC)
    }

    fn receive(&mut self, room: &[Receive]) -> Result<(), Fault> {
        let pair = self.open()?;
        self.receives.clear();
        self.entries.clear();
        for Receive { id, near } in room {
            self.receives.push(ibv_recv_wr { wr_id: *id, ..ibv_recv_wr::default() });
            self.entries.push(ibv_sge { addr: near.address(), length: near.bytes(), lkey: near.key() });
        }
        checked::receive(pair, &mut self.receives, &mut self.entries)
    }

    fn post(&mut self, work: &[Work]) -> Result<(), Fault> {
        let pair = self.open()?;
        self.sends.clear();
        self.entries.clear();
        let message_max = self.domain.station.port.message_max;
        for work in work {
            // Only the last piece says that all are done; what fails says so whichever it is.
            let mut from = 0;
            while from + message_max < work.near.bytes() {
                self.add(work, (from, message_max), false);
                from += message_max;
            }
            self.add(work, (from, work.near.bytes() - from), true);
        }
        checked::post(pair, &mut self.sends, &mut self.entries)
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Fault> {
        loop {
            let count = checked::poll(self.queue, &mut self.polled)?;
            done.extend(self.polled[..count].iter().map(read));
            if count < POLLED {
                return Ok(());
            }
        }
    }

    fn arm(&mut self) -> Result<(), Fault> {
        checked::arm(self.queue)
    }

    fn close(&mut self) -> Result<(), Fault> {
        let Some(pair) = self.pair else { return Ok(()) };
        checked::close_pair(self.verbs(), pair)?;
        self.pair = None;
        Ok(())
    }
}

fn read(done: &ibv_wc) -> Done {
    let id = done.wr_id;
    if done.status != IBV_WC_SUCCESS {
        return Done { id, what: Err(Status(done.status)) };
    }
    let what = match done.opcode {
        IBV_WC_RECV => What::Message(done.byte_len),
        IBV_WC_RECV_RDMA_WITH_IMM => {
            // SAFETY: the number is there in a completion of this kind, and either form of it is 32 bits.
            What::Number(u32::from_be(unsafe { done.__bindgen_anon_1.imm_data }))
        }
        _ => What::Posted,
    };
    Done { id, what: Ok(what) }
}

/// What cannot be destroyed is left to the system, which destroys it with the process.
fn leave(result: Result<(), Fault>) {
    if let Err(fault) = result {
        tracing::warn!(%fault, "left to the system");
    }
}

impl Drop for CardPair {
    fn drop(&mut self) {
        leave(self.close());
        if self.pair.is_none() {
            leave(checked::close_queue(self.verbs(), self.queue));
        }
    }
}

impl Drop for CardRegion {
    fn drop(&mut self) {
        leave(self.close());
    }
}

impl Drop for CardDomain {
    fn drop(&mut self) {
        leave(checked::close_domain(self.station.verbs(), self.domain));
    }
}

impl Drop for CardStation {
    fn drop(&mut self) {
        leave(checked::close_channel(self.verbs(), self.channel));
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        leave(checked::close(self.verbs, self.context));
    }
}

impl fmt::Debug for Card {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Card({})", self.0.facts.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bad_device_leaves_the_others() {
        let bad = || Err(Fault::new("asking for a device's limits: Input/output error"));
        let check = |said: Vec<Result<Vec<u8>, Fault>>, expected: &[u8]| {
            assert_eq!(that_answer(said.into_iter().map(|said| ("mlx5_0", said))), expected);
        };
        check(vec![Ok(vec![1]), bad(), Ok(vec![2, 3])], &[1, 2, 3]);
        check(vec![bad()], &[]);
        check(vec![], &[]);
    }

    #[test]
    fn who_may_lock_everything_has_no_limit() {
        let all = "         0          0 4294967295\n";
        let check = |status: &str, users: &str, expected: bool| {
            assert_eq!(may_lock_all(status, users), expected, "{status:?}, {users:?}");
        };
        check("Name:\tpserver\nCapPrm:\t000001ffffffffff\nCapEff:\t000001ffffffffff\n", all, true);
        check("CapPrm:\t000001ffffffffff\nCapEff:\t0000000000000000\n", all, false);
        check("CapEff:\t0000000000004000\n", all, true);
        check("CapEff:\t0000000000004000\n", "         0       1000          1\n", false);
        check("CapEff:\t0000000000004000\n", "", false);
        check("CapEff:\t00000000a80425fb\n", all, false);
        check("CapEff:\tnone\n", all, false);
        check("", all, false);
    }

    #[test]
    fn events_that_pairs_do_not_survive_have_a_meaning() {
        let check = |event, is_of_port, expected: Option<&str>| assert_eq!(meaning(event, is_of_port), expected);
        check(IBV_EVENT_DEVICE_FATAL, false, Some("the device has failed"));
        check(IBV_EVENT_PORT_ERR, true, Some("the port is down"));
        check(IBV_EVENT_PORT_ERR, false, None);
        check(IBV_EVENT_PORT_ACTIVE, true, None);
        check(IBV_EVENT_GID_CHANGE, true, None);
        check(IBV_EVENT_QP_FATAL, true, None);
    }
}

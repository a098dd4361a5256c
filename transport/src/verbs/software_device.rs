//! Software RDMA device over ordinary memory, in process: the rules of reliable-connected queue pairs without a
//! network.
//!
//! A request is executed on the thread that posts it, at once. Keys, ranges, domains and kinds of access are checked as
//! a card checks them. A queue pair that fails flushes its requests, and its peer's requests then fail. Completions
//! come in order, and an armed channel signals them. It is the simplest device, and the one that tests use.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use pserver_core::memory::Mapped;
use rustix::event::{EventfdFlags, eventfd};

use super::memory_span::MemorySpan;
use super::provider::{
    CompletionChannel, CompletionKind, DeviceNews, LinkLayer, MemoryRegion, Operation, PairAddress, PairCapacity,
    PortAttributes, ProtectionDomain, QueuePair, RdmaDevice, ReceiveRequest, RegionAccess, RemoteAddress,
    WorkCompletion, WorkRequest,
};
use super::reasons::VerbsError;
use super::status::CompletionStatus;

/// A software device. Devices with a common fabric can connect.
#[derive(Debug)]
pub(crate) struct SoftwareDevice {
    attributes: PortAttributes,
    fabric: Arc<SoftwareFabric>,
}

#[derive(Debug, Default)]
struct SoftwareFabric {
    state: Mutex<FabricState>,
    numbers: AtomicU32,
}

/// Queue pairs and regions of the fabric.
#[derive(Debug, Default)]
struct FabricState {
    pairs: HashMap<u32, SoftwareQueues>,
    regions: HashMap<u32, SoftwareRegionEntry>,
    /// Messages that found no posted receive.
    receiver_not_ready: u64,
    counts: DeviceCounts,
    /// Reads and writes so far, in tests.
    transfers: Vec<RdmaTransfer>,
}

/// Counts of a device's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceCounts {
    /// SENDs.
    pub(super) messages: usize,
    /// Calls that post requests.
    pub(super) doorbells: usize,
    /// Completions that were polled.
    pub(super) completions: usize,
}

/// One RDMA read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RdmaTransfer {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) bytes: u32,
    pub(super) is_read: bool,
}

#[derive(Clone, Copy, Debug)]
struct SoftwareRegionEntry {
    domain: u32,
    address: u64,
    bytes: u64,
    access: RegionAccess,
}

#[derive(Debug)]
struct SoftwareQueues {
    domain: u32,
    is_open: bool,
    packet: u32,
    there: Option<PairAddress>,
    has_failed: bool,
    receives: VecDeque<ReceiveRequest>,
    done: VecDeque<WorkCompletion>,
    waker: Option<Waker>,
    event: Arc<SoftwareEvent>,
}

/// Announcements of a channel's completions.
#[derive(Debug)]
struct SoftwareEvent {
    descriptor: OwnedFd,
    is_armed: AtomicBool,
    /// Wakers of the pairs that have completions.
    woken: Mutex<Vec<Waker>>,
}

struct SoftwareChannel {
    fabric: Arc<SoftwareFabric>,
    event: Arc<SoftwareEvent>,
}

struct SoftwareDomain {
    fabric: Arc<SoftwareFabric>,
    event: Arc<SoftwareEvent>,
    number: u32,
}

struct SoftwareRegion {
    fabric: Arc<SoftwareFabric>,
    key: u32,
}

struct SoftwarePair {
    fabric: Arc<SoftwareFabric>,
    end: PairAddress,
}

impl SoftwareFabric {
    fn lock(&self) -> MutexGuard<'_, FabricState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that no queue pair, domain or region has had. Numbers are spread, so that guesses rarely hit one.
    fn number(&self) -> u32 {
        self.numbers.fetch_add(1, Relaxed).wrapping_add(1).wrapping_mul(0x9e37_79b1) & 0x00ff_ffff
    }
}

impl SoftwareDevice {
    pub(crate) fn new() -> Self {
        let name = "memory of this process".to_owned();
        let attributes = PortAttributes {
            name,
            gid: [0; 16],
            lid: 0,
            layer: LinkLayer::Unknown,
            pkey_index: 0,
            mtu: 5,
            reads_out: 16,
            reads_in: 16,
            is_limited: false,
        };
        Self { attributes, fabric: Arc::default() }
    }

    /// Messages that found no posted receive.
    #[cfg(test)]
    pub(super) fn receiver_not_ready(&self) -> u64 {
        self.fabric.lock().receiver_not_ready
    }

    /// Takes the counts of what was asked of the device since the last call.
    #[cfg(test)]
    pub(super) fn take_counts(&self) -> DeviceCounts {
        std::mem::take(&mut self.fabric.lock().counts)
    }

    /// Takes the reads and writes since the last call.
    #[cfg(test)]
    pub(super) fn take_transfers(&self) -> Vec<RdmaTransfer> {
        std::mem::take(&mut self.fabric.lock().transfers)
    }

    /// Resets a failed queue pair, as if it were connected again.
    #[cfg(test)]
    pub(super) fn revive(&self, number: u32) {
        if let Ok(queues) = self.fabric.lock().queues(number) {
            queues.has_failed = false;
            queues.done.clear();
        }
    }

    /// The key, address and length of every region.
    #[cfg(test)]
    pub(super) fn regions(&self) -> Vec<(u32, u64, u64)> {
        self.fabric.lock().regions.iter().map(|(key, region)| (*key, region.address, region.bytes)).collect()
    }
}

impl RdmaDevice for SoftwareDevice {
    fn attributes(&self) -> &PortAttributes {
        &self.attributes
    }

    fn completion_channel(&self) -> Result<Arc<dyn CompletionChannel>, VerbsError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let descriptor = event.map_err(|error| VerbsError::new(format!("making a descriptor: {error}")))?;
        let event = SoftwareEvent { descriptor, is_armed: AtomicBool::new(false), woken: Mutex::default() };
        let event = Arc::new(event);
        Ok(Arc::new(SoftwareChannel { fabric: Arc::clone(&self.fabric), event }))
    }

    fn device_memory(&self) -> Result<(), VerbsError> {
        Err(VerbsError::new("the software device has none"))
    }
}

impl CompletionChannel for SoftwareChannel {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.descriptor.as_fd()
    }

    fn drain(&self) -> Result<(), VerbsError> {
        // A counter of zero is no error.
        let _ = rustix::io::read(&self.event.descriptor, &mut [0; 8]);
        Ok(())
    }

    fn collect(&self) -> Result<bool, VerbsError> {
        let mut woken = self.event.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let has_some = !woken.is_empty();
        woken.drain(..).for_each(Waker::wake);
        Ok(has_some)
    }

    fn arm(&self) -> Result<(), VerbsError> {
        self.event.is_armed.store(true, Relaxed);
        Ok(())
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn news(&self) -> Result<DeviceNews, VerbsError> {
        Ok(DeviceNews::default())
    }

    fn domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        let (fabric, event) = (Arc::clone(&self.fabric), Arc::clone(&self.event));
        let number = fabric.number();
        Ok(Arc::new(SoftwareDomain { fabric, event, number }))
    }
}

impl ProtectionDomain for SoftwareDomain {
    fn register(
        &self,
        memory: &Mapped,
        piece: (usize, usize),
        access: RegionAccess,
    ) -> Result<Box<dyn MemoryRegion>, VerbsError> {
        let (begin, bytes) = piece;
        if bytes == 0 || begin.checked_add(bytes).is_none_or(|end| end > memory.len()) {
            return Err(VerbsError::new(format!("{bytes} bytes at {begin} of a mapping of {}", memory.len())));
        }
        let key = self.fabric.number();
        let address = (memory.address() + begin) as u64;
        let region = SoftwareRegionEntry { domain: self.number, address, bytes: bytes as u64, access };
        self.fabric.lock().regions.insert(key, region);
        Ok(Box::new(SoftwareRegion { fabric: Arc::clone(&self.fabric), key }))
    }

    fn pair(&self, capacity: &PairCapacity) -> Result<Box<dyn QueuePair>, VerbsError> {
        let (number, packet) = (self.fabric.number(), self.fabric.number());
        let queues = SoftwareQueues {
            domain: self.number,
            is_open: capacity.is_open,
            packet,
            there: None,
            has_failed: false,
            receives: VecDeque::new(),
            done: VecDeque::new(),
            waker: None,
            event: Arc::clone(&self.event),
        };
        self.fabric.lock().pairs.insert(number, queues);
        let end = PairAddress { number, packet, gid: [0; 16], lid: 0, mtu: 5, reads_in: 16, layer: LinkLayer::Unknown };
        Ok(Box::new(SoftwarePair { fabric: Arc::clone(&self.fabric), end }))
    }
}

impl MemoryRegion for SoftwareRegion {
    fn local_key(&self) -> u32 {
        self.key
    }

    fn remote_key(&self) -> u32 {
        self.key
    }

    fn close(&mut self) -> Result<(), VerbsError> {
        self.fabric.lock().regions.remove(&self.key);
        Ok(())
    }
}

impl Drop for SoftwareRegion {
    fn drop(&mut self) {
        self.fabric.lock().regions.remove(&self.key);
    }
}

impl QueuePair for SoftwarePair {
    fn here(&self) -> PairAddress {
        self.end
    }

    fn connect(&mut self, there: &PairAddress) -> Result<(), VerbsError> {
        self.fabric.lock().queues(self.end.number)?.there = Some(*there);
        Ok(())
    }

    fn receive(&mut self, room: &[ReceiveRequest]) -> Result<(), VerbsError> {
        let mut state = self.fabric.lock();
        let queues = state.queues(self.end.number)?;
        queues.receives.extend(room.iter().map(|ReceiveRequest { id, span }| ReceiveRequest { id: *id, span: *span }));
        if queues.has_failed {
            queues.flush();
        }
        Ok(())
    }

    fn post(&mut self, work: &[WorkRequest]) -> Result<(), VerbsError> {
        let mut state = self.fabric.lock();
        state.counts.doorbells += 1;
        state.counts.messages += work.iter().filter(|work| matches!(work.operation, Operation::Send)).count();
        for work in work {
            let outcome = match state.queues(self.end.number)? {
                queues if queues.has_failed => Err(CompletionStatus::FLUSHED),
                _ => state.execute(self.end.number, work),
            };
            let queues = state.queues(self.end.number)?;
            if outcome.is_err() || work.is_signaled {
                queues.finish(WorkCompletion { id: work.id, result: outcome.map(|()| CompletionKind::Posted) });
            }
            if outcome.is_err() && !queues.has_failed {
                queues.has_failed = true;
                queues.flush();
            }
        }
        Ok(())
    }

    fn set_waker(&mut self, waker: &Waker) {
        if let Ok(queues) = self.fabric.lock().queues(self.end.number) {
            queues.waker = Some(waker.clone());
        }
    }

    fn collect(&mut self) -> Result<(), VerbsError> {
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<WorkCompletion>) -> Result<(), VerbsError> {
        let mut state = self.fabric.lock();
        let before = done.len();
        done.extend(state.queues(self.end.number)?.done.drain(..));
        state.counts.completions += done.len() - before;
        Ok(())
    }

    fn close(&mut self) -> Result<(), VerbsError> {
        self.fabric.lock().pairs.remove(&self.end.number);
        Ok(())
    }
}

impl Drop for SoftwarePair {
    fn drop(&mut self) {
        self.fabric.lock().pairs.remove(&self.end.number);
    }
}

impl SoftwareQueues {
    fn finish(&mut self, done: WorkCompletion) {
        self.done.push_back(done);
        if let Some(waker) = &self.waker {
            self.event.woken.lock().unwrap_or_else(PoisonError::into_inner).push(waker.clone());
        }
        if self.event.is_armed.swap(false, Relaxed) {
            // A full counter is signaled already.
            let _ = rustix::io::write(&self.event.descriptor, &1_u64.to_ne_bytes());
        }
    }

    fn flush(&mut self) {
        while let Some(ReceiveRequest { id, .. }) = self.receives.pop_front() {
            self.finish(WorkCompletion { id, result: Err(CompletionStatus::FLUSHED) });
        }
    }
}

impl FabricState {
    fn queues(&mut self, number: u32) -> Result<&mut SoftwareQueues, VerbsError> {
        self.pairs.get_mut(&number).ok_or_else(|| VerbsError::new("the queue pair is destroyed"))
    }

    /// Executes one request of pair `number`.
    fn execute(&mut self, number: u32, work: &WorkRequest) -> Result<(), CompletionStatus> {
        let span = work.span;
        let (here, there) = self.ends(number)?;
        if !self.is_allowed(span.key(), span.address(), span.bytes(), |region| region.domain == here) {
            return Err(CompletionStatus::LOCAL_PROTECTION);
        }
        match work.operation {
            Operation::Send => {
                let receive = self.room(there)?;
                let target = self.pairs[&there].domain;
                let (room, key) = (receive.span.bytes(), receive.span.key());
                let is_right = span.bytes() <= room
                    && self.is_allowed(key, receive.span.address(), room, |region| region.domain == target);
                if !is_right {
                    self.fail(there, receive.id, CompletionStatus::LOCAL_LENGTH);
                    return Err(CompletionStatus::REMOTE_REQUEST);
                }
                copy(span.address(), receive.span.address(), span.bytes());
                self.complete(there, receive.id, CompletionKind::Message(span.bytes()));
            }
            Operation::Read(target) => {
                self.check(there, target, span.bytes())?;
                self.record_transfer(span, target, true);
                copy(target.address, span.address(), span.bytes());
            }
            Operation::Write(target, immediate) => {
                self.check(there, target, span.bytes())?;
                self.record_transfer(span, target, false);
                if let Some(immediate) = immediate {
                    let receive = self.room(there)?;
                    copy(span.address(), target.address, span.bytes());
                    self.complete(there, receive.id, CompletionKind::Immediate(immediate));
                } else {
                    copy(span.address(), target.address, span.bytes());
                }
            }
        }
        Ok(())
    }

    /// Records addresses and length for tests.
    fn record_transfer(&mut self, span: MemorySpan, remote: RemoteAddress, is_read: bool) {
        if cfg!(test) && span.bytes() > 0 {
            self.transfers.push(RdmaTransfer {
                local: span.address(),
                remote: remote.address,
                bytes: span.bytes(),
                is_read,
            });
        }
    }

    /// The domain of a queue pair, and the number of the peer that is connected to it.
    fn ends(&mut self, number: u32) -> Result<(u32, u32), CompletionStatus> {
        let here = &self.pairs[&number];
        let there = here.there.ok_or(CompletionStatus::NO_ANSWER)?;
        let other = self.pairs.get(&there.number).ok_or(CompletionStatus::NO_ANSWER)?;
        let is_connected = other.packet == there.packet && other.there.is_some_and(|end| end.number == number);
        if !is_connected || other.has_failed || other.there.is_some_and(|end| end.packet != here.packet) {
            return Err(CompletionStatus::NO_ANSWER);
        }
        Ok((here.domain, there.number))
    }

    fn room(&mut self, number: u32) -> Result<ReceiveRequest, CompletionStatus> {
        let room = self.pairs.get_mut(&number).and_then(|queues| queues.receives.pop_front());
        self.receiver_not_ready += u64::from(room.is_none());
        room.ok_or(CompletionStatus::RECEIVER_NOT_READY)
    }

    fn complete(&mut self, number: u32, id: u64, result: CompletionKind) {
        if let Some(queues) = self.pairs.get_mut(&number) {
            queues.finish(WorkCompletion { id, result: Ok(result) });
        }
    }

    fn fail(&mut self, number: u32, id: u64, status: CompletionStatus) {
        if let Some(queues) = self.pairs.get_mut(&number) {
            queues.has_failed = true;
            queues.finish(WorkCompletion { id, result: Err(status) });
            queues.flush();
        }
    }

    /// Whether the peer allows this access; an empty range is always allowed.
    fn check(&mut self, there: u32, address: RemoteAddress, bytes: u32) -> Result<(), CompletionStatus> {
        let (target, is_open) = (self.pairs[&there].domain, self.pairs[&there].is_open);
        let is_right = |region: &SoftwareRegionEntry| region.domain == target && region.access == RegionAccess::Remote;
        if is_open && self.is_allowed(address.key, address.address, bytes, is_right) {
            return Ok(());
        }
        // A forbidden request also fails the peer's queue pair.
        if let Some(queues) = self.pairs.get_mut(&there) {
            queues.has_failed = true;
            queues.flush();
        }
        Err(CompletionStatus::REMOTE_ACCESS)
    }

    fn is_allowed(&self, key: u32, address: u64, bytes: u32, is_right: impl Fn(&SoftwareRegionEntry) -> bool) -> bool {
        let inside = |region: &SoftwareRegionEntry| {
            let end = address.checked_add(bytes.into());
            address >= region.address && end.is_some_and(|end| end <= region.address + region.bytes)
        };
        bytes == 0 || self.regions.get(&key).is_some_and(|region| inside(region) && is_right(region))
    }
}

/// Copies bytes between two registered ranges.
fn copy(from: u64, to: u64, bytes: u32) {
    let address = |number: u64| usize::try_from(number).expect("it was an address of this process");
    if bytes == 0 {
        return;
    }
    let from = ptr::with_exposed_provenance::<u8>(address(from));
    let to = ptr::with_exposed_provenance_mut::<u8>(address(to));
    // SAFETY: both ranges were just found inside regions, whose mappings their registrants keep as long as the regions.
    // The local range is a span, whose memory `work_requests` owns until the work has completed. The remote side does
    // not touch its range until it is told that it was read or written. So no other thread reads what is written here,
    // or writes what is read. The ranges overlap only if a queue pair is connected within one memory, which `copy`
    // allows.
    unsafe { ptr::copy(from, to, bytes as usize) }
}

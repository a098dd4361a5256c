//! Wrapper that injects faults into any device: failed, lost, repeated and reordered completions, wrong immediate data,
//! foreign keys, and refused calls.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use pserver_core::memory::Mapped;
use rustix::event::{EventfdFlags, eventfd};

use super::provider::{
    CompletionChannel, CompletionKind, DeviceNews, MemoryRegion, PairAddress, PairCapacity, PortAttributes,
    ProtectionDomain, QueuePair, RdmaDevice, ReceiveRequest, RegionAccess, WorkCompletion, WorkRequest,
};
use super::reasons::VerbsError;
use super::software_device::SoftwareDevice;
use super::status::CompletionStatus;

/// Polls by which a slow device delays completions.
const SLOW_POLLS: u64 = 8;

/// A fault of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceFault {
    /// A completion reports this failure.
    Fails(CompletionStatus),
    /// A completion is lost.
    Lost,
    /// A completion is reported twice.
    Twice,
    /// A message's completion comes after the next one.
    Late,
    /// A completion names a request that was never posted.
    UnknownId,
    /// A write's immediate data is changed.
    WrongNumber,
    /// A message claims to be longer than its slot.
    TooLong,
    /// Polling fails.
    PollFails,
    /// Posting fails.
    PostFails,
    /// Registration fails.
    RegistrationFails,
    /// Only so many more pieces can be registered.
    RegistrationLimit(u64),
    /// The peer is told this key for all memory.
    Key(u32),
    /// No completions, and queue pairs cannot be destroyed.
    Unresponsive,
    /// Every completion is delayed by some polls.
    Slow,
    /// Queue pairs connect, and posted requests fail without an answer.
    NoAnswer,
    /// Connecting blocks until the fault is cleared.
    ConnectBlocks,
    /// Connecting fails.
    ConnectFails,
    /// Deregistration fails.
    DeregistrationFails,
    /// No completions, queue pairs cannot be destroyed, and deregistration fails.
    Hung,
    /// The device reports its failure.
    Fatal,
}

/// A fault and its time: it affects queue pairs of this openness, after so many completions or calls. It strikes once,
/// except for faults of the whole device.
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultInjection {
    pub(super) fault: DeviceFault,
    pub(super) is_open: bool,
    pub(super) after: u32,
}

/// A device with an injected fault.
#[derive(Clone, Debug)]
pub(super) struct FaultyDevice {
    inner: Arc<dyn RdmaDevice>,
    inject: Arc<(Mutex<Option<FaultInjection>>, Condvar)>,
    /// Readable when the device has an event.
    events: Arc<OwnedFd>,
}

struct FaultyChannel(Arc<dyn CompletionChannel>, FaultyDevice);

struct FaultyDomain(Arc<dyn ProtectionDomain>, FaultyDevice);

struct FaultyRegion(Box<dyn MemoryRegion>, FaultyDevice);

struct FaultyPair {
    inner: Box<dyn QueuePair>,
    is_open: bool,
    late: Vec<WorkCompletion>,
    /// Delayed completions with the poll that reports them.
    slow: VecDeque<(u64, WorkCompletion)>,
    polls: u64,
    /// Completions of requests that were posted without an answer.
    unanswered: Vec<WorkCompletion>,
    waker: Option<Waker>,
    device: FaultyDevice,
}

impl FaultyDevice {
    /// A software device with delayed completions.
    pub(super) fn slow() -> Self {
        let slow = Self::new(Arc::new(SoftwareDevice::new()));
        slow.inject(Some(FaultInjection { fault: DeviceFault::Slow, is_open: true, after: 0 }));
        slow
    }

    pub(super) fn new(inner: Arc<dyn RdmaDevice>) -> Self {
        let events = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor");
        Self { inner, inject: Arc::default(), events: Arc::new(events) }
    }

    /// Sets or clears the fault.
    pub(super) fn inject(&self, inject: Option<FaultInjection>) {
        *self.lock() = inject;
        self.inject.1.notify_all();
        if self.standing(true) == Some(DeviceFault::Fatal) {
            rustix::io::write(&self.events, &1_u64.to_ne_bytes()).expect("there is room");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<FaultInjection>> {
        self.inject.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until this fault is cleared.
    fn wait_until_cleared(&self, fault: DeviceFault, is_open: bool) {
        let is_on = |inject: &mut Option<FaultInjection>| {
            inject.is_some_and(|one| (one.fault, one.is_open) == (fault, is_open))
        };
        drop(self.inject.1.wait_while(self.lock(), is_on).unwrap_or_else(PoisonError::into_inner));
    }

    /// The fault that lasts, if it is set for such queue pairs.
    fn standing(&self, is_open: bool) -> Option<DeviceFault> {
        self.lock().filter(|inject| inject.is_open == is_open).map(|inject| inject.fault)
    }

    /// Whether completions are delayed, on all queue pairs.
    fn is_slow(&self) -> bool {
        self.lock().is_some_and(|inject| inject.fault == DeviceFault::Slow)
    }

    /// Takes the fault if `applies` selects it and it is due.
    fn next(&self, is_open: bool, applies: impl Fn(DeviceFault) -> bool) -> Option<DeviceFault> {
        let mut inject = self.lock();
        let due = inject.as_mut().filter(|inject| inject.is_open == is_open && applies(inject.fault))?;
        if due.after > 0 {
            due.after -= 1;
            return None;
        }
        inject.take().map(|inject| inject.fault)
    }
}

impl RdmaDevice for FaultyDevice {
    fn attributes(&self) -> &PortAttributes {
        self.inner.attributes()
    }

    fn completion_channel(&self) -> Result<Arc<dyn CompletionChannel>, VerbsError> {
        Ok(Arc::new(FaultyChannel(self.inner.completion_channel()?, self.clone())))
    }

    fn device_memory(&self) -> Result<(), VerbsError> {
        self.inner.device_memory()
    }
}

impl CompletionChannel for FaultyChannel {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }

    fn drain(&self) -> Result<(), VerbsError> {
        self.0.drain()
    }

    fn collect(&self) -> Result<bool, VerbsError> {
        self.0.collect()
    }

    fn arm(&self) -> Result<(), VerbsError> {
        self.0.arm()
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.1.events.as_fd())
    }

    fn news(&self) -> Result<DeviceNews, VerbsError> {
        let is_signaled = rustix::io::read(&self.1.events, &mut [0; 8]).is_ok();
        let failure = is_signaled.then(|| "the device has failed".to_owned());
        Ok(DeviceNews { failure, has_changed: false })
    }

    fn domain(&self) -> Result<Arc<dyn ProtectionDomain>, VerbsError> {
        Ok(Arc::new(FaultyDomain(self.0.domain()?, self.1.clone())))
    }
}

impl ProtectionDomain for FaultyDomain {
    fn register(
        &self,
        memory: &Mapped,
        piece: (usize, usize),
        access: RegionAccess,
    ) -> Result<Box<dyn MemoryRegion>, VerbsError> {
        let is_open = access != RegionAccess::Local;
        let is_refused = match self.1.standing(is_open) {
            Some(DeviceFault::RegistrationFails | DeviceFault::RegistrationLimit(0)) => true,
            Some(DeviceFault::RegistrationLimit(pieces)) => {
                *self.1.lock() =
                    Some(FaultInjection { fault: DeviceFault::RegistrationLimit(pieces - 1), is_open, after: 0 });
                false
            }
            _ => false,
        };
        if is_refused {
            return Err(VerbsError::new("memory of this size cannot be registered"));
        }
        Ok(Box::new(FaultyRegion(self.0.register(memory, piece, access)?, self.1.clone())))
    }

    fn pair(&self, capacity: &PairCapacity) -> Result<Box<dyn QueuePair>, VerbsError> {
        let (inner, device) = (self.0.pair(capacity)?, self.1.clone());
        let (late, slow, unanswered, is_open) = (Vec::new(), VecDeque::new(), Vec::new(), capacity.is_open);
        Ok(Box::new(FaultyPair { inner, is_open, late, slow, polls: 0, unanswered, waker: None, device }))
    }
}

impl MemoryRegion for FaultyRegion {
    fn local_key(&self) -> u32 {
        self.0.local_key()
    }

    fn remote_key(&self) -> u32 {
        match self.1.standing(true) {
            Some(DeviceFault::Key(key)) => key,
            _ => self.0.remote_key(),
        }
    }

    fn close(&mut self) -> Result<(), VerbsError> {
        if self
            .1
            .standing(true)
            .is_some_and(|fault| matches!(fault, DeviceFault::DeregistrationFails | DeviceFault::Hung))
        {
            return Err(VerbsError::new("the device does not deregister the memory"));
        }
        self.0.close()
    }
}

impl FaultyPair {
    fn apply_fault(&mut self, mut one: WorkCompletion, done: &mut Vec<WorkCompletion>) {
        let is_number = matches!(one.result, Ok(CompletionKind::Immediate(_)));
        let is_message = matches!(one.result, Ok(CompletionKind::Message(_)));
        let applies = |fault| match fault {
            DeviceFault::WrongNumber => is_number,
            DeviceFault::TooLong => is_message,
            // A completion covers all requests before it, so only a lost message is noticed.
            DeviceFault::Lost | DeviceFault::Late => is_message,
            DeviceFault::Fails(_) | DeviceFault::Twice | DeviceFault::UnknownId => true,
            _ => false,
        };
        match (self.device.next(self.is_open, applies), one.result) {
            (Some(DeviceFault::Fails(status)), _) => one.result = Err(status),
            (Some(DeviceFault::Lost), _) => return,
            (Some(DeviceFault::Late), _) => return self.late.push(one),
            (Some(DeviceFault::Twice), _) => done.push(one),
            (Some(DeviceFault::UnknownId), _) => one.id ^= 0x00ff_ff00,
            (Some(DeviceFault::WrongNumber), Ok(CompletionKind::Immediate(number))) => {
                one.result = Ok(CompletionKind::Immediate(number ^ 0x100))
            }
            (Some(DeviceFault::TooLong), _) => one.result = Ok(CompletionKind::Message(u32::MAX)),
            _ => {}
        }
        done.push(one);
    }
}

impl QueuePair for FaultyPair {
    fn here(&self) -> PairAddress {
        self.inner.here()
    }

    fn connect(&mut self, there: &PairAddress) -> Result<(), VerbsError> {
        self.device.wait_until_cleared(DeviceFault::ConnectBlocks, self.is_open);
        if self.device.standing(self.is_open) == Some(DeviceFault::ConnectFails) {
            return Err(VerbsError::new("no queue pair has that address"));
        }
        self.inner.connect(there)
    }

    fn receive(&mut self, room: &[ReceiveRequest]) -> Result<(), VerbsError> {
        self.inner.receive(room)
    }

    fn post(&mut self, work: &[WorkRequest]) -> Result<(), VerbsError> {
        if self.device.standing(self.is_open) == Some(DeviceFault::NoAnswer) {
            self.waker.iter().for_each(Waker::wake_by_ref);
            self.unanswered.extend(
                work.first().map(|work| WorkCompletion { id: work.id, result: Err(CompletionStatus::NO_ANSWER) }),
            );
            return Ok(());
        }
        match self.device.next(self.is_open, |fault| fault == DeviceFault::PostFails) {
            Some(_) => Err(VerbsError::new("the device takes no more work")),
            None => self.inner.post(work),
        }
    }

    fn set_waker(&mut self, waker: &Waker) {
        self.waker = Some(waker.clone());
        self.inner.set_waker(waker);
    }

    fn collect(&mut self) -> Result<(), VerbsError> {
        self.inner.collect()
    }

    fn poll(&mut self, done: &mut Vec<WorkCompletion>) -> Result<(), VerbsError> {
        match self.device.standing(self.is_open) {
            Some(DeviceFault::PollFails) => return Err(VerbsError::new("the completion queue is lost")),
            Some(DeviceFault::Unresponsive | DeviceFault::Hung) => return Ok(()),
            _ => {}
        }
        done.append(&mut self.unanswered);
        let mut whole = Vec::new();
        self.inner.poll(&mut whole)?;
        self.polls += 1;
        if self.device.is_slow() || !self.slow.is_empty() {
            let due = self.polls + SLOW_POLLS;
            self.slow.extend(whole.drain(..).map(|done| (due, done)));
            while let Some((_, done)) = self.slow.pop_front_if(|(due, _)| *due <= self.polls) {
                whole.push(done);
            }
            // Later polls report the others.
            self.waker.iter().filter(|_| !self.slow.is_empty()).for_each(Waker::wake_by_ref);
        }
        let has_message = whole.iter().any(|one| matches!(one.result, Ok(CompletionKind::Message(_))));
        let late = if has_message { std::mem::take(&mut self.late) } else { Vec::new() };
        whole.into_iter().for_each(|one| self.apply_fault(one, done));
        done.extend(late);
        Ok(())
    }

    fn close(&mut self) -> Result<(), VerbsError> {
        if matches!(self.device.standing(self.is_open), Some(DeviceFault::Unresponsive | DeviceFault::Hung)) {
            return Err(VerbsError::new("the device does not destroy the pair"));
        }
        self.inner.close()
    }
}
